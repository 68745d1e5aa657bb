"""Additions of the SM90 main kernel: dQ of a task, dK and dV of a segment, through shared memory and by TMA."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from msa_vendored.backward.dq_scale import power_of_two
from msa_vendored.backward.sm90_layout import (
    BARRIER_DS,
    CONSUMERS,
    DQ_BYTES,
    EVICT_LAST,
    HALF,
    HEAD_DIM,
    KEYS,
    LAST,
    ROWS,
    STAGES,
    TILE_BYTES,
    WARPGROUP,
    StructureSm90,
)
from msa_vendored.backward.sm90_ops import (
    SWIZZLE_128B,
    bulk_add_f32,
    multiply,
    pack_bf16,
    pack_fp16,
    store_matrix_x4,
    store_shared_f32x2,
    store_shared_f32x4,
    swizzled,
)

SUM_DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class AddSm90(StructureSm90):
    """Parts of the consumer warpgroups that end in global memory."""

    def partition_sums(self, atom: Any, base: Any, tensor_map: cute.Tensor) -> tuple[Any, Any]:
        """TMA views of dQ: shared (box, token of a warpgroup's half), global (box, group of heads, token)."""
        heads = min(self.ratio, 8)
        inner = (self.sum_width, heads, HEAD_DIM // self.sum_width, 1)
        box = (1, self.sum_width, self.sum_width * heads, 0)
        count = KEYS * ROWS * 2 // (heads * HEAD_DIM * self.sum_bytes)
        layout = cute.make_layout((inner, count), stride=(box, heads * HEAD_DIM))
        dtype = SUM_DTYPES[self.dq_accumulation]
        pointer = cute.recast_ptr(base, cute.make_swizzle(*SWIZZLE_128B), dtype=dtype)
        tiles = cute.group_modes(cute.local_tile(tensor_map, inner, (None, None, None, None)), 0, 4)
        s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.make_tensor(pointer, layout), tiles)
        return s, g[None, 0, None, 0, None]

    @cute.jit
    def free_ds(self, shared: Any, last_flags: Int32, stage: Int32, group: Int32) -> None:
        """Wait until TMA has read dQ of the task before, and dK and dV of a segment that it ended; say so."""
        cute.arch.cp_async_bulk_wait_group(0, read=self.read_suffices)
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=BARRIER_DS + 2 + group, number_of_threads=CONSUMERS)
        if last_flags & LAST:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.empty.data_ptr() + (stage ^ 1))

    @cute.jit
    def add_dq(
        self,
        shared: Any,
        mma_q: Any,
        dq_atom: Any,
        s_dq: cute.Tensor,
        g_dq: cute.Tensor,
        info: cute.Tensor,
        task_qrows: cute.Tensor,
        flags: Int32,
        stage: Int32,
        thread: Int32,
        group: Int32,
    ) -> None:
        """DQ of the 64 folded rows of half ``group``, added to global memory; releases Q and dO, or K and V."""
        cute.arch.barrier(barrier_id=BARRIER_DS + group, number_of_threads=CONSUMERS)
        # Lane i of a warp keeps the token of box i of its dQ.
        boxes, warp, lane = 16 // min(self.ratio, 8), thread // 32, thread % 32
        first = warp * 2 if self.ratio == 16 else (group * 4 + warp) * boxes
        token, head = self.token_row(info, task_qrows, first + lane % boxes), info[0]
        if cutlass.const_expr(self.ratio == 16):
            head = head * 2 + group
        factors = self.load_factors(shared, stage, group * HALF + warp * 16 + lane // 4)
        warpgroup.wait_group(0)
        if not flags & LAST:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.empty.data_ptr() + stage)
        thr = mma_q.get_slice(thread)
        ds = cute.make_tensor(
            swizzled(shared.ds.data_ptr() + group * (KEYS * 64)), cute.make_layout((HALF, KEYS), stride=(1, 64))
        )
        keys = cute.make_tensor(
            swizzled(shared.k.data_ptr()), cute.make_layout(((64, 2), KEYS), stride=((1, KEYS * 64), 64))
        )
        dq = cute.make_rmem_tensor(mma_q.partition_shape_C((HALF, HEAD_DIM)), Float32)
        warpgroup.fence()
        if cutlass.const_expr(self.wants_dq):
            multiply(mma_q, dq, mma_q.make_fragment_A(thr.partition_A(ds)),
                     mma_q.make_fragment_B(thr.partition_B(keys)), accumulate=False)  # fmt: skip
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # The four warps of a warpgroup wait for their parts of the product one by one.
        cute.arch.barrier(barrier_id=BARRIER_DS + 5 + group, number_of_threads=WARPGROUP)
        if flags & LAST:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.kv_empty.data_ptr())
        base = Int32(shared.ds.data_ptr().toint()) + (group * 4 + warp) * DQ_BYTES
        first_box = (group * 4 + warp) * (DQ_BYTES // (min(self.ratio, 8) * HEAD_DIM * self.sum_bytes))
        if cutlass.const_expr(self.wants_dq and not self.fp32_sum):
            if cutlass.const_expr(self.scaled_sum):
                for i in cutlass.range_constexpr(HALF):
                    dq[i] = dq[i] * factors[i // 2 % 2]
            self.store_dq_16(dq, base, lane)
            self.reduce_boxes(dq_atom, s_dq, g_dq, token, head, first_box, 0, boxes)
        elif cutlass.const_expr(self.wants_dq):
            for below in cutlass.range_constexpr(2):
                if cutlass.const_expr(below == 1):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                self.store_dq_fp32(dq, base, below, lane)
                self.reduce_boxes(dq_atom, s_dq, g_dq, token, head, first_box, below * (boxes // 2), boxes // 2)

    def load_factors(self, shared: Any, stage: Int32, row: Int32) -> list[Float32]:
        """What scales dQ of a folded row, in the order of the statistics, and of the eighth after it."""
        if not self.scaled_sum:
            return []
        exponents = cute.make_tensor(shared.exponents.data_ptr() + stage * ROWS, cute.make_layout(ROWS))
        return [power_of_two(Int32(exponents[row + below * 8]) & 0xFF) for below in range(2)]

    @cute.jit
    def reduce_boxes(
        self,
        dq_atom: Any,
        s_dq: cute.Tensor,
        g_dq: cute.Tensor,
        token: Int32,
        head: Int32,
        first_box: Int32,
        first_lane: cutlass.Constexpr,
        count: cutlass.Constexpr,
    ) -> None:
        """Add boxes of this warp's shared memory to their tokens; a slot without a query adds nothing."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for box in cutlass.range_constexpr(count):
            row = cute.arch.shuffle_sync(token, first_lane + box)
            if row >= 0:
                cute.copy(dq_atom, s_dq[None, first_box + box], g_dq[None, head, row], cache_policy=Int64(EVICT_LAST))
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_dq_16(self, dq: cute.Tensor, base: Int32, lane: Int32) -> None:
        """16 rows of dQ, bf16 or fp16, to shared memory as boxes [token][column half][head][64], 128-byte swizzle."""
        heads = min(self.ratio, 8)
        row, below, upper = lane % 8, lane // 8 % 2, lane // 16
        start = base + below * 2048 + row // heads * (heads * 256) + row % heads * 128
        for j in cutlass.range_constexpr(8):
            address = start + j // 4 * (heads * 128)
            chunk = (2 * (j % 4) + upper) ^ (address // 128 % 8)
            pack = pack_fp16 if self.scaled_sum else pack_bf16
            words = [pack(dq[8 * j + 2 * i], dq[8 * j + 2 * i + 1]) for i in range(4)]
            store_matrix_x4(address + chunk * 16, words)

    @cute.jit
    def store_dq_fp32(self, dq: cute.Tensor, base: Int32, below: cutlass.Constexpr, lane: Int32) -> None:
        """8 rows of dQ to shared memory as boxes [token][column quarter][head][32], 128-byte swizzle."""
        heads = min(self.ratio, 8)
        row, pair = lane // 4, lane % 4
        start = base + row // heads * (heads * 512) + row % heads * 128
        for j in cutlass.range_constexpr(16):
            address = start + j // 4 * (heads * 128)
            # As address // 128 % 8, since the warp's part begins at a multiple of 1 KiB; fewer registers.
            line = row if heads == 8 else (row // heads * heads * 4 + row % heads + j // 4 * heads) % 8
            chunk = (2 * (j % 4) + pair // 2) ^ line
            store_shared_f32x2(address + chunk * 16 + pair % 2 * 8, [dq[4 * j + 2 * below + i] for i in range(2)])

    @cute.jit
    def flush(
        self,
        shared: Any,
        sums: cute.Tensor,
        target: cute.Tensor,
        place: Int32,
        stage: Int32,
        thread: Int32,
        group: Int32,
    ) -> None:
        """Add a warp's 16 keys of dK or dV to global memory, in the order of ``dkv_sum_index``, and clear them."""
        warp, lane = thread // 32, thread % 32
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        # Warpgroup 1 uses the Q of the stage, warpgroup 2 its dO, 8 KiB a warp.
        base = Int32(shared.q.data_ptr().toint()) + group * (STAGES * TILE_BYTES) + stage * TILE_BYTES + warp * 8192
        for group8 in cutlass.range_constexpr(16):
            store_shared_f32x4(base + group8 * 512 + lane * 16, [sums[group8 * 4 + i] for i in range(4)])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        offset = (Int64(place) * 8 + group * 4 + warp) * 8192
        with cute.arch.elect_one():
            bulk_add_f32(target.iterator.toint() + offset, base, 8192)
        cute.arch.cp_async_bulk_commit_group()
        sums.fill(0.0)
