"""Main kernel of the backward on Hopper (sm_90a): dQ, dK and dV of a list of tasks.

A task is ``128 // ratio`` queries of one kv head (128 folded rows, row n = slot * ratio + head in group) against one
block of 128 keys. A run of tasks of one key block is a *segment*: its K and V stay in shared memory, its dK and dV in
registers.

Threads: three warpgroups. Warpgroup 0 produces: warp 0 loads K, V and the rows of Q and dO by TMA, warp 1 the row
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
- dq_sum: bf16 or fp32 ``[T, Hkv * ratio, 128]``, zeroed by the caller. In bf16 it is dQ and needs no postprocess.
- dk_sum, dv_sum: fp32 ``[W // 128, Hkv, 128 * 128]``, zeroed by the caller; :func:`dkv_sum_index` is their order.
- softmax_scale: float32. grid: int32, CTAs to launch; one fits on a multiprocessor.

The stream is that of the TVM FFI environment (torch's current stream).
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from msa_vendored.backward.sm90_ops import (
    LOG2_E,
    SWIZZLE_128B,
    bulk_add_f32,
    exp2_approx,
    fma,
    multiply,
    pack_bf16,
    store_matrix_x4,
    store_shared_f32x2,
    store_shared_f32x4,
    swizzled,
)
from msa_vendored.backward.tasks import DESCRIPTOR_WORDS

HEAD_DIM = 128
KEYS = 128
ROWS = 128
HALF = 64
STAGES = 2
WARPGROUP = 128
THREADS = 3 * WARPGROUP
CONSUMERS = 2 * WARPGROUP
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
TILE_BYTES = ROWS * HEAD_DIM * 2
PLACE = 8
"""Words of ``info`` before the token rows of the slots: kv head, key block, flags, valid keys, task, distance from the
token row of a query to its last visible key in the block, 2 unused."""
FIRST, LAST, MASKED = 1, 2, 4
EVICT_LAST = 0x14F0000000000000
"""L2 policy of CUTLASS's ``TMA::CacheHintSm90`` for Q, dO and dQ: up to 16 tasks of a window come back to them."""
DQ_BYTES = 4096
"""Shared memory of a warp's dQ: 16 rows of bf16, or 8 of fp32 at a time."""
BARRIER_DS = 1
"""Named barriers 1, 2: dS of half 0, 1 is stored; 3, 4: the other warpgroup may overwrite it; 5: K and V are cleaned,
or Q and dO were read for the last time in a segment; 6, 7: the warpgroup's own warps may overwrite dS."""


