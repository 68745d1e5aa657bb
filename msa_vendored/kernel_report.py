"""Compile all our kernels for an architecture without owning a GPU of it, and say what they use.

``python -m msa_vendored.kernel_report --arch sm_100a`` prints a line for each kernel and fails if one breaks a limit:
no local memory (hence no spills), registers within the 512 of a sub-partition's lane, shared memory within the 232,448
bytes that a CTA can have on sm_90 and sm_100, at most 512 columns of tensor memory. No nvcc is needed: DSL and ptxas
are those of the installed CuTe DSL, and the numbers are read from what they produce (:mod:`msa_vendored.cubin`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from msa_vendored.cubin import REGISTERS_PER_LANE, CubinError, Footprint, Text, lane_registers, read_cubin, read_ptx

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
SHARED_BYTES = 232_448
"""227 KiB: most shared memory of a CTA for compute capability 9.0, 10.0 and 10.3 (CUDA programming guide)."""
TMEM_COLUMNS = 512
RATIOS = (1, 2, 4, 8, 16)
TOPK_CHOICES = (4, 8, 16, 32)

_STRUCT = re.escape("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
"""The launch configuration in the DSL's lowered host code; member 2 is the dynamic shared memory in bytes."""
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)")
_MEMBER = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*{_STRUCT}")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i64")
_KERNEL = re.compile(r"llvm\.mlir\.addressof @kernels_([\w$]+) ")


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel of one compiled function.

    Attributes:
        function: ``module.compile_<stage>``.
        options: values of the structural options, such as ``"16 bf16"``.
        arch: compiled for.
        kernel: name of the device function.
        threads: of a CTA.
        registers: per thread at launch.
        lane_registers: of one lane of a sub-partition over all warpgroups, as :func:`msa_vendored.cubin.lane_registers`
            counts them.
        setmaxnreg: values in the code.
        local_bytes: stack per thread; 0 if nothing is spilled.
        shared_bytes: static and dynamic.
        tmem_columns: of tensor memory.
        barriers: named barriers.
        cubin_bytes: of the function's cubin.
        seconds: that the function took to compile.
    """

    function: str
    options: str
    arch: str
    kernel: str
    threads: int
    registers: int
    lane_registers: int
    setmaxnreg: tuple[int, ...]
    local_bytes: int
    shared_bytes: int
    tmem_columns: int
    barriers: int
    cubin_bytes: int
    seconds: float

    def violations(self) -> list[str]:
        """Which limits the kernel breaks, in words."""
        limits = (
            ("bytes of local memory (spills)", self.local_bytes, 0),
            ("registers of a lane", self.lane_registers, REGISTERS_PER_LANE),
            ("bytes of shared memory", self.shared_bytes, SHARED_BYTES),
            ("columns of tensor memory", self.tmem_columns, TMEM_COLUMNS),
        )
        return [f"{value} {name}, at most {limit}" for name, value, limit in limits if value > limit]


def read_launches(host_code: str, most_bytes: int | None = None) -> dict[str, int]:
    """Dynamic shared memory of each kernel that the lowered host code of a function launches.

    Args:
        host_code: ``str(compiled.ir_module)``.
        most_bytes: what a launch takes at most whose amount depends on its arguments.

    Raises:
        CubinError: it is neither a constant nor bounded, or the code is not of the form that CuTe DSL 4.6 to 4.8 make.
    """
    constants: dict[str, int] = {}
    found: dict[str, int] = {}
    member = shared = kernel = ""
    for line in host_code.splitlines():
        if line.lstrip().startswith("llvm.func "):
            constants, member, shared, kernel = {}, "", "", ""
        elif (match := _CONSTANT.search(line)) is not None:
            constants[match[1]] = int(match[2])
        elif (match := _MEMBER.search(line)) is not None:
            member = match[1]
        elif (match := _STORE.search(line)) is not None and match[2] == member:
            shared = match[1]
        elif (match := _KERNEL.search(line)) is not None:
            kernel = match[1]
        elif "llvm.call @_cudaLaunchKernelEx(" in line:
            size_bytes = constants.get(shared, most_bytes)
            if kernel == "" or shared == "" or size_bytes is None:
                raise CubinError(
                    "the shared memory of a launch is not a constant", where=kernel, got=shared or "nothing"
                )
            found[kernel] = max(found.get(kernel, 0), size_bytes)
    return found


def measure(
    compile_stage: Callable[..., Any], *, arch: str, most_shared_bytes: int | None = None, **options: Any
) -> list[KernelUse]:
    """Compile one function and read what its kernels use, in the order of the PTX.

    Args:
        compile_stage: its module may define ``WARPGROUP_REGISTERS``, a tuple with the registers of each warpgroup;
            otherwise an upper bound is taken.
        arch: to compile for.
        most_shared_bytes: what a launch takes at most that sizes its shared memory by its arguments.
        **options: structural options.
    """
    started = time.perf_counter()
    compiled = compile_stage(arch=arch, **options)
    seconds = time.perf_counter() - started
    footprints = {footprint.kernel: footprint for footprint in read_cubin(compiled.__cubin__)}
    module = sys.modules[compile_stage.__module__]
    shared = read_launches(str(compiled.ir_module), most_shared_bytes)
    name = f"{compile_stage.__module__}.{compile_stage.__qualname__}".removeprefix("msa_vendored.")
    declared = getattr(module, "WARPGROUP_REGISTERS", None)
    common: dict[str, Any] = {
        "function": name,
        "options": " ".join(str(value).replace(" ", "") for value in options.values()),
        "arch": arch,
        "cubin_bytes": len(compiled.__cubin__),
        "seconds": round(seconds, 1),
    }
    texts = read_ptx(compiled.__ptx__)
    for text in texts:
        if text.kernel not in shared:
            raise CubinError("a kernel is never launched", where=f"{name}: {text.kernel}")
    return [_describe_use(text, footprints[text.kernel], shared[text.kernel], declared, common) for text in texts]


def _describe_use(
    text: Text,
    footprint: Footprint,
    dynamic_shared_bytes: int,
    declared: tuple[int, ...] | None,
    common: dict[str, Any],
) -> KernelUse:
    return KernelUse(
        **common,
        kernel=_short(text.kernel),
        threads=text.threads or 0,
        registers=footprint.registers,
        lane_registers=lane_registers(text, footprint, declared if text.setmaxnreg else None),
        setmaxnreg=text.setmaxnreg,
        local_bytes=footprint.local_bytes,
        shared_bytes=text.static_shared_bytes + dynamic_shared_bytes,
        tmem_columns=text.tmem_columns,
        barriers=footprint.barriers,
    )


def _short(symbol: str) -> str:
    """The name of the Python function: the DSL appends its class, and the types of its arguments."""
    return re.split(r"_(?:msa_vendored|tensor|object|Copy|ptr)", symbol.removeprefix("kernel_cutlass_"))[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """A function to compile, its structural options, and a bound of shared memory that only launches decide."""

    compile: Callable[..., Any]
    options: dict[str, Any]
    most_shared_bytes: int | None = None


def list_stages(arch: str) -> list[Stage]:
    """What the launchers compile for an architecture, with their structural options."""
    return list_backward_stages(arch) + (list_hopper_stages() if arch == "sm_90a" else [])


def list_backward_stages(arch: str) -> list[Stage]:
    """Every function that the backward compiles, with every set of options, once."""
    from msa_vendored.backward.accumulation import ARCH_ACCUMULATIONS
    from msa_vendored.backward.stages import Structure, load_stages

    found: list[Stage] = []

    def collect(compile_stage: Callable[..., Any], *, arch: str, **options: Any) -> Callable[..., Any]:
        if (stage := Stage(compile_stage, options)) not in found:
            found.append(stage)
        return compile_stage

    accumulations = ARCH_ACCUMULATIONS[arch]
    for ratio, dq_accumulation in product(RATIOS, accumulations):
        load_stages(Structure(arch, ratio, dq_accumulation, deterministic=False), load=collect)
    load_stages(Structure(arch, RATIOS[-1], accumulations[0], deterministic=True), load=collect)
    return found


def list_hopper_stages() -> list[Stage]:
    """What the other launchers on SM90 compile: every ratio with 16 blocks a query, other numbers of blocks at 16."""
    from msa_vendored.hopper.csr import MAX_BITMAP_BYTES, chunk_queries
    from msa_vendored.hopper.csr_kernels import compile_csr
    from msa_vendored.hopper.forward_main import compile_forward
    from msa_vendored.hopper.fused_select_kernel import compile_fused_select
    from msa_vendored.hopper.score_kernel import compile_score
    from msa_vendored.hopper.segments import compile_segments
    from msa_vendored.hopper.select_kernel import compile_select

    shapes = [{"ratio": ratio, "topk": 16} for ratio in RATIOS] + [{"ratio": 16, "topk": topk} for topk in (4, 8, 32)]
    chunks = sorted({chunk_queries(1 << bits) for bits in range(16)} - {0})
    return [
        Stage(compile_segments, {}),
        *(Stage(compile_forward, {**shape, "scaled": scaled}) for shape in shapes for scaled in (False, True)),
        Stage(compile_score, {}),
        *(Stage(compile_select, {"topk": topk}) for topk in TOPK_CHOICES),
        *(Stage(compile_fused_select, {"topk": topk}) for topk in TOPK_CHOICES),
        *(Stage(compile_csr, {"chunk": chunk, "topk": 16}, MAX_BITMAP_BYTES) for chunk in chunks),
        *(Stage(compile_csr, {"chunk": chunks[-1], "topk": topk}, MAX_BITMAP_BYTES) for topk in (4, 8, 32)),
    ]


def print_uses(uses: list[KernelUse]) -> None:
    """One line a kernel, columns aligned."""
    header = (
        "function",
        "options",
        "kernel",
        "threads",
        "regs",
        "lane",
        "setmaxnreg",
        "local",
        "shared",
        "tmem",
        "bars",
        "s",
    )
    rows = [header] + [
        (
            use.function.rpartition("compile_")[2], use.options, use.kernel,
            str(use.threads), str(use.registers), str(use.lane_registers), "/".join(map(str, use.setmaxnreg)) or "-",
            str(use.local_bytes), str(use.shared_bytes), str(use.tmem_columns), str(use.barriers), str(use.seconds),
        )
        for use in uses
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a kernel breaks a limit."""
    parser = argparse.ArgumentParser(prog="python -m msa_vendored.kernel_report", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_100a")
    parser.add_argument("--only", default="", help="part of the function's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a kernel")
    options = parser.parse_args(arguments)
    if "cutlass" in sys.modules:
        raise RuntimeError("cutlass is already imported; compile in a fresh process")
    os.environ.update(CUTE_DSL_ARCH=options.arch, CUTE_DSL_KEEP="ptx,cubin")
    import tempfile

    uses: list[KernelUse] = []
    with tempfile.TemporaryDirectory(prefix="msa-vendored-kernels-") as folder:
        os.environ["CUTE_DSL_DUMP_DIR"] = folder
        for stage in list_stages(options.arch):
            if options.only in f"{stage.compile.__module__}.{stage.compile.__qualname__}":
                uses += measure(
                    stage.compile, arch=options.arch, most_shared_bytes=stage.most_shared_bytes, **stage.options
                )
    if options.json:
        print(*(json.dumps(asdict(use)) for use in uses), sep="\n")
    else:
        import cutlass

        print(f"{options.arch}, CuTe DSL {cutlass.__version__}, CUDA {cutlass.CUDA_VERSION.major}")
        print_uses(uses)
    broken = [f"{use.function} {use.options}, {use.kernel}: {text}" for use in uses for text in use.violations()]
    print(*broken, sep="\n", file=sys.stderr, end="\n" if broken else "")
    if not uses:
        print("no kernel was compiled", file=sys.stderr)
    return 1 if broken or not uses else 0


if __name__ == "__main__":
    raise SystemExit(main())
