"""The results as tables in Markdown, as README has them."""

from __future__ import annotations

from collections.abc import Iterable

from msa_vendored.bench.report import MAIN_PARTS, describe_run
from msa_vendored.bench.runner import Report, Row


def format_markdown(report: Report) -> str:
    """Forward and backward milliseconds, one row for each implementation, one column for each case; then the run."""
    cases = dict.fromkeys((row.case, row.selection) for row in report.rows)
    first = next(iter(cases), ("", ""))[1]
    heads = [case if selection == first else f"{case}, {selection}" for case, selection in cases]
    lines = [f"| forward / backward, ms | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row.implementation for row in report.rows if row.timing):
        cells = [_cell([row for row in report.rows if is_of(row, name, case)]) for case in cases]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{describe_run(report)} Selection {first} unless a column says otherwise.", ""])


def is_of(row: Row, implementation: str, case: tuple[str, str]) -> bool:
    """Whether a row is one of an implementation in a case."""
    return row.implementation == implementation and (row.case, row.selection) == case


def _cell(rows: Iterable[Row]) -> str:
    rows = list(rows)
    times = {row.part: row.timing.median_ms for row in rows if row.timing}
    if not any(part in times for part in MAIN_PARTS):
        return rows[0].status if rows else ""
    text = " / ".join(f"{times[part]:.3g}" if part in times else "–" for part in MAIN_PARTS)
    return f"{text} (wrong)" if any(row.status == "wrong" for row in rows) else text
