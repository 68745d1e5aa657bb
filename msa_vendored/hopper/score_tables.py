"""The work of a score pass on SM90: tiles of 128 queries, and equal shares of them for the CTAs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msa_vendored.backward.stages import count_multiprocessors

TILE = 128
SEGMENT_FIELDS = 8
NO_LIMIT = 1 << 30
"""Offset of a plan that is not causal: every query sees every key of its document."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTables:
    """Work of one launch, on the device.

    Attributes:
        segments: ``[segments, 8]`` int32, tiles of 128 queries; columns as the kernel's ``SEGMENT_FIELDS`` says.
        starts: ``[ctas, 3]`` int32: first segment of a CTA, key tile within it, number of steps.
    """

    segments: torch.Tensor
    starts: torch.Tensor


def make_segments(queries: Sequence[int], keys: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    """Tiles of 128 queries that see any key, document by document, ``[segments, 8]`` int32 on the CPU.

    Args:
        queries: query tokens of each document.
        keys: key tokens of each document.
        offsets: position of query 0 among the keys.
    """
    parts, query_start, key_start = [], 0, 0
    for count, key_count, offset in zip(queries, keys, offsets, strict=True):
        begin = torch.arange(0, count, TILE)
        valid = (count - begin).clamp(max=TILE)
        seen = (begin + valid + offset).clamp(max=key_count)
        columns = torch.zeros((begin.shape[0], SEGMENT_FIELDS), dtype=torch.int64)
        columns[:, 0] = begin + query_start
        columns[:, 1] = valid
        columns[:, 2] = key_start
        columns[:, 3] = key_count
        columns[:, 4] = begin + offset
        columns[:, 5] = torch.div(seen + TILE - 1, TILE, rounding_mode="floor")
        columns[:, 6] = columns[:, 0]
        parts.append(columns[seen > 0])
        query_start, key_start = query_start + count, key_start + key_count
    return torch.cat(parts).int()


def cut_segments(segments: torch.Tensor, ctas: int) -> torch.Tensor:
    """Equal shares of the segments' steps, ``[ctas, 3]`` int32: first segment, key tile within it, number of steps.

    Loading the 128 queries of a segment counts as one step: 128 KB, as much as four tiles of keys, at a time when the
    tensor cores wait.
    """
    tiles = segments[:, 5].long()
    if not tiles.numel():
        return torch.zeros((ctas, 3), dtype=torch.int32)
    ends = (tiles + 1).cumsum(0)
    bounds = torch.div(torch.arange(ctas + 1) * ends[-1], ctas, rounding_mode="floor")
    segment = torch.searchsorted(ends, bounds, right=True).clamp(max=tiles.shape[0] - 1)
    tile = (bounds - (ends - tiles - 1)[segment] - 1).clamp(min=0)
    step = (tiles.cumsum(0) - tiles)[segment] + tile
    step[-1] = tiles.sum()
    return torch.stack((segment[:-1], tile[:-1], step.diff()), dim=1).int()


def make_tables(
    queries: Sequence[int], keys: Sequence[int], offsets: Sequence[int], device: torch.device
) -> ScoreTables:
    """Tables of a plan on a device; copies them there."""
    segments = make_segments(queries, keys, offsets)
    starts = cut_segments(segments, count_multiprocessors(device))
    return ScoreTables(segments.to(device), starts.to(device))
