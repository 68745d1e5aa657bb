"""A picture of a run: time over tokens with the crossover to dense attention, roofline, packs. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msa_vendored.bench.errors import PeerMissingError
from msa_vendored.bench.report import MAIN_PARTS
from msa_vendored.bench.runner import Report, Row
from msa_vendored.bench.workload import HEAD_DIM, KEY_HEADS, QUERY_HEADS

BYTES_PER_ELEMENT = 2
_MARKERS = "osD^vPX*<>"


def save_plots(report: Report, path: Path) -> None:
    """Write the PNG.

    Raises:
        PeerMissingError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PeerMissingError(
            "the picture needs matplotlib",
            where=str(path),
            expected="matplotlib",
            got=str(error),
            next_command="pip install 'msa_vendored[bench]', or leave --png out",
        ) from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    packs = any(select_packs(report.rows, part) for part in MAIN_PARTS)
    figure, axes = plt.subplots(2 + packs, 2, figsize=(14, 10 + 5 * packs))
    for column, part in enumerate(MAIN_PARTS):
        rows = select_rows(report.rows, part)
        draw_times(axes[0][column], rows, part)
        draw_roofline(axes[1][column], report, rows, part)
        if packs:
            draw_packs(axes[2][column], select_packs(report.rows, part), part)
    environment = report.environment
    packages = environment["packages"]
    figure.suptitle(
        f"{environment['card']}, driver {environment['driver']}, torch {packages.get('torch', '?')}, "
        f"CuTe DSL {packages.get('nvidia-cutlass-dsl', '?')}: 64/4 heads, d 128, top-16 of 128-key blocks, causal"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def select_rows(rows: Iterable[Row], part: str) -> list[Row]:
    """Right results of one part on single documents with random selection: the rows that can be compared."""
    return [
        row
        for row in rows
        if row.part == part and row.timing and row.status == "ok" and row.documents == 1 and row.selection == "random"
    ]


def select_packs(rows: Iterable[Row], part: str) -> list[Row]:
    """Right results of one part on several documents with the first selection."""
    found = [row for row in rows if row.documents > 1 and row.timing and row.status == "ok" and row.part == part]
    return [row for row in found if row.selection == found[0].selection]


def draw_packs(axis: Any, rows: list[Row], part: str) -> None:
    """Milliseconds of each pack, implementations side by side."""
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.implementation for row in rows))
    height = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        times = {row.case: row.timing.median_ms for row in rows if row.implementation == name and row.timing}
        places = [cases.index(case) + index * height for case in times]
        bars = axis.barh(places, list(times.values()), height, label=name)
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    middle = 0.4 - height / 2
    axis.set_yticks(
        [place + middle for place in range(len(cases))], [case.replace(", ", ",\n") for case in cases], fontsize=8
    )
    axis.tick_params(axis="x", which="minor", labelbottom=False)
    axis.set(xscale="log", xlabel="ms", title=f"{part}: packed documents")
    axis.invert_yaxis()
    axis.margins(x=0.15)
    if rows:
        axis.legend(fontsize=8)


def draw_times(axis: Any, rows: list[Row], part: str) -> None:
    """Milliseconds over tokens, both logarithmic: where a sparse line falls below the dense ones, it pays."""
    for index, name in enumerate(dict.fromkeys(row.implementation for row in rows)):
        points = sorted((row.tokens, row.timing.median_ms) for row in rows if row.implementation == name and row.timing)
        style = "--" if any(row.dense for row in rows if row.implementation == name) else "-"
        axis.plot(*zip(*points, strict=True), style, marker=_MARKERS[index % len(_MARKERS)], label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=f"{part}: time (dense dashed)")
    ticks = sorted({row.tokens for row in rows})
    axis.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    axis.minorticks_off()
    axis.grid(visible=True, which="both", alpha=0.3)
    if rows:
        axis.legend(fontsize=8)


def draw_roofline(axis: Any, report: Report, rows: list[Row], part: str) -> None:
    """TFLOP/s over FLOPs per byte of compulsory traffic, under what cuBLAS and a copy reach in the same run."""
    for index, name in enumerate(dict.fromkeys(row.implementation for row in rows)):
        points = sorted((find_intensity(row), row.tflops) for row in rows if row.implementation == name and row.tflops)
        axis.plot(*zip(*points, strict=True), marker=_MARKERS[index % len(_MARKERS)], label=name)
    ridge = report.peak_tflops / report.copy_tb_per_s
    widest = max([find_intensity(row) for row in rows] + [4 * ridge])
    axis.plot([ridge / 8, ridge, widest], [report.peak_tflops / 8, report.peak_tflops, report.peak_tflops], "k-")
    axis.set(
        xscale="log", yscale="log", xlabel="FLOPs per compulsory byte", ylabel="TFLOP/s", title=f"{part}: roofline"
    )
    axis.grid(visible=True, which="both", alpha=0.3)


def find_intensity(row: Row) -> float:
    """FLOPs over the bytes that must be moved once: operands read, results written."""
    if row.timing is None or row.tflops is None:
        return 0.0
    return row.tflops * 1e9 * row.timing.median_ms / compulsory_bytes(row.tokens, row.part)


def compulsory_bytes(tokens: int, part: str) -> int:
    """q, k, v read and out written; the backward also reads out and dO and writes dq, dk, dv. bf16 each."""
    wide, narrow = (2, 2) if part == "forward" else (4, 4)
    return tokens * HEAD_DIM * BYTES_PER_ELEMENT * (wide * QUERY_HEADS + narrow * KEY_HEADS)
