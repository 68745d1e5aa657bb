"""The front of the emulator: kernels on CPU tensors, from PTX text or from a function that CuTe DSL compiled."""

from __future__ import annotations

import ctypes as c
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ptx_emulator.bindings import CHECKS, SCHEDULES, Interpreter, LaunchConfig
from ptx_emulator.lower import lower
from ptx_emulator.program import Program
from ptx_emulator.ptx import Entry, Parameter, align, parse_entries
from ptx_emulator.report import LaunchRecord, NamedTensor, Report, Suppression, make_finding

ALL_CHECKS = frozenset(("uninitialised", "races", "global", "lanes"))
"""Those that are on unless others are chosen. ``tcgen05-fences`` is stricter than NVIDIA's own compiler output."""
REGISTER_FILE = 65536
"""32-bit registers of one SM."""


class EmulationError(Exception):
    """A launch ended in a fault; ``report`` holds it as the last finding."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report.fatal))
        self.report = report


@dataclass(frozen=True, slots=True)
class Options:
    """How a launch is run.

    Attributes:
        schedule: ``eager`` (asynchronous work happens when issued), ``lazy`` (only when nothing else can go on) or
            ``random`` (warps, CTAs and asynchronous work in an order drawn from ``seed``).
        seed: of the random schedule.
        checks: any of ``uninitialised``, ``races``, ``global`` and ``lanes`` (races between the lanes of a warp), which
            are the default, and ``tcgen05-fences`` (the letter of the ISA; with ``races``); bounds, alignment,
            deadlock, allocation and barrier checks always run.
        resident_ctas: CTAs that run interleaved, of each worker.
        workers: threads that share the CTAs of a launch, worker ``i`` taking every ``workers``-th from the ``i``-th.
            More than one makes the order of reductions to global memory, and so their rounding, vary between runs.
        suppress: findings that are expected.
        max_instructions: warp instructions after which a launch counts as endless.
        registers_per_thread: at launch; by default what ptxas would give (``.maxnreg``, or the register file divided
            by the threads, rounded down to 8).
    """

    schedule: str = "eager"
    seed: int = 0
    checks: frozenset[str] = ALL_CHECKS
    resident_ctas: int = 2
    workers: int = 1
    suppress: tuple[Suppression, ...] = ()
    max_instructions: int = 1 << 33
    registers_per_thread: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r}: one of {', '.join(SCHEDULES)} expected")
        if self.workers < 1 or self.resident_ctas < 1:
            raise ValueError(f"workers {self.workers}, resident_ctas {self.resident_ctas}: at least 1 expected")
        if not self.checks <= CHECKS.keys():
            raise ValueError(f"checks {sorted(self.checks - CHECKS.keys())}: only {', '.join(CHECKS)} are known")


class Kernel:
    """One entry of a PTX module, lowered and loaded.

    Args:
        entry: from :func:`parse_entries`.
        change: applied to the lowered program before it is loaded; for the mutation session.
    """

    def __init__(self, entry: Entry, change: Callable[[Program], None] | None = None) -> None:
        self.entry = entry
        self._buffer = c.create_string_buffer(entry.parameter_bytes + 256)
        self.parameter_base = align(c.addressof(self._buffer), 128)
        self.program = lower(entry, self.parameter_base)
        if change is not None:
            change(self.program)
        self.interpreter = Interpreter(self.program)

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters as the PTX declares them."""
        return self.entry.parameters

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
        """Run one launch and add it to the report.

        Raises:
            EmulationError: the launch ended in a fault.
        """
        for parameter, value in zip(self.parameters, values, strict=True):
            c.memmove(self.parameter_base + parameter.offset_bytes, value, parameter.size_bytes)
        config = self._config(grid, block, dynamic_shared_bytes, options)
        regions = [(t.base, t.size_bytes, 16 if t.tensor.element_size() <= 2 else 4) for t in tensors]
        regions.append((self.parameter_base, align(self.entry.parameter_bytes, 128) + 128, 16))
        started = time.perf_counter()
        stats, raw = self.interpreter.run(config, regions)
        seconds = time.perf_counter() - started
        shape = (int(grid[0]), int(grid[1]), int(grid[2]))
        threads = (int(block[0]), int(block[1]), int(block[2]))
        counts = (stats.instructions, stats.mma, stats.async_ops, stats.async_bytes, stats.ctas)
        report.launches.append(LaunchRecord(self.entry.name, shape, threads, config.shared_bytes, *counts, seconds))
        for finding in raw:
            report.add(make_finding(finding, self.program, tensors), options.suppress)
        if report.fatal:
            raise EmulationError(report)

    def _config(
        self, grid: Sequence[int], block: Sequence[int], dynamic_shared_bytes: int, options: Options
    ) -> LaunchConfig:
        static = align(self.entry.static_shared_bytes, 16)
        threads = block[0] * block[1] * block[2]
        registers = options.registers_per_thread or self.entry.max_registers
        if registers is None:
            per_cta = REGISTER_FILE // self.entry.min_ctas_per_sm
            registers = min(255, per_cta // align(threads, 32) // 8 * 8)
        checks = sum(CHECKS[name] for name in options.checks)
        quantum = 64 if options.schedule == "random" else 1000
        return LaunchConfig(
            (c.c_uint32 * 3)(*grid), (c.c_uint32 * 3)(*block), static + dynamic_shared_bytes, self.entry.local_bytes,
            SCHEDULES[options.schedule], options.seed, quantum, checks, options.resident_ctas, registers,
            dynamic_shared_bytes, options.workers, options.max_instructions,
        )  # fmt: skip


def load_kernels(ptx: str) -> dict[str, Kernel]:
    """Parse, lower and load every entry of a PTX module.

    Raises:
        PtxError: the text is not PTX.
        UnsupportedPtxError: an instruction is not modelled; names all of them.
    """
    return {name: Kernel(entry) for name, entry in parse_entries(ptx).items()}


def emulate(
    target: Any,
    *arguments: Any,
    schedule: str = "eager",
    seed: int = 0,
    checks: Iterable[str] = ALL_CHECKS,
    suppress: Iterable[Suppression] = (),
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] | None = None,
    shared_bytes: int = 0,
    entry: str | None = None,
    names: Sequence[str] = (),
    ptx: str | None = None,
    **options: Any,
) -> Report:
    """Run a kernel on CPU tensors. Emulated and race-checked; nothing is executed on a GPU.

    Args:
        target: PTX text, a :class:`Kernel`, or a function that ``cute.compile`` made with ``--enable-tvm-ffi`` in a
            process that :func:`ptx_emulator.cute_host.prepare` prepared, or that ``cute.runtime.load_module`` loaded
            in one after ``export_to_c``; its host code then computes the launch.
        arguments: for PTX, one for each parameter: a CPU tensor (its address), an int, a float, or bytes (structs and
            tensor maps). For a compiled function, what the function takes. Tensors are written in place.
        schedule: ``eager``, ``lazy`` or ``random``.
        seed: of the random schedule.
        checks: see :class:`Options`.
        suppress: see :class:`Options`.
        grid: CTAs, for PTX.
        block: threads, for PTX; from ``.reqntid`` by default.
        shared_bytes: dynamic shared memory, for PTX.
        entry: which kernel of the PTX; may be left out if there is one.
        names: names of the tensor arguments in reports; ``argument 0`` and so on by default.
        ptx: the PTX of a loaded function, which holds machine code only: ``__ptx__`` of the one that was exported.
        options: the other fields of :class:`Options`.

    Returns:
        Launches and findings. A fault is the last finding; what follows it was not run.
    """
    chosen = Options(schedule, seed, frozenset(checks), suppress=tuple(suppress))
    chosen = replace(chosen, **options)
    report = Report()
    try:
        if isinstance(target, str | Kernel):
            kernel = _pick(target, entry) if isinstance(target, str) else target
            threads = block or (kernel.entry.threads or 32, 1, 1)
            tensors = name_tensors(arguments, names)
            values = [_pack(p, a) for p, a in zip(kernel.parameters, arguments, strict=True)]
            kernel.run(_three(grid), _three(threads), shared_bytes, values, tensors, chosen, report)
        else:
            from ptx_emulator.cute_host import CompiledFunction

            function = target if isinstance(target, CompiledFunction) else CompiledFunction(target, ptx)
            function.run(arguments, chosen, report, names)
    except EmulationError:
        pass
    return report


def name_tensors(arguments: Sequence[Any], names: Sequence[str]) -> list[NamedTensor]:
    """The tensors among the arguments, named."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    labels = [*names, *(f"argument {i}" for i in range(len(names), len(tensors)))]
    return [NamedTensor(label, tensor) for label, tensor in zip(labels, tensors, strict=False)]


def _pick(ptx: str, entry: str | None) -> Kernel:
    entries = parse_entries(ptx)
    if entry is None and len(entries) > 1:
        raise ValueError(f"entry: the PTX has several: {', '.join(entries)}")
    return Kernel(entries[entry or next(iter(entries))])


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    padded = [*sizes, 1, 1, 1]
    return padded[0], padded[1], padded[2]


def _pack(parameter: Parameter, value: Any) -> bytes:
    size = parameter.size_bytes
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, float):
        value = struct.pack("<f" if size == 4 else "<d", value)
    if isinstance(value, int):
        value = (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    if len(value) != size:
        raise ValueError(f"{parameter.name}: {size} bytes expected, {len(value)} given")
    return bytes(value)
