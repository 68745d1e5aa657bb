"""What kernels use: read from real cubins and PTX, compared with NVIDIA's own tool, and judged by limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from msa_vendored.cubin import CubinError, Footprint, Text, lane_registers, read_cubin, read_ptx
from msa_vendored.kernel_report import SHARED_BYTES, KernelUse, read_launches

TESTS = Path(__file__).resolve().parent


MEASURE = """
import json, os, sys
os.environ.update(CUTE_DSL_ARCH=sys.argv[1], CUTE_DSL_KEEP="ptx,cubin", CUTE_DSL_DUMP_DIR=sys.argv[2])
from dataclasses import asdict
from msa_vendored.kernel_report import measure
from ptx_emulator.report_kernels import compile_both
for use in measure(compile_both, arch=sys.argv[1], ratio=8):
    print(json.dumps(asdict(use) | {"violations": use.violations()}))
"""


def cuobjdump() -> Path:
    """NVIDIA's tool, which triton's wheel brings."""
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The two kernels' report by name, and the folder with their cubin."""
    folder = tmp_path_factory.mktemp("report")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, request.param, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["kernel"]: line for line in lines}, folder


def test_each_kernel_has_its_own_numbers(report: tuple[dict[str, Any], Path]) -> None:
    """Guards a gate that reads another kernel's numbers, or none: one of two kernels uses local and shared memory."""
    kernels, _ = report
    assert list(kernels) == ["modest", "greedy"]
    modest, greedy = kernels.values()
    assert (modest["threads"], modest["shared_bytes"], modest["local_bytes"], modest["barriers"]) == (64, 0, 0, 0)
    assert (greedy["threads"], greedy["shared_bytes"], greedy["barriers"]) == (96, 4000, 1)
    assert greedy["local_bytes"] >= 4 * 64
    assert modest["violations"] == []
    assert greedy["violations"] == [f"{greedy['local_bytes']} bytes of local memory (spills), at most 0"]
    assert (greedy["function"], greedy["options"]) == ("ptx_emulator.report_kernels.compile_both", "8")
    assert greedy["lane_registers"] == greedy["registers"]


