"""Fixtures that several test files share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import msa_vendored
from msa_vendored.trees import scan_tree

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread a process, before torch is imported: two pools on two cores wait for each other most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Seconds of the clock say nothing where tests share the cores with each other.
settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")

LONGEST_FIRST = (
    "test_upgrades.py",
    "test_patched_msa.py",
    "test_backward_emulated.py",
    "test_backward_sm100.py",
    "test_emulator_official.py",
    "test_emulator_flash_attention.py",
    "test_backward_sm90.py",
    "test_installed_bundle.py",
    "test_backward.py",
    "test_backward_stages.py",
    "test_emulator_hopper.py",
    "test_compile.py",
    "test_hopper_forward.py",
)
"""Files to begin with where tests run in several processes, so that none of them is left for the end."""

RUNTIME = Path(msa_vendored.__file__).resolve().parent
RUNTIME_FILES = (
    "__init__.py",
    "__main__.py",
    "bench/__init__.py",
    "bench/cli.py",
    "bundle.py",
    "caches.py",
    "compiling.py",
    "doctor.py",
    "errors.py",
    "hopper/__init__.py",
    "hopper/launchers.py",
    "installed.py",
    "probes.py",
    "toolchain.py",
    "trees.py",
)

TESTED_WITH = {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"}

DISTRIBUTIONS = {**TESTED_WITH, "torch": "2.13.0+cpu", "cuda-bindings": "13.4.4", "jinja2": "3.1.6"}

MODULES = {
    "cuda.bindings.driver": "",
    "cutlass": "from types import SimpleNamespace\n__version__ = '4.6.2'\nCUDA_VERSION = SimpleNamespace(major=12)\n",
    "jinja2": "",
    "quack": "import cutlass, triton\n",
    "triton": "",
    "tvm_ffi": "",
}

PRIVATE_MODULES = {
    "__init__.py": """
def __getattr__(name):
    if name in ("fmha_sm100", "fmha_sm100_plan"):
        from . import api
        return getattr(api, name)
    raise AttributeError(name)
try:
    import tvm_ffi
    from . import api
except ImportError:
    pass
""",
    "api.py": "import jinja2\nfrom . import sparse\ndef fmha_sm100(): pass\ndef fmha_sm100_plan(): pass\n",
    "sparse.py": "import cutlass, quack, cuda.bindings.driver\n"
    "def build_k2q_csr(): pass\ndef sparse_atten_func(): pass\n",
    "csrc/plan.cu": "// a kernel\n",
}

STUBS = {
    "backward": "def run_backward(): pass\n",
    "reference": "".join(
        f"def {name}(): pass\n"
        for name in ("build_k2q_csr", "sparse_atten_func", "fmha_sm100", "fmha_sm100_plan", "run_backward")
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first where tests run in several processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@dataclass(frozen=True, slots=True)
class FakeSite:
    """A ``site-packages`` of made-up distributions around the real runtime modules of msa_vendored.

    Code runs in it under ``python -S``, so that nothing of the real environment is seen.
    """

    root: Path

    @property
    def package_dir(self) -> Path:
        """The copy of msa_vendored."""
        return self.root / "msa_vendored"

    @property
    def programs(self) -> Path:
        """The only folder on ``PATH``."""
        return self.root.parent / "bin"

    @property
    def private(self) -> Path:
        """The private package."""
        (folder,) = (path for path in self.package_dir.glob("_msa_*") if path.is_dir())
        return folder

    def add_distribution(self, name: str, version: str) -> Path:
        """Metadata only; returns its folder."""
        folder = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder

    def remove_distribution(self, name: str) -> None:
        for folder in self.root.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(folder)

    def add_module(self, name: str, source: str) -> None:
        """A module below packages without code."""
        *packages, last = name.split(".")
        folder = self.root
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(source)

    def remove_module(self, name: str) -> None:
        (self.root / f"{name.replace('.', '/')}.py").unlink()

    def add_program(self, name: str, script: str) -> Path:
        path = self.programs / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def build(self, modules: Mapping[str, str] = PRIVATE_MODULES) -> dict[str, Any]:
        """Write the private package, its manifest and ``_provenance.json``; returns the provenance."""
        staging = self.package_dir / "_staging"
        for path, text in modules.items():
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).write_text(text)
            (staging / path).chmod(0o644)
        manifest = scan_tree(staging)
        name = f"_msa_{manifest.digest.removeprefix('sha256:')[:12]}"
        staging.rename(self.package_dir / name)
        (self.package_dir / f"{name}.manifest.tsv").write_text(manifest.to_text())
        document = make_provenance_document(name, manifest.digest)
        document["touched"] = [{"path": e.path, "sha256": e.sha256} for e in manifest if e.path.endswith(".py")]
        (self.package_dir / "_provenance.json").write_text(json.dumps(document))
        return document

    def remove_build(self) -> None:
        shutil.rmtree(self.private)
        (self.package_dir / "_provenance.json").unlink()

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``python -S`` with these arguments; a single one is code."""
        arguments = ["-c", command[0]] if len(command) == 1 else [*command]
        base = {"PYTHONPATH": str(self.root), "PATH": str(self.programs), "HOME": str(self.root.parent / "home")}
        return subprocess.run(
            [sys.executable, "-S", "-B", *arguments],
            env={**base, **environment},
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def evaluate(self, code: str, **environment: str) -> Any:
        """Run code that prints one line of JSON, last; fails with its errors if it does not end well."""
        result = self.run(code, **environment)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])


