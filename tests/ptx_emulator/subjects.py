"""Kernels that the mutation, second-opinion and speed sessions know: a name, and who builds a case of it.

A new kernel is one line in :data:`REGISTRY`: ``"name": "module:function"``. The function takes nothing, prepares the
process (``cute_host.prepare(arch)``: one process compiles for one architecture) and returns a :class:`Subject`, or
several for a function of several kernels.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from ptx_emulator.bindings import Interpreter
from ptx_emulator.launch import EmulationError, Kernel, Options
from ptx_emulator.program import Program
from ptx_emulator.report import NamedTensor, Report, Suppression

REGISTRY: dict[str, str] = {
    "gemm": "ptx_emulator.gemm:subject",
    "schedule": "ptx_emulator.official_subjects:schedule_subject",
    "split": "ptx_emulator.official_subjects:split_subject",
    "forward": "ptx_emulator.official_subjects:forward_subject",
    "combine": "ptx_emulator.official_subjects:combine_subject",
    "backward_sm100": "ptx_emulator.our_subjects:backward_sm100",
    "backward_sm90": "ptx_emulator.our_subjects:backward_sm90",
    "tasks": "ptx_emulator.our_subjects:tasks",
    "delta": "ptx_emulator.our_subjects:delta",
    "postprocess": "ptx_emulator.our_subjects:postprocess",
    "forward_sm90": "ptx_emulator.our_subjects:forward_sm90",
    "index_sm90": "ptx_emulator.our_subjects:index_sm90",
    "score_sm90": "ptx_emulator.our_subjects:score_sm90",
    "select_sm90": "ptx_emulator.our_subjects:select_sm90",
}
"""Kernel to the function that builds its case."""
SMALL_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: what the emulator reports, and which results are wrong (empty if all are right)."""

    report: Report
    wrong: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel with a case that runs it.

    Attributes:
        case: the case in words, with its sizes.
        kernels: the table in which a launch finds its kernel by name; sessions exchange entries in it.
        entry: the kernel's key in the table.
        run: runs the case on fresh outputs; faults are in the report, never raised.
        ptx: the module that the kernel is in, for tools that read the text.
        tiny: a smaller case of the same kernel for the static verifier; None if this one is small.
        verifier: settings for it (:mod:`ptx_emulator.sentry_input`), such as assumptions.
        label: which kernel of several.
        spread: a larger case with several CTAs, in words, and what runs it; for the speed session.
    """

    case: str
    kernels: MutableMapping[str, Kernel]
    entry: str
    run: Callable[[Options], Outcome]
    ptx: str = ""
    tiny: Callable[[Options], Outcome] | None = None
    verifier: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    spread: tuple[str, Callable[[Options], Outcome]] | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel as it is now in the table."""
        return self.kernels[self.entry]


def load(name: str) -> tuple[Subject, ...]:
    """Build the cases of a registered kernel, or of ``module:function``.

    Raises:
        SystemExit: no such kernel.
    """
    target = REGISTRY.get(name, name)
    module, _, function = target.partition(":")
    if not function:
        raise SystemExit(f"no kernel {name!r}: {', '.join(REGISTRY)} or module:function expected")
    build: Callable[[], Subject | Sequence[Subject]] = getattr(import_module(module), function)
    built = build()
    return (built,) if isinstance(built, Subject) else tuple(built)


def subject_of_function(
    compiled: Any,
    entry_part: str,
    make_arguments: Callable[[], Sequence[Any]],
    find_wrong: Callable[[Sequence[Any]], set[str]],
    case: str,
    suppress: tuple[Suppression, ...] = (),
    **settings: Any,
) -> Subject:
    """A subject of a function that ``cute.compile`` made.

    Args:
        compiled: the function, compiled with ``--enable-tvm-ffi`` after ``cute_host.prepare``.
        entry_part: text that only this kernel's entry name contains.
        make_arguments: fresh arguments for every run; outputs poisoned.
        find_wrong: names of the results that are wrong after a run, given the arguments.
        case: in words.
        suppress: findings that are expected in the whole kernel.
        settings: other fields of :class:`Subject`.
    """
    from ptx_emulator.cute_host import CompiledFunction

    function = CompiledFunction(compiled)
    (entry,) = (name for name in function.kernels if entry_part in name)

    def run(options: Options) -> Outcome:
        arguments, report = make_arguments(), Report()
        chosen = replace(options, suppress=suppress)
        try:
            function.run(arguments, chosen, report)
        except EmulationError:
            return Outcome(report)
        return Outcome(report, frozenset(find_wrong(arguments)))

    return Subject(case, function.kernels, entry, run, compiled.__ptx__, **settings)


def change_kernel(kernel: Kernel, change: Callable[[Program], None]) -> Kernel:
    """A kernel with a changed program; parsing and lowering are not repeated, the parameters are shared."""
    program = copy.copy(kernel.program)
    program.instructions = list(program.instructions)
    program.operands = list(program.operands)
    program.roles = list(program.roles)
    change(program)
    changed = copy.copy(kernel)
    changed.program = program
    changed.interpreter = Interpreter(program)
    return changed


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as the kernel's host code asked for it."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    dynamic_shared_bytes: int
    values: tuple[bytes, ...]
    tensors: tuple[NamedTensor, ...]
    integers: dict[str, list[int]]
    """Contents of the small int32 tensors that the launch left as they were: they may decide branches."""


class Recorder(Kernel):
    """Stands in a table for a kernel; notes its launches, their cost and how often each instruction ran."""

    def __init__(self, kernel: Kernel) -> None:
        vars(self).update(vars(kernel))
        self.whole = kernel
        self.launches: list[Launch] = []
        self.counts = [0] * len(kernel.program.instructions)
        self.instructions = self.ctas = 0
        self.cpu_seconds = self.seconds = 0.0

    def run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        dynamic_shared_bytes: int,
        values: Sequence[bytes],
        tensors: Sequence[NamedTensor],
        options: Options,
        report: Report,
    ) -> None:
        """Note and run one launch; as :meth:`Kernel.run`."""
        before, started = _read_integers(tensors), time.process_time()
        super().run(grid, block, dynamic_shared_bytes, values, tensors, options, report)
        self.cpu_seconds += time.process_time() - started
        self.instructions += report.launches[-1].instructions
        self.seconds += report.launches[-1].seconds
        self.ctas = max(self.ctas, report.launches[-1].ctas)
        kept = {name: numbers for name, numbers in _read_integers(tensors).items() if before[name] == numbers}
        sizes = (tuple(grid), tuple(block), dynamic_shared_bytes)
        self.launches.append(Launch(*sizes, tuple(values), tuple(tensors), kept))
        self.counts = [a + b for a, b in zip(self.counts, self.interpreter.profile(), strict=True)]


def _read_integers(tensors: Sequence[NamedTensor]) -> dict[str, list[int]]:
    small = [t for t in tensors if t.tensor.dtype == torch.int32 and t.tensor.numel() <= SMALL_ELEMENTS]
    return {t.name: t.tensor.flatten().tolist() for t in small if t.tensor.is_contiguous()}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expectation."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())
