"""Tables of a run, for people; the JSON form is :meth:`~msa_vendored.bench.runner.Report.to_dict`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from msa_vendored.bench.runner import Report, Row
from msa_vendored.bench.timing import QUOTABLE_CALLS, Timing

MAIN_PARTS = ("forward", "backward")
BASELINE = "FlashAttention-4 dense"


def print_report(report: Report, console: Console) -> None:
    """Print the environment, one table for each case, and what is absent."""
    console.print(describe_run(report))
    for case, selection in dict.fromkeys((row.case, row.selection) for row in report.rows):
        rows = [row for row in report.rows if (row.case, row.selection) == (case, selection)]
        measured = [row for row in rows if row.status not in ("absent", "skipped")]
        console.print(make_table(case, selection, measured))
    for line in list_absent(report.rows):
        console.print(line, markup=False)


def describe_run(report: Report) -> str:
    """Card, driver and versions, in one paragraph."""
    environment = report.environment
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    return (
        f"{environment['card']}, driver {environment['driver']}, CUDA {environment['cuda']}, "
        f"Python {environment['python']}, msa_vendored {environment['msa_vendored']}, {packages}. "
        f"cuBLAS bf16 8192^3: {report.peak_tflops:.0f} TFLOP/s; copy: {report.copy_tb_per_s:.2f} TB/s."
    )


def make_table(case: str, selection: str, rows: Iterable[Row]) -> Table:
    """Side by side: one line for each implementation and part."""
    rows = list(rows)
    table = Table(title=f"{case}, selection {selection}", title_justify="left")
    for heading in ("implementation", "part", "ms", "TFLOP/s", f"x {BASELINE}", "extra MiB", "error", "note"):
        table.add_column(heading, justify="left" if heading in ("implementation", "part", "note") else "right")
    baseline = {row.part: row.timing.median_ms for row in rows if row.implementation == BASELINE and row.timing}
    for row in rows:
        table.add_row(*format_row(row, baseline), style="red" if row.status in ("failed", "wrong") else None)
    return table


def format_row(row: Row, baseline: dict[str, float]) -> list[str]:
    """The cells of a row; ``baseline`` has the milliseconds of dense attention by part."""
    name = f"{row.implementation} (dense)" if row.dense and "dense" not in row.implementation else row.implementation
    if row.timing is None:
        return [name, row.part, row.status, "", "", "", "", row.note]
    ratio = f"{baseline[row.part] / row.timing.median_ms:.2f}" if row.part in baseline else ""
    worst = max((error for tensor, error in row.errors.items() if tensor != "lse"), default=None)
    error = "" if worst is None else f"{worst:.1e}"
    return [
        name,
        row.part,
        format_median(row.timing, f"{row.timing.median_ms:.3f}"),
        "" if row.tflops is None else f"{row.tflops:.0f}",
        ratio,
        f"{row.peak_bytes / 2**20:,.0f}",
        f"{error} WRONG" if row.status == "wrong" else error,
        row.note if row.part == "forward" else "",
    ]


def format_median(timing: Timing, text: str) -> str:
    """The median as text, and of how many calls if these are few."""
    return text if timing.calls >= QUOTABLE_CALLS else f"{text} (of {timing.calls})"


def list_absent(rows: Iterable[Row]) -> list[str]:
    """One line for each implementation that is absent, or left out of some cases, and why."""
    lines: dict[str, Any] = {}
    for row in rows:
        if row.status in ("absent", "skipped"):
            lines.setdefault(f"{row.implementation}: {row.status}, {row.note}", []).append(
                f"{row.case} {row.selection}"
            )
    return [line if "absent" in line else f"{line} ({', '.join(cases)})" for line, cases in lines.items()]
