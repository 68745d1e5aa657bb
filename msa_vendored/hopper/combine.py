"""Merges the partial outputs of the blocks that a query selected: ``out = sum_s w_s O_s / sum_s w_s``.

Partial outputs are bf16 and normalised, partial LSEs are base-2 logarithms of scaled logits, so
``w_s = 2^(lse_s - max)``. This is a role of :mod:`msa_vendored.hopper.forward_main`, whose warps take runs of queries
from a counter, one bucket (window of tokens and index head) after another, and wait for its segments.

It reads every partial output once and is bound by memory: each lane copies its own pieces of 32 slots ahead of their
use into shared memory, which a CTA that merges does not need for anything else, and so has 192 KB in flight. Nobody
else reads them, so that there are no barriers.

Both roles know one layout of partial outputs, ``[token, index head, slot, 4, heads of the group, 4, 8]`` bf16: element
``[k, h, c, 2 j + e]`` is column ``8 (4 k + j) + 2 c + e`` of head h. That is what lane ``c`` of a quad holds after a
wgmma of 64 x 128, in four pieces of 16 bytes, so that O goes out without a transposition, 512 contiguous bytes a warp
instruction.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from msa_vendored.hopper.segments import COUNTER_FIELDS, RUNS_TAKEN, await_count, take_number

HEAD_DIM = 128
GROUPS = 4
"""Pieces of 16 bytes that one lane holds of a row."""
SLOTS_IN_FLIGHT = 32
"""Slots that a lane has copied to shared memory, or is copying, 16 bytes each."""
SLOT_BATCH = 16
"""Slots that are copied together at most."""
WARP_ELEMENTS = SLOTS_IN_FLIGHT * 32 * 8
"""bf16 elements of shared memory that a merging warp needs: 16 KB."""
RUN_ITEMS = 4
"""Rounds of 32 lanes that a warp takes at once, 32 KB each at top-k 16: a run is worth its atomic operations."""
LN2 = 0.6931471805599453


class PartialMerger:
    """The merging role. A lane merges what one lane of a quad holds of a head: 32 of its 128 columns.

    Args:
        ratio: query heads per index head, 1 to 16.
        topk: slots of a query.
        scaled: whether the output is multiplied by a float32 in device memory.
    """

    def __init__(self, ratio: int, topk: int, scaled: bool) -> None:
        self.ratio, self.topk, self.scaled = ratio, topk, scaled
        self.batch = min(SLOT_BATCH, topk)
        # The lanes of a quad need the same weights. 32 do not fit their registers, so that each keeps a quarter.
        self.sharers = 1 if topk <= 16 else 4
        # Batches of an item: pieces 0 to 3 one after the other, and the slots of each.
        self.batches_per_group = topk // self.batch
        self.batches = GROUPS * self.batches_per_group
        self.stages = min(GROUPS, SLOTS_IN_FLIGHT // self.batch)

    @cute.jit
    def merge(
        self,
        buffer: cute.Pointer,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_counts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        output_scale: cute.Tensor,
        tickets: cute.Tensor,
        buckets: cute.Tensor,
        chunk: Int32,
        window_tokens: Int32,
        windows_per_chunk: Int32,
    ) -> None:
        """One warp: runs of the chunk's next bucket until none is left. ``buffer`` is this warp's shared memory."""
        lane = cute.arch.lane_idx()
        # Added out of LLVM's sight, which would make the sum with each slot's offset an `or` in a register of its own.
        address = cute.arch.inline_ptx(
            "add.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(buffer.toint()), lane * 16]
        )
        mine = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=16)
        slot_bytes = out.shape[1] // split_counts.shape[1] * (2 * HEAD_DIM)
        chunk_buckets = split_counts.shape[1] * windows_per_chunk
        chunk_token = chunk * windows_per_chunk * window_tokens
        runs = (window_tokens * (4 * self.ratio) + 32 * RUN_ITEMS - 1) // (32 * RUN_ITEMS)
        ready = Int32(-1)
        run = cute.arch.shuffle_sync(take_number(tickets, chunk, RUNS_TAKEN, lane), 0)
        while run < chunk_buckets * runs:
            bucket = run // runs
            following = take_number(tickets, chunk, RUNS_TAKEN, lane)
            if bucket > ready:
                # All that CTAs stored for the bucket's segments is visible from here on.
                row = chunk * chunk_buckets + bucket
                await_count(buckets.iterator + (row * COUNTER_FIELDS + 1), buckets[row, 0], lane)
                ready = bucket
            index_head = bucket // windows_per_chunk
            first_row = bucket % windows_per_chunk * window_tokens
            first_token = chunk_token + first_row
            # Not above zero for windows past the last token, which fill up the last chunk.
            tokens = cutlass.min(split_counts.shape[0] - first_token, window_tokens)
            item = (run - bucket * runs) * (RUN_ITEMS * 32) + lane
            count = self.count_slots(split_counts, item, index_head, first_token, tokens)
            offset = self.locate(split_counts, item, index_head, first_row)
            for index in cutlass.range_constexpr(self.stages):
                self.copy_batch(mine, partial_out, offset, slot_bytes, index, count)
            step = Int32(1)
            while step <= RUN_ITEMS:
                # Another run's next item is not ours: nothing is copied ahead for it.
                next_item = item + 32
                next_count = Int32(0)
                if step < RUN_ITEMS:
                    next_count = self.count_slots(split_counts, next_item, index_head, first_token, tokens)
                self.merge_item(
                    mine, partial_out, partial_lse, split_counts, out, lse, output_scale, item, index_head, first_row,
                    first_token, tokens, count, next_count, offset, slot_bytes,
                )  # fmt: skip
                item, count = next_item, next_count
                offset = self.locate(split_counts, item, index_head, first_row)
                step += 1
            run = cute.arch.shuffle_sync(following, 0)

    @cute.jit
    def count_slots(
        self, split_counts: cute.Tensor, item: Int32, index_head: Int32, first_token: Int32, tokens: Int32
    ) -> Int32:
        """Slots of an item's token; 0 past the window's last token."""
        token = item // (4 * self.ratio)
        count = Int32(0)
        if token < tokens:
            count = cutlass.min(split_counts[first_token + token, index_head], self.topk)
        return count

    @cute.jit
    def locate(self, split_counts: cute.Tensor, item: Int32, index_head: Int32, first_row: Int32) -> Int64:
        """Element of the partial outputs where an item's piece 0 of slot 0 begins."""
        pair = Int64(first_row + item // (4 * self.ratio)) * split_counts.shape[1] + index_head
        return pair * (self.topk * self.ratio * HEAD_DIM) + item % (4 * self.ratio) * 8

    @cute.jit
    def copy_batch(
        self,
        mine: cute.Pointer,
        partial_out: cute.Tensor,
        offset: Int64,
        slot_bytes: Int32,
        index: cutlass.Constexpr[int],
        count: Int32,
    ) -> None:
        """Begin to copy batch ``index`` of an item; zeros where there is no slot."""
        group, first = index // self.batches_per_group, index % self.batches_per_group * self.batch
        target = mine + index % self.stages * self.batch * 256
        # One piece of PTX: as sums of constants, 16 sizes and addresses would stay in registers from batch to batch, so
        # that weights are spilled. Hence a distance of slots that compilers do not know.
        start = (first * GROUPS + group) * self.ratio * 64
        lines = [
            f"setp.gt.s32 present, {{$r2}}, {first + i}; selp.s32 bytes, 16, 0, present; cp.async.cg.shared.global "
            f"[{{$r0}}+{i * 512}], [place], 16, bytes; add.s64 place, place, step;"
            for i in range(self.batch)
        ]
        cute.arch.inline_ptx(
            "{ .reg .pred present; .reg .s32 bytes; .reg .s64 place, step; cvt.s64.s32 step, {$r3}; "
            f"add.s64 place, {{$r1}}, {start}; "
            + " ".join(lines)
            + " cp.async.commit_group; }",
            read_only_args=[
                Int32(target.toint()), Int64((partial_out.iterator + offset).toint()), count, slot_bytes,
            ],
        )  # fmt: skip

    @cute.jit
    def merge_item(
        self,
        mine: cute.Pointer,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_counts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        output_scale: cute.Tensor,
        item: Int32,
        index_head: Int32,
        first_row: Int32,
        first_token: Int32,
        tokens: Int32,
        count: Int32,
        next_count: Int32,
        offset: Int64,
        slot_bytes: Int32,
    ) -> None:
        """32 columns of one head of one token, which lane ``item % 4`` of a quad holds; first batches are on the way.

        Quads past the window's last token go along with no slot, for the sake of the exchanges.
        """
        lane = item % 4
        head = (item // 4) % self.ratio
        local = item // (4 * self.ratio)
        query_head = index_head * self.ratio + head
        token = first_token + local
        valid = local < tokens
        pair = Int64(first_row + local) * partial_lse.shape[1] + index_head
        levels = partial_lse.iterator + (pair * (self.topk * self.ratio) + head)
        weights, total, peak = self.weigh_slots(levels, count)
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        if const_expr(self.scaled):
            inverse = inverse * output_scale[0]
        for group in cutlass.range_constexpr(GROUPS):
            sums = cute.make_rmem_tensor(8, Float32)
            sums.fill(0.0)
            for part in cutlass.range_constexpr(self.batches_per_group):
                index = group * self.batches_per_group + part
                cute.arch.cp_async_wait_group(self.stages - 1)
                self.add_batch(sums, weights, mine, index)
                upcoming = index + self.stages
                if const_expr(upcoming < self.batches):
                    self.copy_batch(mine, partial_out, offset, slot_bytes, upcoming, count)
                else:
                    if const_expr(upcoming == self.batches):
                        offset = self.locate(split_counts, item + 32, index_head, first_row)
                    self.copy_batch(mine, partial_out, offset, slot_bytes, upcoming - self.batches, next_count)
            words = cute.make_rmem_tensor(8, BFloat16)
            for i in cutlass.range_constexpr(8):
                words[i] = (sums[i] * inverse).to(BFloat16)
            row = self.transpose_quad(words, lane)
            if valid:
                # After the transposition lane c of a quad holds columns 8 (4 k + c) to 8 (4 k + c) + 7.
                column = (Int64(token) * out.shape[1] + query_head) * HEAD_DIM + (group * 4 + lane) * 8
                target = cute.make_tensor(out.iterator + cute.assume(column, divby=8), cute.make_layout(8))
                cute.autovec_copy(row, target)
        if valid and lane == 0:
            lse[token, query_head] = (peak + cute.math.log2(total, fastmath=False)) * LN2

    @cute.jit
    def weigh_slots(self, source: cute.Pointer, count: Int32) -> tuple[cute.Tensor, Float32, Float32]:
        """The weights of all slots, or every fourth that a lane keeps, their sum, and the exponent that they are of."""
        levels = cute.make_rmem_tensor(self.topk, Float32)
        peak = -Float32.inf
        for slot in cutlass.range_constexpr(self.topk):
            levels[slot] = -Float32.inf
            if slot < count:
                levels[slot] = cute.make_tensor(source + slot * self.ratio, cute.make_layout(1))[0]
        for slot in cutlass.range_constexpr(self.topk):
            peak = cute.arch.fmax(peak, levels[slot])
        if peak == -Float32.inf:
            peak = Float32(0.0)
        total = Float32(0.0)
        for slot in cutlass.range_constexpr(self.topk):
            levels[slot] = cute.math.exp2(levels[slot] - peak, fastmath=True)
            total += levels[slot]
        if const_expr(self.sharers > 1):
            lane = cute.arch.lane_idx() % 4
            for i in cutlass.range_constexpr(self.topk // 4):
                low = levels[4 * i + 1] if lane == 1 else levels[4 * i]
                high = levels[4 * i + 3] if lane == 3 else levels[4 * i + 2]
                levels[i] = high if lane >= 2 else low
        return levels, total, peak

    @cute.jit
    def add_batch(
        self, sums: cute.Tensor, weights: cute.Tensor, mine: cute.Pointer, index: cutlass.Constexpr[int]
    ) -> None:
        """Weighted values of one batch of slots, which has arrived."""
        first = index % self.batches_per_group * self.batch
        for i in cutlass.range_constexpr(self.batch):
            place = mine + (index % self.stages * self.batch + i) * 256
            values = cute.make_rmem_tensor(8, BFloat16)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(8)), values)
            weight = weights[(first + i) // self.sharers]
            if const_expr(self.sharers > 1):
                quad = cute.arch.lane_idx() & -4
                weight = cute.arch.shuffle_sync(weight, quad + (first + i) % self.sharers)
            for j in cutlass.range_constexpr(8):
                sums[j] += weight * values[j].to(Float32)

    @cute.jit
    def transpose_quad(self, words: cute.Tensor, lane: Int32) -> cute.Tensor:
        """4 x 4 transposition of 32-bit words across the lanes of a quad, in two exchanges."""
        source = cute.recast_tensor(words, Int32)
        middle = cute.make_rmem_tensor(4, Int32)
        odd = (lane & 1) != 0
        for i in cutlass.range_constexpr(2):
            send = source[2 * i] if odd else source[2 * i + 1]
            got = cute.arch.shuffle_sync_bfly(send, 1)
            middle[2 * i] = got if odd else source[2 * i]
            middle[2 * i + 1] = source[2 * i + 1] if odd else got
        high = (lane & 2) != 0
        result = cute.make_rmem_tensor(8, BFloat16)
        target = cute.recast_tensor(result, Int32)
        for i in cutlass.range_constexpr(2):
            send = middle[i] if high else middle[i + 2]
            got = cute.arch.shuffle_sync_bfly(send, 2)
            target[i] = got if high else middle[i]
            target[i + 2] = middle[i + 2] if high else got
        return result
