"""The built wheel, as installed: it binds on a CPU under the tested DSL, and its caches hold with several processes.

These tests need the wheel: ``nox -s tests`` installs it before it runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import msa_vendored

SITE = Path(msa_vendored.__file__).resolve().parents[1]

PREAMBLE = """
import importlib, json, os, sys
import msa_vendored
PACKAGE = msa_vendored.provenance().package
"""


@pytest.fixture(scope="module", autouse=True)
def _installed_wheel() -> None:
    """Fail, and do not skip, where only the checkout is importable: CI must not pass without having bound."""
    if not (SITE / "msa_vendored" / "_provenance.json").is_file():
        pytest.fail(f"msa_vendored in {SITE} is not the built wheel: nox -s tests", pytrace=False)


def evaluate(code: str, **environment: str) -> Any:
    """Run code in a fresh interpreter without a GPU; its last line is JSON."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREAMBLE + code],
        env={**os.environ, "PYTHONPATH": str(SITE), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_launchers_bind_without_a_gpu_and_are_the_official_ones() -> None:
    """Guards the bundle on the real MSA: binding must not need, nor touch, a CUDA device, and must not wrap."""
    code = """
import cuda.bindings.driver as driver, torch
calls = []
real = driver.cuInit
driver.cuInit = lambda flags: calls.append(flags) or real(flags)
bound = msa_vendored.kernels()
package, sparse = (importlib.import_module(PACKAGE + part) for part in ("", ".sparse"))
print(json.dumps({
    "official": [
        bound.build_k2q_csr is sparse.build_k2q_csr,
        bound.sparse_atten_func is sparse.sparse_atten_func,
        bound.fmha_sm100 is package.fmha_sm100,
        bound.fmha_sm100_plan is package.fmha_sm100_plan,
        bound.run_backward is msa_vendored.run_backward,
    ],
    "homes": [getattr(bound, name).__module__ for name in bound.__slots__],
    "cuda": [len(calls), torch.cuda.is_initialized()],
    "again": bound is msa_vendored.kernels(),
}))
"""
    found = evaluate(code)
    package = msa_vendored.provenance().package
    assert found["official"] == [True] * 5
    assert all(home.startswith(f"{package}.") for home in found["homes"][:4])
    assert found["homes"][4].startswith("msa_vendored.backward")
    assert found["cuda"] == [0, False]
    assert found["again"] is True


def test_binding_leaves_no_trace_in_the_process() -> None:
    """Guards other users of the process: MSA's own import puts top-level modules, a path and FFI functions there."""
    code = """
import cutlass.cute, quack, torch, tvm_ffi
before = [list(sys.path), cutlass.cute.compile]
msa_vendored.kernels()
leaks = ["src", "interface", "quantize", "sparse_index_utils", "fp4_indexer_interface", "sparse_fmha_adapter"]
functions = ["fmha_sm100_plan", "fmha_sm100", "sparse_topk_select"]
print(json.dumps({
    "leaks": [name for name in leaks if name in sys.modules],
    "path": sys.path == before[0],
    "compile": cutlass.cute.compile is before[1],
    "minfer": [f for f in functions if tvm_ffi.get_global_func(f"minfer.ops.{f}", allow_missing=True) is not None],
    "private": [f for f in functions if tvm_ffi.get_global_func(f"{PACKAGE}.{f}", allow_missing=True) is None],
}))
"""
    assert evaluate(code) == {"leaks": [], "path": True, "compile": True, "minfer": [], "private": []}


NVCC = """#!/bin/sh
out=
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
kind=compile
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; [ "$1" = -shared ] && kind=link; shift; done
sleep 0.2
echo "$kind $(basename "$out")" >> "$RACE_LOG"
echo whole > "$out"
"""

RACE = """
import tvm_ffi
jit = importlib.import_module(PACKAGE + ".jit")
class Loaded:
    def __init__(self, path):
        assert open(path).read() == "whole\\n", path
    def __getattr__(self, name):
        return name
tvm_ffi.load_module = Loaded
def use():
    jit.get_plan_fn()
    jit.get_fmha_variant(jit._BFLOAT16_CODE, 128, True, 2, -1, False, 1)
"""

FORK = """
start_read, start_write = os.pipe()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        os.close(start_write)
        os.read(start_read, 1)  # returns when the parent closes its end: all children start at once
        try:
            use()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(start_write)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps([codes, str(jit.CACHE_BASE)]))
"""

WARM = """
import subprocess
def refuse(*arguments, **_):
    raise AssertionError(f"started {arguments}")
subprocess.Popen = subprocess.run = refuse
use()
print(json.dumps(str(jit.CACHE_BASE)))
"""


def test_four_processes_compile_each_kernel_once_and_a_node_without_nvcc_runs_them(tmp_path: Path) -> None:
    """Guards the first use by all ranks of a node at once, and a warm cache where nothing can be compiled."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    log = tmp_path / "log"
    environment = {"MINFER_FMHA_CACHE_DIR": str(tmp_path / "cache"), "RACE_LOG": str(log)}
    codes, folder = evaluate(RACE + FORK, CUDA_HOME=str(tmp_path / "cuda"), **environment)
    assert codes == [0, 0, 0, 0]
    steps = log.read_text().splitlines()
    assert sorted(step.split()[0] for step in steps) == ["compile"] * 3 + ["link"] * 2
    assert len(set(steps)) == 5
    assert evaluate(RACE + WARM, CUDA_HOME=str(tmp_path / "nothing"), **environment) == folder
