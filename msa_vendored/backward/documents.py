"""Where the queries and keys of each document lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from msa_vendored.backward.checks import refuse_any
from msa_vendored.backward.schedule import MSABackwardSchedule

BLOCK_SIZE = 128
"""Keys per block; the only size the GPU kernels know. Other sizes serve small tests of the engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Where the queries and the keys of each document lie; int64 ``[documents]`` each, on one device."""

    query_start: torch.Tensor
    query_count: torch.Tensor
    key_start: torch.Tensor
    key_count: torch.Tensor


def workspace_documents(
    schedule: MSABackwardSchedule,
    *,
    tokens: int,
    workspace_rows: int,
    cu_seqlens_k: torch.Tensor | None = None,
    block_size: int = BLOCK_SIZE,
) -> Documents:
    """Document extents in the compact query tokens and the aligned key workspace, checked against both.

    Args:
        schedule: gives ``cu_seqlens`` and ``document_workspace_starts``.
        tokens: rows of q.
        workspace_rows: rows of k.
        cu_seqlens_k: int32 ``[documents + 1]`` where key lengths differ from query lengths.
        block_size: alignment of document starts.

    Raises:
        ArgumentValueError: lengths do not add up to ``tokens``, a document is empty, or its keys leave the
            workspace or overlap another document's.
    """
    query = schedule.cu_seqlens.long()
    key = query if cu_seqlens_k is None else cu_seqlens_k.long()
    starts = schedule.document_workspace_starts.long()
    query_count, key_count = query.diff(), key.diff()
    require_prefix_sums("schedule.cu_seqlens", query, total=tokens)
    if cu_seqlens_k is not None:
        require_prefix_sums("cu_seqlens_k", key, total=None)
    ends = starts + -(-key_count // block_size) * block_size
    refuse_any(
        (starts < 0) | (starts % block_size != 0) | (ends > workspace_rows),
        "a document does not lie in the workspace",
        where="argument schedule.document_workspace_starts",
        expected=f"a multiple of {block_size} with room for the document within {workspace_rows} rows",
        values=starts,
    )
    order = starts.argsort()
    refuse_any(
        starts[order][1:] < ends[order][:-1],
        "two documents share workspace rows",
        where="argument schedule.document_workspace_starts",
        expected="the end of the document before",
        values=starts[order][1:],
    )
    return Documents(query[:-1], query_count, starts, key_count)


def require_prefix_sums(name: str, cu_seqlens: torch.Tensor, *, total: int | None) -> None:
    """Refuses prefix sums that do not start at 0, have an empty document, or do not end at ``total``."""
    refuse_any(
        cu_seqlens[:1] != 0,
        f"{name} does not start at 0",
        where=f"argument {name}",
        expected="0",
        values=cu_seqlens[:1],
    )
    lengths = cu_seqlens.diff()
    refuse_any(
        lengths <= 0, f"{name} has an empty document", where=f"argument {name}", expected="lengths >= 1", values=lengths
    )
    if total is not None:
        refuse_any(
            cu_seqlens[-1:] != total,
            f"{name} does not end at the number of tokens",
            where=f"argument {name}",
            expected=str(total),
            values=cu_seqlens[-1:],
        )
