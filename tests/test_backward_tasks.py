"""The task tables and the CTA walk: properties of the NumPy mirror, which the device build must equal."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from task_cases import TaskCase, corruptions, make_task_case

from msa_vendored.backward.checks import ArgumentValueError
from msa_vendored.backward.task_mirror import Geometry, TaskTables, build_tasks
from msa_vendored.backward.tasks import (
    BAD_ROW,
    INCONSISTENT,
    MAX_BINS,
    OVERFLOW,
    RATIOS,
    TASK_ROWS,
    TASKS,
    WALKS,
    WORK_ITEMS,
    bin_count,
    choose_owned_window,
    choose_window,
    chunk_interval,
    cta_intervals,
    descriptor_words,
    grid_bound,
    plan_scratch,
    plan_walk,
    queries_per_task,
    task_capacity,
)

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=4)
TABLES = ("meta", "query_rows", "query_positions", "descriptor")


def geometry_of(
    case: TaskCase, *, ratio: int = 16, window: int = 64, capacity: int | None = None, grid: int = 7, walk: str = "even"
) -> Geometry:
    heads, rows = case.row_ptr.shape[0], case.row_ptr.shape[1] - 1
    edges, items = case.q_indices.shape[1], case.scheduler_metadata.shape[0]
    window = case.tokens if walk == "blocks" else window
    if capacity is None:
        windows = -(-case.tokens // window) if walk == "windows" else 1
        capacity = task_capacity(edges, items, heads, ratio, rows=rows, windows=windows)
    return Geometry(case.tokens, case.workspace_rows, ratio, window, capacity, grid, rows_per_chunk=5, walk=walk)


def edges_of_schedule(case: TaskCase) -> set[tuple[int, int, int, int]]:
    """(document, head, key block of the workspace, row of q) of every edge, from the work items alone."""
    edges = set()
    for head, row, begin, count, document, block in case.scheduler_metadata[: int(case.work_count)].tolist():
        start = int(case.row_ptr[head, row]) + begin
        first = int(case.cu_seqlens[document])
        key_block = int(case.document_workspace_starts[document]) // 128 + block
        for query in case.q_indices[head, start : start + count].tolist():
            edge = (document, head, key_block, first + query)
            assert edge not in edges
            edges.add(edge)
    return edges


def edges_of_tables(tables: TaskTables) -> list[tuple[int, int, int, int]]:
    edges = []
    for (document, head, block, count), rows in zip(tables.meta.tolist(), tables.query_rows.tolist(), strict=True):
        assert all(row == -1 for row in rows[count:])
        edges += [(document, head, block, row) for row in rows[:count]]
    return edges


@settings(max_examples=40, deadline=None)
@given(
    SIZES, st.sampled_from(RATIOS), st.integers(1, 4), st.integers(0, 2), st.integers(1, 400), st.integers(0, 99),
    st.sampled_from(WALKS),
)  # fmt: skip
def test_tables_hold_every_edge_once_and_in_order(
    documents: list[int], ratio: int, topk: int, gap: int, window: int, seed: int, walk: str
) -> None:
    """Lost, doubled or misplaced edges; tasks out of the order that keeps windows and key blocks together."""
    case = make_task_case(documents, heads=2, topk=topk, seed=seed, gap_blocks=gap, hot_block=seed % 3 == 0)
    geometry = geometry_of(case, ratio=ratio, window=window, walk=walk)
    window, tables = geometry.window, build_tasks(case, geometry)
    edges = edges_of_tables(tables)
    assert tables.error_word == 0
    assert len(edges) == len(set(edges))
    assert set(edges) == edges_of_schedule(case)
    meta, rows = tables.meta.astype(np.int64), tables.query_rows.astype(np.int64)
    order = list(zip(meta[:, 1], rows[:, 0] // window, meta[:, 2], rows[:, 0], strict=True))
    assert order == sorted(order)
    assert tables.query_rows.shape[1] == queries_per_task(ratio) == 128 // ratio
    shift = (case.document_workspace_starts - case.cu_seqlens[:-1]).numpy()[tables.meta[:, 0]][:, None]
    assert np.array_equal(tables.query_positions, np.where(rows >= 0, rows + shift, -1))
    assert tables.descriptor[[TASK_ROWS, TASKS, WORK_ITEMS, 7]].tolist() == [len(meta)] * 2 + [int(case.work_count), 0]


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(0, 99), st.integers(1, 60), st.integers(1, 60))
def test_tables_do_not_depend_on_how_items_cut_and_order_the_rows(
    documents: list[int], seed: int, one: int, other: int
) -> None:
    """A ragged or shuffled schedule that gives more tasks (NeMo: 192 instead of 76), or another order."""
    cases = [make_task_case(documents, seed=seed, edges_per_item=edges) for edges in (one, other)]
    geometry = geometry_of(cases[0], capacity=10_000)
    first, second = (build_tasks(case, geometry) for case in cases)
    assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in TABLES[:3])


@settings(max_examples=60, deadline=None)
@given(
    SIZES, st.sampled_from(RATIOS), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99), st.booleans(),
    st.sampled_from([1, 40, 10_000]),
)  # fmt: skip
def test_a_valid_schedule_never_exceeds_the_capacity(
    documents: list[int], ratio: int, topk: int, edges_per_item: int, seed: int, rows_known: bool, window: int
) -> None:
    """Zero gradients of a valid schedule because its tasks did not fit: no spare edges, no spare items here."""
    case = make_task_case(documents, topk=topk, seed=seed, edges_per_item=edges_per_item, spare_edges=0, spare_items=0)
    rows = case.row_ptr.shape[1] - 1 if rows_known else None
    sizes = case.q_indices.shape[1], case.scheduler_metadata.shape[0]
    for walk, windows in (("even", 1), ("windows", -(-case.tokens // window))):
        capacity = task_capacity(*sizes, 4, ratio, rows=rows, windows=windows)
        tables = build_tasks(case, geometry_of(case, ratio=ratio, window=window, capacity=capacity, walk=walk))
        assert tables.error_word == 0
        assert len(tables.meta) == tables.descriptor[TASKS] <= capacity


def test_the_capacity_is_reached() -> None:
    """A bound so loose that the tables waste memory: one query per row gives exactly as many tasks."""
    case = make_task_case([1] * 9, heads=2, spare_edges=0, spare_items=0)
    assert len(build_tasks(case, geometry_of(case)).meta) == 18 == task_capacity(9, 18, 2, 16)


def test_tasks_beyond_the_capacity_are_cut_and_reported() -> None:
    """NeMo's answer to overflow: no tasks at all, zero gradients, and nobody told."""
    case = make_task_case([300, 200])
    whole, cut = (build_tasks(case, geometry_of(case, capacity=capacity)) for capacity in (None, 11))
    assert (whole.error_word, cut.error_word) == (0, OVERFLOW)
    assert cut.descriptor[[TASK_ROWS, TASKS]].tolist() == [11, len(whole.meta)]
    assert np.array_equal(cut.query_rows, whole.query_rows[:11])


