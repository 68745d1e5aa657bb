"""The task tables in NumPy: the specification that the device build must equal, bit for bit. See :mod:`~.tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from msa_vendored.backward.tasks import (
    BAD_ITEM,
    BAD_QUERY,
    BAD_ROW,
    BAD_WORK_COUNT,
    DEFAULT_ROWS_PER_CHUNK,
    INCONSISTENT,
    KEYS_PER_BLOCK,
    OVERFLOW,
    plan_walk,
    queries_per_task,
)

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
        window: queries per window of the task order; all tokens in the walk by blocks.
        capacity: tasks that the tables hold, see :func:`task_capacity`.
        grid: CTAs of the main kernel, see :func:`grid_bound`.
        rows_per_chunk: most tasks in one chunk of the even walk.
        walk: one of :data:`~msa_vendored.backward.tasks.WALKS`.
    """

    tokens: int
    workspace_rows: int
    ratio: int
    window: int
    capacity: int
    grid: int
    rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK
    walk: str = "even"


@dataclass(frozen=True, slots=True, eq=False)
class TaskTables:
    """Tables in task order; int32, only the valid rows (the device tables have ``capacity`` rows).

    Attributes:
        meta: ``[tasks, 4]``: document ordinal, kv head, key block of the workspace, number of queries.
        query_rows: ``[tasks, 128 // ratio]``: rows of q; -1 beyond the number of queries.
        query_positions: ``[tasks, 128 // ratio]``: workspace positions of the queries; -1 likewise.
        descriptor: ``[8]`` or more, see :data:`~msa_vendored.backward.tasks.TASK_ROWS` and the names after it.
        error_word: error bits.
    """

    meta: Ints
    query_rows: Ints
    query_positions: Ints
    descriptor: Ints
    error_word: int


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
    walk, starts = _walk(keys[order], geometry)
    descriptor = np.array([task_rows, *walk, arrays.work_items, tasks, 0, *starts], np.int32)
    error |= INCONSISTENT if error & (BAD_WORK_COUNT | BAD_ITEM | BAD_ROW | BAD_QUERY) else 0
    return TaskTables(meta[order], query_rows[order], query_positions[order], descriptor, error)


def _walk(keys: npt.NDArray[np.int64], geometry: Geometry) -> tuple[tuple[int, ...], list[int]]:
    """Words 1 to 4 of the descriptor and those from 8 on, for tasks with these (head, window, block, query)."""
    if geometry.walk == "even":
        return plan_walk(keys.shape[0], geometry.grid, geometry.rows_per_chunk), []
    owner = keys[:, [0, {"windows": 1, "blocks": 2}[geometry.walk]]]
    first = np.ones(owner.shape[0], bool)
    first[1:] = (owner[1:] != owner[:-1]).any(1)
    starts = [*np.flatnonzero(first).tolist(), owner.shape[0]]
    return (0, 0, 0, len(starts) - 1), starts


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
    table = _cut(queries, arrays.document_rows[document], geometry)
    tasks = table.shape[0]
    rows = np.where(table >= 0, table + arrays.document_rows[document], -1).astype(np.int32)
    positions = np.where(table >= 0, table + arrays.starts[document], -1).astype(np.int32)
    named_columns = [np.full(tasks, value) for value in (document, head, block)]
    meta = np.stack([*named_columns, (table >= 0).sum(1)], 1).astype(np.int32)
    keys = np.stack([meta[:, 1], rows[:, 0] // geometry.window, meta[:, 2], rows[:, 0]], 1).astype(np.int64)
    return (meta, rows, positions, keys), 0


def _cut(queries: npt.NDArray[np.int64], first_row: int, geometry: Geometry) -> npt.NDArray[np.int64]:
    """The queries of a row as tasks, padded by -1; in the walk by windows, none crosses a window."""
    width = queries_per_task(geometry.ratio)
    parts = [queries]
    if geometry.walk == "windows":
        parts = np.split(queries, np.flatnonzero(np.diff((first_row + queries) // geometry.window)) + 1)
    padded = [np.pad(part, (0, -len(part) % width), constant_values=-1) for part in parts]
    return np.concatenate(padded).reshape(-1, width)
