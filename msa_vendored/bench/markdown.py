"""The results as tables in Markdown, as README has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msa_vendored.bench.implementations import OURS
from msa_vendored.bench.report import MAIN_PARTS, describe_run, format_median
from msa_vendored.bench.runner import Report, Row

CaseKey = tuple[str, str]
"""Name and selection of a case."""


def format_markdown(report: Report) -> str:
    """Milliseconds of forward and backward, single documents and then packs; then those of our other parts; the run."""
    rows = [row for row in report.rows if row.status not in ("absent", "skipped")]
    single, packed = ([row for row in rows if (row.documents > 1) == packs] for packs in (False, True))
    tables = [format_launchers(single), format_launchers(packed, transposed=True), format_others(rows)]
    first = next((row.selection for row in rows), "")
    said = (
        f"{describe_run(report)} Selection {first} unless a table says otherwise; medians of 20 calls or as they say."
    )
    return "\n".join([*(f"{table}\n" for table in tables if table), said, ""])


def format_launchers(rows: Sequence[Row], *, transposed: bool = False) -> str:
    """Implementations by cases; transposed where there are many cases."""
    names = list(dict.fromkeys(row.implementation for row in rows if row.timing or row.status == "failed"))
    cases = list_cases(rows)
    cells = {(name, case): _cell(find_rows(rows, name, case)) for name in names for case in cases}
    heads = name_cases(cases)
    if transposed:
        lines = [[heads[case], *(cells[name, case] for name in names)] for case in cases]
        return _table(["forward / backward, ms", *names], lines)
    lines = [[name, *(cells[name, case] for case in cases)] for name in names]
    return _table(["forward / backward, ms", *heads.values()], lines)


def format_others(rows: Sequence[Row]) -> str:
    """Our index, selection and autograd, by cases."""
    parts = [row.part for row in rows if row.timing and row.implementation == OURS]
    others = [part for part in dict.fromkeys(parts) if part not in MAIN_PARTS]
    heads = name_cases(list_cases(rows))
    lines = []
    for case, head in heads.items():
        times = _times(find_rows(rows, OURS, case))
        if any(part in times for part in others):
            lines.append([head, *(times.get(part, "") for part in others)])
    return _table([f"{OURS}, ms", *others], lines) if others else ""


def list_cases(rows: Iterable[Row]) -> list[CaseKey]:
    """Cases in order."""
    return list(dict.fromkeys((row.case, row.selection) for row in rows))


def name_cases(cases: Sequence[CaseKey]) -> dict[CaseKey, str]:
    """Headings: the selection is named where it is not the first one's."""
    first = cases[0][1] if cases else ""
    return {case: case[0] if case[1] == first else ", ".join(case) for case in cases}


def find_rows(rows: Iterable[Row], implementation: str, case: CaseKey) -> list[Row]:
    """Rows of an implementation in a case."""
    return [row for row in rows if row.implementation == implementation and (row.case, row.selection) == case]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    cells = [head, ["---"] * len(head), *lines]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in cells).replace("| --- ", "|---").replace("---| |", "---|")
    )


def _times(rows: Iterable[Row]) -> dict[str, str]:
    return {row.part: format_median(row.timing, _digits(row.timing.median_ms)) for row in rows if row.timing}


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:#.3g}".rstrip(".") if milliseconds < 999.5 else f"{milliseconds:,.0f}"


def _cell(rows: Sequence[Row]) -> str:
    times = _times(rows)
    if not any(part in times for part in MAIN_PARTS):
        return rows[0].status if rows else ""
    text = " / ".join(times.get(part, "–") for part in MAIN_PARTS)
    return f"{text} (wrong)" if any(row.status == "wrong" for row in rows) else text
