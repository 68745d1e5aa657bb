"""Factors and conversions of the integer accumulators of the deterministic SM100 backward. PyTorch, no synchronisation.

With dP = dO V^T and delta = rowsum(out * dO), |dP - delta| <= |dO| * max |V row| + |delta| =: m for a row of q, by
Cauchy and Schwarz. The probabilities of a row sum to at most 1 (times 1 + 2^-8 after rounding to bf16), so

    |dQ| <= softmax_scale * m * max |K element|                                for each row
    |dK| <= rows * softmax_scale * max m * max |Q element|,   |dV| <= rows * max |dO element|

where a key gets at most ``rows`` = T * ratio probabilities of at most 1. A factor is the power of two that puts the
bound below a quarter of the integers' range; partial sums obey the same bounds.
"""

from __future__ import annotations

import torch

DQ_BITS, DKV_BITS = 29, 61


def choose_factors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    delta: torch.Tensor,
    key_live: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two to multiply gradients with before they are rounded to integers.

    Args:
        q: ``[T, Hq, 128]``.
        k: ``[W, Hkv, 128]``.
        v: as ``k``.
        grad_out: as ``q``.
        delta: fp32 ``[T, Hq]``.
        key_live: bool ``[W]``, False for rows of k and v outside documents, which may hold anything.
        softmax_scale: factor on the logits.

    Returns:
        fp32 ``[T, Hq]`` for dQ, and fp32 ``[2]`` for dK and dV. A row with a NaN or infinity in dO gets factor 1.

    Side effects:
        Temporaries of the size of ``k`` and ``v``; no host synchronisation.
    """
    live = key_live[:, None, None]
    # In float64, as squares of what fits into bf16 need not fit into fp32.
    key_bound = torch.where(live, k, 0).abs().amax().float()
    value_norm = torch.linalg.vector_norm(torch.where(live, v, 0), dim=2, dtype=torch.float64).amax()
    grad_norm = torch.linalg.vector_norm(grad_out, dim=2, dtype=torch.float64)
    slope = grad_norm * value_norm + delta.abs()
    finite_slope = torch.where(slope.isfinite(), slope, 0)
    dq_bound = slope * (abs(softmax_scale) * key_bound)
    rows = float(q.shape[0] * (q.shape[1] // k.shape[1]))
    dk_bound = finite_slope.amax() * q.abs().amax().float() * (rows * abs(softmax_scale))
    grad_bound = torch.where(grad_norm.isfinite(), grad_norm, 0).amax()
    return _power_below(dq_bound, DQ_BITS), _power_below(torch.stack([dk_bound, grad_bound * rows]), DKV_BITS)


def _power_below(bound: torch.Tensor, bits: int) -> torch.Tensor:
    """The largest power of two (a normal fp32) whose product with ``bound`` stays below 2**bits; 1 if not finite."""
    exponent = torch.frexp(bound).exponent
    usable = bound.isfinite() & (bound > 0)
    power = torch.where(usable, bits - exponent, 0).clamp(-126, 126)
    return torch.ldexp(torch.ones_like(bound, dtype=torch.float32), power)


def convert_sums(
    dq_pool: torch.Tensor, dkv: torch.Tensor, dq_factor: torch.Tensor, dkv_factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 dq ``[T, Hq, 128]`` and dkv ``[2, W, Hkv, 128]`` from the integer sums.

    Args:
        dq_pool: int32 ``[T * Hq * 128]``.
        dkv: int64 ``[2, W // 128, Hkv, 128, 128]``, the key innermost.
        dq_factor: as :func:`choose_factors` gave it.
        dkv_factor: likewise.
    """
    tokens, heads = dq_factor.shape
    dq = dq_pool.view(tokens, heads, -1).float() / dq_factor[..., None]
    blocks = dkv.float() / dkv_factor.view(2, 1, 1, 1, 1)
    gradients = blocks.permute(0, 1, 4, 2, 3).flatten(1, 2)
    return dq.bfloat16(), gradients.bfloat16()
