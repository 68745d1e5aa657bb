"""A made-up host for the names of kernel caches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_cases import TREE, make_nvcc, stub_module

from msa_vendored import caches


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
