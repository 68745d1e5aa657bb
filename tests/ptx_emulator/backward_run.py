"""Runs the whole GPU backward in the emulator: ``python -m ptx_emulator.backward_run sm_100a``.

The stages are those that :func:`msa_vendored.backward.stages.load_stages` loads on a GPU of the architecture, and the
launcher is the real one; only the four compiled functions are replaced by their emulation, on CPU tensors. Reads cases
as JSON lines and prints one JSON line for each run. A child process, because the DSL reads its target when it is
imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import torch

from ptx_emulator import cute_host
from ptx_emulator.launch import ALL_CHECKS, Options
from ptx_emulator.report import Report


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and how to run it.

    Attributes:
        lengths: tokens of each document.
        topk: selection width.
        key_heads: key heads.
        ratio: query heads for each.
        dq_accumulation: option of ``run_backward``; None is the architecture's default.
        softmax_scale: likewise.
        multiprocessors: of the pretended GPU; few give CTAs many tasks.
        resident_ctas: that run interleaved.
        seed: of operands and selection.
        schedules: (schedule, seed) of each run.
        deterministic: option of ``run_backward``.
        checked: look for races and uninitialised reads; several times slower.
        corrupt: makes the schedule inconsistent: ``""`` or ``"query"``.
    """

    lengths: tuple[int, ...]
    topk: int = 4
    key_heads: int = 1
    ratio: int = 16
    dq_accumulation: str | None = None
    softmax_scale: float | None = None
    multiprocessors: int = 2
    resident_ctas: int = 2
    seed: int = 0
    schedules: tuple[tuple[str, int], ...] = (("eager", 0),)
    deterministic: bool = False
    checked: bool = True
    corrupt: str = ""


@dataclass(slots=True)
class Result:
    """What one run gave, against float64 autograd of dense attention."""

    schedule: str
    seed: int
    errors: dict[str, float]
    """Relative Frobenius error of dq, dk and dv in documents; infinity if one is not finite."""
    outside: float
    """Largest magnitude of dk and dv outside documents."""
    error_word: int
    findings: list[str]
    launches: list[str]
    instructions: int
    seconds: float
    raised: str = field(default="")
    digest: str = field(default="")
    """Of the bits of dq, dk and dv."""


class Emulated:
    """Compiles what the engine asks for, once, and calls it in the emulator with the current options."""

    def __init__(self) -> None:
        self.options, self.report = Options(), Report()
        self._compiled: dict[str, cute_host.CompiledFunction] = {}

    def load(self, compile_stage: Callable[..., Any], *, arch: str, **options: Any) -> Callable[..., None]:
        """In place of :func:`msa_vendored.compiling.load_kernel`."""
        key = f"{compile_stage.__module__} {arch} {sorted(options.items())}"
        if key not in self._compiled:
            self._compiled[key] = cute_host.CompiledFunction(compile_stage(arch=arch, **options))
        function = self._compiled[key]
        return lambda *arguments: function.run(arguments, self.options, self.report)


def run(case: Case, arch: str, emulated: Emulated) -> Iterator[Result]:
    """Run a case under each of its schedules."""
    from msa_vendored.backward.accumulation import choose_dq_accumulation
    from msa_vendored.backward.arguments import require_operands, require_scale
    from msa_vendored.backward.checks import aligned_operand
    from msa_vendored.backward.engine import launch
    from msa_vendored.backward.error_word import ErrorWord
    from msa_vendored.backward.stages import Structure, load_stages

    operands, schedule, workspace, expected = make_problem(case)
    accumulation = choose_dq_accumulation(arch, case.dq_accumulation)
    sizes = require_operands(schedule, accumulation, operands)
    structure = Structure(arch, case.ratio, accumulation, case.deterministic)
    stages = load_stages(structure, load=emulated.load)
    aligned = tuple(aligned_operand(tensor) for tensor in operands.values())
    checks = ALL_CHECKS if case.checked else frozenset()
    for name, seed in case.schedules:
        emulated.options, emulated.report = Options(name, seed, checks, resident_ctas=case.resident_ctas), Report()
        word = ErrorWord(torch.device("cpu"))
        started = time.perf_counter()
        with poisoned_empty():
            grads = launch(
                stages, aligned, schedule, sizes, require_scale(case.softmax_scale), case.multiprocessors, word
            )
        report = emulated.report
        dq, dk, dv = grads
        outside = torch.ones(workspace.rows, dtype=torch.bool)
        outside[workspace.positions] = False
        got = (dq, dk[workspace.positions], dv[workspace.positions])
        yield Result(
            name,
            seed,
            {key: relative(*pair) for key, *pair in zip(("dq", "dk", "dv"), got, expected, strict=True)},
            float(torch.stack([dk[outside].abs().max(), dv[outside].abs().max()]).max()) if outside.any() else 0.0,
            int(word.word),
            [str(finding) for finding in report.findings],
            [record.kernel for record in report.launches],
            report.instructions,
            round(time.perf_counter() - started, 2),
            describe_raise(word),
            sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in grads)).hexdigest(),
        )


