"""``build_k2q_csr`` on SM90: the reference's result, bit for bit, without synchronising with the host."""

from __future__ import annotations

import torch

from msa_vendored.backward.checks import ArgumentValueError, require_shape
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.reference.arguments import require_block_size, require_cu_seqlens
from msa_vendored.reference.csr import require_csr_sizes, require_selection_layout
from msa_vendored.reference.schedule import (
    SparseAttentionSchedule,
    balanced_queries_per_item,
    schedule_capacity,
)


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
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    """Inverts a selection; arguments and results as in :func:`msa_vendored.reference.build_k2q_csr`.

    Runs on the current stream, reads nothing back, and can be captured in a CUDA graph. What the reference refuses
    after reading the operands is not noticed here: the caller checks contents
    (:func:`msa_vendored.training.checks.assert_selection`). An id outside its document is left out.

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

    Returns:
        ``row_ptr`` int32 ``[Hkv, total_rows + 1]``, ``q_indices`` int32 ``[Hkv, total_q * topK]`` and, with
        ``return_schedule``, a :class:`~msa_vendored.reference.SparseAttentionSchedule`.

    Raises:
        ArgumentTypeError: (a TypeError) an operand is not an int32 tensor.
        ArgumentValueError: (a ValueError) a shape, layout or size is not as described, or ``total_rows`` is missing
            or smaller than ceil(total_k / 128).
    """
    require_selection_layout(q2k_indices)
    require_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q2k_indices.device)
    require_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q2k_indices.device)
    require_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    require_block_size("kv_block_size", kv_block_size)
    require_csr_sizes(total_k, max_seqlen_k, max_seqlen_q, qhead_per_kv, return_schedule)
    rows = require_rows(total_rows, int(total_k or 0), cu_seqlens_k.shape[0] - 1)
    return _build_with_torch(q2k_indices, cu_seqlens_q, cu_seqlens_k, rows, qhead_per_kv, return_schedule)


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


def _build_with_torch(
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    rows: int,
    qhead_per_kv: int,
    return_schedule: bool,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    heads, total_q, topk = q2k_indices.shape
    device = q2k_indices.device
    blocks = torch.div(cu_seqlens_k.diff() + (BLOCK_SIZE - 1), BLOCK_SIZE, rounding_mode="floor").long()
    ends = blocks.cumsum(0)
    torch._assert_async(ends[-1] <= rows, "msa_vendored: total_rows is smaller than the number of key blocks")
    first = ends - blocks
    # Rows past the exact number belong to a document that does not exist, and sort behind all others.
    flat = torch.arange(rows, device=device)
    document = torch.searchsorted(ends, flat, right=True)
    known = document < blocks.shape[0]
    document = document.clamp(max=blocks.shape[0] - 1)
    block = torch.where(known, flat - first[document], rows)
    order = torch.argsort(block * blocks.shape[0] + document, stable=True)
    row_of_block = torch.empty_like(order).scatter_(0, order, flat)

    tokens = torch.arange(total_q, device=device)
    token_document = torch.searchsorted(cu_seqlens_q[1:].long(), tokens, right=True).clamp(max=blocks.shape[0] - 1)
    live = (q2k_indices >= 0) & (q2k_indices < blocks[token_document][None, :, None])
    edge_block = first[token_document][None, :, None] + q2k_indices.clamp(min=0)
    edge_row = torch.where(live, row_of_block[edge_block.clamp(max=rows - 1)], rows).reshape(heads, -1)
    edge_order = edge_row.sort(dim=1, stable=True).indices
    counts = torch.zeros((heads, rows + 1), dtype=torch.int64, device=device)
    counts.scatter_add_(1, edge_row, torch.ones_like(edge_row))
    row_ptr = torch.zeros((heads, rows + 1), dtype=torch.int32, device=device)
    row_ptr[:, 1:] = counts[:, :rows].cumsum(1)
    edge_live = torch.arange(total_q * topk, device=device) < row_ptr[:, -1:]
    local = tokens - cu_seqlens_q[token_document]
    query = torch.where(edge_live, local[torch.div(edge_order, topk, rounding_mode="floor")], -1).int()
    if not return_schedule:
        return row_ptr, query
    slot = (live.cumsum(dim=2) - 1).reshape(heads, -1).gather(1, edge_order).int()
    qsplit = torch.where(edge_live, query | (slot << 24), -1)
    split_counts = live.sum(dim=2, dtype=torch.int32).T.contiguous()
    metadata, work_count, target = _make_items(
        row_ptr, document[order], block[order], total_q=total_q, topk=topk, qhead_per_kv=qhead_per_kv
    )
    return row_ptr, query, SparseAttentionSchedule(True, metadata, work_count, qsplit, split_counts, target)


def _make_items(
    row_ptr: torch.Tensor,
    row_document: torch.Tensor,
    row_block: torch.Tensor,
    *,
    total_q: int,
    topk: int,
    qhead_per_kv: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Work items in a table of fixed capacity, their number, and the most queries of one item."""
    heads, rows = row_ptr.shape[0], row_ptr.shape[1] - 1
    target = balanced_queries_per_item(total_q, topk, heads, qhead_per_kv)
    capacity = schedule_capacity(rows, total_q, topk, heads, target)
    counts = row_ptr.diff(dim=1).reshape(-1).long()
    pieces = torch.div(counts + (target - 1), target, rounding_mode="floor")
    ends = pieces.cumsum(0)
    item = torch.arange(capacity, device=row_ptr.device)
    owner = torch.searchsorted(ends, item, right=True)
    valid = owner < counts.shape[0]
    owner = owner.clamp(max=counts.shape[0] - 1)
    begin = (item - (ends - pieces)[owner]) * target
    row = torch.remainder(owner, rows)
    columns = (
        torch.div(owner, rows, rounding_mode="floor"),
        row,
        begin,
        (counts[owner] - begin).clamp(max=target),
        row_document[row],
        row_block[row],
    )
    metadata = torch.where(valid[:, None], torch.stack(columns, dim=1), 0).int()
    return metadata, ends[-1:].int(), target
