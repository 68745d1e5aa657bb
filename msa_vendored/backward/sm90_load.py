"""Producer warps of the SM90 main kernel: K, V, Q and dO by TMA, statistics and places of tasks by ordinary loads."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync

from msa_vendored.backward.dq_scale import factor_exponent
from msa_vendored.backward.sm90_layout import (
    EVICT_LAST,
    FIRST,
    HALF,
    HEAD_DIM,
    KEYS,
    LAST,
    MASKED,
    PLACE,
    ROWS,
    STAGES,
    TILE_BYTES,
    StructureSm90,
)
from msa_vendored.backward.sm90_ops import LOG2_E, swizzled
from msa_vendored.backward.tasks import DESCRIPTOR_WORDS


class LoadSm90(StructureSm90):
    """Roles of the producer warpgroup."""

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
                    views = (q_atom, g_q, s_q, do_atom, g_do, s_do)
                    if cutlass.const_expr(self.slots > 32):
                        # Unrolled, they would take more than a producer's registers.
                        for slot in cutlass.range(base, base + 32, unroll=1):
                            self.load_slot(*views, full + stage, head, row, slot, base, stage)
                    else:
                        for slot in cutlass.range_constexpr(self.slots):
                            self.load_slot(*views, full + stage, head, row, slot, base, stage)
                if task == begin or head != loaded_head or block != loaded_block:
                    loaded_head, loaded_block = head, block
                    cute.arch.mbarrier_wait(kv_empty, (segment % 2) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(kv_full, 2 * TILE_BYTES)
                    cute.copy(k_atom, g_k[None, head, block], s_k, tma_bar_ptr=kv_full)
                    cute.copy(v_atom, g_v[None, head, block], s_v, tma_bar_ptr=kv_full)
                    segment += 1
                count += 1

    @cute.jit
    def load_slot(
        self,
        q_atom: Any,
        g_q: cute.Tensor,
        s_q: cute.Tensor,
        do_atom: Any,
        g_do: cute.Tensor,
        s_do: cute.Tensor,
        full: Any,
        head: Int32,
        row: Int32,
        slot: Int32,
        base: cutlass.Constexpr,
        stage: Int32,
    ) -> None:
        """Q and dO of the token that lane ``slot - base`` knows; no token gives zeros."""
        keep, token = Int64(EVICT_LAST), cute.arch.shuffle_sync(row, slot - base)
        for half in cutlass.range_constexpr(1 if self.wide else 2):
            source, target = (None, head, half, token), (None, slot, half, stage)
            cute.copy(q_atom, g_q[source], s_q[target], tma_bar_ptr=full, cache_policy=keep)
            cute.copy(do_atom, g_do[source], s_do[target], tma_bar_ptr=full, cache_policy=keep)

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
    def load_places(
        self,
        shared: Any,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        descriptor: cute.Tensor,
    ) -> None:
        """Warp 1: per task its place, flags and key limits."""
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
    def load_statistics(
        self,
        shared: Any,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        descriptor: cute.Tensor,
        bounds: Any,
        softmax_scale: Float32,
        half: Int32,
    ) -> None:
        """Warps 2 and 3, a half of the folded rows each: (lse * log2(e), delta * scale), and what scales dQ."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        for chunk in cutlass.range(cute.arch.block_idx()[0], descriptor[4], cute.arch.grid_dim()[0], unroll=1):
            begin, end = self.chunk_interval(chunk, descriptor)
            for task in cutlass.range(begin, end, 1, unroll=1):
                stage, phase = count % STAGES, (count // STAGES) % 2
                cute.arch.mbarrier_wait(shared.empty.data_ptr() + stage, phase ^ 1)
                self.load_rows(
                    shared, lse, delta, bounds, task_qrows, task, task_meta[task, 1], stage, half * HALF + lane,
                    softmax_scale,
                )  # fmt: skip
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
        bounds: Any,
        task_qrows: cute.Tensor,
        task: Int32,
        head: Int32,
        stage: Int32,
        first: Int32,
        softmax_scale: Float32,
    ) -> None:
        """Folded rows ``first`` and 32 after it, to where half and row of the half put them.

        Rows without a query or a finite lse give P = dS = 0.
        """
        base = shared.statistics.data_ptr() + stage * (2 * ROWS)
        statistics = cute.make_tensor(base, cute.make_layout((2, ROWS), stride=(ROWS, 1)))
        for n in cutlass.range(first, first + HALF, 32, unroll=1):
            slot, member = n // self.ratio, n % self.ratio
            row = task_qrows[task, slot]
            value, correction, exponent = Float32.inf, Float32(0.0), Int32(127)
            if row >= 0:
                column = head * self.ratio + member
                loaded = lse[row, column] * LOG2_E
                # Neither infinity nor NaN passes.
                if loaded - loaded == 0.0:
                    value = loaded
                    correction = delta[row, column] * softmax_scale
                if cutlass.const_expr(self.scaled_sum):
                    norms, key_maxima = bounds
                    exponent = factor_exponent(
                        norms[row, column], key_maxima[head, 0], key_maxima[head, 1], softmax_scale
                    )
            position = n
            if cutlass.const_expr(self.ratio == 16):
                position = member // 8 * HALF + slot * 8 + member % 8
            statistics[0, position] = value
            statistics[1, position] = correction
            if cutlass.const_expr(self.scaled_sum):
                exponents = cute.make_tensor(shared.exponents.data_ptr() + stage * ROWS, cute.make_layout(ROWS))
                exponents[position] = Uint8(exponent)
