"""Problems for the SM100 main backward kernel: operands, task tables, and float64 gradients. PyTorch only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

BLOCK, DIM = 128, 128
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and the schedules to run it under.

    Attributes:
        lengths: tokens of each document.
        topk: selection width.
        key_heads: key heads.
        ratio: query heads for each.
        selection: ``random`` (own block and random ones before it), ``hot`` (block 0 and nothing else beyond the own
            block), ``sparse`` (any number of blocks, also later ones and none at all).
        grad_scale: standard deviation of dO.
        accumulation: of dQ: ``bf16`` or ``fp32``.
        ctas: of the grid.
        chunk: tasks of a chunk of the walk at most.
        poison: fill of padding rows of K and V.
        bad_lse: (token, head, value) of rows whose lse is replaced.
        seed: of operands and selection.
        schedules: (schedule, seed, checks) of each run.
    """

    lengths: tuple[int, ...]
    topk: int = 4
    key_heads: int = 1
    ratio: int = 16
    selection: str = "random"
    grad_scale: float = 1.0
    accumulation: str = "bf16"
    ctas: int = 2
    chunk: int = 64
    poison: float = math.nan
    bad_lse: tuple[tuple[int, int, float], ...] = ()
    seed: int = 0
    schedules: tuple[tuple[str, int, bool], ...] = (("eager", 0, True),)


@dataclass(slots=True)
class Problem:
    """Operands of the kernel and the float64 gradients. T tokens, W workspace rows."""

    q: torch.Tensor
    grad_out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    meta: torch.Tensor
    query_rows: torch.Tensor
    query_positions: torch.Tensor
    descriptor: torch.Tensor
    cu_seqlens: torch.Tensor
    workspace_starts: torch.Tensor
    expected: tuple[torch.Tensor, ...]


def select_blocks(case: Case, random: torch.Generator) -> list[torch.Tensor]:
    """For each document a bool tensor ``[key_heads, queries, blocks]``."""
    chosen = []
    for length in case.lengths:
        blocks = -(-length // BLOCK)
        own = torch.arange(length)[:, None] // BLOCK
        block = torch.arange(blocks)[None]
        scores = torch.rand((case.key_heads, length, blocks), generator=random)
        if case.selection == "hot":
            mask = ((block == 0) | (block == own)).expand(case.key_heads, -1, -1)
        elif case.selection == "sparse":
            mask = scores > torch.rand((case.key_heads, length, 1), generator=random) ** 0.5
        else:
            scores = scores.masked_fill(block > own, -1).masked_fill(block == own, 2)
            kept = scores.topk(min(case.topk, blocks), dim=2)
            mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, kept.indices, kept.values >= 0)
        chosen.append(mask)
    return chosen


