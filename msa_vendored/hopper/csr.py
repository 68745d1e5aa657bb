"""``build_k2q_csr`` on SM90: the reference's result, bit for bit, without synchronising with the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from msa_vendored.backward.checks import ArgumentValueError, UnsupportedArgumentError, require_shape
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.compiling import Kernel, load_kernel
from msa_vendored.hopper import ARCH
from msa_vendored.reference.arguments import require_block_size, require_cu_seqlens
from msa_vendored.reference.csr import require_csr_sizes, require_selection_layout
from msa_vendored.reference.schedule import (
    SparseAttentionSchedule,
    balanced_queries_per_item,
    schedule_capacity,
)
from msa_vendored.training.checks import UNUSABLE_SELECTION

MAX_BITMAP_BYTES = 224 << 10
"""Shared memory of a CTA of the kernels, one bit for each row and query of its chunk."""

ITEM_FIELDS = 6


def build_k2q_csr(
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
    check_selection: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    """Inverts a selection; arguments and results as in :func:`msa_vendored.reference.build_k2q_csr`.

    Runs on the current stream, reads nothing back, and can be captured in a CUDA graph. What the reference refuses
    after reading the operands is noticed only with ``check_selection``. An id outside its document is left out.

    Args:
        q2k_indices: int32 ``[Hkv, total_q, topK]``; see the reference.
        cu_seqlens_q: int32 ``[documents + 1]``, contiguous, same device.
        cu_seqlens_k: int32 ``[documents + 1]``, likewise for keys.
        kv_block_size: keys per block; 128.
        total_k: number of keys; required.
        max_seqlen_k: longest key length; required with ``return_schedule``.
        max_seqlen_q: longest query length; required with ``return_schedule``.
        total_rows: rows to return, at least the sum over documents of ceil(keys / 128). May be left out for a single
            document only: for more, the number would have to be read back from the device. Too few rows fail a
            device-side assertion: the official builder drops their edges silently.
        qhead_per_kv: query heads per index head, 1 to 16; it only sizes work items.
        return_schedule: also return the schedule.
        check_selection: fail a device-side assertion, without synchronisation, if a query names a block twice, one
            outside its document, or one after a -1. Costs nothing measurable: the kernels see it in passing.

    Returns:
        ``row_ptr`` int32 ``[Hkv, total_rows + 1]``, ``q_indices`` int32 ``[Hkv, total_q * topK]`` and, with
        ``return_schedule``, a :class:`~msa_vendored.reference.SparseAttentionSchedule`.

    Raises:
        ArgumentTypeError: (a TypeError) an operand is not an int32 tensor.
        ArgumentValueError: (a ValueError) a shape, layout or size is not as described, or ``total_rows`` is missing
            or smaller than ceil(total_k / 128).
        UnsupportedArgumentError: (a NotImplementedError) more than 28,672 rows.

    Side effects:
        Allocates the results, the schedule too, and ``4 * Hkv * total_rows * ceil(total_q / 256)`` bytes of work
        space. The first call for a topK compiles or loads kernels.
    """
    require_selection_layout(q2k_indices)
    require_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q2k_indices.device)
    require_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q2k_indices.device)
    require_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    require_block_size("kv_block_size", kv_block_size)
    require_csr_sizes(total_k, max_seqlen_k, max_seqlen_q, qhead_per_kv, return_schedule)
    rows = require_rows(total_rows, int(total_k or 0), cu_seqlens_k.shape[0] - 1)
    with torch.no_grad():
        operands = q2k_indices.detach(), cu_seqlens_q, cu_seqlens_k
        csr = build_with_kernels(*operands, rows, qhead_per_kv, check_selection=check_selection)
    return csr if return_schedule else csr[:2]


def require_rows(total_rows: int | None, total_k: int, documents: int) -> int:
    """The number of rows to lay out, from numbers on the host alone.

    Raises:
        ArgumentValueError: it is missing for several documents, or too small whatever the lengths are.
    """
    least = -(-total_k // BLOCK_SIZE)
    if total_rows is None:
        if documents == 1:
            return least
        raise ArgumentValueError(
            "total_rows is needed for more than one document: it cannot be known without reading the device",
            where="argument total_rows",
            expected="the sum over documents of ceil(keys / 128)",
            got="None",
            next_command="pass total_rows=microbatch.workspace_size // 128",
        )
    if total_rows < least:
        raise ArgumentValueError(
            "total_rows is smaller than the number of key blocks, and their queries would be dropped",
            where="argument total_rows",
            expected=f"at least {least}",
            got=str(total_rows),
            next_command="pass total_rows=microbatch.workspace_size // 128",
        )
    return int(total_rows)


def build_with_kernels(
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    rows: int,
    qhead_per_kv: int,
    load: Callable[..., Kernel] = load_kernel,
    *,
    check_selection: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    """CSR and schedule of checked operands, without waiting for the device.

    Args:
        q2k_indices: int32 ``[Hkv, total_q, topK]``.
        cu_seqlens_q: int32 ``[documents + 1]``.
        cu_seqlens_k: int32 ``[documents + 1]``.
        rows: rows to lay out.
        qhead_per_kv: query heads per index head.
        load: ``(compile_stage, *, arch, **options)`` to a launcher; tests emulate here.
        check_selection: assert on the device that every selection is usable.

    Raises:
        UnsupportedArgumentError: (a NotImplementedError) more rows than fit the bitmap in shared memory.
    """
    from msa_vendored.hopper.csr_kernels import compile_csr

    heads, total_q, topk = q2k_indices.shape
    chunk = _require_chunk(rows)
    target = balanced_queries_per_item(total_q, topk, heads, qhead_per_kv)
    capacity = schedule_capacity(rows, total_q, topk, heads, target)

    def new(*shape: int) -> torch.Tensor:
        return q2k_indices.new_empty(shape)

    row_ptr, q_indices, qsplit = new(heads, rows + 1), new(heads, total_q * topk), new(heads, total_q * topk)
    split_counts, items, words = new(total_q, heads), new(capacity, ITEM_FIELDS), new(3)
    work = new(count_work_words(heads, -(-total_q // chunk), rows, cu_seqlens_q.shape[0] - 1))
    load(compile_csr, arch=ARCH, chunk=chunk, topk=topk)(
        q2k_indices, cu_seqlens_q, cu_seqlens_k, work, row_ptr, q_indices, qsplit, split_counts, items, words, target,
    )  # fmt: skip
    work_count, enough, usable = words.split(1)
    torch._assert_async(enough, "msa_vendored: total_rows is smaller than the number of key blocks")
    if check_selection:
        torch._assert_async(usable, UNUSABLE_SELECTION)
    schedule = SparseAttentionSchedule(True, items, work_count, qsplit, split_counts, target)
    return row_ptr, q_indices, schedule


def count_work_words(heads: int, chunks: int, rows: int, documents: int) -> int:
    """Int32 words of work space: three for each row, one for each document, and per head one for each row and chunk."""
    return 3 * rows + documents + heads * rows * (1 + chunks)


def chunk_queries(rows: int) -> int:
    """Queries of one bitmap: 256, or 64 where 256 bits for each row do not fit shared memory; 0 if none do."""
    return next((queries for queries in (256, 64) if rows * queries // 8 <= MAX_BITMAP_BYTES), 0)


def _require_chunk(rows: int) -> int:
    chunk = chunk_queries(rows)
    if not chunk:
        raise UnsupportedArgumentError(
            "too many key blocks for one call",
            where="argument total_rows",
            expected=f"at most {MAX_BITMAP_BYTES // 8} rows, or {MAX_BITMAP_BYTES // 8 * BLOCK_SIZE} keys",
            got=str(rows),
            next_command="split the micro-batch",
        )
    return chunk
