"""Tasks of the GPU backward: what they are, how many there can be, and how CTAs walk them. No GPU and no CuTe here.

A *task* is up to ``128 // ratio`` queries of one row of the CSR (one kv head, one 128-key block of one document),
that is 128 folded rows ``slot * ratio + head_in_group`` against 128 keys. Tasks are cut from the rows of the CSR, not
from the work items: however a scheduler splits or orders the items, the tables are the same. The items say which
document and key block a row is, and they must tile the row exactly; a row whose items or queries are inconsistent is
left out whole and reported, so that nothing is counted twice and nothing points outside a tensor.

Order of the tasks: kv head, window of the first query (its token row in q divided by ``window``), key block, first
query. CTAs that run at the same time then read and accumulate the same few windows of q, dO and dQ, which stay in L2,
and a run of tasks of one key block keeps its K, V, dK and dV on the SM.

Walks (:data:`WALKS`) cut the tasks into chunks; a CTA of the persistent main kernel takes every ``grid``-th chunk:

- ``"even"``: chunks of equal length, for speed. CTAs add to the same rows of dQ and the same blocks of dK and dV, in
  whatever order they get there.
- ``"windows"``: tasks do not cross windows, and a chunk holds all tasks of one (kv head, window). No other CTA adds to
  its rows of dQ, so the order of additions is that of the table.
- ``"blocks"``: one window for all queries, and a chunk holds all tasks of one (kv head, key block): likewise dK and dV.

:mod:`msa_vendored.backward.task_mirror` makes the tables in NumPy, :mod:`msa_vendored.backward.task_build` on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

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

Descriptor = Sequence[int] | npt.NDArray[np.int32]

WALKS = ("even", "windows", "blocks")

DESCRIPTOR_WORDS = 8
TASK_ROWS, ROWS_PER_CTA, FULL_CTAS, TAIL_ROWS, CHUNKS, WORK_ITEMS, TASKS = range(7)
"""Words of the descriptor; the last is reserved and 0. Chunks 0 to FULL_CTAS - 1 own ROWS_PER_CTA tasks, the others
TAIL_ROWS, and the table holds TASK_ROWS of the TASKS tasks. In walks by windows or blocks these three are 0, and the
words from 8 on are the first task of every chunk and, after the last, TASK_ROWS."""


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
    ``totals`` (tasks). Per bin: ``firsts`` and ``ends``, indices of tasks within their row (walk by windows: of edges)
    and ``places``, in the tables: of a bin's first task, or what to add to an index to get its place; apart from
    ``ends`` only in the walk by windows. All but ``row_tasks`` are cleared by the build.
    """

    tilings: int
    items: int
    owners: int
    totals: int
    firsts: int
    ends: int
    places: int
    row_tasks: int
    words: int


def plan_scratch(
    kv_heads: int, rows: int, tokens: int, workspace_rows: int, window: int, *, walk: str = "even"
) -> ScratchLayout:
    """Scratch of the device build for ``rows`` rows (``row_ptr.shape[1] - 1``) per kv head."""
    groups, bins = kv_heads * -(-tokens // window), bin_count(tokens, workspace_rows, kv_heads, window)
    blocks = kv_heads * (workspace_rows // KEYS_PER_BLOCK)
    places = bins if walk == "windows" else 0
    sizes = [kv_heads * rows, kv_heads * rows, blocks, groups, bins, bins, places, kv_heads * rows]
    names = [field.name for field in fields(ScratchLayout)]
    starts = {name: sum(sizes[:i]) for i, name in enumerate(names[:-1])}
    return ScratchLayout(**starts, words=-(-sum(sizes) // 4) * 4)


def task_capacity(
    edge_capacity: int, work_capacity: int, kv_heads: int, ratio: int, *, rows: int | None = None, windows: int = 1
) -> int:
    """Tasks that no valid schedule can exceed.

    Let row i of the m rows with edges hold n_i of them and Q = 128 // ratio. It gives ceil(n_i / Q), at most
    (n_i + Q - 1) / Q, tasks. All rows together give at most (N + m * (Q - 1)) / Q, where N = sum n_i is at most
    kv_heads * edge_capacity, as every head owns one row of ``q_indices`` and the row pointers ascend. Every row with
    edges has at least one edge and one work item, and is one of ``kv_heads * rows``: m <= min(work_capacity, N,
    kv_heads * rows). The number of tasks is an integer, hence the floor. How the items cut a row does not matter, as
    tasks are cut from rows. Where they are cut at windows too, the same holds for the parts of rows that have edges:
    at most N, and at most ``windows`` of each row.

    Args:
        edge_capacity: edges per kv head, ``q_indices.shape[1]``.
        work_capacity: ``scheduler_metadata.shape[0]``.
        kv_heads: index heads.
        ratio: query heads per kv head.
        rows: ``row_ptr.shape[1] - 1``, if known.
        windows: windows per kv head in the walk by windows, else 1.
    """
    queries, edges = queries_per_task(ratio), kv_heads * edge_capacity
    filled_rows = work_capacity if rows is None else min(work_capacity, kv_heads * rows)
    return (edges + min(edges, filled_rows * windows) * (queries - 1)) // queries


def choose_owned_window(tokens: int, workspace_rows: int, kv_heads: int, grid: int) -> int:
    """Queries per window of the walk by windows: one chunk, all heads together, for each CTA of the main kernel.

    Not narrower than 32 queries, below which most tasks would be nearly empty.
    """
    window = max(32, -(-tokens * kv_heads // grid))
    return choose_window(tokens, workspace_rows, kv_heads, window=min(window, max(tokens, 1)))


def descriptor_words(kv_heads: int, tokens: int, workspace_rows: int, window: int, walk: str) -> int:
    """Size of the descriptor: the walks by windows and blocks list their chunks in it.

    Raises:
        ArgumentValueError: the walk is unknown, or by blocks in more than one window.
    """
    windows = -(-tokens // window)
    if walk not in WALKS or (walk == "blocks" and windows > 1):
        raise ArgumentValueError(
            "no such walk", where="argument walk", expected=f"one of {WALKS}; blocks with one window", got=walk
        )
    groups = {"even": 0, "windows": windows, "blocks": workspace_rows // KEYS_PER_BLOCK}[walk]
    return DESCRIPTOR_WORDS + (kv_heads * groups + 1 if groups else 0)


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


def chunk_interval(chunk: int, descriptor: Descriptor) -> tuple[int, int]:
    """First task of a chunk and the one after its last."""
    rows_per_cta, full, tail = (int(descriptor[i]) for i in (ROWS_PER_CTA, FULL_CTAS, TAIL_ROWS))
    if rows_per_cta == 0:
        return int(descriptor[DESCRIPTOR_WORDS + chunk]), int(descriptor[DESCRIPTOR_WORDS + chunk + 1])
    if chunk < full:
        return chunk * rows_per_cta, (chunk + 1) * rows_per_cta
    start = full * rows_per_cta + (chunk - full) * tail
    return start, min(start + tail, int(descriptor[TASK_ROWS]))


def cta_intervals(cta: int, grid: int, descriptor: Descriptor) -> Iterator[tuple[int, int]]:
    """Task intervals of a CTA of the main kernel, in the order in which it walks them."""
    for chunk in range(cta, int(descriptor[CHUNKS]), grid):
        yield chunk_interval(chunk, descriptor)
