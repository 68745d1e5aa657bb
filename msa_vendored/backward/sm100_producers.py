"""The warps of the SM100 main kernel that fill shared memory: Q, dO, K, V, and the statistics of the query rows."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from msa_vendored.backward import sm100_layout as plan
from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import HEAD_DIM, STAGES, TILE, Barrier, Smem
from msa_vendored.backward.sm100_walk import Context, Walker

LOG2_E = math.log2(math.e)
ROW_BYTES = HEAD_DIM * 2
GATHER_ROWS = 32
"""Rows whose token numbers are loaded before any of them is waited for."""


class ProducerRoles(Walker):
    """Load warp, gather warp (small ratios only) and row warp."""

    @cute.jit
    def load(self, c: Context) -> None:
        """K and V of each segment by TMA, and dO and Q of each tile, in the order in which the mma warp frees them."""
        self.enter(c)
        tile, segment, head_before, block_before = Int32(0), Int32(0), Int32(-1), Int32(-1)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self.interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                _, head, block, _ = self.meta(c, task)
                if head != head_before or block != block_before:
                    self._prefetch_block(c, head, block)
                if cutlass.const_expr(plan.gathers_by_tma(self.ratio)):
                    tokens = self.query_rows(c, task, 0, self.slots)
                    self._copy_rows(c, (Barrier.DO_EMPTY, Barrier.DO_FULL, Smem.DO, c.grad_out_map), tile, head, tokens)
                    self._copy_rows(c, (Barrier.Q_EMPTY, Barrier.Q_FULL, Smem.Q, c.q_map), tile, head, tokens)
                else:
                    self._gather_rows(c, (Barrier.Q_EMPTY, Barrier.Q_FULL, Smem.Q, c.q), tile, head, task)
                if head != head_before or block != block_before:
                    self._copy_block(c, (Barrier.V_EMPTY, Barrier.V_FULL, Smem.V, c.v_map), segment, head, block)
                    self._copy_block(c, (Barrier.K_EMPTY, Barrier.K_FULL, Smem.K, c.k_map), segment, head, block)
                    segment += 1
                    head_before, block_before = head, block
                tile += 1

    @cute.jit
    def _copy_rows(self, c: Context, what: Any, tile: Any, head: Any, tokens: Any) -> None:
        """One box for each slot; a slot without a query names row -1, outside the tensor, and arrives as zeros."""
        empty, full, offset, tensor_map = what
        stage, parity = tile % STAGES, tile // STAGES % 2
        ptx.wait_barrier(self.barrier(c, empty, stage), parity ^ 1)
        with ptx.elect():
            barrier = self.barrier(c, full, stage)
            ptx.arrive_expecting(barrier, plan.OPERAND_BYTES)
            target = c.smem + offset + stage * plan.OPERAND_BYTES
            group = head * (self.ratio // plan.SWIZZLE_ROWS)
            for slot, token in enumerate(tokens):
                ptx.copy_tensor(target + slot * self.ratio * ROW_BYTES, tensor_map, (0, 0, 0, group, token), barrier)

    @cute.jit
    def _copy_block(self, c: Context, what: Any, segment: Any, head: Any, block: Any) -> None:
        empty, full, offset, tensor_map = what
        ptx.wait_barrier(self.barrier(c, empty), segment % 2 ^ 1)
        with ptx.elect():
            ptx.arrive_expecting(self.barrier(c, full), plan.OPERAND_BYTES)
            group = block * (TILE // plan.SWIZZLE_ROWS)
            ptx.copy_tensor(c.smem + offset, tensor_map, (0, 0, 0, group, head), self.barrier(c, full))

    @cute.jit
    def _prefetch_block(self, c: Context, head: Any, block: Any) -> None:
        """To L2: the copy itself must wait until the last dQ of the segment before has read K."""
        with ptx.elect():
            for tensor_map in (c.k_map, c.v_map):
                ptx.prefetch_tensor(tensor_map, (0, 0, 0, block * (TILE // plan.SWIZZLE_ROWS), head))

    # -- gather: a key head of fewer than 8 query heads fills no group of 8 rows, so boxes would be 128 to 512 bytes ---

    @cute.jit
    def gather(self, c: Context) -> None:
        """Copies dO of each tile by cp.async; the load warp does so with Q."""
        self.enter(c)
        tile = Int32(0)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self.interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                _, head, _, _ = self.meta(c, task)
                self._gather_rows(c, (Barrier.DO_EMPTY, Barrier.DO_FULL, Smem.DO, c.grad_out), tile, head, task)
                tile += 1

    @cute.jit
    def _gather_rows(self, c: Context, what: Any, tile: Any, head: Any, task: Any) -> None:
        """128 rows, two an instruction: lane 0 to 15 take one, 16 bytes each, lane 16 to 31 the next."""
        empty, full, offset, tensor = what
        stage, parity = tile % STAGES, tile // STAGES % 2
        odd, chunk = c.lane // 16, c.lane % 16
        token_bytes = c.key_heads * (self.ratio * ROW_BYTES)
        row_in_token = odd % self.ratio
        source = tensor + Int64((head * self.ratio + row_in_token) * ROW_BYTES + chunk * 16)
        token_address = c.task_qrows + Int64(task) * (self.slots * 4) + Int64(odd // self.ratio * 4)
        base = c.smem + offset + stage * plan.OPERAND_BYTES + chunk // 8 * plan.HALF_BYTES + odd * 128
        # The swizzle of row 2 * i + odd, for the four i of a group of eight rows.
        targets = [base + (((chunk % 8) ^ (2 * i + odd)) << 4) for i in range(4)]
        ptx.wait_barrier(self.barrier(c, empty, stage), parity ^ 1)
        for batch in cutlass.range(TILE // GATHER_ROWS, unroll=1):
            tokens = token_address + Int64(batch * (GATHER_ROWS // self.ratio * 4))
            shifted = [target + batch * (GATHER_ROWS * ROW_BYTES) for target in targets]
            self._gather_batch(shifted, source, tokens, token_bytes)
        ptx.wait_async_copies()
        ptx.fence_async_shared()
        self.arrive_once(self.barrier(c, full, stage))

    def _gather_batch(self, targets: list[Any], source: Any, tokens: Any, token_bytes: Any) -> None:
        """``GATHER_ROWS`` rows, that many divided by ``ratio`` tokens."""
        pairs_of_token = max(1, self.ratio // 2)
        for i in range(GATHER_ROWS // 2):
            if i % pairs_of_token == 0:
                token = ptx.load_global_ints(tokens + i * 2 // self.ratio * 4, 1)[0]
                size = ptx.select(token >= 0, Int32(16), Int32(0))
                address = source + Int64(cutlass.max(token, 0)) * token_bytes
            place = i // 4 * plan.GROUP_BYTES + 2 * i % plan.SWIZZLE_ROWS * 128
            ptx.copy_async(targets[i % 4], place, address, i % pairs_of_token * 2 * ROW_BYTES, size)

    # -- row warp -----------------------------------------------------------------------------------------------------

    @cute.jit
    def stage_rows(self, c: Context) -> None:
        """Row statistics as compute needs them: -lse * log2(e), -delta * scale, and the position of each query.

        A row without a finite lse, or of no query, gets weight 2**-inf = 0 and delta 0, so that P and dS are 0.
        """
        self.enter(c)
        tile = Int32(0)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self.interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                stage, parity = tile % STAGES, tile // STAGES % 2
                _, head, block, _ = self.meta(c, task)
                logs, deltas = self._load_statistics(c, task, head)
                ptx.wait_barrier(self.barrier(c, Barrier.ROW_EMPTY, stage), parity ^ 1)
                target = c.smem + stage * (TILE * 4) + c.lane * 16
                ptx.store_shared(target, logs, Smem.LSE)
                ptx.store_shared(target, deltas, Smem.DELTA)
                self._stage_positions(c, task, stage, block)
                self.arrive_once(self.barrier(c, Barrier.ROW_FULL, stage))
                tile += 1

    def _load_statistics(self, c: Context, task: Any, head: Any) -> tuple[list[Any], list[Any]]:
        """The four rows of this lane."""
        width = min(self.ratio, 4)
        logs, deltas = [], []
        for part in range(4 // width):
            row = c.lane * 4 + part * width
            slot = c.task_qrows + Int64(task * self.slots + row // self.ratio) * 4
            token = ptx.load_global_ints(slot, 1)[0]
            query_head = head * self.ratio + row % self.ratio
            index = Int64(cutlass.max(token, 0)) * (c.key_heads * self.ratio) + query_head
            lse = ptx.load_global_floats(c.lse + index * 4, width)
            delta = ptx.load_global_floats(c.delta + index * 4, width)
            for x, y in zip(lse, delta, strict=True):
                live = (token >= 0) & (x > -math.inf) & (x < math.inf)
                logs.append(ptx.select(live, x * -LOG2_E, Float32(-math.inf)))
                deltas.append(ptx.select(live, y * -c.scale, Float32(0.0)))
        return logs, deltas

    @cute.jit
    def _stage_positions(self, c: Context, task: Any, stage: Any, block: Any) -> None:
        """Positions relative to the key block, clipped to -1..127 (no key to all keys): 1, 2 or 4 slots a lane."""
        count = max(1, self.slots // 32)
        if c.lane < self.slots:
            address = c.task_qpos + Int64(task * self.slots + c.lane * count) * 4
            positions = ptx.load_global_ints(address, count)
            clipped = [cutlass.max(cutlass.min(p - block * TILE, TILE - 1), -1) for p in positions]
            words = clipped
            if cutlass.const_expr(self.ratio == 1):
                words = [clipped[0] & 0xFFFF | clipped[1] << 16, clipped[2] & 0xFFFF | clipped[3] << 16]
            size = plan.position_bytes(self.ratio)
            target = c.smem + stage * (self.slots * size) + c.lane * (count * size)
            ptx.store_shared(target, words, Smem.POSITIONS)
