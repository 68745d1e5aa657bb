"""An empty folder of kernels and a linker that is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from compiling_cases import Linker

from msa_vendored import compiling
from msa_vendored.compiling import forget_kernels


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Linker]:
    """An empty folder of kernels, no DSL, nothing loaded."""
    linker = Linker()
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(compiling, "describe_dsl", lambda: "4.6.2-cu12-00000000")
    cute = SimpleNamespace(runtime=linker)
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(cute=cute))
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    forget_kernels()
    yield linker
    forget_kernels()
