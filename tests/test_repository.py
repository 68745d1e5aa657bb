"""What the repository itself must hold: lock, manifests and patches agree, and nothing of upstream is committed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.lock import Lock, read_lock
from msa_vendored.vendoring.pipeline import read_checkout

ROOT = Path(__file__).resolve().parents[1]
PINS = [pin.id for pin in read_lock(ROOT / "third_party" / "msa.lock.toml").pins]


@pytest.fixture(scope="module")
def lock() -> Lock:
    """The committed lock."""
    return read_lock(ROOT / "third_party" / "msa.lock.toml")


@pytest.mark.parametrize("pin_id", PINS)
def test_lock_manifest_and_series_agree(pin_id: str) -> None:
    """Guards a commit that changes a patch without the lock, or the lock without a patch."""
    assert verify_checkout(ROOT, pin_id)[1] == []


@pytest.mark.parametrize("pin_id", PINS)
def test_locked_images_form_a_chain_from_the_pristine_file(pin_id: str) -> None:
    """Guards the lock without the source at hand: each pre-image is the manifest's file or an earlier post-image."""
    checkout = read_checkout(ROOT, pin_id)
    current = {entry.path: entry.sha256 for entry in checkout.manifest}
    for patch in checkout.pin.patches:
        for touch in patch.touches:
            assert touch.pre == current.get(touch.path), f"{patch.file}: {touch.path}"
            current[touch.path] = touch.post or "deleted"


def test_pins_agree_where_their_files_do(lock: Lock) -> None:
    """Guards the pin that cannot be fetched everywhere: the same patch on the same bytes leaves the same bytes."""
    posts: dict[tuple[str, str, str | None], set[str | None]] = {}
    for pin in lock.pins:
        for patch in pin.patches:
            for touch in patch.touches:
                posts.setdefault((patch.file, touch.path, touch.pre), set()).add(touch.post)
    assert {key for key, found in posts.items() if len(found) > 1} == set()


@pytest.mark.parametrize("pin_id", PINS)
def test_each_patch_names_a_test_that_exists(pin_id: str) -> None:
    """Guards red/green: a test that was renamed would be an error of collection, not a guard."""
    for patch in read_checkout(ROOT, pin_id).patches:
        path, _, name = patch.header.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), patch.name


def list_tracked_files() -> list[Path]:
    """Files that git tracks, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in output.splitlines() if (ROOT / line).is_file()]


def test_no_upstream_file_is_committed() -> None:
    """Guards the promise that the repository holds only our own work: no file of any pin, under any name."""
    upstream = {entry.sha256 for pin in PINS for entry in read_checkout(ROOT, pin).manifest if entry.size_bytes > 0}
    files = list_tracked_files()
    assert len(files) > 50, "git lists too few files for this test to mean anything"
    committed = [str(f.relative_to(ROOT)) for f in files if hashlib.sha256(f.read_bytes()).hexdigest() in upstream]
    assert committed == []


def test_patches_quote_no_more_than_one_line_of_context() -> None:
    """Guards against patches that grow into copies: context is one line, and most of a patch is its own."""
    for patch in read_checkout(ROOT).patches:
        context = sum(line.kind == " " for file in patch.files for hunk in file.hunks for line in hunk.lines)
        removed = sum(line.kind == "-" for file in patch.files for hunk in file.hunks for line in hunk.lines)
        hunks = sum(len(file.hunks) for file in patch.files)
        assert context <= 2 * hunks + removed, patch.name


def test_the_top_level_holds_only_what_belongs_there() -> None:
    """Guards the layout that users and packagers rely on."""
    allowed = {
        "pyproject.toml", "third_party", "patches", "msa_vendored", "noxfile.py", "tests", "README.md",
        "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks", "docs", ".ci",
    }  # fmt: skip
    found = {path.relative_to(ROOT).parts[0] for path in list_tracked_files()}
    assert {name for name in found - allowed if not name.startswith(".git")} == set()


def test_noxfile_holds_documented_sessions_only() -> None:
    """Guards the noxfile: at most 250 lines, and each session says what it is for."""
    import ast

    text = (ROOT / "noxfile.py").read_text()
    assert len(text.splitlines()) <= 250
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if not ast.get_docstring(node)] == []


def test_the_build_session_never_reuses_an_environment() -> None:
    """Guards a clean build: a reused environment hides a missing requirement, and an editable one the patches."""
    text = (ROOT / "noxfile.py").read_text()
    build = text[text.index("def build(") : text.index("@nox.session", text.index("def build("))]
    assert '@nox.session(venv_backend="none")\ndef build(' in text
    assert "tempfile.TemporaryDirectory" in build
    assert '"-e"' not in text
