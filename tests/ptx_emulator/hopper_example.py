"""A small SM90 kernel of ours, for the emulator and the card: ``python -m ptx_emulator.hopper_example``.

One launch has what the SM90 kernels of this project use: tensor loads by a producer warp, wgmma with A from shared
memory and from registers and B along either direction, ``stmatrix``, proxy fences, ``setmaxnreg``, a tensor store, a
linear bulk reduction and packed reductions to global memory. Small integers go in, so that every result is exact.

Two consumer warpgroups of a CTA take 64 of its 128 rows each:
``s = q k^T``, ``out = s v``, ``grad += s^T q``, ``sums += columns of s`` (float32), ``signs += columns of q`` (bf16).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROWS, KEYS, DIM = 128, 64, 64
"""Rows of a CTA, keys, head dim."""
WARPGROUP_ROWS = 64
NAMES = ("q", "k", "v", "out", "grad", "sums", "signs")


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors of one launch: q ``[tiles * 128, 64]``, k and v ``[64, 64]`` in bf16, and the outputs, zeroed.

    out ``[tiles * 128, 64]`` bf16; grad ``[64, 64]`` and sums ``[64]`` float32; signs ``[64]`` bf16.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    grad: torch.Tensor
    sums: torch.Tensor
    signs: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """In the order of the kernel's parameters."""
        return [self.q, self.k, self.v, self.out, self.grad, self.sums, self.signs]


def make_problem(tiles: int, seed: int = 0) -> Problem:
    """Inputs of -1, 0 and 1: every product and sum is an integer below 256 in bf16 and 2^24 in float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((tiles * ROWS, DIM), (KEYS, DIM), (KEYS, DIM))
    q, k, v = (torch.randint(-1, 2, size, generator=generator).to(torch.bfloat16) for size in sizes)
    outputs = (torch.zeros(tiles * ROWS, DIM, dtype=torch.bfloat16), torch.zeros(KEYS, DIM), torch.zeros(KEYS))
    return Problem(q, k, v, *outputs, torch.zeros(DIM, dtype=torch.bfloat16))


def expect(problem: Problem) -> list[torch.Tensor]:
    """The outputs, from their definition. ``out`` is rounded to bf16 once; all else is exact."""
    q, k, v = (t.float() for t in (problem.q, problem.k, problem.v))
    scores = q @ k.T
    return [(scores @ v).to(torch.bfloat16), scores.T @ q, scores.sum(0), q.sum(0).to(torch.bfloat16)]


def run_on_card(result: Path) -> int:
    """Compile as for the emulator, but launch on the CUDA device; saves the PTX and CPU copies of the outputs."""
    os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="ptx", CUTE_DSL_LINEINFO="1", CUTE_DSL_NO_CACHE="1")
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(prefix="hopper-example-")
    from ptx_emulator.hopper_kernel import compile_example

    compiled = compile_example()
    tensors = [tensor.cuda() for tensor in make_problem(2).tensors()]
    compiled(*tensors)
    torch.cuda.synchronize()
    torch.save((compiled.__ptx__, [tensor.cpu() for tensor in tensors[3:]]), result)
    return 0


def run_exported(compiled: Any, folder: Path) -> None:
    """Export, load and emulate: the object file, and a library linked from it.

    Prints for each whether the outputs are right, the findings, and what a call without PTX says.
    """
    import cutlass.cute as cute

    from ptx_emulator import emulate
    from ptx_emulator.build import find_compiler

    files, name = (folder / "example.o", folder / "example.so"), "hopper_example"
    compiled.export_to_c(str(files[0]), function_name=name)
    subprocess.run([*find_compiler(), "-shared", "-o", str(files[1]), str(files[0])], check=True)
    for file in files:
        loaded = getattr(cute.runtime.load_module(str(file), enable_tvm_ffi=True), name)
        problem = make_problem(2)
        report = emulate(loaded, *problem.tensors(), ptx=compiled.__ptx__, names=NAMES)
        right = all(torch.equal(got, want) for got, want in zip(problem.tensors()[3:], expect(problem), strict=True))
        refusal = ""
        try:
            emulate(loaded, *problem.tensors())
        except ValueError as error:
            refusal = str(error)
        print(json.dumps({"right": right, "findings": list(map(str, report.findings)), "refusal": refusal}))


def main() -> int:
    """Run the requests on standard input, one JSON object each; results go out alike.

    A request has ``schedule``, ``seed`` and ``tiles``, and may have ``delete``: the kind of an instruction and which
    of its occurrences is deleted from the kernel. Or it has ``export``: a folder, see :func:`run_exported`.

    ``python -m ptx_emulator.hopper_example card FILE`` runs a problem of two tiles on the current CUDA device instead
    and saves its PTX and outputs in the file; with ``emulator`` in place of ``card``, in the emulator.
    """
    if sys.argv[1:2] == ["card"]:
        return run_on_card(Path(sys.argv[2]))
    from ptx_emulator import Kernel, cute_host, emulate
    from ptx_emulator.mutation import delete

    cute_host.prepare("sm_90a")
    from ptx_emulator.hopper_kernel import compile_example

    function = cute_host.CompiledFunction(compile_example())
    if sys.argv[1:2] == ["emulator"]:
        problem = make_problem(2)
        emulate(function, *problem.tensors(), names=NAMES).require_clean()
        torch.save((function.function.__ptx__, problem.tensors()[3:]), sys.argv[2])
        return 0
    ((entry, whole),) = function.kernels.items()
    for line in sys.stdin:
        request = json.loads(line)
        if "export" in request:
            run_exported(function.function, Path(request["export"]))
            continue
        kernel = whole
        if request.get("delete"):
            kind, nth = request["delete"]
            places = [pc for pc in range(len(whole.program.instructions)) if whole.program.kind(pc) == kind]
            kernel = Kernel(whole.entry, delete([places[nth]]))
        function.kernels[entry] = kernel
        problem = make_problem(request["tiles"], request["seed"])
        report = emulate(
            function, *problem.tensors(), schedule=request["schedule"], seed=request["seed"], names=NAMES,
            max_instructions=1_000_000,
        )  # fmt: skip
        outputs = zip(NAMES[3:], problem.tensors()[3:], expect(problem), strict=True)
        wrong = [name for name, got, want in outputs if not torch.equal(got, want)]
        result = {"wrong": wrong, "kinds": sorted(report.kinds), "findings": [str(f) for f in report.findings]}
        print(json.dumps({**result, "mma": sum(launch.mma for launch in report.launches)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
