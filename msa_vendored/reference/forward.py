"""``sparse_atten_func``: block-sparse attention over a CSR selection."""

from __future__ import annotations

import torch

from msa_vendored.backward.checks import aligned_operand
from msa_vendored.backward.tiles import TileShape
from msa_vendored.backward.worklist import require_row_ptr
from msa_vendored.reference.arguments import (
    accumulation_dtype,
    refuse_unsupported,
    require_block_size,
    require_qkv,
)
from msa_vendored.reference.engine import ForwardProblem, attend, compute_lse
from msa_vendored.reference.forward_checks import (
    ForwardSchedule,
    read_documents,
    read_schedule,
    read_slots,
    require_csr,
    require_dtypes,
    require_lse_options,
    require_output,
)
from msa_vendored.reference.schedule import schedule_from_csr


def sparse_atten_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k2q_row_ptr: torch.Tensor,
    k2q_q_indices: torch.Tensor,
    topK: int,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    schedule: ForwardSchedule | None = None,
    usable_SM_count: int = -1,
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
    output_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention of every query over the keys of the blocks it selected. No autograd, as in the official launcher.

    Mind the official defaults: ``causal`` is False, and the LSE is returned only on request. Causal masks align
    bottom-right: query i of n sees key j of m if ``j <= i + m - n``. Sums run in float32, in float64 for float64
    operands; the reference keeps no partial outputs, so ``partial_dtype`` rounds nothing here.

    Args:
        q: ``[total_q, Hq, D]``, bf16, fp16, fp32 or fp64, any strides; Hq / Hkv from 1 to 16.
        k: ``[total_k, Hkv, D]``, same dtype and device, compact (no padding between documents).
        v: ``[total_k, Hkv, D]``, likewise.
        k2q_row_ptr: int32 ``[Hkv, total_rows + 1]`` from :func:`build_k2q_csr`.
        k2q_q_indices: int32 ``[Hkv, >= total_q * topK]`` from :func:`build_k2q_csr`.
        topK: selection width: 4, 8, 16 or 32.
        cu_seqlens_q: int32 ``[documents + 1]``, contiguous. Prefix sums of query lengths, none zero.
        cu_seqlens_k: int32 ``[documents + 1]``, likewise for keys.
        max_seqlen_q: at least the longest query length.
        max_seqlen_k: at least the longest key length.
        blk_kv: keys per block; 128.
        causal: mask keys after the query.
        softmax_scale: factor on the logits; ``D ** -0.5`` if None.
        lse_temperature_scale: divisor of the logits in the temperature LSE; finite and positive.
        return_temperature_lse: also return that LSE; needs ``return_softmax_lse``.
        partial_dtype: float32, bf16 or fp16.
        return_softmax_lse: also return the LSE.
        page_table: not supported; None.
        seqused_k: not supported; None.
        schedule: from :func:`build_k2q_csr`; built from the CSR if None. Its work items must cover every edge once.
        usable_SM_count: not supported; -1.
        qk_dtype: None or the dtype of q.
        pv_dtype: None or the dtype of v.
        output_scale: fp32 tensor of at least one element, factor on the output.
        out: ``[total_q, Hq, D]``, dtype of q: filled and returned as the output.

    Returns:
        The output ``[total_q, Hq, D]`` in the dtype of q; with ``return_softmax_lse`` a tuple with the LSE
        ``[total_q, Hq]`` (float32, or float64 for float64 operands; natural log of the sum of exp of scaled logits)
        and, on request, the temperature LSE. Rows that see no key: output 0, LSE -inf.

    Raises:
        TypeError: an operand has the wrong type or dtype.
        ValueError: a shape, device, length or schedule does not fit. Nothing has been computed then.
        NotImplementedError: an argument that only the GPU kernels use; the message names it.
    """
    refuse_unsupported("page_table", page_table, default=None, reason="paged K/V")
    refuse_unsupported("seqused_k", seqused_k, default=None, reason="paged K/V")
    refuse_unsupported("usable_SM_count", usable_SM_count, default=-1, reason="size of the CUDA grid")
    ratio = require_qkv(q, k, v)
    require_dtypes(q, qk_dtype, pv_dtype, partial_dtype)
    require_block_size("blk_kv", blk_kv)
    require_lse_options(lse_temperature_scale, return_temperature_lse, return_softmax_lse)
    require_csr(q, k, k2q_row_ptr, k2q_q_indices, topK)
    require_output(q, out, output_scale)
    with torch.no_grad():
        q, k, v = aligned_operand(q), aligned_operand(k), aligned_operand(v)
        documents = read_documents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        require_row_ptr(k2q_row_ptr, k2q_q_indices.shape[1])
        schedule = schedule or schedule_from_csr(
            k2q_row_ptr, k2q_q_indices, cu_seqlens_q, cu_seqlens_k, topk=topK, heads_per_index_head=ratio
        )
        worklist = read_schedule(schedule, k2q_row_ptr, k2q_q_indices, documents, cu_seqlens_k)
        slots = read_slots(schedule, worklist, k2q_q_indices, documents, topK)
        shape, dtype = TileShape(ratio, q.shape[2], causal=bool(causal)), accumulation_dtype(q.dtype)
        problem = ForwardProblem(q, k, v, worklist, k2q_q_indices, slots, topK, documents, shape, dtype)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
        lse = compute_lse(problem, scale)
        result = _finish(attend(problem, scale, lse), q.dtype, output_scale, out)
        if not return_softmax_lse:
            return result
        if not return_temperature_lse:
            return result, lse
        return result, lse, compute_lse(problem, scale / lse_temperature_scale)


def _finish(
    sums: torch.Tensor, dtype: torch.dtype, output_scale: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if output_scale is not None:
        sums *= output_scale.reshape(-1)[0]
    return sums.to(dtype) if out is None else out.copy_(sums)
