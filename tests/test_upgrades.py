"""Real upgrades, from vllm 0.24.0 to later releases: what becomes of each patch, and that the second pin is one.

They fetch wheels of 250 to 340 MB with pip, 5 s each from a near mirror. ``docs/upgrade.md`` says why each patch ends
as it does.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from msa_vendored.vendoring.__main__ import main
from msa_vendored.vendoring.filepatch import apply_file_patch
from msa_vendored.vendoring.lock import read_lock
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.partials import remove_tree
from msa_vendored.vendoring.pin_series import read_pin_series
from msa_vendored.vendoring.pipeline import read_checkout
from msa_vendored.vendoring.rebase.wheels import find_wheel
from msa_vendored.vendoring.vendor import vendor_pin

pytestmark = pytest.mark.network

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = "vllm-0.24.0", "vllm-0.33.0"

UPSTREAMED = {"thrmma": "upstreamed", "tma-prefetch": "upstreamed"}
VERDICTS = {
    "0.25.1": {"atomic-link": "moved"},
    "0.27.1": {
        **UPSTREAMED,
        "fmax": "moved",
        "sm-103a": "conflict",
        "cache-keys": "moved",
        "atomic-link": "moved",
    },
    "0.32.0": {
        **UPSTREAMED,
        "fmax": "moved",
        "sm-103a": "conflict",
        "cache-keys": "moved",
        "atomic-link": "conflict",
        "private-registration": "moved",
        "sys-path": "moved",
        "compile-hook": "moved",
        "aot-temporary": "moved",
    },
}
VERDICTS["0.33.0"] = VERDICTS["0.32.0"]
"""Of each patch that does not come out ``clean``."""

WANTED = {
    "0.25.1": ("4.5.2", "0.6.4", "0.1.9"),
    "0.27.1": ("4.6.0", "0.6.1", "0.1.11"),
    "0.32.0": ("4.8.0", "0.6.5", "0.1.11"),
    "0.33.0": ("4.8.0", "0.6.5", "0.1.11"),
}
"""CuTe DSL, quack and tvm-ffi that the release asks for; 0.25.1 accepts any quack, so that ours stays."""


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout's lock, manifests and patches, in which the old pin is the only one."""

    root: Path

    def run(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Run ``rebase``: exit status, JSON document and errors."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["--root", str(self.root), "rebase", "--json", "--no-checks", *arguments])
        return code, json.loads(out.getvalue()), err.getvalue()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkout]:
    """The old pin vendored, and none of the work that went into the new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "third_party", root / "third_party", ignore=shutil.ignore_patterns("msa"))
    shutil.copytree(ROOT / "patches", root / "patches", ignore=shutil.ignore_patterns(NEW))
    lock = read_lock(ROOT / "third_party/msa.lock.toml")
    (root / "third_party/msa.lock.toml").write_text(dump_lock(replace(lock, pins=(lock.pin(OLD),))))
    here = read_checkout(ROOT, OLD)
    tree = vendor_pin(here.pin, here.manifest, ROOT / "third_party")
    vendor_pin(here.pin, here.manifest, root / "third_party", source=str(tree.path))
    yield Checkout(root)
    remove_tree(tmp_path / "checkout")


@pytest.fixture(scope="session")
def new_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of vllm 0.33.0, by the digest in the lock."""
    source = read_lock(ROOT / "third_party/msa.lock.toml").pin(NEW).source
    template = read_lock(ROOT / "third_party/msa.lock.toml").pin(OLD).source
    sha256, work = str(source.to_dict()["sha256"]), tmp_path_factory.mktemp("wheel")
    return find_wheel(template, "0.33.0", None, sha256=sha256, offline=False, work=work, report=print)  # type: ignore[arg-type]  # a wheel


def check_document(version: str, document: dict[str, Any]) -> None:
    """Compare verdicts and tested versions with the tables above."""
    found = {item["name"].removesuffix(".patch"): item["verdict"] for item in document["patches"]}
    assert {name: verdict for name, verdict in found.items() if verdict != "clean"} == VERDICTS[version]
    assert len(found) == 11
    assert tuple(document["tested_with"].values()) == WANTED[version]


