"""Random packed problems and the key workspace, for tests, examples and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.reference.csr import build_k2q_csr
from msa_vendored.reference.schedule import SparseAttentionSchedule


@dataclass(frozen=True, slots=True, eq=False)
class PackedCase:
    """Documents packed one after another, with a block selection.

    Attributes:
        q: ``[total_q, Hq, D]``.
        k: ``[total_k, Hkv, D]``.
        v: ``[total_k, Hkv, D]``.
        grad_out: ``[total_q, Hq, D]``.
        q2k_indices: int32 ``[Hkv, total_q, topK]``, document-local blocks in random order, -1 at the end.
        cu_seqlens_q: int32 ``[documents + 1]``.
        cu_seqlens_k: int32 ``[documents + 1]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    q2k_indices: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def max_seqlen_q(self) -> int:
        """Longest query length."""
        return int(self.cu_seqlens_q.diff().max())

    @property
    def max_seqlen_k(self) -> int:
        """Longest key length."""
        return int(self.cu_seqlens_k.diff().max())


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Where compact keys go so that every document starts at a multiple of 128 rows.

    Attributes:
        rows: rows of the workspace, a multiple of 128.
        starts: int32 ``[documents]``, first row of each document.
        positions: int64 ``[total_k]``, row of each compact key.
    """

    rows: int
    starts: torch.Tensor
    positions: torch.Tensor

    def align(self, compact: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """``[total_k, ...]`` spread over ``[rows, ...]``; rows outside documents hold ``fill``."""
        aligned = compact.new_full((self.rows, *compact.shape[1:]), fill)
        aligned[self.positions] = compact
        return aligned


def plan_workspace(cu_seqlens_k: torch.Tensor) -> Workspace:
    """The workspace of int32 ``[documents + 1]`` prefix sums; reads its size on the host."""
    lengths = cu_seqlens_k.long().diff()
    padded = -(-lengths // BLOCK_SIZE) * BLOCK_SIZE
    starts = padded.cumsum(0) - padded
    document = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
    within = torch.arange(document.shape[0], device=document.device) - cu_seqlens_k.long()[document]
    return Workspace(int(padded.sum()), starts.int(), starts[document] + within)


def make_case(
    query_lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    topk: int = 4,
    index_heads: int = 4,
    heads_per_index_head: int = 16,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    own_block: bool = True,
    seed: int = 0,
) -> PackedCase:
    """Standard-normal operands and a random selection, reproducible from ``seed``, on the CPU.

    Args:
        query_lengths: tokens per document.
        key_lengths: keys per document; as ``query_lengths`` if None.
        topk: selection width.
        index_heads: key heads.
        heads_per_index_head: query heads per key head.
        head_dim: elements per head.
        dtype: of the four operands.
        own_block: as in training: the block of the query's own position is selected, later ones never. If False,
            any number of blocks from none to ``topk`` anywhere in the document.
        seed: of the generator.
    """
    key_lengths = query_lengths if key_lengths is None else key_lengths
    random = torch.Generator().manual_seed(seed)
    selections = [
        _select(n, m, topk, index_heads, own_block, random) for n, m in zip(query_lengths, key_lengths, strict=True)
    ]
    query_heads = index_heads * heads_per_index_head

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn((tokens, heads, head_dim), generator=random).to(dtype)

    total_q, total_k = sum(query_lengths), sum(key_lengths)
    return PackedCase(
        q=normal(total_q, query_heads),
        k=normal(total_k, index_heads),
        v=normal(total_k, index_heads),
        grad_out=normal(total_q, query_heads),
        q2k_indices=torch.cat(selections, dim=1).contiguous(),
        cu_seqlens_q=_prefix_sums(query_lengths),
        cu_seqlens_k=_prefix_sums(key_lengths),
    )


def invert_selection(case: PackedCase) -> tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    """CSR and schedule of a case: ``row_ptr``, ``q_indices`` and the forward schedule."""
    csr = build_k2q_csr(
        case.q2k_indices,
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        BLOCK_SIZE,
        total_k=case.k.shape[0],
        max_seqlen_q=case.max_seqlen_q,
        max_seqlen_k=case.max_seqlen_k,
        qhead_per_kv=case.q.shape[1] // case.k.shape[1],
        return_schedule=True,
    )
    return csr[0], csr[1], csr[-1]


def _prefix_sums(lengths: Sequence[int]) -> torch.Tensor:
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return sums


def _select(queries: int, keys: int, topk: int, heads: int, own_block: bool, random: torch.Generator) -> torch.Tensor:
    blocks = -(-keys // BLOCK_SIZE)
    scores = torch.rand((heads, queries, max(blocks, topk)), generator=random)
    scores[:, :, blocks:] = -1
    if own_block:
        own = ((torch.arange(queries) + keys - queries).clamp(min=0) // BLOCK_SIZE)[:, None]
        block = torch.arange(scores.shape[2])
        scores.masked_fill_(block > own, -1)
        scores.masked_fill_(block == own, 2)
    else:
        wanted = torch.randint(0, topk + 1, (heads, queries, 1), generator=random)
        rank = scores.argsort(dim=2, descending=True).argsort(dim=2)
        scores.masked_fill_(rank >= wanted, -1)
    best = scores.topk(topk, dim=2)
    return torch.where(best.values < 0, -1, best.indices).int()
