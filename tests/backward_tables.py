"""Task tables of the backward's main kernel from a block selection, in vectorised torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """As ``msa_vendored.backward.tasks`` defines them; int32, on the device of the selection."""

    meta: torch.Tensor
    qrows: torch.Tensor
    qpos: torch.Tensor
    descriptor: torch.Tensor
    starts: torch.Tensor
    workspace_rows: int


def build_tables(
    selection: torch.Tensor, cu_seqlens: torch.Tensor, *, ratio: int, window: int, grid: int, rows_per_chunk: int = 64
) -> Tables:
    """Tables of a selection int ``[Hkv, T, topk]`` of document-local blocks (-1: none), tasks in walking order."""
    device, slots = selection.device, 128 // ratio
    lengths = cu_seqlens.long().diff()
    padded = -(-lengths // 128) * 128
    starts = padded.cumsum(0) - padded
    document = torch.repeat_interleave(torch.arange(lengths.shape[0], device=device), lengths)
    head, token, which = (selection >= 0).nonzero(as_tuple=True)
    block = selection[head, token, which].long() + starts[document[token]] // 128
    blocks = int(padded.sum()) // 128
    order = ((head * blocks + block) * selection.shape[1] + token).argsort()
    head, token, block = head[order], token[order], block[order]
    rank, bucket_size = _rank_in_bucket(head * blocks + block)
    task_of_pair = ((rank % slots == 0).long().cumsum(0)) - 1
    tasks = int(task_of_pair[-1]) + 1 if task_of_pair.numel() else 0
    first = rank % slots == 0
    meta = torch.stack(
        [document[token[first]], head[first], block[first], (bucket_size - rank)[first].clamp(max=slots)], 1
    )
    qrows = torch.full((tasks, slots), -1, device=device, dtype=torch.long)
    qrows[task_of_pair, rank % slots] = token
    shift = (starts - cu_seqlens[:-1].long())[meta[:, 0]][:, None]
    qpos = torch.where(qrows >= 0, qrows + shift, -1)
    key = meta[:, 1]
    for column, size in (
        (qrows[:, 0] // window, selection.shape[1]),
        (meta[:, 2], blocks),
        (qrows[:, 0], selection.shape[1]),
    ):
        key = key * (size + 1) + column
    order = key.argsort()
    walk = _plan_walk(tasks, grid, rows_per_chunk)
    descriptor = torch.tensor([tasks, *walk, 0, tasks, 0], dtype=torch.int32, device=device)
    return Tables(meta[order].int(), qrows[order].int(), qpos[order].int(), descriptor, starts.int(), blocks * 128)


def _rank_in_bucket(bucket: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, inverse, counts = bucket.unique_consecutive(return_inverse=True, return_counts=True)
    begins = counts.cumsum(0) - counts
    return torch.arange(bucket.shape[0], device=bucket.device) - begins[inverse], counts[inverse]


def _plan_walk(tasks: int, grid: int, rows_per_chunk: int) -> tuple[int, int, int, int]:
    rounds = max(1, -(-tasks // (grid * rows_per_chunk)))
    chunks = min(tasks, rounds * grid)
    if chunks == 0:
        return 1, 0, 1, 0
    tail, full = divmod(tasks, chunks)
    return tail + 1, full, tail, chunks
