"""Names of compiled kernels: every input that changes a kernel changes its name, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import msa_vendored
from msa_vendored import caches
from msa_vendored.caches import aot_cache_key, extension_name, keyed_cache_folder, list_cache_folders
from msa_vendored.compiling import digest_sources

TREE = "0123456789ab"
OTHER_TREE = "ba9876543210"
SITE = Path(msa_vendored.__file__).resolve().parents[1]


def make_nvcc(home: Path, content: bytes = b"\x7fELF nvcc 13.0") -> Path:
    """A toolkit whose nvcc can be looked at but not run."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_bytes(content)
    nvcc.chmod(0o755)
    return home


@pytest.fixture
def world(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A built tree, a toolkit and versions, all made up; each test changes one of them."""
    patch = clean_environment
    patch.setattr(caches, "provenance", lambda: SimpleNamespace(tree12=TREE))
    patch.setattr(caches, "_version", lambda name: {"torch": "2.13.0"}.get(name, "1.0"))
    patch.setattr("platform.machine", lambda: "x86_64")
    patch.setenv("CUDA_HOME", str(make_nvcc(tmp_path / "cuda")))
    dsl = SimpleNamespace(envar=SimpleNamespace(arch="sm_100a"))
    cutlass = SimpleNamespace(__version__="4.6.2", CUDA_VERSION=SimpleNamespace(major=12))
    stub_module(patch, "cutlass", cutlass)
    stub_module(patch, "cutlass.cutlass_dsl", SimpleNamespace(CuTeDSL=SimpleNamespace(_get_dsl=lambda: dsl)))
    extension = SimpleNamespace(CUDA_HOME=str(tmp_path / "cuda"), get_default_build_root=lambda: str(tmp_path / "ext"))
    stub_module(patch, "torch", SimpleNamespace())
    stub_module(patch, "torch.utils", SimpleNamespace(cpp_extension=extension))
    stub_module(patch, "torch.utils.cpp_extension", extension)
    return patch


def stub_module(patch: pytest.MonkeyPatch, name: str, content: Any) -> None:
    patch.setitem(sys.modules, name, content)


Change = Callable[[pytest.MonkeyPatch, Path], None]


def set_variable(name: str, value: str = "1") -> Change:
    return lambda patch, _: patch.setenv(name, value)


def change_tree(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(caches, "provenance", lambda: SimpleNamespace(tree12=OTHER_TREE))


def change_nvcc(_: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_nvcc(tmp_path / "cuda", b"\x7fELF nvcc 12.9 another")


def change_machine(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr("platform.machine", lambda: "aarch64")


def change_version(name: str) -> Change:
    def change(patch: pytest.MonkeyPatch, _: Path) -> None:
        versions = {"torch": "2.13.0", name: "9.9"}
        patch.setattr(caches, "_version", lambda asked: versions.get(asked, "1.0"))

    return change


def change_dsl(**attributes: Any) -> Change:
    return lambda _, __: vars(sys.modules["cutlass"]).update(attributes)


def change_arch(_: pytest.MonkeyPatch, __: Path) -> None:
    sys.modules["cutlass.cutlass_dsl"].CuTeDSL._get_dsl().envar.arch = "sm_103a"


JIT_CHANGES: dict[str, Change] = {
    "tree": change_tree,
    "nvcc": change_nvcc,
    "machine": change_machine,
    "tvm-ffi": change_version("apache-tvm-ffi"),
    "NVCC_PREPEND_FLAGS": set_variable("NVCC_PREPEND_FLAGS", "-O0"),
    "NVCC_APPEND_FLAGS": set_variable("NVCC_APPEND_FLAGS", "-G"),
    "NVCC_CCBIN": set_variable("NVCC_CCBIN", "clang"),
    "GPU_TRACE": set_variable("GPU_TRACE", ""),
    "SM_TIMING": set_variable("SM_TIMING", ""),
    "FMHA_GMEM_CHECK": set_variable("FMHA_GMEM_CHECK", ""),
}

AOT_CHANGES: dict[str, Change] = {
    "tree": change_tree,
    "machine": change_machine,
    "DSL": change_dsl(__version__="4.6.3"),
    "flavour": change_dsl(CUDA_VERSION=SimpleNamespace(major=13)),
    "architecture": change_arch,
    "quack": change_version("quack-kernels"),
    "tvm-ffi": change_version("apache-tvm-ffi"),
    "assertions": set_variable("CUTE_DSL_ENABLE_ASSERTIONS"),
    "options": set_variable("CUTE_DSL_COMPILER_OPT", "iket"),
}

EXTENSION_CHANGES: dict[str, Change] = {
    "tree": change_tree,
    "nvcc": change_nvcc,
    "machine": change_machine,
    "torch": change_version("torch"),
    "CXX": set_variable("CXX", "clang++"),
    "NVCC_APPEND_FLAGS": set_variable("NVCC_APPEND_FLAGS", "-G"),
    "PYTORCH_NVCC": set_variable("PYTORCH_NVCC", "ccache nvcc"),
}


@pytest.mark.parametrize("what", JIT_CHANGES)
def test_nvcc_kernels_get_another_folder(world: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """Guards against loading a kernel that other sources, another compiler or other settings made."""
    before = keyed_cache_folder(tmp_path)
    JIT_CHANGES[what](world, tmp_path)
    assert keyed_cache_folder(tmp_path) != before


@pytest.mark.parametrize("what", AOT_CHANGES)
def test_dsl_kernels_get_another_name(world: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """Guards against loading an object of another tree, DSL or architecture: MSA's own key has none of them."""
    before = aot_cache_key()
    AOT_CHANGES[what](world, tmp_path)
    assert aot_cache_key() != before


@pytest.mark.parametrize("what", EXTENSION_CHANGES)
def test_torch_extensions_get_another_name(world: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """Guards against torch taking an extension of another tree or torch for up to date."""
    before = extension_name("csr")
    EXTENSION_CHANGES[what](world, tmp_path)
    assert extension_name("csr") != before


def test_architecture_flags_are_part_of_an_extensions_name(world: pytest.MonkeyPatch) -> None:
    """Guards against one name for sm_100 and sm_103."""
    names = {extension_name("csr", flags) for flags in ((), ("-arch=sm_100",), ("-arch=sm_103",))}
    assert len(names) == 3


def test_names_have_the_documented_form(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards doctor and the user's own cleaning scripts, which find a build's files by the tree in their names."""
    tree, compiler, settings = keyed_cache_folder(tmp_path).relative_to(tmp_path).name.split("-")
    assert (tree, len(compiler), len(settings)) == (TREE, 12, 8)
    assert aot_cache_key().startswith(f"{TREE}-4.6.2-cu12-sm_100a-")
    assert extension_name("csr").startswith(f"csr_{TREE}_")
    assert extension_name("csr").isidentifier()


def test_a_toolkit_elsewhere_shares_the_kernels(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards a home directory shared by hosts that have the same toolkit in different places."""
    before = keyed_cache_folder(tmp_path), extension_name("csr")
    moved = str(make_nvcc(tmp_path / "opt"))
    world.setenv("CUDA_HOME", moved)
    vars(sys.modules["torch.utils.cpp_extension"])["CUDA_HOME"] = moved
    assert (keyed_cache_folder(tmp_path), extension_name("csr")) == before


def test_asking_for_a_folder_creates_nothing(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards an import on a read-only home, and the search for a warm folder against finding empty ones."""
    keyed_cache_folder(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def settings_of(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({}, "no-nvcc"),
        ({"aaaa": 0}, "no-nvcc"),
        ({"aaaa": 1}, "aaaa"),
        ({"aaaa": 2, "bbbb": 1}, "aaaa"),
        ({"aaaa": 1, "bbbb": 1}, "bbbb"),
    ],
    ids=["none", "only an empty one", "one", "the fullest", "the last by name"],
)
def test_without_nvcc_a_warm_folder_is_used(
    world: pytest.MonkeyPatch, tmp_path: Path, kernels: dict[str, int], expected: str
) -> None:
    """Guards nodes without a toolkit that run from a cache which another node filled."""
    settings = settings_of(keyed_cache_folder(tmp_path))
    for compiler, count in kernels.items():
        folder = tmp_path / f"{TREE}-{compiler}-{settings}"
        folder.mkdir()
        for number in range(count):
            (folder / f"variant{number}").mkdir()
            (folder / f"variant{number}" / "kernel.so").touch()
    world.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert keyed_cache_folder(tmp_path).name == f"{TREE}-{expected}-{settings}"


@pytest.mark.parametrize("change", ["tree", "settings"])
def test_without_nvcc_a_foreign_folder_is_not_used(world: pytest.MonkeyPatch, tmp_path: Path, change: str) -> None:
    """Guards the one place where the compiler is not in the key: tree and settings still must match."""
    settings = settings_of(keyed_cache_folder(tmp_path))
    name = f"{OTHER_TREE}-aaaa-{settings}" if change == "tree" else f"{TREE}-aaaa-00000000"
    (tmp_path / name).mkdir()
    (tmp_path / name / "kernel.so").touch()
    world.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert keyed_cache_folder(tmp_path).name == f"{TREE}-no-nvcc-{settings}"


def test_an_nvcc_that_does_not_answer_leaves_a_warm_cache_usable(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the import against a broken wrapper script; compiling is what reports it."""
    settings = settings_of(keyed_cache_folder(tmp_path))
    (tmp_path / f"{TREE}-aaaa-{settings}").mkdir()
    (tmp_path / f"{TREE}-aaaa-{settings}" / "kernel.so").touch()
    make_nvcc(tmp_path / "cuda", b"#!/bin/sh\nexit 1\n")
    assert keyed_cache_folder(tmp_path).name == f"{TREE}-aaaa-{settings}"


@given(
    st.dictionaries(
        st.sampled_from(["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"]),
        st.sampled_from(["", "a", "b", "ab"]),
    ),
    st.dictionaries(
        st.sampled_from(["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"]),
        st.sampled_from(["", "a", "b", "ab"]),
    ),
)
def test_settings_share_a_key_exactly_if_nvcc_sees_the_same(one: dict[str, str], other: dict[str, str]) -> None:
    """Guards against joining values so that two settings look alike; an empty variable is no setting for nvcc."""
    keys = []
    for settings in (one, other):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"):
                patch.setenv(name, settings.get(name, ""))
            keys.append(caches._digest(caches._jit_settings()))
    seen = [{name: value for name, value in settings.items() if value} for settings in (one, other)]
    assert (keys[0] == keys[1]) == (seen[0] == seen[1])


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


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SITE), "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_the_real_dsl_says_which_architecture_it_compiles_for() -> None:
    """Guards the names inside the DSL that the key reads, and that a set CUTE_DSL_ARCH keeps CUDA uninitialised."""
    key, initialised = json.loads(run_python(REAL_DSL, CUTE_DSL_ARCH="sm_103a"))
    assert key.startswith("0123456789ab-4.6.2-cu12-sm_103a-")
    assert initialised == 0


def test_the_real_dsl_without_a_device_compiles_for_its_default() -> None:
    """Guards against a key without architecture on a machine without a GPU, where the DSL compiles for sm_100a."""
    hidden = {"CUTE_DSL_ARCH": "", "CUDA_VISIBLE_DEVICES": ""}
    key, initialised = json.loads(run_python(f"import os; del os.environ['CUTE_DSL_ARCH']\n{REAL_DSL}", **hidden))
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
    codes, builds, stale = json.loads(run_python(RACE, **environment))
    assert codes == [0, 0, 0, 0]
    assert builds == ["start", "end"]
    assert stale is False
