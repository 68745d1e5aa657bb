"""The score pass on SM90: per query, index head and 128 keys, the largest raw product q.k.

A persistent CTA walks a contiguous run of *steps*; a step is one tile of 128 queries against one tile of 128 keys, for
up to four heads that share the keys. Runs are cut to equal numbers of steps, across tiles and documents, since no step
depends on another. Q of a tile stays in shared memory while its key tiles stream through. Roles, in warpgroups:

- 0 to 3: one head each. S = Q K^T in two halves of 64 queries (64 fp32 a thread), then the maximum over the 128 keys:
  31 comparisons a row and thread, two shuffles. Four warpgroups, so that the tensor cores work for three while one is
  in its maxima; no second accumulator is needed then.
- 4: one thread issues all tensor copies.

112 registers a consumer thread, 24 a producer thread: the pool is what the launch gets, 640 x 96. Memory and copies are
those of :mod:`msa_vendored.hopper.score_tiles`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
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

THREADS = 128 * (HEADS + 1)
PRODUCER_WARP = 4 * HEADS
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 112, 24


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
            segments: ``[segments, 8]`` int32, see :data:`msa_vendored.hopper.score_tiles.SEGMENT_FIELDS`.
            starts: ``[ctas, 3]`` int32: first segment of a CTA, key tile within it, number of steps.
            scores: ``[H, tiles, columns]`` fp32; written only where a query sees a key.
            ctas: rows of ``starts``.
            stream: CUDA stream.
        """
        q_layout, k_layout = make_layouts()
        copies = make_copies(q, k, q_layout, k_layout)
        ratio = q.shape[1] // k.shape[1]
        groups = k.shape[1] * ((ratio + HEADS - 1) // HEADS)
        self.kernel(*copies, make_mma(), q_layout, k_layout, segments, starts, scores, ratio).launch(
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
        buffers = allocate_buffers(q_layout, k_layout)
        groups_per_key_head = (ratio + HEADS - 1) // HEADS
        key_head = group // groups_per_key_head
        within = (group % groups_per_key_head) * HEADS
        first_head = key_head * ratio + within
        heads = ratio - within
        if heads > HEADS:
            heads = Int32(HEADS)
        init_barriers(buffers, thread, heads, 1)
        segment, tile, steps = starts[cta, 0], starts[cta, 1], starts[cta, 2]
        if warp >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == PRODUCER_WARP:
                self.load(
                    q_atom, q_tma, k_atom, k_tma, buffers, segments, segment, tile, steps, first_head, heads, key_head
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp // 4 < heads:
                self.score(mma, buffers, segments, scores, segment, tile, steps, first_head, thread)

    @cute.jit
    def load(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor, buffers: Any,
        segments: cute.Tensor, segment: Int32, tile: Int32, steps: Int32, first_head: Int32, heads: Int32,
        key_head: Int32,
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
                load_queries(q_atom, q_tma, buffers, query, first_head, heads, (q_round & 1) ^ 1)
                q_round += 1
            load_keys(k_atom, k_tma, buffers, key, tile, key_head, stage, k_phase)
            stage += 1
            if stage == K_STAGES:
                stage, k_phase = Int32(0), k_phase ^ 1
            tile += 1
            new_queries = tile == tiles
            if new_queries:
                segment, tile = segment + 1, Int32(0)

    @cute.jit
    def score(
        self, mma: cute.TiledMma, buffers: Any, segments: cute.Tensor, scores: cute.Tensor, segment: Int32,
        tile: Int32, steps: Int32, first_head: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """A consumer warpgroup: the maxima of one head."""
        head = cute.arch.make_warp_uniform(thread // 128)
        local = thread % 128
        part = mma.get_slice(local)
        q_part = mma.make_fragment_A(part.partition_A(buffers.q))
        k_part = mma.make_fragment_B(part.partition_B(buffers.k))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((HALF, TILE)), Float32)
        q_round, stage, k_phase = Int32(0), Int32(0), Int32(0)
        new_queries = Boolean(True)
        valid, keys, first, tiles, column = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for _step in cutlass.range(steps, unroll=1):
            if new_queries:
                valid, keys, first = segments[segment, 1], segments[segment, 3], segments[segment, 4]
                tiles, column = segments[segment, 5], segments[segment, 6]
                cute.arch.mbarrier_wait(buffers.q_full + head, q_round & 1)
                q_round += 1
            cute.arch.mbarrier_wait(buffers.k_full + stage, k_phase)
            for half in cutlass.range_constexpr(2):
                multiply(mma, sums, q_part, k_part, 2 * head + half, stage)
                if half == 1:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(buffers.k_empty + stage)
                        if tile + 1 == tiles:
                            cute.arch.mbarrier_arrive(buffers.q_empty + head)
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
    tiles, columns = cute.sym_int(), cute.sym_int()
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    scores = cute.runtime.make_fake_tensor(Float32, (heads, tiles, columns), stride=strides, assumed_align=4)
    return cute.compile(
        ScoreKernel(),
        fake_rows(tokens, heads),
        fake_rows(key_tokens, key_heads),
        fake_table(SEGMENT_FIELDS),
        fake_table(3),
        scores,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
