"""The vendored tree: whole, verified and read-only, or absent; drift is refused."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from vendor_cases import FILES, MANIFEST, PIN, ROOT, drift_tree, visible

from msa_vendored.trees import scan_tree
from msa_vendored.vendoring.errors import BadHashError, DriftError, OfflineError
from msa_vendored.vendoring.lock import read_lock, read_manifest
from msa_vendored.vendoring.partials import remove_tree
from msa_vendored.vendoring.vendor import list_drift, vendor_pin

pytest_plugins = ["vendor_fixtures"]  # fixtures source, third_party


# The plain case -----------------------------------------------------------------------------------------------------


def test_tree_is_whole_and_read_only(source: Path, third_party: Path) -> None:
    """Guards the product itself: exactly the manifest's files, 0444 or 0555 below folders of 0555, no residue."""
    result = vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    assert (result.path, result.reused, result.fetched_from) == (third_party / "msa/sample-1", False, str(source))
    assert scan_tree(result.path) == MANIFEST
    modes = {str(path.relative_to(result.path)): path.stat().st_mode & 0o7777 for path in result.path.rglob("*")}
    folders = dict.fromkeys(["csrc", "csrc/deep", "cut", "cut/include"], 0o555)
    assert modes == {**dict.fromkeys(FILES, 0o444), "run.sh": 0o555, **folders}
    assert result.path.stat().st_mode & 0o7777 == 0o555
    assert visible(third_party) == ["sample-1"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_tree_depends_on_neither_umask_nor_time_nor_order(source: Path, third_party: Path, umask: int) -> None:
    """Guards against a digest, or modes, that differ between users: umask, time stamps and walk order vary."""
    os.utime(source / "jit.py", (umask, umask))
    (source / "csrc/deep/a.cu").rename(source / "moved")
    (source / "moved").rename(source / "csrc/deep/a.cu")
    previous = os.umask(umask)
    try:
        result = vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    finally:
        os.umask(previous)
    assert scan_tree(result.path).digest == PIN.tree_digest
    assert {path.stat().st_mode & 0o777 for path in result.path.rglob("*")} == {0o444, 0o555}


def test_second_run_verifies_and_changes_nothing(source: Path, third_party: Path) -> None:
    """Guards against fetching again: the second run gets no source, may not fetch, and leaves every inode alone."""
    first = vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in first.path.rglob("*")}
    shutil.rmtree(source)
    second = vendor_pin(PIN, MANIFEST, third_party, source=str(source), offline=True, replace=True)
    assert (second.path, second.reused, second.fetched_from) == (first.path, True, None)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in first.path.rglob("*")} == before


def test_offline_run_without_a_tree_leaves_nothing(third_party: Path) -> None:
    """Guards against an empty folder that the next run takes for a tree with every file missing."""
    with pytest.raises(OfflineError):
        vendor_pin(PIN, MANIFEST, third_party, offline=True)
    assert visible(third_party) == []


# Drift --------------------------------------------------------------------------------------------------------------


def test_drift_is_refused_and_listed_at_once(source: Path, third_party: Path) -> None:
    """Guards against building from an edited tree, added files included, and against one error a run."""
    tree = vendor_pin(PIN, MANIFEST, third_party, source=str(source)).path
    drift_tree(tree)
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    assert str(caught.value) == (
        "the vendored tree of sample-1 is not the pristine one\n"
        f"  where:    {tree}\n"
        "  expected: the files of third_party/sample.manifest.tsv\n"
        "  got:      5 differences\n"
        "    missing: csrc/deep/a.cu\n"
        "    extra: __pycache__/jit.pyc\n"
        "    extra: csrc/added.cu\n"
        "    changed: jit.py\n"
        "    mode: run.sh\n"
        "  next:     nox -s vendor -- --pin sample-1 --refresh"
    )
    assert (tree / "jit.py").read_bytes() == b"a\nB\n"


@pytest.mark.parametrize("byte", [0, 3])
def test_one_changed_byte_is_drift(source: Path, third_party: Path, byte: int) -> None:
    """Guards against a check by size or time stamp."""
    path = vendor_pin(PIN, MANIFEST, third_party, source=str(source)).path / "jit.py"
    status, data = path.stat(), bytearray(path.read_bytes())
    data[byte] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert list_drift(path.parent, MANIFEST) == ["changed: jit.py"]


def test_replace_puts_a_fresh_tree_in_place_of_a_drifted_one(source: Path, third_party: Path) -> None:
    """Guards the way out of drift, a link in the tree included, without residue."""
    tree = vendor_pin(PIN, MANIFEST, third_party, source=str(source)).path
    drift_tree(tree)
    (tree / "link").symlink_to("/etc")
    assert list_drift(tree, MANIFEST) == [f"not a regular file: {tree}: link"]
    result = vendor_pin(PIN, MANIFEST, third_party, source=str(source), replace=True)
    assert (result.reused, list_drift(tree, MANIFEST)) == (False, [])
    assert visible(third_party) == ["sample-1"]


def test_failed_replacement_keeps_the_drifted_tree(source: Path, third_party: Path) -> None:
    """Guards against deleting what is there, edits that somebody may want, before the new tree is whole."""
    tree = vendor_pin(PIN, MANIFEST, third_party, source=str(source)).path
    drift_tree(tree)
    (source / "jit.py").write_bytes(b"bad")
    with pytest.raises(BadHashError):
        vendor_pin(PIN, MANIFEST, third_party, source=str(source), replace=True)
    assert (tree / "jit.py").read_bytes() == b"a\nB\n"
    assert visible(third_party) == ["sample-1"]


def test_failed_rename_puts_the_old_tree_back(source: Path, third_party: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against losing both trees when the second of two renames fails."""
    tree = vendor_pin(PIN, MANIFEST, third_party, source=str(source)).path
    drift_tree(tree)
    rename = Path.rename

    def fail_for_new_tree(self: Path, target: Path) -> Path:
        if ".tree." in self.name:
            raise OSError("no rename")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new_tree)
    with pytest.raises(OSError, match="no rename"):
        vendor_pin(PIN, MANIFEST, third_party, source=str(source), replace=True)
    assert (tree / "jit.py").read_bytes() == b"a\nB\n"
    assert visible(third_party) == ["sample-1"]


# The real pin -------------------------------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.slow
def test_default_pin_is_fetched_and_vendored(tmp_path: Path) -> None:
    """Guards the lock's coordinates against the real package index; 279 MB. A second run takes 0.06 s."""
    pin = read_lock(ROOT / "third_party/msa.lock.toml").pin("vllm-0.24.0")
    manifest = read_manifest(pin, ROOT / "third_party")
    reports: list[str] = []
    result = vendor_pin(pin, manifest, tmp_path, report=reports.append)
    assert (result.reused, result.fetched_from) == (False, "vllm==0.24.0 on the package index")
    assert reports == ["fetching vllm-0.24.0-cp38-abi3-manylinux_2_28_x86_64.whl (279 MB) with pip"]
    assert scan_tree(result.path) == manifest
    start = time.process_time()  # not of the clock: other tests run at the same time
    assert vendor_pin(pin, manifest, tmp_path, offline=True).reused
    assert time.process_time() - start < 1.0
    assert visible(tmp_path) == ["vllm-0.24.0"]
    remove_tree(result.path)
