"""A made-up host for the names of kernel caches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TREE = "0123456789ab"
OTHER_TREE = "ba9876543210"


def make_nvcc(home: Path, content: bytes = b"\x7fELF nvcc 13.0") -> Path:
    """A toolkit whose nvcc can be looked at but not run."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_bytes(content)
    nvcc.chmod(0o755)
    return home


def stub_module(patch: pytest.MonkeyPatch, name: str, content: Any) -> None:
    patch.setitem(sys.modules, name, content)
