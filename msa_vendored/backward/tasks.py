"""Task tables and CTA walk of the GPU backward, in NumPy: the specification that the device build must equal.

A *task* is up to ``128 // ratio`` queries of one row of the CSR (one kv head, one 128-key block of one document),
that is 128 folded rows ``slot * ratio + head_in_group`` against 128 keys. Tasks are cut from the rows of the CSR, not
from the work items: however a scheduler splits or orders the items, the tables are the same. The items say which
document and key block a row is, and they must tile the row exactly; a row whose items or queries are inconsistent is
left out whole and reported, so that nothing is counted twice and nothing points outside a tensor.

Order of the tasks: kv head, window of the first query (its token row in q divided by ``window``), key block, first
query. CTAs that run at the same time then read and accumulate the same few windows of q, dO and dQ, which stay in L2,
and a run of tasks of one key block keeps its K, V, dK and dV on the SM.

Nothing here needs a GPU or the CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from msa_vendored.backward.checks import ArgumentValueError

KEYS_PER_BLOCK = 128
FOLDED_ROWS = 128
RATIOS = (1, 2, 4, 8, 16)
"""Query heads per kv head that the kernels fold."""

DEFAULT_WINDOW_QUERIES = 512
"""NeMo measured 256 to 4,096 queries on B200 and kept 512; ours is a runtime argument."""

MAX_BINS = 1 << 22
"""Bound on (kv head, window, key block) bins: 32 MiB of scratch. More are avoided by a wider window."""

DEFAULT_ROWS_PER_CHUNK = 64

OVERFLOW = 1
"""Error bit: more tasks than the tables hold; those beyond are left out."""
INCONSISTENT = 2
"""Error bit: set together with any of the bits below."""
BAD_WORK_COUNT = 4
"""Error bit: work_count is not in 0 to work_capacity; it is clamped."""
BAD_ITEM = 8
"""Error bit: a work item names no row, no document or no block of it, or edges outside its row; it is ignored."""
BAD_ROW = 16
"""Error bit: a row is not tiled once by its items, lies outside q_indices, or shares its key block; it is left out."""
BAD_QUERY = 32
"""Error bit: queries of a row do not ascend, or lie outside its document; the row is left out."""

DESCRIPTOR_WORDS = 8
TASK_ROWS, ROWS_PER_CTA, FULL_CTAS, TAIL_ROWS, CHUNKS, WORK_ITEMS, TASKS = range(7)
"""Words of the descriptor; the last is reserved and 0. Chunks 0 to FULL_CTAS - 1 own ROWS_PER_CTA tasks, the others
TAIL_ROWS, and the table holds TASK_ROWS of the TASKS tasks."""

Ints = npt.NDArray[np.int32]


class Schedule(Protocol):
    """Fields of :class:`~msa_vendored.backward.schedule.MSABackwardSchedule`; int32 CPU tensors or arrays here."""

    @property
    def row_ptr(self) -> Any:
        """First edge of each row, ``[kv heads, rows + 1]``."""

    @property
    def q_indices(self) -> Any:
        """Queries within their document, ``[kv heads, edge capacity]``."""

    @property
    def scheduler_metadata(self) -> Any:
        """Work items, ``[work capacity, 6]``."""

    @property
    def work_count(self) -> Any:
        """Number of valid work items, ``[1]``."""

    @property
    def cu_seqlens(self) -> Any:
        """First token of each document, ``[documents + 1]``."""

    @property
    def document_workspace_starts(self) -> Any:
        """First workspace row of each document, ``[documents]``."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the host knows without looking at the device.

    Attributes:
        tokens: rows of q.
        workspace_rows: rows of K and V, a multiple of 128.
        ratio: query heads per kv head, one of :data:`RATIOS`.
        window: queries per window of the task order.
        capacity: tasks that the tables hold, see :func:`task_capacity`.
        grid: CTAs of the main kernel, see :func:`grid_bound`.
        rows_per_chunk: most tasks in one chunk of the walk.
    """

    tokens: int
    workspace_rows: int
    ratio: int
    window: int
    capacity: int
    grid: int
    rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK


@dataclass(frozen=True, slots=True, eq=False)
class TaskTables:
    """Tables in task order; int32, only the valid rows (the device tables have ``capacity`` rows).

    Attributes:
        meta: ``[tasks, 4]``: document ordinal, kv head, key block of the workspace, number of queries.
        query_rows: ``[tasks, 128 // ratio]``: rows of q; -1 beyond the number of queries.
        query_positions: ``[tasks, 128 // ratio]``: workspace positions of the queries; -1 likewise.
        descriptor: ``[8]``, see :data:`TASK_ROWS` and the names after it.
        error_word: error bits.
    """

    meta: Ints
    query_rows: Ints
    query_positions: Ints
    descriptor: Ints
    error_word: int


def queries_per_task(ratio: int) -> int:
    """Queries that fill the 128 folded rows of a task.

    Raises:
        ArgumentValueError: ``ratio`` is not one of :data:`RATIOS`.
    """
    if ratio not in RATIOS:
        raise ArgumentValueError(
            "query heads per kv head are not supported", where="argument ratio", expected=str(RATIOS), got=str(ratio)
        )
    return FOLDED_ROWS // ratio


def choose_window(
    tokens: int, workspace_rows: int, kv_heads: int, *, window: int = DEFAULT_WINDOW_QUERIES, max_bins: int = MAX_BINS
) -> int:
    """The narrowest of ``window``, ``2 * window``, ... whose bins number at most ``max_bins``.

    Raises:
        ArgumentValueError: one window over all tokens still has too many bins (beyond 2^29 keys x heads).
    """
    while bin_count(tokens, workspace_rows, kv_heads, window) > max_bins:
        if window >= tokens:
            raise ArgumentValueError(
                "too many key blocks for the task build",
                where="workspace rows x kv heads",
                expected=f"at most {max_bins * KEYS_PER_BLOCK}",
                got=str(workspace_rows * kv_heads),
            )
        window *= 2
    return window


def bin_count(tokens: int, workspace_rows: int, kv_heads: int, window: int) -> int:
    """Bins of the task order: (kv head, window, key block)."""
    return kv_heads * -(-tokens // window) * (workspace_rows // KEYS_PER_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchLayout:
    """First words of the sections of the device build's scratch, int32; ``words`` is its size, a multiple of 4.

    Per (kv head, row): ``tilings`` (a checksum of the items' intervals), ``items`` (one item of the row, from 1) and
    ``row_tasks``. Per (kv head, key block): ``owners`` (the row of that block, from 1). Per (kv head, window):
    ``totals`` (tasks). Per bin: ``firsts`` and ``ends``, indices of tasks within their row; in the end ``ends`` holds
    what to add to an index to get its place in the tables. All but ``row_tasks`` are cleared by the build.
    """

    tilings: int
    items: int
    owners: int
    totals: int
    firsts: int
    ends: int
    row_tasks: int
    words: int


def plan_scratch(kv_heads: int, rows: int, tokens: int, workspace_rows: int, window: int) -> ScratchLayout:
    """Scratch of the device build for ``rows`` rows (``row_ptr.shape[1] - 1``) per kv head."""
    groups, bins = kv_heads * -(-tokens // window), bin_count(tokens, workspace_rows, kv_heads, window)
    blocks = kv_heads * (workspace_rows // KEYS_PER_BLOCK)
    sizes = [kv_heads * rows, kv_heads * rows, blocks, groups, bins, bins, kv_heads * rows]
    names = [field.name for field in fields(ScratchLayout)]
    starts = {name: sum(sizes[:i]) for i, name in enumerate(names[:-1])}
    return ScratchLayout(**starts, words=-(-sum(sizes) // 4) * 4)


def task_capacity(edge_capacity: int, work_capacity: int, kv_heads: int, ratio: int, *, rows: int | None = None) -> int:
    """Tasks that no valid schedule can exceed.

    Let row i of the m rows with edges hold n_i of them and Q = 128 // ratio. It gives ceil(n_i / Q), at most
    (n_i + Q - 1) / Q, tasks. All rows together give at most (N + m * (Q - 1)) / Q, where N = sum n_i is at most
    kv_heads * edge_capacity, as every head owns one row of ``q_indices`` and the row pointers ascend. Every row with
    edges has at least one edge and one work item, and is one of ``kv_heads * rows``: m <= min(work_capacity, N,
    kv_heads * rows). The number of tasks is an integer, hence the floor. How the items cut a row does not matter, as
    tasks are cut from rows.

    Args:
        edge_capacity: edges per kv head, ``q_indices.shape[1]``.
        work_capacity: ``scheduler_metadata.shape[0]``.
        kv_heads: index heads.
        ratio: query heads per kv head.
        rows: ``row_ptr.shape[1] - 1``, if known.
    """
    queries, edges = queries_per_task(ratio), kv_heads * edge_capacity
    filled_rows = min(work_capacity, edges) if rows is None else min(work_capacity, edges, kv_heads * rows)
    return (edges + filled_rows * (queries - 1)) // queries


def grid_bound(capacity: int, multiprocessors: int, ctas_per_multiprocessor: int = 1) -> int:
    """CTAs of the main kernel: what the device holds at once, or one for each task that there can be.

    The grid is persistent: CTA c takes the chunks c, c + grid, ... (:func:`cta_intervals`). The walk has at least
    ``min(tasks, grid)`` chunks, so that a CTA is launched without work only if there are fewer tasks than the device
    holds CTAs. At least 1, as an empty grid cannot be launched.
    """
    return max(1, min(capacity, multiprocessors * ctas_per_multiprocessor))


def plan_walk(task_rows: int, grid: int, rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK) -> tuple[int, int, int, int]:
    """Cuts ``task_rows`` tasks into chunks for ``grid`` persistent CTAs; words 1 to 4 of the descriptor.

    The number of chunks is the smallest multiple of ``grid`` that keeps chunks within ``rows_per_chunk`` (but no more
    than there are tasks), and their lengths differ by at most one, the longer first. Every CTA then owns equally many
    chunks and its tasks number at most one per round more than another's; there is no tail. Chunks that run at the
    same time are neighbours, which keeps the windows of the task order in L2.
    """
    rounds = max(1, -(-task_rows // (grid * rows_per_chunk)))
    chunks = min(task_rows, rounds * grid)
    if chunks == 0:
        return 1, 0, 1, 0
    tail_rows, full_ctas = divmod(task_rows, chunks)
    return tail_rows + 1, full_ctas, tail_rows, chunks


def chunk_interval(chunk: int, descriptor: Ints) -> tuple[int, int]:
    """First task of a chunk and the one after its last."""
    rows_per_cta, full, tail = (int(descriptor[i]) for i in (ROWS_PER_CTA, FULL_CTAS, TAIL_ROWS))
    if chunk < full:
        return chunk * rows_per_cta, (chunk + 1) * rows_per_cta
    start = full * rows_per_cta + (chunk - full) * tail
    return start, min(start + tail, int(descriptor[TASK_ROWS]))


def cta_intervals(cta: int, grid: int, descriptor: Ints) -> Iterator[tuple[int, int]]:
    """Task intervals of a CTA of the main kernel, in the order in which it walks them."""
    for chunk in range(cta, int(descriptor[CHUNKS]), grid):
        yield chunk_interval(chunk, descriptor)


def build_tasks(schedule: Schedule, geometry: Geometry) -> TaskTables:
    """The tables, descriptor and error bits that the device build produces, bit for bit."""
    arrays = _Arrays.read(schedule, geometry)
    items, error = _valid_items(arrays, geometry)
    tables: list[tuple[Ints, Ints, Ints, npt.NDArray[np.int64]]] = []
    for head, row in np.argwhere(np.ones((arrays.row_ptr.shape[0], arrays.row_ptr.shape[1] - 1), dtype=bool)):
        row_tables, row_error = _row_tasks(arrays, items, int(head), int(row), geometry)
        error |= row_error
        if row_tables is not None:
            tables.append(row_tables)
    width = queries_per_task(geometry.ratio)
    empty = np.zeros((0, 4), np.int32), np.zeros((0, width), np.int32), np.zeros((0, width), np.int32)
    tables.append((*empty, np.zeros((0, 4), np.int64)))
    meta, query_rows, query_positions, keys = (np.concatenate(parts) for parts in zip(*tables, strict=True))
    tasks = meta.shape[0]
    task_rows = min(tasks, geometry.capacity)
    order = np.lexsort(keys.T[::-1])[:task_rows]
    error |= OVERFLOW if tasks > geometry.capacity else 0
    walk = plan_walk(task_rows, geometry.grid, geometry.rows_per_chunk)
    descriptor = np.array([task_rows, *walk, arrays.work_items, tasks, 0], np.int32)
    error |= INCONSISTENT if error & (BAD_WORK_COUNT | BAD_ITEM | BAD_ROW | BAD_QUERY) else 0
    return TaskTables(meta[order], query_rows[order], query_positions[order], descriptor, error)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    """A schedule as int64 arrays; the first ``work_items`` items only."""

    row_ptr: npt.NDArray[np.int64]
    q_indices: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    document_rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    document_valid: npt.NDArray[np.bool_]
    work_count: int
    work_items: int

    @classmethod
    def read(cls, schedule: Schedule, geometry: Geometry) -> _Arrays:
        names = ("row_ptr", "q_indices", "scheduler_metadata", "cu_seqlens", "document_workspace_starts")
        row_ptr, q_indices, items, cu, starts = (np.asarray(getattr(schedule, n)).astype(np.int64) for n in names)
        count = int(np.asarray(schedule.work_count)[0])
        lengths = np.diff(cu)
        ends = starts + -(-lengths // KEYS_PER_BLOCK) * KEYS_PER_BLOCK
        valid = (lengths > 0) & (cu[:-1] >= 0) & (cu[1:] <= geometry.tokens)
        valid &= (starts >= 0) & (starts % KEYS_PER_BLOCK == 0) & (ends <= geometry.workspace_rows)
        kept = min(max(count, 0), items.shape[0])
        return cls(row_ptr, q_indices, items[:kept], cu[:-1], lengths, starts, valid, count, kept)


def _valid_items(arrays: _Arrays, geometry: Geometry) -> tuple[npt.NDArray[np.int64], int]:
    """Items with edges that name an existing row, document and block, with the key block of the workspace appended."""
    heads, rows = arrays.row_ptr.shape[0], arrays.row_ptr.shape[1] - 1
    head, row, begin, count, document, block = arrays.items.T
    error = BAD_WORK_COUNT if arrays.work_count != arrays.work_items else 0
    valid = (head >= 0) & (head < heads) & (row >= 0) & (row < rows)
    valid &= (document >= 0) & (document < arrays.lengths.shape[0]) & (begin >= 0) & (count >= 0)
    h, r, d = np.where(valid, head, 0), np.where(valid, row, 0), np.where(valid, document, 0)
    first, last = arrays.row_ptr[h, r], arrays.row_ptr[h, r + 1]
    valid &= (first >= 0) & (last <= arrays.q_indices.shape[1]) & (begin + count <= last - first)
    valid &= arrays.document_valid[d] & (block >= 0) & (block * KEYS_PER_BLOCK < arrays.lengths[d])
    error |= 0 if bool(valid.all()) else BAD_ITEM
    global_block = arrays.starts[d] // KEYS_PER_BLOCK + block
    return np.concatenate([arrays.items, global_block[:, None]], axis=1)[valid & (count > 0)], error


def _row_tasks(
    arrays: _Arrays, items: npt.NDArray[np.int64], head: int, row: int, geometry: Geometry
) -> tuple[tuple[Ints, Ints, Ints, npt.NDArray[np.int64]] | None, int]:
    """Meta, query rows, query positions and sort keys of a row's tasks, None if it has none; and error bits."""
    first, last = int(arrays.row_ptr[head, row]), int(arrays.row_ptr[head, row + 1])
    if first == last:
        return None, 0
    if not 0 <= first <= last <= arrays.q_indices.shape[1]:
        return None, BAD_ROW
    mine = items[(items[:, 0] == head) & (items[:, 1] == row)]
    mine = mine[np.argsort(mine[:, 2])]
    begins, ends = [*mine[:, 2], last - first], [0, *(mine[:, 2] + mine[:, 3])]
    named = np.unique(mine[:, [4, 6]], axis=0)
    if begins != ends or len(named) != 1:
        return None, BAD_ROW
    document, block = int(named[0, 0]), int(named[0, 1])
    if row != items[(items[:, 0] == head) & (items[:, 6] == block)][:, 1].max():
        return None, BAD_ROW
    queries = arrays.q_indices[head, first:last]
    if queries[0] < 0 or queries[-1] >= arrays.lengths[document] or (np.diff(queries) <= 0).any():
        return None, BAD_QUERY
    width = queries_per_task(geometry.ratio)
    tasks = -(-queries.shape[0] // width)
    table = np.full(tasks * width, -1, np.int64)
    table[: queries.shape[0]] = queries
    table = table.reshape(tasks, width)
    rows = np.where(table >= 0, table + arrays.document_rows[document], -1).astype(np.int32)
    positions = np.where(table >= 0, table + arrays.starts[document], -1).astype(np.int32)
    named_columns = [np.full(tasks, value) for value in (document, head, block)]
    meta = np.stack([*named_columns, (table >= 0).sum(1)], 1).astype(np.int32)
    keys = np.stack([meta[:, 1], rows[:, 0] // geometry.window, meta[:, 2], rows[:, 0]], 1).astype(np.int64)
    return (meta, rows, positions, keys), 0
