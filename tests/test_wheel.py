"""The installed wheel: what it carries, and that it is the wheel of this checkout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

import msa_vendored
from msa_vendored.probes import HOPPER_TESTED_WITH
from msa_vendored.vendoring.lock import Pin, read_lock
from msa_vendored.vendoring.metadata_hook import PinMetadataHook
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


def test_the_extra_installs_what_the_pin_was_tested_with(installed: Distribution) -> None:
    """Guards the remedy in error messages: another version of the DSL or quack would be refused at once."""
    wanted = [line for line in installed.metadata.get_all("Requires-Dist") or [] if "sm100" in line]
    tested_with = msa_vendored.provenance().tested_with
    assert len(tested_with) == 3
    for name, version in tested_with.items():
        assert f"{name}=={version}; extra == 'sm100'" in [line.replace('"', "'") for line in wanted]


def test_the_extra_of_hopper_installs_what_its_launchers_are_bound_with(installed: Distribution) -> None:
    """Guards the remedy in the error of ``kernels(backend="sm90")``."""
    wanted = [line.replace('"', "'") for line in installed.metadata.get_all("Requires-Dist") or []]
    for name, version in HOPPER_TESTED_WITH.items():
        assert f"{name}=={version}; extra == 'sm90'" in wanted


@pytest.mark.parametrize("pin", read_lock(ROOT / "third_party" / "msa.lock.toml").pins, ids=lambda pin: pin.id)
def test_each_pins_wheel_gets_its_own_extra(pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the second pin, whose forward wants another DSL than the default's."""
    monkeypatch.setenv("MSA_VENDORED_PIN", pin.id)
    monkeypatch.setattr(sys, "path", [*sys.path])
    metadata: dict[str, dict[str, list[str]]] = {}
    PinMetadataHook(str(ROOT), {}).update(metadata)
    extra = metadata["optional-dependencies"]["sm100"]
    assert {f"{name}=={version}" for name, version in pin.tested_with.items()} <= set(extra)


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


@pytest.fixture
def copied_checkout(tmp_path: Path) -> Path:
    """A copy of what a build reads, in a git repository of somebody else, with no tree fetched."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    root = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "msa", "_msa*", "_provenance.json")
    for name in ("msa_vendored", "patches", "third_party"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    return root


def start_build(root: Path) -> subprocess.Popen[str]:
    """Build in a copied checkout, from this checkout's pristine tree, without the network."""
    pristine = ROOT / "third_party" / "msa" / read_checkout(ROOT).pin.id
    code = "import sys; sys.path.insert(0, '.'); from msa_vendored.vendoring.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "build", "--offline", "--from", str(pristine)]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_builds_at_once_and_after_a_kill_give_the_same_whole_wheel(copied_checkout: Path) -> None:
    """Guards the build against its own kind: one run killed, then two at once, inside a foreign repository.

    Without the partial siblings, locks and renames, the survivor would find half a tree or half a wheel.
    """
    killed = start_build(copied_checkout)
    trees = copied_checkout / "build" / "trees"
    for _ in range(600):  # until the tree is being written, or for 60 s
        if trees.is_dir() and any(trees.iterdir()):
            break
        time.sleep(0.1)
    killed.kill()
    killed.communicate()
    both = [start_build(copied_checkout) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [path.name for path in (copied_checkout / "dist").iterdir()] == [
        f"msa_vendored-{msa_vendored.__version__}-py3-none-any.whl"
    ]
    (wheel,) = (copied_checkout / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        record = json.loads(archive.read("msa_vendored/_provenance.json"))
        assert record == msa_vendored.provenance().to_dict()
        folder = record["package"].replace(".", "/")
        for row in record["touched"]:
            assert hashlib.sha256(archive.read(f"{folder}/{row['path']}")).hexdigest() == row["sha256"]
