"""The documents of one micro-batch: where each token is, in the batch, in its document and in the K/V workspace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from msa_vendored.training.errors import ArgumentValueError, StalePlanError
from msa_vendored.training.layout import (
    DocumentLayout,
    TensorMemo,
    build_layout,
    require_int32,
    require_integer,
    run_lengths,
    segment_lengths,
)

_MEMO: TensorMemo[Microbatch]


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Microbatch:
    """Packed documents of one micro-batch; build it with :meth:`from_document_map` or :meth:`from_cu_seqlens`.

    Compact order: all real tokens, row by row of the batch, left to right; T query tokens, Tk key tokens, documents
    numbered in that order. Without a prefix (see :meth:`from_cu_seqlens`) queries and keys are the same tokens and
    T = Tk. Workspace order: each document starts at a multiple of 128 rows, the rows after its last key are unused.

    All tensors are on one device, except ``lengths`` and ``key_lengths``, which stay on the CPU so that planning the
    score pass costs no further synchronisation. Compared by identity. Registered as a pytree for ``torch.export``.

    Attributes:
        padding_mask: ``[B, S]`` bool, True where the batch holds no token; ``[1, T]`` for packed input.
        token_rows: ``[T]`` int64, row of each query token in the batch flattened to ``[B * S]``.
        workspace_positions: ``[Tk]`` int64, workspace row of each key token.
        document_positions: ``[T]`` int64, tokens: position of each query among the keys of its document.
        document_workspace_starts: ``[documents]`` int32, first workspace row of each document.
        cu_seqlens: ``[documents + 1]`` int32, tokens: boundaries of the documents' queries in compact order.
        workspace_size: rows of the workspace, W; a positive multiple of 128.
        max_seqlen: most query tokens in one document.
        key_cu_seqlens: ``[documents + 1]`` int32, tokens: boundaries of the documents' keys in compact order.
        max_key_seqlen: most key tokens in one document.
        csr_rows: ``[W / 128, 2]`` int32: document and document-local key block of each row of the k2q CSR.
        lengths: ``[documents]`` int32 on the CPU, query tokens per document.
        key_lengths: ``[documents]`` int32 on the CPU, key tokens per document.
        query_rows: ``[T]`` int64, the key token at each query's own position; None where T = Tk.
        forced_blocks: (init, local): how many leading blocks every query attends to, and whether (local > 0) to the
            block that it lies in.
    """

    padding_mask: Tensor
    token_rows: Tensor
    workspace_positions: Tensor
    document_positions: Tensor
    document_workspace_starts: Tensor
    cu_seqlens: Tensor
    workspace_size: int
    max_seqlen: int
    key_cu_seqlens: Tensor
    max_key_seqlen: int
    csr_rows: Tensor
    lengths: Tensor
    key_lengths: Tensor
    query_rows: Tensor | None
    forced_blocks: tuple[int, int]

    @classmethod
    def from_document_map(
        cls,
        doc_ids: Tensor,
        forced_blocks: tuple[int, int] = (1, 1),
        *,
        device: torch.device | str | None = None,
    ) -> Microbatch:
        """Read the documents off a map of ids.

        Args:
            doc_ids: ``[B, S]`` integer, any device, any strides: 0 is padding, a positive id names a document; an id
                means nothing beyond its row. Each document is one contiguous run of its row.
            forced_blocks: (init, local), see the class; the default forces the first block and the own block.
            device: where the fields go; the device of ``doc_ids`` by default. A map on the CPU costs no
                synchronisation, one on a GPU costs one copy to the host.

        Returns:
            The value; the same object while ``doc_ids`` is the same tensor and has not been written in place.

        Raises:
            ArgumentValueError: (a ValueError) not ``[batch, sequence]``, not an integer tensor, negative ids, no real
                token, an interrupted document, coordinates beyond int32, or unusable ``forced_blocks``.
        """
        forced = _forced_blocks(forced_blocks)
        require_integer(doc_ids, where="doc_ids", ndim=2, axes="[batch, sequence]")
        require_int32(doc_ids.shape[0] * doc_ids.shape[1], where="doc_ids", unit="tokens")
        target = torch.device(doc_ids.device if device is None else device)

        def build() -> Microbatch:
            ids = doc_ids.detach().to("cpu", torch.int64)
            lengths = run_lengths(ids)
            real = ids > 0
            token_rows = real.flatten().nonzero().squeeze(1)
            return _assemble(build_layout(lengths, lengths), ~real, token_rows, forced, target)

        return _MEMO.get(doc_ids, (forced, target), build)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        forced_blocks: tuple[int, int] = (1, 1),
        *,
        key_cu_seqlens: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Microbatch:
        """Read the documents off packed boundaries, as FlashAttention's varlen functions take them.

        Args:
            cu_seqlens: ``[documents + 1]`` integer, tokens: 0, then the end of each document; no empty document.
            forced_blocks: (init, local), see the class; the default forces the first block and the own block.
            key_cu_seqlens: boundaries of the keys, where documents have a prefix of keys that are no queries: the
                queries are the last keys of their document (bottom-right alignment). None: keys are the queries.
            device: where the fields go; the device of ``cu_seqlens`` by default.

        Returns:
            The value; its batch shape is ``[1, T]``. Kept like that of :meth:`from_document_map`.

        Raises:
            ArgumentValueError: (a ValueError) not one-dimensional, not an integer tensor, not starting at 0, an empty
                document, more queries than keys, another number of documents in ``key_cu_seqlens``, coordinates
                beyond int32, or unusable ``forced_blocks``.
        """
        forced = _forced_blocks(forced_blocks)
        require_integer(cu_seqlens, where="cu_seqlens", ndim=1, axes="[documents + 1]")
        target = torch.device(cu_seqlens.device if device is None else device)

        def build() -> Microbatch:
            lengths = segment_lengths(cu_seqlens.detach().cpu(), where="cu_seqlens")
            key_lengths = lengths if key_cu_seqlens is None else _key_lengths(key_cu_seqlens, lengths)
            layout = build_layout(lengths, key_lengths)
            token_rows = torch.arange(int(lengths.sum()))
            return _assemble(layout, torch.zeros(1, token_rows.numel(), dtype=torch.bool), token_rows, forced, target)

        if key_cu_seqlens is not None:
            return build()
        return _MEMO.get(cu_seqlens, (forced, target), build)

    def __repr__(self) -> str:
        shape = list(self.padding_mask.shape)
        return (
            f"Microbatch(batch={shape}, tokens={self.num_tokens}, key_tokens={self.num_key_tokens}, "
            f"documents={self.num_documents}, workspace_size={self.workspace_size}, "
            f"forced_blocks={self.forced_blocks}, device={self.cu_seqlens.device})"
        )

    @property
    def num_tokens(self) -> int:
        """T, the query tokens."""
        tokens: int = self.token_rows.shape[0]  # not int(): that would fix a size that is being traced
        return tokens

    @property
    def num_key_tokens(self) -> int:
        """Tk, the key tokens; T where there is no prefix."""
        tokens: int = self.workspace_positions.shape[0]
        return tokens

    @property
    def num_documents(self) -> int:
        """Documents, over all rows of the batch."""
        documents: int = self.document_workspace_starts.shape[0]
        return documents

    def pack(self, batch: Tensor) -> Tensor:
        """Gather the query tokens of ``batch`` ``[B, S, ...]`` into compact ``[T, ...]``; differentiable.

        Raises:
            StalePlanError: (a ValueError) ``batch`` has another batch or sequence size than this micro-batch.
        """
        shape = self.padding_mask.shape
        if batch.ndim < 2 or batch.shape[0] != shape[0] or batch.shape[1] != shape[1]:
            raise _stale("batch", f"[{shape[0]}, {shape[1]}, ...]", batch)
        return batch.flatten(0, 1).index_select(0, self.token_rows)

    def unpack(self, compact: Tensor) -> Tensor:
        """Scatter compact ``[T, ...]`` into a new ``[B, S, ...]``, zero at padding; differentiable.

        Raises:
            StalePlanError: (a ValueError) ``compact`` has another number of tokens than this micro-batch.
        """
        if compact.ndim < 1 or compact.shape[0] != self.num_tokens:
            raise _stale("compact", f"[{self.num_tokens}, ...]", compact)
        rows, columns = self.padding_mask.shape
        flat = compact.new_zeros((rows * columns, *compact.shape[1:])).index_copy(0, self.token_rows, compact)
        return flat.unflatten(0, (rows, columns))

    def to_workspace(self, keys: Tensor) -> Tensor:
        """Scatter compact keys ``[Tk, ...]`` into a new workspace ``[W, ...]``, zero elsewhere; differentiable.

        Raises:
            StalePlanError: (a ValueError) ``keys`` has another number of tokens than this micro-batch.
        """
        if keys.ndim < 1 or keys.shape[0] != self.num_key_tokens:
            raise _stale("keys", f"[{self.num_key_tokens}, ...]", keys)
        workspace = keys.new_zeros((self.workspace_size, *keys.shape[1:]))
        return workspace.index_copy(0, self.workspace_positions, keys)

    def from_workspace(self, workspace: Tensor) -> Tensor:
        """Gather compact keys ``[Tk, ...]`` out of a workspace ``[W, ...]``; differentiable.

        Raises:
            StalePlanError: (a ValueError) ``workspace`` has another number of rows than this micro-batch.
        """
        if workspace.ndim < 1 or workspace.shape[0] != self.workspace_size:
            raise _stale("workspace", f"[{self.workspace_size}, ...]", workspace)
        return workspace.index_select(0, self.workspace_positions)


_MEMO = TensorMemo()


def _forced_blocks(forced_blocks: tuple[int, int]) -> tuple[int, int]:
    pair: tuple[Any, ...] = tuple(forced_blocks)
    if len(pair) != 2 or any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in pair):
        raise ArgumentValueError(
            "forced_blocks must be two counts of blocks",
            where="forced_blocks",
            expected="(init, local), integers of at least 0",
            got=repr(forced_blocks),
        )
    return pair[0], pair[1]


def _key_lengths(key_cu_seqlens: Tensor, lengths: Tensor) -> Tensor:
    require_integer(key_cu_seqlens, where="key_cu_seqlens", ndim=1, axes="[documents + 1]")
    key_lengths = segment_lengths(key_cu_seqlens.detach().cpu(), where="key_cu_seqlens")
    if key_lengths.numel() != lengths.numel():
        raise ArgumentValueError(
            "key_cu_seqlens has another number of documents",
            where="key_cu_seqlens",
            expected=f"{lengths.numel()} documents, as in cu_seqlens",
            got=f"{key_lengths.numel()} documents",
        )
    return key_lengths


def _assemble(
    layout: DocumentLayout,
    padding_mask: Tensor,
    token_rows: Tensor,
    forced_blocks: tuple[int, int],
    device: torch.device,
) -> Microbatch:
    lengths, key_lengths = layout.cu_seqlens.diff(), layout.key_cu_seqlens.diff()
    square = layout.query_rows is None
    cu_seqlens = layout.cu_seqlens.to(device)
    return Microbatch(
        padding_mask=padding_mask.to(device),
        token_rows=token_rows.to(device),
        workspace_positions=layout.workspace_positions.to(device),
        document_positions=layout.document_positions.to(device),
        document_workspace_starts=layout.document_workspace_starts.to(device),
        cu_seqlens=cu_seqlens,
        workspace_size=layout.workspace_size,
        max_seqlen=int(lengths.max()),
        key_cu_seqlens=cu_seqlens if square else layout.key_cu_seqlens.to(device),
        max_key_seqlen=int(key_lengths.max()),
        csr_rows=layout.csr_rows.to(device),
        lengths=lengths,
        key_lengths=key_lengths,
        query_rows=None if layout.query_rows is None else layout.query_rows.to(device),
        forced_blocks=forced_blocks,
    )


def _stale(where: str, expected: str, tensor: Tensor) -> StalePlanError:
    return StalePlanError(
        f"{where} does not belong to this micro-batch",
        where=where,
        expected=expected,
        got=f"shape {tuple(tensor.shape)}",
        next_command="build the Microbatch from the document map of this batch, and pass that one",
    )


# No field's name may be a prefix of another's: torch.export replaces "microbatch.NAME" in its guards as text, and
# writes guards that do not parse where it also finds the shorter name (torch 2.11 to 2.13).
torch.export.register_dataclass(Microbatch, serialized_type_name="msa_vendored.training.Microbatch")
torch.serialization.add_safe_globals([Microbatch])  # exported programs carry their example inputs
FIELD_NAMES = tuple(field.name for field in fields(Microbatch))
"""Names of the fields, in order."""
