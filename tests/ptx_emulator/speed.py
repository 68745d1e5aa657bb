"""Instructions and seconds of registered kernels, as a table: ``python -m ptx_emulator.speed KERNEL...|all``.

The best of five runs under the eager schedule, of the kernel's launches alone: processor seconds of one worker with
checks off and with all checks, and, where a launch has several CTAs, wall seconds of one worker and of two with all
checks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from ptx_emulator import subjects
from ptx_emulator.launch import Options
from ptx_emulator.subjects import Outcome, Recorder, Subject

RUNS = 5
COLUMNS = ("kernel", "case", "CTAs", "instructions", "checks off", "all checks", "wall, 1 worker", "wall, 2 workers")


def measure(subject: Subject, run: Callable[[Options], Outcome], options: Options) -> Recorder:
    """The kernel's launches in one run; their seconds are the fewest of some runs.

    Raises:
        AssertionError: a result is wrong; a time of wrong work says nothing.
    """
    whole, recorders = subject.kernel, []
    for _ in range(RUNS):
        recorders.append(Recorder(whole))
        subject.kernels[subject.entry] = recorders[-1]
        try:
            outcome = run(options)
        finally:
            subject.kernels[subject.entry] = whole
        if outcome.wrong or outcome.report.fatal:
            raise AssertionError(f"{subject.entry}: wrong {sorted(outcome.wrong)}, {outcome.report.fatal}")
    recorders[0].cpu_seconds = min(recorder.cpu_seconds for recorder in recorders)
    recorders[0].seconds = min(recorder.seconds for recorder in recorders)
    return recorders[0]


def format_rows(name: str, subject: Subject) -> Iterator[str]:
    """The table's rows for one kernel."""
    cases = [(subject.case, subject.run), *([subject.spread] if subject.spread else [])]
    for words, run in cases:
        off, on = (measure(subject, run, Options(checks=checks)) for checks in (frozenset[str](), Options().checks))
        cells = [name, words, f"{on.ctas}", f"{on.instructions:,}"]
        cells += [f"{r.cpu_seconds:.4f} s ({r.instructions / r.cpu_seconds / 1e6:.1f} M/s)" for r in (off, on)]
        cells.append(f"{on.seconds:.4f} s")
        cells.append(f"{measure(subject, run, Options(workers=2)).seconds:.4f} s" if on.ctas > 1 else "")
        yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator.speed", description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="+", help=f"{', '.join(subjects.REGISTRY)}, module:function, or all")
    parser.add_argument("--row", action="store_true", help="only the rows of one kernel, in this process")
    options = parser.parse_args(arguments)
    names = list(subjects.REGISTRY) if options.kernels == ["all"] else options.kernels
    if options.row:
        torch.set_num_threads(1)  # else PyTorch's idle threads, which spin a while, count as the emulator's
        for subject in subjects.load(names[0]):
            for row in format_rows(f"{names[0]} {subject.label}".rstrip(), subject):
                print(row, flush=True)
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    command = [sys.executable, "-m", "ptx_emulator.speed", "--row"]
    # One process compiles for one architecture.
    return max(subprocess.run([*command, name], check=False).returncode for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
