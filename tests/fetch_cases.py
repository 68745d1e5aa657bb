"""Sources to fetch from: a wheel, a repository with a submodule, and pins of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

from msa_vendored.trees import FileEntry, Manifest
from msa_vendored.vendoring.fetch import open_source
from msa_vendored.vendoring.lock import GitSource, Pin, Submodule, WheelSource

FILES = {"jit.py": b"flags = []\n", "csrc/a.cu": b"\xff\r\n"}
HEADERS = {"include/x.hpp": b"#pragma once\n", "tools/util/include/y.hpp": b"// y\n"}
UNUSED = {"README.md": b"unused\n", "examples/x.hpp": b"unused\n"}
WHEEL = "fakemsa-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
TESTED_WITH = {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"}


def make_manifest(files: dict[str, bytes]) -> Manifest:
    return Manifest(tuple(FileEntry.from_bytes(path, data) for path, data in files.items()))


def make_pin(source: WheelSource | GitSource, manifest: Manifest) -> Pin:
    return Pin("sample", source, "MIT", ("licenses/MIT.txt",), TESTED_WITH, "sample.manifest.tsv", manifest.digest)


def ignore_report(_line: str) -> None:
    pass


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def read_source(
    pin: Pin, manifest: Manifest, what: str | None, work: Path, *, offline: bool = False
) -> dict[str, bytes]:
    work.mkdir(exist_ok=True)
    with open_source(pin, manifest, what, offline=offline, work=work, report=ignore_report) as source:
        return dict(source.read(sorted(source.list_files())))


# Wheels and pip ------------------------------------------------------------------------------------------------------


def make_wheel(path: Path) -> WheelSource:
    info = "fakemsa-1.0.dist-info"
    members = {f"top/pkg/{name}": data for name, data in FILES.items()}
    members |= {"top/other.so": b"not needed"}
    members |= {f"{info}/METADATA": b"Metadata-Version: 2.1\nName: fakemsa\nVersion: 1.0\n"}
    members |= {f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp38-abi3-manylinux_2_28_x86_64\n"}
    members |= {f"{info}/RECORD": b""}
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            target.writestr(name, data)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return WheelSource("fakemsa", "1.0", WHEEL, digest, len(data), "manylinux_2_28_x86_64", "top/pkg")


# Git ----------------------------------------------------------------------------------------------------------------


def git(folder: Path, *args: str) -> str:
    """Run git as the test's own user, independent of the environment."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *identity, *args], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_files(folder: Path, files: dict[str, bytes]) -> str:
    if not folder.exists():
        folder.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main")
    write_files(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


class Upstream:
    """A repository with the package in ``python/pkg`` and a submodule in ``python/pkg/cut``, and a pin of it."""

    def __init__(self, root: Path) -> None:
        self.main, self.cut = root / "main", root / "cut"
        cut_commit = commit_files(self.cut, {**HEADERS, **UNUSED})
        commit_files(self.main, {"README": b"x", **{f"python/pkg/{path}": data for path, data in FILES.items()}})
        git(self.main, "submodule", "--quiet", "add", str(self.cut), "python/pkg/cut")
        self.commit = commit_files(self.main, {})
        self.files = {**FILES, **{f"cut/{path}": data for path, data in HEADERS.items()}}
        self.manifest = make_manifest(self.files)
        submodule = Submodule("cut", str(self.cut), cut_commit, ("include", "tools/util/include"))
        self.source = GitSource(str(self.main), self.commit, "python/pkg", (submodule,))
        self.pin = make_pin(self.source, self.manifest)
