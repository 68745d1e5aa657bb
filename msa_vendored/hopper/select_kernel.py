"""Ranks block scores on SM90: forced blocks, causality and top-k, one thread for each query and index head.

A thread reads its query's scores block by block and keeps the best k in registers, best first. A block enters only if
it ranks strictly above the last one, so that of equal scores the lower block id stays. Neighbouring threads have
neighbouring queries, which lie side by side in memory. What binds is reading the scores: k comparisons and 4 k selects
for a block that enters are hidden behind it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from msa_vendored.compiling import compile_options

BLOCK = 128
THREADS = 128
LOADS = 8
"""Scores that a thread has under way."""

FORCED = 0x7FFFFFFF
"""Rank of a forced block: above +inf, which has 0x7F800000."""

NOTHING = -0x80000000
"""Rank below every score; -inf gets it too, since such a block is no candidate."""


@cute.jit
def rank_score(score: Float32) -> Int32:
    """Order-preserving integer of a score: NaN as +inf, -0.0 as 0.0, -inf as :data:`NOTHING`."""
    bits = (score + Float32(0.0)).bitcast(Int32)
    if score != score:
        bits = Int32(0x7F800000)
    if bits < 0:
        bits = bits ^ Int32(0x7FFFFFFF)
    if score == -Float32.inf:
        bits = Int32(NOTHING)
    return bits


@cute.jit
def insert_block(ranks: cute.Tensor, ids: cute.Tensor, rank: Int32, block: Int32, topk: cutlass.Constexpr) -> None:
    """Put a block into its place among the best, if it ranks strictly above the last one."""
    if rank > ranks[topk - 1]:
        below = rank > ranks[topk - 1]
        for i in cutlass.range_constexpr(topk - 1, 0, -1):
            above = rank > ranks[i - 1]
            ranks[i] = cutlass.select_(above, ranks[i - 1], cutlass.select_(below, rank, ranks[i]))
            ids[i] = cutlass.select_(above, ids[i - 1], cutlass.select_(below, block, ids[i]))
            below = above
        ranks[0] = cutlass.select_(below, rank, ranks[0])
        ids[0] = cutlass.select_(below, block, ids[0])


@cute.jit
def sort_ids(ids: cute.Tensor, topk: cutlass.Constexpr) -> None:
    """Ascending order by a bitonic network; ids are in registers."""
    for log_size in cutlass.range_constexpr(1, topk.bit_length()):
        for log_stride in cutlass.range_constexpr(log_size - 1, -1, -1):
            for i in cutlass.range_constexpr(topk):
                j = i ^ (1 << log_stride)
                if cutlass.const_expr(j > i):
                    low, high = cutlass.min(ids[i], ids[j]), cutlass.max(ids[i], ids[j])
                    if cutlass.const_expr(i & (1 << log_size) == 0):
                        ids[i], ids[j] = low, high
                    else:
                        ids[i], ids[j] = high, low


class SelectKernel:
    """Kernel for one selection width."""

    def __init__(self, topk: int) -> None:
        self.topk = topk

    @cute.jit
    def __call__(
        self, scores: cute.Tensor, positions: cute.Tensor, ids: cute.Tensor, init: Int32, local: Int32, stream: Any
    ) -> None:
        """Rank.

        Args:
            scores: ``[H, blocks, T]`` fp32, read for blocks up to the query's own only.
            positions: ``[T]`` int64, position of each query among its document's keys.
            ids: ``[H, T, topk]`` int32, written.
            init: leading blocks that are forced.
            local: whether (positive) the query's own block is forced.
            stream: CUDA stream.
        """
        grid = ((positions.shape[0] + THREADS - 1) // THREADS, scores.shape[0], 1)
        self.kernel(scores, positions, ids, init, local).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, scores: cute.Tensor, positions: cute.Tensor, ids: cute.Tensor, init: Int32, local: Int32) -> None:
        """One thread a query."""
        thread, _, _ = cute.arch.thread_idx()
        cta, head, _ = cute.arch.block_idx()
        query = cta * THREADS + thread
        if query < positions.shape[0]:
            own = Int32(positions[query]) // BLOCK
            ranks = cute.make_rmem_tensor(cute.make_layout(self.topk), Int32)
            best = cute.make_rmem_tensor(cute.make_layout(self.topk), Int32)
            ranks.fill(NOTHING)
            best.fill(FORCED)
            loaded = cute.make_rmem_tensor(cute.make_layout(LOADS), Float32)
            for begin in cutlass.range(0, own + 1, LOADS, unroll=1):
                for i in cutlass.range_constexpr(LOADS):
                    loaded[i] = -Float32.inf
                    if begin + i <= own:
                        loaded[i] = scores[head, begin + i, query]
                for i in cutlass.range_constexpr(LOADS):
                    block = begin + i
                    rank = rank_score(loaded[i])
                    if block <= own and (block < init or (block == own and local > 0)):
                        rank = Int32(FORCED)
                    insert_block(ranks, best, rank, block, self.topk)
            sort_ids(best, self.topk)
            for i in cutlass.range_constexpr(self.topk):
                if best[i] == FORCED:
                    best[i] = -1
            cute.autovec_copy(best, ids[head, query, None])


def compile_select(*, arch: str, topk: int) -> Any:
    """Compile for one ``topk`` and any sizes; call it with the arguments of :meth:`SelectKernel.__call__`."""
    heads, blocks, tokens = (cute.sym_int() for _ in range(3))
    fake = cute.runtime.make_fake_tensor
    return cute.compile(
        SelectKernel(topk),
        fake(Float32, (heads, blocks, tokens), stride=(cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4),
        fake(Int64, (tokens,), stride=(1,), assumed_align=8),
        fake(Int32, (heads, tokens, topk), stride=(cute.sym_int64(divisibility=4), topk, 1), assumed_align=16),
        Int32(0),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
