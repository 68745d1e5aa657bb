"""Work items cut into batches of equal shape.

The engines never loop over tokens or key blocks in Python. They loop over batches of *tiles*: a tile is a run of
queries of one (index head, key block), and a batch pads its tiles to one length under a fixed budget of elements.
All index arithmetic is int64: token x head x dim leaves int32 at 262,144 tokens of 64 heads of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from msa_vendored.backward.documents import BLOCK_SIZE, Documents
from msa_vendored.backward.worklist import Worklist

MAX_TILE_QUERIES = 256
"""Longest tile. With 16 heads per index head and 128 keys one tile has 2**19 logits, well below the budget."""

ELEMENT_BUDGET = 1 << 23
"""Elements of the largest temporary of a batch: 32 MiB in float32, of which an engine holds about six."""


@dataclass(frozen=True, slots=True, eq=False)
class TileBatch:
    """``n`` tiles padded to ``m`` queries. Padding repeats the last query of its tile and sees no key.

    Attributes:
        index_head: ``[n]``.
        edges: ``[n, m]``, positions in the flattened ``q_indices``.
        query_live: ``[n, m]`` bool, False for padding.
        query_rows: ``[n, m]``, token x index heads + index head.
        first_key_row: ``[n]``, row of the first key of the block.
        key_live: ``[n, block]`` bool, False past the end of the document.
        visible: ``[n, m, block]`` bool, which keys a query may attend to.
    """

    index_head: torch.Tensor
    edges: torch.Tensor
    query_live: torch.Tensor
    query_rows: torch.Tensor
    first_key_row: torch.Tensor
    key_live: torch.Tensor
    visible: torch.Tensor


def split_items(worklist: Worklist, max_queries: int) -> Worklist:
    """Items of at most ``max_queries`` edges, longest first so that a batch wastes little on padding."""
    pieces = -(-worklist.edge_count // max_queries)
    items = torch.arange(pieces.shape[0], device=pieces.device)
    owner = torch.repeat_interleave(items, pieces)
    piece = torch.arange(owner.shape[0], device=owner.device) - (pieces.cumsum(0) - pieces)[owner]
    source = worklist.select(owner)
    offset = piece * max_queries
    count = torch.minimum(source.edge_count - offset, torch.full_like(offset, max_queries))
    cut = Worklist(source.index_head, source.document, source.key_block, source.edge_start + offset, count)
    return cut.select(torch.sort(count, descending=True, stable=True).indices)


@dataclass(frozen=True, slots=True)
class TileShape:
    """What the batching needs to know of the problem.

    Attributes:
        heads_per_index_head: query heads that share a selection, the GQA ratio.
        head_dim: elements per head.
        causal: whether a query sees only keys up to its own position, aligned at the end of the document.
        block_size: keys per block.
        element_budget: elements of the largest temporary of a batch.
    """

    heads_per_index_head: int
    head_dim: int
    causal: bool
    block_size: int = BLOCK_SIZE
    element_budget: int = ELEMENT_BUDGET

    def tiles_per_batch(self, queries: int) -> int:
        """Number of tiles of ``queries`` queries that fit the budget, at least one."""
        width = max(self.block_size, self.head_dim)
        elements = queries * self.heads_per_index_head * width + self.block_size * self.head_dim
        return max(1, self.element_budget // elements)


def iter_batches(
    worklist: Worklist, q_indices: torch.Tensor, documents: Documents, shape: TileShape
) -> Iterator[TileBatch]:
    """Yields all edges of a flattened worklist once, in batches; one device synchronisation for the whole list."""
    per_tile = shape.element_budget // (shape.heads_per_index_head * max(shape.block_size, shape.head_dim))
    tiles = split_items(worklist, max(1, min(MAX_TILE_QUERIES, per_tile)))
    counts = tiles.edge_count.tolist()
    queries = q_indices.reshape(-1)
    start = 0
    while start < len(counts):
        stop = start + shape.tiles_per_batch(counts[start])
        yield _make_batch(
            tiles.select(slice(start, stop)), counts[start], queries, q_indices.shape[0], documents, shape
        )
        start = stop


def _make_batch(
    tiles: Worklist, width: int, queries: torch.Tensor, heads: int, documents: Documents, shape: TileShape
) -> TileBatch:
    device = queries.device
    step = torch.arange(width, device=device)
    last = tiles.edge_count[:, None] - 1
    edges = tiles.edge_start[:, None] + torch.minimum(step, last)
    query_live = step <= last
    query = queries[edges].long()
    document = tiles.document
    key_position = tiles.key_block[:, None] * shape.block_size + torch.arange(shape.block_size, device=device)
    key_live = key_position < documents.key_count[document][:, None]
    visible = key_live[:, None, :] & query_live[:, :, None]
    if shape.causal:
        prefix = (documents.key_count - documents.query_count)[document]
        visible = visible & ((query + prefix[:, None])[:, :, None] >= key_position[:, None, :])
    return TileBatch(
        index_head=tiles.index_head,
        edges=edges,
        query_live=query_live,
        query_rows=(documents.query_start[document][:, None] + query) * heads + tiles.index_head[:, None],
        first_key_row=documents.key_start[document] + tiles.key_block * shape.block_size,
        key_live=key_live,
        visible=visible,
    )
