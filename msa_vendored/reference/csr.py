"""``build_k2q_csr``: from the blocks each query selected to the queries each block serves."""

from __future__ import annotations

import torch

from msa_vendored.backward.checks import (
    ArgumentValueError,
    refuse_any,
    require_dtype,
    require_shape,
    require_tensor,
)
from msa_vendored.backward.documents import require_prefix_sums
from msa_vendored.reference.arguments import (
    MAX_HEAD_RATIO,
    require_block_size,
    require_cu_seqlens,
    require_longest,
    require_present,
    require_topk,
)
from msa_vendored.reference.schedule import RowMap, SparseAttentionSchedule, make_schedule, map_rows

MAX_PACKED_QUERY = 1 << 24
"""``qsplit_indices`` keeps the query in 24 bits and the slot in the 8 above."""


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
    """Inverts a selection: for every index head and key block, the queries that selected it.

    Rows are numbered block-major: block 0 of every document, then block 1 of those that have one, and so on. With
    ``total_rows`` left out the exact number of rows is computed (the official builder takes ``total_k // 128`` when
    that divides, and drops the edges of rows beyond it).

    Args:
        q2k_indices: int32 ``[Hkv, total_q, topK]``, topK 4, 8, 16 or 32. Block numbers within the document, without
            duplicates, in any order, unused entries -1 at the end. The innermost stride is 1 and the others multiples
            of 4, at a 16-byte address.
        cu_seqlens_q: int32 ``[documents + 1]``, contiguous, same device. Prefix sums of query lengths, none zero.
        cu_seqlens_k: int32 ``[documents + 1]``, likewise for keys.
        kv_block_size: keys per block; 128.
        total_k: number of keys; required.
        max_seqlen_k: longest key length; required with ``return_schedule``.
        max_seqlen_q: longest query length; required with ``return_schedule``.
        total_rows: number of rows to return; at least the exact number.
        qhead_per_kv: query heads per index head, 1 to 16; it only sizes work items.
        return_schedule: also return the schedule.

    Returns:
        ``row_ptr`` int32 ``[Hkv, total_rows + 1]`` and ``q_indices`` int32 ``[Hkv, total_q * topK]``: query positions
        within the document, ascending within a row, -1 past the last edge; with ``return_schedule`` also a
        :class:`SparseAttentionSchedule`.

    Raises:
        TypeError: an operand is not an int32 tensor.
        ValueError: a shape, layout, length or selection is not as described. Reading lengths and selection
            synchronises with the device.
    """
    require_selection_layout(q2k_indices)
    require_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q2k_indices.device)
    require_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q2k_indices.device)
    require_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    require_block_size("kv_block_size", kv_block_size)
    require_csr_sizes(total_k, max_seqlen_k, max_seqlen_q, qhead_per_kv, return_schedule)
    require_prefix_sums("cu_seqlens_q", cu_seqlens_q, total=q2k_indices.shape[1])
    require_prefix_sums("cu_seqlens_k", cu_seqlens_k, total=total_k)
    for name, bound, cu_seqlens in (
        ("max_seqlen_q", max_seqlen_q, cu_seqlens_q),
        ("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    ):
        if bound is not None:
            require_longest(name, bound, cu_seqlens.diff())
    rows = map_rows(cu_seqlens_k)
    row_count = _require_rows(total_rows, rows)
    document = token_documents(cu_seqlens_q)
    _require_selection(q2k_indices, rows.block_count[document])
    row_ptr, q_indices, qsplit_indices = _invert(q2k_indices, cu_seqlens_q, document, rows, row_count)
    if not return_schedule:
        return row_ptr, q_indices
    split_counts = (q2k_indices >= 0).sum(dim=2, dtype=torch.int32).T.contiguous()
    topk = q2k_indices.shape[2]
    schedule = make_schedule(row_ptr, rows, qsplit_indices, split_counts, topk=topk, heads_per_index_head=qhead_per_kv)
    return row_ptr, q_indices, schedule


def token_documents(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Document of every token, int64 ``[tokens]``."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)


def require_selection_layout(q2k_indices: torch.Tensor) -> None:
    """Refuses a selection that is not int32 ``[Hkv, total_q, topK]`` in a layout for 16-byte loads; no sync."""
    require_tensor("q2k_indices", q2k_indices)
    require_dtype("q2k_indices", q2k_indices, (torch.int32,))
    require_shape("q2k_indices", q2k_indices, ("Hkv", "total_q", "topK"))
    require_topk(q2k_indices.shape[2])
    head, token, slot = q2k_indices.stride()
    if slot != 1 or head % 4 or token % 4 or q2k_indices.data_ptr() % 16:
        raise ArgumentValueError(
            "q2k_indices has a layout that 16-byte loads cannot read",
            where="argument q2k_indices",
            expected="strides [4a, 4b, 1] at a 16-byte address",
            got=f"strides {[head, token, slot]}, address % 16 = {q2k_indices.data_ptr() % 16}",
            next_command="pass q2k_indices.contiguous()",
        )


def require_csr_sizes(
    total_k: int | None, max_seqlen_k: int | None, max_seqlen_q: int | None, qhead_per_kv: int, return_schedule: bool
) -> None:
    """Refuses sizes that ``build_k2q_csr`` cannot work with, from the numbers alone."""
    require_present("total_k", total_k, "(k.shape[0])")
    if return_schedule:
        require_present("max_seqlen_k", max_seqlen_k, "with return_schedule=True")
        require_present("max_seqlen_q", max_seqlen_q, "with return_schedule=True")
    if not 1 <= qhead_per_kv <= MAX_HEAD_RATIO:
        raise ArgumentValueError(
            "qhead_per_kv is not supported",
            where="argument qhead_per_kv",
            expected=f"1 to {MAX_HEAD_RATIO}",
            got=str(qhead_per_kv),
        )
    if max_seqlen_q is not None and max_seqlen_q >= MAX_PACKED_QUERY:
        raise ArgumentValueError(
            "a document is too long for packed split indices",
            where="argument max_seqlen_q",
            expected=f"below {MAX_PACKED_QUERY}",
            got=str(max_seqlen_q),
        )


def _require_rows(total_rows: int | None, rows: RowMap) -> int:
    if total_rows is None:
        return rows.rows
    if total_rows < rows.rows:
        raise ArgumentValueError(
            "total_rows is smaller than the number of key blocks, and their queries would be dropped",
            where="argument total_rows",
            expected=f"at least {rows.rows}, the sum over documents of ceil(keys / 128)",
            got=str(total_rows),
        )
    return int(total_rows)


def _require_selection(q2k_indices: torch.Tensor, block_count: torch.Tensor) -> None:
    def refuse(bad: torch.Tensor, what: str, expected: str, values: torch.Tensor) -> None:
        refuse_any(bad, what, where="argument q2k_indices", expected=expected, values=values)

    unused = q2k_indices < 0
    refuse(q2k_indices < -1, "a selection has a negative block other than -1", "block number or -1", q2k_indices)
    refuse(
        q2k_indices >= block_count[None, :, None],
        "a selection names a block beyond its document",
        "below ceil(keys / 128) of the document",
        q2k_indices,
    )
    refuse(
        unused[:, :, :-1] & ~unused[:, :, 1:],
        "a selection has -1 before its end",
        "-1 only after the last block",
        q2k_indices[:, :, :-1],
    )
    ordered = q2k_indices.sort(dim=2).values
    refuse(
        (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0),
        "a selection names a block twice, which would count its keys twice",
        "each block at most once per query",
        ordered[:, :, 1:],
    )


def _invert(
    q2k_indices: torch.Tensor, cu_seqlens_q: torch.Tensor, document: torch.Tensor, rows: RowMap, row_count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, total_q, topk = q2k_indices.shape
    live = q2k_indices >= 0
    block = rows.first_block[document][None, :, None] + q2k_indices.clamp(min=0)
    # Unused slots sort behind all rows; the sort is stable, so the queries of a row stay ascending.
    row = torch.where(live, rows.row_of_block[block], row_count).reshape(heads, -1)
    order = row.sort(dim=1, stable=True).indices
    counts = torch.zeros((heads, row_count + 1), dtype=torch.int64, device=row.device)
    counts.scatter_add_(1, row, torch.ones_like(row))
    row_ptr = torch.zeros((heads, row_count + 1), dtype=torch.int32, device=row.device)
    row_ptr[:, 1:] = counts[:, :row_count].cumsum(1)
    local = torch.arange(total_q, device=row.device) - cu_seqlens_q[document]
    edge_live = torch.arange(total_q * topk, device=row.device) < row_ptr[:, -1:]
    query = torch.where(edge_live, local[order // topk], -1).int()
    slot = (live.cumsum(dim=2) - 1).reshape(heads, -1).gather(1, order).int()
    return row_ptr, query, torch.where(edge_live, query | (slot << 24), -1)
