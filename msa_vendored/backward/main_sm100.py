"""The main kernel of the SM100/SM103 backward: gradients of one list of tiles, by tcgen05.

A CTA walks a contiguous interval of the task table. One task is one tile (see ``sm100_layout``): up to ``128 // ratio``
queries of one key head against one block of 128 keys. A run of tasks of one key head and block is a *segment*: K and V
stay in shared memory, dK and dV in tensor memory, and are reduced to global memory at its end.

``docs/sm100_backward.md`` draws tensor memory, shared memory, warps, and who waits for whom. The order of products is
dV(i), dP(i), S(i+1), dK(i), dQ(i): while compute warps turn S(i+1) into P, the tensor cores do dK(i) and dQ(i).
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from msa_vendored.backward import sm100_layout as plan
from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import HEAD_DIM, STAGES, TILE, Barrier, Column, Smem

LOG2_E = math.log2(math.e)
NO_WEIGHT = -math.inf


class Context:
    """What the roles of one CTA share, as values of the kernel. Filled once, before the roles part."""

    chunk: Any
    grid: Any
    walk: Any
    smem: Any
    tmem: Any
    descriptor: Any
    lane: Any
    warp: Any
    key_heads: Any
    scale: Any
    tables: Any
    maps: Any
    rows: Any
    out: Any


class MainKernel:
    """One compiled variant.

    Attributes:
        ratio: query heads for each key head: 1, 2, 4, 8 or 16.
        dq_dtype: of ``dq_pool``, BFloat16 or Float32.
    """

    def __init__(self, ratio: int, dq_dtype: Any) -> None:
        self.ratio = ratio
        self.slots = plan.slots(ratio)
        self.dq_dtype = dq_dtype
        self.group = plan.head_group(ratio, dq_dtype.width // 8)
        self.box_groups = max(1, ratio // plan.SWIZZLE_ROWS)

    # -- host ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        grad_out: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        descriptor: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        dq_pool: cute.Tensor,
        dkv: cute.Tensor,
        softmax_scale: Float32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        maps = [self._row_map(q), self._row_map(grad_out), self._block_map(k), self._block_map(v)]
        tables = (task_meta, task_qrows, task_qpos, descriptor, cu_seqlens, document_workspace_starts)
        self.kernel(*maps, lse, delta, *tables, dq_pool, dkv, k.shape[1], softmax_scale).launch(
            grid=(ctas, 1, 1),
            block=(plan.PLAN.threads, 1, 1),
            smem=plan.smem_bytes(self.ratio),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _row_map(self, tensor: cute.Tensor) -> Any:
        """Tensor map of q or dO: the rows of one token and key head, in the order of shared memory, are one box."""
        tokens, heads = tensor.shape[0], tensor.shape[1]
        groups = heads // plan.SWIZZLE_ROWS
        shape = (64, plan.SWIZZLE_ROWS, 2, groups, tokens)
        stride = (1, HEAD_DIM, 64, plan.SWIZZLE_ROWS * HEAD_DIM, cute.assume(heads * HEAD_DIM, divby=HEAD_DIM))
        return self._make_map(tensor, shape, stride, (64, plan.SWIZZLE_ROWS, 2, self.box_groups, 1))

    def _block_map(self, tensor: cute.Tensor) -> Any:
        """Tensor map of k or v: one block of one key head is one box of 32 KiB."""
        rows, heads = tensor.shape[0], tensor.shape[1]
        row_stride = cute.assume(heads * HEAD_DIM, divby=HEAD_DIM)
        group_stride = cute.assume(plan.SWIZZLE_ROWS * heads * HEAD_DIM, divby=HEAD_DIM)
        shape = (64, plan.SWIZZLE_ROWS, 2, rows // plan.SWIZZLE_ROWS, heads)
        stride = (1, row_stride, 64, group_stride, HEAD_DIM)
        return self._make_map(tensor, shape, stride, (64, plan.SWIZZLE_ROWS, 2, TILE // plan.SWIZZLE_ROWS, 1))

    def _make_map(self, tensor: cute.Tensor, shape: Any, stride: Any, box: tuple[int, ...]) -> Any:
        view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        box_layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(box))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box_layout, box)[0]

    # -- device -------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        grad_out_map: cute.CopyAtom,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        descriptor: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        dq_pool: cute.Tensor,
        dkv: cute.Tensor,
        key_heads: Int32,
        softmax_scale: Float32,
    ) -> None:
        c = Context()
        c.descriptor = Int64(descriptor.iterator.toint())
        c.smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024).toint())
        c.key_heads, c.scale = key_heads, softmax_scale
        tables = (task_meta, task_qrows, task_qpos, cu_seqlens, document_workspace_starts)
        c.tables = tuple(Int64(table.iterator.toint()) for table in tables)
        c.maps = tuple(ptx.tensor_map_address(atom) for atom in (q_map, grad_out_map, k_map, v_map))
        c.rows = (Int64(lse.iterator.toint()), Int64(delta.iterator.toint()))
        c.out = (Int64(dq_pool.iterator.toint()), Int64(dkv.iterator.toint()), dkv.shape[0])
        if cute.arch.block_idx()[0] < ptx.load_global_ints(c.descriptor + 16, 1)[0]:
            self._run(c)

    def _enter(self, c: Context) -> None:
        """Loads what a role needs in its own branch: kept in registers from before, it would be spilled there."""
        c.walk = (*ptx.load_global_ints(c.descriptor, 4), *ptx.load_global_ints(c.descriptor + 16, 1))
        c.chunk, c.grid = ptx.read_cta_index(), cute.arch.grid_dim()[0]
        c.lane = cute.arch.lane_idx()
        c.tmem = ptx.load_shared_ints(c.smem, Smem.TMEM_ADDRESS, 1)[0]

    @cute.jit
    def _interval(self, c: Context, chunk: Any) -> Any:
        """First task of a chunk and the one after its last: ``full`` chunks of ``size``, then chunks of ``tail``."""
        rows, size, full, tail, _ = c.walk
        begin, end = chunk * size, chunk * size + size
        if chunk >= full:
            begin = full * size + (chunk - full) * tail
            end = cutlass.min(begin + tail, rows)
        return begin, end

    @cute.jit
    def _next(self, c: Context, chunk: Any, task: Any, end: Any) -> Any:
        """The task that this CTA does next, and whether there is one (the same task if not)."""
        following, more = task + 1, Int32(1)
        if following == end:
            following, _ = self._interval(c, chunk + c.grid)
            if chunk + c.grid >= c.walk[4]:
                following, more = task, Int32(0)
        return following, more

    def _barrier(self, c: Context, which: Any, stage: Any = 0) -> Any:
        """Shared-memory address of an mbarrier."""
        return c.smem + (Smem.BARRIERS + 8 * which) + stage * 8

    @cute.jit
    def _run(self, c: Context) -> None:
        c.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if c.warp == plan.MMA_WARP:
            with ptx.elect():
                for index, arrivals in enumerate(plan.barrier_arrivals()):
                    ptx.initialise_barrier(c.smem + (Smem.BARRIERS + 8 * index), arrivals)
                cute.arch.mbarrier_init_fence()
            ptx.allocate_tensor_memory(c.smem + Smem.TMEM_ADDRESS, plan.TMEM_COLUMNS)
        cute.arch.sync_threads()
        service, compute, reduce = plan.PLAN.registers
        if c.warp < 4:
            cute.arch.setmaxregister_decrease(service)
            if c.warp == plan.MMA_WARP:
                self._multiply(c)
            elif c.warp == plan.LOAD_WARP:
                self._load(c)
            elif c.warp == plan.ROW_WARP:
                self._stage_rows(c)
        elif c.warp < 8:
            cute.arch.setmaxregister_increase(compute)
            self._compute(c)
        else:
            if const_expr(reduce >= 168):
                cute.arch.setmaxregister_increase(reduce)
            else:
                cute.arch.setmaxregister_decrease(reduce)
            self._reduce(c)

    def _meta(self, c: Context, task: Any) -> list[Any]:
        """document_ordinal, kv_head, global_kblock, valid_queries of a task."""
        return ptx.load_global_ints(c.tables[0] + Int64(task) * 16, 4)

    # -- load warp ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _load(self, c: Context) -> None:
        self._enter(c)
        tile, segment, head_before, block_before = Int32(0), Int32(0), Int32(-1), Int32(-1)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self._interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                stage, parity = tile % STAGES, tile // STAGES % 2
                _, head, block, _ = self._meta(c, task)
                tokens = self._slot_words(c.tables[1], task)
                self._load_rows(c, (Barrier.Q_EMPTY, Barrier.Q_FULL, Smem.Q, c.maps[0]), stage, parity, head, tokens)
                self._load_rows(c, (Barrier.DO_EMPTY, Barrier.DO_FULL, Smem.DO, c.maps[1]), stage, parity, head, tokens)
                if head != head_before or block != block_before:
                    self._load_block(c, (Barrier.V_EMPTY, Barrier.V_FULL, Smem.V, c.maps[3]), segment, head, block)
                    self._load_block(c, (Barrier.K_EMPTY, Barrier.K_FULL, Smem.K, c.maps[2]), segment, head, block)
                    segment += 1
                    head_before, block_before = head, block
                tile += 1

    def _slot_words(self, table: Any, task: Any) -> list[Any]:
        """All slots of a task in ``task_qrows`` or ``task_qpos``."""
        row = table + Int64(task) * (self.slots * 4)
        return [word for start in range(0, self.slots, 4) for word in ptx.load_global_ints(row + start * 4, 4)]

    @cute.jit
    def _load_rows(self, c: Context, what: Any, stage: Any, parity: Any, head: Any, tokens: Any) -> None:
        empty, full, offset, tensor_map = what
        ptx.wait_barrier(self._barrier(c, empty, stage), parity ^ 1)
        with ptx.elect():
            barrier = self._barrier(c, full, stage)
            ptx.arrive_expecting(barrier, plan.OPERAND_BYTES)
            target = c.smem + offset + stage * plan.OPERAND_BYTES
            for slot, token in enumerate(tokens):
                box = target + slot * self.ratio * HEAD_DIM * 2
                ptx.copy_tensor(box, tensor_map, (0, 0, 0, head * self.box_groups, token), barrier)

    @cute.jit
    def _load_block(self, c: Context, what: Any, segment: Any, head: Any, block: Any) -> None:
        empty, full, offset, tensor_map = what
        ptx.wait_barrier(self._barrier(c, empty), segment % 2 ^ 1)
        with ptx.elect():
            ptx.arrive_expecting(self._barrier(c, full), plan.OPERAND_BYTES)
            group = block * (TILE // plan.SWIZZLE_ROWS)
            ptx.copy_tensor(c.smem + offset, tensor_map, (0, 0, 0, group, head), self._barrier(c, full))

    # -- row warp -----------------------------------------------------------------------------------------------------

    @cute.jit
    def _stage_rows(self, c: Context) -> None:
        """Row statistics as compute needs them: -lse * log2(e), -delta * scale, and the position of each query.

        A row without a finite lse, or of no query, gets weight 2**-inf = 0 and delta 0, so that P and dS are 0.
        """
        self._enter(c)
        tile = Int32(0)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self._interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                stage, parity = tile % STAGES, tile // STAGES % 2
                _, head, block, _ = self._meta(c, task)
                logs, deltas = self._load_statistics(c, task, head)
                ptx.wait_barrier(self._barrier(c, Barrier.ROW_EMPTY, stage), parity ^ 1)
                target = c.smem + stage * (TILE * 4) + c.lane * 16
                ptx.store_shared(target, logs, Smem.LSE)
                ptx.store_shared(target, deltas, Smem.DELTA)
                self._stage_positions(c, task, stage, block)
                cute.arch.sync_warp()
                with ptx.elect():
                    ptx.arrive(self._barrier(c, Barrier.ROW_FULL, stage))
                tile += 1

    def _load_statistics(self, c: Context, task: Any, head: Any) -> tuple[list[Any], list[Any]]:
        """The four rows of this lane."""
        width = min(self.ratio, 4)
        logs, deltas = [], []
        for part in range(4 // width):
            row = c.lane * 4 + part * width
            slot_address = Int64(task * self.slots + row // self.ratio) * 4
            token = ptx.load_global_ints(c.tables[1] + slot_address, 1)[0]
            head_in_group = head * self.ratio + row % self.ratio
            index = Int64(cutlass.max(token, 0)) * (c.key_heads * self.ratio) + head_in_group
            lse = ptx.load_global_floats(c.rows[0] + index * 4, width)
            delta = ptx.load_global_floats(c.rows[1] + index * 4, width)
            for x, y in zip(lse if width > 1 else [lse[0]], delta, strict=True):
                live = (token >= 0) & (x > -math.inf) & (x < math.inf)
                logs.append(ptx.select(live, x * -LOG2_E, Float32(NO_WEIGHT)))
                deltas.append(ptx.select(live, y * -c.scale, Float32(0.0)))
        return logs, deltas

    @cute.jit
    def _stage_positions(self, c: Context, task: Any, stage: Any, block: Any) -> None:
        if c.lane < self.slots:
            address = c.tables[2] + Int64(task * self.slots + c.lane) * 4
            position = ptx.load_global_ints(address, 1)[0]
            relative = cutlass.max(cutlass.min(position - block * TILE, TILE - 1), -1)
            target = c.smem + stage * (self.slots * 4) + c.lane * 4
            ptx.store_shared(target, [relative], Smem.POSITIONS)

    # -- mma warp -----------------------------------------------------------------------------------------------------

    @cute.jit
    def _multiply(self, c: Context) -> None:
        self._enter(c)
        first, _ = self._interval(c, c.chunk)
        document, head, block, _ = self._meta(c, first)
        tile, segment, fresh = Int32(0), Int32(0), Int32(1)
        self._await_block(c, Barrier.K_FULL, Smem.K, segment, document, block)
        self._multiply_s(c, Int32(0))
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self._interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                stage, parity, phase = tile % STAGES, tile // STAGES % 2, tile % 2
                following, more = self._next(c, chunk, task, end)
                next_document, next_head, next_block, _ = self._meta(c, following)
                last = (next_head != head) | (next_block != block) | (more == 0)
                ptx.wait_barrier(self._barrier(c, Barrier.DO_FULL, stage), parity)
                if fresh != 0:
                    self._await_block(c, Barrier.V_FULL, Smem.V, segment, document, block)
                    self._multiply_dp(c, stage, phase)
                    ptx.wait_barrier(self._barrier(c, Barrier.DKV_EMPTY), segment % 2 ^ 1)
                self._multiply_dv(c, stage, phase, 1 - fresh)
                if fresh == 0:
                    self._multiply_dp(c, stage, phase)
                with ptx.elect():
                    ptx.commit(self._barrier(c, Barrier.DO_EMPTY, stage))
                    if last:
                        ptx.commit(self._barrier(c, Barrier.V_EMPTY))
                if not last:
                    self._multiply_s(c, tile + 1)
                self._multiply_dk_dq(c, stage, phase, 1 - fresh, last)
                fresh = Int32(last)
                if last & (more != 0):
                    segment += 1
                    self._await_block(c, Barrier.K_FULL, Smem.K, segment, next_document, next_block)
                    self._multiply_s(c, tile + 1)
                document, head, block = next_document, next_head, next_block
                tile += 1
        ptx.wait_barrier(self._barrier(c, Barrier.DQ_EMPTY), (tile - 1) % 2)
        ptx.wait_barrier(self._barrier(c, Barrier.DKV_EMPTY), segment % 2)
        ptx.fence_after_wait()
        ptx.free_tensor_memory(c.tmem, plan.TMEM_COLUMNS)

    @cute.jit
    def _await_block(self, c: Context, full: Any, offset: Any, segment: Any, document: Any, block: Any) -> None:
        """Waits for K or V and clears what lies past the end of the document, where 0 * NaN would be NaN."""
        ptx.wait_barrier(self._barrier(c, full), segment % 2)
        start, stop = ptx.load_global_ints(c.tables[3] + Int64(document) * 4, 1)[0], Int32(0)
        stop = ptx.load_global_ints(c.tables[3] + Int64(document) * 4 + 4, 1)[0]
        workspace = ptx.load_global_ints(c.tables[4] + Int64(document) * 4, 1)[0]
        keys = workspace + stop - start - block * TILE
        if keys < TILE:
            for row in cutlass.range(keys, TILE, unroll=1):
                group = c.smem + offset + row // plan.SWIZZLE_ROWS * plan.GROUP_BYTES
                half = c.lane // 16 * plan.HALF_BYTES
                target = group + half + row % plan.SWIZZLE_ROWS * 128 + c.lane % 16 * 8
                ptx.store_shared(target, [Int32(0), Int32(0)])
            ptx.fence_async_shared()
            cute.arch.sync_warp()

    def _descriptor(self, address: Any) -> Any:
        """Matrix descriptor of an operand that starts at a shared-memory address."""
        return Int64(address >> 4) | Int64(plan.matrix_descriptor())

    @cute.jit
    def _multiply_s(self, c: Context, tile: Any) -> None:
        """S^T = K Q^T."""
        stage = tile % STAGES
        ptx.wait_barrier(self._barrier(c, Barrier.Q_FULL, stage), tile // STAGES % 2)
        ptx.fence_after_wait()
        with ptx.elect():
            k = self._descriptor(c.smem + Smem.K)
            q = self._descriptor(c.smem + Smem.Q + stage * plan.OPERAND_BYTES)
            self._multiply_along_dims(c.tmem + Column.S, k, q)
            ptx.commit(self._barrier(c, Barrier.S_FULL))

    @cute.jit
    def _multiply_dp(self, c: Context, stage: Any, phase: Any) -> None:
        """dP^T = V dO^T, over the dQ of the tile before."""
        ptx.wait_barrier(self._barrier(c, Barrier.DQ_EMPTY), phase ^ 1)
        ptx.fence_after_wait()
        with ptx.elect():
            v = self._descriptor(c.smem + Smem.V)
            grad_out = self._descriptor(c.smem + Smem.DO + stage * plan.OPERAND_BYTES)
            self._multiply_along_dims(c.tmem + Column.DP, v, grad_out)
            ptx.commit(self._barrier(c, Barrier.DP_FULL))

    def _multiply_along_dims(self, target: Any, a: Any, b: Any) -> None:
        instruction = plan.instruction_descriptor(a_along_rows=False, b_along_rows=False)
        for step in range(8):
            offset = plan.k_step_bytes(step, along_dims=True) >> 4
            ptx.multiply_shared(target, a + offset, b + offset, instruction, step > 0)

    @cute.jit
    def _multiply_dv(self, c: Context, stage: Any, phase: Any, accumulate: Any) -> None:
        """dV += P^T dO, half of the query rows at a time."""
        for half in cutlass.range_constexpr(2):
            ptx.wait_barrier(self._barrier(c, Barrier.P_READY, half), phase)
            ptx.fence_after_wait()
            with ptx.elect():
                grad_out = self._descriptor(c.smem + Smem.DO + stage * plan.OPERAND_BYTES)
                self._multiply_rows(c.tmem + Column.DV, c.tmem + Column.S, grad_out, half, accumulate)

    @cute.jit
    def _multiply_dk_dq(self, c: Context, stage: Any, phase: Any, accumulate: Any, last: Any) -> None:
        """dK += dS^T Q, half of the query rows at a time, then dQ^T = K^T dS^T."""
        for half in cutlass.range_constexpr(2):
            ptx.wait_barrier(self._barrier(c, Barrier.DS_READY, half), phase)
            ptx.fence_after_wait()
            with ptx.elect():
                q = self._descriptor(c.smem + Smem.Q + stage * plan.OPERAND_BYTES)
                self._multiply_rows(c.tmem + Column.DK, c.tmem + Column.DP, q, half, accumulate)
        with ptx.elect():
            ptx.commit(self._barrier(c, Barrier.Q_EMPTY, stage))
            if last:
                ptx.commit(self._barrier(c, Barrier.DKV_FULL))
            self._multiply_dq(c)
            ptx.commit(self._barrier(c, Barrier.DQ_FULL))
            if last:
                ptx.commit(self._barrier(c, Barrier.K_EMPTY))

    def _multiply_rows(self, target: Any, a: Any, b: Any, half: int, accumulate: Any) -> None:
        instruction = plan.instruction_descriptor(a_along_rows=False, b_along_rows=True)
        for step in range(4 * half, 4 * half + 4):
            offset = plan.k_step_bytes(step, along_dims=False) >> 4
            ptx.multiply_tensor(target, a + step * 8, b + offset, instruction, accumulate if step == 0 else True)

    def _multiply_dq(self, c: Context) -> None:
        instruction = plan.instruction_descriptor(a_along_rows=True, b_along_rows=True)
        k, ds = self._descriptor(c.smem + Smem.K), self._descriptor(c.smem + Smem.DS)
        for step in range(8):
            offset = plan.k_step_bytes(step, along_dims=False) >> 4
            ptx.multiply_shared(c.tmem + Column.DP, k + offset, ds + offset, instruction, step > 0)

    # -- compute warps ------------------------------------------------------------------------------------------------

    @cute.jit
    def _compute(self, c: Context) -> None:
        """P = 2**(S * scale * log2(e) - lse * log2(e)), then dS = P * (dP - delta) * scale. A thread owns a key."""
        self._enter(c)
        key = (c.warp % 4) * 32 + c.lane
        lanes = c.tmem + ((c.warp % 4) << 21)
        log_scale, tile = c.scale * LOG2_E, Int32(0)
        log_scale_pair, scale_pair = ptx.pack(log_scale, log_scale), ptx.pack(c.scale, c.scale)
        ds_row = c.smem + Smem.DS + key // 8 * plan.GROUP_BYTES + key % 8 * 128
        ds_chunks = [ds_row + ((chunk ^ (key % 8)) << 4) for chunk in range(8)]
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self._interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                stage, phase = tile % STAGES, tile % 2
                ptx.wait_barrier(self._barrier(c, Barrier.ROW_FULL, stage), tile // STAGES % 2)
                ptx.wait_barrier(self._barrier(c, Barrier.S_FULL), phase)
                ptx.fence_after_wait()
                weights = []
                for half in cutlass.range_constexpr(2):
                    weights += self._weigh(c, lanes, stage, half, key, log_scale_pair)
                    self._signal(c, Barrier.P_READY + half)
                ptx.wait_barrier(self._barrier(c, Barrier.DP_FULL), phase)
                ptx.fence_after_wait()
                for half in cutlass.range_constexpr(2):
                    for quarter in cutlass.range_constexpr(2 * half, 2 * half + 2):
                        pairs = weights[16 * quarter : 16 * quarter + 16]
                        words = self._differentiate(c, lanes, stage, quarter, pairs, scale_pair)
                        ptx.store_tensor(lanes + Column.DP, words, 16 * quarter)
                        for part in cutlass.range_constexpr(4):
                            chunk = quarter % 2 * 4 + part
                            ptx.store_shared(ds_chunks[chunk], words[4 * part : 4 * part + 4], half * plan.HALF_BYTES)
                    if const_expr(half == 1):
                        ptx.fence_async_shared()
                    self._signal(c, Barrier.DS_READY + half)
                with ptx.elect():
                    ptx.arrive(self._barrier(c, Barrier.ROW_EMPTY, stage))
                tile += 1

    @cute.jit
    def _signal(self, c: Context, which: Any) -> None:
        """This warp's part of P or dS is in tensor memory (and its dS in shared memory)."""
        ptx.wait_tensor_stores()
        ptx.fence_before_signal()
        cute.arch.sync_warp()
        with ptx.elect():
            ptx.arrive(self._barrier(c, which))

    def _weigh(self, c: Context, lanes: Any, stage: Any, half: int, key: Any, log_scale: Any) -> list[Any]:
        """P of 64 query rows: to tensor memory in bf16, and back as pairs of fp32."""
        logits = ptx.load_tensor(lanes + (Column.S + 64 * half), 64)
        bias = self._causal_bias(c, stage, half, key)
        rows = c.smem + stage * (TILE * 4)
        pairs, words = [], []
        for quad in range(16):
            offset = Smem.LSE + (64 * half + 4 * quad) * 4
            for i, lse in enumerate(ptx.load_shared_pairs(rows, offset)):
                column = 4 * quad + 2 * i
                shift = ptx.add_pair(lse, bias(column))
                x = ptx.fma_pair(ptx.pack(logits[column], logits[column + 1]), log_scale, shift)
                low, high = (ptx.exp2(part) for part in ptx.unpack(x))
                pairs.append(ptx.pack(low, high))
                words.append(ptx.to_bf16x2(low, high))
        ptx.store_tensor(lanes + Column.S, words, 32 * half)
        return pairs

    def _causal_bias(self, c: Context, stage: Any, half: int, key: Any) -> Any:
        """A function from column to the pair to add to its exponent: 0 where the query sees the key, else -inf."""
        count = max(1, self.slots // 2)
        base = c.smem + stage * (self.slots * 4)
        positions: list[Any] = []
        for start in range(0, count, 4):
            offset = Smem.POSITIONS + (half * count + start) * 4
            positions += ptx.load_shared_ints(base, offset, min(4, count))
        biases = [ptx.select(p >= key, Float32(0.0), Float32(NO_WEIGHT)) for p in positions]
        pairs = [ptx.pack(b, b) for b in biases]
        return lambda column: pairs[column // self.ratio]

    def _differentiate(
        self, c: Context, lanes: Any, stage: Any, quarter: int, weights: list[Any], scale: Any
    ) -> list[Any]:
        """dS of 32 query rows as 16 words of two bf16."""
        grads = ptx.load_tensor(lanes + (Column.DP + 32 * quarter), 32)
        rows = c.smem + stage * (TILE * 4)
        words = []
        for quad in range(8):
            offset = Smem.DELTA + (32 * quarter + 4 * quad) * 4
            for i, delta in enumerate(ptx.load_shared_pairs(rows, offset)):
                column = 4 * quad + 2 * i
                x = ptx.fma_pair(ptx.pack(grads[column], grads[column + 1]), scale, delta)
                words.append(ptx.to_bf16x2(*ptx.unpack(ptx.mul_pair(weights[column // 2], x))))
        return words

    # -- reduce warps -------------------------------------------------------------------------------------------------

    @cute.jit
    def _reduce(self, c: Context) -> None:
        """dQ of each tile, dK and dV of each segment, added to global memory. A thread owns a head dim, then a key."""
        self._enter(c)
        lane_in_tile = (c.warp % 4) * 32 + c.lane
        lanes = c.tmem + ((c.warp % 4) << 21)
        tile, segment = Int32(0), Int32(0)
        first, _ = self._interval(c, c.chunk)
        _, head, block, _ = self._meta(c, first)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self._interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                tokens = self._slot_words(c.tables[1], task)
                following, more = self._next(c, chunk, task, end)
                _, next_head, next_block, _ = self._meta(c, following)
                ptx.wait_barrier(self._barrier(c, Barrier.DQ_FULL), tile % 2)
                ptx.fence_after_wait()
                self._reduce_dq(c, lanes, lane_in_tile, head, tokens)
                if (next_head != head) | (next_block != block) | (more == 0):
                    ptx.wait_barrier(self._barrier(c, Barrier.DKV_FULL), segment % 2)
                    ptx.fence_after_wait()
                    self._reduce_dkv(c, lanes, lane_in_tile, head, block)
                    segment += 1
                head, block = next_head, next_block
                tile += 1

    @cute.jit
    def _reduce_dq(self, c: Context, lanes: Any, dim: Any, head: Any, tokens: Any) -> None:
        words: list[Any] = []
        for half in cutlass.range_constexpr(2):
            values = ptx.load_tensor(lanes + (Column.DP + 64 * half), 64)
            words += [ptx.to_bf16x2(values[i], values[i + 1]) for i in range(0, 64, 2)]
        ptx.fence_before_signal()
        cute.arch.sync_warp()
        with ptx.elect():
            ptx.arrive(self._barrier(c, Barrier.DQ_EMPTY))
        row_bytes = c.key_heads * (self.ratio * HEAD_DIM * 2)
        base = c.out[0] + Int64(head * (self.ratio * HEAD_DIM * 2) + dim * (self.group * 2))
        for slot, token in enumerate(tokens):
            if token >= 0:
                address = base + Int64(token) * row_bytes
                for part in cutlass.range_constexpr(self.ratio // self.group):
                    start = (slot * self.ratio + part * self.group) // 2
                    chunk = words[start : start + self.group // 2]
                    ptx.add_global_bf16(address, chunk, part * self.group * HEAD_DIM * 2)

    @cute.jit
    def _reduce_dkv(self, c: Context, lanes: Any, key: Any, head: Any, block: Any) -> None:
        tile_bytes = TILE * HEAD_DIM * 4
        base = c.out[1] + Int64(block * c.key_heads + head) * tile_bytes + Int64(key * 16)
        for half in cutlass.range_constexpr(2):
            column = Column.DV if half == 0 else Column.DK
            target = base + (Int64(c.out[2]) * 2 if half == 0 else 0)
            for chunk in cutlass.range_constexpr(4):
                values = ptx.load_tensor(lanes + (column + 32 * chunk), 32)
                if const_expr(half == 1 and chunk == 3):
                    ptx.fence_before_signal()
                    cute.arch.sync_warp()
                    with ptx.elect():
                        ptx.arrive(self._barrier(c, Barrier.DKV_EMPTY))
                for i in cutlass.range_constexpr(8):
                    ptx.add_global_floats(target, values[4 * i : 4 * i + 4], (8 * chunk + i) * TILE * 16)


def compile_main(*, arch: str = "sm_100a", ratio: int = 16, dq_accumulation: str = "bf16") -> Any:
    """Compile the main kernel for one architecture.

    Args:
        arch: ``sm_100a`` or ``sm_103a``.
        ratio: query heads for each key head, 1, 2, 4, 8 or 16.
        dq_accumulation: dtype of ``dq_pool``: ``"bf16"`` or ``"fp32"``.

    Returns:
        A function of (q, grad_out, k, v, lse, delta, task_meta, task_qrows, task_qpos, descriptor, cu_seqlens,
        document_workspace_starts, dq_pool, dkv, softmax_scale, ctas). It adds to ``dq_pool`` and ``dkv``.
    """
    dq_dtype = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}[dq_accumulation]
    fake = cute.runtime.make_fake_tensor
    tokens, rows, documents = cute.sym_int(), cute.sym_int(divisibility=TILE), cute.sym_int()
    query_heads, key_heads, tasks = cute.sym_int(divisibility=ratio), cute.sym_int(), cute.sym_int()

    def operand(length: Any, heads: Any) -> Any:
        stride = (cute.sym_int64(divisibility=HEAD_DIM), HEAD_DIM, 1)
        return fake(cutlass.BFloat16, (length, heads, HEAD_DIM), stride=stride, assumed_align=16)

    def table(dtype: Any, *shape: Any) -> Any:
        stride = tuple(n if isinstance(n, int) else cute.sym_int64() for n in shape[1:]) + (1,)
        return fake(dtype, shape, stride=stride, assumed_align=16)

    slots = plan.slots(ratio)
    statistics = [table(Float32, tokens, query_heads) for _ in range(2)]
    tasks_tables = [table(Int32, tasks, 4), table(Int32, tasks, slots), table(Int32, tasks, slots)]
    lists = [fake(Int32, (n,), stride=(1,), assumed_align=4) for n in (cute.sym_int(), documents)]
    return cute.compile(
        MainKernel(ratio, dq_dtype),
        operand(tokens, query_heads),
        operand(tokens, query_heads),
        operand(rows, key_heads),
        operand(rows, key_heads),
        *statistics,
        *tasks_tables,
        table(Int32, 8),
        *lists,
        table(dq_dtype, cute.sym_int64()),
        table(Float32, cute.sym_int64()),
        Float32(1.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )
