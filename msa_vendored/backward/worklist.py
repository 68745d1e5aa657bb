"""Work items read from a schedule, and the checks on what they point at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from msa_vendored.backward.checks import ArgumentValueError, refuse_any
from msa_vendored.backward.documents import Documents
from msa_vendored.backward.schedule import MSABackwardSchedule


@dataclass(frozen=True, slots=True, eq=False)
class Worklist:
    """Runs of edges of one (index head, key block); int64 ``[items]`` each, on one device.

    ``edge_start`` indexes the flattened ``q_indices`` (see :func:`flatten_edges`).
    """

    index_head: torch.Tensor
    document: torch.Tensor
    key_block: torch.Tensor
    edge_start: torch.Tensor
    edge_count: torch.Tensor

    def select(self, items: torch.Tensor | slice) -> Worklist:
        """The items at ``items``, in that order."""
        return Worklist(
            self.index_head[items],
            self.document[items],
            self.key_block[items],
            self.edge_start[items],
            self.edge_count[items],
        )


def read_worklist(
    metadata: torch.Tensor, work_count: torch.Tensor, row_ptr: torch.Tensor, documents: Documents, block_size: int
) -> Worklist:
    """Reads the valid work items and refuses those that point outside the CSR or a document.

    Args:
        metadata: int32 ``[capacity, 6]``; rows at and above ``work_count`` are not looked at.
        work_count: int32 ``[1]``.
        row_ptr: int32 ``[index heads, rows + 1]``.
        documents: document extents.
        block_size: keys per block.

    Returns:
        Items in schedule order. Their ``edge_start`` counts from the first edge of the index head until
        :func:`flatten_edges` has been applied.

    Raises:
        ArgumentValueError: a count, index or range is outside its bounds.
    """
    count = int(work_count)
    if not 0 <= count <= metadata.shape[0]:
        raise ArgumentValueError(
            "work_count is outside the capacity of scheduler_metadata",
            where="argument schedule.work_count",
            expected=f"0 to {metadata.shape[0]}",
            got=str(count),
        )
    index_head, row, q_begin, q_count, document, key_block = metadata[:count].long().unbind(1)
    extents = row_ptr.shape[0], row_ptr.shape[1] - 1, documents.query_start.shape[0]
    for name, column, extent in zip(
        ("index_head", "row_linear", "document_ordinal"), (index_head, row, document), extents, strict=True
    ):
        _require_column(name, column, (column < 0) | (column >= extent), f"0 to {extent - 1}")
    blocks = -(-documents.key_count // block_size)
    _require_column(
        "document_local_kblock", key_block, (key_block < 0) | (key_block >= blocks[document]), "a block of its document"
    )
    row_start = row_ptr[index_head, row].long()
    row_end = row_ptr[index_head, row + 1].long()
    outside = (q_begin < 0) | (q_count < 0) | (row_start + q_begin + q_count > row_end)
    _require_column("q_begin + q_count", q_begin + q_count, outside, "a range within its row")
    return Worklist(index_head, document, key_block, row_start + q_begin, q_count)


def _require_column(name: str, column: torch.Tensor, bad: torch.Tensor, expected: str) -> None:
    refuse_any(
        bad,
        f"a work item has {name} out of range",
        where="argument schedule.scheduler_metadata",
        expected=expected,
        values=column,
    )


def require_row_ptr(row_ptr: torch.Tensor, edge_capacity: int) -> None:
    """Refuses row pointers that do not start at 0, fall, or end above ``edge_capacity``."""
    starts, ends = row_ptr[:, :-1], row_ptr[:, 1:]
    bad = (starts > ends) | (ends > edge_capacity) | (starts < 0)
    refuse_any(
        bad,
        "row_ptr is not monotone within the edges",
        where="argument row_ptr",
        expected=f"0 to {edge_capacity}",
        values=ends,
    )


def flatten_edges(worklist: Worklist, q_indices: torch.Tensor, documents: Documents) -> Worklist:
    """Lets ``edge_start`` index the flattened ``q_indices``, and refuses queries outside their document."""
    flat = Worklist(
        worklist.index_head,
        worklist.document,
        worklist.key_block,
        worklist.index_head * q_indices.shape[1] + worklist.edge_start,
        worklist.edge_count,
    )
    edges, owner = expand_edges(flat)
    query = q_indices.reshape(-1)[edges]
    refuse_any(
        (query < 0) | (query >= documents.query_count[flat.document[owner]]),
        "a query lies outside its document",
        where="argument q_indices",
        expected="0 to document length - 1",
        values=query,
    )
    return flat


def expand_edges(worklist: Worklist) -> tuple[torch.Tensor, torch.Tensor]:
    """Every edge of the list, and the item it belongs to; int64 ``[edges]`` each, in item order."""
    items = torch.arange(worklist.edge_count.shape[0], device=worklist.edge_count.device)
    owner = torch.repeat_interleave(items, worklist.edge_count)
    before = worklist.edge_count.cumsum(0) - worklist.edge_count
    within = torch.arange(owner.shape[0], device=owner.device) - before[owner]
    return worklist.edge_start[owner] + within, owner


def schedule_worklist(schedule: MSABackwardSchedule, documents: Documents, block_size: int) -> Worklist:
    """Valid work items of a schedule, checked, with edges flattened."""
    require_row_ptr(schedule.row_ptr, schedule.q_indices.shape[1])
    worklist = read_worklist(schedule.scheduler_metadata, schedule.work_count, schedule.row_ptr, documents, block_size)
    return flatten_edges(worklist, schedule.q_indices, documents)
