"""Confirms the backward on an SM100 or SM103 GPU: right first, then how long. ``nox -s bench -- sm100 [TOKENS ...]``.

Every variant of the main kernel (head ratio x dQ accumulation, and deterministic) runs against the PyTorch reference
in fp32; a wrong one ends the script with status 1. Then, for the shape of
MiniMax-M3 (64 heads on 4, d = 128, top-16), the median of 21 calls by CUDA events, and the mean of each kernel by the
profiler, for each variant and number of tokens. It refuses any other device: nothing it would print is about these.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from msa_vendored.backward import engine
from msa_vendored.reference import BackwardSchedule, run_backward, sparse_atten_func
from msa_vendored.reference.cases import PackedCase, invert_selection, make_case, plan_workspace

RATIOS = (16, 8, 4, 2, 1)
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"dq_accumulation": "fp32"}, {"deterministic": True})
DOCUMENTS = (127, 129, 1, 2, 3, 5, 128, 900)
TOLERANCE = 7e-3
"""NeMo's bound on the relative L2 error; the emulator has 2.2e-3 to 3.5e-3."""
CALLS, PROFILED_CALLS = 21, 5


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Arguments of ``run_backward``, on the GPU, and how many (key head, query, key block) they select."""

    arguments: dict[str, Any]
    edges: int


def make_problem(case: PackedCase, device: str) -> Problem:
    """Runs the reference forward for out and lse."""
    case = PackedCase(*(getattr(case, name).to(device) for name in PackedCase.__dataclass_fields__))
    workspace = plan_workspace(case.cu_seqlens_k)
    row_ptr, q_indices, forward = invert_selection(case)
    schedule = BackwardSchedule(
        row_ptr=row_ptr,
        q_indices=q_indices,
        scheduler_metadata=forward.scheduler_metadata,
        work_count=forward.work_count,
        cu_seqlens=case.cu_seqlens_q,
        document_workspace_starts=workspace.starts,
    )
    out, lse = sparse_atten_func(
        case.q, case.k, case.v, row_ptr, q_indices, case.q2k_indices.shape[2],
        cu_seqlens_q=case.cu_seqlens_q, cu_seqlens_k=case.cu_seqlens_k, max_seqlen_q=case.max_seqlen_q,
        max_seqlen_k=case.max_seqlen_k, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    arguments = {
        "q": case.q,
        "k_aligned": workspace.align(case.k, fill=float("nan")),
        "v_aligned": workspace.align(case.v, fill=float("nan")),
        "grad_out": case.grad_out,
        "lse": lse,
        "out": out,
        "schedule": schedule,
    }
    return Problem(arguments, int(row_ptr[:, -1].sum()))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expectation."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def check_variants(device: str, ratios: Sequence[int] = RATIOS) -> bool:
    """Whether every variant is within tolerance, and the deterministic one repeats bit by bit."""
    good = True
    for ratio in ratios:
        problem = make_problem(make_case(DOCUMENTS, topk=4, index_heads=4, heads_per_index_head=ratio), device)
        expected = run_backward(**problem.arguments)
        for options in VARIANTS:
            got = engine.run_backward(**problem.arguments, **options, check=True)
            errors = [
                float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, expected, strict=True)
            ]
            right = all(error <= TOLERANCE for error in errors)
            if options.get("deterministic"):
                again = engine.run_backward(**problem.arguments, **options)
                right = right and all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
            good = good and right
            listed = " ".join(f"{name} {error:.2e}" for name, error in zip(("dq", "dk", "dv"), errors, strict=True))
            print(f"ratio {ratio:2} {options or 'default'!s:32} {listed} {'right' if right else 'WRONG'}", flush=True)
    return good


def time_call(problem: Problem, options: dict[str, Any]) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(CALLS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        engine.run_backward(**problem.arguments, **options)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return float(median(times[2:]))


def profile_call(problem: Problem, options: dict[str, Any]) -> list[tuple[str, float]]:
    """Kernels of a call and their mean microseconds, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            engine.run_backward(**problem.arguments, **options)
        torch.cuda.synchronize()
    rows = [(event.key, event.self_device_time_total / PROFILED_CALLS) for event in profiler.key_averages()]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def time_variants(tokens: int, device: str) -> None:
    """Times of the M3 shape. FLOP: five products of 2 * 128 keys * 128 dims for each of 16 heads of an edge."""
    problem = make_problem(make_case((tokens,), topk=16), device)
    flops = problem.edges * 16 * 5 * 2 * 128 * 128
    for options in VARIANTS:
        milliseconds = time_call(problem, options)
        rate = flops / milliseconds / 1e9
        print(f"{tokens} tokens {options or 'default'!s:32} {milliseconds:.3f} ms {rate:.0f} TFLOP/s", flush=True)
        for name, microseconds in profile_call(problem, options):
            print(f"    {microseconds:10.1f} us  {name[:100]}")


def main() -> int:
    """Refuse, check, time."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability not in ((10, 0), (10, 3)):
        found = "no CUDA device" if capability is None else f"{torch.cuda.get_device_name()}, {capability}"
        print(f"needs a GPU of compute capability 10.0 or 10.3, found {found}", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not check_variants("cuda"):
        return 1
    for tokens in [int(argument) for argument in sys.argv[1:]] or [4096, 16384]:
        time_variants(tokens, "cuda")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