CORRUPTIONS = [name for name, _, _ in corruptions(make_task_case([300, 129, 5]))]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_inconsistent_rows_are_reported_and_left_out(name: str) -> None:
    """Double counting, a query of another document, an index out of range: everything else must still be right."""
    case = make_task_case([300, 129, 5])
    bit, bad = next((bit, change(case)) for label, bit, change in corruptions(case) if label == name)
    good, tables = (build_tasks(c, geometry_of(case)) for c in (case, bad))
    assert tables.error_word & bit
    assert tables.error_word & INCONSISTENT
    edges = edges_of_tables(tables)
    assert len(edges) == len(set(edges))
    if "document" not in name or "query" in name:
        assert set(edges) <= edges_of_schedule(case)
    assert tables.query_rows.max(initial=-1) < case.tokens
    assert tables.query_positions.max(initial=-1) < case.workspace_rows
    assert (tables.meta[:, 2] < case.workspace_rows // 128).all()
    if name == "missing item":
        assert 0 < len(tables.meta) < len(good.meta)


def test_two_rows_on_one_key_block_are_reported() -> None:
    """A CSR whose rows claim the same block would interleave their tasks."""
    case = make_task_case([300], heads=1)
    metadata = case.scheduler_metadata.clone()
    metadata[metadata[:, 1] == 0, 5] = 1
    bad = TaskCase(*(metadata if f.name == "scheduler_metadata" else getattr(case, f.name) for f in fields(case)))
    tables = build_tasks(bad, geometry_of(case))
    assert tables.error_word == BAD_ROW | INCONSISTENT
    assert set(tables.meta[:, 2].tolist()) == {1, 2}


def facts_walk(rows: int, rows_per_cta: int, multiprocessors: int) -> list[int]:
    """Chunk lengths of the walk that NeMo Automodel publishes, one CTA for each."""
    chunks = -(-rows // rows_per_cta)
    full = min(chunks // multiprocessors * multiprocessors, rows // rows_per_cta)
    left = rows - full * rows_per_cta
    tail = -(-left // multiprocessors)
    if left <= 0:
        words = full, 1, full
    elif tail < 3:
        words = 0, rows_per_cta, chunks
    else:
        words = full, tail, full + -(-left // tail)
    full, tail, ctas = words
    ends = [
        min(rows, (c + 1) * rows_per_cta if c < full else full * rows_per_cta + (c - full + 1) * tail)
        for c in range(ctas)
    ]
    return [stop - start for start, stop in pairwise([0, *ends])]


def test_the_published_walk_is_understood() -> None:
    """Its check values for 8 multiprocessors, as (full CTAs, tail rows, CTAs): the baseline of the next test."""
    checks = {(0, 4): 0, (32, 4): 8, (49, 4): 14, (1, 4): 1, (2401, 64): 40, (2560, 64): 40}
    for (rows, rows_per_cta), ctas in checks.items():
        lengths = facts_walk(rows, rows_per_cta, 8)
        assert len(lengths) == ctas
        assert sum(lengths) == rows
    assert facts_walk(49, 4, 8)[8:] == [3, 3, 3, 3, 3, 2]
    assert facts_walk(2401, 64, 8)[32:] == [45] * 7 + [38]


@pytest.mark.parametrize("grid", [1, 2, 7, 8])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 64])
def test_the_walk_covers_every_task_once_and_evenly(grid: int, rows_per_chunk: int) -> None:
    """Tasks skipped or done twice, idle CTAs, and CTAs that work longer than others; exhaustive over small sizes."""
    for rows in range(600):
        descriptor = np.array([rows, *plan_walk(rows, grid, rows_per_chunk), 0, rows, 0], np.int32)
        chunks = [chunk_interval(c, descriptor) for c in range(descriptor[4])]
        assert [task for start, stop in chunks for task in range(start, stop)] == list(range(rows))
        lengths = [stop - start for start, stop in chunks]
        assert max(lengths, default=0) - min(lengths, default=0) <= 1
        assert max(lengths, default=0) <= rows_per_chunk
        ctas = [list(cta_intervals(cta, grid, descriptor)) for cta in range(grid)]
        assert sorted(interval for cta in ctas for interval in cta) == chunks
        work = [sum(stop - start for start, stop in cta) for cta in ctas]
        assert sum(w > 0 for w in work) == min(rows, grid)
        rounds = -(-len(chunks) // grid)
        assert max(work) <= min(work) + max(rounds, 1)
        assert max(work) <= max(-(-rows // grid), rounds * -(-rows // max(1, len(chunks))))


@pytest.mark.parametrize("rows", [1, 40, 592, 1000, 2399, 2401, 9000, 57_957, 262_144])
def test_the_walk_is_never_longer_than_the_published_one(rows: int) -> None:
    """A walk whose last CTAs finish late; 148 multiprocessors, one CTA at a time on each, first come first served."""
    lengths = facts_walk(rows, 4 if rows <= 2400 else 64, 148)
    finish = np.zeros(148, int)
    for length in lengths:
        finish[finish.argmin()] += length
    descriptor = np.array([rows, *plan_walk(rows, 148), 0, rows, 0], np.int32)
    ours = [sum(stop - start for start, stop in cta_intervals(cta, 148, descriptor)) for cta in range(148)]
    assert max(ours) <= finish.max()
    assert descriptor[4] <= max(len(lengths), 148) * 1.05


@settings(max_examples=30, deadline=None)
@given(
    SIZES, st.sampled_from(RATIOS), st.integers(1, 300), st.sampled_from(["windows", "blocks"]), st.integers(0, 99),
    st.one_of(st.none(), st.integers(0, 20)),
)  # fmt: skip
def test_one_chunk_owns_what_it_adds_to(
    documents: list[int], ratio: int, window: int, walk: str, seed: int, capacity: int | None
) -> None:
    """Two CTAs that add to one row of dQ (walk by windows) or one block of dK and dV (by blocks): not repeatable."""
    case = make_task_case(documents, heads=2, topk=3, seed=seed, hot_block=seed % 2 == 0)
    geometry = geometry_of(case, ratio=ratio, window=window, walk=walk, capacity=capacity)
    tables = build_tasks(case, geometry)
    owners: dict[tuple[int, int], int] = {}
    intervals = [list(cta_intervals(cta, 7, tables.descriptor)) for cta in range(7)]
    chunks = sorted(interval for cta in intervals for interval in cta)
    assert [task for start, stop in chunks for task in range(start, stop)] == list(range(len(tables.meta)))
    for chunk, (start, stop) in enumerate(chunks):
        assert start < stop
        for task in range(start, stop):
            head, block = tables.meta[task, 1:3].tolist()
            queries = [row for row in tables.query_rows[task].tolist() if row >= 0]
            assert len({row // geometry.window for row in queries}) == 1
            for owned in queries if walk == "windows" else [block]:
                assert owners.setdefault((head, owned), chunk) == chunk
    words = descriptor_words(2, case.tokens, case.workspace_rows, geometry.window, walk)
    assert len(tables.descriptor) == 9 + len(chunks) <= words


def test_a_window_for_every_cta() -> None:
    """CTAs without work in the walk by windows, or windows so narrow that most slots of a task stay empty."""
    assert choose_owned_window(32_768, 32_768, 4, 132) == 993
    assert choose_owned_window(600, 640, 4, 132) == 32
    assert choose_owned_window(3, 128, 4, 132) == 3
    with pytest.raises(ArgumentValueError, match="no such walk"):
        descriptor_words(4, 600, 640, 512, "blocks")
    with pytest.raises(ArgumentValueError, match="no such walk"):
        descriptor_words(4, 600, 640, 512, "widows")


@pytest.mark.parametrize(("topk", "ratio"), [(4, 16), (16, 16), (4, 4)])
def test_at_most_a_tenth_of_the_ctas_has_no_work(topk: int, ratio: int) -> None:
    """A grid bound by the capacity: NeMo launches 748 CTAs for the 54 or 206 that have work."""
    case = make_task_case([600], topk=topk)
    geometry = geometry_of(case, ratio=ratio)
    grid = grid_bound(geometry.capacity, 148)
    tables = build_tasks(case, Geometry(600, case.workspace_rows, ratio, 512, geometry.capacity, grid))
    idle = [cta for cta in range(grid) if not list(cta_intervals(cta, grid, tables.descriptor))]
    assert len(idle) <= grid // 10
    assert grid_bound(0, 148) == 1


@given(st.integers(1, 1 << 22), st.integers(0, 1 << 14), st.sampled_from([1, 4, 64]), st.integers(1, 4096))
def test_the_window_is_the_narrowest_that_keeps_the_bins(tokens: int, blocks: int, heads: int, window: int) -> None:
    """Refusing long contexts (NeMo beyond 2^22 bins), or windows wider than needed, which spoil the L2."""
    chosen = choose_window(tokens, blocks * 128, heads, window=window)
    assert bin_count(tokens, blocks * 128, heads, chosen) <= MAX_BINS
    assert (chosen % window, (chosen // window).bit_count()) == (0, 1)
    assert chosen == window or bin_count(tokens, blocks * 128, heads, chosen // 2) > MAX_BINS


def test_one_window_with_too_many_bins_is_refused() -> None:
    """Scratch of more than 32 MiB, or an endless search for a window."""
    assert choose_window(262_145, 262_272, 4) == 1024
    with pytest.raises(ArgumentValueError, match="too many key blocks"):
        choose_window(1 << 20, (MAX_BINS // 4 + 1) * 128, 4)
    with pytest.raises(ArgumentValueError, match="not supported"):
        queries_per_task(3)


@given(
    st.integers(1, 64), st.integers(1, 50), st.integers(1, 5000), st.integers(0, 40), st.integers(1, 600),
    st.sampled_from(WALKS),
)  # fmt: skip
def test_scratch_sections_do_not_overlap(
    heads: int, rows: int, tokens: int, blocks: int, window: int, walk: str
) -> None:
    """A section too short for its counters writes into the next."""
    layout = plan_scratch(heads, rows, tokens, blocks * 128, window, walk=walk)
    windows = -(-tokens // window)
    sizes = [heads * rows] * 2 + [heads * blocks, heads * windows] + [heads * windows * blocks] * 2
    sizes += [heads * windows * blocks * (walk == "windows"), heads * rows]
    starts = [getattr(layout, field.name) for field in fields(layout)][:-1]
    assert starts == np.cumsum([0, *sizes])[:-1].tolist()
    assert layout.words % 4 == 0
    assert sum(sizes) <= layout.words < sum(sizes) + 4


def test_an_empty_schedule_gives_no_tasks() -> None:
    """A division by zero, or a walk with a chunk of no task."""
    case = make_task_case([3], heads=1)
    empty = TaskCase(
        torch.zeros_like(case.row_ptr), case.q_indices, case.scheduler_metadata, torch.zeros_like(case.work_count),
        case.cu_seqlens, case.document_workspace_starts, case.tokens, case.workspace_rows,
    )  # fmt: skip
    tables = build_tasks(empty, geometry_of(case))
    assert tables.descriptor.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert tables.error_word == 0
    assert list(cta_intervals(0, 1, tables.descriptor)) == []
