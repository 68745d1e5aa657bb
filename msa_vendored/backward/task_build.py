"""Device build of the task tables: :func:`msa_vendored.backward.task_mirror.build_tasks`, bit for bit, no host sync.

Five launches for the even walk; none reads what another CTA of the same launch writes (but for atomics whose result
nobody reads):

1. *clear*: zeroes the scratch.
2. *items*, one thread per work item: checks it, and adds it to its row: a checksum of its interval, its number (the
   largest stays), and the row's claim on its key block.
3. *rows*, one CTA per (kv head, row): checks that the items tile the row and that the queries ascend within their
   document. The tasks of a row ascend by window, so the tasks of a bin (window, key block) are one run of them: the
   thread that sees the window change writes where the run begins and where the one before ends.
4. *windows*, one CTA per (kv head, window): the sum of all windows before, and a scan over the key blocks. The last
   CTA writes the descriptor.
5. *tables*, CTAs per (kv head, row): task i of a row goes to place ``base[bin] + i``.

In the walk by windows, runs in a bin are of edges, which a launch between 3 and 4 counts as tasks, and a warp writes
the tasks of a bin. Walks by windows and blocks list their chunks in a launch of one CTA.

Items [b, e) tile [0, n) exactly if, and only if, every boundary inside is as often an end as a beginning, and n ends
and 0 begins one interval more: as all intervals point forward, what conserves flow and carries one unit from 0 to n is
a single path. So the row's checksum, the sum of f(e) - f(b) over its items modulo 2^32, must be f(n) - f(0). f mixes in
document and key block, so that items that disagree on them do not cancel; a wrong tiling passes by chance in 1 of 2^32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from msa_vendored.backward.tasks import (
    BAD_ITEM,
    BAD_QUERY,
    BAD_ROW,
    BAD_WORK_COUNT,
    DESCRIPTOR_WORDS,
    INCONSISTENT,
    KEYS_PER_BLOCK,
    OVERFLOW,
    queries_per_task,
)
from msa_vendored.compiling import compile_options

THREADS = 256
WARPS = THREADS // 32
TABLE_SPLITS = 4
"""CTAs that share the tasks of one row in *tables*: a hot row has as many edges as there are tokens."""


@cute.jit
def _flag(error_word: cute.Tensor, bits: cutlass.Constexpr) -> None:
    cute.arch.atomic_or(error_word.iterator, Int32(bits))


@cute.jit
def _mix(position: Int32, document: Int32, block: Int32) -> Uint32:
    """The f of the tiling checksum. Multipliers: xxHash32's primes; finaliser: MurmurHash3's fmix32."""
    x = Uint32(position) * Uint32(0x9E3779B1)
    x = x ^ (Uint32(document) * Uint32(0x85EBCA77)) ^ (Uint32(block) * Uint32(0xC2B2AE3D))
    x = (x ^ (x >> 16)) * Uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * Uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@cute.jit
def _warp_inclusive_sum(value: Int32, lane: Int32) -> Int32:
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += below
    return value


@cute.jit
def _cta_inclusive_sum(value: Int32, sums: cute.Tensor, thread: Int32) -> tuple[Int32, Int32]:
    """Inclusive prefix sum over the threads of the CTA, and the sum of all. ``sums``: one word of smem per warp."""
    lane, warp = thread % 32, thread // 32
    inclusive = _warp_inclusive_sum(value, lane)
    cute.arch.sync_threads()  # readers of the previous round are done
    if lane == 31:
        sums[warp] = inclusive
    cute.arch.sync_threads()
    total = Int32(0)
    for i in cutlass.range_constexpr(WARPS):
        if warp == i:
            inclusive += total
        total += sums[i]
    return inclusive, total


class TaskBuild:
    """Host function and kernels for one head ratio and kind of walk; every size is a runtime value."""

    def __init__(self, ratio: int, walk: str) -> None:
        self.queries = queries_per_task(ratio)
        self.even, self.by_windows = walk == "even", walk == "windows"

    @cute.jit
    def __call__(
        self,
        row_ptr: cute.Tensor,
        q_indices: cute.Tensor,
        items: cute.Tensor,
        work_count: cute.Tensor,
        cu_seqlens: cute.Tensor,
        starts: cute.Tensor,
        scratch: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        descriptor: cute.Tensor,
        error_word: cute.Tensor,
        tokens: Int32,
        workspace_rows: Int32,
        window: Int32,
        grid: Int32,
        rows_per_chunk: Int32,
        stream: Any,
    ) -> None:
        """All launches; see :func:`compile_task_build` for the arguments."""
        heads, rows = row_ptr.shape[0], row_ptr.shape[1] - 1
        blocks, windows = workspace_rows // KEYS_PER_BLOCK, (tokens + window - 1) // window
        csr_rows, owners, groups = heads * rows, heads * blocks, heads * windows
        bins = groups * blocks
        section = scratch.iterator
        tilings = cute.make_tensor(section, cute.make_layout((heads, rows), stride=(rows, 1)))
        row_items = cute.make_tensor(section + csr_rows, tilings.layout)
        block_owners = cute.make_tensor(section + 2 * csr_rows, cute.make_layout((heads, blocks), stride=(blocks, 1)))
        totals = cute.make_tensor(section + (2 * csr_rows + owners), cute.make_layout(groups))
        bin_layout = cute.make_layout((groups, blocks), stride=(blocks, 1))
        firsts = cute.make_tensor(section + (2 * csr_rows + owners + groups), bin_layout)
        ends = cute.make_tensor(section + (2 * csr_rows + owners + groups + bins), bin_layout)
        places, before_rows = ends, 2 * csr_rows + owners + groups + 2 * bins
        if cutlass.const_expr(self.by_windows):
            places = cute.make_tensor(section + before_rows, bin_layout)
            before_rows += bins
        row_tasks = cute.make_tensor(section + before_rows, tilings.layout)
        csr = (row_ptr, q_indices, items, cu_seqlens, starts)
        row_state = (tilings, row_items, block_owners, row_tasks)
        bins_state = (totals, firsts, ends, places)
        tables = (task_meta, task_qrows, task_qpos)
        counts = (work_count, items.shape[0], task_meta.shape[0])

        quads = cute.size(scratch) // 4
        self.clear(scratch, quads).launch(
            grid=(cute.ceil_div(quads, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        self.read_items(csr, work_count, row_state, error_word, tokens, workspace_rows).launch(
            grid=(items.shape[0] // THREADS + 1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        self.check_rows(csr, row_state, bins_state, error_word, window).launch(
            grid=(csr_rows, 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        if cutlass.const_expr(self.by_windows):
            self.count_tasks(bins_state).launch(grid=(groups, 1, 1), block=(THREADS, 1, 1), stream=stream)
        self.scan_windows(bins_state, counts, descriptor, error_word, grid, rows_per_chunk).launch(
            grid=(groups, 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        if cutlass.const_expr(not self.even):
            self.list_chunks(bins_state, counts, descriptor, error_word).launch(
                grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
            )
        # Without a bound ptxas stops at 32 or 40 registers and spills 8 bytes; it wants 44.
        self.write_tables(csr, row_state, bins_state, tables, window, windows).launch(
            grid=(csr_rows, TABLE_SPLITS, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def clear(self, scratch: cute.Tensor, quads: Int32) -> None:
        """Zeroes the scratch, 16 bytes a thread."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        quad = cta * THREADS + thread
        if quad < quads:
            words = scratch.iterator + cute.assume(quad * 4, divby=4)
            cute.make_tensor(words, cute.make_layout(4)).fill(0)

    @cute.kernel
    def read_items(
        self,
        csr: tuple[cute.Tensor, ...],
        work_count: cute.Tensor,
        row_state: tuple[cute.Tensor, ...],
        error_word: cute.Tensor,
        tokens: Int32,
        workspace_rows: Int32,
    ) -> None:
        """One work item a thread."""
        row_ptr, q_indices, items, cu_seqlens, starts = csr
        tilings, row_items, block_owners, _ = row_state
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        item = cta * THREADS + thread
        listed = work_count[0]
        count = cutlass.min(cutlass.max(listed, 0), items.shape[0])
        if (item == 0) & (listed != count):
            _flag(error_word, BAD_WORK_COUNT | INCONSISTENT)
        if item < count:
            head, row, begin, edges, document, block = (items[item, i] for i in range(6))
            valid = self.names_row(head, row, row_ptr) & (document >= 0) & (document < starts.shape[0])
            # An index that is out of range reads element 0 instead; what it reads does not matter then.
            h, r, d = head * Int32(valid), row * Int32(valid), document * Int32(valid)
            first, last = row_ptr[h, r], row_ptr[h, r + 1]
            valid = valid & (first >= 0) & (last <= q_indices.shape[1]) & (first <= last)
            valid = valid & (begin >= 0) & (edges >= 0) & (begin <= last - first) & (edges <= last - first - begin)
            token, end, start = cu_seqlens[d], cu_seqlens[d + 1], starts[d]
            valid = valid & (token >= 0) & (token < end) & (end <= tokens)
            document_blocks = (end - token - 1) // KEYS_PER_BLOCK + 1
            valid = valid & (start >= 0) & (start % KEYS_PER_BLOCK == 0) & (start <= workspace_rows)
            valid = valid & (document_blocks <= (workspace_rows - start) // KEYS_PER_BLOCK)
            valid = valid & (block >= 0) & (block < document_blocks)
            if not valid:
                _flag(error_word, BAD_ITEM | INCONSISTENT)
            if valid & (edges > 0):
                change = _mix(begin + edges, document, block) - _mix(begin, document, block)
                cute.arch.atomic_add(_address(tilings, (head, row)), Int32(change))
                cute.arch.atomic_max(_address(row_items, (head, row)), item + 1)
                cute.arch.atomic_max(_address(block_owners, (head, start // KEYS_PER_BLOCK + block)), row + 1)

    @cute.jit
    def names_row(self, head: Int32, row: Int32, row_ptr: cute.Tensor) -> Boolean:
        """Whether (head, row) is one of the CSR."""
        return (head >= 0) & (head < row_ptr.shape[0]) & (row >= 0) & (row < row_ptr.shape[1] - 1)

    @cute.kernel
    def check_rows(
        self,
        csr: tuple[cute.Tensor, ...],
        row_state: tuple[cute.Tensor, ...],
        bins_state: tuple[cute.Tensor, ...],
        error_word: cute.Tensor,
        window: Int32,
    ) -> None:
        """One row a CTA; finds the runs of its tasks (walk by windows: edges) in its bins."""
        row_ptr, q_indices, items, cu_seqlens, starts = csr
        tilings, row_items, block_owners, row_tasks = row_state
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        rows = tilings.shape[1]
        head, row = cta // rows, cta % rows
        bad_queries = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(1))
        if thread == 0:
            bad_queries[0] = 0
        first, last = row_ptr[head, row], row_ptr[head, row + 1]
        item = row_items[head, row] - 1
        named = item >= 0
        document, block = items[item * Int32(named), 4] * Int32(named), items[item * Int32(named), 5]
        tiled = tilings[head, row] == Int32(_mix(last - first, document, block) - _mix(0, document, block))
        block = (starts[document] // KEYS_PER_BLOCK + block) * Int32(named)
        # An item of the row was valid, hence row pointers, document and block are.
        good = named & tiled & (block_owners[head, block] == row + 1)
        if (thread == 0) & (first != last) & (not good):
            _flag(error_word, BAD_ROW | INCONSISTENT)
        cute.arch.sync_threads()
        if good:
            self.check_queries(
                q_indices, head, first, last, cu_seqlens[document + 1] - cu_seqlens[document], bad_queries
            )
        cute.arch.sync_threads()
        if good & (bad_queries[0] != 0):
            good = Boolean(False)
            if thread == 0:
                _flag(error_word, BAD_QUERY | INCONSISTENT)
        # A step is a task, or an edge.
        step = 1 if self.by_windows else self.queries
        steps = (last - first + step - 1) // step * Int32(good)
        if thread == 0:
            row_tasks[head, row] = steps
        token = cu_seqlens[document]
        self.find_runs(q_indices, head, first, step, steps, token, block, bins_state, window, row_ptr.shape[0])

    @cute.jit
    def find_runs(
        self,
        q_indices: cute.Tensor,
        head: Int32,
        first: Int32,
        step: cutlass.Constexpr,
        steps: Int32,
        token: Int32,
        block: Int32,
        bins_state: tuple[cute.Tensor, ...],
        window: Int32,
        heads: Int32,
    ) -> None:
        """Where a row's steps enter and leave windows: ``firsts``, ``ends`` and, of tasks, ``totals``."""
        totals, firsts, ends, _ = bins_state
        thread, _, _ = cute.arch.thread_idx()
        group = head * (firsts.shape[0] // heads)
        for i in cutlass.range(thread, steps, THREADS):
            here, before = group + (token + q_indices[head, first + i * step]) // window, Int32(-1)
            if i > 0:
                before = group + (token + q_indices[head, first + (i - 1) * step]) // window
            if here != before:
                firsts[here, block] = i
                if i > 0:
                    ends[before, block] = i
            if i == steps - 1:
                ends[here, block] = steps
            if cutlass.const_expr(not self.by_windows):
                if here != before:
                    cute.arch.atomic_add(_address(totals, here), -i)
                    if i > 0:
                        cute.arch.atomic_add(_address(totals, before), i)
                if i == steps - 1:
                    cute.arch.atomic_add(_address(totals, here), steps)

    @cute.jit
    def check_queries(
        self, q_indices: cute.Tensor, head: Int32, first: Int32, last: Int32, length: Int32, bad_queries: cute.Tensor
    ) -> None:
        """Sets ``bad_queries`` if the row's queries do not ascend or leave the document."""
        thread, _, _ = cute.arch.thread_idx()
        bad = Boolean(False)
        for edge in cutlass.range(first + thread, last, THREADS, unroll=4):
            query = q_indices[head, edge]
            before = q_indices[head, cutlass.max(edge - 1, first)]
            bad = bad | (query < 0) | (query >= length) | ((before >= query) & (edge != first))
        if bad:
            cute.arch.atomic_or(bad_queries.iterator, Int32(1))

    @cute.jit
    def tasks_of(self, run: Int32) -> Int32:
        """Tasks of a bin whose run has this length."""
        if cutlass.const_expr(self.by_windows):
            run = (run + self.queries - 1) // self.queries
        return run

    @cute.kernel
    def count_tasks(self, bins_state: tuple[cute.Tensor, ...]) -> None:
        """Walk by windows, one (kv head, window) a CTA: ``totals``."""
        totals, firsts, ends, _ = bins_state
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        sums = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS))
        tasks = Int32(0)
        for block in cutlass.range(thread, ends.shape[1], THREADS):
            tasks += self.tasks_of(ends[group, block] - firsts[group, block])
        _, total = _cta_inclusive_sum(tasks, sums, thread)
        if thread == 0:
            totals[group] = total

    @cute.kernel
    def scan_windows(
        self,
        bins_state: tuple[cute.Tensor, ...],
        counts: tuple[Any, ...],
        descriptor: cute.Tensor,
        error_word: cute.Tensor,
        grid: Int32,
        rows_per_chunk: Int32,
    ) -> None:
        """One (kv head, window) a CTA: ``places``, of a bin's first task or to add to a task's index in its row."""
        totals, firsts, ends, places = bins_state
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        sums = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS))
        before = Int32(0)
        for i in cutlass.range(thread, group, THREADS):
            before += totals[i]
        _, base = _cta_inclusive_sum(before, sums, thread)
        if cutlass.const_expr(self.even):  # noqa: SIM102 - the first is decided when this is compiled
            if (group == cute.size(totals) - 1) & (thread == 0):
                tasks = base + totals[group]
                self.write_descriptor(descriptor, tasks, counts, error_word)
                self.write_walk(descriptor, cutlass.min(tasks, counts[2]), grid, rows_per_chunk)
        blocks = ends.shape[1]
        for start in cutlass.range(0, blocks, THREADS):
            block = start + thread
            first, count = Int32(0), Int32(0)
            if block < blocks:
                first = firsts[group, block]
                count = self.tasks_of(ends[group, block] - first)
            inclusive, total = _cta_inclusive_sum(count, sums, thread)
            if cutlass.const_expr(self.by_windows):
                first = Int32(0)
            if block < blocks:
                places[group, block] = base + inclusive - count - first
            base += total

    @cute.kernel
    def list_chunks(
        self,
        bins_state: tuple[cute.Tensor, ...],
        counts: tuple[Any, ...],
        descriptor: cute.Tensor,
        error_word: cute.Tensor,
    ) -> None:
        """Walks by windows and blocks, one CTA: lists the first task of every window or bin that has tasks."""
        totals, _, _, places = bins_state
        thread, _, _ = cute.arch.thread_idx()
        sums = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS))
        mine = Int32(0)
        for i in cutlass.range(thread, cute.size(totals), THREADS):
            mine += totals[i]
        _, tasks = _cta_inclusive_sum(mine, sums, thread)
        task_rows, before, listed = cutlass.min(tasks, counts[2]), Int32(0), Int32(0)
        # With one window, no bin's run starts above 0, so that places are those of first tasks.
        flat = cute.make_tensor(places.iterator, cute.make_layout(cute.size(places)))
        owners = cute.size(totals) if self.by_windows else cute.size(flat)
        for start in cutlass.range(0, owners, THREADS):
            owner = start + thread
            first, count = Int32(0), Int32(0)
            if owner < owners:
                if cutlass.const_expr(self.by_windows):
                    count = totals[owner]
                else:
                    first, count = flat[owner], tasks - flat[owner]
                    if owner + 1 < owners:
                        count = flat[owner + 1] - first
            if cutlass.const_expr(self.by_windows):
                inclusive, total = _cta_inclusive_sum(count, sums, thread)
                first = before + inclusive - count
                before += total
            keep = (count > 0) & (first < task_rows)
            place, kept = _cta_inclusive_sum(Int32(keep), sums, thread)
            if keep:
                descriptor[DESCRIPTOR_WORDS - 1 + listed + place] = first
            listed += kept
        if thread == 0:
            self.write_descriptor(descriptor, tasks, counts, error_word)
            for word in cutlass.range_constexpr(1, 4):
                descriptor[word] = 0
            descriptor[4] = listed
            descriptor[DESCRIPTOR_WORDS + listed] = task_rows

    @cute.jit
    def write_descriptor(
        self, descriptor: cute.Tensor, tasks: Int32, counts: tuple[Any, ...], error_word: cute.Tensor
    ) -> None:
        """The words that no walk changes."""
        work_count, work_capacity, capacity = counts
        if tasks > capacity:
            _flag(error_word, OVERFLOW)
        descriptor[0] = cutlass.min(tasks, capacity)
        descriptor[5] = cutlass.min(cutlass.max(work_count[0], 0), work_capacity)
        descriptor[6] = tasks
        descriptor[7] = 0

    @cute.jit
    def write_walk(self, descriptor: cute.Tensor, task_rows: Int32, grid: Int32, rows_per_chunk: Int32) -> None:
        """As :func:`msa_vendored.backward.tasks.plan_walk`."""
        # Rounds of the grid; in this form the product cannot exceed int32.
        rows_of_a_cta = (task_rows + grid - 1) // grid
        rounds = cutlass.max((rows_of_a_cta + rows_per_chunk - 1) // rows_per_chunk, 1)
        chunks = cutlass.min(task_rows, rounds * grid)
        tail_rows = task_rows // cutlass.max(chunks, 1)
        descriptor[1] = tail_rows + 1
        descriptor[2] = task_rows - tail_rows * chunks
        descriptor[3] = cutlass.max(tail_rows, 1)
        descriptor[4] = chunks

    @cute.kernel
    def write_tables(
        self,
        csr: tuple[cute.Tensor, ...],
        row_state: tuple[cute.Tensor, ...],
        bins_state: tuple[cute.Tensor, ...],
        tables: tuple[cute.Tensor, ...],
        window: Int32,
        windows: Int32,
    ) -> None:
        """A quarter of a row a CTA; as many neighbouring threads a task as it has slots."""
        row_ptr, _, items, _, starts = csr
        _, row_items, _, row_tasks = row_state
        cta, split, _ = cute.arch.block_idx()
        rows = row_tasks.shape[1]
        head, row = cta // rows, cta % rows
        steps = row_tasks[head, row]
        if steps > 0:
            item = row_items[head, row] - 1
            document = items[item, 4]
            block = starts[document] // KEYS_PER_BLOCK + items[item, 5]
            names = (document, head, block)
            first = row_ptr[head, row]
            if cutlass.const_expr(self.by_windows):
                self.write_bins(csr, names, first, bins_state, tables, windows, split)
            else:
                self.write_row(
                    csr, names, first, row_ptr[head, row + 1], steps, bins_state, tables, window, windows, split
                )

    @cute.jit
    def write_row(
        self,
        csr: tuple[cute.Tensor, ...],
        names: tuple[Int32, Int32, Int32],
        first: Int32,
        last: Int32,
        tasks: Int32,
        bins_state: tuple[cute.Tensor, ...],
        tables: tuple[cute.Tensor, ...],
        window: Int32,
        windows: Int32,
        split: Int32,
    ) -> None:
        """Tasks of a row, by all threads."""
        _, q_indices, _, cu_seqlens, _ = csr
        document, head, block = names
        places = bins_state[3]
        thread, _, _ = cute.arch.thread_idx()
        per_pass = THREADS // self.queries
        slot, token = thread % self.queries, cu_seqlens[document]
        start = split * per_pass + thread // self.queries
        for i in cutlass.range(start, tasks, per_pass * TABLE_SPLITS):
            edge = first + i * self.queries
            group = head * windows + (token + q_indices[head, edge]) // window
            self.write_slot(csr, names, places[group, block] + i, slot, edge, last, tables)

    @cute.jit
    def write_bins(
        self,
        csr: tuple[cute.Tensor, ...],
        names: tuple[Int32, Int32, Int32],
        row_first: Int32,
        bins_state: tuple[cute.Tensor, ...],
        tables: tuple[cute.Tensor, ...],
        windows: Int32,
        split: Int32,
    ) -> None:
        """Tasks of a row, a window a warp."""
        _, firsts, ends, places = bins_state
        _, head, block = names
        thread, _, _ = cute.arch.thread_idx()
        for window in cutlass.range(split * WARPS + thread // 32, windows, WARPS * TABLE_SPLITS):
            group = head * windows + window
            first, last, place = firsts[group, block], ends[group, block], places[group, block]
            slots = self.tasks_of(last - first) * self.queries
            for i in cutlass.range(thread % 32, slots, 32):
                task, slot = i // self.queries, i % self.queries
                edge = row_first + first + task * self.queries
                self.write_slot(csr, names, place + task, slot, edge, row_first + last, tables)

    @cute.jit
    def write_slot(
        self,
        csr: tuple[cute.Tensor, ...],
        names: tuple[Int32, Int32, Int32],
        place: Int32,
        slot: Int32,
        edge: Int32,
        last: Int32,
        tables: tuple[cute.Tensor, ...],
    ) -> None:
        """One query of the task whose first edge is ``edge``; the first slot also writes the task's meta."""
        _, q_indices, _, cu_seqlens, starts = csr
        task_meta, task_qrows, task_qpos = tables
        document, head, block = names
        query_row, position = Int32(-1), Int32(-1)
        if edge + slot < last:
            query = q_indices[head, edge + slot]
            query_row, position = cu_seqlens[document] + query, starts[document] + query
        if place < task_meta.shape[0]:
            task_qrows[place, slot] = query_row
            task_qpos[place, slot] = position
            if slot == 0:
                meta = task_meta.iterator + cute.assume(place * 4, divby=4)
                values = cute.make_rmem_tensor(4, Int32)
                values[0], values[1], values[2] = document, head, block
                values[3] = cutlass.min(last - edge, self.queries)
                cute.make_tensor(meta, cute.make_layout(4)).store(values.load())


@cute.jit
def _address(tensor: cute.Tensor, coordinate: Any) -> cute.Pointer:
    return tensor.iterator + cute.crd2idx(coordinate, tensor.layout)


def compile_task_build(*, arch: str, ratio: int, walk: str = "even") -> Callable[..., None]:
    """Compiles the build for one head ratio, kind of walk and architecture.

    Args:
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        ratio: query heads per kv head, one of :data:`~msa_vendored.backward.tasks.RATIOS`.
        walk: one of :data:`~msa_vendored.backward.tasks.WALKS`. By blocks, the window must be at least the tokens.

    Returns:
        A function on contiguous int32 tensors of one device, on the current stream, and five int32 numbers:
        ``(row_ptr, q_indices, scheduler_metadata, work_count, cu_seqlens, document_workspace_starts, scratch,
        task_meta, task_qrows, task_qpos, descriptor, error_word, tokens, workspace_rows, window, grid,
        rows_per_chunk)``. The first six are fields of the schedule; ``scratch`` has ``plan_scratch(...).words`` words,
        16-byte aligned; tables are ``[capacity, 4]`` (16-byte aligned) and twice ``[capacity, 128 // ratio]``;
        ``descriptor`` has ``descriptor_words(...)`` words; ``error_word`` ``[1]``, into which error bits are ORed, and
        which nobody clears here. Neither scratch nor tables need be initialised; table rows at and above
        ``descriptor[0]`` are not written.

    Raises:
        ArgumentValueError: the ratio is not supported.
    """
    build = TaskBuild(ratio, walk)

    def ints(*shape: Any, align: int = 4) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(Int32, shape, stride_order=order, assumed_align=align)

    size = cute.sym_int
    heads, capacity, documents = size(), size(), size()
    return cute.compile(
        build,
        ints(heads, size()),
        ints(heads, size()),
        ints(size(), 6),
        ints(1),
        ints(size()),
        ints(documents),
        ints(size(divisibility=4), align=16),
        ints(capacity, 4, align=16),
        ints(capacity, build.queries),
        ints(capacity, build.queries),
        ints(DESCRIPTOR_WORDS if walk == "even" else size()),
        ints(1),
        *[Int32(0)] * 5,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
