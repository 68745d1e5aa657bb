"""Block-sparse attention forward in PyTorch: two passes over the tiles, no running maximum.

The first pass computes the log-sum-exp of every (query, block) pair and combines the slots of a query; the second
adds ``exp(S - lse) V``. Logits are computed twice, which costs a third matrix product and saves rescaling the output
for every block. Memory is linear in tokens: topK statistics per query and head, one output accumulator, and
temporaries under the budget of :class:`~msa_vendored.backward.tiles.TileShape`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from msa_vendored.backward.documents import Documents
from msa_vendored.backward.tiles import TileBatch, TileShape, iter_batches
from msa_vendored.backward.torch_engine import gather_queries
from msa_vendored.backward.worklist import Worklist


@dataclass(frozen=True, slots=True, eq=False)
class ForwardProblem:
    """One forward. T tokens, W key rows, H index heads, G query heads per index head, D head dim.

    Attributes:
        q: ``[T, H * G, D]``, contiguous.
        k: ``[W, H, D]``, contiguous.
        v: ``[W, H, D]``, contiguous.
        worklist: flattened work items that cover every edge once.
        q_indices: int32 ``[H, edge_capacity]``.
        slots: int64 ``[H * edge_capacity]``, distinct for the edges of one query and index head, below ``topk``.
        topk: number of slots.
        documents: extents of queries and keys.
        shape: batching parameters.
        dtype: accumulation dtype.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    worklist: Worklist
    q_indices: torch.Tensor
    slots: torch.Tensor
    topk: int
    documents: Documents
    shape: TileShape
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Queries times index heads: the rows that accumulators are kept in."""
        return int(self.q.shape[0] * self.k.shape[1])

    def batches(self) -> Iterator[TileBatch]:
        """All edges once, in batches."""
        return iter_batches(self.worklist, self.q_indices, self.documents, self.shape)


def compute_lse(problem: ForwardProblem, softmax_scale: float) -> torch.Tensor:
    """Natural log of the sum of exp of scaled logits, ``[T, H * G]``; -inf for rows that see no key."""
    heads_per_index_head = problem.shape.heads_per_index_head
    # The last row takes what padding writes.
    partial = problem.q.new_full(
        (problem.topk * problem.rows + 1, heads_per_index_head), -torch.inf, dtype=problem.dtype
    )
    for batch in problem.batches():
        target = problem.slots[batch.edges] * problem.rows + batch.query_rows
        target = target.masked_fill(~batch.query_live, partial.shape[0] - 1)
        partial[target.view(-1)] = (
            _logits(problem, batch, softmax_scale).logsumexp(dim=-1).view(-1, heads_per_index_head)
        )
    lse = partial[:-1].view(problem.topk, problem.rows, -1).logsumexp(dim=0)
    return lse.view(problem.q.shape[:2])


def attend(problem: ForwardProblem, softmax_scale: float, lse: torch.Tensor) -> torch.Tensor:
    """Attention output in the accumulation dtype, ``[T, H * G, D]``; zeros for rows that see no key."""
    tokens, heads, dim = problem.q.shape
    out = problem.q.new_zeros((problem.rows, heads // problem.k.shape[1] * dim), dtype=problem.dtype)
    finite = torch.where(lse == -torch.inf, torch.inf, lse).view(problem.rows, -1)
    for batch in problem.batches():
        n, m, block_size = batch.visible.shape
        p = _logits(problem, batch, softmax_scale).sub_(finite[batch.query_rows][..., None]).exp_()
        v = _gather_keys(problem.v, batch, problem.dtype)
        out.index_add_(0, batch.query_rows.view(-1), torch.bmm(p.view(n, -1, block_size), v).view(n * m, -1))
    return out.view(tokens, heads, dim)


def _logits(problem: ForwardProblem, batch: TileBatch, softmax_scale: float) -> torch.Tensor:
    n, m, block_size = batch.visible.shape
    q = gather_queries(problem.q, batch, problem.k.shape[1], problem.dtype)
    k = _gather_keys(problem.k, batch, problem.dtype)
    logits = torch.bmm(q, k.transpose(1, 2)).view(n, m, -1, block_size).mul_(softmax_scale)
    return logits.masked_fill_(~batch.visible[:, :, None, :], -torch.inf)


def _gather_keys(tensor: torch.Tensor, batch: TileBatch, dtype: torch.dtype) -> torch.Tensor:
    # Keys are compact here, so a block is a run of rows that may end early: at its document's last key.
    rows, heads, dim = tensor.shape
    row = batch.first_key_row[:, None] + torch.arange(batch.key_live.shape[1], device=tensor.device)
    flat = row.clamp(max=rows - 1) * heads + batch.index_head[:, None]
    return tensor.view(rows * heads, dim)[flat].to(dtype).masked_fill_(~batch.key_live[:, :, None], 0)
