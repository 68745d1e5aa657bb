"""Runs the SM90 forward in the emulator, through its launcher: ``python -m ptx_emulator.hopper_forward``.

Cases come as JSON lines, results go out as JSON lines; a subprocess, because the DSL reads its target when it is
imported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from ptx_emulator import cute_host
from ptx_emulator.attention_case import AttentionCase, compare_attention, serve_cases
from ptx_emulator.launch import Options
from ptx_emulator.report import Report, Suppression

KERNELS = ("BuildSegments", "ForwardMain")

COUNTED = (
    Suppression(
        "global-conflict",
        "ForwardMain",
        "partial outputs are handed to merges by counters in device memory, whose order the emulator does not follow; "
        "with one CTA, whose barriers order the same accesses, cases run without this",
        source="hopper/combine.py",
    ),
)


@dataclass(frozen=True, slots=True)
class Case(AttentionCase):
    """As :class:`AttentionCase`.

    Attributes:
        causal: whether later keys are masked.
        softmax_scale: factor on the logits.
        output_scale: factor on the output, None for none.
        window_tokens: tokens of a window.
        windows_per_chunk: windows of a chunk.
        segment_queries: most queries of a segment.
        ctas: persistent CTAs.
        poison: NaN keys and values in every other document, whose results are not looked at.
        suppress: file what counters in device memory order.
    """

    index_heads: int = 2
    causal: bool = True
    softmax_scale: float = 128**-0.5
    output_scale: float | None = None
    window_tokens: int = 64
    windows_per_chunk: int = 2
    segment_queries: int = 24
    ctas: int = 2
    poison: bool = False
    suppress: bool = False


@dataclass(slots=True)
class Result:
    """What one run gave, against the reference."""

    schedule: str
    seed: int
    out_error: float
    """Relative Frobenius error of O against float32."""
    lse_error: float
    """Largest absolute error of the LSE; inf where only one side is -inf."""
    nans: int
    kernels: list[str]
    mma: int
    instructions: int
    seconds: float
    findings: list[str] = field(default_factory=list)


class Launcher:
    """The launcher with its compilations and launches redirected. One in a process."""

    def __init__(self) -> None:
        cute_host.prepare("sm_90a")
        # By name: what is replaced below is a plain attribute to mypy then.
        forward: Any = import_module("msa_vendored.hopper.forward")
        self.forward = forward
        self.report, self.options, self.case = Report(), Options(), Case(())
        self.functions: dict[Any, Any] = {}
        plan_original = forward.plan_forward

        def load(compile_stage: Any, **options: Any) -> Any:
            key = (compile_stage, tuple(options.items()))
            if key not in self.functions:
                self.functions[key] = cute_host.CompiledFunction(compile_stage(**options))
            return lambda *values: self.functions[key].run(values, self.options, self.report)

        def plan(total_q: int, max_seqlen_k: int, **sizes: Any) -> Any:
            case, usual = self.case, plan_original(total_q, max_seqlen_k, **sizes)
            windows = -(-total_q // case.window_tokens)
            chunks = -(-windows // case.windows_per_chunk)
            capacity = max(usual.segment_capacity, total_q * sizes["topk"] * sizes["index_heads"])
            return forward.ForwardPlan(
                case.window_tokens, windows, case.windows_per_chunk, chunks, capacity, case.segment_queries,
                case.ctas // 2 if windows > 1 else 0,
            )  # fmt: skip

        self.forward.load_kernel, self.forward.plan_forward = load, plan
        self.forward.count_multiprocessors = lambda _device: self.case.ctas

    def run(self, case: Case) -> Iterator[Result]:
        """Run a case under each of its schedules."""
        from msa_vendored.reference import sparse_atten_func
        from msa_vendored.reference.cases import invert_selection

        self.case = case
        problem = case.make_operands()
        row_ptr, q_indices, schedule = invert_selection(problem)
        keywords: dict[str, Any] = {
            "cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k,
            "max_seqlen_q": problem.max_seqlen_q, "max_seqlen_k": problem.max_seqlen_k, "causal": case.causal,
            "softmax_scale": case.softmax_scale, "return_softmax_lse": True, "schedule": schedule,
        }  # fmt: skip
        if case.output_scale is not None:
            keywords["output_scale"] = torch.tensor([case.output_scale])
        expected: Any = sparse_atten_func(
            problem.q.float(), problem.k.float(), problem.v.float(), row_ptr, q_indices, case.topk, **keywords
        )
        k, v = problem.k, problem.v
        kept = torch.ones(problem.q.shape[0], dtype=torch.bool)
        if case.poison:
            # Every other document is NaN: nothing of it may reach its neighbours.
            for document in range(1, len(case.query_lengths), 2):
                keys = slice(*problem.cu_seqlens_k[document : document + 2].tolist())
                kept[slice(*problem.cu_seqlens_q[document : document + 2].tolist())] = False
                k[keys], v[keys] = math.nan, math.nan
        for schedule_name, seed, checked in case.schedules:
            self.options, self.report = self._options(schedule_name, seed, checked), Report()
            started = time.perf_counter()
            out, lse = self.forward.sparse_atten_func(problem.q, k, v, row_ptr, q_indices, case.topk, **keywords)
            seconds = time.perf_counter() - started
            yield self._result(schedule_name, seed, out[kept], lse[kept], [e[kept] for e in expected], seconds)

    def _options(self, schedule: str, seed: int, checked: bool) -> Options:
        checks = Options().checks if checked else frozenset()
        suppress = COUNTED if self.case.suppress else ()
        return Options(
            schedule, seed, checks, suppress=suppress, max_instructions=1 << 24, resident_ctas=self.case.ctas
        )

    def _result(
        self, schedule: str, seed: int, out: torch.Tensor, lse: torch.Tensor, expected: Any, seconds: float
    ) -> Result:
        return Result(
            schedule,
            seed,
            *compare_attention((out, lse), expected),
            int(torch.isnan(out).sum() + torch.isnan(lse).sum()),
            [next(p for p in KERNELS if p in launch.kernel) for launch in self.report.launches],
            sum(launch.mma for launch in self.report.launches),
            self.report.instructions,
            seconds,
            [str(finding) for finding in self.report.findings],
        )


def poison_new_tensors() -> None:
    """Fill what ``new_empty`` and ``empty_like`` give with NaN, integers with a large number."""
    tensor_type: Any = torch.Tensor
    new_empty, empty_like = tensor_type.new_empty, torch.empty_like

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(math.nan if tensor.dtype.is_floating_point else 0x5BADBAD)

    tensor_type.new_empty = lambda self, *a, **k: poisoned(new_empty(self, *a, **k))
    torch.empty_like = lambda *a, **k: poisoned(empty_like(*a, **k))


def main() -> int:
    """Run the cases on standard input."""
    launcher = Launcher()
    poison_new_tensors()
    return serve_cases(Case, launcher.run)


if __name__ == "__main__":
    raise SystemExit(main())
