"""Cuts the selection into segments: the queries of one window of tokens that selected one key block.

The main forward kernel gathers queries, and partial outputs go out, in the order of the segments. Ordered by key
block alone, queries come from all over the sequence and from device memory; ordered by windows of tokens they stay in
the L2 cache. One CTA serves one (index head, window) and finds, for every work item of the forward schedule, the part
of its queries that lies in the window, by two binary searches: queries ascend within an item.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_vendored.compiling import compile_options

THREADS = 1024
SEGMENT_FIELDS = 8
"""int32 fields of a segment: first entry of ``qsplit_indices``, queries, index head, first key row, keys in the block,
first query row of the document, causal shift, 0. A query at local position i sees key j of the block if
``j <= i + shift``."""
COUNTER_FIELDS = 8
"""int32 fields of a row of counters, a sector of the L2 cache. Of a chunk of tokens: segments taken, merge runs taken,
CTAs started. Of a bucket, which is a window of tokens and an index head: segments written, segments finished, place of
the first one in the window's part of the table, and with head 0 the window's segments so far. Buckets of a chunk are
numbered head by head, since K and V of one head stay in the L2 cache for all windows."""
SEGMENTS_TAKEN, RUNS_TAKEN = 0, 1
"""Fields of a chunk's counters that CTAs take numbers from."""
POLL_NANOSECONDS = 500
"""Between two looks at a counter: a bucket takes tens of microseconds, and all warps that wait poll one address."""
UNMASKED_SHIFT = 1 << 30
"""Causal shift of a segment whose queries see all keys: above any position, and their sum fits int32."""
QUERY_MASK = (1 << 24) - 1


@cute.jit
def take_number(tickets: cute.Tensor, chunk: Int32, field: cutlass.Constexpr[int], lane: Int32) -> Int32:
    """The next number of a chunk's counter, in lane 0; nothing waits for it yet."""
    number = Int32(0)
    if lane == 0:
        counter = tickets.iterator + (chunk * COUNTER_FIELDS + field)
        number = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return number


@cute.jit
def await_count(counter: cute.Pointer, wanted: Int32, lane: Int32) -> None:
    """Wait, as a warp, until CTAs have counted to ``wanted``, and see what they wrote before they counted.

    An addition of 0, since the emulator follows atomic operations and would take a load for a race.
    """
    if lane == 0:
        while cute.arch.atomic_add(counter, Int32(0), sem="acquire", scope="gpu") < wanted:
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(POLL_NANOSECONDS)])
    cute.arch.sync_warp()


