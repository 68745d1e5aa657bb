"""Reproducibility: the same checkout gives the same wheel, wherever and under whatever settings it is built."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from msa_vendored.vendoring.errors import DriftError
from msa_vendored.vendoring.pipeline import prepare_built_tree

COPIED = ("LICENSE", "README.md", "msa_vendored", "patches", "pyproject.toml", "third_party", ".gitignore")

SETTINGS: tuple[tuple[int, dict[str, str]], ...] = (
    (0o022, {"TZ": "UTC", "LC_ALL": "C"}),
    (0o077, {"TZ": "Pacific/Chatham", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"}),
)
"""umask and environment of the two builds; Chatham is 45 minutes off the hour, so a local time would show."""


def build_twice(root: Path, *, pin_id: str | None) -> str:
    """Build two wheels from two copies of the checkout and compare them; returns a line with the digest.

    Raises:
        DriftError: they differ; names the members.
    """
    prepare_built_tree(root, pin_id=pin_id, source=None, offline=False)
    with tempfile.TemporaryDirectory(prefix="msa-vendored-repro-") as folder:
        wheels = [
            _build(root, Path(folder) / name, *setting, pin_id) for name, setting in zip("ab", SETTINGS, strict=True)
        ]
        digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
        if digests[0] != digests[1]:
            raise DriftError(
                "two builds of the same checkout differ",
                expected=f"sha256:{digests[0]}",
                got=f"sha256:{digests[1]}; {', '.join(_differing_members(*wheels))}",
            )
        return f"{wheels[0].name}: sha256:{digests[0]}, twice"


def _build(root: Path, copy: Path, umask: int, settings: dict[str, str], pin_id: str | None) -> Path:
    copy.mkdir()
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    arguments = ["--out", str(copy / "dist"), "--offline", *(["--pin", pin_id] if pin_id else [])]
    code = (
        f"import os, runpy, sys; sys.path.insert(0, {str(copy)!r}); os.umask({umask}); "
        "runpy.run_module('msa_vendored.vendoring', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "build", *arguments]
    result = subprocess.run(
        command, cwd=copy, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise DriftError(
            "a build failed", where=f"umask {umask:o}, {settings}", got=(result.stdout + result.stderr).strip()
        )
    return next((copy / "dist").glob("*.whl"))


def _differing_members(first: Path, second: Path) -> list[str]:
    import zipfile

    with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
        members = {
            name: [z.read(name) if name in z.namelist() else None for z in (a, b)]
            for name in {*a.namelist(), *b.namelist()}
        }
    return sorted(name for name, (x, y) in members.items() if x != y) or ["order, modes or dates of members"]
