"""The warp of the SM100 main kernel that issues all products. Nothing else runs on the tensor cores."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from msa_vendored.backward import sm100_layout as plan
from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import STAGES, TILE, Barrier, Column, Smem
from msa_vendored.backward.sm100_walk import Context, Walker


class MultiplyRole(Walker):
    """The mma warp: one elected lane issues, all wait."""

    @cute.jit
    def multiply(self, c: Context) -> None:
        """The products of the CTA's tiles: dV(i), dP(i), S(i+1), dK(i), dQ(i); S of a new segment comes last.

        In the first tile of a segment dP precedes dV, which must wait until the dV before it has been read.
        """
        self.enter(c)
        first, _ = self.interval(c, c.chunk)
        document, head, block, _ = self.meta(c, first)
        tile, segment, fresh = Int32(0), Int32(0), Int32(1)
        self._await_block(c, Barrier.K_FULL, Smem.K, segment, document, block)
        self._multiply_s(c, Int32(0))
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self.interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                stage, parity, phase = tile % STAGES, tile // STAGES % 2, tile % 2
                following, more = self.next_task(c, chunk, task, end)
                next_document, next_head, next_block, _ = self.meta(c, following)
                last = (next_head != head) | (next_block != block) | (more == 0)
                ptx.wait_barrier(self.barrier(c, Barrier.DO_FULL, stage), parity)
                if fresh != 0:
                    self._await_block(c, Barrier.V_FULL, Smem.V, segment, document, block)
                    self._multiply_dp(c, stage, phase)
                    ptx.wait_barrier(self.barrier(c, Barrier.DKV_EMPTY), segment % 2 ^ 1)
                self._multiply_dv(c, stage, phase, 1 - fresh)
                if fresh == 0:
                    self._multiply_dp(c, stage, phase)
                with ptx.elect():
                    ptx.commit(self.barrier(c, Barrier.DO_EMPTY, stage))
                    if last:
                        ptx.commit(self.barrier(c, Barrier.V_EMPTY))
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
        # The reduce warps have read the last dQ before they read the last dK.
        ptx.wait_barrier(self.barrier(c, Barrier.DKV_EMPTY), segment % 2)
        ptx.fence_after_wait()
        ptx.free_tensor_memory(c.tmem, plan.TMEM_COLUMNS)

    @cute.jit
    def _await_block(self, c: Context, full: Any, offset: Any, segment: Any, document: Any, block: Any) -> None:
        """Waits for K or V and clears what lies past the end of the document, where 0 * NaN would be NaN."""
        start = ptx.load_global_ints(c.cu_seqlens + Int64(document) * 4, 1)[0]
        stop = ptx.load_global_ints(c.cu_seqlens + Int64(document) * 4 + 4, 1)[0]
        workspace = ptx.load_global_ints(c.document_workspace_starts + Int64(document) * 4, 1)[0]
        keys = cutlass.max(workspace + stop - start - block * TILE, 0)
        ptx.wait_barrier(self.barrier(c, full), segment % 2)
        if keys < TILE:
            for row in cutlass.range(keys, TILE, unroll=1):
                group = c.smem + offset + row // plan.SWIZZLE_ROWS * plan.GROUP_BYTES
                half = c.lane // 16 * plan.HALF_BYTES
                target = group + half + row % plan.SWIZZLE_ROWS * 128 + c.lane % 16 * 8
                ptx.store_shared(target, [Int32(0), Int32(0)])
            ptx.fence_async_shared()
            cute.arch.sync_warp()

    def _descriptor(self, address: Any, *, along_dims: bool = False) -> Any:
        """Matrix descriptor of an operand that starts at a shared-memory address."""
        return Int64(address >> 4) | Int64(plan.matrix_descriptor(along_dims=along_dims))

    @cute.jit
    def _multiply_s(self, c: Context, tile: Any) -> None:
        """S^T = K Q^T."""
        stage = tile % STAGES
        ptx.wait_barrier(self.barrier(c, Barrier.Q_FULL, stage), tile // STAGES % 2)
        ptx.fence_after_wait()
        with ptx.elect():
            k = self._descriptor(c.smem + Smem.K, along_dims=True)
            q = self._descriptor(c.smem + Smem.Q + stage * plan.OPERAND_BYTES, along_dims=True)
            self._multiply_along_dims(c.tmem + Column.S, k, q)
            ptx.commit(self.barrier(c, Barrier.S_FULL))

    @cute.jit
    def _multiply_dp(self, c: Context, stage: Any, phase: Any) -> None:
        """dP^T = V dO^T, over the dQ of the tile before."""
        ptx.wait_barrier(self.barrier(c, Barrier.DQ_EMPTY), phase ^ 1)
        ptx.fence_after_wait()
        with ptx.elect():
            v = self._descriptor(c.smem + Smem.V, along_dims=True)
            grad_out = self._descriptor(c.smem + Smem.DO + stage * plan.OPERAND_BYTES, along_dims=True)
            self._multiply_along_dims(c.tmem + Column.DP, v, grad_out)
            ptx.commit(self.barrier(c, Barrier.DP_FULL))

    def _multiply_along_dims(self, target: Any, a: Any, b: Any) -> None:
        instruction = plan.instruction_descriptor(a_along_rows=False, b_along_rows=False)
        for step in range(8):
            offset = plan.k_step_bytes(step, along_dims=True) >> 4
            ptx.multiply_shared(target, a + offset, b + offset, instruction, step > 0)

    @cute.jit
    def _multiply_dv(self, c: Context, stage: Any, phase: Any, accumulate: Any) -> None:
        """Adds P^T dO to dV, half of the query rows at a time."""
        for half in cutlass.range_constexpr(2):
            ptx.wait_barrier(self.barrier(c, Barrier.P_READY, half), phase)
            ptx.fence_after_wait()
            if cutlass.const_expr(self.wants_dkv):
                with ptx.elect():
                    grad_out = self._descriptor(c.smem + Smem.DO + stage * plan.OPERAND_BYTES)
                    self._multiply_rows(c.tmem + Column.DV, c.tmem + Column.S, grad_out, half, accumulate)

    @cute.jit
    def _multiply_dk_dq(self, c: Context, stage: Any, phase: Any, accumulate: Any, last: Any) -> None:
        """Adds dS^T Q to dK, half of the query rows at a time, then computes dQ^T = K^T dS^T."""
        for half in cutlass.range_constexpr(2):
            ptx.wait_barrier(self.barrier(c, Barrier.DS_READY, half), phase)
            ptx.fence_after_wait()
            if cutlass.const_expr(self.wants_dkv):
                with ptx.elect():
                    q = self._descriptor(c.smem + Smem.Q + stage * plan.OPERAND_BYTES)
                    self._multiply_rows(c.tmem + Column.DK, c.tmem + Column.DP, q, half, accumulate)
        with ptx.elect():
            ptx.commit(self.barrier(c, Barrier.Q_EMPTY, stage))
            if cutlass.const_expr(self.wants_dq):
                self._multiply_dq(c)
            ptx.commit(self.barrier(c, Barrier.DQ_FULL))
            if last:
                ptx.commit(self.barrier(c, Barrier.K_EMPTY))

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
