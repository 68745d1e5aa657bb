"""``run_backward`` of the SM100 bundle: fixed geometry, NeMo Automodel's contract."""

from __future__ import annotations

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
    SM100_INDEX_HEADS,
    MSABackwardSchedule,
    aligned_schedule,
    require_schedule,
    require_schedule_device,
)
from msa_vendored.backward.tiles import TileShape
from msa_vendored.backward.torch_engine import BackwardOperands, differentiate
from msa_vendored.backward.worklist import schedule_worklist

QUERY_HEADS = 64
KEY_HEADS = SM100_INDEX_HEADS
HEAD_DIM = 128
SOFTMAX_SCALE = HEAD_DIM**-0.5


def run_backward(
    *,
    q: torch.Tensor,
    k_aligned: torch.Tensor,
    v_aligned: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    schedule: MSABackwardSchedule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of causal block-sparse attention: 64 query heads, 4 key heads of 128, blocks of 128 keys.

    Query head ``h`` attends with key head ``h // 16``, which is also its index head. The softmax scale is
    ``128 ** -0.5``. A query at document position p sees a key of a selected block at document position <= p.

    The maths runs in PyTorch with float32 accumulation; P and dS are not rounded to bf16 on the way, as a tensor-core
    kernel would. It reads the schedule on the host, so it synchronises with the device.

    Args:
        q: bf16 ``[T, 64, 128]``, compact tokens (no padding between documents).
        k_aligned: bf16 ``[W, 4, 128]``, W a positive multiple of 128; every document starts at a multiple of 128
            rows. Rows past the end of a document are ignored.
        v_aligned: as ``k_aligned``.
        grad_out: bf16 ``[T, 64, 128]``, gradient of ``out``.
        lse: fp32 ``[T, 64]``, natural log of the sum of exp of scaled logits. A row of -inf saw no key and gets and
            gives no gradient.
        out: bf16 ``[T, 64, 128]``, result of the forward.
        schedule: selection in CSR form; see :class:`MSABackwardSchedule`.

    Any strides and storage offsets are accepted: operands are detached and, where they are not contiguous or not at a
    16-byte address, copied. No operand is written to, and no autograd graph is recorded.

    Returns:
        bf16 dq ``[T, 64, 128]``, dk and dv ``[W, 4, 128]``, the latter two views of one buffer. Keys that no query
        selected, and rows outside documents, are exactly zero.

    Raises:
        TypeError: an operand is not a tensor or has the wrong dtype.
        ValueError: wrong shape, rows of k not a positive multiple of 128, another device than q's, or a schedule
            whose valid part points outside the operands. Nothing has been computed then.
    """
    require_operands(q=q, k_aligned=k_aligned, v_aligned=v_aligned, grad_out=grad_out, lse=lse, out=out)
    require_schedule(schedule)
    require_schedule_device(schedule, q.device)
    with torch.no_grad():
        operands = BackwardOperands(*(aligned_operand(t) for t in (q, k_aligned, v_aligned, grad_out, lse, out)))
        schedule = aligned_schedule(schedule)
        documents = workspace_documents(schedule, tokens=q.shape[0], workspace_rows=k_aligned.shape[0])
        worklist = schedule_worklist(schedule, documents, BLOCK_SIZE)
        shape = TileShape(QUERY_HEADS // KEY_HEADS, HEAD_DIM, causal=True)
        return differentiate(
            operands,
            worklist,
            schedule.q_indices,
            documents,
            shape,
            softmax_scale=SOFTMAX_SCALE,
            accumulation_dtype=torch.float32,
        )


def require_operands(**operands: torch.Tensor) -> None:
    """Refuses operands that do not have the SM100 bundle's shapes, dtypes and a common device."""
    for name, tensor in operands.items():
        require_tensor(name, tensor)
        require_dtype(name, tensor, (torch.float32,) if name == "lse" else (torch.bfloat16,))
    q, k = operands["q"], operands["k_aligned"]
    require_shape("q", q, ("T", QUERY_HEADS, HEAD_DIM))
    require_shape("k_aligned", k, ("W", KEY_HEADS, HEAD_DIM))
    require_positive_multiple("k_aligned", k.shape[0], BLOCK_SIZE)
    require_shape("v_aligned", operands["v_aligned"], k.shape)
    require_shape("grad_out", operands["grad_out"], q.shape)
    require_shape("lse", operands["lse"], q.shape[:2])
    require_shape("out", operands["out"], q.shape)
    for name, tensor in operands.items():
        require_device(name, tensor, q.device)
