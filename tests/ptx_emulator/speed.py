"""Instructions and seconds of registered kernels, as a table: ``python -m ptx_emulator.speed KERNEL...|all``.

The best of three runs under the eager schedule; processor seconds of the kernel's launches alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from ptx_emulator import subjects
from ptx_emulator.launch import Options
from ptx_emulator.subjects import Recorder, Subject

RUNS = 3
HEADER = "| kernel | case | instructions | checks off | all checks |\n|---|---|---|---|---|"


def measure(subject: Subject, options: Options) -> tuple[int, float]:
    """Warp instructions of the kernel's launches, and the fewest seconds of some runs.

    Raises:
        AssertionError: a result is wrong; a time of wrong work says nothing.
    """
    whole, instructions, seconds = subject.kernel, 0, float("inf")
    for _ in range(RUNS):
        recorder = Recorder(whole)
        subject.kernels[subject.entry] = recorder
        try:
            outcome = subject.run(options)
        finally:
            subject.kernels[subject.entry] = whole
        if outcome.wrong or outcome.report.fatal:
            raise AssertionError(f"{subject.entry}: wrong {sorted(outcome.wrong)}, {outcome.report.fatal}")
        instructions, seconds = recorder.instructions, min(seconds, recorder.cpu_seconds)
    return instructions, seconds


def format_row(name: str, subject: Subject) -> str:
    """The table's row for one kernel."""
    cells = [name, subject.case]
    for checks in (frozenset[str](), Options().checks):
        instructions, seconds = measure(subject, Options(checks=checks))
        cells += [] if len(cells) > 2 else [f"{instructions:,}"]
        cells.append(f"{seconds:.3f} s ({instructions / seconds / 1e6:.1f} M/s)")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator.speed", description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="+", help=f"{', '.join(subjects.REGISTRY)}, module:function, or all")
    parser.add_argument("--row", action="store_true", help="only the row of one kernel, in this process")
    options = parser.parse_args(arguments)
    names = list(subjects.REGISTRY) if options.kernels == ["all"] else options.kernels
    if options.row:
        for subject in subjects.load(names[0]):
            print(format_row(f"{names[0]} {subject.label}".rstrip(), subject))
        return 0
    print(HEADER, flush=True)
    command = [sys.executable, "-m", "ptx_emulator.speed", "--row"]
    # One process compiles for one architecture.
    return max(subprocess.run([*command, name], check=False).returncode for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