def dkv_sum_index(key: int, d: int) -> int:
    """Where element (key of the block, d) is in the 128 * 128 elements of a block of ``dk_sum`` or ``dv_sum``.

    Each of 8 warps adds 16 keys as it holds them in its wgmma accumulator: 2,048 consecutive elements, of which 128 are
    8 columns. Element 4 l + i of these is accumulator i of lane l: keys l // 4 (+ 8 for i = 2, 3), columns
    2 (l % 4) + i % 2.
    """
    warp, lane, below = key // 16, key % 8 * 4 + d % 8 // 2, key % 16 // 8
    return (warp * 16 + d // 8) * 128 + lane * 4 + below * 2 + d % 2


class MainBackwardSm90:
    """The kernel for one head ratio and one type of dQ sums.

    Args:
        ratio: query heads per kv head: 1, 2, 4, 8 or 16.
        dq_accumulation: ``"bf16"`` or ``"fp32"``.
        gradients: ``"all"``, ``"dkv"``, or ``"dq"``, which then adds to a token in the order of its tasks.
    """

    def __init__(self, ratio: int, dq_accumulation: str, gradients: str = "all") -> None:
        self.ratio = ratio
        self.wants_dq, self.wants_dkv = gradients != "dkv", gradients != "dq"
        # TMA reductions of one CTA may overtake one another until they are complete, not merely read.
        self.read_suffices = gradients != "dq"
        self.slots = ROWS // ratio
        self.bf16_sum = dq_accumulation == "bf16"
        # Elements of dQ in 128 bytes, the width of a swizzled row of shared memory.
        self.sum_width = 64 if self.bf16_sum else 32
        # With 8 or 16 heads one TMA box brings both 64-column halves of a token: [2][ratio][64] elements.
        self.wide = ratio >= 8
        self.group_stride = ratio * HEAD_DIM if self.wide else 8 * 64
        self.half_offset = 8 * 64 if ratio == 16 else 8 * self.group_stride
        self.column_stride = ratio * 64 if self.wide else ROWS * 64
        self.slot_stride = ratio * HEAD_DIM if self.wide else ratio * 64
        # 128 token rows of one head do not fit in shared memory; they are then read from the table again.
        self.rows_shared = ratio > 1
        self.info_words = PLACE + (self.slots if self.rows_shared else 0)

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
        """Host side: tensor maps and launch."""
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
            self._mma(HEAD_DIM, warpgroup.OperandSource.SMEM, OperandMajorMode.MN, OperandMajorMode.MN),
        )
        self.kernel(
            q_atom, q_map, do_atom, do_map, k_atom, k_map, v_atom, v_map, dq_atom, dq_map, mmas,
            lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts, descriptor,
            dk_sum, dv_sum, softmax_scale,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    def _split_columns(self, tensor: cute.Tensor, width: int = 64) -> cute.Tensor:
        """``[rows, heads, 128]`` as (width, heads, 128 // width, rows)."""
        rows, heads, _ = tensor.shape
        stride = (1, tensor.stride[1], width, tensor.stride[0])
        layout = cute.make_layout((width, heads, HEAD_DIM // width, rows), stride=stride)
        return cute.make_tensor(tensor.iterator, layout)

    def _storage(self) -> Any:
        info_words, stages = self.info_words * STAGES, STAGES

        @cute.struct
        class Storage:
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, KEYS * HEAD_DIM], 1024]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, KEYS * HEAD_DIM], 1024]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * ROWS * HEAD_DIM], 1024]
            do: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * ROWS * HEAD_DIM], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[BFloat16, KEYS * ROWS], 1024]
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, stages * ROWS * 2], 16]
            info: cute.struct.Align[cute.struct.MemRange[Int32, info_words], 16]
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
        softmax_scale: Float32,
    ) -> None:
        """Device side: initialise barriers, then one role per warp."""
        shared = cutlass.utils.SmemAllocator().allocate(self._storage())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(shared.full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(shared.ready.data_ptr() + stage, 1)
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
                self.load_statistics(
                    shared, lse, delta, task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts,
                    descriptor, softmax_scale,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                shared, dq_atom, dq_map, mmas, task_qrows, descriptor, dk_sum, dv_sum, softmax_scale
            )  # fmt: skip

    @cute.jit
    def chunk_interval(self, chunk: Int32, descriptor: cute.Tensor) -> tuple[Int32, Int32]:
        """First task of a chunk and the one after its last, as ``tasks.chunk_interval``."""
        full = descriptor[2]
        begin = chunk * descriptor[1]
        end = begin + descriptor[1]
        if chunk >= full:
            begin = full * descriptor[1] + (chunk - full) * descriptor[3]
            end = cutlass.min(begin + descriptor[3], descriptor[0])
        if descriptor[1] == 0:
            begin, end = descriptor[DESCRIPTOR_WORDS + chunk], descriptor[DESCRIPTOR_WORDS + 1 + chunk]
        return begin, end

    @cute.jit
    def load_tiles(
        self,
        shared: Any,
        q_atom: Any,
        q_map: cute.Tensor,
        do_atom: Any,
        do_map: cute.Tensor,
        k_atom: Any,
        k_map: cute.Tensor,
        v_atom: Any,
        v_map: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        descriptor: cute.Tensor,
    ) -> None:
        """Warp 0: K and V once per segment, Q and dO of every task."""
        lane = cute.arch.lane_idx()
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        kv_full, kv_empty = shared.kv_full.data_ptr(), shared.kv_empty.data_ptr()
        s_q, g_q = self.partition_rows(q_atom, shared.q.data_ptr(), q_map)
        s_do, g_do = self.partition_rows(do_atom, shared.do.data_ptr(), do_map)
        s_k, g_k = self.partition_keys(k_atom, shared.k.data_ptr(), k_map)
        s_v, g_v = self.partition_keys(v_atom, shared.v.data_ptr(), v_map)
        keep = Int64(EVICT_LAST)
        count, segment, loaded_head, loaded_block = Int32(0), Int32(0), Int32(-1), Int32(-1)
        for chunk in cutlass.range(cute.arch.block_idx()[0], descriptor[4], cute.arch.grid_dim()[0], unroll=1):
            begin, end = self.chunk_interval(chunk, descriptor)
            for task in cutlass.range(begin, end, 1, unroll=1):
                head, block = task_meta[task, 1], task_meta[task, 2]
                stage, phase = count % STAGES, (count // STAGES) % 2
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * TILE_BYTES)
                for base in cutlass.range_constexpr(0, self.slots, 32):
                    row = Int32(-1)
                    if base + lane < self.slots:
                        row = task_qrows[task, base + lane]
                    for slot in cutlass.range_constexpr(base, min(base + 32, self.slots)):
                        token = cute.arch.shuffle_sync(row, slot - base)
                        for half in cutlass.range_constexpr(1 if self.wide else 2):
                            source = (None, head, half, token)
                            target = (None, slot, half, stage)
                            cute.copy(q_atom, g_q[source], s_q[target], tma_bar_ptr=full + stage, cache_policy=keep)
                            cute.copy(do_atom, g_do[source], s_do[target], tma_bar_ptr=full + stage, cache_policy=keep)
                if task == begin or head != loaded_head or block != loaded_block:
                    loaded_head, loaded_block = head, block
                    cute.arch.mbarrier_wait(kv_empty, (segment % 2) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(kv_full, 2 * TILE_BYTES)
                    cute.copy(k_atom, g_k[None, head, block], s_k, tma_bar_ptr=kv_full)
                    cute.copy(v_atom, g_v[None, head, block], s_v, tma_bar_ptr=kv_full)
                    segment += 1
                count += 1

    def partition_rows(self, atom: Any, base: Any, tensor_map: cute.Tensor) -> tuple[Any, Any]:
        """TMA views of Q or dO: shared (box, slot, column half, stage), global (box, kv head, column half, token)."""
        halves = 1 if self.wide else 2
        inner = (64, self.ratio, 2 // halves, 1)
        layout = cute.make_layout(
            (inner, self.slots, halves, STAGES),
            stride=((1, 64, self.column_stride, 0), self.slot_stride, self.column_stride, ROWS * HEAD_DIM),
        )
        tiles = cute.local_tile(tensor_map, inner, (None, None, None, None))
        tiles = cute.group_modes(tiles, 0, 4)
        s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.make_tensor(swizzled(base), layout), tiles)
        return s, g[None, 0, None, None, None]

    def partition_keys(self, atom: Any, base: Any, tensor_map: cute.Tensor) -> tuple[Any, Any]:
        """TMA views of K or V: shared (box), global (box, kv head, key block)."""
        inner = (64, 1, 2, KEYS)
        layout = cute.make_layout((inner,), stride=((1, 0, KEYS * 64, 64),))
        tiles = cute.group_modes(cute.local_tile(tensor_map, inner, (None, None, None, None)), 0, 4)
        s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.make_tensor(swizzled(base), layout), tiles)
        return s, g[None, 0, None, 0, None]

    @cute.jit
    def load_statistics(
        self,
        shared: Any,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        descriptor: cute.Tensor,
        softmax_scale: Float32,
    ) -> None:
        """Warp 1: per folded row (lse * log2(e), delta * scale), per task its place, flags and key limits."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        last_head, last_block = Int32(-1), Int32(-1)
        for chunk in cutlass.range(cute.arch.block_idx()[0], descriptor[4], cute.arch.grid_dim()[0], unroll=1):
            begin, end = self.chunk_interval(chunk, descriptor)
            for task in cutlass.range(begin, end, 1, unroll=1):
                document, head, block = task_meta[task, 0], task_meta[task, 1], task_meta[task, 2]
                flags = Int32(0)
                if task == begin or head != last_head or block != last_block:
                    flags = flags | FIRST
                last_head, last_block = head, block
                if task + 1 == end:
                    flags = flags | LAST
                else:
                    if task_meta[task + 1, 1] != head or task_meta[task + 1, 2] != block:
                        flags = flags | LAST
                length = cu_seqlens[document + 1] - cu_seqlens[document]
                keys = document_workspace_starts[document] + length - block * KEYS
                stage, phase = count % STAGES, (count // STAGES) % 2
                cute.arch.mbarrier_wait(shared.empty.data_ptr() + stage, phase ^ 1)
                info = shared.info.data_ptr() + stage * self.info_words
                info = cute.make_tensor(info, cute.make_layout(self.info_words))
                distance = task_qpos[task, 0] - task_qrows[task, 0] - block * KEYS
                if self.load_token_rows(info, task_qrows, task, distance, lane):
                    flags = flags | MASKED
                self.load_rows(shared, lse, delta, task_qrows, task, head, stage, lane, softmax_scale)
                if lane == 0:
                    info[0] = head
                    info[1] = block
                    info[2] = flags
                    info[3] = cutlass.min(keys, KEYS)
                    info[4] = task
                    info[5] = distance
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.ready.data_ptr() + stage)
                count += 1

    @cute.jit
    def load_token_rows(
        self, info: cute.Tensor, task_qrows: cute.Tensor, task: Int32, distance: Int32, lane: Int32
    ) -> Boolean:
        """Token row of each slot; whether any key of the block is hidden from any of them."""
        hidden = Boolean(False)
        for base in cutlass.range_constexpr(0, self.slots, 32):
            slot = base + lane
            if slot < self.slots:
                row = task_qrows[task, slot]
                if cutlass.const_expr(self.rows_shared):
                    info[PLACE + slot] = row
                if row >= 0 and row + distance < KEYS - 1:
                    hidden = Boolean(True)
        return cute.arch.vote_any_sync(hidden)

    @cute.jit
    def load_rows(
        self,
        shared: Any,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_qrows: cute.Tensor,
        task: Int32,
        head: Int32,
        stage: Int32,
        lane: Int32,
        softmax_scale: Float32,
    ) -> None:
        """Statistics in the order of (half, row of the half). Rows without a query or a finite lse give P = dS = 0."""
        base = shared.statistics.data_ptr() + stage * (2 * ROWS)
        statistics = cute.make_tensor(base, cute.make_layout((2, ROWS), stride=(ROWS, 1)))
        for i in cutlass.range_constexpr(ROWS // 32):
            n = i * 32 + lane
            slot, member = n // self.ratio, n % self.ratio
            row = task_qrows[task, slot]
            value, correction = Float32.inf, Float32(0.0)
            if row >= 0:
                loaded = lse[row, head * self.ratio + member] * LOG2_E
                # Neither infinity nor NaN passes.
                if loaded - loaded == 0.0:
                    value = loaded
                    correction = delta[row, head * self.ratio + member] * softmax_scale
            position = n
            if cutlass.const_expr(self.ratio == 16):
                position = member // 8 * HALF + slot * 8 + member % 8
            statistics[0, position] = value
            statistics[1, position] = correction

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
        mma_s, mma_kv, mma_q = mmas
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
                for half in cutlass.range_constexpr(2):
                    self.process_half(
                        shared, mma_s, mma_kv, dk, dv, info, task_qrows, flags, last_flags, half, stage, thread, group,
                        softmax_scale,
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

    def partition_sums(self, atom: Any, base: Any, tensor_map: cute.Tensor) -> tuple[Any, Any]:
        """TMA views of dQ: shared (box, token of a warpgroup's half), global (box, group of heads, token)."""
        heads = min(self.ratio, 8)
        inner = (self.sum_width, heads, HEAD_DIM // self.sum_width, 1)
        box = (1, self.sum_width, self.sum_width * heads, 0)
        count = KEYS * ROWS * 2 // (heads * HEAD_DIM * (2 if self.bf16_sum else 4))
        layout = cute.make_layout((inner, count), stride=(box, heads * HEAD_DIM))
        dtype = BFloat16 if self.bf16_sum else Float32
        pointer = cute.recast_ptr(base, cute.make_swizzle(*SWIZZLE_128B), dtype=dtype)
        tiles = cute.group_modes(cute.local_tile(tensor_map, inner, (None, None, None, None)), 0, 4)
        s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.make_tensor(pointer, layout), tiles)
        return s, g[None, 0, None, 0, None]

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
    def process_half(
        self,
        shared: Any,
        mma_s: Any,
        mma_kv: Any,
        dk: cute.Tensor,
        dv: cute.Tensor,
        info: cute.Tensor,
        task_qrows: cute.Tensor,
        flags: Int32,
        last_flags: Int32,
        half: cutlass.Constexpr,
        stage: Int32,
        thread: Int32,
        group: Int32,
        softmax_scale: Float32,
    ) -> None:
        """S, dP, P, dS of 64 folded rows against 64 keys; adds to dV and dK, leaves dS in shared memory."""
        keys = cute.make_layout((HALF, (64, 2)), stride=(64, (1, KEYS * 64)))
        s_k = cute.make_tensor(swizzled(shared.k.data_ptr() + group * (HALF * 64)), keys)
        s_v = cute.make_tensor(swizzled(shared.v.data_ptr() + group * (HALF * 64)), keys)
        thr_s, thr_kv = mma_s.get_slice(thread), mma_kv.get_slice(thread)
        q_rows = self.rows_tensor(shared.q.data_ptr(), half, stage, columns_first=False)
        do_rows = self.rows_tensor(shared.do.data_ptr(), half, stage, columns_first=False)
        q_columns = self.rows_tensor(shared.q.data_ptr(), half, stage, columns_first=True)
        do_columns = self.rows_tensor(shared.do.data_ptr(), half, stage, columns_first=True)
        s = cute.make_rmem_tensor(mma_s.partition_shape_C((HALF, HALF)), Float32)
        dp = cute.make_rmem_tensor(mma_s.partition_shape_C((HALF, HALF)), Float32)
        a_shape = mma_kv.partition_shape_A((HALF, HALF))
        p_half = cute.make_rmem_tensor(a_shape, BFloat16)
        ds_half = cute.make_rmem_tensor(a_shape, BFloat16)
        p_words, ds_words = cute.recast_tensor(p_half, Int32), cute.recast_tensor(ds_half, Int32)

        warpgroup.fence()
        multiply(mma_s, s, mma_s.make_fragment_A(thr_s.partition_A(s_k)),
                 mma_s.make_fragment_B(thr_s.partition_B(q_rows)), accumulate=False)  # fmt: skip
        warpgroup.commit_group()
        # dK of the half before is done, its operand's registers are free for dP.
        warpgroup.wait_group(1)
        multiply(mma_s, dp, mma_s.make_fragment_A(thr_s.partition_A(s_v)),
                 mma_s.make_fragment_B(thr_s.partition_B(do_rows)), accumulate=False)  # fmt: skip
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        base = shared.statistics.data_ptr() + stage * (2 * ROWS) + half * HALF
        statistics = cute.make_tensor(base, cute.make_layout((2, HALF // 2, 2), stride=(1, 2, ROWS)))
        scale_log2 = softmax_scale * LOG2_E
        pair = cute.make_rmem_tensor((2,), Float32)
        for group8 in cutlass.range_constexpr(8):
            cute.autovec_copy(statistics[None, group8 * 4 + thread % 4, 0], pair)
            for i in cutlass.range_constexpr(4):
                s[group8 * 4 + i] = exp2_approx(fma(s[group8 * 4 + i], scale_log2, -pair[i % 2]))
        # A branch here keeps the exponentials before the wait for dP: ptxas does not move them across it.
        if flags & MASKED:
            self.hide_keys(s, info, task_qrows, half, thread, group)
        warpgroup.wait_group(0)
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
        elif cutlass.const_expr(half == 0):
            cute.arch.barrier(barrier_id=6, number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier(barrier_id=7, number_of_threads=WARPGROUP)
        if cutlass.const_expr(self.wants_dq):
            self.store_ds(shared, ds_words, half, thread, group)
        cute.arch.fence_proxy("async.shared", space="cta")
        if group != half:
            cute.arch.barrier_arrive(barrier_id=BARRIER_DS + half, number_of_threads=CONSUMERS)
        warpgroup.fence()
        if cutlass.const_expr(self.wants_dkv):
            multiply(mma_kv, dv, p_half, mma_kv.make_fragment_B(thr_kv.partition_B(do_columns)), accumulate=True)
            multiply(mma_kv, dk, ds_half, mma_kv.make_fragment_B(thr_kv.partition_B(q_columns)), accumulate=True)
        warpgroup.commit_group()
        if cutlass.const_expr(half == 0):
            warpgroup.wait_group(0)

    def token_row(self, info: cute.Tensor, task_qrows: cute.Tensor, slot: Any) -> Int32:
        """Row of q of a slot, -1 if it holds no query."""
        return info[PLACE + slot] if self.rows_shared else task_qrows[info[4], slot]

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
        first_box = (group * 4 + warp) * (DQ_BYTES // (min(self.ratio, 8) * HEAD_DIM * (2 if self.bf16_sum else 4)))
        if cutlass.const_expr(self.wants_dq and self.bf16_sum):
            self.store_dq_bf16(dq, base, lane)
            self.reduce_boxes(dq_atom, s_dq, g_dq, token, head, first_box, 0, boxes)
        elif cutlass.const_expr(self.wants_dq):
            for below in cutlass.range_constexpr(2):
                if cutlass.const_expr(below == 1):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                self.store_dq_fp32(dq, base, below, lane)
                self.reduce_boxes(dq_atom, s_dq, g_dq, token, head, first_box, below * (boxes // 2), boxes // 2)

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
    def store_dq_bf16(self, dq: cute.Tensor, base: Int32, lane: Int32) -> None:
        """16 rows of dQ to shared memory as boxes [token][column half][head][64], 128-byte swizzle."""
        heads = min(self.ratio, 8)
        row, below, upper = lane % 8, lane // 8 % 2, lane // 16
        start = base + below * 2048 + row // heads * (heads * 256) + row % heads * 128
        for j in cutlass.range_constexpr(8):
            address = start + j // 4 * (heads * 128)
            chunk = (2 * (j % 4) + upper) ^ (address // 128 % 8)
            words = [pack_bf16(dq[8 * j + 2 * i], dq[8 * j + 2 * i + 1]) for i in range(4)]
            store_matrix_x4(address + chunk * 16, words)

    @cute.jit
    def store_dq_fp32(self, dq: cute.Tensor, base: Int32, below: cutlass.Constexpr, lane: Int32) -> None:
        """8 rows of dQ to shared memory as boxes [token][column quarter][head][32], 128-byte swizzle."""
        heads = min(self.ratio, 8)
        row, pair = lane // 4, lane % 4
        start = base + row // heads * (heads * 512) + row % heads * 128
        for j in cutlass.range_constexpr(16):
            address = start + j // 4 * (heads * 128)
            chunk = (2 * (j % 4) + pair // 2) ^ (address // 128 % 8)
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


def _fake_tensors(ratio: int, dq_accumulation: str) -> list[Any]:
    symbol, fake = cute.sym_int, cute.runtime.make_fake_compact_tensor
    tokens, rows, q_heads, kv_heads = symbol(), symbol(divisibility=128), symbol(divisibility=ratio), symbol()
    capacity, documents = symbol(), symbol()

    def tensor(dtype: Any, shape: tuple[Any, ...]) -> Any:
        order = tuple(reversed(range(len(shape))))
        return fake(dtype, shape, stride_order=order, assumed_align=16)

    slots = ROWS // ratio
    sums = BFloat16 if dq_accumulation == "bf16" else Float32
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
    ]


def compile_main(
    *, ratio: int = 16, dq_accumulation: str = "bf16", gradients: str = "all", options: str = ""
) -> Callable[..., None]:
    """Compile the kernel for sm_90a; the module docstring gives the call.

    Args:
        ratio: query heads per kv head: 1, 2, 4, 8 or 16.
        dq_accumulation: type of ``dq_sum``, ``"bf16"`` or ``"fp32"``.
        gradients: what the kernel adds: ``"all"``, ``"dq"`` or ``"dkv"``; the other sums are left alone.
        options: more options for ``cute.compile``.
    """
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    function = MainBackwardSm90(ratio, dq_accumulation, gradients)
    arguments = _fake_tensors(ratio, dq_accumulation)
    compiled: Callable[..., None] = cute.compile(
        function, *arguments, Float32(1.0), Int32(1), stream, options=f"--enable-tvm-ffi {options}".strip()
    )
    return compiled
