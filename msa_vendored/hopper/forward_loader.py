"""The producer warp of the sparse forward on SM90 (:mod:`msa_vendored.hopper.forward_main`): K, V and queries.

It reads the selection a batch of tiles ahead, and the next segment while this one's tiles go out: each of these loads
takes as long as a tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from msa_vendored.hopper.segments import QUERY_MASK, SEGMENT_FIELDS, SEGMENTS_TAKEN, take_number

HEAD_DIM = 128
BLOCK = 128
ROWS = 64
Q_STAGES = 6
KV_STAGES = 2
KV_BYTES = 2 * BLOCK * HEAD_DIM * 2


class ForwardLoader:
    """The loading role.

    Args:
        ratio: query heads per index head, 1 to 16.
    """

    def __init__(self, ratio: int) -> None:
        self.ratio, self.queries = ratio, ROWS // ratio
        self.q_bytes = self.queries * ratio * HEAD_DIM * 2
        # Entries of the selection are read for several tiles at once, a batch ahead: a load takes as long as a tile.
        self.batch = max(1, 32 // self.queries)
        # A box of Q is [column, head, half, head group] of one query. If its heads are whole groups of 8 rows, in which
        # wgmma counts, one box has both halves of the columns; else there is a box for each half.
        self.boxes = 1 if ratio % 8 == 0 else 2
        self.box = (64, 8, 2, ratio // 8) if self.boxes == 1 else (64, ratio, 1, 1)
        self.words = -(-self.batch * self.queries // 32)

    @cute.jit
    def load(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tma: cute.Tensor,
        q_smem: cute.Tensor,
        k_smem: cute.Tensor,
        v_smem: cute.Tensor,
        meta: cute.Tensor,
        info: cute.Tensor,
        q_full: cute.Pointer,
        q_empty: cute.Pointer,
        kv_full: cute.Pointer,
        kv_empty: cute.Pointer,
        qsplit_indices: cute.Tensor,
        segments: cute.Tensor,
        tickets: cute.Tensor,
        buckets: cute.Tensor,
        chunk: Int32,
        chunk_buckets: Int32,
        windows_per_chunk: Int32,
    ) -> None:
        """Segments in the order of the counter: K, V, then the queries of each."""
        lane = cute.arch.lane_idx()
        # [box, query, half, stage]: where the boxes of a query go.
        group, half = (1024, 512) if const_expr(self.boxes == 1) else (0, ROWS * 64)
        q_boxes = cute.make_tensor(
            q_smem.iterator,
            cute.make_layout(
                (self.box, self.queries, self.boxes, Q_STAGES),
                stride=((1, 64, half, group), self.ratio * HEAD_DIM // self.boxes, half, ROWS * HEAD_DIM),
            ),
        )
        # Segments are numbered through the buckets of the chunk; `base` is the number of the bucket's first.
        first_row = chunk * chunk_buckets
        bucket, base, written = Int32(0), Int32(0), buckets[first_row, 0]
        segment = cute.arch.shuffle_sync(take_number(tickets, chunk, SEGMENTS_TAKEN, lane), 0)
        bucket, base, written = self.find_bucket(buckets, first_row, chunk_buckets, segment, bucket, base, written)
        next_row = first_row + bucket
        next_field = self.read_segment(
            segments, buckets, chunk, bucket, chunk_buckets, segment - base, windows_per_chunk, lane
        )
        packed = self.read_queries(
            qsplit_indices, cute.arch.shuffle_sync(next_field, 0), cute.arch.shuffle_sync(next_field, 1), lane
        )
        kv_stage, kv_phase, q_stage, q_phase = Int32(0), Int32(1), Int32(0), Int32(1)
        while bucket < chunk_buckets:
            field, row = next_field, next_row
            entry = cute.arch.shuffle_sync(field, 0)
            count = cute.arch.shuffle_sync(field, 1)
            head = cute.arch.shuffle_sync(field, 2)
            key_row = cute.arch.shuffle_sync(field, 3)
            query_base = cute.arch.shuffle_sync(field, 5)
            following = take_number(tickets, chunk, SEGMENTS_TAKEN, lane)
            cute.arch.mbarrier_wait(kv_empty + kv_stage, kv_phase)
            field = row if lane == SEGMENT_FIELDS - 1 else field
            if lane < SEGMENT_FIELDS:
                info[lane, kv_stage] = field
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(kv_full + kv_stage, KV_BYTES)
            self.load_block(k_atom, k_tma, k_smem, key_row, head, kv_stage, kv_full + kv_stage)
            self.load_block(v_atom, v_tma, v_smem, key_row, head, kv_stage, kv_full + kv_stage)
            kv_stage += 1
            if kv_stage == KV_STAGES:
                kv_stage, kv_phase = Int32(0), kv_phase ^ 1
            # The next segment is read while this one's tiles go out.
            segment = cute.arch.shuffle_sync(following, 0)
            bucket, base, written = self.find_bucket(buckets, first_row, chunk_buckets, segment, bucket, base, written)
            next_row = first_row + bucket
            next_field = self.read_segment(
                segments, buckets, chunk, bucket, chunk_buckets, segment - base, windows_per_chunk, lane
            )
            while count > 0:
                entry += self.batch * self.queries
                remaining = count - self.batch * self.queries
                if remaining <= 0:
                    entry = cute.arch.shuffle_sync(next_field, 0)
                    remaining = cute.arch.shuffle_sync(next_field, 1)
                upcoming = self.read_queries(qsplit_indices, entry, remaining, lane)
                step = Int32(0)
                while step < self.batch and count > 0:
                    cute.arch.mbarrier_wait(q_empty + q_stage, q_phase)
                    self.publish_queries(meta, packed, step, q_stage, lane)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(q_full + q_stage, self.q_bytes)
                    self.load_queries(q_atom, q_tma, q_boxes, packed, step, query_base, head, q_stage, q_full + q_stage)
                    q_stage += 1
                    if q_stage == Q_STAGES:
                        q_stage, q_phase = Int32(0), q_phase ^ 1
                    count -= self.queries
                    step += 1
                for i in cutlass.range_constexpr(self.words):
                    packed[i] = upcoming[i]
        # A segment without queries tells the others to leave.
        cute.arch.mbarrier_wait(kv_empty + kv_stage, kv_phase)
        if lane < SEGMENT_FIELDS:
            info[lane, kv_stage] = 0
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(kv_full + kv_stage)

    @cute.jit
    def find_bucket(
        self,
        buckets: cute.Tensor,
        first_row: Int32,
        chunk_buckets: Int32,
        segment: Int32,
        bucket: Int32,
        base: Int32,
        written: Int32,
    ) -> tuple[Int32, Int32, Int32]:
        """From a bucket on, the one that a segment is in, the number of its first, and how many it has."""
        while bucket < chunk_buckets and segment >= base + written:
            bucket, base = bucket + 1, base + written
            written = buckets[first_row + cutlass.min(bucket, chunk_buckets - 1), 0]
        return bucket, base, written

    @cute.jit
    def read_segment(
        self,
        segments: cute.Tensor,
        buckets: cute.Tensor,
        chunk: Int32,
        bucket: Int32,
        chunk_buckets: Int32,
        index: Int32,
        windows_per_chunk: Int32,
        lane: Int32,
    ) -> Int32:
        """A field of the bucket's ``index``-th segment in each of the first lanes; 0 past the last bucket."""
        field = Int32(0)
        if bucket < chunk_buckets:
            window = chunk * windows_per_chunk + bucket % windows_per_chunk
            place = buckets[chunk * chunk_buckets + bucket, 2] + index
            if lane < SEGMENT_FIELDS:
                field = segments[window, place, lane]
        return field

    @cute.jit
    def read_queries(self, qsplit_indices: cute.Tensor, entry: Int32, count: Int32, lane: Int32) -> cute.Tensor:
        """Packed queries of the next batch of tiles, spread over the lanes; -1 past the segment's end."""
        packed = cute.make_rmem_tensor(self.words, Int32)
        for i in cutlass.range_constexpr(self.words):
            packed[i] = Int32(-1)
            place = lane + 32 * i
            if place < self.batch * self.queries and place < count:
                packed[i] = qsplit_indices[entry + place]
        return packed

    @cute.jit
    def publish_queries(self, meta: cute.Tensor, packed: cute.Tensor, step: Int32, stage: Int32, lane: Int32) -> None:
        """Show the packed queries of one tile of the batch to the consumers."""
        for i in cutlass.range_constexpr(-(-self.queries // 32)):
            value = packed[i]
            if const_expr(self.batch > 1):
                value = cute.arch.shuffle_sync(packed[0], (step * self.queries + lane) % 32)
            if lane + 32 * i < self.queries:
                meta[lane + 32 * i, stage] = value
        cute.arch.sync_warp()

    @cute.jit
    def load_block(
        self,
        atom: cute.CopyAtom,
        tma: cute.Tensor,
        smem: cute.Tensor,
        row: Int32,
        head: Int32,
        stage: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """128 rows of K or V from ``row`` on; rows past the tensor's end come as zeros."""
        block = cute.local_tile(cute.domain_offset((row, 0, 0), tma)[None, None, head], (BLOCK, HEAD_DIM), (0, 0))
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(block, 0, 2)
        )
        cute.copy(atom, source, target[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def load_queries(
        self,
        atom: cute.CopyAtom,
        tma: cute.Tensor,
        boxes: cute.Tensor,
        packed: cute.Tensor,
        step: Int32,
        query_base: Int32,
        head: Int32,
        stage: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """One tile of Q, query by query. Unused places load rows past the end of q, which come as zeros."""
        # [box, 1, 1, half, head group, token]
        source_all = cute.group_modes(cute.flat_divide(tma, self.box), 0, 4)
        target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), boxes, source_all)
        tokens = cute.size(tma, mode=[4])
        for i in cutlass.range(self.queries, unroll=min(8, self.queries)):
            value = packed[0]
            if const_expr(self.words > 1):
                value = packed[0] if i < 32 else packed[1]
            value = cute.arch.shuffle_sync(value, (step * self.queries + i) % 32)
            token = query_base + (value & QUERY_MASK) if value >= 0 else tokens
            for half in cutlass.range_constexpr(self.boxes):
                cute.copy(
                    atom, source[None, 0, 0, half, head, token], target[None, i, half, stage], tma_bar_ptr=barrier
                )