class BuildSegments:
    """Grid: one CTA for each (window, index head), ``THREADS`` threads."""

    @cute.jit
    def __call__(
        self,
        scheduler_metadata: cute.Tensor,
        work_count: cute.Tensor,
        row_ptr: cute.Tensor,
        qsplit_indices: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        segments: cute.Tensor,
        buckets: cute.Tensor,
        window_tokens: Int32,
        windows_per_chunk: Int32,
        max_queries: Int32,
        causal: Int32,
        stream: Any,
    ) -> None:
        """Launch. ``segments`` is int32 ``[windows, capacity, 8]``, ``buckets`` the counters of each bucket, zeroed."""
        self.kernel(
            scheduler_metadata, work_count, row_ptr, qsplit_indices, cu_seqlens_q, cu_seqlens_k, segments, buckets,
            window_tokens, windows_per_chunk, max_queries, causal,
        ).launch(grid=(segments.shape[0], row_ptr.shape[0], 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        scheduler_metadata: cute.Tensor,
        work_count: cute.Tensor,
        row_ptr: cute.Tensor,
        qsplit_indices: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        segments: cute.Tensor,
        buckets: cute.Tensor,
        window_tokens: Int32,
        windows_per_chunk: Int32,
        max_queries: Int32,
        causal: Int32,
    ) -> None:
        """Count the pieces, reserve their places together, then write them."""
        thread, _, _ = cute.arch.thread_idx()
        window, head, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        shared = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=8)
        if thread == 0:
            shared[0] = 0
        cute.arch.sync_threads()
        items = work_count[0]
        first_token = window * window_tokens
        pieces = Int32(0)
        item = thread
        while item < items:
            _, count = self.find_queries(
                scheduler_metadata, row_ptr, qsplit_indices, cu_seqlens_q, item, head, first_token, window_tokens
            )
            pieces += (count + max_queries - 1) // max_queries
            item += THREADS
        place = Int32(0)
        if pieces > 0:
            place = cute.arch.atomic_add(shared.iterator, pieces, scope="cta", sem="relaxed")
        cute.arch.sync_threads()
        if thread == 0:
            chunk = window // windows_per_chunk
            bucket = (chunk * row_ptr.shape[0] + head) * windows_per_chunk + window % windows_per_chunk
            # The heads of a window share its part of the table, in any order.
            shared[1] = cute.arch.atomic_add(
                buckets.iterator
                + ((chunk * row_ptr.shape[0] * windows_per_chunk + window % windows_per_chunk) * COUNTER_FIELDS + 3),
                shared[0],
                scope="gpu",
                sem="relaxed",
            )
            buckets[bucket, 0] = shared[0]
            buckets[bucket, 2] = shared[1]
        cute.arch.sync_threads()
        place += shared[1]
        item = thread
        while item < items:
            begin, count = self.find_queries(
                scheduler_metadata, row_ptr, qsplit_indices, cu_seqlens_q, item, head, first_token, window_tokens
            )
            if count > 0:
                document = scheduler_metadata[item, 4]
                block = scheduler_metadata[item, 5]
                self.write_pieces(
                    segments, cu_seqlens_q, cu_seqlens_k, window, place, head * qsplit_indices.shape[1] + begin, count,
                    head, document, block, max_queries, causal,
                )  # fmt: skip
                place += (count + max_queries - 1) // max_queries
            item += THREADS

    @cute.jit
    def find_queries(
        self,
        scheduler_metadata: cute.Tensor,
        row_ptr: cute.Tensor,
        qsplit_indices: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        item: Int32,
        head: Int32,
        first_token: Int32,
        window_tokens: Int32,
    ) -> tuple[Int32, Int32]:
        """First entry and number of an item's queries within a window of tokens; 0 for another index head."""
        begin = Int32(0)
        count = Int32(0)
        if scheduler_metadata[item, 0] == head:
            document = scheduler_metadata[item, 4]
            first = first_token - cu_seqlens_q[document]
            length = cu_seqlens_q[document + 1] - cu_seqlens_q[document]
            if first < length and first + window_tokens > 0:
                begin = row_ptr[head, scheduler_metadata[item, 1]] + scheduler_metadata[item, 2]
                end = begin + scheduler_metadata[item, 3]
                low = self.lower_bound(qsplit_indices, head, begin, end, first)
                count = self.lower_bound(qsplit_indices, head, low, end, first + window_tokens) - low
                begin = low
        return begin, count

    @cute.jit
    def lower_bound(self, qsplit_indices: cute.Tensor, head: Int32, low: Int32, high: Int32, query: Int32) -> Int32:
        """First entry in [low, high) whose query is not below ``query``."""
        while low < high:
            middle = (low + high) >> 1
            below = (qsplit_indices[head, middle] & QUERY_MASK) < query
            low = middle + 1 if below else low
            high = high if below else middle
        return low

    @cute.jit
    def write_pieces(
        self,
        segments: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        window: Int32,
        place: Int32,
        entry: Int32,
        count: Int32,
        head: Int32,
        document: Int32,
        block: Int32,
        max_queries: Int32,
        causal: Int32,
    ) -> None:
        """Write the segments of one item and window, at most ``max_queries`` queries each."""
        query_base = cu_seqlens_q[document]
        key_base = cu_seqlens_k[document]
        query_length = cu_seqlens_q[document + 1] - query_base
        key_length = cu_seqlens_k[document + 1] - key_base
        first_key = block * 128
        shift = key_length - query_length - first_key if causal != 0 else Int32(UNMASKED_SHIFT)
        keys = cutlass.min(key_length - first_key, 128)
        done = Int32(0)
        while done < count:
            segments[window, place, 0] = entry + done
            segments[window, place, 1] = cutlass.min(count - done, max_queries)
            segments[window, place, 2] = head
            segments[window, place, 3] = key_base + first_key
            segments[window, place, 4] = keys
            segments[window, place, 5] = query_base
            segments[window, place, 6] = shift
            segments[window, place, 7] = 0
            place += 1
            done += max_queries


def compile_segments(*, arch: str) -> Any:
    """Compile the segment builder; one for all shapes.

    Call with ``scheduler_metadata`` int32 ``[items, 6]``, ``work_count`` ``[1]``, ``row_ptr`` ``[Hkv, rows + 1]``,
    ``qsplit_indices`` ``[Hkv, edges]``, ``cu_seqlens_q``, ``cu_seqlens_k``, ``segments`` ``[windows, capacity, 8]``,
    ``buckets`` ``[chunks * Hkv * windows per chunk, 8]``, and int32 ``window_tokens, windows_per_chunk, max_queries,
    causal``.
    """
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    def fake(*shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(Int32, shape, stride_order=order, assumed_align=4)

    size = cute.sym_int
    heads, documents = size(), size()
    return cute.compile(
        BuildSegments(),
        fake(size(), 6), fake(1), fake(heads, size()), fake(heads, size()), fake(documents), fake(documents),
        fake(size(), size(), SEGMENT_FIELDS), fake(size(), COUNTER_FIELDS),
        Int32(1), Int32(1), Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )  # fmt: skip
