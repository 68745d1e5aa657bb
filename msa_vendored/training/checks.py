"""The content check of a selection: what the kernels would silently count twice or read out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_vendored.training.layout import BLOCK_SIZE

UNUSABLE_SELECTION = "msa_vendored: block_ids repeat a block, leave the query's document, or go on after a -1"
"""Message of the device-side assertion."""


def usable_queries(block_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which queries have a selection that the kernels may be given.

    Args:
        block_ids: ``[Hkv, T, topk]`` int32.
        cu_seqlens: ``[documents + 1]`` int32, tokens, boundaries of the keys, on the same device; T is its last.

    Returns:
        ``[Hkv, T]`` bool: distinct ids of blocks of the query's document, then -1 only.
    """
    tokens = torch.arange(block_ids.shape[1], dtype=cu_seqlens.dtype, device=block_ids.device)
    document = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    blocks = torch.div(cu_seqlens.diff() + (BLOCK_SIZE - 1), BLOCK_SIZE, rounding_mode="floor")[document]
    outside = (block_ids < -1) | (block_ids >= blocks[None, :, None])
    gap = (block_ids[..., :-1] < 0) & (block_ids[..., 1:] >= 0)
    ordered = block_ids.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return ~(outside.any(-1) | gap.any(-1) | twice.any(-1))


def assert_selection(block_ids: Tensor, cu_seqlens: Tensor) -> None:
    """Assert on the device that every query's selection is usable; no synchronisation with the host.

    On the CPU a fault raises RuntimeError here. On CUDA it raises at a later synchronisation, and the context is lost,
    as after any device-side assertion.
    """
    torch._assert_async(usable_queries(block_ids, cu_seqlens).all(), UNUSABLE_SELECTION)
