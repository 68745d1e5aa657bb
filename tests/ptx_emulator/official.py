"""Runs the installed package's own MSA forward and combine in the emulator: ``python -m ptx_emulator.official``.

One process compiles for one architecture, and the DSL must not be imported before :func:`cute_host.prepare`, so that
tests start this as a subprocess. It reads cases as JSON lines and prints one JSON line a run.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import torch

from ptx_emulator import cute_host
from ptx_emulator.attention_case import AttentionCase, compare_attention, serve_cases
from ptx_emulator.launch import Options
from ptx_emulator.report import Report, Suppression
from ptx_emulator.tensor_map import encode_tensor_map

HEAD_DIM, BLOCK = 128, 128
UNWRITTEN = -0x0BADBAD
OUT_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3
"""O is rounded to bf16 (relative error 2^-9) after bf16 partials and bf16 P; the LSE goes through ex2 and lg2."""

SUPPRESSIONS = (
    Suppression(
        "missing-tcgen05-wait",
        "SparseAttentionForwardSm100",
        "_softmax_step releases S after using its values but without tcgen05.wait::ld: docs/findings/",
        source="tcgen05.ld.sync.aligned.32x32b.x32",
    ),
    Suppression(
        "leftover-transactions",
        "SparseAttentionForwardSm100",
        "the last producer acquire of Q, and CTAs without work, expect bytes that no copy brings: docs/findings/",
    ),
)


@dataclass(frozen=True, slots=True)
class Case(AttentionCase):
    """As :class:`AttentionCase`.

    Attributes:
        sm_count: what the schedule kernels are told; 1 or 2 gives CTAs many tiles, which exercises pipeline reuse.
        suppress: take the findings of :data:`SUPPRESSIONS` as known.
        max_instructions: after which a launch is given up.
    """

    sm_count: int = 2
    suppress: bool = True
    max_instructions: int = 1 << 33


@dataclass(slots=True)
class Result:
    """What one run gave, against the reference."""

    schedule: str
    seed: int
    out_error: float
    """Relative Frobenius error of O."""
    lse_error: float
    """Largest absolute error of the LSE; rows without keys must be -inf on both sides, else inf."""
    nans: int
    instructions: int
    seconds: float
    launches: list[dict[str, Any]]
    findings: list[str]
    kinds: list[str]
    suppressed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, and what the reference makes of them."""

    operands: tuple[Any, ...]
    options: dict[str, Any]
    expected: tuple[torch.Tensor, torch.Tensor]


def make_problem(case: Case) -> Problem:
    """The operands of a case and O and LSE by the reference."""
    from msa_vendored.reference import build_k2q_csr, sparse_atten_func

    made = case.make_operands()
    documents = (made.cu_seqlens_q, made.cu_seqlens_k)
    row_ptr, q_indices = build_k2q_csr(made.q2k_indices, *documents, BLOCK, total_k=made.k.shape[0])[:2]
    operands = (made.q, made.k, made.v, row_ptr, q_indices, case.topk)
    options: dict[str, Any] = {
        "cu_seqlens_q": documents[0], "cu_seqlens_k": documents[1], "max_seqlen_q": made.max_seqlen_q,
        "max_seqlen_k": made.max_seqlen_k, "causal": True, "return_softmax_lse": True,
    }  # fmt: skip
    reference: Any = sparse_atten_func
    return Problem(operands, options, reference(*operands, **options))


