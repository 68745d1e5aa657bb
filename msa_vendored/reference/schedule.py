"""The forward schedule: which rows exist, and how their queries are cut into work items."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from msa_vendored.backward.checks import refuse_any
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.backward.schedule import require_extent

SCHEDULE_SM_COUNT = 148
"""Streaming multiprocessors that work items are balanced for: a B200. Fixed, so that a schedule does not depend on
the host; the official builder asks the device."""

MAX_GROUPS_PER_ITEM = 512
FOLDED_ROWS = 128
"""Rows of one tensor-core tile: queries x heads per key head."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseAttentionSchedule:
    """What ``build_k2q_csr(..., return_schedule=True)`` adds to the CSR; fields as in the official schedule.

    Attributes:
        enabled: always True.
        scheduler_metadata: int32 ``[capacity, 6]``: index_head, row_linear, q_begin, q_count, document_ordinal,
            document_local_kblock. Zero at and above ``work_count``.
        work_count: int32 ``[1]``.
        qsplit_indices: int32 ``[Hkv, total_q * topK]``: ``q_local | slot << 24`` per edge, -1 past the last edge.
            The slot numbers the blocks of one query from 0.
        split_counts: int32 ``[total_q, Hkv]``, blocks selected per query.
        target_q_per_cta: most queries per work item.
    """

    enabled: bool
    scheduler_metadata: torch.Tensor
    work_count: torch.Tensor
    qsplit_indices: torch.Tensor
    split_counts: torch.Tensor
    target_q_per_cta: int = 0

    @property
    def work_capacity(self) -> int:
        """Rows of ``scheduler_metadata``."""
        return int(self.scheduler_metadata.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """Numbering of key blocks: first block 0 of every document, then block 1 of those that have one, and so on.

    Attributes:
        row_of_block: int64 ``[rows]``, indexed by ``first_block[document] + block``.
        first_block: int64 ``[documents]``.
        block_count: int64 ``[documents]``.
        document: int64 ``[rows]``, document of each row.
        block: int64 ``[rows]``, block within its document.
    """

    row_of_block: torch.Tensor
    first_block: torch.Tensor
    block_count: torch.Tensor
    document: torch.Tensor
    block: torch.Tensor

    @property
    def rows(self) -> int:
        """Exact number of rows: the sum over documents of their blocks, last ones partial."""
        return int(self.document.shape[0])


def map_rows(cu_seqlens_k: torch.Tensor, block_size: int = BLOCK_SIZE) -> RowMap:
    """Numbers the key blocks of ``cu_seqlens_k`` (int32 ``[documents + 1]``, on any device)."""
    block_count = -(-cu_seqlens_k.long().diff() // block_size)
    documents = torch.arange(block_count.shape[0], device=block_count.device)
    document = torch.repeat_interleave(documents, block_count)
    first_block = block_count.cumsum(0) - block_count
    block = torch.arange(document.shape[0], device=document.device) - first_block[document]
    order = torch.argsort(block * block_count.shape[0] + document)
    row_of_block = torch.empty_like(order)
    row_of_block[order] = torch.arange(order.shape[0], device=order.device)
    return RowMap(row_of_block, first_block, block_count, document[order], block[order])


def balanced_queries_per_item(total_q: int, topk: int, index_heads: int, heads_per_index_head: int) -> int:
    """Most queries per work item: about two items per multiprocessor, at most two selections' worth of keys."""
    group = FOLDED_ROWS // heads_per_index_head
    groups = -(-max(total_q * topk * index_heads, 1) // group)
    groups_per_item = min(MAX_GROUPS_PER_ITEM, max(1, -(-groups // (2 * SCHEDULE_SM_COUNT))))
    target = min(groups_per_item * group, max(group, 2 * topk * BLOCK_SIZE))
    return -(-target // group) * group


def schedule_capacity(total_rows: int, total_q: int, topk: int, index_heads: int, queries_per_item: int) -> int:
    """Work items that suffice for any selection of this size: one per row, and one per full item."""
    return max(1, total_rows * index_heads + -(-max(total_q * topk * index_heads, 1) // queries_per_item))


def make_schedule(
    row_ptr: torch.Tensor,
    rows: RowMap,
    qsplit_indices: torch.Tensor,
    split_counts: torch.Tensor,
    *,
    topk: int,
    heads_per_index_head: int,
) -> SparseAttentionSchedule:
    """Cuts every non-empty row into work items of at most ``target_q_per_cta`` queries, rows ascending per head.

    Args:
        row_ptr: int32 ``[Hkv, total_rows + 1]``; rows past ``rows.rows`` are empty.
        rows: numbering of the rows.
        qsplit_indices: int32 ``[Hkv, total_q * topK]``.
        split_counts: int32 ``[total_q, Hkv]``.
        topk: selection width.
        heads_per_index_head: query heads per index head.
    """
    heads, total_q = row_ptr.shape[0], split_counts.shape[0]
    target = balanced_queries_per_item(total_q, topk, heads, heads_per_index_head)
    counts = row_ptr.long().diff(dim=1)[:, : rows.rows].reshape(-1)
    pieces = -(-counts // target)
    owner = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), pieces)
    piece = torch.arange(owner.shape[0], device=owner.device) - (pieces.cumsum(0) - pieces)[owner]
    row, begin = owner % rows.rows, piece * target
    columns = (owner // rows.rows, row, begin, (counts[owner] - begin).clamp(max=target))
    items = torch.stack((*columns, rows.document[row], rows.block[row]), dim=1).int()
    capacity = schedule_capacity(row_ptr.shape[1] - 1, total_q, topk, heads, target)
    metadata = row_ptr.new_zeros((capacity, 6))
    metadata[: items.shape[0]] = items
    work_count = row_ptr.new_full((1,), items.shape[0])
    return SparseAttentionSchedule(True, metadata, work_count, qsplit_indices, split_counts, target)


def schedule_from_csr(
    row_ptr: torch.Tensor,
    q_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    topk: int,
    heads_per_index_head: int,
) -> SparseAttentionSchedule:
    """The schedule of a CSR whose selection is no longer at hand; slots number the blocks of a query by row.

    Args:
        row_ptr: int32 ``[Hkv, total_rows + 1]``.
        q_indices: int32 ``[Hkv, capacity]``.
        cu_seqlens_q: int32 ``[documents + 1]``.
        cu_seqlens_k: int32 ``[documents + 1]``.
        topk: selection width.
        heads_per_index_head: query heads per index head.

    Raises:
        ArgumentValueError: too few rows for ``cu_seqlens_k``, or a query outside its document.
    """
    rows = map_rows(cu_seqlens_k)
    require_extent("k2q_row_ptr", row_ptr, axis=1, minimum=rows.rows + 1)
    head, edge, document = _edge_owners(row_ptr, rows)
    local = q_indices[head, edge].long()
    refuse_any(
        (local < 0) | (local >= cu_seqlens_q.diff()[document]),
        "a query lies outside its document",
        where="argument k2q_q_indices",
        expected="0 to document length - 1",
        values=local,
    )
    total_q = int(cu_seqlens_q[-1])
    token = head * total_q + cu_seqlens_q.long()[document] + local
    counts = torch.bincount(token, minlength=row_ptr.shape[0] * total_q)
    order = token.argsort(stable=True)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(order.shape[0], device=order.device) - (counts.cumsum(0) - counts)[token[order]]
    qsplit = torch.full_like(q_indices, -1)
    qsplit[head, edge] = (local | (slot << 24)).int()
    split_counts = counts.view(-1, total_q).T.int().contiguous()
    return make_schedule(row_ptr, rows, qsplit, split_counts, topk=topk, heads_per_index_head=heads_per_index_head)


def _edge_owners(row_ptr: torch.Tensor, rows: RowMap) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = row_ptr.long().diff(dim=1)[:, : rows.rows]
    cell = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts.reshape(-1))
    head, row = cell // rows.rows, cell % rows.rows
    per_head = counts.sum(dim=1)
    edge = torch.arange(cell.shape[0], device=cell.device) - (per_head.cumsum(0) - per_head)[head]
    return head, edge, rows.document[row]
