"""The installed wheel: what it carries, and that it is the wheel of this checkout."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

import msa_vendored
from msa_vendored.vendoring.pipeline import read_checkout

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed() -> Distribution:
    """The installed distribution."""
    return distribution("msa_vendored")


@pytest.fixture(scope="module")
def names(installed: Distribution) -> list[str]:
    """Every file that the wheel installed."""
    return [str(path) for path in installed.files or []]


def test_the_tests_run_against_the_wheel_and_not_the_checkout() -> None:
    """Guards all other tests: from the checkout the patched tree would be absent."""
    assert ROOT not in Path(msa_vendored.__file__).parents or ".nox" in msa_vendored.__file__


def test_provenance_is_what_lock_and_series_say() -> None:
    """Guards the last arrow of the flow: pin, digests, patches with kind, and nothing else."""
    checkout = read_checkout(ROOT, msa_vendored.provenance().pin.id)
    record = msa_vendored.provenance().to_dict()
    assert record["pin"]["tree_digest"] == checkout.pin.tree_digest
    assert record["tested_with"] == dict(checkout.pin.tested_with)
    found = [(patch["file"], patch["sha256"], patch["kind"]) for patch in record["patches"]]
    assert found == [(patch.name, patch.sha256, patch.header.kind) for patch in checkout.patches]
    locked = [[(t.path, t.pre, t.post) for t in patch.touches] for patch in checkout.pin.patches]
    assert [[(t["path"], t["pre"], t["post"]) for t in patch["touches"]] for patch in record["patches"]] == locked
    assert {patch.header.kind for patch in checkout.patches} == {"numerical", "build"}


def test_licences_and_bill_of_materials_are_in_the_metadata(installed: Distribution, names: list[str]) -> None:
    """Guards PEP 639 and PEP 770: scanners look there, and the licences demand their texts."""
    metadata = installed.metadata
    assert metadata["License-Expression"] == "MIT AND BSD-3-Clause AND Apache-2.0"
    texts = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    assert texts == {
        "LICENSE", "MIT-MiniMax.txt", "BSD-3-Clause-NVIDIA-CUTLASS.txt", "Apache-2.0.txt", "NOTICE.txt",
    }  # fmt: skip
    (sbom,) = [name for name in names if ".dist-info/sboms/" in name]
    patches = json.loads(installed.locate_file(sbom).read_text())["components"][0]["pedigree"]["patches"]
    assert len(patches) == len(msa_vendored.provenance().patches)


def test_upstream_tests_and_examples_stay_out(names: list[str]) -> None:
    """Guards the size and the surface of the wheel."""
    private = [name for name in names if "/_msa_" in name and name.endswith(".py")]
    assert len(private) > 30
    assert [name for name in private if "test_" in name or "example" in name or "bench" in name] == []


def run_build_tool(*arguments: str, cwd: Path, **environment: str) -> None:
    """Run a module with this interpreter; fails with its output."""
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_source_archive_gives_the_same_wheel_as_the_checkout(tmp_path: Path) -> None:
    """Guards ``pip install`` of an sdist: without lock, manifests or patches in it, the build would fail or differ."""
    pin = read_checkout(ROOT).pin
    source = {"MSA_VENDORED_SOURCE": str(ROOT / "third_party" / "msa" / pin.id), "MSA_VENDORED_OFFLINE": "1"}
    run_build_tool("hatchling", "build", "--target", "sdist", "--directory", str(tmp_path), cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if "/third_party/msa/" in name or "/build/" in name]
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    digests = []
    for root, out in ((unpacked, tmp_path / "a"), (ROOT, tmp_path / "b")):
        pip = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), str(root)]
        run_build_tool(*pip, cwd=tmp_path, **source)
        (wheel,) = out.glob("*.whl")
        digests.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_an_editable_install_is_refused(tmp_path: Path) -> None:
    """Guards against a patch that is silently absent: an editable install has no place for the patched tree."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        str(tmp_path),
        "-e",
        str(ROOT),
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "an editable install cannot hold the patched MSA" in result.stdout + result.stderr
