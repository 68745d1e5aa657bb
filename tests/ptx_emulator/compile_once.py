"""Loads one small kernel through the cache in several processes at once: ``python -m … sm_100a 2``.

Each process prints a JSON line: how often it compiled, and whether the loaded object gave the exact result in the
emulator. Processes are forked after the imports and released together, so that they do race.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from ptx_emulator import cute_host


def load_and_run(arch: str) -> dict[str, Any]:
    """Load through the cache, run in the emulator, compare exactly."""
    from msa_vendored.compiling import load_kernel
    from ptx_emulator.launch import Options
    from ptx_emulator.report import Report
    from ptx_emulator.scale_kernel import compile_scale

    compiled: list[Any] = []

    def compile_counted(*, arch: str) -> Any:
        compiled.append(compile_scale(arch=arch))
        return compiled[-1]

    kernel = load_kernel(compile_counted, arch=arch)
    source = compiled[0] if compiled else compile_scale(arch=arch)
    assert kernel is not source, "what was compiled was used, not what is on disk"
    function = cute_host.CompiledFunction(kernel, ptx=source.__ptx__)
    x = torch.arange(1000, dtype=torch.float32)
    y = torch.full_like(x, torch.nan)
    report = Report()
    function.run((x, y, 3.0), Options(), report)
    return {"compilations": len(compiled), "exact": torch.equal(y, 3 * x) and not report.findings}


def main() -> int:
    """Run the processes; the exit status is the number of them that failed."""
    arch, count = sys.argv[1], int(sys.argv[2])
    cute_host.prepare(arch)
    import cutlass  # noqa: F401

    start_read, start_write = os.pipe()
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os.close(start_write)
            os.read(start_read, 1)  # returns when the parent closes its end
            print(json.dumps(load_and_run(arch)), flush=True)
            os._exit(0)
        children.append(child)
    os.close(start_write)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    raise SystemExit(main())
