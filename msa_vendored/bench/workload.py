"""What is measured: document lengths, selections, operands, and exact counts of causal pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.bench.errors import BenchArgumentError
from msa_vendored.training.microbatch import Microbatch

QUERY_HEADS, KEY_HEADS, HEAD_DIM, TOPK = 64, 4, 128, 16
RATIO = QUERY_HEADS // KEY_HEADS
SOFTMAX_SCALE = HEAD_DIM**-0.5
SELECTIONS = ("random", "mixed")
NEAREST = 8
"""Blocks that the selection "mixed" always takes at the end: a query's own and the seven before it."""

_SCORE_BUDGET = 1 << 27
"""Random scores drawn at a time for a selection: 512 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload by name.

    Attributes:
        name: label in tables.
        lengths: tokens of each document.
        selection: one of :data:`SELECTIONS`.
    """

    name: str
    lengths: tuple[int, ...]
    selection: str = "random"

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(self.lengths)

    @property
    def dense_pairs(self) -> int:
        """(query token, key token) pairs of dense causal attention within documents, per head."""
        return sum(length * (length + 1) // 2 for length in self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """One set of random operands on a device; a run rotates over several.

    Attributes:
        case: what they belong to.
        microbatch: the documents.
        q: ``[T, 64, 128]`` bfloat16.
        k: ``[T, 4, 128]`` bfloat16.
        v: ``[T, 4, 128]`` bfloat16.
        grad_out: ``[T, 64, 128]`` bfloat16.
        index_q: ``[T, 4, 128]`` bfloat16.
        index_k: ``[T, 1, 128]`` bfloat16.
        block_ids: ``[4, T, 16]`` int32, ascending, then -1.
        sparse_pairs: (query token, key token) pairs that the selection leaves, summed over the 4 key heads.
    """

    case: Case
    microbatch: Microbatch
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    index_q: Tensor
    index_k: Tensor
    block_ids: Tensor
    sparse_pairs: int


def make_operands(case: Case, device: torch.device, seed: int) -> Operands:
    """Fresh random operands and selection of a case; the generator is on the device."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn((case.tokens, heads, HEAD_DIM), generator=generator, device=device, dtype=torch.bfloat16)

    bounds = torch.tensor([0, *case.lengths]).cumsum(0)
    microbatch = Microbatch.from_cu_seqlens(bounds, device=device)
    ids = select_at_random(microbatch.document_positions, max(case.lengths), case.selection, generator)
    pairs = count_pairs(ids, microbatch.document_positions)
    q, k, v, grad_out, index_q, index_k = map(normal, (QUERY_HEADS, KEY_HEADS, KEY_HEADS, QUERY_HEADS, KEY_HEADS, 1))
    return Operands(case, microbatch, q, k, v, grad_out, index_q, index_k, ids, pairs)


def select_at_random(positions: Tensor, longest: int, selection: str, generator: torch.Generator) -> Tensor:
    """Random causal selection; the query's own block is always in it.

    Args:
        positions: ``[T]`` int64, position of each query in its document.
        longest: tokens of the longest document.
        selection: "random": own block and 15 earlier ones; "mixed": block 0, own block, the seven before it, and
            earlier ones at random.
        generator: on the device of ``positions``.

    Returns:
        ``[4, T, 16]`` int32, ascending, -1 where the query has fewer blocks.
    """
    blocks = -(-longest // BLOCK_SIZE)
    ids = torch.full((KEY_HEADS, positions.shape[0], TOPK), -1, dtype=torch.int32, device=positions.device)
    step = max(1, _SCORE_BUDGET // (KEY_HEADS * blocks))
    block = torch.arange(blocks, device=positions.device)
    for begin in range(0, positions.shape[0], step):
        own = torch.div(positions[begin : begin + step], BLOCK_SIZE, rounding_mode="floor")[:, None]
        scores = torch.rand((KEY_HEADS, own.shape[0], blocks), generator=generator, device=positions.device)
        if selection == "mixed":
            scores += ((own - block < NEAREST) | (block == 0)).float() * 2
        scores.masked_fill_(block > own, -1).masked_fill_(block == own, 9)
        best = scores.topk(min(TOPK, blocks), dim=2)
        chosen = torch.where(best.values < 0, blocks, best.indices).sort(dim=2).values
        ids[:, begin : begin + step, : chosen.shape[2]] = chosen.masked_fill(chosen == blocks, -1)
    return ids


def count_pairs(block_ids: Tensor, positions: Tensor) -> int:
    """(query token, key token) pairs of a causal selection that holds every query's own block, over all key heads."""
    own = torch.div(positions, BLOCK_SIZE, rounding_mode="floor")
    earlier = int(((block_ids >= 0) & (block_ids < own[None, :, None])).sum())
    diagonal = int((positions % BLOCK_SIZE + 1).sum())
    return earlier * BLOCK_SIZE + int(block_ids.shape[0]) * diagonal


def forward_flops(pairs: int, heads_per_pair: int) -> int:
    """Two GEMMs, S = QK^T and O = PV: 4 x 128 per pair and head. The backward has five: 2.5 times as many."""
    return 4 * HEAD_DIM * heads_per_pair * pairs


def score_flops(case: Case) -> int:
    """One GEMM of the score pass, 2 x 128 per pair and index head."""
    return 2 * HEAD_DIM * KEY_HEADS * case.dense_pairs


def draw_pack(tokens: int, *, mean: int = 2400, seed: int = 0) -> tuple[int, ...]:
    """Document lengths that fill ``tokens`` exactly, log-normal as packs of real text are, the last one cut.

    Args:
        tokens: total.
        mean: mean length in tokens.
        seed: of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    sigma = 0.8  # of the logarithm: half of the documents lie within a factor of 1.7 of the median
    median = mean / torch.tensor(sigma**2 / 2).exp()
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(median * (sigma * torch.randn((), generator=generator)).exp())
        lengths.append(min(left, max(1, drawn)))
    return tuple(lengths)


def read_packs(path: Path, limit: int | None = None) -> list[Case]:
    """Cases from a file of packs: one JSON object a line, as MiniMax-AI/MSA publishes them.

    Args:
        path: the file; a line has ``case_id``, any name, and ``cu_seqlens``, integers that start at 0 and ascend.
        limit: keep only documents that fit, see :func:`fit_lengths`; None for whole packs.

    Raises:
        BenchArgumentError: the file or a line is not as described, or no document of a pack fits.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchArgumentError("the file of packs cannot be read", where=str(path), got=str(error)) from error
    if not lines:
        raise BenchArgumentError("the file of packs is empty", where=str(path), expected="JSON lines", got="nothing")
    return [_read_pack(line, f"{path}, line {number}", limit) for number, line in enumerate(lines, start=1)]


def _read_pack(line: str, where: str, limit: int | None) -> Case:
    try:
        record = json.loads(line)
        bounds, name = record["cu_seqlens"], record["case_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchArgumentError(
            "a pack cannot be read", where=where, expected='{"case_id": …, "cu_seqlens": [0, …]}', got=line[:80]
        ) from error
    if not isinstance(bounds, list) or any(type(bound) is not int for bound in bounds):
        raise BenchArgumentError(
            "cu_seqlens of a pack is no list of integers", where=where, expected="[0, …]", got=repr(bounds)[:80]
        )
    if bounds[:1] != [0]:
        raise BenchArgumentError("cu_seqlens of a pack does not start at 0", where=where, got=repr(bounds)[:80])
    falling = [pair for pair in pairwise(bounds) if pair[1] <= pair[0]]
    if falling or len(bounds) == 1:
        raise BenchArgumentError(
            "cu_seqlens of a pack does not ascend",
            where=where,
            expected="at least one document, and no empty one",
            got=f"{falling[0][1]} after {falling[0][0]}" if falling else "no document",
        )
    lengths = fit_lengths([after - before for before, after in pairwise(bounds)], limit)
    if not lengths:
        raise BenchArgumentError("no document of a pack fits", where=where, expected=f"at most {limit} tokens")
    documents = f"{len(lengths)} document{'s'[: len(lengths) > 1]}"
    return Case(f"pack {name}: {documents}, {sum(lengths):,} tokens", lengths)


def fit_lengths(lengths: Sequence[int], limit: int | None) -> tuple[int, ...]:
    """The documents, in order, each taken whole if it fits into what the ones before left of ``limit`` tokens."""
    kept: list[int] = []
    for length in lengths:
        if limit is None or sum(kept) + length <= limit:
            kept.append(length)
    return tuple(kept)