class Official:
    """The package's forward with its compilations and launches redirected. One in a process."""

    def __init__(self) -> None:
        os.environ["MM_SPARSE_ATTN_AOT_DISABLE"] = "1"
        cute_host.prepare()
        import cutlass

        from msa_vendored.installed import provenance

        self.dtypes = {torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32, torch.int32: cutlass.Int32}
        self.dtypes[torch.uint8] = cutlass.Uint8
        root = provenance().package
        self.interface = import_module(f"{root}.cute.interface")
        self.scheduler = import_module(f"{root}.cute.src.sm100.prepare_scheduler")
        self.report = Report()
        self.options = Options()
        self.sm_count = 148
        self.functions: list[cute_host.CompiledFunction] = []
        self._redirect()

    def _redirect(self) -> None:
        import cutlass.cute as cute

        compile_original = cute.compile

        def compile_redirected(*arguments: Any, **options: Any) -> Any:
            function = cute_host.CompiledFunction(compile_original(*arguments, **options))
            self.functions.append(function)
            return lambda *values: function.run(values, self.options, self.report)

        cute.compile = compile_redirected
        modules: list[Any] = [self.interface, self.scheduler]
        modules[0].create_q_gather4_tma_desc = make_gather_map
        for module in modules:
            module.to_cute_tensor_kvouter = self._fake
        official = self

        class Properties:
            @property
            def multi_processor_count(self) -> int:
                return official.sm_count

        torch.cuda.nvtx.range = lambda *_a, **_k: contextlib.nullcontext()
        torch.cuda.get_device_properties = lambda *_a, **_k: Properties()

    def _fake(self, tensor: torch.Tensor, **_options: Any) -> Any:
        import cutlass.cute as cute

        shape = tuple(cute.sym_int() for _ in range(tensor.dim()))
        stride = (*(cute.sym_int64() for _ in range(tensor.dim() - 1)), 1)
        make = cute.runtime.make_fake_tensor
        return make(self.dtypes[tensor.dtype], shape, stride=stride, assumed_align=16)

    def call(self, problem: Problem, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        """One call of ``sparse_atten_func``; ``self.report`` is its report.

        Raises:
            EmulationError: a launch ended in a fault.
        """
        self.options, self.report = options, Report()
        with poisoned_empty():
            out, lse = self.interface.sparse_atten_func(*problem.operands, **problem.options)
        return out, lse

    def run(self, case: Case) -> Iterator[Result]:
        """Run a case under each of its schedules."""
        problem = make_problem(case)
        self.sm_count = case.sm_count
        for schedule, seed, checked in case.schedules:
            checks = Options().checks if checked else frozenset()
            suppress = SUPPRESSIONS if case.suppress else ()
            options = Options(schedule, seed, checks, suppress=suppress, max_instructions=case.max_instructions)
            started = time.perf_counter()
            got = self.call(problem, options)
            yield self._result(options, got, problem.expected, time.perf_counter() - started)

    def _result(self, options: Options, got: Sequence[torch.Tensor], expected: Any, seconds: float) -> Result:
        out_error, lse_error = compare_attention(got, expected)
        return Result(
            options.schedule,
            options.seed,
            out_error,
            lse_error,
            sum(int(torch.isnan(tensor).sum()) for tensor in got),
            self.report.instructions,
            seconds,
            [asdict(launch) for launch in self.report.launches],
            [str(finding) for finding in self.report.findings],
            sorted(self.report.kinds),
            [str(finding) for finding, _ in self.report.suppressed],
        )


def make_gather_map(tensor: torch.Tensor, box_x: int = 64) -> torch.Tensor:
    """The package's tensor map for gathers of four rows, in CPU memory; the package asks the driver for it."""
    return torch.frombuffer(bytearray(encode_tensor_map(tensor, (1, box_x), 128)), dtype=torch.uint8).clone()


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """torch.empty filled with NaN, integers with a number no kernel writes: an unwritten slot cannot pass."""
    original = torch.empty, torch.empty_like

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = original[0](*arguments, **options)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(math.nan)
        return tensor.fill_(UNWRITTEN) if tensor.dtype in (torch.int32, torch.int64) else tensor

    def empty_like(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return empty(tensor.shape, dtype=options.get("dtype", tensor.dtype))

    torch.empty, torch.empty_like = empty, empty_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like = original


def main() -> int:
    """Run the cases on standard input."""
    return serve_cases(Case, Official().run)


if __name__ == "__main__":
    raise SystemExit(main())
