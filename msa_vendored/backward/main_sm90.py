"""Main kernel of the backward on Hopper (sm_90a): dQ, dK and dV of a list of tasks.

A task is ``128 // ratio`` queries of one kv head (128 folded rows, row n = slot * ratio + head in group) against one
block of 128 keys. A run of tasks of one key block is a *segment*: its K and V stay in shared memory, its dK and dV in
registers.

Threads: three warpgroups. Warpgroup 0 produces: warp 0 loads K, V and the rows of Q and dO by TMA, warp 1 the places
of tasks, warps 2 and 3 the row
statistics. Warpgroups 1 and 2 consume; each owns 64 of the 128 keys. With K_w, V_w their 64 rows and, for each half h
of the folded rows, Q_h, dO_h the 64 rows of the half::

    S^T = K_w Q_h^T             P^T = exp2(S^T * scale * log2(e) - lse * log2(e)), 0 where masked
    dP^T = V_w dO_h^T           dS^T = P^T * (scale * dP^T - scale * delta)
    dV_w += P^T dO_h            dK_w += dS^T Q_h            (P^T, dS^T are register operands)
    dS_h -> shared memory;      after both halves, warpgroup w: dQ = dS_w K (64 rows x 128)

dQ goes through the shared memory of its dS and is added to global memory by TMA; so are dK and dV at the end of a
segment, through that of its last Q and dO.

Call of the compiled function (:func:`compile_main`), all tensors on one device, contiguous, 16-byte aligned::

    main(q, k, v, grad_out, lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts,
         descriptor, dq_sum, dk_sum, dv_sum, softmax_scale, grid)

- q, grad_out: bf16 ``[T, Hkv * ratio, 128]``; k, v: bf16 ``[W, Hkv, 128]``; lse (natural log), delta: fp32
  ``[T, Hkv * ratio]``; tables, ``descriptor`` int32 as :mod:`msa_vendored.backward.tasks` defines them;
  ``cu_seqlens`` int32 ``[documents + 1]``; ``document_workspace_starts`` int32 ``[documents]``.
- dq_sum: bf16, fp16 or fp32 ``[T, Hkv * ratio, 128]``, zeroed by the caller. In bf16 it is dQ and needs no postprocess.
- dk_sum, dv_sum: fp32 ``[W // 128, Hkv, 128 * 128]``, zeroed by the caller, in the order of
  :func:`msa_vendored.backward.sm90_layout.dkv_sum_index`.
- with fp16 sums two more tensors follow: norms fp32 ``[T, Hkv * ratio]`` and key_maxima fp32 ``[Hkv, 2]``, from which
  :mod:`msa_vendored.backward.dq_scale` makes the power of two by which each row of ``dq_sum`` is scaled.
- softmax_scale: float32. grid: int32, CTAs to launch; one fits on a multiprocessor.

The stream is that of the TVM FFI environment (torch's current stream).
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from msa_vendored.backward.sm90_add import SUM_DTYPES, AddSm90
from msa_vendored.backward.sm90_layout import (
    BARRIER_DS,
    CONSUMER_REGISTERS,
    CONSUMERS,
    FIRST,
    HALF,
    HEAD_DIM,
    KEYS,
    LAST,
    MASKED,
    PRODUCER_REGISTERS,
    ROWS,
    STAGES,
    THREADS,
    WARPGROUP,
)
from msa_vendored.backward.sm90_load import LoadSm90
from msa_vendored.backward.sm90_ops import (
    LOG2_E,
    SWIZZLE_128B,
    exp2_approx,
    fma,
    multiply,
    pack_bf16,
    store_matrix_x4,
    swizzled,
)


class MainBackwardSm90(LoadSm90, AddSm90):
    """The kernel for one head ratio and one type of dQ sums.

    Args:
        ratio: query heads per kv head: 1, 2, 4, 8 or 16.
        dq_accumulation: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        gradients: ``"all"``, ``"dkv"``, or ``"dq"``, which then adds to a token in the order of its tasks.
    """

    def _mma(self, n: int, a_source: Any, a_major: Any, b_major: Any) -> Any:
        operation = warpgroup.MmaF16BF16Op(BFloat16, Float32, (HALF, n, 16), a_source, a_major, b_major)
        return cute.make_tiled_mma(operation)

    def _token_box(self) -> Any:
        """Shared-memory layout of one TMA box: (64 columns, ratio rows, column halves, 1)."""
        halves = 2 if self.wide else 1
        inner = cute.make_layout((64, self.ratio, halves, 1), stride=(1, 64, self.column_stride, 0))
        return cute.make_composed_layout(cute.make_swizzle(*SWIZZLE_128B), 0, inner)

    def _tma(self, tensor: Any, box: Any, shape: tuple[int, ...], operation: Any = None) -> tuple[Any, Any]:
        """Copy atom and coordinate tensor of a TMA load, or of another operation."""
        info = cpasync.make_tiled_tma_atom(operation or cpasync.CopyBulkTensorTileG2SOp(), tensor, box, shape)
        return info[0], info[1]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        descriptor: cute.Tensor,
        dq_sum: cute.Tensor,
        dk_sum: cute.Tensor,
        dv_sum: cute.Tensor,
        softmax_scale: Float32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """One launch with sums in bf16 or fp32."""
        self.launch(
            (
                q, k, v, grad_out, lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens,
                document_workspace_starts, descriptor, dq_sum, dk_sum, dv_sum,
            ),
            None, softmax_scale, grid, stream,
        )  # fmt: skip

    @cute.jit
    def scaled(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        descriptor: cute.Tensor,
        dq_sum: cute.Tensor,
        dk_sum: cute.Tensor,
        dv_sum: cute.Tensor,
        norms: cute.Tensor,
        key_maxima: cute.Tensor,
        softmax_scale: Float32,
        grid: Int32,
        stream: Any,
    ) -> None:
        """One launch with sums in fp16."""
        self.launch(
            (
                q, k, v, grad_out, lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens,
                document_workspace_starts, descriptor, dq_sum, dk_sum, dv_sum,
            ),
            (norms, key_maxima), softmax_scale, grid, stream,
        )  # fmt: skip

    @cute.jit
    def launch(self, tensors: Any, bounds: Any, softmax_scale: Float32, grid: Int32, stream: Any) -> None:
        """Host side: tensor maps and launch."""
        (
            q, k, v, grad_out, lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts,
            descriptor, dq_sum, dk_sum, dv_sum,
        ) = tensors  # fmt: skip
        row_shape = (64, self.ratio, 2 if self.wide else 1, 1)
        rows = [self._split_columns(tensor) for tensor in (q, grad_out)]
        (q_atom, q_map), (do_atom, do_map) = [self._tma(t, self._token_box(), row_shape) for t in rows]
        key_box = cute.make_composed_layout(
            cute.make_swizzle(*SWIZZLE_128B), 0, cute.make_layout((64, 1, 2, KEYS), stride=(1, 0, KEYS * 64, 64))
        )
        keys = [self._split_columns(tensor) for tensor in (k, v)]
        (k_atom, k_map), (v_atom, v_map) = [self._tma(t, key_box, (64, 1, 2, KEYS)) for t in keys]
        sum_shape = (self.sum_width, min(self.ratio, 8), HEAD_DIM // self.sum_width, 1)
        sum_stride = (1, self.sum_width, self.sum_width * min(self.ratio, 8), 0)
        sum_box = cute.make_composed_layout(
            cute.make_swizzle(*SWIZZLE_128B), 0, cute.make_layout(sum_shape, stride=sum_stride)
        )
        dq_atom, dq_map = self._tma(
            self._split_columns(dq_sum, self.sum_width), sum_box, sum_shape, cpasync.CopyReduceBulkTensorTileS2GOp()
        )
        mmas = (
            self._mma(HALF, warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K),
            self._mma(HEAD_DIM, warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN),
            self._mma(HEAD_DIM, warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.MN),
            self._mma(HEAD_DIM, warpgroup.OperandSource.SMEM, OperandMajorMode.MN, OperandMajorMode.MN),
        )
        self.kernel(
            q_atom, q_map, do_atom, do_map, k_atom, k_map, v_atom, v_map, dq_atom, dq_map, mmas,
            lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts, descriptor,
            dk_sum, dv_sum, bounds, softmax_scale,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    def _split_columns(self, tensor: cute.Tensor, width: int = 64) -> cute.Tensor:
        """``[rows, heads, 128]`` as (width, heads, 128 // width, rows)."""
        rows, heads, _ = tensor.shape
        stride = (1, tensor.stride[1], width, tensor.stride[0])
        layout = cute.make_layout((width, heads, HEAD_DIM // width, rows), stride=stride)
        return cute.make_tensor(tensor.iterator, layout)

    def _storage(self) -> Any:
        info_words, stages = self.info_words * STAGES, STAGES
        exponent_bytes = ROWS * STAGES if self.scaled_sum else 0

        @cute.struct
        class Storage:
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, KEYS * HEAD_DIM], 1024]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, KEYS * HEAD_DIM], 1024]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * ROWS * HEAD_DIM], 1024]
            do: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * ROWS * HEAD_DIM], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[BFloat16, KEYS * ROWS], 1024]
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, stages * ROWS * 2], 16]
            info: cute.struct.Align[cute.struct.MemRange[Int32, info_words], 16]
            exponents: cute.struct.MemRange[Uint8, exponent_bytes]
            full: cute.struct.MemRange[Int64, stages]
            ready: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            kv_full: cute.struct.MemRange[Int64, 1]
            kv_empty: cute.struct.MemRange[Int64, 1]

        return Storage

    @cute.kernel
    def kernel(
        self,
        q_atom: Any,
        q_map: cute.Tensor,
        do_atom: Any,
        do_map: cute.Tensor,
        k_atom: Any,
        k_map: cute.Tensor,
        v_atom: Any,
        v_map: cute.Tensor,
        dq_atom: Any,
        dq_map: cute.Tensor,
        mmas: Any,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        descriptor: cute.Tensor,
        dk_sum: cute.Tensor,
        dv_sum: cute.Tensor,
        bounds: Any,
        softmax_scale: Float32,
    ) -> None:
        """Device side: initialise barriers, then one role per warp."""
        shared = cutlass.utils.SmemAllocator().allocate(self._storage())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(shared.full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(shared.ready.data_ptr() + stage, 3)
                    cute.arch.mbarrier_init(shared.empty.data_ptr() + stage, CONSUMERS // 32)
                cute.arch.mbarrier_init(shared.kv_full.data_ptr(), 1)
                cute.arch.mbarrier_init(shared.kv_empty.data_ptr(), CONSUMERS // 32)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load_tiles(
                    shared, q_atom, q_map, do_atom, do_map, k_atom, k_map, v_atom, v_map, task_meta, task_qrows,
                    descriptor,
                )  # fmt: skip
            if warp == 1:
                self.load_places(
                    shared, task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts, descriptor
                )
            if warp > 1:
                self.load_statistics(
                    shared, lse, delta, task_meta, task_qrows, descriptor, bounds, softmax_scale, warp - 2
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                shared, dq_atom, dq_map, mmas, task_qrows, descriptor, dk_sum, dv_sum, softmax_scale
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        shared: Any,
        dq_atom: Any,
        dq_map: cute.Tensor,
        mmas: Any,
        task_qrows: cute.Tensor,
        descriptor: cute.Tensor,
        dk_sum: cute.Tensor,
        dv_sum: cute.Tensor,
        softmax_scale: Float32,
    ) -> None:
        """Warpgroups 1 and 2: everything but the loads."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
        _, mma_kv, _, mma_q = mmas
        dk = cute.make_rmem_tensor(mma_kv.partition_shape_C((HALF, HEAD_DIM)), Float32)
        dv = cute.make_rmem_tensor(mma_kv.partition_shape_C((HALF, HEAD_DIM)), Float32)
        dk.fill(0.0)
        dv.fill(0.0)
        s_dq, g_dq = self.partition_sums(dq_atom, shared.ds.data_ptr(), dq_map)
        count, segment, last_flags = Int32(0), Int32(0), Int32(0)
        for chunk in cutlass.range(cute.arch.block_idx()[0], descriptor[4], cute.arch.grid_dim()[0], unroll=1):
            begin, end = self.chunk_interval(chunk, descriptor)
            for _task in cutlass.range(begin, end, 1, unroll=1):
                stage, phase = count % STAGES, (count // STAGES) % 2
                cute.arch.mbarrier_wait(shared.ready.data_ptr() + stage, phase)
                info = shared.info.data_ptr() + stage * self.info_words
                info = cute.make_tensor(info, cute.make_layout(self.info_words))
                flags = cute.arch.make_warp_uniform(info[2])
                if flags & FIRST:
                    cute.arch.mbarrier_wait(shared.kv_full.data_ptr(), segment % 2)
                    if info[3] < KEYS:
                        self.clean_keys(shared, info[3], thread, group)
                    segment += 1
                cute.arch.mbarrier_wait(shared.full.data_ptr() + stage, phase)
                self.process_task(
                    shared, mmas[:3], dk, dv, info, task_qrows, flags, last_flags, stage, thread, group, softmax_scale,
                )  # fmt: skip
                self.add_dq(shared, mma_q, dq_atom, s_dq, g_dq, info, task_qrows, flags, stage, thread, group)
                if cutlass.const_expr(self.wants_dkv) and flags & LAST:
                    place = info[1] * dk_sum.shape[1] + info[0]
                    cute.arch.barrier(barrier_id=5, number_of_threads=CONSUMERS)
                    self.flush(shared, dv, dv_sum, place, stage, thread, group)
                    self.flush(shared, dk, dk_sum, place, stage, thread, group)
                last_flags = flags
                count += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def clean_keys(self, shared: Any, valid: Int32, thread: Int32, group: Int32) -> None:
        """Zero the rows of K and V past the end of the document: they may hold NaN, and 0 * NaN would reach dQ."""
        word = cute.make_layout((32, KEYS, 2), stride=(1, 32, KEYS * 32))
        for pointer in (shared.k.data_ptr(), shared.v.data_ptr()):
            tile = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), word)
            for key in cutlass.range(valid, KEYS, 1, unroll=1):
                if thread < 32:
                    tile[thread, key, group] = Int32(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=5, number_of_threads=CONSUMERS)

    def rows_tensor(self, pointer: Any, half: int, stage: Int32, *, columns_first: bool) -> cute.Tensor:
        """A half of the rows of Q or dO, (64 rows, 128) or, for the contraction over rows, (128, 64 rows)."""
        base = swizzled(pointer + half * self.half_offset + stage * (ROWS * HEAD_DIM))
        rows, columns = (8, 8), (64, 2)
        row_stride, column_stride = (64, self.group_stride), (1, self.column_stride)
        if columns_first:
            return cute.make_tensor(base, cute.make_layout((columns, rows), stride=(column_stride, row_stride)))
        return cute.make_tensor(base, cute.make_layout((rows, columns), stride=(row_stride, column_stride)))

    @cute.jit
    def process_task(
        self,
        shared: Any,
        mmas: Any,
        dk: cute.Tensor,
        dv: cute.Tensor,
        info: cute.Tensor,
        task_qrows: cute.Tensor,
        flags: Int32,
        last_flags: Int32,
        stage: Int32,
        thread: Int32,
        group: Int32,
        softmax_scale: Float32,
    ) -> None:
        """S, dP, P, dS of 128 folded rows against 64 keys; adds to dV and dK, leaves dS in shared memory.

        dV and dK of half 0 run on the tensor cores beside the softmax of half 1; dK takes its dS from shared memory,
        which saves 16 registers.
        """
        mma_s, mma_kv, mma_dk = mmas
        keys = cute.make_layout((HALF, (64, 2)), stride=(64, (1, KEYS * 64)))
        s_k = cute.make_tensor(swizzled(shared.k.data_ptr() + group * (HALF * 64)), keys)
        s_v = cute.make_tensor(swizzled(shared.v.data_ptr() + group * (HALF * 64)), keys)
        s_ds = cute.make_tensor(
            swizzled(shared.ds.data_ptr() + group * (HALF * 64)), cute.make_layout((HALF, HALF), stride=(64, 1))
        )
        thr_s, thr_kv, thr_dk = mma_s.get_slice(thread), mma_kv.get_slice(thread), mma_dk.get_slice(thread)
        a_shape = mma_kv.partition_shape_A((HALF, HALF))
        scale_log2 = softmax_scale * LOG2_E
        pair = cute.make_rmem_tensor((2,), Float32)
        operands: list[tuple[cute.Tensor, cute.Tensor]] = []
        for half in cutlass.range_constexpr(2):
            q_rows = self.rows_tensor(shared.q.data_ptr(), half, stage, columns_first=False)
            do_rows = self.rows_tensor(shared.do.data_ptr(), half, stage, columns_first=False)
            s = cute.make_rmem_tensor(mma_s.partition_shape_C((HALF, HALF)), Float32)
            dp = cute.make_rmem_tensor(mma_s.partition_shape_C((HALF, HALF)), Float32)
            warpgroup.fence()
            multiply(mma_s, s, mma_s.make_fragment_A(thr_s.partition_A(s_k)),
                     mma_s.make_fragment_B(thr_s.partition_B(q_rows)), accumulate=False)  # fmt: skip
            warpgroup.commit_group()
            multiply(mma_s, dp, mma_s.make_fragment_A(thr_s.partition_A(s_v)),
                     mma_s.make_fragment_B(thr_s.partition_B(do_rows)), accumulate=False)  # fmt: skip
            warpgroup.commit_group()
            if cutlass.const_expr(half == 1):
                if cutlass.const_expr(self.wants_dkv):
                    q_columns = self.rows_tensor(shared.q.data_ptr(), 0, stage, columns_first=True)
                    do_columns = self.rows_tensor(shared.do.data_ptr(), 0, stage, columns_first=True)
                    multiply(mma_kv, dv, operands[0][0], mma_kv.make_fragment_B(thr_kv.partition_B(do_columns)),
                             accumulate=True)  # fmt: skip
                    multiply(mma_dk, dk, mma_dk.make_fragment_A(thr_dk.partition_A(s_ds)),
                             mma_dk.make_fragment_B(thr_dk.partition_B(q_columns)), accumulate=True)  # fmt: skip
                warpgroup.commit_group()
            warpgroup.wait_group(1 + half)
            base = shared.statistics.data_ptr() + stage * (2 * ROWS) + half * HALF
            statistics = cute.make_tensor(base, cute.make_layout((2, HALF // 2, 2), stride=(1, 2, ROWS)))
            for group8 in cutlass.range_constexpr(8):
                cute.autovec_copy(statistics[None, group8 * 4 + thread % 4, 0], pair)
                for i in cutlass.range_constexpr(4):
                    s[group8 * 4 + i] = exp2_approx(fma(s[group8 * 4 + i], scale_log2, -pair[i % 2]))
            # A branch here keeps the exponentials before the wait for dP: ptxas does not move them across it.
            if flags & MASKED:
                self.hide_keys(s, info, task_qrows, half, thread, group)
            warpgroup.wait_group(half)
            p_half = cute.make_rmem_tensor(a_shape, BFloat16)
            ds_half = cute.make_rmem_tensor(a_shape, BFloat16)
            p_words, ds_words = cute.recast_tensor(p_half, Int32), cute.recast_tensor(ds_half, Int32)
            operands.append((p_half, ds_half))
            for group8 in cutlass.range_constexpr(8):
                cute.autovec_copy(statistics[None, group8 * 4 + thread % 4, 1], pair)
                for i in cutlass.range_constexpr(2):
                    at = group8 * 4 + 2 * i
                    low = s[at] * fma(dp[at], softmax_scale, -pair[0])
                    high = s[at + 1] * fma(dp[at + 1], softmax_scale, -pair[1])
                    p_words[group8 * 2 + i] = pack_bf16(s[at], s[at + 1])
                    ds_words[group8 * 2 + i] = pack_bf16(low, high)
            if cutlass.const_expr(half == 0):
                self.free_ds(shared, last_flags, stage, group)
            if group != half:
                cute.arch.barrier(barrier_id=BARRIER_DS + 2 + half, number_of_threads=CONSUMERS)
            else:
                cute.arch.barrier(barrier_id=BARRIER_DS + 5 + group, number_of_threads=WARPGROUP)
            self.store_ds(shared, ds_words, half, thread, group)
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(half == 0):
                cute.arch.barrier(barrier_id=BARRIER_DS + 5 + group, number_of_threads=WARPGROUP)
            elif group == 0:
                cute.arch.barrier_arrive(barrier_id=BARRIER_DS + 1, number_of_threads=CONSUMERS)
        warpgroup.fence()
        if cutlass.const_expr(self.wants_dkv):
            q_columns = self.rows_tensor(shared.q.data_ptr(), 1, stage, columns_first=True)
            do_columns = self.rows_tensor(shared.do.data_ptr(), 1, stage, columns_first=True)
            p_half, ds_half = operands[1]
            multiply(mma_kv, dv, p_half, mma_kv.make_fragment_B(thr_kv.partition_B(do_columns)), accumulate=True)
            multiply(mma_kv, dk, ds_half, mma_kv.make_fragment_B(thr_kv.partition_B(q_columns)), accumulate=True)
        warpgroup.commit_group()
        # dK of half 0 has read its dS, over which warpgroup 1 writes dQ.
        warpgroup.wait_group(1)
        if group == 1:
            cute.arch.barrier_arrive(barrier_id=BARRIER_DS, number_of_threads=CONSUMERS)

    @cute.jit
    def hide_keys(
        self,
        p: cute.Tensor,
        info: cute.Tensor,
        task_qrows: cute.Tensor,
        half: cutlass.Constexpr,
        thread: Int32,
        group: Int32,
    ) -> None:
        """P = 0 where the key comes after the query."""
        key = group * HALF + thread // 32 * 16 + thread % 32 // 4
        for group8 in cutlass.range_constexpr(8):
            for i in cutlass.range_constexpr(2):
                column = group8 * 8 + thread % 4 * 2 + i
                slot = column // 8 if self.ratio == 16 else (half * HALF + column) // self.ratio
                limit = self.token_row(info, task_qrows, slot) + info[5]
                for below in cutlass.range_constexpr(2):
                    if key + below * 8 > limit:
                        p[group8 * 4 + below * 2 + i] = Float32(0.0)

    @cute.jit
    def store_ds(self, shared: Any, words: cute.Tensor, half: cutlass.Constexpr, thread: Int32, group: Int32) -> None:
        """dS^T to shared memory as [half][key][64 rows], 128-byte swizzle."""
        row = group * HALF + thread // 32 * 16 + thread % 16
        base = shared.ds.data_ptr().toint() + half * (KEYS * 128) + row * 128
        upper = thread % 32 // 16
        for j in cutlass.range_constexpr(4):
            column = ((2 * j + upper) ^ (row % 8)) * 16
            store_matrix_x4(Int32(base) + column, [words[4 * j + i] for i in range(4)])


def _fake_tensors(ratio: int, dq_accumulation: str) -> list[Any]:
    symbol, fake = cute.sym_int, cute.runtime.make_fake_compact_tensor
    tokens, rows, q_heads, kv_heads = symbol(), symbol(divisibility=128), symbol(divisibility=ratio), symbol()
    capacity, documents = symbol(), symbol()

    def tensor(dtype: Any, shape: tuple[Any, ...]) -> Any:
        order = tuple(reversed(range(len(shape))))
        return fake(dtype, shape, stride_order=order, assumed_align=16)

    slots = ROWS // ratio
    sums = SUM_DTYPES[dq_accumulation]
    return [
        tensor(BFloat16, (tokens, q_heads, HEAD_DIM)),
        tensor(BFloat16, (rows, kv_heads, HEAD_DIM)),
        tensor(BFloat16, (rows, kv_heads, HEAD_DIM)),
        tensor(BFloat16, (tokens, q_heads, HEAD_DIM)),
        tensor(Float32, (tokens, q_heads)),
        tensor(Float32, (tokens, q_heads)),
        tensor(Int32, (capacity, 4)),
        tensor(Int32, (capacity, slots)),
        tensor(Int32, (capacity, slots)),
        tensor(Int32, (symbol(),)),
        tensor(Int32, (documents,)),
        tensor(Int32, (symbol(),)),
        tensor(sums, (tokens, q_heads, HEAD_DIM)),
        tensor(Float32, (symbol(), kv_heads, KEYS * HEAD_DIM)),
        tensor(Float32, (symbol(), kv_heads, KEYS * HEAD_DIM)),
        *((tensor(Float32, (tokens, q_heads)), tensor(Float32, (kv_heads, 2))) if dq_accumulation == "fp16" else ()),
    ]


def compile_main(
    *, ratio: int = 16, dq_accumulation: str = "bf16", gradients: str = "all", options: str = ""
) -> Callable[..., None]:
    """Compile the kernel for sm_90a; the module docstring gives the call.

    Args:
        ratio: query heads per kv head: 1, 2, 4, 8 or 16.
        dq_accumulation: type of ``dq_sum``: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        gradients: what the kernel adds: ``"all"``, ``"dq"`` or ``"dkv"``; the other sums are left alone.
        options: more options for ``cute.compile``.
    """
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    function = MainBackwardSm90(ratio, dq_accumulation, gradients)
    arguments = _fake_tensors(ratio, dq_accumulation)
    compiled: Callable[..., None] = cute.compile(
        function.scaled if dq_accumulation == "fp16" else function, *arguments, Float32(1.0), Int32(1), stream,
        options=f"--enable-tvm-ffi {options}".strip(),
    )  # fmt: skip
    return compiled
