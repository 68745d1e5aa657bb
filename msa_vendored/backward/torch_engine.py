"""The backward of block-sparse attention in PyTorch, on any device.

With S = softmax_scale * Q K^T, P = exp(S - lse), delta = rowsum(out * dO) and dP = dO V^T, over visible keys only::

    dV += P^T dO        dS = P * (dP - delta)
    dK += softmax_scale * dS^T Q        dQ += softmax_scale * dS K

It is the oracle of the GPU kernels, so unlike them it rounds nothing on the way: P and dS stay in the accumulation
dtype, where the kernels round both to bf16 to feed the tensor cores. Only the results are rounded.

Memory is linear in tokens: three accumulators, one row statistic, and temporaries under a fixed budget of elements.
On CUDA the accumulation uses atomics, so the last bits vary from run to run; on CPU results are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from msa_vendored.backward.documents import Documents
from msa_vendored.backward.tiles import TileBatch, TileShape, iter_batches
from msa_vendored.backward.worklist import Worklist


@dataclass(frozen=True, slots=True, eq=False)
class BackwardOperands:
    """Operands of one backward. T tokens, W key rows, H index heads, G query heads per index head, D head dim.

    Attributes:
        q: ``[T, H * G, D]``, any float dtype.
        k: ``[W, H, D]``; documents start at multiples of the block size, as in ``v``.
        v: ``[W, H, D]``.
        grad_out: ``[T, H * G, D]``.
        lse: ``[T, H * G]``, natural log of the sum of exp of scaled logits; -inf for rows that saw no key.
        out: ``[T, H * G, D]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Accumulators:
    """Sums in the accumulation dtype: dq ``[T * H, G * D]``, dk and dv ``[W / block * H, block * D]``."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def differentiate(
    operands: BackwardOperands,
    worklist: Worklist,
    q_indices: torch.Tensor,
    documents: Documents,
    shape: TileShape,
    *,
    softmax_scale: float,
    accumulation_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of block-sparse attention with respect to q, k and v.

    Args:
        operands: see :class:`BackwardOperands`; none is written to.
        worklist: flattened work items (:func:`~msa_vendored.backward.worklist.flatten_edges`).
        q_indices: int32 ``[H, edge_capacity]``.
        documents: extents; ``key_start`` is a multiple of ``shape.block_size``.
        shape: batching parameters.
        softmax_scale: factor on the logits.
        accumulation_dtype: float32 or float64.

    Returns:
        dq like q, dk and dv like k; exact zeros wherever no work item reaches. dk and dv are two views of one buffer.
    """
    tokens, heads = operands.q.shape[0], operands.k.shape[1]
    rows_dim = shape.heads_per_index_head * shape.head_dim
    block_rows, block_dim = operands.k.shape[0] // shape.block_size * heads, shape.block_size * shape.head_dim
    new = operands.q.new_zeros
    pair = new((2, block_rows, block_dim), dtype=accumulation_dtype)
    sums = _Accumulators(new((tokens * heads, rows_dim), dtype=accumulation_dtype), pair[0], pair[1])
    lse = operands.lse.to(accumulation_dtype)
    delta = row_dot(operands.out, operands.grad_out, accumulation_dtype, shape.element_budget)
    # A row that saw no key has lse = -inf, and exp(S + inf) would turn its gradients into NaN; with +inf its
    # probabilities are exactly zero.
    saw_nothing = lse == -torch.inf
    lse = torch.where(saw_nothing, torch.inf, lse).view(tokens * heads, -1)
    delta = delta.masked_fill_(saw_nothing, 0).view(tokens * heads, -1)
    for batch in iter_batches(worklist, q_indices, documents, shape):
        _add_batch(sums, batch, operands, lse, delta, shape, softmax_scale)
    dq = sums.dq.view_as(operands.q).to(operands.q.dtype)
    blocks = pair.view(2, -1, heads, shape.block_size, shape.head_dim).transpose(2, 3)
    dkv = torch.empty((2, *operands.k.shape), dtype=operands.k.dtype, device=operands.k.device)
    dkv.view_as(blocks).copy_(blocks)
    return dq, dkv[0], dkv[1]


def row_dot(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, element_budget: int) -> torch.Tensor:
    """Sum over the last axis of ``a * b`` in ``dtype``, ``[T, heads]``, without a full-size copy of either."""
    result = a.new_empty(a.shape[:2], dtype=dtype)
    step = max(1, element_budget // max(1, a.shape[1] * a.shape[2]))
    for start in range(0, a.shape[0], step):
        rows = slice(start, start + step)
        torch.sum(a[rows].to(dtype) * b[rows].to(dtype), dim=-1, out=result[rows])
    return result


def gather_queries(tensor: torch.Tensor, batch: TileBatch, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of ``[T, H * G, D]`` for a batch, folded to ``[n, m * G, D]`` in ``dtype``."""
    tokens, _, dim = tensor.shape
    rows = tensor.reshape(tokens * heads, -1)[batch.query_rows].to(dtype)
    return rows.view(rows.shape[0], -1, dim)


def _gather_blocks(tensor: torch.Tensor, block: torch.Tensor, batch: TileBatch, dtype: torch.dtype) -> torch.Tensor:
    # Rows past the end of a document are cleared: a NaN there times a zero probability would still be a NaN.
    blocks = tensor.view(-1, batch.key_live.shape[1], tensor.shape[1], tensor.shape[2])
    keys = blocks[block, :, batch.index_head].to(dtype)
    return keys.masked_fill_(~batch.key_live[:, :, None], 0)


def _add_batch(
    sums: _Accumulators,
    batch: TileBatch,
    operands: BackwardOperands,
    lse: torch.Tensor,
    delta: torch.Tensor,
    shape: TileShape,
    softmax_scale: float,
) -> None:
    heads, dtype = operands.k.shape[1], sums.dq.dtype
    n, m, block_size = batch.visible.shape
    block = batch.first_key_row // block_size
    q = gather_queries(operands.q, batch, heads, dtype)
    grad_out = gather_queries(operands.grad_out, batch, heads, dtype)
    k = _gather_blocks(operands.k, block, batch, dtype)
    v = _gather_blocks(operands.v, block, batch, dtype)
    logits = torch.bmm(q, k.transpose(1, 2)).view(n, m, -1, block_size)
    p = logits.mul_(softmax_scale).sub_(lse[batch.query_rows][..., None])
    p = p.masked_fill_(~batch.visible[:, :, None, :], -torch.inf).exp_().view(n, -1, block_size)
    ds = torch.bmm(grad_out, v.transpose(1, 2))
    ds = ds.sub_(delta[batch.query_rows].view(n, -1, 1)).mul_(p).mul_(softmax_scale)
    rows = block * heads + batch.index_head
    sums.dv.index_add_(0, rows, torch.bmm(p.transpose(1, 2), grad_out).view(n, -1))
    sums.dk.index_add_(0, rows, torch.bmm(ds.transpose(1, 2), q).view(n, -1))
    sums.dq.index_add_(0, batch.query_rows.view(-1), torch.bmm(ds, k).view(n * m, -1))