def make_provenance_document(folder: str, digest: str) -> dict[str, Any]:
    """A ``_provenance.json`` with every key that the build writes."""
    return {
        "schema": 1,
        "version": "0.1.0",
        "package": f"msa_vendored.{folder}",
        "manifest": f"{folder}.manifest.tsv",
        "pin": {
            "id": "vllm-0.24.0",
            "kind": "wheel",
            "source": {"project": "vllm", "version": "0.24.0"},
            "tree_digest": "sha256:" + "ab" * 32,
        },
        "tested_with": dict(TESTED_WITH),
        "patches": [
            {
                "file": "fmax.patch",
                "kind": "numerical",
                "sha256": "cd" * 32,
                "subject": "call fmax as the binding wants it",
                "drop_when": "upstream looks at the signature",
                "paths": ["cute/src/common/utils.py"],
            }
        ],
        "rewrite": {"tool": "libcst", "version": "1.9.0", "files": 3, "statements": 7},
        "built_tree_digest": digest,
        "touched": [],
    }


@pytest.fixture
def fake_site(tmp_path: Path) -> FakeSite:
    """Everything there and right: ``kernels()`` binds in it."""
    site = FakeSite(tmp_path / "site")
    site.package_dir.mkdir(parents=True)
    for name in RUNTIME_FILES:
        (site.package_dir / name).parent.mkdir(exist_ok=True)
        shutil.copy(RUNTIME / name, site.package_dir / name)
    for name, source in STUBS.items():
        (site.package_dir / f"{name}.py").write_text(source)
    for name, version in {"msa_vendored": "0.1.0", **DISTRIBUTIONS}.items():
        site.add_distribution(name, version)
    for name, source in MODULES.items():
        site.add_module(name, source)
    site.add_program("ninja", "exit 0")
    site.build()
    return site


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable that a cache key or the search for a toolkit depends on; for tests in this process."""
    for name in list(os.environ):
        if name.startswith(("CUDA_", "NVCC_", "CUTE_DSL_", "MINFER_", "MM_SPARSE_", "TORCH_EXTENSIONS", "PYTORCH_")):
            monkeypatch.delenv(name)
    for name in ("GPU_TRACE", "SM_TIMING", "FMHA_GMEM_CHECK", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
