"""Runs the SM90 main kernel of the backward in the emulator: cases as JSON lines on standard input, results likewise.

A process of its own, because the DSL reads its target when it is imported: ``python -m backward_sm90_emulated``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from ptx_emulator import cute_host
from ptx_emulator.launch import Options
from ptx_emulator.report import Report

if __name__ == "__main__":
    cute_host.prepare("sm_90a")

from backward_cases import Problem, make_problem, relative_error
from backward_sm90 import Call, prepare_call

from msa_vendored.backward.main_sm90 import compile_main


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and the schedules to run it under.

    Attributes:
        lengths: tokens of the documents.
        ratio: query heads per kv head.
        dq_accumulation: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        topk: selection width.
        kv_heads: of K and V.
        grid: CTAs.
        rows_per_chunk: most tasks of a chunk; few of them make many segments.
        window: queries of a window.
        selection: ``"random"``, ``"hot"`` (all select block 0 and no other) or ``"none"``.
        dead_rows: query heads of the first tokens whose lse is -inf, +inf and NaN.
        grad_scale: factor on dO.
        gradients: as the kernel's option; the errors of what it leaves alone are left out.
        schedules: (schedule, seed) of each run.
    """

    lengths: tuple[int, ...]
    ratio: int = 16
    dq_accumulation: str = "bf16"
    topk: int = 4
    kv_heads: int = 1
    grid: int = 2
    rows_per_chunk: int = 6
    window: int = 64
    selection: str = "random"
    dead_rows: bool = False
    grad_scale: float = 1.0
    gradients: str = "all"
    schedules: tuple[tuple[str, int], ...] = (("eager", 0),)


@dataclass(slots=True)
class Result:
    """What one run gave.

    Attributes:
        errors: relative errors of dq, dk, dv in float64, infinite where one is not finite.
        outside: the part of the absolute sum of dk or dv that is outside the tokens' rows.
        tasks: in the table.
        instructions: warp instructions.
        read_waits: waits of the kernel for TMA to have read, but not yet added.
        findings: of the emulator.
    """

    schedule: str
    seed: int
    errors: list[float]
    outside: float
    tasks: int
    instructions: int
    read_waits: int
    findings: list[str] = field(default_factory=list)


@cache
def compiled(ratio: int, dq_accumulation: str, gradients: str) -> cute_host.CompiledFunction:
    """The kernel, compiled once a process."""
    return cute_host.CompiledFunction(compile_main(ratio=ratio, dq_accumulation=dq_accumulation, gradients=gradients))


def problem_of(case: Case) -> Problem:
    """Operands of a case and their gradients; dead rows count as rows that give and get none."""
    tokens = sum(case.lengths)
    selection = None
    if case.selection != "random":
        selection = torch.full((case.kv_heads, tokens, case.topk), -1, dtype=torch.int32)
        if case.selection == "hot":
            selection[:, :, 0] = 0
    dead = [(0, 0, -math.inf), (1, case.ratio - 1, math.inf), (2, 0, math.nan)] if case.dead_rows else []
    return make_problem(
        case.lengths, kv_heads=case.kv_heads, ratio=case.ratio, topk=case.topk, selection=selection,
        grad_scale=case.grad_scale, dead_rows=dead,
    )  # fmt: skip


def run(case: Case) -> Iterator[Result]:
    """Run a case under each of its schedules."""
    problem = problem_of(case)
    kernel = compiled(case.ratio, case.dq_accumulation, case.gradients)
    read_waits = kernel.function.__ptx__.count("cp.async.bulk.wait_group.read")
    for schedule, seed in case.schedules:
        call = prepare_call(
            problem, dq_accumulation=case.dq_accumulation, grid=case.grid, window=case.window,
            rows_per_chunk=case.rows_per_chunk,
        )  # fmt: skip
        report = Report()
        kernel.run(call.arguments(), Options(schedule, seed), report, names=NAMES[: len(call.arguments()) - 2])
        result = _result(schedule, seed, problem, call, report, read_waits)
        if case.gradients != "all":
            result.errors = result.errors[:1] if case.gradients == "dq" else result.errors[1:]
        yield result


NAMES = (
    "q", "k", "v", "grad_out", "lse", "delta", "task_meta", "task_qrows", "task_qpos", "cu_seqlens", "starts",
    "descriptor", "dq_sum", "dk_sum", "dv_sum", "norms", "key_maxima",
)  # fmt: skip


def _result(schedule: str, seed: int, problem: Problem, call: Call, report: Report, read_waits: int) -> Result:
    got = call.gradients()
    assert problem.gradients is not None
    errors = [relative_error(a, b) for a, b in zip(got, problem.gradients, strict=True)]
    inside = [float(t.double().abs().sum()) for t in got[1:]]
    total = [float(t.double().abs().sum()) for t in (call.dk_sum, call.dv_sum)]
    outside = [abs(a - b) / max(a, 1.0) for a, b in zip(total, inside, strict=True)]
    tasks = int(call.tables.descriptor[0])
    findings = [str(finding) for finding in report.findings]
    return Result(schedule, seed, errors, max(outside), tasks, report.instructions, read_waits, findings)


def main() -> int:
    """Run the cases on standard input."""
    for line in sys.stdin:
        if line.strip():
            values: dict[str, Any] = json.loads(line)
            for result in run(Case(**values)):
                print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
