"""Sums that come out the same in whatever order CTAs add: integers. For ``deterministic=True`` on SM100.

dQ of a tile, and dK and dV of a segment, are computed in a fixed order; only the order in which CTAs add them varies.
Integer addition is associative, so here each is multiplied by a power of two, rounded to an integer and added as such:
dQ in 32 bits with a factor for each row of q, dK and dV in 64 bits with one factor each. ``msa_vendored.backward.
fixed_point`` chooses factors that no sum can overflow with, and converts the sums.

Accumulators: ``dq_pool`` int32 ``[T, Hq, 128]``, ``dkv`` int64 ``[2, W // 128, Hkv, 128, 128]`` with the key innermost.
docs/sm100_backward.md says what that costs.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int64

from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import HEAD_DIM, TILE, Barrier, Column
from msa_vendored.backward.sm100_reduce import PREFETCHED_SLOTS, ReduceRole
from msa_vendored.backward.sm100_walk import Context


class FixedPointReduceRole(ReduceRole):
    """The reduce warps of the deterministic variant."""

    def _reduce_dq(self, c: Context, lanes: Any, dim: Any, task: Any, head: Any, tokens: list[Any]) -> None:
        values = [value for half in range(2) for value in ptx.load_tensor(lanes + (Column.DP + 64 * half), 64)]
        self._release(c, Barrier.DQ_EMPTY)
        row_bytes = HEAD_DIM * 4
        token_heads = c.key_heads * self.ratio
        for slot in range(self.slots):
            if slot >= len(tokens):
                tokens = tokens + self.query_rows(c, task, slot, PREFETCHED_SLOTS)
            row = Int64(cutlass.max(tokens[slot], 0)) * token_heads + Int64(head * self.ratio)
            address = c.dq_pool + row * row_bytes + Int64(dim * 4)
            width = min(self.ratio, 4)
            for first in range(0, self.ratio, width):
                factors = ptx.load_global_floats(c.dq_factor + row * 4 + first * 4, width)
                for i, factor in enumerate(factors):
                    value = ptx.to_int32(values[slot * self.ratio + first + i] * factor)
                    ptx.add_global_int32(address, value, (first + i) * row_bytes, tokens[slot])

    def _reduce_dkv(self, c: Context, lanes: Any, key: Any, head: Any, block: Any) -> None:
        place = Int64(block * c.key_heads + head) * (TILE * HEAD_DIM * 8) + Int64(key * 8)
        dk_factor, dv_factor = ptx.load_global_floats(c.dkv_factor, 2)
        products = ((Column.DV, c.dv + place, dv_factor), (Column.DK, c.dk + place, dk_factor))
        for column, target, factor in products:
            for chunk in range(4):
                values = ptx.load_tensor(lanes + (column + 32 * chunk), 32)
                if column == Column.DK and chunk == 3:
                    self._release(c, Barrier.DKV_EMPTY)
                for i, value in enumerate(values):
                    ptx.add_global_int64(target, ptx.to_int64(value * factor), (32 * chunk + i) * TILE * 8)
