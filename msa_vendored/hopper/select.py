"""Block selection on SM90: one kernel that writes no scores, or score pass and ranking apart, in chunks of queries.

The one kernel (:mod:`msa_vendored.hopper.fused_select_kernel`) needs whole tiles of queries, and enough of them to keep
every CTA busy equally long; long contexts and packs have them. Otherwise scores go through memory, at most
:data:`SCORE_BUDGET` at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_vendored.backward.checks import UnsupportedArgumentError
from msa_vendored.backward.stages import count_multiprocessors
from msa_vendored.compiling import Kernel, load_kernel
from msa_vendored.hopper import ARCH
from msa_vendored.hopper.score import HEAD_DIM, ScorePlan, launch_scores, strided_operand
from msa_vendored.hopper.score_tables import ScoreTables, cut_segments, make_segments

SCORE_BUDGET = 1 << 28
"""Scores held at a time: 1 GiB. 32,768 tokens of 4 heads need an eighth of it, 196,608 in one document four chunks."""

MOST_IMBALANCE = 1.15
"""Longest share over the mean up to which the one kernel is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedWork:
    """Work of the kernel that scores and ranks.

    Attributes:
        segments: ``[segments, 8]`` int32, in order of CTAs.
        shares: ``[ctas, 2]`` int32: first segment of a CTA, and the one behind its last.
        imbalance: longest share over the mean.
    """

    segments: Tensor
    shares: Tensor
    imbalance: float


@dataclass(frozen=True, slots=True, eq=False)
class SelectChunk:
    """Queries that are scored and ranked together.

    Attributes:
        tables: work of the score pass; its columns begin at ``begin``.
        begin: first query token.
        end: last query token + 1.
        blocks: most key blocks that one of them sees.
    """

    tables: ScoreTables
    begin: int
    end: int
    blocks: int


def select_on_device(
    index_q: Tensor, index_k: Tensor, plan: ScorePlan, positions: Tensor, *, init: int, local: int, topk: int
) -> Tensor:
    """Select blocks; :func:`msa_vendored.training.select_blocks` says how they are chosen.

    Runs on the current stream of the current device, which must be that of the operands. Allocates the result and, if
    the work is not for the one kernel, scores of one chunk (:data:`SCORE_BUDGET`); only what was written is read.

    Args:
        index_q: ``[T, H, 128]`` bfloat16.
        index_k: ``[Tk, 1, 128]`` bfloat16.
        plan: of :func:`msa_vendored.hopper.score.fmha_sm100_plan`, causal, for these lengths and heads.
        positions: ``[T]`` int64, contiguous, position of each query among its document's keys.
        init: leading blocks that are forced.
        local: whether (positive) the query's own block is forced.
        topk: 4, 8, 16 or 32.

    Returns:
        ``[H, T, topk]`` int32, ascending, then -1.

    Raises:
        UnsupportedArgumentError: (a NotImplementedError) another dtype or head dimension.
    """
    if index_q.dtype != torch.bfloat16 or index_q.shape[2] != HEAD_DIM:
        raise UnsupportedArgumentError(
            f"the sm90 launchers score bfloat16 heads of {HEAD_DIM} only",
            where="arguments index_q and index_k",
            expected=f"torch.bfloat16, head dimension {HEAD_DIM}",
            got=f"{index_q.dtype}, head dimension {index_q.shape[2]}",
            next_command='pass backend="reference"',
        )
    work = find_work(plan, index_q.device)
    if isinstance(work, FusedWork):
        return select_fused(index_q, index_k, work, init=init, local=local, topk=topk)
    return select_in_chunks(index_q, index_k, work, positions, init=init, local=local, topk=topk)


def select_fused(
    index_q: Tensor,
    index_k: Tensor,
    work: FusedWork,
    *,
    init: int,
    local: int,
    topk: int,
    load: Callable[..., Kernel] = load_kernel,
) -> Tensor:
    """Score and rank in one kernel, on checked operands; arguments as in :func:`select_on_device`.

    Args:
        index_q: queries.
        index_k: keys.
        work: covers every query once.
        init: leading blocks that are forced.
        local: whether the own block is forced.
        topk: blocks per query.
        load: ``(compile_stage, *, arch, **options)`` to a launcher; tests emulate here.
    """
    from msa_vendored.hopper.fused_select_kernel import compile_fused_select

    tokens, heads, _ = index_q.shape
    ids = torch.empty((heads, tokens, topk), dtype=torch.int32, device=index_q.device)
    queries, keys = strided_operand(index_q), strided_operand(index_k)
    ctas = work.shares.shape[0]
    load(compile_fused_select, arch=ARCH, topk=topk)(queries, keys, work.segments, work.shares, ids, init, local, ctas)
    return ids


