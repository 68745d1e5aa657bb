"""``run_backward`` for any geometry: the SM100 bundle's call with shapes left free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from msa_vendored.backward.checks import (
    aligned_operand,
    require_device,
    require_dtype,
    require_positive_multiple,
    require_shape,
    require_tensor,
)
from msa_vendored.backward.documents import BLOCK_SIZE, workspace_documents
from msa_vendored.backward.schedule import (
    MSABackwardSchedule,
    aligned_schedule,
    require_schedule,
    require_schedule_device,
)
from msa_vendored.backward.tiles import TileShape
from msa_vendored.backward.torch_engine import BackwardOperands, differentiate
from msa_vendored.backward.worklist import schedule_worklist
from msa_vendored.reference.arguments import accumulation_dtype, require_cu_seqlens, require_qkv


@dataclass(frozen=True, slots=True, eq=False)
class BackwardSchedule(MSABackwardSchedule):
    """:class:`~msa_vendored.backward.MSABackwardSchedule` for any number of index heads; same fields and checks."""

    index_heads: ClassVar[int | None] = None


def run_backward(
    *,
    q: torch.Tensor,
    k_aligned: torch.Tensor,
    v_aligned: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    schedule: MSABackwardSchedule,
    softmax_scale: float | None = None,
    causal: bool = True,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of block-sparse attention. The last three arguments extend the SM100 bundle's ``run_backward``.

    Sums run in float32, in float64 for float64 operands. It reads the schedule on the host, so it synchronises with
    the device.

    Args:
        q: ``[T, Hq, D]``, bf16, fp16, fp32 or fp64, compact tokens; Hq / Hkv from 1 to 16.
        k_aligned: ``[W, Hkv, D]``, same dtype and device, W a positive multiple of 128; every document starts at a
            multiple of 128 rows. Rows past the end of a document are ignored.
        v_aligned: as ``k_aligned``.
        grad_out: as q, gradient of ``out``.
        lse: ``[T, Hq]``, float32, or float64 for float64 operands; natural log of the sum of exp of scaled logits.
            A row of -inf saw no key and gets and gives no gradient.
        out: as q, result of the forward.
        schedule: :class:`~msa_vendored.backward.MSABackwardSchedule` for 4 index heads, else
            :class:`BackwardSchedule`; as many index heads as key heads.
        softmax_scale: factor on the logits; ``D ** -0.5`` if None.
        causal: query i of n sees key j of m only if ``j <= i + m - n``.
        cu_seqlens_k: int32 ``[documents + 1]`` where key lengths differ from query lengths; None if they do not.

    Returns:
        dq like q, dk and dv like ``k_aligned``, the latter two views of one buffer, exactly zero where no query
        selected. No operand is written to.

    Raises:
        TypeError: an operand is not a tensor or has the wrong dtype.
        ValueError: a shape, device or the valid part of the schedule does not fit. Nothing has been computed then.
        NotImplementedError: FP8 or FP4 operands.
    """
    ratio = _require_operands(q, k_aligned, v_aligned, {"grad_out": grad_out, "lse": lse, "out": out})
    require_schedule(schedule)
    require_schedule_device(schedule, q.device)
    require_shape("schedule.row_ptr", schedule.row_ptr, (k_aligned.shape[1], "rows + 1"))
    if cu_seqlens_k is not None:
        require_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
        require_shape("cu_seqlens_k", cu_seqlens_k, schedule.cu_seqlens.shape)
    with torch.no_grad():
        operands = BackwardOperands(*(aligned_operand(t) for t in (q, k_aligned, v_aligned, grad_out, lse, out)))
        schedule = aligned_schedule(schedule)
        documents = workspace_documents(
            schedule, tokens=q.shape[0], workspace_rows=k_aligned.shape[0], cu_seqlens_k=cu_seqlens_k
        )
        return differentiate(
            operands,
            schedule_worklist(schedule, documents, BLOCK_SIZE),
            schedule.q_indices,
            documents,
            TileShape(ratio, q.shape[2], causal=bool(causal)),
            softmax_scale=q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale),
            accumulation_dtype=accumulation_dtype(q.dtype),
        )


def _require_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: dict[str, torch.Tensor]) -> int:
    ratio = require_qkv(q, k, v, names=("k_aligned", "v_aligned"))
    require_positive_multiple("k_aligned", k.shape[0], BLOCK_SIZE)
    for name, tensor in rest.items():
        require_tensor(name, tensor)
        require_dtype(name, tensor, (accumulation_dtype(q.dtype) if name == "lse" else q.dtype,))
        require_shape(name, tensor, q.shape[:2] if name == "lse" else q.shape)
        require_device(name, tensor, q.device)
    return ratio
