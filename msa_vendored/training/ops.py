"""The two custom operators of sparse attention, and how autograd joins them.

They are functional: they write no argument, and what they return shares no storage with one. That is what lets
``torch.compile``, ``torch.export`` and ``torch.library.opcheck`` treat them as opaque.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_vendored.backward.checks import aligned_operand
from msa_vendored.reference.backward import BackwardSchedule
from msa_vendored.training.backends import (
    backward_options,
    bind_kernels,
    on_device_of,
    require_accumulation,
    require_supported,
    resolve_backend,
)
from msa_vendored.training.checks import assert_selection
from msa_vendored.training.errors import StalePlanError, UnsupportedArgumentError
from msa_vendored.training.layout import BLOCK_SIZE


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    cu_seqlens: Tensor,
    workspace_positions: Tensor,
    document_workspace_starts: Tensor,
    csr_rows: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    backend: str,
    check_selection: bool,
    dq_accumulation: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Index and forward launchers; see :func:`msa_vendored.training.sparse_attention` for the arguments.

    ``backend`` and ``dq_accumulation`` are ``""`` where that has None; the latter is for the backward alone.

    Returns:
        out ``[T, Hq, D]``; lse ``[T, Hq]`` float32 (float64 for float64 inputs), natural log of the scaled logits'
        sum; row_ptr ``[Hkv, rows + 1]``; q_indices ``[Hkv, T * topk]``; scheduler_metadata ``[Hkv * rows, 6]``;
        work_count ``[1]``; the last four int32.
    """
    name = resolve_backend(backend or None, q.device)
    require_supported(name, q=q, softmax_scale=softmax_scale)
    require_accumulation(name, dq_accumulation)
    bundle = bind_kernels(name)
    # The reference refuses unusable selections itself, and the index of SM90 notices them in passing.
    if check_selection and name == "sm100":
        assert_selection(block_ids, cu_seqlens)
    options = {"check_selection": check_selection} if name == "sm90" else {}
    lengths = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    queries, keys, values, ids = (aligned_operand(tensor) for tensor in (q, k, v, block_ids))
    with on_device_of(q):
        # total_rows: without it the official builder takes total_k // 128 where that divides, and drops edges.
        row_ptr, q_indices, schedule = bundle.build_k2q_csr(
            ids, cu_seqlens, cu_seqlens, BLOCK_SIZE, total_k=k.shape[0], total_rows=csr_rows.shape[0],
            qhead_per_kv=q.shape[1] // k.shape[1], return_schedule=True, **lengths, **options,
        )  # fmt: skip
        out, lse = bundle.sparse_atten_func(
            queries, keys, values, row_ptr, q_indices, block_ids.shape[2], cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens, blk_kv=BLOCK_SIZE, causal=True, softmax_scale=softmax_scale,
            partial_dtype=torch.bfloat16, return_softmax_lse=True, schedule=schedule, **lengths,
        )  # fmt: skip
        scheduler_metadata, work_count = backward_work(row_ptr, csr_rows)
    return out, lse, row_ptr, q_indices, scheduler_metadata, work_count


def _shape_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    cu_seqlens: Tensor,
    workspace_positions: Tensor,
    document_workspace_starts: Tensor,
    csr_rows: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    backend: str,
    check_selection: bool,
    dq_accumulation: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, rows = k.shape[1], csr_rows.shape[0]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        q.new_empty(q.shape),
        q.new_empty((q.shape[0], q.shape[1]), dtype=lse_dtype),
        block_ids.new_empty((heads, rows + 1)),
        block_ids.new_empty((heads, block_ids.shape[1] * block_ids.shape[2])),
        block_ids.new_empty((heads * rows, 6)),
        block_ids.new_empty((1,)),
    )


