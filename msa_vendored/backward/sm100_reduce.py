"""The four warps of the SM100 main kernel that add dQ, dK and dV to their accumulators in global memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr

from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import HEAD_DIM, TILE, Barrier, Column
from msa_vendored.backward.sm100_walk import Context, Walker

TOKEN_BATCH = 4
"""Token rows that are loaded together where a tile has too many for the registers."""


class ReduceRole(Walker):
    """The reduce warps. Tensor memory is handed back as soon as it has been read."""

    @cute.jit
    def reduce(self, c: Context) -> None:
        """Adds dQ of each tile, dK and dV of each segment. A thread owns a head dim, then a key."""
        self.enter(c)
        lane_in_tile = (c.warp % 4) * 32 + c.lane
        lanes = c.tmem + ((c.warp % 4) << 21)
        tile = Int32(0)
        first, _ = self.interval(c, c.chunk)
        _, head, block, _ = self.meta(c, first)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self.interval(c, chunk)
            for task in cutlass.range(begin, end, unroll=1):
                tokens = self.query_rows(c, task, 0, self.slots if self.slots <= 16 else 0)
                following, more = self.next_task(c, chunk, task, end)
                _, next_head, next_block, _ = self.meta(c, following)
                ptx.wait_barrier(self.barrier(c, Barrier.DQ_FULL), tile % 2)
                ptx.fence_after_wait()
                self._reduce_dq(c, lanes, lane_in_tile, task, head, tokens)
                if (next_head != head) | (next_block != block) | (more == 0):
                    # The signal of dQ comes after all products before it, and dK and dV are among them.
                    self._reduce_dkv(c, lanes, lane_in_tile, head, block)
                head, block = next_head, next_block
                tile += 1

    def _release(self, c: Context, which: Barrier) -> None:
        ptx.fence_before_signal()
        self.arrive_once(self.barrier(c, which))

    def _reduce_dq(self, c: Context, lanes: Any, dim: Any, task: Any, head: Any, tokens: list[Any]) -> None:
        """Column n of dQ^T is row n of the tile: a token's heads are side by side, ``group`` in a reduction."""
        if not self.wants_dq:
            self._release(c, Barrier.DQ_EMPTY)
            return
        size = self.dq_dtype.width // 8
        token_bytes = c.key_heads * (self.ratio * HEAD_DIM * size)
        base = c.dq_pool + Int64(head * (self.ratio * HEAD_DIM * size) + dim * (self.group * size))
        if const_expr(self.ratio == 1 and self.dq_dtype is BFloat16):
            base -= Int64(c.lane % 2 * 2)
        # With 64 or 128 tokens to a tile, ptxas spills 80 to 96 bytes if all columns are read before any is added.
        by_halves = self.ratio <= 2 and self.dq_dtype is BFloat16
        values, done = [], 0
        for half in range(2):
            part = ptx.load_tensor(lanes + (Column.DP + 64 * half), 64)
            values += self._to_words(c, part) if self.dq_dtype is BFloat16 else part
            if half == 1:
                self._release(c, Barrier.DQ_EMPTY)
            end = self.slots if half == 1 else self.slots // 2 if by_halves else 0
            for slot in range(done, end):
                if slot >= len(tokens):
                    tokens = tokens + self.query_rows(c, task, slot, TOKEN_BATCH)
                self._add_slot(c, base, token_bytes, slot, tokens, values)
            done = end

    def _to_words(self, c: Context, part: list[Any]) -> list[Any]:
        """Words of two bf16: two heads of a token, or at ratio 1 two head dims of one token.

        There, even lanes take the first of two columns, odd lanes the second, and each gets its neighbour's value.
        """
        words = []
        for low, high in zip(part[::2], part[1::2], strict=True):
            if self.ratio == 1:
                odd = c.lane % 2 == 1
                received = ptx.exchange(ptx.select(odd, low, high), 1)
                words.append(ptx.to_bf16x2(ptx.select(odd, received, low), ptx.select(odd, high, received)))
            else:
                words.append(ptx.to_bf16x2(low, high))
        return words

    def _add_slot(self, c: Context, base: Any, token_bytes: Any, slot: int, tokens: list[Any], values: Any) -> None:
        if self.dq_dtype is not BFloat16:
            address = base + Int64(tokens[slot]) * token_bytes
            for first in range(0, self.ratio, self.group):
                column = slot * self.ratio + first
                group = values[column : column + self.group]
                ptx.add_global_floats(address, group, first * HEAD_DIM * 4, tokens[slot])
        elif self.ratio > 1:
            address = base + Int64(tokens[slot]) * token_bytes
            for first in range(0, self.ratio, self.group):
                column = slot * self.ratio + first
                words = values[column // 2 : (column + self.group) // 2]
                ptx.add_global_bf16(address, words, first * HEAD_DIM * 2, tokens[slot])
        elif slot % 2 == 1:
            token = ptx.select(c.lane % 2 == 1, tokens[slot], tokens[slot - 1])
            ptx.add_global_bf16(base + Int64(token) * token_bytes, [values[slot // 2]], 0, token)

    def _reduce_dkv(self, c: Context, lanes: Any, key: Any, head: Any, block: Any) -> None:
        if not self.wants_dkv:
            self._release(c, Barrier.DKV_EMPTY)
            return
        place = Int64(block * c.key_heads + head) * (TILE * HEAD_DIM * 4) + Int64(key * 16)
        for column, target in ((Column.DV, c.dv + place), (Column.DK, c.dk + place)):
            for chunk in range(4):
                values = ptx.load_tensor(lanes + (column + 32 * chunk), 32)
                if column == Column.DK and chunk == 3:
                    self._release(c, Barrier.DKV_EMPTY)
                for i in range(8):
                    offset = (8 * chunk + i) * TILE * 16
                    ptx.add_global_floats(target, values[4 * i : 4 * i + 4], offset)
