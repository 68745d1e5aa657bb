"""Names of the kernel caches: everything that decides about the code is in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_cases import OTHER_TREE, TREE, make_nvcc
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored import caches
from msa_vendored.caches import aot_cache_key, extension_name, keyed_cache_folder

pytest_plugins = ["cache_fixtures"]  # fixtures world


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