@pytest.mark.slow
def test_an_upgrade_without_conflicts_lands_by_one_command(checkout: Checkout) -> None:
    """Guards 0.25.1: ten patches stay shared, and the eleventh differs in line numbers only."""
    code, document, err = checkout.run("--to", "vllm==0.25.1")
    assert code == 0, err
    check_document("0.25.1", document)
    assert document["written"] == [
        "patches/vllm-0.25.1/atomic-link.patch",
        "third_party/vllm-0.25.1.manifest.tsv",
        "third_party/msa.lock.toml",
    ]
    assert len(read_pin_series(checkout.root, read_lock(checkout.root / "third_party/msa.lock.toml").pins[1])) == 11


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.27.1", "0.32.0"])
def test_an_upgrade_that_needs_decisions_says_all_of_them_at_once(checkout: Checkout, version: str) -> None:
    """Guards the verdicts on real sources: two fixes upstream in other words, conflicts, the rest carried."""
    code, document, _ = checkout.run("--to", f"vllm=={version}", "--dry-run")
    assert (code, document["tag"]) == (14, "MSAV14"), "the first that needs a decision is upstream already"
    check_document(version, document)
    thrmma = next(item for item in document["patches"] if item["name"] == "thrmma.patch")
    assert len(thrmma["details"]) == 4
    assert all(f"in vllm-{version}" in line for line in thrmma["details"])


@pytest.mark.slow
def test_the_upgrade_to_the_second_pin_can_be_landed_as_documented(checkout: Checkout, new_wheel: Path) -> None:
    """Guards docs/upgrade.md: its commands lead from 0.24.0 to the patches of 0.33.0 that are in the repository."""
    source = ["--from-source", str(new_wheel)]
    code, document, err = checkout.run("--to", "vllm==0.33.0", *source)
    assert code == 14, err
    check_document("0.33.0", document)
    skip = ["--skip", "thrmma", "--skip", "tma-prefetch", "--skip", "atomic-link"]
    code, document, err = checkout.run("--continue", *skip)
    assert code == 13, err
    (conflict,) = next(item for item in document["patches"] if item["name"] == "sm-103a.patch")["conflicts"]
    assert conflict["path"] == "jit.py"
    assert "100f" in conflict["upstream"]
    committed = {patch.name: patch for patch in read_checkout(ROOT, NEW).patches}
    resolve(Path(document["scratch"]), committed["sm-103a.patch"])
    code, document, err = checkout.run("--continue")
    assert code == 0, err
    landed = {p.name: p for p in read_pin_series(checkout.root, read_checkout(checkout.root, NEW).pin)}
    assert list(landed) == [name for name in committed if name != "warmup-import.patch"]
    # What was then written by hand: two more hunks, and what the headers say about this release.
    edited = {"sm-103a.patch", "cache-keys.patch", "private-registration.patch"}
    assert {name for name in landed if landed[name] != committed[name]} == edited
    assert landed["cache-keys.patch"].files == committed["cache-keys.patch"].files
    assert landed["sm-103a.patch"].files == committed["sm-103a.patch"].files


def resolve(scratch: Path, patch: Any) -> None:
    """Resolve the conflict in jit.py as the committed patch does, and add it."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=scratch, check=True, capture_output=True).stdout

    (file,) = patch.files
    (scratch / "jit.py").write_bytes(apply_file_patch(file, git("show", "HEAD:jit.py"), patch.name) or b"")
    git("add", "jit.py")


@pytest.mark.slow
def test_the_summary_of_the_second_pin_names_what_is_new(checkout: Checkout, new_wheel: Path) -> None:
    """Guards the summary on real sources: files, imports, signatures, the third target, versions, licences."""
    _, document, _ = checkout.run("--to", "vllm==0.33.0", "--from-source", str(new_wheel), "--dry-run")
    summary = document["summary"]
    assert (len(summary["added"]), len(summary["removed"]), len(summary["changed"])) == (135, 0, 907)
    assert "flash_attn" in summary["imports"]
    assert summary["signatures"] == [
        "`sparse_atten_func`: added `*, enable_fp16_softmax=None`",
        "`sparse_atten_func`: added `*, enable_2x_fp8=None`",
    ]
    assert "`jit.py`: added `-gencode=arch=compute_100f,code=sm_100f`" in summary["targets"]
    assert "tested with: nvidia-cutlass-dsl 4.6.2 to 4.8.0" in summary["requirements"]
    assert "new copyright holder: Fireworks AI" in summary["licences"]
    assert not [line for line in summary["licences"] if line.startswith("**")], "a licence that the pin does not name"


@pytest.mark.slow
def test_the_second_pin_builds_binds_and_compiles_with_its_own_versions(new_wheel: Path) -> None:
    """Guards the second pin as a supported one: what the build runs, and the forward for sm_100a under DSL 4.8.0."""
    here = read_checkout(ROOT, NEW)
    vendor_pin(here.pin, here.manifest, ROOT / "third_party", source=str(new_wheel))
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main(["--root", str(ROOT), "rebase", "--check", "--pin", NEW, "--offline"])
    assert code == 0, err.getvalue()
    assert [line.partition(":")[0] for line in err.getvalue().splitlines()] == [
        "pass  pristine tree",
        "pass  patched tree",
        "pass  wheel",
        "pass  environment",
        "pass  kernels()",
        "pass  forward for sm_100a",
    ]