def test_numbers_are_those_of_cuobjdump(report: tuple[dict[str, Any], Path]) -> None:
    """Guards the offsets and attribute numbers of the ELF reader."""
    _, folder = report
    (cubin,) = folder.rglob("*.cubin")
    command = [str(cuobjdump()), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", text)
    assert len(found) == 2
    ours = {f.kernel: (f.registers, f.local_bytes) for f in read_cubin(cubin.read_bytes())}
    assert ours == {name: (int(registers), int(stack)) for name, registers, stack in found}


def test_what_is_no_cubin_is_refused() -> None:
    """Guards a fatbinary or an empty file against passing as a kernel without spills."""
    with pytest.raises(CubinError, match="a 64-bit little-endian ELF file"):
        read_cubin(b"\x50\xed\x55\xba\x01\x00" + bytes(64))


PTX = """
.visible .entry first(.param .u64 a)
.reqntid 128, 3, 1
.minnctapersm 1
{
 .shared .align 16 .b8 table[100];
 .shared .align 4 .f32 scale;
 setmaxnreg.dec.sync.aligned.u32 40;
 setmaxnreg.inc.sync.aligned.u32 232;
 setmaxnreg.inc.sync.aligned.u32 232;
 mov.b32 %r7, 256;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+8], %r7;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 128;
}
.visible .entry second()
{
 ret;
}
"""


def test_ptx_gives_threads_registers_and_tensor_memory_of_each_entry() -> None:
    """Guards a kernel's numbers against those of its neighbour, and sizes that sit in a register."""
    first, second = read_ptx(PTX)
    assert first == Text("first", 384, (40, 232), 384, 104)
    assert second == Text("second", None, (), 0, 104)


@pytest.mark.parametrize("change", [("mov.b32 %r7, 256;", "mov.b32 %r7, %r8;"), ("mov.b32 %r7, 256;", "")])
def test_an_unknown_amount_of_tensor_memory_is_an_error(change: tuple[str, str]) -> None:
    """Guards the gate: what cannot be read must not count as 0."""
    with pytest.raises(CubinError, match=r"the size of a tcgen05\.alloc is not a constant"):
        read_ptx(PTX.replace(*change))


LANES: list[tuple[int, tuple[int, ...], int, tuple[int, ...] | None, int]] = [
    # threads, setmaxnreg, registers at launch, declared, expected
    (256, (), 100, None, 200),
    (96, (), 100, None, 100),
    (384, (40, 232), 168, None, 504),
    (384, (88, 168, 240), 168, None, 496),
    (512, (48, 112, 176), 128, None, 512),
    (512, (48, 112, 176), 128, (48, 48, 112, 176), 384),
]


@pytest.mark.parametrize(("threads", "values", "registers", "declared", "expected"), LANES)
def test_registers_of_a_lane(
    threads: int, values: tuple[int, ...], registers: int, declared: tuple[int, ...] | None, expected: int
) -> None:
    """Guards the sum that decides whether setmaxnreg can be granted at all: too many, and the kernel waits for ever."""
    text = Text("k", threads, values, 0, 0)
    assert lane_registers(text, Footprint("k", registers, 0, 0), declared) == expected


@pytest.mark.parametrize("declared", [(40, 232), (40, 240, 240), (232, 232, 232)])
def test_declared_registers_that_differ_from_the_code_are_an_error(declared: tuple[int, ...]) -> None:
    """Guards a declaration that was forgotten when the kernel changed."""
    with pytest.raises(CubinError, match="the registers that the module declares are not those in the code"):
        lane_registers(Text("k", 384, (40, 232), 0, 0), Footprint("k", 168, 0, 0), declared)


def test_a_kernel_of_any_size_is_an_error() -> None:
    """Guards the sum against a number of warpgroups that is guessed."""
    with pytest.raises(CubinError, match="does not fix its number of threads"):
        lane_registers(Text("k", None, (), 0, 0), Footprint("k", 32, 0, 0))


WITHIN = KernelUse("f", "", "sm_90a", "k", 384, 168, 512, (), 0, SHARED_BYTES, 512, 1, 1, 0.1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"local_bytes": 4}, ["4 bytes of local memory (spills), at most 0"]),
        ({"lane_registers": 520}, ["520 registers of a lane, at most 512"]),
        ({"shared_bytes": 232_449}, ["232449 bytes of shared memory, at most 232448"]),
        ({"tmem_columns": 640}, ["640 columns of tensor memory, at most 512"]),
    ],
)
def test_limits(change: dict[str, Any], expected: list[str]) -> None:
    """Guards each gate, on both sides of its limit."""
    assert replace(WITHIN, **change).violations() == expected


LAUNCH = """
  llvm.func @host(%arg0: !llvm.ptr) -> i32 {
    %0 = llvm.mlir.constant(SHARED : i64) : i64
    %1 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> !llvm.ptr, CONFIG
    llvm.store %0, %1 : i64, !llvm.ptr
    %2 = llvm.call @printf(%8) vararg(!llvm.func<i32 (ptr, ...)>) : (!llvm.ptr) -> i32
    %3 = llvm.mlir.addressof @kernels_main_0 : !llvm.ptr
    %4 = llvm.call @_cudaLaunchKernelEx(%5, %6, %7) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
""".replace("CONFIG", "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")


def test_dynamic_shared_memory_is_read_from_the_host_code() -> None:
    """Guards the number that no cubin holds; constants of another function must not be taken."""
    assert read_launches(LAUNCH.replace("SHARED", "1024") + LAUNCH.replace("SHARED", "4096")) == {"main_0": 4096}
    other = LAUNCH.replace("SHARED", "1024").replace("    llvm.store %0, %1", "    llvm.store %77, %1")
    with pytest.raises(CubinError, match="the shared memory of a launch is not a constant"):
        read_launches(LAUNCH.replace("SHARED", "1024") + other)
    assert read_launches(other, most_bytes=2048) == {"main_0": 2048}