def describe_raise(word: Any) -> str:
    """What the next call would raise."""
    from msa_vendored.backward.error_word import ScheduleError

    try:
        word.raise_seen()
    except ScheduleError as error:
        return str(error.got)
    return ""


def make_problem(case: Case) -> tuple[dict[str, torch.Tensor], Any, Any, tuple[torch.Tensor, ...]]:
    """Operands by name, schedule, workspace, and float64 gradients by autograd through dense attention."""
    from msa_vendored.reference import BackwardSchedule, dense_attention, sparse_atten_func
    from msa_vendored.reference.cases import invert_selection, make_case, plan_workspace

    packed = make_case(
        case.lengths, topk=case.topk, index_heads=case.key_heads, heads_per_index_head=case.ratio, seed=case.seed
    )
    cu = packed.cu_seqlens_q
    row_ptr, q_indices, forward = invert_selection(packed)
    out, lse = sparse_atten_func(
        packed.q, packed.k, packed.v, row_ptr, q_indices, case.topk, cu_seqlens_q=cu, cu_seqlens_k=cu,
        max_seqlen_q=packed.max_seqlen_q, max_seqlen_k=packed.max_seqlen_k, causal=True, return_softmax_lse=True,
        schedule=forward, softmax_scale=case.softmax_scale,
    )  # fmt: skip
    workspace = plan_workspace(cu)
    if case.corrupt == "query":
        q_indices[0, 0] = packed.max_seqlen_q
    schedule = BackwardSchedule(
        row_ptr, q_indices, forward.scheduler_metadata, forward.work_count, cu, workspace.starts
    )
    operands = {
        "q": packed.q,
        "k_aligned": workspace.align(packed.k, torch.nan),
        "v_aligned": workspace.align(packed.v, torch.nan),
        "grad_out": packed.grad_out,
        "lse": lse,
        "out": out,
    }
    leaves: list[Any] = [tensor.double().requires_grad_() for tensor in (packed.q, packed.k, packed.v)]
    q64, k64, v64 = leaves
    dense, _ = dense_attention(q64, k64, v64, packed.q2k_indices, cu, cu, causal=True, softmax_scale=case.softmax_scale)
    return operands, schedule, workspace, torch.autograd.grad(dense, leaves, packed.grad_out.double())


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``; infinity if it is not a number."""
    error = float((got.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Memory that torch hands out uninitialised is all ones: NaN as a float, -1 as an integer."""
    original = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    torch.empty = lambda *a, **k: poison(original[0](*a, **k))
    torch.empty_like = lambda *a, **k: poison(original[1](*a, **k))
    torch.Tensor.new_empty = lambda *a, **k: poison(original[2](*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = original


def main() -> int:
    """Run the cases on standard input."""
    arch = sys.argv[1]
    cute_host.prepare(arch)
    os.environ["CUTE_DSL_ARCH"] = arch
    emulated = Emulated()
    for line in sys.stdin:
        if line.strip():
            for result in run(Case(**json.loads(line)), arch, emulated):
                print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
