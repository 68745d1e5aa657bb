"""Arguments of ``python -m msa_vendored bench``, the progress bar, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_vendored.bench.implementations import Implementation
    from msa_vendored.bench.runner import Report
    from msa_vendored.bench.workload import Case

TOKENS = (4096, 16384, 32768)
PACK_TOKENS = 32768
WHOLE_PACK_TOKENS = 196608


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the benchmark; imports nothing heavy."""
    parser.add_argument("--tokens", type=_numbers, default=TOKENS, help="token counts, comma-separated")
    parser.add_argument("--selections", type=_names, default=("random", "mixed"), help="random,mixed")
    parser.add_argument("--every-selection", action="store_true", help="for sparse peers too, not only the first")
    parser.add_argument("--only", type=_names, default=(), help="implementations whose names contain one of these")
    parser.add_argument("--skip", type=_names, default=(), help="leave out those whose names contain one of these")
    parser.add_argument("--packs", type=Path, help="file of packs instead of drawn ones: case_id and cu_seqlens a line")
    parser.add_argument("--no-packs", action="store_true", help="leave packed documents out")
    parser.add_argument("--no-whole-pack", action="store_true", help=f"leave {WHOLE_PACK_TOKENS:,} packed tokens out")
    parser.add_argument("--iterations", type=int, default=20, help="timed calls of each part")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="fewer calls, at least 3, where a part takes longer"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for an implementation in a case")
    parser.add_argument("--operand-sets", type=int, default=2, help="sets of operands that calls rotate over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--json", type=Path, help="write the results here, as they come")
    parser.add_argument("--from-json", type=Path, help="measure nothing: print and draw these results")
    parser.add_argument("--markdown", type=Path, help="write a table of forward and backward milliseconds here")
    parser.add_argument("--png", type=Path, help="draw roofline and crossover here; needs matplotlib")


def run_bench(options: argparse.Namespace) -> int:
    """Run, print tables, write files; 0 only if every implementation that is there gave right results.

    Raises:
        BenchArgumentError: no CUDA device, or an argument that cannot be used.
    """
    from rich.console import Console

    from msa_vendored.bench.report import print_report
    from msa_vendored.bench.runner import Report

    found = Report.from_dict(json.loads(options.from_json.read_text())) if options.from_json else measure(options)
    print_report(found, Console(width=None if sys.stdout.isatty() else 200))
    if options.markdown:
        from msa_vendored.bench.markdown import format_markdown

        options.markdown.write_text(format_markdown(found))
    if options.png:
        from msa_vendored.bench.plots import save_plots

        save_plots(found, options.png)
    return 1 if any(row.status in ("failed", "wrong") for row in found.rows) else 0


def measure(options: argparse.Namespace) -> Report:
    """Run with a progress bar; the JSON file is written anew as results come, so that a run cut short is not lost."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from msa_vendored.bench import runner

    cases = list_cases(options)
    chosen = choose_implementations(options.only, options.skip)
    settings = runner.Settings(
        options.iterations,
        options.operand_sets,
        options.seed,
        not options.no_check,
        options.seconds,
        options.every_selection,
        options.limit,
    )
    found = runner.Report(runner.describe_environment(), 0.0, 0.0, ())  # refuses a host without a GPU before the bar
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, began = Console(stderr=True), time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("roofs", total=len(cases) * len(chosen))
        done = -1

        def advance(label: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=label)
            if not console.is_terminal:  # there the bar is only drawn at the end
                print(f"{time.monotonic() - began:6.1f} s  {label}", file=sys.stderr, flush=True)

        for found in runner.run_benchmark(cases, chosen, settings, advance):
            if options.json:
                options.json.write_text(json.dumps(found.to_dict(), indent=2) + "\n")
        progress.update(task, completed=len(cases) * len(chosen), description="done")
    return found


def list_cases(options: argparse.Namespace) -> list[Case]:
    """Single documents with the first selection, with the others, then packs, of which the whole ones take longest."""
    first, *others = ([_single(tokens, selection) for tokens in options.tokens] for selection in options.selections)
    return [*first, *(case for cases in others for case in cases), *list_packs(options)]


def _single(tokens: int, selection: str) -> Case:
    from msa_vendored.bench.workload import Case

    return Case(f"{tokens:,} tokens", (tokens,), selection)


def list_packs(options: argparse.Namespace) -> list[Case]:
    """Packs of the file, documents that fit the smaller size and then whole, or drawn ones."""
    from msa_vendored.bench.workload import Case, draw_pack, read_packs

    if options.no_packs:
        return []
    sizes = [PACK_TOKENS] if options.no_whole_pack else [PACK_TOKENS, WHOLE_PACK_TOKENS]
    if options.packs:
        limits = [PACK_TOKENS, None][: len(sizes)]
        return [case for limit in limits for case in read_packs(options.packs, limit)]
    drawn = ((size, draw_pack(size)) for size in sizes)
    return [Case(f"{len(lengths)} drawn documents, {size:,} tokens", lengths) for size, lengths in drawn]


def choose_implementations(only: Sequence[str], skip: Sequence[str] = ()) -> list[Implementation]:
    """All implementations, or those whose names contain one of ``only``, and none of ``skip``.

    Raises:
        BenchArgumentError: none does.
    """
    from msa_vendored.bench.errors import BenchArgumentError
    from msa_vendored.bench.implementations import list_implementations

    known = list_implementations()
    chosen = [peer for peer in known if not only or any(part in peer.name for part in only)]
    chosen = [peer for peer in chosen if not any(part in peer.name for part in skip)]
    if not chosen:
        raise BenchArgumentError(
            "no such implementation",
            where="--only",
            expected="part of one of " + ", ".join(repr(peer.name) for peer in known),
            got=",".join(only),
        )
    return chosen


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part.replace("_", "")) for part in text.split(",") if part)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)
