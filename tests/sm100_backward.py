"""Runs the SM100 main backward kernel in the emulator: ``python -m sm100_backward`` reads cases as JSON lines.

One process compiles for one architecture, and the DSL must not be imported before :func:`cute_host.prepare`, so that
tests start this as a subprocess. One JSON line is printed for each run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from ptx_emulator import cute_host
from ptx_emulator.launch import Options
from ptx_emulator.report import Report

BLOCK, DIM = 128, 128


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
        accumulation: of dQ.
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
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Result:
    """What one run gave, against the float64 reference."""

    schedule: str
    seed: int
    errors: dict[str, float]
    """Relative Frobenius error of dq, dk, dv."""
    largest: dict[str, float]
    nans: int
    stray: int
    """Nonzero values where the gradient is exactly zero: rows outside documents, blocks and queries without edges."""
    tasks: int
    segments: int
    instructions: int
    seconds: float
    findings: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


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


def differentiate(q: Any, k: Any, v: Any, grad_out: Any, visible: Any, scale: float, dead: Any) -> list[torch.Tensor]:
    """Float64 out, lse, dq, dk, dv of one document and key head; q ``[n, ratio, D]``, k ``[m, D]``."""
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
    rows, scale = sum(padded), DIM**-0.5

    def normal(length: int, count: int) -> torch.Tensor:
        return torch.randn((length, count, DIM), generator=random).bfloat16()

    q, k, v = normal(tokens, heads), normal(rows, case.key_heads), normal(rows, case.key_heads)
    grad_out = (torch.randn((tokens, heads, DIM), generator=random) * case.grad_scale).bfloat16()
    out, lse = torch.zeros(tokens, heads, DIM).double(), torch.zeros(tokens, heads).double()
    dq, dk, dv = out.clone(), torch.zeros(rows, case.key_heads, DIM).double(), None
    dv = dk.clone()
    dead = torch.zeros(tokens, heads, dtype=torch.bool)
    for token, head, _ in case.bad_lse:
        dead[token, head] = True
    first = 0
    masks = select_blocks(case, random)
    for length, start, mask in zip(case.lengths, starts.tolist(), masks, strict=True):
        token, key = slice(first, first + length), slice(start, start + length)
        causal = torch.arange(length)[:, None] >= torch.arange(length)[None]
        for head in range(case.key_heads):
            group = slice(head * case.ratio, (head + 1) * case.ratio)
            visible = mask[head].repeat_interleave(BLOCK, dim=1)[:, :length] & causal
            operands = (q[token, group], k[key, head], v[key, head], grad_out[token, group])
            got = differentiate(*(x.double() for x in operands), visible, scale, dead[token, group])
            out[token, group], lse[token, group], dq[token, group] = got[:3]
            dk[key, head], dv[key, head] = got[3:]
        first += length
    lse32 = lse.float()
    for token, head, value in case.bad_lse:
        lse32[token, head] = value
    live = torch.zeros(rows, dtype=torch.bool)
    for length, start in zip(case.lengths, starts.tolist(), strict=True):
        live[start : start + length] = True
    k[~live], v[~live] = case.poison, case.poison
    delta = (out.bfloat16().float() * grad_out.float()).sum(2)
    cu_seqlens = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)
    tables = build_tables(case, masks, starts, cu_seqlens)
    descriptor = plan_walk(tables[0].shape[0], case.ctas, case.chunk)
    return Problem(q, grad_out, k, v, lse32, delta, *tables, descriptor, cu_seqlens, starts, (dq, dk, dv))


def build_tables(case: Case, masks: Any, starts: Any, cu_seqlens: Any) -> tuple[torch.Tensor, ...]:
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
                    key = (head, (first + part[0]) // 512, kblock, part[0])
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


@lru_cache
def compile_kernel(ratio: int, accumulation: str) -> Any:
    """The compiled kernel; one call of :func:`cute_host.prepare` must have come before."""
    from msa_vendored.backward.main_sm100 import compile_main

    arch = os.environ["CUTE_DSL_ARCH"]  # set by prepare()
    return cute_host.CompiledFunction(compile_main(arch=arch, ratio=ratio, dq_accumulation=accumulation))


def read_accumulators(case: Case, pool: torch.Tensor, dkv: torch.Tensor) -> list[torch.Tensor]:
    """dq, dk, dv from the layouts that ``sm100_layout`` documents, rounded to bf16 as the results are, in float64."""
    from msa_vendored.backward.sm100_layout import head_group

    group = head_group(case.ratio, pool.element_size())
    heads = case.key_heads * case.ratio
    dq = pool.double().view(-1, heads // group, DIM, group).transpose(2, 3).reshape(-1, heads, DIM)
    blocks = dkv.double().view(2, -1, case.key_heads, DIM // 4, BLOCK, 4)
    dk, dv = blocks.permute(0, 1, 4, 2, 3, 5).reshape(2, -1, case.key_heads, DIM)
    return [x.bfloat16().double() for x in (dq, dk, dv)]


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


def launch(case: Case, problem: Problem, options: Options, report: Report) -> tuple[torch.Tensor, torch.Tensor]:
    """The accumulators after one launch."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.accumulation]
    p = problem
    pool, dkv = torch.zeros(p.q.numel(), dtype=dtype), torch.zeros(2 * p.k.numel())
    arguments = (p.q, p.grad_out, p.k, p.v, p.lse, p.delta, p.meta, p.query_rows, p.query_positions, p.descriptor)
    arguments += (p.cu_seqlens, p.workspace_starts, pool, dkv, DIM**-0.5, case.ctas)
    compile_kernel(case.ratio, case.accumulation).run(arguments, options, report)
    return pool, dkv


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


def run(case: Case, problem: Problem, schedule: str, seed: int, checked: bool) -> Result:
    """One run of the kernel."""
    p, report, started = problem, Report(), time.perf_counter()
    options = Options(schedule, seed, Options().checks if checked else frozenset())
    pool, dkv = launch(case, problem, options, report)
    seconds = time.perf_counter() - started
    got = read_accumulators(case, pool, dkv)
    errors, largest, stray = {}, {}, 0
    for name, a, b in zip(("dq", "dk", "dv"), got, p.expected, strict=True):
        errors[name] = float((a - b).norm() / b.norm().clamp(min=1e-300))
        largest[name] = float((a - b).abs().max())
        stray += int((a[~reached_rows(p, name)] != 0).sum())
    nans = sum(int(a.isnan().sum()) for a in got)
    counts = (p.meta.shape[0], count_segments(p, case.ctas), report.instructions)
    findings = [str(finding) for finding in report.findings]
    return Result(schedule, seed, errors, largest, nans, stray, *counts, seconds, findings, sorted(report.kinds))


def main() -> int:
    """Run the cases on standard input."""
    cute_host.prepare(sys.argv[1] if len(sys.argv) > 1 else "sm_100a")
    for line in sys.stdin:
        if line.strip():
            case = Case(**json.loads(line))
            problem = make_problem(case)
            for schedule, seed, checked in case.schedules:
                print(json.dumps(asdict(run(case, problem, schedule, seed, checked))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
