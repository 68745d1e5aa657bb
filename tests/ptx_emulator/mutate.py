"""Deletes each executed synchronisation instruction of a kernel: ``python -m ptx_emulator.mutate KERNEL...|all``.

Prints what was caught, what is shown redundant and what is missed (:mod:`ptx_emulator.mutation` defines them), and
fails below 90 % caught or shown redundant. Kernels are those of :data:`ptx_emulator.subjects.REGISTRY`; ``all`` runs
each in a process of its own, as one process compiles for one architecture.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from ptx_emulator import subjects
from ptx_emulator.mutation import CAUGHT, NAMES, SHOWN, Session, Verdict
from ptx_emulator.redundancy import judge
from ptx_emulator.subjects import Subject

TARGET = 0.9
COLUMNS = (*CAUGHT, *SHOWN, "missed")


def compute_score(verdicts: Sequence[Verdict]) -> float:
    """Share of deletions that were caught or shown redundant; 0 if there is none."""
    good = sum(verdict.name in (*CAUGHT, *SHOWN) for verdict in verdicts)
    return good / len(verdicts) if verdicts else 0.0


def format_table(verdicts: Sequence[Verdict]) -> str:
    """Counts by kind of instruction and verdict, then everything that was not caught, with the evidence."""
    counts = Counter((verdict.site.kind, verdict.name) for verdict in verdicts)
    lines = ["| deleted | all | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for kind, name in NAMES.items():
        row = [counts[kind, column] for column in COLUMNS]
        if sum(row):
            lines.append(f"| {name} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    total = [sum(verdict.name == column for verdict in verdicts) for column in COLUMNS]
    lines.append(f"| **total** | **{len(verdicts)}** | " + " | ".join(f"**{n}**" for n in total) + " |")
    for column in (*SHOWN, "missed"):
        chosen = [verdict for verdict in verdicts if verdict.name == column]
        if chosen:
            lines += ["", f"{column}:", *(f"  {NAMES[v.site.kind]}, {v.site}\n    {v.evidence}" for v in chosen)]
    return "\n".join(lines)


def run_one(name: str, limit: int | None) -> int:
    """Mutate the kernels of one name in this process; the exit status."""
    return max(run_subject(f"{name} {s.label}".rstrip(), s, limit) for s in subjects.load(name))


def run_subject(name: str, subject: Subject, limit: int | None) -> int:
    """Mutate one kernel; 1 if less is caught or shown redundant than the target."""
    started = time.perf_counter()
    session = Session(subject)
    print(f"{name}: {subject.case}\n")
    if not session.sites:
        print("executes no synchronisation\n")
        return 0
    verdicts = judge(session, limit, lambda text: print(text, file=sys.stderr, flush=True))
    caught, score = sum(verdict.name in CAUGHT for verdict in verdicts), compute_score(verdicts)
    print(f"{format_table(verdicts)}\n")
    print(f"{len(verdicts)} deletions, {session.runs} runs, {time.perf_counter() - started:.0f} s")
    print(f"caught {caught}, caught or shown redundant {score:.1%} (target {TARGET:.0%})\n", flush=True)
    return 0 if score >= TARGET else 1


def run_several(names: Sequence[str], limit: int | None) -> int:
    """Mutate kernels, each in a process of its own; 1 if any fails."""
    options = [] if limit is None else ["--limit", str(limit)]
    results = {}
    for name in names:
        command = [sys.executable, "-m", "ptx_emulator.mutate", name, *options]
        results[name] = subprocess.run(command, check=False).returncode
    print("\n".join(f"{name}: {'below the target' if code else 'passed'}" for name, code in results.items()))
    return int(any(results.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="+", help=f"{', '.join(subjects.REGISTRY)}, module:function, or all")
    parser.add_argument("--limit", type=int, help="stop after so many deletions")
    options = parser.parse_args(arguments)
    names = list(subjects.REGISTRY) if options.kernels == ["all"] else options.kernels
    return run_one(names[0], options.limit) if len(names) == 1 else run_several(names, options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
