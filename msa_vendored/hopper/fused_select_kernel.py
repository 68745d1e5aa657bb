"""Score pass and ranking in one kernel on SM90: block maxima go from tensor cores into the running top-k of a query.

No score reaches device memory, so that contexts of any length are ranked in the memory of the result. A CTA takes whole
tiles of 128 queries (the list of a query has one owner), longest first, in shares that the host balances; where tiles
are too few or too long for that, the two kernels apart are used, which cut tiles (:mod:`msa_vendored.hopper.select`).

Roles, in warpgroups: 0 and 1 take two heads each, four products of 64 queries x 128 keys for each tile of keys; 2
issues all tensor copies. After the two shuffles of a maximum all four lanes of a quad have it, and a quad has four rows
of 128 queries: each lane keeps the list of one, k ranks and k ids for each of its two heads. 240 registers a consumer
thread (64 accumulators and 64 list words at k = 16), 24 a producer thread. Two warpgroups suffice: maxima and insertion
take about as long as the other warpgroup's product.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from msa_vendored.compiling import compile_options
from msa_vendored.hopper.score_tiles import (
    HALF,
    HEADS,
    K_STAGES,
    SEGMENT_FIELDS,
    TILE,
    allocate_buffers,
    fake_rows,
    fake_table,
    init_barriers,
    load_keys,
    load_queries,
    make_copies,
    make_layouts,
    make_mma,
    mask_keys,
    multiply,
    reduce_rows,
)
from msa_vendored.hopper.select_kernel import FORCED, NOTHING, insert_block, rank_score, sort_ids

GROUPS = 2
"""Consumer warpgroups, of two heads each."""

THREADS = 128 * (GROUPS + 1)
PRODUCER_WARP = 4 * GROUPS
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


class FusedSelectKernel:
    """Kernel for one selection width."""

    def __init__(self, topk: int) -> None:
        self.topk = topk

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        segments: cute.Tensor,
        shares: cute.Tensor,
        ids: cute.Tensor,
        init: Int32,
        local: Int32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        """Launch ``ctas`` CTAs for every four heads.

        Args:
            q: ``[T, H, 128]`` bf16, strides of tokens and heads multiples of 8.
            k: ``[Tk, 1, 128]`` bf16, likewise.
            segments: ``[segments, 8]`` int32, as in :mod:`msa_vendored.hopper.score_tiles`, in order of CTAs.
            shares: ``[ctas, 2]`` int32: first segment of a CTA, and the one behind its last.
            ids: ``[H, T, topk]`` int32, written.
            init: leading blocks that are forced.
            local: whether (positive) the query's own block is forced.
            ctas: rows of ``shares``.
            stream: CUDA stream.
        """
        q_layout, k_layout = make_layouts()
        copies = make_copies(q, k, q_layout, k_layout)
        self.kernel(*copies, q_layout, k_layout, segments, shares, ids, init, local).launch(
            grid=(ctas, (q.shape[1] + HEADS - 1) // HEADS, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        segments: cute.Tensor,
        shares: cute.Tensor,
        ids: cute.Tensor,
        init: Int32,
        local: Int32,
    ) -> None:
        """Set up shared memory and barriers, then one role for each warpgroup."""
        thread, _, _ = cute.arch.thread_idx()
        cta, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        buffers = allocate_buffers(q_layout, k_layout)
        first_head = group * HEADS
        heads = cutlass.min(ids.shape[0] - first_head, HEADS)
        init_barriers(buffers, thread, heads, 2)
        begin, end = shares[cta, 0], shares[cta, 1]
        if warp >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == PRODUCER_WARP:
                self.load(q_atom, q_tma, k_atom, k_tma, buffers, segments, begin, end, first_head, heads)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp // 4 * 2 < heads:
                self.select(buffers, segments, ids, begin, end, first_head, heads, init, local, thread)

    @cute.jit
    def load(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor, buffers: Any,
        segments: cute.Tensor, begin: Int32, end: Int32, first_head: Int32, heads: Int32,
    ) -> None:  # fmt: skip
        """The producer warp: Q of every segment, then its tiles of keys, as buffers become free."""
        cpasync.prefetch_descriptor(q_atom)
        cpasync.prefetch_descriptor(k_atom)
        q_phase, stage, k_phase = Int32(1), Int32(0), Int32(1)
        for segment in cutlass.range(begin, end, unroll=1):
            query, key, tiles = segments[segment, 0], segments[segment, 2], segments[segment, 5]
            load_queries(q_atom, q_tma, buffers, query, first_head, heads, q_phase)
            q_phase ^= 1
            for tile in cutlass.range(tiles, unroll=1):
                load_keys(k_atom, k_tma, buffers, key, tile, 0, stage, k_phase)
                stage += 1
                if stage == K_STAGES:
                    stage, k_phase = Int32(0), k_phase ^ 1

    @cute.jit
    def select(
        self, buffers: Any, segments: cute.Tensor, ids: cute.Tensor, begin: Int32, end: Int32, first_head: Int32,
        heads: Int32, init: Int32, local: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """A consumer warpgroup: the lists of two heads. Lane l of a quad owns row 8 (l % 2) of half l / 2."""
        lane, mine = thread % 32, cute.arch.make_warp_uniform(thread // 128) * 2
        row = (lane % 4) // 2 * HALF + (thread % 128) // 32 * 16 + lane // 4 + 8 * (lane % 2)
        mma = make_mma()
        part = mma.get_slice(thread % 128)
        q_part = mma.make_fragment_A(part.partition_A(buffers.q))
        k_part = mma.make_fragment_B(part.partition_B(buffers.k))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((HALF, TILE)), Float32)
        ranks = cute.make_rmem_tensor(cute.make_layout((self.topk, 2)), Int32)
        best = cute.make_rmem_tensor(cute.make_layout((self.topk, 2)), Int32)
        q_phase, stage, k_phase = Int32(0), Int32(0), Int32(0)
        for segment in cutlass.range(begin, end, unroll=1):
            valid, keys, first = segments[segment, 1], segments[segment, 3], segments[segment, 4]
            tiles, column = segments[segment, 5], segments[segment, 6]
            own = (first + row) // TILE
            ranks.fill(NOTHING)
            best.fill(FORCED)
            for tile in cutlass.range(tiles, unroll=1):
                cute.arch.mbarrier_wait(buffers.k_full + stage, k_phase)
                forced = tile <= own and (tile < init or (tile == own and local > 0))
                for head in cutlass.range_constexpr(2):
                    if mine + head < heads:
                        if tile == 0:
                            cute.arch.mbarrier_wait(buffers.q_full + mine + head, q_phase)
                        maximum = -Float32.inf
                        for half in cutlass.range_constexpr(2):
                            # Of its own: what is set on a value must not outlive the branch that this is in.
                            multiply(make_mma(), sums, q_part, k_part, 2 * (mine + head) + half, stage)
                            mask_keys(sums, tile, keys, first, HALF * half, thread % 128)
                            both = reduce_rows(sums)
                            if lane % 4 == 2 * half:
                                maximum = both[0]
                            if lane % 4 == 2 * half + 1:
                                maximum = both[1]
                        if tile + 1 == tiles:
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive(buffers.q_empty + mine + head)
                        rank = rank_score(maximum)
                        if forced:
                            rank = Int32(FORCED)
                        insert_block(ranks[None, head], best[None, head], rank, tile, self.topk)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(buffers.k_empty + stage)
                stage += 1
                if stage == K_STAGES:
                    stage, k_phase = Int32(0), k_phase ^ 1
            q_phase ^= 1
            for head in cutlass.range_constexpr(2):
                if mine + head < heads and row < valid:
                    self.store(best[None, head], ids, first_head + mine + head, column + row)

    @cute.jit
    def store(self, best: cute.Tensor, ids: cute.Tensor, head: Int32, query: Int32) -> None:
        """Ascending ids, then -1."""
        sort_ids(best, self.topk)
        for i in cutlass.range_constexpr(self.topk):
            if best[i] == FORCED:
                best[i] = -1
        cute.autovec_copy(best, ids[head, query, None])


def compile_fused_select(*, arch: str, topk: int) -> Any:
    """Compile for one ``topk`` and any sizes; call it with :meth:`FusedSelectKernel.__call__`'s arguments."""
    tokens, key_tokens, heads = (cute.sym_int() for _ in range(3))
    fake = cute.runtime.make_fake_tensor
    return cute.compile(
        FusedSelectKernel(topk),
        fake_rows(tokens, heads),
        fake_rows(key_tokens, cute.sym_int()),
        fake_table(SEGMENT_FIELDS),
        fake_table(2),
        fake(Int32, (heads, tokens, topk), stride=(cute.sym_int64(divisibility=4), topk, 1), assumed_align=16),
        Int32(0),
        Int32(0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
