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
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from msa_vendored.compiling import compile_options
from msa_vendored.hopper.score_kernel import (
    HALF,
    HEAD_DIM,
    K_BYTES,
    K_STAGES,
    Q_BYTES,
    SEGMENT_FIELDS,
    TILE,
    copy_tile,
    mask_keys,
    reduce_rows,
)
from msa_vendored.hopper.select_kernel import FORCED, NOTHING, insert_block, rank_score, sort_ids

HEADS = 4
"""Heads of one CTA, which share their keys."""

GROUPS = 2
"""Consumer warpgroups, of two heads each."""

THREADS = 128 * (GROUPS + 1)
PRODUCER_WARP = 4 * GROUPS
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


def make_mma() -> cute.TiledMma:
    """One warpgroup, 64 queries x 128 keys, both operands in shared memory along d."""
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (HALF, TILE)
    )


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
            segments: ``[segments, 8]`` int32, as in :mod:`msa_vendored.hopper.score_kernel`, in order of CTAs.
            shares: ``[ctas, 2]`` int32: first segment of a CTA, and the one behind its last.
            ids: ``[H, T, topk]`` int32, written.
            init: leading blocks that are forced.
            local: whether (positive) the query's own block is forced.
            ctas: rows of ``shares``.
            stream: CUDA stream.
        """
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        q_layout = cute.tile_to_shape(swizzled, (HALF, HEAD_DIM, 2 * HEADS), order=(0, 1, 2))
        k_layout = cute.tile_to_shape(swizzled, (TILE, HEAD_DIM, K_STAGES), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_rows = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[0, 2, 1]))
        k_rows = cute.make_tensor(k.iterator, cute.select(k.layout, mode=[0, 2, 1]))
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, q_rows, cute.select(q_layout, mode=[0, 1]), (HALF, HEAD_DIM))
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k_rows, cute.select(k_layout, mode=[0, 1]), (TILE, HEAD_DIM))
        self.kernel(q_atom, q_tma, k_atom, k_tma, q_layout, k_layout, segments, shares, ids, init, local).launch(
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
        smem = cutlass.utils.SmemAllocator()
        q_smem = smem.allocate_tensor(BFloat16, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
        k_smem = smem.allocate_tensor(BFloat16, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
        barriers = smem.allocate_array(Int64, 2 * HEADS + 2 * K_STAGES)
        q_full, q_empty = barriers, barriers + HEADS
        k_full, k_empty = barriers + 2 * HEADS, barriers + 2 * HEADS + K_STAGES
        first_head = group * HEADS
        heads = cutlass.min(ids.shape[0] - first_head, HEADS)
        if thread == 0:
            for i in cutlass.range_constexpr(HEADS):
                cute.arch.mbarrier_init(q_full + i, 1)
                cute.arch.mbarrier_init(q_empty + i, 4)
            for i in cutlass.range_constexpr(K_STAGES):
                cute.arch.mbarrier_init(k_full + i, 1)
                cute.arch.mbarrier_init(k_empty + i, 4 * ((heads + 1) // 2))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin, end = shares[cta, 0], shares[cta, 1]
        if warp >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == PRODUCER_WARP:
                self.load(
                    q_atom, q_tma, k_atom, k_tma, q_smem, k_smem, q_full, q_empty, k_full, k_empty, segments, begin,
                    end, first_head, heads,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp // 4 * 2 < heads:
                self.select(
                    q_smem, k_smem, q_full, q_empty, k_full, k_empty, segments, ids, begin, end, first_head, heads,
                    init, local, thread,
                )  # fmt: skip

    @cute.jit
    def load(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor,
        q_smem: cute.Tensor, k_smem: cute.Tensor, q_full: cute.Pointer, q_empty: cute.Pointer,
        k_full: cute.Pointer, k_empty: cute.Pointer, segments: cute.Tensor, begin: Int32, end: Int32,
        first_head: Int32, heads: Int32,
    ) -> None:  # fmt: skip
        """The producer warp: Q of every segment, then its tiles of keys, as buffers become free."""
        cpasync.prefetch_descriptor(q_atom)
        cpasync.prefetch_descriptor(k_atom)
        q_phase, stage, k_phase = Int32(1), Int32(0), Int32(1)
        for segment in cutlass.range(begin, end, unroll=1):
            query, key, tiles = segments[segment, 0], segments[segment, 2], segments[segment, 5]
            for head in cutlass.range(heads, unroll=1):
                cute.arch.mbarrier_wait(q_empty + head, q_phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(q_full + head, 2 * Q_BYTES)
                for half in cutlass.range_constexpr(2):
                    rows = cute.domain_offset((query + HALF * half, 0), q_tma[None, None, first_head + head])
                    copy_tile(q_atom, rows, (HALF, HEAD_DIM), q_smem[None, None, 2 * head + half], q_full + head)
            q_phase ^= 1
            for tile in cutlass.range(tiles, unroll=1):
                cute.arch.mbarrier_wait(k_empty + stage, k_phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, K_BYTES)
                rows = cute.domain_offset((key + TILE * tile, 0), k_tma[None, None, 0])
                copy_tile(k_atom, rows, (TILE, HEAD_DIM), k_smem[None, None, stage], k_full + stage)
                stage += 1
                if stage == K_STAGES:
                    stage, k_phase = Int32(0), k_phase ^ 1

    @cute.jit
    def select(
        self, q_smem: cute.Tensor, k_smem: cute.Tensor, q_full: cute.Pointer, q_empty: cute.Pointer,
        k_full: cute.Pointer, k_empty: cute.Pointer, segments: cute.Tensor, ids: cute.Tensor,
        begin: Int32, end: Int32, first_head: Int32, heads: Int32, init: Int32, local: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """A consumer warpgroup: the lists of two heads. Lane l of a quad owns row 8 (l % 2) of half l / 2."""
        lane, mine = thread % 32, cute.arch.make_warp_uniform(thread // 128) * 2
        row = (lane % 4) // 2 * HALF + (thread % 128) // 32 * 16 + lane // 4 + 8 * (lane % 2)
        mma = make_mma()
        part = mma.get_slice(thread % 128)
        q_part = mma.make_fragment_A(part.partition_A(q_smem))
        k_part = mma.make_fragment_B(part.partition_B(k_smem))
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
                cute.arch.mbarrier_wait(k_full + stage, k_phase)
                forced = tile <= own and (tile < init or (tile == own and local > 0))
                for head in cutlass.range_constexpr(2):
                    if mine + head < heads:
                        if tile == 0:
                            cute.arch.mbarrier_wait(q_full + mine + head, q_phase)
                        maximum = -Float32.inf
                        for half in cutlass.range_constexpr(2):
                            self.multiply(sums, q_part, k_part, 2 * (mine + head) + half, stage)
                            mask_keys(sums, tile, keys, first, HALF * half, thread % 128)
                            both = reduce_rows(sums)
                            if lane % 4 == 2 * half:
                                maximum = both[0]
                            if lane % 4 == 2 * half + 1:
                                maximum = both[1]
                        if tile + 1 == tiles:
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive(q_empty + mine + head)
                        rank = rank_score(maximum)
                        if forced:
                            rank = Int32(FORCED)
                        insert_block(ranks[None, head], best[None, head], rank, tile, self.topk)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(k_empty + stage)
                stage += 1
                if stage == K_STAGES:
                    stage, k_phase = Int32(0), k_phase ^ 1
            q_phase ^= 1
            for head in cutlass.range_constexpr(2):
                if mine + head < heads and row < valid:
                    self.store(best[None, head], ids, first_head + mine + head, column + row)

    @cute.jit
    def multiply(
        self, sums: cute.Tensor, q_part: cute.Tensor, k_part: cute.Tensor, query: Int32,
        stage: Int32,
    ) -> None:  # fmt: skip
        """S of 64 queries and 128 keys, waited for."""
        mma = make_mma()  # of its own: what is set on a value must not outlive the branch that this is in
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for kk in cutlass.range_constexpr(HEAD_DIM // 16):
            cute.gemm(mma, sums, q_part[None, None, kk, query], k_part[None, None, kk, stage], sums)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

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

    def strided(*shape: Any) -> Any:
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
        return fake(BFloat16, shape, stride=strides, assumed_align=16)

    def table(columns: int) -> Any:
        return fake(Int32, (cute.sym_int(), columns), stride=(columns, 1), assumed_align=4)

    return cute.compile(
        FusedSelectKernel(topk),
        strided(tokens, heads, HEAD_DIM),
        strided(key_tokens, cute.sym_int(), HEAD_DIM),
        table(SEGMENT_FIELDS),
        table(2),
        fake(Int32, (heads, tokens, topk), stride=(cute.sym_int64(divisibility=4), topk, 1), assumed_align=16),
        Int32(0),
        Int32(0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