def select_in_chunks(
    index_q: Tensor,
    index_k: Tensor,
    chunks: Sequence[SelectChunk],
    positions: Tensor,
    *,
    init: int,
    local: int,
    topk: int,
    load: Callable[..., Kernel] = load_kernel,
) -> Tensor:
    """Score and rank chunk by chunk, on checked operands; arguments as in :func:`select_on_device`.

    Args:
        index_q: queries.
        index_k: keys.
        chunks: cover every query once.
        positions: of the queries.
        init: leading blocks that are forced.
        local: whether the own block is forced.
        topk: blocks per query.
        load: ``(compile_stage, *, arch, **options)`` to a launcher; tests emulate here.
    """
    from msa_vendored.hopper.select_kernel import compile_select

    rank = load(compile_select, arch=ARCH, topk=topk)
    tokens, heads, _ = index_q.shape
    ids = torch.empty((heads, tokens, topk), dtype=torch.int32, device=index_q.device)
    for chunk in chunks:
        shape = (heads, chunk.blocks, chunk.end - chunk.begin)
        scores = torch.empty(shape, dtype=torch.float32, device=index_q.device)
        launch_scores(index_q, index_k, chunk.tables, scores, load)
        rank(scores, positions[chunk.begin : chunk.end], ids[:, chunk.begin : chunk.end], init, local)
    return ids


def find_work(plan: ScorePlan, device: torch.device) -> FusedWork | tuple[SelectChunk, ...]:
    """Work of a plan on a device, made and copied there once."""
    if device not in plan.work:
        ctas = count_multiprocessors(device)
        work = share_segments(plan, device, ctas=ctas)
        fused = work.imbalance <= MOST_IMBALANCE
        plan.work[device] = work if fused else tuple(make_chunks(plan, device, ctas=ctas))
    return plan.work[device]


def share_segments(plan: ScorePlan, device: torch.device, *, ctas: int) -> FusedWork:
    """Tiles of queries, longest first, each to the CTA with the least work so far."""
    segments = make_segments(plan["qo_segment_lens"], plan["kv_segment_lens"], plan["qo_offset"])
    costs = [tiles + 1 for tiles in segments[:, 5].tolist()]  # loading Q takes about as long as one tile of keys
    loads = [(0, cta) for cta in range(ctas)]
    owned: list[list[int]] = [[] for _ in range(ctas)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        load, cta = loads[0]
        owned[cta].append(row)
        heapq.heapreplace(loads, (load + costs[row], cta))
    ends = torch.tensor([len(rows) for rows in owned]).cumsum(0)
    shares = torch.stack((ends - torch.tensor([len(rows) for rows in owned]), ends), dim=1).int()
    order = torch.tensor([row for rows in owned for row in rows], dtype=torch.int64)
    imbalance = max(load for load, _ in loads) * ctas / max(1, sum(costs))
    return FusedWork(segments[order].to(device), shares.to(device), imbalance)


def make_chunks(plan: ScorePlan, device: torch.device, *, ctas: int, budget: int = SCORE_BUDGET) -> list[SelectChunk]:
    """Runs of query tiles whose scores fit a budget of elements; a run has at least one tile."""
    segments = make_segments(plan["qo_segment_lens"], plan["kv_segment_lens"], plan["qo_offset"])
    chunks, begin = [], 0
    for stop in cut_rows(segments, plan["num_qo_heads"], budget):
        part = segments[begin:stop].clone()
        first, last = int(part[0, 0]), int(part[-1, 0] + part[-1, 1])
        part[:, 6] -= first
        starts = cut_segments(part, ctas)
        tables = ScoreTables(part.to(device), starts.to(device))
        chunks.append(SelectChunk(tables, first, last, int(part[:, 5].max())))
        begin = stop
    return chunks


def cut_rows(segments: Tensor, heads: int, budget: int) -> list[int]:
    """Ends of runs of segments whose scores, heads x most tiles x queries, stay within a budget."""
    ends: list[int] = []
    begin = widest = queries = 0
    for row, (count, tiles) in enumerate(zip(segments[:, 1].tolist(), segments[:, 5].tolist(), strict=True)):
        widest, queries = max(widest, tiles), queries + count
        if row > begin and heads * widest * queries > budget:
            ends.append(row)
            begin, widest, queries = row, tiles, count
    return [*ends, segments.shape[0]]
