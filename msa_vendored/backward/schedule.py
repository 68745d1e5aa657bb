"""The schedule that the backward walks: a CSR of queries per key block, cut into work items."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import is_
from typing import ClassVar

import torch

from msa_vendored.backward.checks import (
    ArgumentTypeError,
    ArgumentValueError,
    aligned_operand,
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
)

SM100_INDEX_HEADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class MSABackwardSchedule:
    """What the forward's CSR builder knows and the backward needs; all tensors int32 on the device of ``q``.

    A *row* is one 128-key block of one document; the columns of a work item (a row of ``scheduler_metadata``) are
    index_head, row_linear, q_begin, q_count, document_ordinal and document_local_kblock. The item covers the edges
    ``row_ptr[index_head, row_linear] + q_begin`` up to ``+ q_count`` of ``q_indices``.

    Attributes:
        row_ptr: ``[4, rows + 1]``, rows >= 1. First edge of each row, per index head.
        q_indices: ``[4, edge_capacity]``. Query positions within their document, ascending within a row.
        scheduler_metadata: ``[work_capacity, 6]``. Only the first ``work_count`` items are valid.
        work_count: ``[1]``. Number of valid work items.
        cu_seqlens: ``[documents + 1]``. Prefix sums of document lengths, in tokens.
        document_workspace_starts: ``[documents]``. First workspace row of each document, a multiple of 128.

    Raises:
        TypeError: a field is not an int32 tensor (:class:`ArgumentTypeError`).
        ValueError: a field has the wrong shape (:class:`ArgumentValueError`).
    """

    index_heads: ClassVar[int | None] = SM100_INDEX_HEADS
    """Number of index heads that the class accepts; None for any positive number."""

    row_ptr: torch.Tensor
    q_indices: torch.Tensor
    scheduler_metadata: torch.Tensor
    work_count: torch.Tensor
    cu_seqlens: torch.Tensor
    document_workspace_starts: torch.Tensor

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require_tensor(field.name, value)
            require_dtype(field.name, value, (torch.int32,))
        heads: int | str = "index_heads" if self.index_heads is None else self.index_heads
        require_shape("row_ptr", self.row_ptr, (heads, "rows + 1"))
        require_extent("row_ptr", self.row_ptr, axis=1, minimum=2)
        require_extent("row_ptr", self.row_ptr, axis=0, minimum=1)
        require_shape("q_indices", self.q_indices, (self.row_ptr.shape[0], "edge_capacity"))
        require_shape("scheduler_metadata", self.scheduler_metadata, ("work_capacity", 6))
        require_shape("work_count", self.work_count, (1,))
        require_shape("cu_seqlens", self.cu_seqlens, ("documents + 1",))
        require_extent("cu_seqlens", self.cu_seqlens, axis=0, minimum=2)
        require_shape("document_workspace_starts", self.document_workspace_starts, (self.cu_seqlens.shape[0] - 1,))


def require_extent(name: str, tensor: torch.Tensor, *, axis: int, minimum: int) -> None:
    """Refuses fewer than ``minimum`` entries along ``axis`` with :class:`ArgumentValueError`."""
    if tensor.shape[axis] < minimum:
        raise ArgumentValueError(
            f"{name} has the wrong shape",
            where=f"argument {name}, axis {axis}",
            expected=f"at least {minimum}",
            got=str(tensor.shape[axis]),
        )


def require_schedule(value: object) -> None:
    """Refuses anything but an :class:`MSABackwardSchedule` with :class:`ArgumentTypeError`."""
    if not isinstance(value, MSABackwardSchedule):
        raise ArgumentTypeError(
            "schedule must be a backward schedule",
            where="argument schedule",
            expected="MSABackwardSchedule",
            got=type(value).__name__,
        )


def aligned_schedule(schedule: MSABackwardSchedule) -> MSABackwardSchedule:
    """The same schedule with every field detached, contiguous and at a 16-byte address; itself if it is so already."""
    given = [getattr(schedule, field.name) for field in fields(schedule)]
    aligned = [aligned_operand(tensor) for tensor in given]
    return schedule if all(map(is_, aligned, given)) else type(schedule)(*aligned)


def require_schedule_device(schedule: MSABackwardSchedule, device: torch.device) -> None:
    """Refuses a schedule that is not on the device of q."""
    for field in fields(schedule):
        require_device(f"schedule.{field.name}", getattr(schedule, field.name), device)
