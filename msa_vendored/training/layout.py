"""Host-side arithmetic of packed documents: runs of a document map, lengths, 128-aligned workspace rows.

Everything here runs on CPU tensors, once per micro-batch, after the one copy from the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from msa_vendored.training.errors import ArgumentValueError

BLOCK_SIZE = 128
"""Keys per block, in tokens; the only size that the launchers have."""

INT32_MAX = 2**31 - 1
"""The launchers address tokens and workspace rows with int32."""

_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentLayout:
    """Coordinates of packed documents, on the CPU; :class:`~msa_vendored.training.Microbatch` has the field docs.

    Attributes:
        cu_seqlens: ``[documents + 1]`` int32, tokens: where each document's queries start in the compact order.
        key_cu_seqlens: ``[documents + 1]`` int32, tokens: the same for keys.
        document_positions: ``[T]`` int64, tokens: position of each query among its document's keys.
        workspace_positions: ``[Tk]`` int64: workspace row of each key.
        document_workspace_starts: ``[documents]`` int32: workspace row at which each document starts.
        csr_rows: ``[rows, 2]`` int32: document and document-local key block of each CSR row.
        query_rows: ``[T]`` int64: compact key row that each query is aligned with; None if they are all the same.
        workspace_size: rows of the workspace, a multiple of 128.
    """

    cu_seqlens: Tensor
    key_cu_seqlens: Tensor
    document_positions: Tensor
    workspace_positions: Tensor
    document_workspace_starts: Tensor
    csr_rows: Tensor
    query_rows: Tensor | None
    workspace_size: int


def require_integer(tensor: Tensor, *, where: str, ndim: int, axes: str) -> None:
    """Refuse a tensor that is not an integer tensor of ``ndim`` axes.

    Raises:
        ArgumentValueError: another number of axes, or a dtype that is not an integer one (bool included).
    """
    if tensor.ndim != ndim:
        raise ArgumentValueError(
            f"{where} has {tensor.ndim} axes",
            where=where,
            expected=f"a {axes} tensor",
            got=f"shape {tuple(tensor.shape)}",
        )
    if tensor.dtype not in _INTEGER_DTYPES:
        raise ArgumentValueError(
            f"{where} must be an integer tensor",
            where=where,
            expected="int32 or int64",
            got=str(tensor.dtype),
        )


def require_int32(count: int, *, where: str, unit: str) -> None:
    """Refuse a coordinate that int32 cannot hold.

    Raises:
        ArgumentValueError: ``count`` exceeds 2**31 - 1.
    """
    if count > INT32_MAX:
        raise ArgumentValueError(
            f"{where} needs coordinates beyond int32",
            where=where,
            expected=f"at most {INT32_MAX} {unit}",
            got=f"{count} {unit}",
            next_command="split the micro-batch",
        )


def run_lengths(ids: Tensor) -> Tensor:
    """Lengths of the documents of a ``[B, S]`` int64 CPU map, row by row, left to right.

    Args:
        ids: document of each token: 0 is padding, positive numbers name documents within their row.

    Returns:
        ``[documents]`` int64, tokens.

    Raises:
        ArgumentValueError: negative ids, no real token, or a document whose tokens are interrupted within a row.
    """
    if bool((ids < 0).any()):
        row, column = (ids < 0).nonzero()[0].tolist()
        raise ArgumentValueError(
            "doc_ids holds a negative document id",
            where=f"doc_ids[{row}, {column}]",
            expected="0 for padding, a positive id for a document",
            got=str(int(ids[row, column])),
        )
    real = ids > 0
    if not bool(real.any()):
        raise ArgumentValueError(
            "doc_ids holds no real token",
            where="doc_ids",
            expected="at least one positive id",
            got=f"only padding, shape {tuple(ids.shape)}",
        )
    starts = real.clone()
    starts[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    _require_one_run_per_document(ids, starts)
    return torch.bincount((starts.flatten().cumsum(0) - 1)[real.flatten()])


def _require_one_run_per_document(ids: Tensor, starts: Tensor) -> None:
    rows, columns = starts.nonzero(as_tuple=True)
    runs = torch.stack([rows, ids[rows, columns]], dim=1)
    unique, counts = torch.unique(runs, dim=0, return_counts=True)
    if unique.shape[0] == runs.shape[0]:
        return
    row, document = unique[counts > 1][0].tolist()
    at = columns[(rows == row) & (ids[rows, columns] == document)].tolist()
    raise ArgumentValueError(
        f"doc_ids interrupts document {document}",
        where=f"doc_ids[{row}]",
        expected="one contiguous run of tokens per document and row",
        got=f"runs starting at columns {at}",
    )


def segment_lengths(cu_seqlens: Tensor, *, where: str) -> Tensor:
    """Lengths between the boundaries of a ``[documents + 1]`` integer CPU tensor.

    Returns:
        ``[documents]`` int64, tokens.

    Raises:
        ArgumentValueError: fewer than two boundaries, a first one that is not 0, or an empty document.
    """
    bounds = cu_seqlens.to(torch.int64)
    if bounds.numel() < 2:
        raise ArgumentValueError(
            f"{where} holds no document",
            where=where,
            expected="a leading 0 and one boundary per document",
            got=f"{bounds.numel()} boundaries",
        )
    if int(bounds[0]) != 0:
        raise ArgumentValueError(f"{where} must start at 0", where=f"{where}[0]", expected="0", got=str(int(bounds[0])))
    lengths = bounds.diff()
    if bool((lengths <= 0).any()):
        document = int((lengths <= 0).nonzero()[0, 0])
        raise ArgumentValueError(
            f"{where} has an empty document",
            where=f"{where}[{document}:{document + 2}]",
            expected="strictly increasing boundaries",
            got=str(bounds[document : document + 2].tolist()),
        )
    return lengths


def build_layout(lengths: Tensor, key_lengths: Tensor) -> DocumentLayout:
    """Coordinates of documents of ``lengths`` query tokens and ``key_lengths`` key tokens.

    Args:
        lengths: ``[documents]`` int64 CPU, tokens, all positive.
        key_lengths: the same for keys; a document's queries are its last keys (bottom-right alignment).

    Raises:
        ArgumentValueError: int32 cannot address the tokens or the workspace, or a document has more queries than keys.
    """
    require_int32(int(key_lengths.sum()), where="cu_seqlens", unit="tokens")
    if bool((lengths > key_lengths).any()):
        document = int((lengths > key_lengths).nonzero()[0, 0])
        raise ArgumentValueError(
            f"document {document} has more queries than keys",
            where="key_cu_seqlens",
            expected=f"at least {int(lengths[document])} keys",
            got=f"{int(key_lengths[document])} keys",
        )
    blocks = (key_lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    workspace_size = int(blocks.sum()) * BLOCK_SIZE
    require_int32(workspace_size, where="the 128-aligned workspace", unit="rows")
    starts = (blocks.cumsum(0) - blocks) * BLOCK_SIZE
    cu, cu_k = _prefix_sums(lengths), _prefix_sums(key_lengths)
    positions = _local_positions(lengths, cu) + (key_lengths - lengths).repeat_interleave(lengths)
    workspace = _local_positions(key_lengths, cu_k) + starts.repeat_interleave(key_lengths)
    square = bool((lengths == key_lengths).all())
    query_rows = None if square else positions + cu_k[:-1].repeat_interleave(lengths)
    return DocumentLayout(
        cu_seqlens=cu.to(torch.int32),
        key_cu_seqlens=cu_k.to(torch.int32),
        document_positions=positions,
        workspace_positions=workspace,
        document_workspace_starts=starts.to(torch.int32),
        csr_rows=_csr_rows(blocks),
        query_rows=query_rows,
        workspace_size=workspace_size,
    )


def _prefix_sums(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _local_positions(lengths: Tensor, cu: Tensor) -> Tensor:
    return torch.arange(int(cu[-1])) - cu[:-1].repeat_interleave(lengths)


def _csr_rows(blocks: Tensor) -> Tensor:
    # The official builder numbers rows level by level: block 0 of every document, then block 1 of every document
    # that has one, and so on. A stable sort of the (document, block) pairs by block is that order.
    documents = torch.arange(blocks.numel()).repeat_interleave(blocks)
    local = _local_positions(blocks, _prefix_sums(blocks))
    order = local.argsort(stable=True)
    return torch.stack([documents[order], local[order]], dim=1).to(torch.int32)


V = TypeVar("V")


class TensorMemo(Generic[V]):
    """Values derived from a tensor, kept while that tensor object lives and until it is written in place.

    Keyed by identity, ``_version`` and ``extra``; entries of older versions are dropped at the next look-up. Values
    must not refer to the tensor strongly. Inference tensors have no version, so their values are not kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a garbage collection inside may run _forget on this thread
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, V]]] = {}

    def get(self, tensor: Tensor, extra: Hashable, build: Callable[[], V]) -> V:
        """The value for ``tensor`` as it is now, built by ``build`` if there is none yet."""
        if tensor.is_inference():
            return build()
        with self._lock:
            values = self._values(tensor)
            if extra not in values:
                values[extra] = build()
            return values[extra]

    def _values(self, tensor: Tensor) -> dict[Hashable, V]:
        key, version = id(tensor), tensor._version
        entry = self._entries.get(key)
        if entry is None or entry[0]() is not tensor or entry[1] != version:
            entry = (weakref.ref(tensor, lambda ref: self._forget(key, ref)), version, {})
            self._entries[key] = entry
        return entry[2]

    def _forget(self, key: int, ref: weakref.ref[Tensor]) -> None:
        with self._lock:
            if key in self._entries and self._entries[key][0] is ref:
                del self._entries[key]