def differentiate(rows: Any, visible: Any, scale: float, dead: Any) -> list[torch.Tensor]:
    """Float64 out, lse, dq, dk, dv of one document and key head; q ``[n, ratio, D]``, k ``[m, D]``."""
    q, k, v, grad_out = rows
    logits = torch.einsum("nhd,md->nhm", q, k) * scale
    logits = logits.masked_fill(~visible[:, None, :], -math.inf)
    lse = logits.logsumexp(dim=2)
    p = (logits - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    out = torch.einsum("nhm,md->nhd", p, v)
    p = p.masked_fill(dead[..., None], 0)
    delta = (out * grad_out).sum(2, keepdim=True)
    ds = p * (torch.einsum("nhd,md->nhm", grad_out, v) - delta) * scale
    dv, dk = torch.einsum("nhm,nhd->md", p, grad_out), torch.einsum("nhm,nhd->md", ds, q)
    return [out, lse, torch.einsum("nhm,md->nhd", ds, k), dk, dv]


def make_problem(case: Case) -> Problem:
    """Random operands, tables of the selection, and the reference."""
    random = torch.Generator().manual_seed(case.seed)
    tokens, heads = sum(case.lengths), case.key_heads * case.ratio
    padded = [-(-n // BLOCK) * BLOCK for n in case.lengths]
    starts = torch.tensor([sum(padded[:i]) for i in range(len(padded))], dtype=torch.int32)
    cu_seqlens = torch.tensor([sum(case.lengths[:i]) for i in range(len(padded) + 1)], dtype=torch.int32)

    def normal(length: int, count: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn((length, count, DIM), generator=random) * scale).bfloat16()

    q, grad_out = normal(tokens, heads), normal(tokens, heads, case.grad_scale)
    k, v = normal(sum(padded), case.key_heads), normal(sum(padded), case.key_heads)
    masks = select_blocks(case, random)
    out, lse, *expected = differentiate_all(case, (q, k, v, grad_out), masks, starts.tolist())
    lse = lse.float()
    for token, head, value in case.bad_lse:
        lse[token, head] = value
    delta = (out.bfloat16().float() * grad_out.float()).sum(2)
    tables = build_tables(case, masks, starts, cu_seqlens)
    walk = plan_walk(tables[0].shape[0], case.ctas, case.chunk)
    problem = Problem(q, grad_out, k, v, lse, delta, *tables, walk, cu_seqlens, starts, tuple(expected))
    live = live_rows(problem)
    k[~live], v[~live] = case.poison, case.poison
    return problem


def differentiate_all(case: Case, operands: Any, masks: Any, starts: list[int]) -> list[torch.Tensor]:
    """Float64 out, lse, dq, dk, dv of all documents; rows of a bad lse give no gradients."""
    q, k, v, grad_out = (x.double() for x in operands)
    out, lse, dq = torch.zeros_like(q), q.new_zeros(q.shape[:2]), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(k)
    dead = torch.zeros(q.shape[:2], dtype=torch.bool)
    for token, bad_head, _ in case.bad_lse:
        dead[token, bad_head] = True
    first = 0
    for length, start, mask in zip(case.lengths, starts, masks, strict=True):
        queries, keys = slice(first, first + length), slice(start, start + length)
        causal = torch.arange(length)[:, None] >= torch.arange(length)[None]
        for head in range(case.key_heads):
            group = slice(head * case.ratio, (head + 1) * case.ratio)
            visible = mask[head].repeat_interleave(BLOCK, dim=1)[:, :length] & causal
            rows = (q[queries, group], k[keys, head], v[keys, head], grad_out[queries, group])
            got = differentiate(rows, visible, DIM**-0.5, dead[queries, group])
            out[queries, group], lse[queries, group], dq[queries, group] = got[:3]
            dk[keys, head], dv[keys, head] = got[3:]
        first += length
    return [out, lse, dq, dk, dv]


def build_tables(
    case: Case, masks: Any, starts: Any, cu_seqlens: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tasks in the order (key head, window of 512 query rows, key block, first query)."""
    slots, tasks = 128 // case.ratio, []
    for document, mask in enumerate(masks):
        start, first = int(starts[document]), int(cu_seqlens[document])
        for head in range(case.key_heads):
            for block in range(mask.shape[2]):
                queries = mask[head, :, block].nonzero()[:, 0].tolist()
                for begin in range(0, len(queries), slots):
                    part = queries[begin : begin + slots]
                    kblock = start // BLOCK + block
                    key = (head, (first + part[0]) // WINDOW, kblock, part[0])
                    tasks.append((key, document, head, kblock, first, start, part))
    tasks.sort(key=lambda task: task[0])
    meta = torch.tensor([[d, h, b, len(p)] for _, d, h, b, _, _, p in tasks], dtype=torch.int32).view(-1, 4)
    rows, positions = (torch.full((len(tasks), slots), -1, dtype=torch.int32) for _ in range(2))
    for i, (_, _, _, _, first, start, part) in enumerate(tasks):
        rows[i, : len(part)] = torch.tensor(part) + first
        positions[i, : len(part)] = torch.tensor(part) + start
    return meta, rows, positions


def plan_walk(tasks: int, ctas: int, chunk: int) -> torch.Tensor:
    """Equal chunks of at most ``chunk`` tasks, as many for each CTA."""
    chunks = min(tasks, max(1, -(-tasks // (ctas * chunk))) * ctas)
    tail, full = divmod(tasks, chunks) if chunks else (1, 0)
    return torch.tensor([tasks, tail + 1, full, tail, chunks, 0, tasks, 0], dtype=torch.int32)


def live_rows(p: Problem) -> torch.Tensor:
    """Bool ``[W]``: the rows of k and v that belong to a document."""
    live = torch.zeros(p.k.shape[0], dtype=torch.bool)
    for start, length in zip(p.workspace_starts.tolist(), p.cu_seqlens.diff().tolist(), strict=True):
        live[start : start + length] = True
    return live


def reached_rows(problem: Problem, name: str) -> torch.Tensor:
    """Bool ``[rows, heads]``: the rows of dq, dk or dv that some task can reach."""
    expected = problem.expected[("dq", "dk", "dv").index(name)]
    reached = torch.zeros(expected.shape[:2], dtype=torch.bool)
    ratio = problem.q.shape[1] // problem.k.shape[1]
    for (document, head, block, _), rows in zip(problem.meta.tolist(), problem.query_rows, strict=True):
        if name == "dq":
            reached[rows[rows >= 0].long(), head * ratio : (head + 1) * ratio] = True
            continue
        length = int(problem.cu_seqlens[document + 1] - problem.cu_seqlens[document])
        end = int(problem.workspace_starts[document]) + length
        reached[block * BLOCK : min(block * BLOCK + BLOCK, end), head] = True
    return reached


def count_segments(problem: Problem, ctas: int) -> int:
    """Runs of tasks of one key head and block, over the CTAs' walks."""
    tasks, size, full, tail, chunks = problem.descriptor[:5].tolist()
    total = 0
    for cta in range(ctas):
        walk: list[int] = []
        for chunk in range(cta, chunks, ctas):
            begin = chunk * size if chunk < full else full * size + (chunk - full) * tail
            walk += range(begin, min(begin + (size if chunk < full else tail), tasks))
        keys = [tuple(problem.meta[task, 1:3].tolist()) for task in walk]
        total += sum(i == 0 or keys[i] != keys[i - 1] for i in range(len(keys)))
    return total


DOCUMENTS = (127, 129, 1, 2, 3, 5, 128)
EVERY = (("eager", 0, True), ("lazy", 0, True), *(("random", seed, True) for seed in range(1, 5)))
LARGE = (
    Case(DOCUMENTS * 2, topk=16, key_heads=4, ctas=5, chunk=16, schedules=EVERY),
    Case(DOCUMENTS, key_heads=2, selection="sparse", ctas=1, schedules=EVERY),
    Case((600,), topk=4, ctas=1, schedules=EVERY),
    Case((513, 260), selection="hot", ctas=3, chunk=8, schedules=EVERY),
    *(Case((300, 129), ratio=ratio, key_heads=2, ctas=1, schedules=EVERY) for ratio in (8, 4, 2, 1)),
    *(Case((300, 129), ratio=ratio, accumulation="fp32", ctas=2, schedules=EVERY[::4]) for ratio in (16, 8, 4, 2, 1)),
    *(Case((300, 129), grad_scale=scale, ctas=1, schedules=EVERY[::4]) for scale in (1e-30, 1e-6, 1e4, 1e30)),
    Case((1000,), topk=16, ctas=4, schedules=EVERY[:1]),
    Case((1000,), topk=16, ctas=4, accumulation="fp32", schedules=EVERY[:1]),
    Case((2304,), topk=16, ctas=8, schedules=EVERY[::4]),
    Case((2304,), topk=16, ctas=8, accumulation="fp32", schedules=EVERY[:1]),
)
"""What is too slow for every commit: ``python -m sm100_backward sm_100a large``."""
