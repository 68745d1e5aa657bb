"""The sparse forward on SM90: partial outputs of (query, key block) pairs, and their sums, in one persistent kernel.

Most CTAs compute. One takes segments (:mod:`msa_vendored.hopper.segments`) from a counter. K and V of the segment's key
block stay in shared memory while its queries stream through: 64 rows a tile, which are ``64 // ratio`` queries times
the heads of the group. Roles, in warpgroups of 128 threads:

- 0, 1, 2: each takes every third tile: S = Q K^T (64 x 128), softmax within the block, O = P V with P as register
  operand, then the normalised O as bf16 into the place of its Q. The warpgroups are independent, so that the tensor
  cores work for one while the others are in softmax.
- 3: warp 0 takes segments and issues all copies to shared memory (:mod:`msa_vendored.hopper.forward_loader`); warp 1
  clears rows of V past the end of a document, where the next document's values may be infinite or NaN, and 0 * NaN
  would spread; warp 2 issues the copies of O to device memory, one of 4 KB for each query at 16 heads, and counts
  finished segments.

The other CTAs, and those that compute once there is nothing left, merge (:mod:`msa_vendored.hopper.combine`), bucket by
bucket in the order of the segments, behind those that compute, and wait for counters. Nobody who computes waits for a
merge, so that there is no deadlock however few CTAs run at the same time.

128 registers a thread suffice, since O takes over the registers of S.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from msa_vendored.compiling import compile_options
from msa_vendored.hopper.combine import WARP_ELEMENTS, PartialMerger
from msa_vendored.hopper.forward_loader import BLOCK, HEAD_DIM, KV_STAGES, Q_STAGES, ROWS, ForwardLoader
from msa_vendored.hopper.segments import COUNTER_FIELDS, QUERY_MASK, SEGMENT_FIELDS

CONSUMERS = 3
LOADER, CLEANER, STORER = 4 * CONSUMERS, 4 * CONSUMERS + 1, 4 * CONSUMERS + 2
THREADS = 32 * (STORER + 1)


class ForwardMain:
    """Kernel for one head ratio.

    Args:
        ratio: query heads per index head, 1 to 16.
        topk: slots of a query in the partial outputs.
        scaled: whether the output is multiplied by a float32 in device memory.
    """

    def __init__(self, ratio: int, topk: int, scaled: bool) -> None:
        self.ratio, self.topk = ratio, topk
        self.merger = PartialMerger(ratio, topk, scaled)
        self.queries = ROWS // ratio
        self.loader = ForwardLoader(ratio)
        self.boxes, self.box = self.loader.boxes, self.loader.box

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        qsplit_indices: cute.Tensor,
        segments: cute.Tensor,
        tickets: cute.Tensor,
        buckets: cute.Tensor,
        split_counts: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        output_scale: cute.Tensor,
        chunk: Int32,
        window_tokens: Int32,
        windows_per_chunk: Int32,
        scale_log2: Float32,
        ctas: Int32,
        merge_ctas: Int32,
        stream: Any,
    ) -> None:
        """Launch ``ctas`` persistent CTAs over one chunk, of which ``merge_ctas`` do nothing but merge."""
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        kv_layout = cute.tile_to_shape(swizzled, (BLOCK, HEAD_DIM, KV_STAGES), order=(0, 1, 2))
        # Distances of groups of 8 rows and of halves in a tile of Q: a row of a box is one swizzle span of 64 columns.
        group, half = (1024, 512) if self.boxes == 1 else (512, ROWS * 64)
        q_tile = cute.make_layout(((8, ROWS // 8), (64, 2), Q_STAGES), stride=((64, group), (1, half), ROWS * HEAD_DIM))
        q_layout = cute.make_composed_layout(swizzled.inner, 0, q_tile)
        box = cute.make_layout(self.box, stride=(1, 64, half, group))
        box_layout = cute.make_composed_layout(swizzled.inner, 0, box)
        load = cpasync.CopyBulkTensorTileG2SOp()
        heads = self.box[1]
        q_boxes = cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (64, heads, 2, q.shape[1] // heads, q.shape[0]),
                stride=(1, HEAD_DIM, 64, heads * HEAD_DIM, q.shape[1] * HEAD_DIM),
            ),
        )
        k_rows = cute.make_tensor(k.iterator, cute.select(k.layout, mode=[0, 2, 1]))
        v_rows = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[0, 2, 1]))
        kv_box = cute.select(kv_layout, mode=[0, 1])
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, q_boxes, box_layout, self.box)
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k_rows, kv_box, (BLOCK, HEAD_DIM))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, v_rows, kv_box, (BLOCK, HEAD_DIM))
        qk_mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (ROWS, BLOCK)
        )
        pv_mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS, HEAD_DIM),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, qk_mma, pv_mma, q_layout, kv_layout, qsplit_indices, segments,
            tickets, buckets, split_counts, partial_out, partial_lse, out, lse, output_scale, chunk, window_tokens,
            windows_per_chunk, scale_log2, merge_ctas,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tma: cute.Tensor,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        kv_layout: cute.ComposedLayout,
        qsplit_indices: cute.Tensor,
        segments: cute.Tensor,
        tickets: cute.Tensor,
        buckets: cute.Tensor,
        split_counts: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        output_scale: cute.Tensor,
        chunk: Int32,
        window_tokens: Int32,
        windows_per_chunk: Int32,
        scale_log2: Float32,
        merge_ctas: Int32,
    ) -> None:
        """Set up shared memory and barriers, then one role for each warpgroup."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.utils.SmemAllocator()
        # 96 KB of Q, 64 KB each of K and V, or what merges need, and a little bookkeeping.
        q_elements, kv_elements = Q_STAGES * ROWS * HEAD_DIM, KV_STAGES * BLOCK * HEAD_DIM
        elements = max(q_elements + 2 * kv_elements, 4 * CONSUMERS * WARP_ELEMENTS)
        storage = smem.allocate_tensor(BFloat16, cute.make_layout(elements), byte_alignment=1024).iterator
        tiles = cute.make_tensor(storage, cute.make_layout((ROWS * HEAD_DIM, Q_STAGES)))
        q_smem = self.view(storage, q_layout)
        k_smem = self.view(storage + q_elements, kv_layout)
        v_smem = self.view(storage + (q_elements + kv_elements), kv_layout)
        barriers = smem.allocate_array(Int64, 3 * Q_STAGES + 3 * KV_STAGES)
        info = smem.allocate_tensor(Int32, cute.make_layout((SEGMENT_FIELDS, KV_STAGES)), byte_alignment=8)
        meta = smem.allocate_tensor(Int32, cute.make_layout((self.queries + 1, Q_STAGES)), byte_alignment=8)
        arrival = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        # A stage of tiles goes from Q to O to empty, one of K and V from full to clean to empty.
        q_full, o_full, q_empty = barriers, barriers + Q_STAGES, barriers + 2 * Q_STAGES
        kv_full, kv_empty = barriers + 3 * Q_STAGES, barriers + 3 * Q_STAGES + KV_STAGES
        v_clean = barriers + 3 * Q_STAGES + 2 * KV_STAGES
        if thread == 0:
            for i in cutlass.range_constexpr(Q_STAGES):
                cute.arch.mbarrier_init(q_full + i, 1)
                cute.arch.mbarrier_init(o_full + i, 4)
                cute.arch.mbarrier_init(q_empty + i, 1)
            for i in cutlass.range_constexpr(KV_STAGES):
                cute.arch.mbarrier_init(kv_full + i, 1)
                cute.arch.mbarrier_init(kv_empty + i, 4 * CONSUMERS + 1)
                cute.arch.mbarrier_init(v_clean + i, 1)
            cute.arch.mbarrier_init_fence()
            arrival[0] = cute.arch.atomic_add(
                tickets.iterator + (chunk * COUNTER_FIELDS + 2), Int32(1), sem="relaxed", scope="gpu"
            )
        if thread < Q_STAGES:
            # What rows beyond the last query of a tile read.
            meta[self.queries, thread] = -1
        if const_expr(self.queries * self.ratio < ROWS):
            self.clear_unused_rows(q_smem, thread)
        cute.arch.sync_threads()
        chunk_buckets = partial_lse.shape[1] * windows_per_chunk
        # By the order of their start, merging CTAs are spread evenly. They wait for those that compute, which wait for
        # nobody: if other kernels hold the rest of the device, those start when these are through.
        computes = (arrival[0] * merge_ctas) % cute.arch.grid_dim()[0] >= merge_ctas
        if computes:
            if warp == LOADER:
                self.loader.load(
                    q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, q_smem, k_smem, v_smem, meta, info, q_full, q_empty,
                    kv_full, kv_empty, qsplit_indices, segments, tickets, buckets, chunk, chunk_buckets,
                    windows_per_chunk,
                )  # fmt: skip
            elif warp == CLEANER:
                self.clear_tails(v_smem, info, kv_full, v_clean)
            elif warp == STORER:
                self.store_tiles(
                    tiles, meta, info, o_full, q_empty, kv_full, kv_empty, partial_out, partial_lse.shape[1],
                    chunk * windows_per_chunk * window_tokens, buckets,
                )  # fmt: skip
            else:
                self.consume(
                    qk_mma, pv_mma, tiles, q_smem, k_smem, v_smem, meta, info, q_full, o_full, kv_full, kv_empty,
                    v_clean, partial_lse, chunk * windows_per_chunk * window_tokens, scale_log2,
                )  # fmt: skip
            if warp < 4 * CONSUMERS or warp == STORER:
                # Shared memory is used anew.
                cute.arch.barrier(barrier_id=1 + CONSUMERS, number_of_threads=128 * CONSUMERS + 32)
        if warp < 4 * CONSUMERS:
            self.merger.merge(
                storage + warp * WARP_ELEMENTS, partial_out, partial_lse, split_counts, out, lse, output_scale,
                tickets, buckets, chunk, window_tokens, windows_per_chunk,
            )  # fmt: skip

    @cute.jit
    def view(self, storage: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
        """Shared memory with a swizzled layout."""
        return cute.make_tensor(cute.recast_ptr(storage, layout.inner, dtype=BFloat16), layout.outer)

    @cute.jit
    def clear_unused_rows(self, q_smem: cute.Tensor, thread: Int32) -> None:
        """Zero the rows of a tile that no query fills (ratios that do not divide 64): uninitialised bits may be NaN."""
        used = self.queries * self.ratio
        elements = (ROWS - used) * HEAD_DIM
        for stage in cutlass.range_constexpr(Q_STAGES):
            i = thread
            while i < elements:
                q_smem[used + i // HEAD_DIM, i % HEAD_DIM, stage] = BFloat16(0.0)
                i += THREADS
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_tails(self, v_smem: cute.Tensor, info: cute.Tensor, kv_full: cute.Pointer, v_clean: cute.Pointer) -> None:
        """Zero the rows of V past a document's end, and say for every segment that V is clean."""
        lane = cute.arch.lane_idx()
        stage, phase, running = Int32(0), Int32(0), Int32(1)
        while running != 0:
            cute.arch.mbarrier_wait(kv_full + stage, phase)
            running = info[1, stage]
            if running != 0:
                row = info[4, stage]
                if row < BLOCK:
                    zero = cute.make_rmem_tensor(8, BFloat16)
                    zero.fill(0.0)
                    while row < BLOCK:
                        # A lane writes 8 of the 256 bytes twice: halves of 64 columns, 16 lanes for one row.
                        line = row + lane // 16
                        if line < BLOCK:
                            piece = cute.local_tile(v_smem[line, None, stage], (8,), (lane % 16,))
                            cute.autovec_copy(zero, piece)
                        row += 2
                    cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(v_clean + stage)
                stage += 1
                if stage == KV_STAGES:
                    stage, phase = Int32(0), phase ^ 1

    @cute.jit
    def store_tiles(
        self,
        tiles: cute.Tensor,
        meta: cute.Tensor,
        info: cute.Tensor,
        o_full: cute.Pointer,
        q_empty: cute.Pointer,
        kv_full: cute.Pointer,
        kv_empty: cute.Pointer,
        partial_out: cute.Tensor,
        index_heads: Int32,
        first_token: Int32,
        buckets: cute.Tensor,
    ) -> None:
        """Copy O of every tile to device memory, a query by each lane, and hand its stage to the loader.

        A segment is counted for its bucket once it is in memory, looked at after the next segment's first tile.
        """
        lane = cute.arch.lane_idx()
        policy = cute.arch.inline_ptx(
            "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64]
        )
        kv_stage, kv_phase, stage, phase, running = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
        stored = Int32(-1)
        while running != 0:
            cute.arch.mbarrier_wait(kv_full + kv_stage, kv_phase)
            running = info[1, kv_stage]
            if running != 0:
                index_head = info[2, kv_stage]
                base = info[5, kv_stage] - first_token
                row = info[7, kv_stage]
                self.leave(kv_empty + kv_stage)
                kv_stage += 1
                if kv_stage == KV_STAGES:
                    kv_stage, kv_phase = Int32(0), kv_phase ^ 1
                left = running
                while left > 0:
                    cute.arch.mbarrier_wait(o_full + stage, phase)
                    query = lane
                    while query < self.queries:
                        packed = meta[query, stage]
                        if packed >= 0:
                            token = base + (packed & QUERY_MASK)
                            place = (Int64(token) * index_heads + index_head) * self.topk + (packed >> 24)
                            elements = self.ratio * HEAD_DIM
                            store_bulk(
                                partial_out.iterator + place * elements,
                                tiles[None, stage].iterator + query * elements, 2 * elements, policy,
                            )  # fmt: skip
                        query += 32
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.leave(q_empty + stage)
                    stage += 1
                    if stage == Q_STAGES:
                        stage, phase = Int32(0), phase ^ 1
                    left -= self.queries
                    if stored >= 0:
                        cute.arch.cp_async_bulk_wait_group(1, read=False)
                        self.count_segment(buckets, stored)
                        stored = Int32(-1)
                stored = row
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        if stored >= 0:
            self.count_segment(buckets, stored)

    @cute.jit
    def count_segment(self, buckets: cute.Tensor, row: Int32) -> None:
        """Count a segment for its bucket, and let go with it what this warp has copied and seen of other warps."""
        cute.arch.fence_proxy("async")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            counter = buckets.iterator + (row * COUNTER_FIELDS + 1)
            cute.arch.atomic_add(counter, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def leave(self, barrier: cute.Pointer) -> None:
        """One warp is through with a stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def consume(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tiles: cute.Tensor,
        q_smem: cute.Tensor,
        k_smem: cute.Tensor,
        v_smem: cute.Tensor,
        meta: cute.Tensor,
        info: cute.Tensor,
        q_full: cute.Pointer,
        o_full: cute.Pointer,
        kv_full: cute.Pointer,
        kv_empty: cute.Pointer,
        v_clean: cute.Pointer,
        partial_lse: cute.Tensor,
        first_token: Int32,
        scale_log2: Float32,
    ) -> None:
        """One consumer warpgroup: every third tile of the CTA's sequence."""
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        lane = thread % 32
        qk = qk_mma.get_slice(thread)
        pv = pv_mma.get_slice(thread)
        s_q = qk.make_fragment_A(qk.partition_A(q_smem))
        s_k = qk.make_fragment_B(qk.partition_B(k_smem))
        v_columns = cute.make_tensor(v_smem.iterator, cute.select(v_smem.layout, mode=[1, 0, 2]))
        o_v = pv.make_fragment_B(pv.partition_B(v_columns))
        row = (thread // 32) * 16 + lane // 4
        kv_stage, kv_phase = Int32(0), Int32(0)
        q_stage, q_phase = Int32(group), Int32(0)
        # Tiles of this CTA before the segment's first one that is this group's.
        ahead = Int32(group)
        running = Int32(1)
        while running != 0:
            cute.arch.mbarrier_wait(kv_full + kv_stage, kv_phase)
            running = info[1, kv_stage]
            if running != 0:
                index_head = info[2, kv_stage]
                keys = info[4, kv_stage]
                query_base = info[5, kv_stage]
                shift = info[6, kv_stage]
                index_heads = partial_lse.shape[1]
                tile_count = (running + self.queries - 1) // self.queries
                cute.arch.mbarrier_wait(v_clean + kv_stage, kv_phase)
                while ahead < tile_count:
                    cute.arch.mbarrier_wait(q_full + q_stage, q_phase)
                    # Fresh fragments for each tile: an accumulator that outlives its tile would be an operand of the
                    # next product as well, and 64 registers stay taken.
                    s = cute.make_rmem_tensor(qk.partition_shape_C((ROWS, BLOCK)), Float32)
                    p = pv.make_fragment_A(pv.partition_shape_A((ROWS, BLOCK)))
                    # O takes the registers of S, of the same shape: ptxas would give it 64 others.
                    o = s
                    self.multiply(qk_mma, s, s_q[None, None, None, q_stage], s_k[None, None, None, kv_stage])
                    packed_0 = meta[cutlass.min(row // self.ratio, self.queries), q_stage]
                    packed_1 = meta[cutlass.min((row + 8) // self.ratio, self.queries), q_stage]
                    limit_0 = cutlass.min((packed_0 & QUERY_MASK) + shift, keys - 1)
                    limit_1 = cutlass.min((packed_1 & QUERY_MASK) + shift, keys - 1)
                    warpgroup.wait_group(0)
                    sums = self.softmax(s, p, limit_0, limit_1, lane, scale_log2)
                    self.multiply(pv_mma, o, p, o_v[None, None, None, kv_stage])
                    for half in cutlass.range_constexpr(2):
                        packed = packed_1 if half else packed_0
                        if packed >= 0 and lane % 4 == 0:
                            token = query_base + (packed & QUERY_MASK) - first_token
                            place = (Int64(token) * index_heads + index_head) * self.topk + (packed >> 24)
                            lse = partial_lse.iterator + (place * self.ratio + (row + 8 * half) % self.ratio)
                            level = sums[half, 1] + cute.math.log2(sums[half, 0], fastmath=False)
                            cute.make_tensor(lse, cute.make_layout(1))[0] = level
                    inverses = [self.invert(sums[half, 0]) for half in range(2)]
                    warpgroup.wait_group(0)
                    # O takes the place of Q, which all warps of the group have used.
                    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                    for half in cutlass.range_constexpr(2):
                        packed = packed_1 if half else packed_0
                        if packed >= 0:
                            query = (row + 8 * half) // self.ratio
                            head = (row + 8 * half) % self.ratio
                            self.store_row(o, tiles[None, q_stage], half, query, head, lane % 4, inverses[half])
                    cute.arch.fence_proxy("async.shared", space="cta")
                    self.leave(o_full + q_stage)
                    q_stage += CONSUMERS
                    if q_stage >= Q_STAGES:
                        q_stage, q_phase = q_stage - Q_STAGES, q_phase ^ 1
                    ahead += CONSUMERS
                ahead -= tile_count
                self.leave(kv_empty + kv_stage)
                kv_stage += 1
                if kv_stage == KV_STAGES:
                    kv_stage, kv_phase = Int32(0), kv_phase ^ 1

    @cute.jit
    def multiply(self, mma: cute.TiledMma, target: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
        """``target = a b``, not waited for."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, target, a[None, None, step], b[None, None, step], target)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def softmax(
        self, s: cute.Tensor, p: cute.Tensor, limit_0: Int32, limit_1: Int32, lane: Int32, scale_log2: Float32
    ) -> cute.Tensor:
        """P = 2^(S - max) as bf16; returns per row of this thread (two) the sum and the scaled maximum.

        Element ``4 j + 2 half + e`` of a fragment is row ``8 half``, column ``8 j + 2 (lane % 4) + e``.
        """
        values = cute.make_tensor(s.iterator, cute.make_layout(ROWS))
        lowest = cutlass.min(limit_0, limit_1)
        if cute.arch.vote_any_sync(lowest < BLOCK - 1):
            column = 2 * (lane % 4)
            for i in cutlass.range_constexpr(ROWS):
                limit = limit_1 if i % 4 >= 2 else limit_0
                if column + (8 * (i // 4) + i % 2) > limit:
                    values[i] = -Float32.inf
        sums = cute.make_rmem_tensor((2, 2), Float32)
        packed = cute.make_tensor(p.iterator, cute.make_layout(ROWS))
        for half in cutlass.range_constexpr(2):
            # Four maxima side by side: each depends on the last one of its own only.
            peaks = [values[2 * half + 4 * (i // 2) + i % 2] for i in range(4)]
            for i in cutlass.range_constexpr(4, ROWS // 2):
                peaks[i % 4] = cute.arch.fmax(peaks[i % 4], values[2 * half + 4 * (i // 2) + i % 2])
            peak = cute.arch.fmax(cute.arch.fmax(peaks[0], peaks[1]), cute.arch.fmax(peaks[2], peaks[3]))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
            # A row that sees no key: any finite maximum gives P = 0 and the sum 0.
            scaled = peak * scale_log2 if peak != -Float32.inf else Float32(0.0)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(ROWS):
                if const_expr(i // 2 % 2 == half):
                    values[i] = cute.math.exp2(values[i] * scale_log2 - scaled, fastmath=True)
                    total += values[i]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            sums[half, 0] = total
            sums[half, 1] = scaled
        packed.store(values.load().to(BFloat16))
        return sums

    @cute.jit
    def invert(self, total: Float32) -> Float32:
        """1 / total to 1 ulp, 0 for a row that sees no key. PTX, since a division would move behind the wait for O."""
        inverse = cute.arch.inline_ptx(
            "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[total]
        )
        return inverse if total > 0.0 else Float32(0.0)

    @cute.jit
    def store_row(
        self,
        o: cute.Tensor,
        tile: cute.Tensor,
        half: cutlass.Constexpr[int],
        query: Int32,
        head: Int32,
        quad_lane: Int32,
        inverse: Float32,
    ) -> None:
        """One row of O, normalised, to the query's part of ``tile``, as four pieces of 16 bytes."""
        values = cute.make_tensor(o.iterator, cute.make_layout(ROWS))
        for group in cutlass.range_constexpr(4):
            piece = cute.make_rmem_tensor(8, BFloat16)
            scaled = cute.make_rmem_tensor(8, Float32)
            for i in cutlass.range_constexpr(8):
                scaled[i] = values[4 * (4 * group + i // 2) + 2 * half + i % 2] * inverse
            piece.store(scaled.load().to(BFloat16))
            # 512 contiguous bytes a warp: no bank conflicts.
            offset = ((query * 4 + group) * self.ratio + head) * 32 + quad_lane * 8
            target = cute.make_tensor(tile.iterator + cute.assume(offset, divby=8), cute.make_layout(8))
            cute.autovec_copy(piece, target)


@cute.jit
def store_bulk(target: cute.Pointer, source: cute.Pointer, size_bytes: int, policy: Int64) -> None:
    """Linear copy from shared to device memory, in the bulk group of this thread; all multiples of 16 bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [{$r0}], [{$r1}], {$r2}, {$r3};",
        read_only_args=[Int64(target.toint()), Int32(source.toint()), Int32(size_bytes), policy],
    )


def compile_forward(*, arch: str, ratio: int, topk: int, scaled: bool) -> Any:
    """Compile the forward.

    Call with ``q`` bf16 ``[T, Hq, 128]``, ``k`` and ``v`` ``[total_k, Hkv, 128]``, ``qsplit_indices`` int32, flat,
    ``segments`` int32 ``[windows, capacity, 8]``, ``tickets`` int32 ``[chunks, 8]``, ``buckets`` int32
    ``[chunks * Hkv * windows_per_chunk, 8]``, ``split_counts`` int32 ``[T, Hkv]``, ``partial_out`` bf16, flat,
    ``partial_lse`` float32 ``[tokens, Hkv, topk * ratio]``, ``out`` bf16 ``[T, Hq, 128]``, ``lse`` float32 ``[T, Hq]``,
    ``output_scale`` float32 ``[>= 1]`` (not read unless ``scaled``), int32 ``chunk, window_tokens, windows_per_chunk``,
    float32 softmax scale times log2(e) (positive), int32 ``ctas, merge_ctas``.
    """
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    def fake(dtype: Any, align: int, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    size = cute.sym_int
    tokens, heads, keys, key_heads = size(), size(), size(), size()
    return cute.compile(
        ForwardMain(ratio, topk, scaled),
        fake(BFloat16, 16, tokens, heads, HEAD_DIM), fake(BFloat16, 16, keys, key_heads, HEAD_DIM),
        fake(BFloat16, 16, keys, key_heads, HEAD_DIM), fake(Int32, 4, size()),
        fake(Int32, 4, size(), size(), SEGMENT_FIELDS), fake(Int32, 4, size(), COUNTER_FIELDS),
        fake(Int32, 4, size(), COUNTER_FIELDS), fake(Int32, 4, tokens, key_heads), fake(BFloat16, 16, cute.sym_int64()),
        fake(Float32, 4, size(), key_heads, topk * ratio), fake(BFloat16, 16, tokens, heads, HEAD_DIM),
        fake(Float32, 4, tokens, heads), fake(Float32, 4, size()), Int32(0), Int32(1), Int32(1), Float32(1.0), Int32(1),
        Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )  # fmt: skip
