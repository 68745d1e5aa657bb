"""Dense masked attention: the definition, for tests of everything else. Quadratic memory, differentiable."""

from __future__ import annotations

from itertools import pairwise

import torch

from msa_vendored.backward.documents import BLOCK_SIZE


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    block_size: int = BLOCK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the selected blocks with a full mask per document, differentiable by autograd.

    Args:
        q: ``[total_q, Hq, D]``, any float dtype; the result is computed and returned in it.
        k: ``[total_k, Hkv, D]``.
        v: ``[total_k, Hkv, D]``.
        q2k_indices: integer ``[Hkv, total_q, topK]``, block numbers within the document, -1 for unused.
        cu_seqlens_q: ``[documents + 1]``.
        cu_seqlens_k: ``[documents + 1]``.
        causal: bottom-right alignment: query i of n sees key j of m if ``j <= i + m - n``.
        softmax_scale: ``D ** -0.5`` if None.
        block_size: keys per block.

    Returns:
        out ``[total_q, Hq, D]`` and lse ``[total_q, Hq]`` (natural log). Rows that see no key: zeros and -inf.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    heads = k.shape[1]
    outs, lses = [], []
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        pairs = [
            _attend(
                queries,
                k[k0:k1, head],
                v[k0:k1, head],
                _mask(q2k_indices[head, q0:q1], k1 - k0, causal, block_size),
                scale,
            )
            for head, queries in enumerate(q[q0:q1].chunk(heads, dim=1))
        ]
        outs.append(torch.cat([out for out, _ in pairs], dim=1))
        lses.append(torch.cat([lse for _, lse in pairs], dim=1))
    return torch.cat(outs), torch.cat(lses)


def _mask(blocks: torch.Tensor, keys: int, causal: bool, block_size: int) -> torch.Tensor:
    queries, width = blocks.shape[0], -(-keys // block_size)
    selected = torch.zeros((queries, width + 1), dtype=torch.bool, device=blocks.device)
    selected.scatter_(1, torch.where(blocks < 0, width, blocks).long(), True)
    mask = selected[:, :width].repeat_interleave(block_size, dim=1)[:, :keys]
    if causal:
        mask = mask & torch.ones_like(mask).tril(keys - queries)
    return mask


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.einsum("qhd,kd->qhk", q, k) * scale
    dead = ~mask.any(dim=1)
    # Rows without keys get finite logits and are cleared afterwards: autograd through softmax(-inf) gives NaN.
    logits = logits.masked_fill(~(mask | dead[:, None])[:, None, :], -torch.inf)
    p = logits.softmax(dim=-1).masked_fill(dead[:, None, None], 0)
    lse = logits.logsumexp(dim=-1).masked_fill(dead[:, None], -torch.inf)
    return torch.einsum("qhk,kd->qhd", p, v), lse
