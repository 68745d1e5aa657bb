"""The score pass on SM90: per query, index head and 128 keys, the largest raw product q.k.

A persistent CTA walks a contiguous run of *steps*; a step is one tile of 128 queries against one tile of 128 keys, for
up to four heads that share the keys. Runs are cut to equal numbers of steps, across tiles and documents, since no step
depends on another. Q of a tile stays in shared memory while its key tiles stream through. Roles, in warpgroups:

- 0 to 3: one head each. S = Q K^T in two halves of 64 queries (64 fp32 a thread), then the maximum over the 128 keys:
  31 comparisons a row and thread, two shuffles. Four warpgroups, so that the tensor cores work for three while one is
  in its maxima; no second accumulator is needed then.
- 4: one thread issues all tensor copies.

128 KB of Q and three stages of 32 KB of K; 112 registers a consumer thread, 24 a
producer thread: the pool is what the launch gets, 640 x 96.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from msa_vendored.compiling import compile_options

HEAD_DIM = 128
TILE = 128
HALF = 64
HEADS = 4
"""Heads of one CTA, one for each consumer warpgroup."""

K_STAGES = 3
THREADS = 128 * (HEADS + 1)
PRODUCER_WARP = 4 * HEADS
Q_BYTES = HALF * HEAD_DIM * 2
K_BYTES = TILE * HEAD_DIM * 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 112, 24

SEGMENT_FIELDS = 8
"""Columns of the segment table: first query token, valid queries, first key token of the document, keys of the
document, key position that query 0 of the tile still sees, key tiles, column of query 0 in the scores, unused."""


@cute.jit
def copy_tile(
    atom: cute.CopyAtom, rows: cute.Tensor, shape: cutlass.Constexpr, target: cute.Tensor, full: cute.Pointer
) -> None:
    """One tensor copy of ``shape`` from the origin of ``rows``."""
    source = cute.local_tile(rows, shape, (0, 0))
    shared, device = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, device, shared, tma_bar_ptr=full)


@cute.jit
def mask_keys(
    sums: cute.Tensor, tile: Int32, keys: Int32, first: Int32, begin: cutlass.Constexpr, local: Int32
) -> None:
    """-inf where the tile crosses the diagonal or the document's end; ``local`` is the thread in its warpgroup.

    Register ``i + 2 j + 4 n`` of a thread is row ``16 warp + lane / 4 + 8 j``, column ``8 n + 2 (lane % 4) + i``.
    """
    last_key = TILE * tile + TILE - 1
    if last_key > first + begin or last_key >= keys:
        values = cute.make_tensor(sums.iterator, cute.make_layout(TILE // 2))
        row = begin + local // 32 * 16 + local % 32 // 4
        key = TILE * tile + 2 * (local % 4)
        for j in cutlass.range_constexpr(2):
            limit = cutlass.min(first + row + 8 * j, keys - 1) - key
            for n in cutlass.range_constexpr(TILE // 8):
                for i in cutlass.range_constexpr(2):
                    if 8 * n + i > limit:
                        values[i + 2 * j + 4 * n] = -Float32.inf


@cute.jit
def reduce_rows(sums: cute.Tensor) -> tuple[Float32, Float32]:
    """Maxima of a thread's two rows over all 128 keys, the same in all lanes of a quad; NaN if one is."""
    values = cute.make_tensor(sums.iterator, cute.make_layout(TILE // 2))
    best = [values[0], values[2]]
    for j in cutlass.range_constexpr(2):
        for n in cutlass.range_constexpr(TILE // 8):
            for i in cutlass.range_constexpr(2):
                best[j] = cute.arch.fmax(best[j], values[i + 2 * j + 4 * n], nan=True)
        for offset in (1, 2):
            best[j] = cute.arch.fmax(best[j], cute.arch.shuffle_sync_bfly(best[j], offset), nan=True)
    return best[0], best[1]


class ScoreKernel:
    """Kernel for any number of heads; nothing is specialised by size."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        segments: cute.Tensor,
        starts: cute.Tensor,
        scores: cute.Tensor,
        ctas: Int32,
        stream: Any,
    ) -> None:
        """Launch ``ctas`` CTAs for every group of heads.

        Args:
            q: ``[T, H, 128]`` bf16, any stride of tokens and heads that is a multiple of 8.
            k: ``[Tk, Hk, 128]`` bf16, likewise; H a multiple of Hk.
            segments: ``[segments, 8]`` int32, see :data:`SEGMENT_FIELDS`.
            starts: ``[ctas, 3]`` int32: first segment of a CTA, key tile within it, number of steps.
            scores: ``[H, tiles, columns]`` fp32; written only where a query sees a key.
            ctas: rows of ``starts``.
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
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (HALF, TILE)
        )
        ratio = q.shape[1] // k.shape[1]
        groups = k.shape[1] * ((ratio + HEADS - 1) // HEADS)
        self.kernel(q_atom, q_tma, k_atom, k_tma, mma, q_layout, k_layout, segments, starts, scores, ratio).launch(
            grid=(ctas, groups, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        segments: cute.Tensor,
        starts: cute.Tensor,
        scores: cute.Tensor,
        ratio: Int32,
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
        groups_per_key_head = (ratio + HEADS - 1) // HEADS
        key_head = group // groups_per_key_head
        within = (group % groups_per_key_head) * HEADS
        first_head = key_head * ratio + within
        heads = ratio - within
        if heads > HEADS:
            heads = Int32(HEADS)
        if thread == 0:
            for i in cutlass.range_constexpr(HEADS):
                cute.arch.mbarrier_init(q_full + i, 1)
                cute.arch.mbarrier_init(q_empty + i, 4)
            for i in cutlass.range_constexpr(K_STAGES):
                cute.arch.mbarrier_init(k_full + i, 1)
                cute.arch.mbarrier_init(k_empty + i, 4 * heads)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        segment, tile, steps = starts[cta, 0], starts[cta, 1], starts[cta, 2]
        if warp >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == PRODUCER_WARP:
                self.load(
                    q_atom, q_tma, k_atom, k_tma, q_smem, k_smem, q_full, q_empty, k_full, k_empty, segments, segment,
                    tile, steps, first_head, heads, key_head,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp // 4 < heads:
                self.score(
                    mma, q_smem, k_smem, q_full, q_empty, k_full, k_empty, segments, scores, segment, tile, steps,
                    first_head, thread,
                )  # fmt: skip

    @cute.jit
    def load(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor,
        q_smem: cute.Tensor, k_smem: cute.Tensor, q_full: cute.Pointer, q_empty: cute.Pointer,
        k_full: cute.Pointer, k_empty: cute.Pointer, segments: cute.Tensor, segment: Int32, tile: Int32, steps: Int32,
        first_head: Int32, heads: Int32, key_head: Int32,
    ) -> None:  # fmt: skip
        """The producer warp: Q of every new tile of queries, then its tiles of keys, as buffers become free."""
        cpasync.prefetch_descriptor(q_atom)
        cpasync.prefetch_descriptor(k_atom)
        q_round, stage, k_phase = Int32(0), Int32(0), Int32(1)
        new_queries = Boolean(True)
        query, key, tiles = Int32(0), Int32(0), Int32(0)
        for _step in cutlass.range(steps, unroll=1):
            if new_queries:
                query, key, tiles = segments[segment, 0], segments[segment, 2], segments[segment, 5]
                for head in cutlass.range(heads, unroll=1):
                    cute.arch.mbarrier_wait(q_empty + head, (q_round & 1) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(q_full + head, 2 * Q_BYTES)
                    for half in cutlass.range_constexpr(2):
                        rows = cute.domain_offset((query + HALF * half, 0), q_tma[None, None, first_head + head])
                        copy_tile(q_atom, rows, (HALF, HEAD_DIM), q_smem[None, None, 2 * head + half], q_full + head)
                q_round += 1
            cute.arch.mbarrier_wait(k_empty + stage, k_phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, K_BYTES)
            rows = cute.domain_offset((key + TILE * tile, 0), k_tma[None, None, key_head])
            copy_tile(k_atom, rows, (TILE, HEAD_DIM), k_smem[None, None, stage], k_full + stage)
            stage += 1
            if stage == K_STAGES:
                stage, k_phase = Int32(0), k_phase ^ 1
            tile += 1
            new_queries = tile == tiles
            if new_queries:
                segment, tile = segment + 1, Int32(0)

    @cute.jit
    def score(
        self, mma: cute.TiledMma, q_smem: cute.Tensor, k_smem: cute.Tensor, q_full: cute.Pointer,
        q_empty: cute.Pointer, k_full: cute.Pointer, k_empty: cute.Pointer, segments: cute.Tensor,
        scores: cute.Tensor, segment: Int32, tile: Int32, steps: Int32, first_head: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """A consumer warpgroup: the maxima of one head."""
        head = cute.arch.make_warp_uniform(thread // 128)
        local = thread % 128
        part = mma.get_slice(local)
        q_part = mma.make_fragment_A(part.partition_A(q_smem))
        k_part = mma.make_fragment_B(part.partition_B(k_smem))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((HALF, TILE)), Float32)
        q_round, stage, k_phase = Int32(0), Int32(0), Int32(0)
        new_queries = Boolean(True)
        valid, keys, first, tiles, column = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for _step in cutlass.range(steps, unroll=1):
            if new_queries:
                valid, keys, first = segments[segment, 1], segments[segment, 3], segments[segment, 4]
                tiles, column = segments[segment, 5], segments[segment, 6]
                cute.arch.mbarrier_wait(q_full + head, q_round & 1)
                q_round += 1
            cute.arch.mbarrier_wait(k_full + stage, k_phase)
            for half in cutlass.range_constexpr(2):
                warpgroup.fence()
                mma.set(warpgroup.Field.ACCUMULATE, False)
                for kk in cutlass.range_constexpr(HEAD_DIM // 16):
                    cute.gemm(mma, sums, q_part[None, None, kk, 2 * head + half], k_part[None, None, kk, stage], sums)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if half == 1:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(k_empty + stage)
                        if tile + 1 == tiles:
                            cute.arch.mbarrier_arrive(q_empty + head)
                self.store_maxima(
                    sums, scores, first_head + head, tile, column, valid, keys, first, HALF * half, local
                )  # fmt: skip
            stage += 1
            if stage == K_STAGES:
                stage, k_phase = Int32(0), k_phase ^ 1
            tile += 1
            new_queries = tile == tiles
            if new_queries:
                segment, tile = segment + 1, Int32(0)

    @cute.jit
    def store_maxima(
        self, sums: cute.Tensor, scores: cute.Tensor, head: Int32, tile: Int32, column: Int32, valid: Int32,
        keys: Int32, first: Int32, begin: cutlass.Constexpr, local: Int32,
    ) -> None:  # fmt: skip
        """Maxima of 64 queries over 128 keys; lanes 0 and 1 of a quad write the quad's two rows."""
        mask_keys(sums, tile, keys, first, begin, local)
        best = reduce_rows(sums)
        lane = local % 32
        mine = best[0]
        if lane % 4 == 1:
            mine = best[1]
        row = begin + local // 32 * 16 + lane // 4 + 8 * (lane % 4)
        seen = TILE * tile <= cutlass.min(first + row, keys - 1)
        if lane % 4 < 2 and row < valid and seen:
            scores[head, tile, column + row] = mine


def compile_score(*, arch: str) -> Any:
    """Compile the kernel for any sizes; call it with the tensors of :meth:`ScoreKernel.__call__` and ``ctas``."""
    tokens, key_tokens, heads, key_heads = (cute.sym_int() for _ in range(4))

    def strided(*shape: Any) -> Any:
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(BFloat16, shape, stride=strides, assumed_align=16)

    def table(columns: int) -> Any:
        shape = (cute.sym_int(), columns)
        return cute.runtime.make_fake_tensor(Int32, shape, stride=(columns, 1), assumed_align=4)

    tiles, columns = cute.sym_int(), cute.sym_int()
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    scores = cute.runtime.make_fake_tensor(Float32, (heads, tiles, columns), stride=strides, assumed_align=4)
    return cute.compile(
        ScoreKernel(),
        strided(tokens, heads, HEAD_DIM),
        strided(key_tokens, key_heads, HEAD_DIM),
        table(SEGMENT_FIELDS),
        table(3),
        scores,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
