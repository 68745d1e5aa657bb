"""The four warps of the SM100 main kernel between the products: S to P, dP to dS. A thread owns one key of the tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from msa_vendored.backward import sm100_layout as plan
from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import STAGES, TILE, Barrier, Column, Smem
from msa_vendored.backward.sm100_walk import Context, Walker

LOG2_E = math.log2(math.e)


class ComputeRole(Walker):
    """The compute warps. P stays in registers, in fp32, from the first half of a tile's work to the second."""

    @cute.jit
    def compute(self, c: Context) -> None:
        """P = 2**(S * scale * log2(e) - lse * log2(e)), then dS = P * (dP - delta) * scale."""
        self.enter(c)
        key = (c.warp % 4) * 32 + c.lane
        lanes = c.tmem + ((c.warp % 4) << 21)
        log_scale, tile = c.scale * LOG2_E, Int32(0)
        log_scale_pair, scale_pair = ptx.pack(log_scale, log_scale), ptx.pack(c.scale, c.scale)
        for chunk in cutlass.range(c.chunk, c.walk[4], c.grid, unroll=1):
            begin, end = self.interval(c, chunk)
            for _ in cutlass.range(begin, end, unroll=1):
                stage, phase = tile % STAGES, tile % 2
                ptx.wait_barrier(self.barrier(c, Barrier.ROW_FULL, stage), tile // STAGES % 2)
                ptx.wait_barrier(self.barrier(c, Barrier.S_FULL), phase)
                ptx.fence_after_wait()
                weights = []
                for half in cutlass.range_constexpr(2):
                    weights += self._weigh(c, lanes, stage, half, key, log_scale_pair)
                    self._signal(c, Barrier.P_READY + half)
                ptx.wait_barrier(self.barrier(c, Barrier.DP_FULL), phase)
                ptx.fence_after_wait()
                for half in cutlass.range_constexpr(2):
                    for quarter in cutlass.range_constexpr(2 * half, 2 * half + 2):
                        pairs = weights[16 * quarter : 16 * quarter + 16]
                        words = self._differentiate(c, lanes, stage, quarter, pairs, scale_pair)
                        self._store_ds(c, lanes, key, quarter, words)
                    if const_expr(half == 1):
                        # Only dQ reads dS from shared memory, after all of it is there: one fence covers both halves.
                        ptx.fence_async_shared()
                    self._signal(c, Barrier.DS_READY + half)
                with ptx.elect():
                    ptx.arrive(self.barrier(c, Barrier.ROW_EMPTY, stage))
                tile += 1

    def _signal(self, c: Context, which: Any) -> None:
        """This warp's part of P or dS is in tensor memory (and its dS in shared memory)."""
        ptx.wait_tensor_stores()
        ptx.fence_before_signal()
        self.arrive_once(self.barrier(c, which))

    def _weigh(self, c: Context, lanes: Any, stage: Any, half: int, key: Any, log_scale: Any) -> list[Any]:
        """P of 64 query rows: to tensor memory in bf16, and back as pairs of fp32."""
        logits = ptx.load_tensor(lanes + (Column.S + 64 * half), 64)
        bias = self._causal_bias(c, stage, half, key)
        rows = c.smem + stage * (TILE * 4)
        pairs, words = [], []
        for quad in range(16):
            offset = Smem.LSE + (64 * half + 4 * quad) * 4
            for lse, mask, i in zip(ptx.load_shared_pairs(rows, offset), bias(quad), (0, 2), strict=True):
                logit_pair = ptx.pack(logits[4 * quad + i], logits[4 * quad + i + 1])
                x = ptx.fma_pair(logit_pair, log_scale, ptx.add_pair(lse, mask))
                low, high = (ptx.exp2(part) for part in ptx.unpack(x))
                pairs.append(ptx.pack(low, high))
                words.append(ptx.to_bf16x2(low, high))
        ptx.store_tensor(lanes + Column.S, words, 32 * half)
        return pairs

    def _causal_bias(self, c: Context, stage: Any, half: int, key: Any) -> Callable[[int], list[Any]]:
        """A function from a quad of query rows to two pairs to add to exponents: 0 where the key is seen, or -inf."""
        size, count = plan.position_bytes(self.ratio), self.slots // 2
        base = c.smem + stage * (self.slots * size)
        first = Smem.POSITIONS + half * count * size

        def bias(position: Any) -> Any:
            return ptx.select(position >= key, Float32(0.0), Float32(-math.inf))

        if self.ratio <= 2:

            def from_memory(quad: int) -> list[Any]:
                a, b = ptx.load_shared_ints(base, first + 8 * quad, 2)
                if self.ratio == 2:
                    return [ptx.pack(x, x) for x in (bias(a), bias(b))]
                return [ptx.pack(bias(word << 16 >> 16), bias(word >> 16)) for word in (a, b)]

            return from_memory
        positions = [p for start in range(0, count, 4) for p in ptx.load_shared_ints(base, first + 4 * start, 4)]
        known: dict[int, Any] = {}

        def from_registers(quad: int) -> list[Any]:
            slot = 4 * quad // self.ratio
            if slot not in known:
                value = bias(positions[slot])
                known[slot] = ptx.pack(value, value)
            return [known[slot]] * 2

        return from_registers

    def _differentiate(
        self, c: Context, lanes: Any, stage: Any, quarter: int, weights: list[Any], scale: Any
    ) -> list[Any]:
        """Computes dS of 32 query rows as 16 words of two bf16."""
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

    def _store_ds(self, c: Context, lanes: Any, key: Any, quarter: int, words: list[Any]) -> None:
        """To tensor memory for dK, and to shared memory, a row of 128 query rows for each key, for dQ."""
        ptx.store_tensor(lanes + Column.DP, words, 16 * quarter)
        in_group = key % plan.SWIZZLE_ROWS
        row = c.smem + Smem.DS + key // plan.SWIZZLE_ROWS * plan.GROUP_BYTES + in_group * 128
        for part in range(4):
            chunk = quarter % 2 * 4 + part
            target = row + ((chunk ^ in_group) << 4)
            ptx.store_shared(target, words[4 * part : 4 * part + 4], quarter // 2 * plan.HALF_BYTES)
