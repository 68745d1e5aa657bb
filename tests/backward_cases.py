"""Problems, a dense float64 reference, and element orders for tests of the backward's main kernels, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Operands of the main kernel. T tokens in packed documents, W workspace rows, Hkv kv heads, ``ratio`` heads each.

    Attributes:
        q: bf16 ``[T, Hkv * ratio, 128]``; likewise ``grad_out``.
        k: bf16 ``[W, Hkv, 128]``; likewise ``v``. Rows outside documents hold NaN.
        lse: fp32 ``[T, Hkv * ratio]``; likewise ``delta``.
        selection: int32 ``[Hkv, T, topk]``, blocks of the token's document, -1 for none.
        cu_seqlens: int32 ``[documents + 1]``.
        key_rows: int64 ``[T]``, workspace row of each token's key.
        gradients: float64 dq ``[T, Hkv * ratio, 128]``, dk and dv ``[T, Hkv, 128]``; None if not asked for.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    selection: torch.Tensor
    cu_seqlens: torch.Tensor
    key_rows: torch.Tensor
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    @property
    def ratio(self) -> int:
        """Query heads per kv head."""
        return int(self.q.shape[1] // self.k.shape[1])


def select_blocks(
    lengths: Sequence[int], kv_heads: int, topk: int, device: str, random: torch.Generator
) -> torch.Tensor:
    """Random causal selection int32 ``[kv_heads, T, topk]``: the own block first, then earlier ones, then -1."""
    rows = []
    for length in lengths:
        own = torch.arange(length, device=device) // 128
        width = max(topk, int(own[-1]) + 1)
        score = torch.rand((kv_heads, length, width), device=device, generator=random)
        block = torch.arange(width, device=device)
        score.masked_fill_(block > own[:, None], -1.0)
        score.masked_fill_(block == own[:, None], 2.0)
        best = score.topk(topk, dim=2)
        rows.append(torch.where(best.values < 0, -1, best.indices).int())
    return torch.cat(rows, 1)


def make_problem(
    lengths: Sequence[int],
    *,
    kv_heads: int,
    ratio: int,
    topk: int,
    device: str = "cpu",
    seed: int = 0,
    grad_scale: float = 1.0,
    selection: torch.Tensor | None = None,
    softmax_scale: float = 128**-0.5,
    dead_rows: Sequence[tuple[int, int, float]] = (),
    reference: bool = True,
) -> Problem:
    """Standard-normal operands, dO times ``grad_scale``; without ``reference`` lse and delta are plausible numbers.

    ``dead_rows`` are (token, query head, lse): rows whose lse is not finite, and which give and get no gradient.
    """
    random = torch.Generator(device).manual_seed(seed)
    if selection is None:
        selection = select_blocks(lengths, kv_heads, topk, device, random)
    tokens, heads = sum(lengths), kv_heads * ratio

    def normal(count: int) -> torch.Tensor:
        return torch.randn((tokens, count, 128), device=device, generator=random).bfloat16()

    q, k, v, grad_out = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads) * grad_scale
    lengths_tensor = torch.tensor(lengths, device=device)
    padded = -(-lengths_tensor // 128) * 128
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths_tensor)
    local = torch.arange(tokens, device=device) - (lengths_tensor.cumsum(0) - lengths_tensor)[document]
    key_rows = (padded.cumsum(0) - padded)[document] + local
    alive = torch.ones((tokens, heads), dtype=torch.bool, device=device)
    for token, head, _ in dead_rows:
        alive[token, head] = False
    gradients = None
    if reference:
        lse, delta, *sums = differentiate_dense(q, k, v, grad_out, selection, document, local, alive, softmax_scale)
        gradients = (sums[0], sums[1], sums[2])
    else:
        lse = torch.full((tokens, heads), math.log(min(topk, 4) * 128.0) + 0.5, device=device)
        delta = torch.zeros_like(lse)
    for token, head, value in dead_rows:
        lse[token, head], delta[token, head] = value, math.nan

    def align(compact: torch.Tensor) -> torch.Tensor:
        aligned = compact.new_full((int(padded.sum()), *compact.shape[1:]), math.nan)
        aligned[key_rows] = compact
        return aligned

    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lengths_tensor.cumsum(0)
    return Problem(
        q, align(k), align(v), grad_out, lse.float(), delta.float(), selection, cu_seqlens, key_rows, gradients
    )


def differentiate_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    selection: torch.Tensor,
    document: torch.Tensor,
    local: torch.Tensor,
    alive: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """lse, delta, dq, dk, dv in float64 from the full score matrix of one head at a time."""
    kv_heads, ratio = k.shape[1], q.shape[1] // k.shape[1]
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    delta = torch.empty_like(lse)
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
    for kv_head in range(kv_heads):
        visible = torch.zeros((q.shape[0], q.shape[0]), dtype=torch.bool, device=q.device)
        for column in selection[kv_head].long().unbind(1):
            visible |= column[:, None] == local[None, :] // 128
        visible &= (document[:, None] == document[None, :]) & (local[:, None] >= local[None, :])
        k_head, v_head = k[:, kv_head].double(), v[:, kv_head].double()
        for head in range(kv_head * ratio, (kv_head + 1) * ratio):
            q_head, do_head = q[:, head].double(), grad_out[:, head].double()
            scores = (q_head @ k_head.T * softmax_scale).masked_fill_(~visible, -math.inf)
            lse[:, head] = scores.logsumexp(1)
            p = torch.exp(scores - lse[:, head, None]).masked_fill_(~(visible & alive[:, head, None]), 0.0)
            delta[:, head] = (p @ v_head * do_head).sum(1)
            ds = p * (do_head @ v_head.T - delta[:, head, None]) * softmax_scale
            dq[:, head] = ds @ k_head
            dk[:, kv_head] += ds.T @ q_head
            dv[:, kv_head] += p.T @ do_head
    return lse, delta, dq, dk, dv


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``; NaN is infinity."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))
    return error if math.isfinite(error) else math.inf