def backward_work(row_ptr: Tensor, csr_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Work items of the backward: one per key block and index head, block by block, empty ones included.

    The forward's own schedule cuts blocks to suit its CTAs, in an order that atomics decide and with a capacity that
    depends on the number of SMs. This one has a size that follows from the shapes, which a fake implementation
    needs, and an order that repeats.

    Args:
        row_ptr: ``[Hkv, rows + 1]`` int32.
        csr_rows: ``[rows, 2]`` int32, document and document-local key block of each row.

    Returns:
        scheduler_metadata ``[Hkv * rows, 6]`` int32 (index_head, row_linear, q_begin, q_count, document_ordinal,
        document_local_kblock) and work_count ``[1]`` int32.
    """
    heads, rows = row_ptr.shape[0], csr_rows.shape[0]
    metadata = row_ptr.new_zeros((heads, rows, 6))
    metadata[:, :, 0] = torch.arange(heads, dtype=torch.int32, device=row_ptr.device)[:, None]
    metadata[:, :, 1] = torch.arange(rows, dtype=torch.int32, device=row_ptr.device)
    metadata[:, :, 3] = row_ptr.diff(dim=1)
    metadata[:, :, 4:] = csr_rows
    return metadata.view(heads * rows, 6), row_ptr.new_full((1,), heads * rows)


def launch_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    row_ptr: Tensor,
    q_indices: Tensor,
    scheduler_metadata: Tensor,
    work_count: Tensor,
    workspace_positions: Tensor,
    document_workspace_starts: Tensor,
    cu_seqlens: Tensor,
    planned_cu_seqlens: Tensor,
    workspace_size: int,
    softmax_scale: float,
    backend: str,
    dq_accumulation: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """K/V to the 128-aligned workspace, ``run_backward``, and dK/dV back to compact tokens.

    Args are what the forward saved, and ``planned_cu_seqlens``, the boundaries that the forward was called with:
    under activation checkpointing the saved ``cu_seqlens`` come from the recomputation.

    Returns:
        dq ``[T, Hq, D]``, dk and dv ``[T, Hkv, D]``, dtype of q, contiguous.

    Raises:
        StalePlanError: (a ValueError) the recomputation used another micro-batch.
    """
    _require_same_plan(cu_seqlens, planned_cu_seqlens)
    name = resolve_backend(backend or None, q.device)
    bundle = bind_kernels(name)
    schedule = BackwardSchedule(
        row_ptr, q_indices, scheduler_metadata, work_count, cu_seqlens, document_workspace_starts
    )
    with on_device_of(q):
        k_aligned = k.new_zeros((workspace_size, *k.shape[1:])).index_copy_(0, workspace_positions, k)
        v_aligned = v.new_zeros((workspace_size, *v.shape[1:])).index_copy_(0, workspace_positions, v)
        dq, dk_aligned, dv_aligned = bundle.run_backward(
            q=q,
            k_aligned=k_aligned,
            v_aligned=v_aligned,
            grad_out=grad_out,
            lse=lse,
            out=out,
            schedule=schedule,
            softmax_scale=softmax_scale,
            **backward_options(name, dq_accumulation),
        )
        dk = dk_aligned.index_select(0, workspace_positions)
        dv = dv_aligned.index_select(0, workspace_positions)
    return dq, dk, dv


def _shape_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    row_ptr: Tensor,
    q_indices: Tensor,
    scheduler_metadata: Tensor,
    work_count: Tensor,
    workspace_positions: Tensor,
    document_workspace_starts: Tensor,
    cu_seqlens: Tensor,
    planned_cu_seqlens: Tensor,
    workspace_size: int,
    softmax_scale: float,
    backend: str,
    dq_accumulation: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _require_same_plan(cu_seqlens: Tensor, planned: Tensor) -> None:
    # One address means one tensor, and costs no synchronisation; only a copy or another plan is compared.
    if cu_seqlens.data_ptr() == planned.data_ptr() and cu_seqlens.shape == planned.shape:
        return
    if cu_seqlens.shape != planned.shape or not torch.equal(cu_seqlens, planned):
        raise StalePlanError(
            "the recomputation for backward used another micro-batch than the forward",
            where="microbatch",
            expected=f"the {planned.shape[0] - 1} documents of the forward",
            got=f"{cu_seqlens.shape[0] - 1} documents with other boundaries",
            next_command="pass the Microbatch as an argument of the checkpointed function",
        )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, cu_seqlens, workspace_positions, starts, csr_rows, _, scale, backend, _, dq_accumulation = inputs
    out, lse, row_ptr, q_indices, metadata, work_count = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, row_ptr, q_indices, metadata, work_count)
    ctx.save_for_backward(
        q, k, v, out, lse, row_ptr, q_indices, metadata, work_count, workspace_positions, starts, cu_seqlens
    )
    # Not among the saved tensors on purpose: checkpointing replaces those by recomputed ones.
    ctx.planned_cu_seqlens = cu_seqlens
    ctx.workspace_size = csr_rows.shape[0] * BLOCK_SIZE
    ctx.softmax_scale = scale
    ctx.backend = backend
    ctx.dq_accumulation = dq_accumulation


def _backward(ctx: Any, grad_out: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out is None:
        grads: tuple[Tensor, ...] = tuple(torch.zeros_like(tensor) for tensor in saved[:3])
    else:
        grads = sparse_attention_backward(
            grad_out,
            *saved,
            ctx.planned_cu_seqlens,
            ctx.workspace_size,
            ctx.softmax_scale,
            ctx.backend,
            ctx.dq_accumulation,
        )
    return (*grads, *([None] * 10))  # autograd drops those that are not needed; all three come out of one launch


def _refuse_double_backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
    raise UnsupportedArgumentError(
        "sparse_attention is differentiable once",
        where="backward with create_graph=True",
        expected="first-order gradients",
        got="a gradient of a gradient",
        next_command="drop create_graph=True, or use a dense attention for this",
    )


sparse_attention_forward = torch.library.custom_op("msa_vendored::sparse_attention", launch_forward, mutates_args=())
sparse_attention_forward.register_fake(_shape_forward)
sparse_attention_forward.register_autograd(_backward, setup_context=_setup_context)

sparse_attention_backward = torch.library.custom_op(
    "msa_vendored::sparse_attention_backward", launch_backward, mutates_args=()
)
sparse_attention_backward.register_fake(_shape_backward)
sparse_attention_backward.register_autograd(_refuse_double_backward)
