"""The compiled interpreter through ctypes: one object per lowered kernel."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptx_emulator.build import library_path
from ptx_emulator.program import Program

SCHEDULES = {"eager": 0, "lazy": 1, "random": 2}
CHECKS = {"uninitialised": 1, "races": 2, "global": 4, "lanes": 8, "tcgen05-fences": 16}


class InstructionRecord(c.Structure):
    """``Instr`` of common.h."""

    _fields_ = [(name, c.c_int32) for name in ("kind", "guard", "negated", "a", "b", "c", "count", "at")]
    _fields_ += [("immediate", c.c_int64)]


class LaunchConfig(c.Structure):
    """``LaunchConfig`` of common.h."""

    _fields_ = [("grid", c.c_uint32 * 3), ("block", c.c_uint32 * 3)]
    _fields_ += [
        (name, c.c_uint32)
        for name in ("shared_bytes", "local_bytes", "schedule", "seed", "quantum", "checks", "resident_ctas")
    ]
    _fields_ += [(name, c.c_uint32) for name in ("registers_per_thread", "dynamic_bytes", "workers")]
    _fields_ += [("max_instructions", c.c_uint64)]


class LaunchStats(c.Structure):
    """``LaunchStats`` of common.h."""

    _fields_ = [(name, c.c_uint64) for name in ("instructions", "mma", "async_ops", "async_bytes", "ctas")]


class FindingRecord(c.Structure):
    """``FindingRecord`` of api.cpp."""

    _fields_ = [
        (name, c.c_int32) for name in ("pc", "agent", "other_pc", "other_agent", "cta", "other_cta", "space", "fatal")
    ]
    _fields_ += [("address", c.c_uint64), ("count", c.c_uint64), ("kind", c.c_char_p), ("text", c.c_char_p)]


@dataclass(frozen=True, slots=True)
class RawFinding:
    """A finding as the interpreter gives it: program counters, agent codes and raw addresses."""

    kind: str
    text: str
    pc: int
    agent: int
    other_pc: int
    other_agent: int
    cta: int
    other_cta: int
    space: int
    address: int
    count: int
    fatal: bool


@lru_cache(maxsize=1)
def library() -> c.CDLL:
    """The interpreter, compiled if need be. Its symbols stay its own: see :func:`replace_cuda`."""
    lib = c.CDLL(str(library_path()), mode=c.RTLD_LOCAL)
    lib.emulator_new.restype = c.c_void_p
    lib.emulator_finding_count.restype = c.c_uint64
    return lib


def replace_cuda() -> None:
    """Make the interpreter's launch functions what the host code of CuTe DSL functions finds.

    For the rest of the process: kernels that are loaded after this run here even where there is a GPU.
    """
    c.CDLL(str(library_path()), mode=c.RTLD_GLOBAL)


class Interpreter:
    """A lowered kernel, loaded."""

    def __init__(self, program: Program) -> None:
        self.size = len(program.instructions)
        instructions = (InstructionRecord * self.size)(*(InstructionRecord(*i) for i in program.instructions))
        operands = np.array(program.operands, np.int32)
        roles = np.array(program.roles, np.uint8)
        constants = np.array([(s, w, _signed(v)) for s, w, v in program.constants], np.int64).reshape(-1)
        specials = np.array(list(program.specials.items()), np.int32).reshape(-1)
        self.handle = c.c_void_p(
            library().emulator_new(
                instructions, c.c_uint64(self.size), _pointer(operands), _pointer(roles), c.c_uint64(len(operands)),
                _pointer(constants), c.c_uint64(len(program.constants)), _pointer(specials),
                c.c_uint64(len(program.specials)), program.register_bytes, program.predicates,
            )
        )  # fmt: skip

    def __del__(self) -> None:
        library().emulator_free(self.handle)

    def run(
        self, config: LaunchConfig, regions: Sequence[tuple[int, int, int]]
    ) -> tuple[LaunchStats, list[RawFinding]]:
        """Run one launch; ``regions`` are (address, bytes, granule) of the memory that it may touch."""
        lib = library()
        lib.emulator_clear_regions(self.handle)
        for base, size, granule in regions:
            lib.emulator_add_region(self.handle, c.c_uint64(base), c.c_uint64(size), granule)
        stats = LaunchStats()
        lib.emulator_run(self.handle, c.byref(config), c.byref(stats))
        findings = []
        for i in range(lib.emulator_finding_count(self.handle)):
            r = FindingRecord()
            lib.emulator_finding(self.handle, c.c_uint64(i), c.byref(r))
            places = (r.pc, r.agent, r.other_pc, r.other_agent, r.cta, r.other_cta, r.space, r.address, r.count)
            findings.append(RawFinding(r.kind.decode(), r.text.decode(), *places, bool(r.fatal)))
        return stats, findings

    def profile(self) -> list[int]:
        """How often each instruction ran, by warp, in the last launch."""
        counts = np.zeros(self.size, np.uint64)
        library().emulator_profile(self.handle, _pointer(counts))
        return [int(count) for count in counts]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _pointer(array: np.ndarray) -> c.c_void_p:
    return array.ctypes.data_as(c.c_void_p)
