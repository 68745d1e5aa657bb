"""A small pin, its source, and a place to vendor it into."""

from __future__ import annotations

import stat
from pathlib import Path

from msa_vendored.trees import EXECUTABLE, REGULAR, FileEntry, Manifest
from msa_vendored.vendoring.lock import GitSource, Pin, Submodule

ROOT = Path(__file__).parents[1]
FILES = {"jit.py": b"a\nb\n", "csrc/deep/a.cu": b"\xff", "run.sh": b"#!/bin/sh\n", "cut/include/x.hpp": b"x\n"}
MODES = {"run.sh": EXECUTABLE}
MANIFEST = Manifest(tuple(FileEntry.from_bytes(path, data, MODES.get(path, REGULAR)) for path, data in FILES.items()))
PIN = Pin(
    "sample-1",
    GitSource(
        "https://example.org/msa.git",
        "a" * 40,
        "python/pkg",
        (Submodule("cut", "https://example.org/cut.git", "b" * 40, ("include",)),),
    ),
    "MIT",
    ("licenses/MIT.txt",),
    {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"},
    "sample.manifest.tsv",
    MANIFEST.digest,
)


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def visible(third_party: Path) -> list[str]:
    """Names in ``third_party/msa/``, without the lock files."""
    return sorted(path.name for path in (third_party / "msa").iterdir() if path.suffix != ".lock")


def make_writable(tree: Path) -> None:
    for path in [tree, *tree.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode | stat.S_IWUSR)


def drift_tree(tree: Path) -> None:
    make_writable(tree)
    (tree / "jit.py").write_bytes(b"a\nB\n")
    (tree / "csrc/deep/a.cu").unlink()
    (tree / "run.sh").chmod(0o644)
    write_files(tree, {"csrc/added.cu": b"", "__pycache__/jit.pyc": b"x"})
