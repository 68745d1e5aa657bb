"""Random and corrupted backward schedules for the tests of the task tables. No test tool beyond NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

KEYS_PER_BLOCK = 128
FIELDS = ("row_ptr", "q_indices", "scheduler_metadata", "work_count", "cu_seqlens", "document_workspace_starts")


@dataclass(frozen=True, slots=True, eq=False)
class TaskCase:
    """The fields of a backward schedule (int32 CPU tensors), and the sizes that go with it."""

    row_ptr: torch.Tensor
    q_indices: torch.Tensor
    scheduler_metadata: torch.Tensor
    work_count: torch.Tensor
    cu_seqlens: torch.Tensor
    document_workspace_starts: torch.Tensor
    tokens: int
    workspace_rows: int

    def to(self, device: str) -> TaskCase:
        return replace(self, **{name: getattr(self, name).to(device) for name in FIELDS})


def make_task_case(
    documents: Sequence[int],
    *,
    heads: int = 4,
    topk: int = 4,
    seed: int = 0,
    edges_per_item: int = 24,
    gap_blocks: int = 0,
    spare_edges: int = 5,
    spare_items: int = 3,
    hot_block: bool = False,
) -> TaskCase:
    """A schedule of causal random selections, with the items of all rows shuffled and cut at random.

    Args:
        documents: lengths in tokens.
        heads: index heads.
        topk: blocks per query, its own among them; fewer where the document has fewer.
        seed: of everything random.
        edges_per_item: most edges of one work item.
        gap_blocks: unused key blocks before each document in the workspace.
        spare_edges: entries of ``q_indices`` beyond the last edge, poisoned.
        spare_items: entries of the metadata beyond ``work_count``, poisoned.
        hot_block: every query also selects block 0.
    """
    random = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(documents)])
    blocks = -(-np.asarray(documents) // KEYS_PER_BLOCK)
    starts = (np.concatenate([[0], np.cumsum(blocks + gap_blocks)[:-1]]) + gap_blocks) * KEYS_PER_BLOCK
    row_document = np.repeat(np.arange(len(documents)), blocks)
    row_block = np.concatenate([np.arange(n) for n in blocks])
    per_head = [_head_rows(documents, topk, hot_block, random) for _ in range(heads)]
    width = max(sum(map(len, rows)) for rows in per_head) + spare_edges
    q_indices = np.full((heads, width), -(1 << 30), np.int64)
    row_ptr = np.zeros((heads, len(row_block) + 1), np.int64)
    items = []
    for head, rows in enumerate(per_head):
        row_ptr[head, 1:] = np.cumsum([len(row) for row in rows])
        q_indices[head, : row_ptr[head, -1]] = np.concatenate(rows)
        for row, queries in enumerate(rows):
            begin = 0
            while begin < len(queries):
                count = min(int(random.integers(1, edges_per_item + 1)), len(queries) - begin)
                items.append((head, row, begin, count, row_document[row], row_block[row]))
                begin += count
    metadata = np.full((len(items) + spare_items, 6), 1 << 30, np.int64)
    metadata[: len(items)] = np.asarray(items)[random.permutation(len(items))]
    arrays = (row_ptr, q_indices, metadata, np.array([len(items)]), cu, starts)
    named = {name: torch.from_numpy(array.astype(np.int32)) for name, array in zip(FIELDS, arrays, strict=True)}
    workspace_rows = int(starts[-1] + (blocks[-1] + gap_blocks) * KEYS_PER_BLOCK)
    return TaskCase(**named, tokens=int(cu[-1]), workspace_rows=workspace_rows)


def _head_rows(documents: Sequence[int], topk: int, hot_block: bool, random: np.random.Generator) -> list[np.ndarray]:
    """Queries of each row of one head, ascending."""
    rows = []
    for length in documents:
        own = np.arange(length) // KEYS_PER_BLOCK
        count = int(own[-1]) + 1
        scores = random.random((length, count))
        scores[np.arange(count)[None] > own[:, None]] = -1
        scores[np.arange(length), own] = 2
        if hot_block:
            scores[:, 0] = 3
        chosen = np.argsort(-scores, axis=1)[:, :topk]
        selected = np.zeros((length, count), bool)
        np.put_along_axis(selected, chosen, True, axis=1)
        selected &= scores >= 0
        rows += [np.flatnonzero(selected[:, block]) for block in range(count)]
    return rows


def edit(case: TaskCase, name: str, position: tuple[int, ...], value: int) -> TaskCase:
    """The case with one element of one field replaced."""
    tensor = getattr(case, name).clone()
    tensor[position] = value
    return replace(case, **{name: tensor})


def repeat_items(case: TaskCase, times: int) -> TaskCase:
    """Every work item listed ``times`` times."""
    count = int(case.work_count)
    items = case.scheduler_metadata[:count].repeat(times, 1)
    return replace(case, scheduler_metadata=items, work_count=case.work_count * times)


def drop_item(case: TaskCase, item: int) -> TaskCase:
    """One work item less: the last takes its place."""
    count = int(case.work_count)
    items = case.scheduler_metadata.clone()
    items[item] = items[count - 1]
    return replace(case, scheduler_metadata=items, work_count=case.work_count - 1)


Corruption = tuple[str, int, Callable[[TaskCase], TaskCase]]


def corruptions(case: TaskCase) -> list[Corruption]:
    """Inconsistent variants of ``case``: a name, the error bit it must raise, and the edit."""
    big = (1 << 31) - 1
    head, row, begin, count, document, block = (int(v) for v in case.scheduler_metadata[0])
    first = int(case.row_ptr[head, row])
    edges = int(case.row_ptr[head, row + 1]) - first
    meta = "scheduler_metadata"
    columns = [(0, "head"), (1, "row"), (2, "begin"), (3, "count"), (4, "document"), (5, "block")]
    found: list[Corruption] = [
        (f"{name} {value}", 8, lambda c, column=column, value=value: edit(c, meta, (0, column), value))  # type: ignore[misc]
        for column, name in columns
        for value in (-1, big)
    ]
    del begin, count, document, block
    found += [
        ("repeated items", 16, lambda c: repeat_items(c, 2)),
        ("missing item", 16, lambda c: drop_item(c, 0)),
        ("work count negative", 4, lambda c: edit(c, "work_count", (0,), -5)),
        ("work count beyond the list", 4, lambda c: edit(c, "work_count", (0,), 1_000_000)),
        ("query outside its document", 32, lambda c: edit(c, "q_indices", (head, first + edges - 1), big)),
        ("query negative", 32, lambda c: edit(c, "q_indices", (head, first), -1)),
        ("row pointer falls", 16, lambda c: edit(c, "row_ptr", (head, row + 1), -7)),
        ("row pointer beyond the edges", 16, lambda c: edit(c, "row_ptr", (head, row + 1), big)),
        ("document beyond the workspace", 8, lambda c: edit(c, "document_workspace_starts", (0,), c.workspace_rows)),
        ("document at an odd row", 8, lambda c: edit(c, "document_workspace_starts", (0,), 64)),
        ("document of no token", 8, lambda c: edit(c, "cu_seqlens", (1,), 0)),
        ("document beyond the tokens", 8, lambda c: edit(c, "cu_seqlens", (-1,), c.tokens + 1)),
    ]
    if edges > 1:
        swapped = "q_indices", (head, first + 1), int(case.q_indices[head, first])
        found.append(("query twice", 32, lambda c: edit(c, *swapped)))
    if case.cu_seqlens.shape[0] > 2:
        start = int(case.document_workspace_starts[0])
        found.append(("two documents in one place", 16, lambda c: edit(c, "document_workspace_starts", (1,), start)))
    return found


def make_large_case(tokens: int, topk: int, *, heads: int = 4, seed: int = 0, device: str = "cpu") -> TaskCase:
    """One document of ``tokens`` tokens, made with torch on ``device``: causal, own block, others at random.

    Items are cut at 512 edges, in row order; shapes depend on nothing but ``tokens``, ``topk`` and ``heads``.
    """
    random = torch.Generator(device).manual_seed(seed)
    blocks = -(-tokens // KEYS_PER_BLOCK)
    own = torch.arange(tokens, device=device) // KEYS_PER_BLOCK
    row_ptr = torch.zeros((heads, blocks + 1), dtype=torch.int32, device=device)
    q_indices = torch.full((heads, tokens * topk), -1, dtype=torch.int32, device=device)
    for head in range(heads):
        scores = torch.rand((tokens, blocks), generator=random, device=device)
        scores.masked_fill_(torch.arange(blocks, device=device)[None] > own[:, None], -1)
        scores.scatter_(1, own[:, None], 2)
        best, chosen = scores.topk(min(topk, blocks), dim=1)
        key = (chosen * tokens + torch.arange(tokens, device=device)[:, None])[best >= 0].sort().values
        row_ptr[head, 1:] = torch.bincount(key // tokens, minlength=blocks).cumsum(0)
        q_indices[head, : key.shape[0]] = (key % tokens).int()
    counts = row_ptr.diff(dim=1).flatten().long()
    pieces = (counts + 511) // 512
    capacity = heads * blocks + heads * tokens * topk // 512
    items = torch.arange(capacity, device=device)
    owner = torch.searchsorted(pieces.cumsum(0), items, right=True).clamp(max=counts.shape[0] - 1)
    begin = (items - (pieces.cumsum(0) - pieces)[owner]) * 512
    row = owner % blocks
    columns = (owner // blocks, row, begin, (counts[owner] - begin).clamp(max=512), torch.zeros_like(row), row)
    vector = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    metadata, count = torch.stack(columns, 1).int().contiguous(), pieces.sum()[None].int()
    return TaskCase(row_ptr, q_indices, metadata, count, vector, vector[:1], tokens, blocks * KEYS_PER_BLOCK)
