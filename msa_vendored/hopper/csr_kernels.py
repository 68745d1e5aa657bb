"""The CSR of a selection on SM90: a counting sort by key block, with ranks that do not depend on timing.

Six launches, none of which writes what another CTA of the same launch reads:

1. *map_rows*: the number of every key block, from the lengths of the documents.
2. *count_edges*: a CTA for each head and chunk of queries sets one bit for each edge in shared memory, a bitmap of
   rows x queries of the chunk. Bits commute, so the order in which threads come does not matter; the number of set
   bits is the number of edges, and the bits below an edge's are its rank within the chunk: queries ascend in a row.
3. *scan_chunks*: for each row, edges in the chunks before each chunk.
4. *scan_rows*: one CTA, row pointers and first work items over all heads.
5. *place_edges*: the bitmap again, and every edge to its place; -1 behind the last edge.
6. *write_items*: work items of the forward.

What binds at 32,768 queries is the scattered stores of step 5: two words for each of 2,097,152 edges, in runs of as
many edges as a row has in a chunk (16 for 256 key blocks and 256 queries).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from msa_vendored.compiling import compile_options

BLOCK = 128
MAP_THREADS = 128
SCAN_THREADS = 1024
ITEM_THREADS = 256
ITEM_FIELDS = 6
SLOT_SHIFT = 24
OUTSIDE = -2
ENOUGH_ROWS, USABLE = 0, 1
"""Words of ``status``."""


class CsrKernels:
    """Kernels for one chunk of queries, which is also the threads of a CTA, and one selection width."""

    def __init__(self, chunk: int, topk: int) -> None:
        self.chunk, self.topk = chunk, topk
        self.words = chunk // 32

    @cute.jit
    def __call__(
        self,
        selection: cute.Tensor,
        cu_q: cute.Tensor,
        cu_k: cute.Tensor,
        work: cute.Tensor,
        row_ptr: cute.Tensor,
        q_indices: cute.Tensor,
        qsplit: cute.Tensor,
        split_counts: cute.Tensor,
        items: cute.Tensor,
        words: cute.Tensor,
        target: Int32,
        stream: Any,
    ) -> None:
        """Launch all six; H heads, T queries, R rows, D documents. Everything is int32.

        Few arguments, since each tensor costs the host microseconds.

        Args:
            selection: ``[H, T, topk]``, strides of heads and queries multiples of 4.
            cu_q: ``[D + 1]``.
            cu_k: ``[D + 1]``.
            work: work space, :func:`msa_vendored.hopper.csr.count_work_words` words.
            row_ptr: ``[H, R + 1]``.
            q_indices: ``[H, T * topk]``.
            qsplit: ``[H, T * topk]``.
            split_counts: ``[T, H]``.
            items: ``[capacity, 6]``.
            words: ``[3]``: number of items; whether R suffices, else edges are missing; whether every selection is
                usable.
            target: most queries of an item.
            stream: CUDA stream.
        """
        heads, tokens, rows = selection.shape[0], selection.shape[1], row_ptr.shape[1] - 1
        chunks = (tokens + self.chunk - 1) // self.chunk
        documents = cu_k.shape[0] - 1
        bitmap_bytes = rows * self.words * 4
        # Document and block of each row, number of each block, first block of each document, and per row and head.
        row_block = cute.make_tensor(work.iterator, cute.make_layout((rows, 2), stride=(2, 1)))
        row_of_block = cute.make_tensor(work.iterator + 2 * rows, cute.make_layout((rows,)))
        first_block = cute.make_tensor(work.iterator + 3 * rows, cute.make_layout((documents,)))
        per_head = work.iterator + 3 * rows + documents
        item_start = cute.make_tensor(per_head, cute.make_layout((heads * rows,)))
        counts = cute.make_tensor(
            per_head + heads * rows,
            cute.make_layout((heads, chunks, rows), stride=(Int64(chunks) * rows, Int64(rows), 1)),
        )
        work_count = cute.make_tensor(words.iterator, cute.make_layout(1))
        status = cute.make_tensor(words.iterator + 1, cute.make_layout(2))
        operands = (selection, cu_q, cu_k, row_of_block, first_block)
        self.map_rows(cu_k, row_of_block, first_block, row_block, status).launch(
            grid=((rows + MAP_THREADS - 1) // MAP_THREADS, 1, 1), block=(MAP_THREADS, 1, 1), stream=stream
        )
        self.count_edges(operands, counts, split_counts, status).launch(
            grid=(chunks, heads, 1), block=(self.chunk, 1, 1), smem=bitmap_bytes, stream=stream
        )
        self.scan_chunks(counts, row_ptr).launch(
            grid=((rows + MAP_THREADS - 1) // MAP_THREADS, heads, 1), block=(MAP_THREADS, 1, 1), stream=stream
        )
        self.scan_rows(row_ptr, item_start, work_count, target).launch(
            grid=(1, 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream
        )
        self.place_edges(operands, counts, row_ptr, q_indices, qsplit).launch(
            grid=(chunks, heads, 1), block=(self.chunk, 1, 1), smem=bitmap_bytes, stream=stream
        )
        self.write_items(row_ptr, row_block, item_start, items, work_count, target).launch(
            grid=((items.shape[0] + ITEM_THREADS - 1) // ITEM_THREADS, 1, 1), block=(ITEM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def map_rows(
        self,
        cu_k: cute.Tensor,
        row_of_block: cute.Tensor,
        first_block: cute.Tensor,
        row_block: cute.Tensor,
        status: cute.Tensor,
    ) -> None:
        """Thread g is key block g, counted document by document; its row comes after all rows of a lower block.

        Row of block b of document d: for each document, its blocks below b, and those before d that have a block b.
        """
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        flat, rows, documents = cta * MAP_THREADS + thread, row_of_block.shape[0], first_block.shape[0]
        document, block, total = documents, Int32(0), Int32(0)
        for d in cutlass.range(documents, unroll=4):
            blocks = (cu_k[d + 1] - cu_k[d] + (BLOCK - 1)) // BLOCK
            if flat >= total and flat < total + blocks:
                document, block = d, flat - total
                if block == 0:
                    first_block[d] = flat
            total += blocks
        if flat == 0:
            status[ENOUGH_ROWS] = Int32(total <= rows)
            status[USABLE] = 1
        if document < documents and flat < rows:
            row = Int32(0)
            for d in cutlass.range(documents, unroll=4):
                blocks = (cu_k[d + 1] - cu_k[d] + (BLOCK - 1)) // BLOCK
                row += cutlass.min(blocks, block)
                row += Int32(d < document and blocks > block)
            row_of_block[flat] = cutlass.select_(row < rows, row, Int32(-1))
            if row < rows:
                row_block[row, 0] = document
                row_block[row, 1] = block

    @cute.jit
    def read_query(self, operands: tuple[cute.Tensor, ...], head: Int32, query: Int32, rows: cute.Tensor) -> Int32:
        """Rows of the blocks that a query selected, -1 where it selected none; gives its document's first token.

        :data:`OUTSIDE` where a number is neither -1 nor a block of the query's document.
        """
        selection, cu_q, cu_k, row_of_block, first_block = operands
        low, high = Int32(0), first_block.shape[0]
        while high - low > 1:
            middle = (low + high) // 2
            if cu_q[middle] <= query:
                low = middle
            else:
                high = middle
        blocks = (cu_k[low + 1] - cu_k[low] + (BLOCK - 1)) // BLOCK
        first = first_block[low]
        ids = cute.make_rmem_tensor(cute.make_layout(self.topk), Int32)
        cute.autovec_copy(selection[head, query, None], ids)
        for i in cutlass.range_constexpr(self.topk):
            rows[i] = -1
            # The last two conditions hold unless there are too few rows, which is an error that is reported later.
            if ids[i] >= 0 and ids[i] < blocks and first >= 0 and first + ids[i] < row_of_block.shape[0]:
                rows[i] = row_of_block[first + ids[i]]
            elif ids[i] != -1:
                rows[i] = Int32(OUTSIDE)
        return cu_q[low]

    @cute.jit
    def fill_bitmap(self, bitmap: cute.Tensor, rows: cute.Tensor, count: Int32, thread: Int32) -> Boolean:
        """Clear the bitmap ``[words, rows]``, then set the bit of this thread's query in each of its rows.

        Gives whether one of them was set already: only this thread sets it, so the query named a block twice.
        """
        for i in cutlass.range(thread, self.words * count, self.chunk, unroll=4):
            bitmap[i] = 0
        cute.arch.sync_threads()
        mine, before = Int32(1) << (thread % 32), Int32(0)
        for i in cutlass.range_constexpr(self.topk):
            if rows[i] >= 0:
                before |= cute.arch.atomic_or(bitmap.iterator + (thread // 32 * count + rows[i]), mine)
        cute.arch.sync_threads()
        return (before & mine) != 0

    @cute.jit
    def view_bitmap(self, rows: Int32) -> cute.Tensor:
        """Dynamic shared memory as words."""
        return cute.make_tensor(cute.arch.get_dyn_smem(Int32, alignment=16), cute.make_layout(self.words * rows))

    @cute.kernel
    def count_edges(
        self, operands: tuple[cute.Tensor, ...], counts: cute.Tensor, split_counts: cute.Tensor, status: cute.Tensor
    ) -> None:
        """Edges of each row in this chunk of queries, and edges of each query; notes unusable selections."""
        thread, _, _ = cute.arch.thread_idx()
        chunk, head, _ = cute.arch.block_idx()
        query, count = chunk * self.chunk + thread, counts.shape[2]
        rows = cute.make_rmem_tensor(cute.make_layout(self.topk), Int32)
        rows.fill(-1)
        unusable = Boolean(False)
        if query < split_counts.shape[0]:
            self.read_query(operands, head, query, rows)
            live = Int32(0)
            for i in cutlass.range_constexpr(self.topk):
                live += Int32(rows[i] >= 0)
                unusable |= rows[i] == OUTSIDE
                if cutlass.const_expr(i > 0):
                    unusable |= (rows[i] >= 0) & (rows[i - 1] < 0)
            split_counts[query, head] = live
        bitmap = self.view_bitmap(count)
        unusable |= self.fill_bitmap(bitmap, rows, count, thread)
        if unusable:
            cute.arch.atomic_and(status.iterator + USABLE, Int32(0))
        for row in cutlass.range(thread, count, self.chunk, unroll=1):
            edges = Int32(0)
            for word in cutlass.range_constexpr(self.words):
                edges += cute.arch.popc(bitmap[word * count + row])
            counts[head, chunk, row] = edges

    @cute.kernel
    def scan_chunks(self, counts: cute.Tensor, row_ptr: cute.Tensor) -> None:
        """Replace the edges of each chunk by those of the chunks before; the row's sum goes to its row pointer."""
        thread, _, _ = cute.arch.thread_idx()
        cta, head, _ = cute.arch.block_idx()
        row, chunks = cta * MAP_THREADS + thread, counts.shape[1]
        if row < counts.shape[2]:
            before = Int32(0)
            loaded = cute.make_rmem_tensor(cute.make_layout(8), Int32)
            for begin in cutlass.range(0, chunks, 8, unroll=1):
                for i in cutlass.range_constexpr(8):
                    loaded[i] = 0
                    if begin + i < chunks:
                        loaded[i] = counts[head, begin + i, row]
                for i in cutlass.range_constexpr(8):
                    if begin + i < chunks:
                        counts[head, begin + i, row] = before
                    before += loaded[i]
            row_ptr[head, row + 1] = before

    @cute.jit
    def scan_threads(self, value: Int32, sums: cute.Tensor, thread: Int32) -> Int32:
        """Sum of the values of the threads before, in a CTA of 1,024 threads; ``sums`` has a word for each warp."""
        lane, warp = thread % 32, thread // 32
        total = value
        for log in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(total, 1 << log, mask_and_clamp=0)
            if lane >= 1 << log:
                total += other
        if lane == 31:
            sums[warp] = total
        cute.arch.sync_threads()
        if warp == 0:
            mine = sums[lane]
            for log in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(mine, 1 << log, mask_and_clamp=0)
                if lane >= 1 << log:
                    mine += other
            sums[lane] = mine
        cute.arch.sync_threads()
        before = total - value
        if warp > 0:
            before += sums[warp - 1]
        cute.arch.sync_threads()
        return before

    @cute.kernel
    def scan_rows(self, row_ptr: cute.Tensor, item_start: cute.Tensor, work_count: cute.Tensor, target: Int32) -> None:
        """Row pointers from the sums that they hold, head by head, and first items over all heads."""
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.utils.SmemAllocator()
        sums = smem.allocate_tensor(Int32, cute.make_layout(32))
        heads, rows = row_ptr.shape[0], row_ptr.shape[1] - 1
        share = (rows + SCAN_THREADS - 1) // SCAN_THREADS
        begin = cutlass.min(thread * share, rows)
        end = cutlass.min(begin + share, rows)
        items = Int32(0)
        for head in cutlass.range(heads, unroll=1):
            edges, pieces = Int32(0), Int32(0)
            for row in cutlass.range(begin, end, unroll=1):
                count = row_ptr[head, row + 1]
                edges += count
                pieces += (count + target - 1) // target
            edge = self.scan_threads(edges, sums, thread)
            item = items + self.scan_threads(pieces, sums, thread)
            if thread == 0:
                row_ptr[head, 0] = 0
            for row in cutlass.range(begin, end, unroll=1):
                count = row_ptr[head, row + 1]
                item_start[head * rows + row] = item
                edge += count
                item += (count + target - 1) // target
                row_ptr[head, row + 1] = edge
            if thread == SCAN_THREADS - 1:
                sums[0] = item
            cute.arch.sync_threads()
            items = sums[0]
            cute.arch.sync_threads()
        if thread == 0:
            work_count[0] = items

    @cute.kernel
    def place_edges(
        self,
        operands: tuple[cute.Tensor, ...],
        counts: cute.Tensor,
        row_ptr: cute.Tensor,
        q_indices: cute.Tensor,
        qsplit: cute.Tensor,
    ) -> None:
        """Every edge to its row's start + edges of chunks before + edges of lower queries in the chunk."""
        thread, _, _ = cute.arch.thread_idx()
        chunk, head, _ = cute.arch.block_idx()
        tokens, count = operands[0].shape[1], counts.shape[2]
        query = chunk * self.chunk + thread
        rows = cute.make_rmem_tensor(cute.make_layout(self.topk), Int32)
        rows.fill(-1)
        start = Int32(0)
        if query < tokens:
            start = self.read_query(operands, head, query, rows)
        bitmap = self.view_bitmap(count)
        self.fill_bitmap(bitmap, rows, count, thread)
        word, below = thread // 32, (Int32(1) << (thread % 32)) - 1
        slot = Int32(0)
        for i in cutlass.range_constexpr(self.topk):
            row = rows[i]
            if row >= 0:
                place = row_ptr[head, row] + counts[head, chunk, row]
                for other in cutlass.range(word, unroll=1):
                    place += cute.arch.popc(bitmap[other * count + row])
                place += cute.arch.popc(bitmap[word * count + row] & below)
                q_indices[head, place] = query - start
                qsplit[head, place] = (query - start) | (slot << SLOT_SHIFT)
                slot += 1
        last = row_ptr[head, count]
        first = chunk * self.chunk * self.topk
        for i in cutlass.range_constexpr(self.topk):
            place = first + i * self.chunk + thread
            if place >= last and place < tokens * self.topk:
                q_indices[head, place] = -1
                qsplit[head, place] = -1

    @cute.kernel
    def write_items(
        self,
        row_ptr: cute.Tensor,
        row_block: cute.Tensor,
        item_start: cute.Tensor,
        items: cute.Tensor,
        work_count: cute.Tensor,
        target: Int32,
    ) -> None:
        """One thread an item: its row by binary search, zeros behind the last item."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        item, rows = cta * ITEM_THREADS + thread, row_ptr.shape[1] - 1
        if item < items.shape[0]:
            row = cute.make_rmem_tensor(cute.make_layout(ITEM_FIELDS), Int32)
            row.fill(0)
            if item < work_count[0]:
                # The last row whose first item is not behind this one; rows without items share the next one's.
                low, high = Int32(0), item_start.shape[0]
                while high - low > 1:
                    middle = (low + high) // 2
                    if item_start[middle] <= item:
                        low = middle
                    else:
                        high = middle
                head, within = low // rows, low % rows
                begin = (item - item_start[low]) * target
                row[0], row[1], row[2] = head, within, begin
                row[3] = cutlass.min(row_ptr[head, within + 1] - row_ptr[head, within] - begin, target)
                row[4], row[5] = row_block[within, 0], row_block[within, 1]
            for i in cutlass.range_constexpr(ITEM_FIELDS):
                items[item, i] = row[i]


def compile_csr(*, arch: str, chunk: int, topk: int) -> Any:
    """Compile for one chunk of queries and selection width; call it with :meth:`CsrKernels.__call__`'s arguments."""
    heads, tokens = cute.sym_int(), cute.sym_int()

    def table(*shape: Any, align: int = 4, outer: Any = None) -> Any:
        strides = outer or tuple(cute.sym_int64() for _ in shape[1:])
        return cute.runtime.make_fake_tensor(Int32, shape, stride=(*strides, 1), assumed_align=align)

    strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4))
    return cute.compile(
        CsrKernels(chunk, topk),
        table(heads, tokens, topk, align=16, outer=strides),
        table(cute.sym_int()),
        table(cute.sym_int()),
        table(cute.sym_int()),
        table(heads, cute.sym_int()),
        table(heads, cute.sym_int()),
        table(heads, cute.sym_int()),
        table(tokens, heads),
        table(cute.sym_int(), ITEM_FIELDS, outer=(ITEM_FIELDS,)),
        table(3),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
