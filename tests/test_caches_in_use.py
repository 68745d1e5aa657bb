"""The caches as they are used: what doctor counts, what the real DSL says, and processes that start cold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cache_cases import OTHER_TREE
from child_processes import evaluate_code

from msa_vendored.caches import aot_cache_key, extension_name, keyed_cache_folder, list_cache_folders
from msa_vendored.compiling import digest_sources

pytest_plugins = ["cache_fixtures"]  # fixtures world


def test_cache_folders_count_only_this_build(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards doctor's sizes: what another build left in the same folders is not this one's."""
    world.setenv("MINFER_FMHA_CACHE_DIR", str(tmp_path / "jit"))
    world.setenv("MM_SPARSE_ATTN_AOT_CACHE", str(tmp_path / "aot"))
    world.setenv("MSA_VENDORED_KERNEL_CACHE", str(tmp_path / "own"))
    kernels = keyed_cache_folder(tmp_path / "jit")
    files = {
        kernels / "plan" / "plan.so": 5,
        tmp_path / "jit" / "plan" / "plan.so": 100,
        tmp_path / "aot" / f"fwd_00_{aot_cache_key()}.o": 7,
        tmp_path / "aot" / "fwd_00.o": 100,
        tmp_path / "ext" / extension_name("csr") / "csr.so": 11,
        tmp_path / "ext" / f"csr_{OTHER_TREE}_0" / "csr.so": 100,
        tmp_path / "own" / f"delta-sm_90a-{digest_sources()[:12]}-0123456789ab.o": 13,
        tmp_path / "own" / f"delta-sm_90a-{digest_sources()[:12]}-0123456789ab.lock": 0,
        tmp_path / "own" / "delta-sm_90a-0123456789ab-0123456789ab.o": 100,
    }
    for path, size_bytes in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_bytes))
    found = [(folder.name, folder.path, folder.files, folder.size_bytes) for folder in list_cache_folders()]
    assert found == [
        ("nvcc kernels", kernels, 1, 5),
        ("CuTe DSL kernels", tmp_path / "aot", 1, 7),
        ("torch extensions", tmp_path / "ext", 1, 11),
        ("own kernels", tmp_path / "own", 1, 13),
    ]
    world.setenv("MSA_VENDORED_KERNEL_CACHE", "off")
    assert [folder.name for folder in list_cache_folders()] == [name for name, *_ in found[:3]]


@pytest.mark.parametrize(
    ("switches", "name"),
    [((), "fmha_sm100"), (("SM_TIMING",), "fmha_sm100_sm_timing"), (("GPU_TRACE",), "fmha_sm100_gpu_trace")],
)
def test_doctor_looks_where_msa_puts_its_kernels(
    world: pytest.MonkeyPatch, tmp_path: Path, switches: tuple[str, ...], name: str
) -> None:
    """Guards doctor against naming another folder than MSA's own choice."""
    world.setenv("HOME", str(tmp_path))
    for switch in switches:
        world.setenv(switch, "")
    assert list_cache_folders()[0].path.parent == tmp_path / ".cache" / "minfer" / name


REAL_DSL = """
import json, sys
from types import SimpleNamespace
import msa_vendored
from msa_vendored import caches
caches.provenance = lambda: SimpleNamespace(tree12="0123456789ab")
import cutlass, cuda.bindings.driver as driver
calls = []
real = driver.cuInit
driver.cuInit = lambda flags: calls.append(flags) or real(flags)
print(json.dumps([caches.aot_cache_key(), len(calls)]))
"""


def test_the_real_dsl_says_which_architecture_it_compiles_for() -> None:
    """Guards the names inside the DSL that the key reads, and that a set CUTE_DSL_ARCH keeps CUDA uninitialised."""
    key, initialised = evaluate_code(REAL_DSL, CUTE_DSL_ARCH="sm_103a")
    assert key.startswith("0123456789ab-4.6.2-cu12-sm_103a-")
    assert initialised == 0


def test_the_real_dsl_without_a_device_compiles_for_its_default() -> None:
    """Guards against a key without architecture on a machine without a GPU, where the DSL compiles for sm_100a."""
    hidden = {"CUTE_DSL_ARCH": "", "CUDA_VISIBLE_DEVICES": ""}
    key, initialised = evaluate_code(f"import os; del os.environ['CUTE_DSL_ARCH']\n{REAL_DSL}", **hidden)
    assert key.startswith("0123456789ab-4.6.2-cu12-sm_100a-")
    assert initialised > 0, "the count that the test above relies on does not count"


RACE = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
import msa_vendored
from msa_vendored import caches
caches.provenance = lambda: SimpleNamespace(tree12="0123456789ab")
import torch.utils.cpp_extension
folder = Path(os.environ["RACE"])
flags = ["-O3"]
name = caches.extension_name("csr", flags)
stale = folder / "extensions" / name / "lock"
stale.parent.mkdir(parents=True)
stale.touch()
start_read, start_write = os.pipe()
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        os.close(start_write)
        os.read(start_read, 1)  # returns when the parent closes its end: all children start at once
        path = caches.load_extension("csr", sources=[str(folder / "csr.cpp")], extra_cflags=flags, is_standalone=True,
                                     is_python_module=False)
        os._exit(0 if path == str(folder / "extensions" / name / name) and os.path.isfile(path) else 1)
    children.append(child)
os.close(start_write)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps([codes, (folder / "builds").read_text().splitlines(), stale.exists()]))
"""

NINJA = """#!/bin/sh
[ "$1" = --version ] && { echo 1.13.0; exit 0; }
name=$(basename "$PWD")
[ -e "$name" ] && exit 0
echo "start" >> "$RACE/builds"; sleep 0.3; echo "end" >> "$RACE/builds"
touch "$name"
"""


def test_processes_that_start_cold_build_an_extension_once_despite_a_dead_lock(tmp_path: Path) -> None:
    """Guards torch's lock file: one left by a killed process makes every later process wait for ever."""
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(NINJA)
    ninja.chmod(0o755)
    (tmp_path / "csr.cpp").touch()
    environment = {
        "RACE": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "PATH": f"{ninja.parent}:{os.environ['PATH']}",
    }
    codes, builds, stale = evaluate_code(RACE, **environment)
    assert codes == [0, 0, 0, 0]
    assert builds == ["start", "end"]
    assert stale is False
