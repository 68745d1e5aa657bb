"""One document of the dense attention and score pass, in chunks of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from msa_vendored.backward.tiles import ELEMENT_BUDGET
from msa_vendored.reference.arguments import accumulation_dtype

TILE = 128


@dataclass(frozen=True, slots=True)
class ScoreDocument:
    """Token ranges of one document; query i of it sees key j if ``j <= i + offset``."""

    queries: slice
    keys: slice
    offset: int


def run_document(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document: ScoreDocument,
    *,
    scale: float,
    out: torch.Tensor | None,
    max_score: torch.Tensor | None,
    element_budget: int = ELEMENT_BUDGET,
) -> None:
    """Writes output and scores of one document.

    Args:
        q: ``[total_q, Hq, D]``.
        k: ``[total_k, Hkv, D]``.
        v: ``[total_k, Hkv, D]``.
        document: token ranges and causal offset.
        scale: factor on the logits of the output.
        out: ``[total_q, Hq, D]`` to write to, or None.
        max_score: ``[Hq, tiles, total_q]`` to write to, or None.
        element_budget: logits held at a time; a chunk has at least one query.
    """
    dtype = accumulation_dtype(q.dtype)
    keys, values = k[document.keys].to(dtype), v[document.keys].to(dtype) if out is not None else None
    count, step = keys.shape[0], max(1, element_budget // (q.shape[1] * keys.shape[0]))
    for start in range(document.queries.start, document.queries.stop, step):
        rows = slice(start, min(start + step, document.queries.stop))
        position = torch.arange(rows.start, rows.stop, device=q.device) - document.queries.start + document.offset
        visible = min(count, max(0, rows.stop - document.queries.start + document.offset))
        logits = _logits(q[rows].to(dtype), keys[:visible], position)
        if max_score is not None:
            _store_scores(max_score[:, :, rows], logits)
        if out is not None and values is not None:
            out[rows] = _weigh(logits * scale, values[:visible]).to(out.dtype)


def _logits(q: torch.Tensor, keys: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Raw products ``[Hkv, G, queries, keys]``, -inf where the key lies after ``position``."""
    folded = q.view(q.shape[0], keys.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)
    logits = torch.matmul(folded, keys.permute(1, 2, 0)[:, None])
    hidden = torch.arange(keys.shape[0], device=q.device) > position[:, None]
    return logits.masked_fill_(hidden, -torch.inf)


def _store_scores(max_score: torch.Tensor, logits: torch.Tensor) -> None:
    heads, queries = max_score.shape[0], logits.shape[2]
    padding = -logits.shape[3] % TILE
    padded = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
    scores = padded.view(heads, queries, -1, TILE).amax(dim=3).transpose(1, 2)
    target = max_score[:, : scores.shape[1]]
    target.copy_(torch.where(scores == -torch.inf, target, scores))


def _weigh(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Softmax-weighted values ``[queries, Hq, D]``; zeros for rows that see no key."""
    lse = logits.logsumexp(dim=3, keepdim=True)
    p = (logits - torch.where(lse == -torch.inf, torch.inf, lse)).exp()
    out = torch.matmul(p, values.permute(1, 0, 2)[:, None])
    return out.permute(2, 0, 1, 3).flatten(1, 2)
