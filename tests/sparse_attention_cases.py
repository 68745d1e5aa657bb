"""Random problems for ``sparse_attention`` and a dense masked attention to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from msa_vendored.training import Microbatch


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def random_ids(microbatch: Microbatch, heads: int, topk: int, generator: torch.Generator) -> Tensor:
    """Any usable selection: unordered, future blocks too, and queries that select nothing."""
    documents = torch.arange(microbatch.num_documents).repeat_interleave(microbatch.lengths)
    blocks = -(-microbatch.key_lengths // 128)
    ids = torch.full((heads, microbatch.num_tokens, topk), -1, dtype=torch.int32)
    for head in range(heads):
        for token, document in enumerate(documents.tolist()):
            order = torch.randperm(int(blocks[document]), generator=generator)
            kept = int(torch.randint(0, topk + 1, (), generator=generator))
            ids[head, token, : min(kept, order.numel())] = order[:kept].to(torch.int32)
    return ids


@dataclass(frozen=True, slots=True)
class Case:
    """One random problem, float64."""

    microbatch: Microbatch
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    block_ids: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def make_case(
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    topk: int = 4,
    dim: int = 8,
    prefix: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    keys = bounds([length + prefix for length in lengths]) if prefix else None
    microbatch = Microbatch.from_cu_seqlens(bounds(lengths), key_cu_seqlens=keys)

    def draw(tokens: int, count: int) -> Tensor:
        return torch.randn(tokens, count, dim, generator=generator, dtype=torch.float64).to(dtype)

    q = draw(microbatch.num_tokens, heads[0]).requires_grad_()
    k = draw(microbatch.num_key_tokens, heads[1]).requires_grad_()
    v = draw(microbatch.num_key_tokens, heads[1]).requires_grad_()
    ids = random_ids(microbatch, heads[1], topk, generator)
    return Case(microbatch, q, k, v, draw(microbatch.num_tokens, heads[0]), ids)
