"""Runs the SM100 main backward kernel in the emulator: ``python -m sm100_backward [ARCH [large]]``.

One process compiles for one architecture, and the DSL must not be imported before :func:`cute_host.prepare`, so that
tests start this as a subprocess. One JSON line is printed for each run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from ptx_emulator import cute_host
from ptx_emulator.bindings import CHECKS
from ptx_emulator.launch import Options
from ptx_emulator.report import Report
from sm100_cases import BLOCK, DIM, LARGE, Case, Problem, count_segments, make_problem, reached_rows

MUTATED_TOLERANCE = 3e-3


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


@lru_cache
def compile_kernel(ratio: int, accumulation: str) -> Any:
    """The compiled kernel; one call of :func:`cute_host.prepare` must have come before."""
    from msa_vendored.backward.main_sm100 import compile_main

    arch = os.environ["CUTE_DSL_ARCH"]  # set by prepare()
    return cute_host.CompiledFunction(compile_main(arch=arch, ratio=ratio, dq_accumulation=accumulation))


def read_accumulators(case: Case, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """dq, dk, dv from the layouts that ``sm100_layout`` documents, rounded to bf16 as the results are, in float64."""
    from msa_vendored.backward.sm100_layout import head_group

    pool, dkv = out
    heads, group = case.key_heads * case.ratio, head_group(case.ratio, pool.element_size())
    dq = pool.double().view(-1, heads // group, DIM, group).transpose(2, 3).reshape(-1, heads, DIM)
    blocks = dkv.double().view(2, -1, case.key_heads, DIM // 4, BLOCK, 4)
    dk, dv = blocks.permute(0, 1, 4, 2, 3, 5).reshape(2, -1, case.key_heads, DIM)
    return [x.bfloat16().double() for x in (dq, dk, dv)]


def make_outputs(case: Case, p: Problem) -> list[torch.Tensor]:
    """Cleared accumulators."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.accumulation]
    return [torch.zeros(p.q.numel(), dtype=dtype), torch.zeros(2 * p.k.numel())]


def make_arguments(case: Case, p: Problem) -> list[Any]:
    """Arguments of the compiled function; the outputs are the 13th and those after it."""
    operands = (p.q, p.grad_out, p.k, p.v, p.lse, p.delta, p.meta, p.query_rows, p.query_positions, p.descriptor)
    return [*operands, p.cu_seqlens, p.workspace_starts, *make_outputs(case, p), DIM**-0.5, case.ctas]


def launch(case: Case, problem: Problem, options: Options, report: Report) -> list[torch.Tensor]:
    """The accumulators after one launch."""
    arguments = make_arguments(case, problem)
    compile_kernel(case.ratio, case.accumulation).run(arguments, options, report)
    return arguments[12:-2]


def run(case: Case, problem: Problem, schedule: str, seed: int, checked: bool) -> Result:
    """One run of the kernel."""
    p, report, started = problem, Report(), time.perf_counter()
    options = Options(schedule, seed, frozenset(CHECKS) if checked else frozenset())
    out = launch(case, problem, options, report)
    seconds = time.perf_counter() - started
    got = read_accumulators(case, out)
    errors, largest, stray = {}, {}, 0
    for name, a, b in zip(("dq", "dk", "dv"), got, p.expected, strict=True):
        errors[name] = float((a - b).norm() / b.norm().clamp(min=1e-300))
        largest[name] = float((a - b).abs().max())
        stray += int((a[~reached_rows(p, name)] != 0).sum())
    nans = sum(int(a.isnan().sum()) for a in got)
    counts = (p.meta.shape[0], count_segments(p, case.ctas), report.instructions)
    findings = [str(finding) for finding in report.findings]
    return Result(schedule, seed, errors, largest, nans, stray, *counts, seconds, findings, sorted(report.kinds))


MUTATED = Case((133, 3), topk=2, ctas=1, chunk=64, bad_lse=((130, 1, -math.inf),))
"""Four segments, one of one tile, on one CTA: every barrier goes through several phases."""


def subject() -> Any:
    """The kernel and a small case for ``python -m ptx_emulator.mutate``."""
    from ptx_emulator.subjects import subject_of_function

    cute_host.prepare()
    from msa_vendored.backward.main_sm100 import compile_main

    case, p = MUTATED, make_problem(MUTATED)
    reached = {name: reached_rows(p, name) for name in ("dq", "dk", "dv")}

    def find_wrong(arguments: Any) -> set[str]:
        wrong = set()
        got = read_accumulators(case, arguments[12:-2])
        for (name, rows), a, b in zip(reached.items(), got, p.expected, strict=True):
            error = float((a - b).norm() / b.norm())
            if not error <= MUTATED_TOLERANCE or bool((a[~rows] != 0).any()):
                wrong.add(name)
        return wrong

    words = f"documents {case.lengths}, top-{case.topk}, 1 key head, ratio {case.ratio}, {p.meta.shape[0]} tiles, 1 CTA"
    return subject_of_function(compile_main(), "MainKernel", lambda: make_arguments(case, p), find_wrong, words)


def main() -> int:
    """Run the cases on standard input, or, with ``large``, those of ``sm100_cases``."""
    arch, *words = sys.argv[1:] or ["sm_100a"]
    cute_host.prepare(arch)
    cases = LARGE if words == ["large"] else (Case(**json.loads(line)) for line in sys.stdin if line.strip())
    for case in cases:
        problem = make_problem(case)
        for schedule, seed, checked in case.schedules:
            result = {"case": str(case), **asdict(run(case, problem, schedule, seed, checked))}
            print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
