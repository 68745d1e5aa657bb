"""Results of an implementation against float32, on a sample of queries and key blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.bench.workload import KEY_HEADS, RATIO, SOFTMAX_SCALE, Operands

SAMPLE_QUERIES = 48
_LOGIT_BUDGET = 1 << 26
"""Logits held at a time: 256 MiB of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """What an implementation gave, in token order; a field that it does not give is None.

    Attributes:
        out: ``[T, 64, 128]``.
        lse: ``[T, 64]`` float32, natural log.
        dq: ``[T, 64, 128]``.
        dk: ``[T, 4, 128]``.
        dv: ``[T, 4, 128]``.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def compare_sample(operands: Operands, results: Results, *, dense: bool, seed: int = 0) -> dict[str, float]:
    """Relative L2 errors of out, dq, dk and dv, and the largest absolute error of the LSE, on a sample.

    Args:
        operands: what the implementation was given.
        results: what it gave.
        dense: whether it attends to every earlier key of the document, rather than to the selection.
        seed: of the sample: the first and last token and others at random, and one key block of each head.
    """
    device = operands.q.device
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens = operands.case.tokens
    sample = torch.randint(tokens, (SAMPLE_QUERIES,), generator=generator, device=device)
    sample[0], sample[1] = 0, tokens - 1
    errors: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad(), exact_float32():
        for head in range(KEY_HEADS):
            columns = slice(head * RATIO, (head + 1) * RATIO)
            want = _differentiate_queries(operands, sample, head, dense=dense)
            for name, value in zip(("out", "lse", "dq"), want[:3], strict=True):
                got = getattr(results, name)
                if got is not None:
                    errors.setdefault(name, []).append((got[sample, columns].float(), value))
            if not dense and results.dk is not None and results.dv is not None:
                first, dk, dv = _differentiate_block(operands, int(sample[2 + head]), head)
                rows = slice(first, first + dk.shape[0])
                errors.setdefault("dk", []).append((results.dk[rows, head].float(), dk))
                errors.setdefault("dv", []).append((results.dv[rows, head].float(), dv))
    return {name: _error(name, pairs) for name, pairs in errors.items()}


@contextmanager
def exact_float32() -> Iterator[None]:
    """Switch TF32 off; it would make the yardstick less exact than what is measured."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _error(name: str, pairs: list[tuple[Tensor, Tensor]]) -> float:
    got, want = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    if name == "lse":
        return float((got - want).abs().max())
    return float((got - want).norm() / want.norm())


def _differentiate_queries(
    operands: Operands, queries: Tensor, head: int, *, dense: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Float32 out, lse, dq, probabilities and dS of some queries, ``[n, 16, ...]``; the last two over all tokens."""
    columns = slice(head * RATIO, (head + 1) * RATIO)
    q, grad_out = operands.q[queries, columns].float(), operands.grad_out[queries, columns].float()
    k, v = operands.k[:, head].float(), operands.v[:, head].float()
    visible = visible_keys(operands, queries, head, dense=dense)
    logits = torch.einsum("nhd,kd->nhk", q, k).mul_(SOFTMAX_SCALE).masked_fill_(~visible[:, None], -torch.inf)
    lse = logits.logsumexp(dim=2)
    p = logits.sub_(lse[..., None]).exp_()
    out = torch.einsum("nhk,kd->nhd", p, v)
    delta = (out * grad_out).sum(dim=2, keepdim=True)
    ds = torch.einsum("nhd,kd->nhk", grad_out, v).sub_(delta).mul_(p).mul_(SOFTMAX_SCALE)
    return out, lse, torch.einsum("nhk,kd->nhd", ds, k), p, ds


def visible_keys(operands: Operands, queries: Tensor, head: int, *, dense: bool) -> Tensor:
    """Which keys some queries attend to, bool ``[n, T]``."""
    batch = operands.microbatch
    tokens = torch.arange(operands.case.tokens, device=queries.device)
    document = torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True)
    position = batch.document_positions
    visible = (document[queries][:, None] == document) & (position <= position[queries][:, None])
    if dense:
        return visible
    blocks = -(-batch.max_seqlen // BLOCK_SIZE)
    chosen = torch.zeros((queries.shape[0], blocks + 1), dtype=torch.bool, device=queries.device)
    ids = operands.block_ids[head, queries].long()
    chosen.scatter_(1, torch.where(ids < 0, blocks, ids), True)
    return visible & chosen[:, torch.div(position, BLOCK_SIZE, rounding_mode="floor")]


def _differentiate_block(operands: Operands, token: int, head: int) -> tuple[int, Tensor, Tensor]:
    """First token of the key block that ``token`` lies in, and float32 dk and dv of that block, of one head."""
    batch = operands.microbatch
    position = int(batch.document_positions[token])
    block, first = position // BLOCK_SIZE, token - position % BLOCK_SIZE
    document = int(torch.searchsorted(batch.cu_seqlens[1:], token, right=True))
    start, stop = (int(batch.cu_seqlens[document + side]) for side in (0, 1))
    last = min(first + BLOCK_SIZE, stop)
    users = start + (operands.block_ids[head, start:stop] == block).any(dim=1).nonzero().squeeze(1)
    columns = slice(head * RATIO, (head + 1) * RATIO)
    dk, dv = (operands.q.new_zeros((last - first, operands.q.shape[2]), dtype=torch.float32) for _ in range(2))
    for queries in users.split(max(1, _LOGIT_BUDGET // (RATIO * operands.case.tokens))):
        *_, p, ds = _differentiate_queries(operands, queries, head, dense=False)
        dv += torch.einsum("nhk,nhd->kd", p[:, :, first:last], operands.grad_out[queries, columns].float())
        dk += torch.einsum("nhk,nhd->kd", ds[:, :, first:last], operands.q[queries, columns].float())
    return first, dk, dv
