"""Checks of ``sparse_atten_func``: options, CSR, and the schedule against the CSR."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from msa_vendored.backward.checks import (
    ArgumentTypeError,
    ArgumentValueError,
    UnsupportedArgumentError,
    refuse_any,
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
)
from msa_vendored.backward.documents import BLOCK_SIZE, Documents, require_prefix_sums
from msa_vendored.backward.schedule import require_extent
from msa_vendored.backward.worklist import Worklist, expand_edges, flatten_edges, read_worklist
from msa_vendored.reference.arguments import (
    refuse_unsupported,
    require_cu_seqlens,
    require_longest,
    require_number,
    require_topk,
)
from msa_vendored.reference.schedule import map_rows

PARTIAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUERY_BITS = 24
"""``qsplit_indices`` holds the query below and the slot above this bit."""


class ForwardSchedule(Protocol):
    """What the forward reads of a schedule: the reference's or the official builder's."""

    @property
    def scheduler_metadata(self) -> torch.Tensor:
        """Int32 ``[capacity, 6]``."""

    @property
    def work_count(self) -> torch.Tensor:
        """Int32 ``[1]``."""

    @property
    def qsplit_indices(self) -> torch.Tensor:
        """Int32 ``[Hkv, total_q * topK]``."""

    @property
    def split_counts(self) -> torch.Tensor:
        """Int32 ``[total_q, Hkv]``."""


def require_lse_options(lse_temperature_scale: float, return_temperature_lse: bool, return_softmax_lse: bool) -> None:
    """Refuses a temperature that is not finite and positive, or a temperature LSE without the LSE."""
    require_number("lse_temperature_scale", lse_temperature_scale)
    if not math.isfinite(lse_temperature_scale) or lse_temperature_scale <= 0:
        raise ArgumentValueError(
            "lse_temperature_scale must be finite and positive",
            where="argument lse_temperature_scale",
            expected="> 0",
            got=str(lse_temperature_scale),
        )
    if return_temperature_lse and not return_softmax_lse:
        raise ArgumentValueError(
            "return_temperature_lse needs return_softmax_lse",
            where="argument return_softmax_lse",
            expected="True",
            got="False",
        )


def require_dtypes(
    q: torch.Tensor, qk_dtype: torch.dtype | None, pv_dtype: torch.dtype | None, partial_dtype: torch.dtype
) -> None:
    """Refuses product dtypes other than that of q, and dtypes that partial outputs cannot be kept in."""
    refuse_unsupported("qk_dtype", qk_dtype or q.dtype, default=q.dtype, reason="FP8 staging")
    refuse_unsupported("pv_dtype", pv_dtype or q.dtype, default=q.dtype, reason="FP8 staging")
    if partial_dtype == torch.float8_e4m3fn:
        raise UnsupportedArgumentError(
            "the reference launchers do not support partial_dtype in FP8",
            where="argument partial_dtype",
            expected=" or ".join(str(dtype) for dtype in PARTIAL_DTYPES),
            got=str(partial_dtype),
        )
    if partial_dtype not in PARTIAL_DTYPES:
        raise ArgumentTypeError(
            "partial_dtype is not supported",
            where="argument partial_dtype",
            expected=" or ".join(str(dtype) for dtype in PARTIAL_DTYPES),
            got=str(partial_dtype),
        )


def require_csr(q: torch.Tensor, k: torch.Tensor, row_ptr: torch.Tensor, q_indices: torch.Tensor, topk: int) -> None:
    """Refuses CSR tensors that do not fit q ``[total_q, Hq, D]``, k ``[total_k, Hkv, D]`` and the selection width."""
    require_topk(topk)
    for name, tensor in (("k2q_row_ptr", row_ptr), ("k2q_q_indices", q_indices)):
        require_tensor(name, tensor)
        require_dtype(name, tensor, (torch.int32,))
        require_shape(name, tensor, (k.shape[1], "entries"))
        require_device(name, tensor, q.device)
    require_extent("k2q_row_ptr", row_ptr, axis=1, minimum=2)
    require_extent("k2q_q_indices", q_indices, axis=1, minimum=q.shape[0] * topk)


def require_output(q: torch.Tensor, out: torch.Tensor | None, output_scale: torch.Tensor | None) -> None:
    """Refuses an output buffer unlike q, or an output scale without a float32 element."""
    if out is not None:
        require_tensor("out", out)
        require_dtype("out", out, (q.dtype,))
        require_shape("out", out, q.shape)
        require_device("out", out, q.device)
    if output_scale is not None:
        require_tensor("output_scale", output_scale)
        require_dtype("output_scale", output_scale, (torch.float32,))
        require_device("output_scale", output_scale, q.device)
        if output_scale.numel() < 1:
            raise ArgumentValueError(
                "output_scale is empty", where="argument output_scale", expected="at least one element", got="0"
            )


def read_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Documents:
    """Extents of queries and keys, checked against the rows of q and k and against the longest lengths."""
    require_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    require_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
    require_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    require_prefix_sums("cu_seqlens_q", cu_seqlens_q, total=q.shape[0])
    require_prefix_sums("cu_seqlens_k", cu_seqlens_k, total=k.shape[0])
    query, key = cu_seqlens_q.long(), cu_seqlens_k.long()
    require_longest("max_seqlen_q", max_seqlen_q, query.diff())
    require_longest("max_seqlen_k", max_seqlen_k, key.diff())
    return Documents(query[:-1], query.diff(), key[:-1], key.diff())


def read_schedule(
    schedule: ForwardSchedule,
    row_ptr: torch.Tensor,
    q_indices: torch.Tensor,
    documents: Documents,
    cu_seqlens_k: torch.Tensor,
) -> Worklist:
    """Work items of a forward schedule, which must belong to this CSR and cover all of it.

    Raises:
        ArgumentTypeError: a tensor is not int32.
        ArgumentValueError: a shape or device does not fit, or the schedule was built for other lengths or another
            selection: softmax over a part of a selection would be wrong without a sign of it.
    """
    total_q = int(documents.query_count.sum())
    require_schedule_tensors(schedule, row_ptr, q_indices, total_q)
    metadata = schedule.scheduler_metadata
    worklist = read_worklist(metadata, schedule.work_count, row_ptr, documents, BLOCK_SIZE)
    rows = map_rows(cu_seqlens_k)
    row = metadata[: worklist.document.shape[0], 1].long().clamp(max=rows.rows - 1)
    refuse_any(
        (rows.document[row] != worklist.document) | (rows.block[row] != worklist.key_block),
        "the schedule numbers its rows for other key lengths",
        where="argument schedule.scheduler_metadata",
        expected="rows of cu_seqlens_k",
        values=row,
    )
    edges, covered = int(row_ptr[:, -1].sum()), int(worklist.edge_count.sum())
    if edges != covered:
        raise ArgumentValueError(
            "the schedule does not cover every selected block",
            where="argument schedule",
            expected=f"{edges} edges, as in k2q_row_ptr",
            got=f"{covered} edges",
        )
    return flatten_edges(worklist, q_indices, documents)


def require_schedule_tensors(
    schedule: ForwardSchedule, row_ptr: torch.Tensor, q_indices: torch.Tensor, total_q: int
) -> None:
    """Refuses schedule tensors of other types, shapes or devices than those of this CSR; reads no contents."""
    for name, tensor, shape in (
        ("scheduler_metadata", schedule.scheduler_metadata, ("capacity", 6)),
        ("work_count", schedule.work_count, (1,)),
        ("qsplit_indices", schedule.qsplit_indices, q_indices.shape),
        ("split_counts", schedule.split_counts, (total_q, row_ptr.shape[0])),
    ):
        require_tensor(f"schedule.{name}", tensor)
        require_dtype(f"schedule.{name}", tensor, (torch.int32,))
        require_shape(f"schedule.{name}", tensor, shape)
        require_device(f"schedule.{name}", tensor, row_ptr.device)


def read_slots(
    schedule: ForwardSchedule, worklist: Worklist, q_indices: torch.Tensor, documents: Documents, topk: int
) -> torch.Tensor:
    """Slot of every edge, int64 ``[Hkv * edge_capacity]``, from the packed split indices of the schedule.

    Raises:
        ArgumentValueError: the split indices belong to another selection, a slot is not below ``topk``, or two
            edges of one query have the same slot.
    """
    packed = schedule.qsplit_indices.reshape(-1).long()
    slots = packed >> QUERY_BITS
    edges, owner = expand_edges(worklist)
    query = q_indices.reshape(-1)[edges].long()
    stale = (packed[edges] & ((1 << QUERY_BITS) - 1)) != query
    refuse_any(
        stale | (slots[edges] < 0) | (slots[edges] >= topk),
        "the schedule was built for another selection",
        where="argument schedule.qsplit_indices",
        expected=f"the queries of k2q_q_indices with slots below {topk}",
        values=packed[edges],
    )
    tokens = int(documents.query_count.sum())
    token = documents.query_start[worklist.document[owner]] + query
    place = (worklist.index_head[owner] * tokens + token) * topk + slots[edges]
    uses = torch.bincount(place, minlength=q_indices.shape[0] * tokens * topk)
    refuse_any(
        uses > 1,
        "two blocks of one query have the same slot",
        where="argument schedule.qsplit_indices",
        expected="distinct slots",
        values=uses,
    )
    return slots
