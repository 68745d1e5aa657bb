"""Vendoring: a whole, verified, read-only tree or nothing, however often, concurrently or abruptly it is run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from msa_vendored.trees import EXECUTABLE, REGULAR, FileEntry, Manifest, scan_tree
from msa_vendored.vendoring.errors import ArchiveError, BadHashError, BusyError, DriftError, LockError, OfflineError
from msa_vendored.vendoring.lock import GitSource, Pin, Submodule, read_lock, read_manifest
from msa_vendored.vendoring.locks import hold_lock, lock_folder
from msa_vendored.vendoring.partials import remove_tree
from msa_vendored.vendoring.vendor import list_drift, vendor_pin

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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The package as a folder, with the wrong modes on purpose: modes come from the manifest."""
    root = write_files(tmp_path / "source", FILES)
    (root / "jit.py").chmod(0o777)
    (root / "run.sh").chmod(0o600)
    return root


@pytest.fixture
def third_party(tmp_path: Path) -> Path:
    folder = tmp_path / "third_party"
    folder.mkdir()
    return folder


def visible(third_party: Path) -> list[str]:
    """Names in ``third_party/msa/``, without the lock files."""
    return sorted(path.name for path in (third_party / "msa").iterdir() if path.suffix != ".lock")


def make_writable(tree: Path) -> None:
    for path in [tree, *tree.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode | stat.S_IWUSR)


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


def drift_tree(tree: Path) -> None:
    make_writable(tree)
    (tree / "jit.py").write_bytes(b"a\nB\n")
    (tree / "csrc/deep/a.cu").unlink()
    (tree / "run.sh").chmod(0o644)
    write_files(tree, {"csrc/added.cu": b"", "__pycache__/jit.pyc": b"x"})


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


# Sources that are not the pin ----------------------------------------------------------------------------------------


def test_missing_and_extra_files_of_a_source_are_listed(source: Path, third_party: Path) -> None:
    """Guards against a tree of whatever a source holds."""
    (source / "jit.py").unlink()
    write_files(source, {"evil.py": b"", "cut/include/evil.hpp": b"", "cut/examples/unused.cu": b""})
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    assert str(caught.value) == (
        "the source is not pin sample-1: it has not exactly the pin's files\n"
        f"  where:    {source}\n"
        "  expected: the 4 files of third_party/sample.manifest.tsv\n"
        "  got:      3 differences\n"
        "    missing: jit.py\n"
        "    extra: cut/include/evil.hpp\n"
        "    extra: evil.py\n"
        "  next:     pass another --from"
    )
    assert visible(third_party) == []


def test_changed_files_of_a_source_are_listed(source: Path, third_party: Path) -> None:
    """Guards against other bytes under the right names; a conversion to CR LF is named as the cause."""
    (source / "jit.py").write_bytes(b"a\r\nb\r\n")
    (source / "run.sh").write_bytes(b"")
    (source / "csrc/deep/a.cu").write_bytes(b"\xfe")
    with pytest.raises(BadHashError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    empty, old = FileEntry.from_bytes("x", b"").sha256, MANIFEST.by_path["run.sh"].sha256
    other, deep = FileEntry.from_bytes("x", b"\xfe").sha256, MANIFEST.by_path["csrc/deep/a.cu"].sha256
    assert str(caught.value) == (
        "the source is not pin sample-1: files have other bytes\n"
        f"  where:    {source}\n"
        "  expected: the sha256 of each file in third_party/sample.manifest.tsv\n"
        "  got:      3 differences\n"
        f"    csrc/deep/a.cu: sha256 {other} instead of {deep}\n"
        "    jit.py: its line endings were converted to CRLF\n"
        f"    run.sh: sha256 {empty} instead of {old}\n"
        "  next:     pass another --from, such as a checkout made with git -c core.autocrlf=false clone"
    )
    assert visible(third_party) == []


def test_missing_submodule_of_a_checkout_is_named(tmp_path: Path, third_party: Path) -> None:
    """Guards against a bare list of missing headers where a clone lacks --recurse-submodules."""
    root = tmp_path / "checkout/python/pkg"
    write_files(root, {path: data for path, data in FILES.items() if not path.startswith("cut/")})
    (root / "cut").mkdir()
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(tmp_path / "checkout"))
    error = caught.value
    assert error.what == "the source is not pin sample-1: the submodule cut is not in it"
    assert error.got == "1 difference\n    missing: cut/include/x.hpp"
    assert error.next_command == f"git -C {root} submodule update --init cut"


def test_missing_submodule_of_an_archive_is_named(tmp_path: Path, third_party: Path) -> None:
    """Guards against the archives of git hosts, which hold no submodules."""
    folder = write_files(tmp_path / "msa-1/python/pkg", {p: d for p, d in FILES.items() if not p.startswith("cut/")})
    with tarfile.open(tmp_path / "msa.tar.gz", "w:gz") as target:
        target.add(folder, "msa-1/python/pkg")
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(tmp_path / "msa.tar.gz"))
    error = caught.value
    assert error.what == "the source is not pin sample-1: the submodule cut is not in it"
    assert error.next_command == (
        f"git clone --no-checkout https://example.org/msa.git msa && git -C msa checkout {'a' * 40} && "
        "git -C msa submodule update --init python/pkg/cut; then pass --from msa"
    )


def test_hostile_archive_leaves_nothing(tmp_path: Path, third_party: Path, source: Path) -> None:
    """Guards the whole path: an archive with a link beside the right files is refused before anything is written."""
    (source / "evil").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "a.tar", "w") as target:
        target.add(source, "pkg")
    with pytest.raises(ArchiveError):
        vendor_pin(PIN, MANIFEST, third_party, source=str(tmp_path / "a.tar"))
    assert visible(third_party) == []


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["../evil"], "a path in the manifest leaves its folder with '..'"),
        (["/evil"], "a path in the manifest is absolute"),
        (["a", "A"], "two paths in the manifest are one file on some file systems"),
    ],
    ids=["escape", "absolute", "collision"],
)
def test_manifest_that_cannot_be_written_safely_is_refused(third_party: Path, paths: list[str], message: str) -> None:
    """Guards against a manifest that was changed together with its digest, to write outside the tree."""
    manifest = Manifest(tuple(FileEntry.from_bytes(path, b"x") for path in paths))
    with pytest.raises(LockError) as caught:
        vendor_pin(replace(PIN, tree_digest=manifest.digest), manifest, third_party)
    assert caught.value.what == message
    assert list(third_party.iterdir()) == []


def test_manifest_of_another_pin_is_refused(third_party: Path) -> None:
    """Guards against verifying a tree by the wrong list."""
    with pytest.raises(LockError, match="the manifest is not the one that pin sample-1 names by tree_digest"):
        vendor_pin(replace(PIN, tree_digest="sha256:" + "0" * 64), MANIFEST, third_party)


# Killed and concurrent runs ------------------------------------------------------------------------------------------


CHILD_IMPORTS = """
import importlib.util, os, signal, sys, time
from pathlib import Path
from msa_vendored.vendoring import vendor
spec = importlib.util.spec_from_file_location("test_vendor", {file!r})
test_vendor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test_vendor)
"""
CHILD_RUN = """
result = vendor.vendor_pin(test_vendor.PIN, test_vendor.MANIFEST, Path({third_party!r}), source={source!r})
print("reused" if result.reused else "made")
"""


def child_code(source: Path, third_party: Path, before: str) -> str:
    """A program that vendors PIN, after ``before`` has prepared the modules ``vendor`` and ``test_vendor``."""
    run = CHILD_RUN.format(third_party=str(third_party), source=str(source))
    return CHILD_IMPORTS.format(file=str(Path(__file__))) + textwrap.dedent(before) + run


def start_child(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


KILLED_AT = {
    "before_the_first_file": "vendor._write_file = lambda *a: os.kill(os.getpid(), signal.SIGKILL)",
    "half_written": """
        write, count = vendor._write_file, []
        def write_two(*arguments):
            count.append(1) or write(*arguments)
            len(count) == 2 and os.kill(os.getpid(), signal.SIGKILL)
        vendor._write_file = write_two
        """,
    "before_the_rename": "vendor._publish = lambda *a: os.kill(os.getpid(), signal.SIGKILL)",
    "after_the_rename": "vendor.VendorResult = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("before", KILLED_AT.values(), ids=KILLED_AT.keys())
def test_killed_run_leaves_no_half_tree(source: Path, third_party: Path, before: str) -> None:
    """Guards against a torn tree that passes for a whole one, and against residue that stays for ever."""
    child = start_child(child_code(source, third_party, before))
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, stderr
    finished = "sample-1" in visible(third_party)
    assert finished == ("VendorResult" in before)
    result = vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    assert (result.reused, scan_tree(result.path)) == (finished, MANIFEST)
    assert visible(third_party) == ["sample-1"]


def test_killed_run_really_leaves_a_partial_folder(source: Path, third_party: Path) -> None:
    """Guards the test above: were nothing left behind, it would prove nothing about cleaning up."""
    start_child(child_code(source, third_party, KILLED_AT["half_written"])).communicate(timeout=60)
    names = visible(third_party)
    assert [name.split(".")[2] for name in names] == ["download", "tree"]
    assert all(name.startswith(".sample-1.") and name.endswith(".partial") for name in names)


def test_partial_folder_of_a_living_process_is_left_alone(source: Path, third_party: Path) -> None:
    """Guards against deleting what another run, or another pin's run, is filling."""
    partial = third_party / "msa/.sample-1.tree.01234567.partial"
    other_pin = third_party / "msa/.sample-1.post1.tree.01234567.partial"
    for folder in (partial, other_pin):
        folder.mkdir(parents=True)
    descriptor = lock_folder(partial)
    assert descriptor is not None
    try:
        vendor_pin(PIN, MANIFEST, third_party, source=str(source))
        assert visible(third_party) == [other_pin.name, partial.name, "sample-1"]
    finally:
        os.close(descriptor)
    vendor_pin(PIN, MANIFEST, third_party)
    assert visible(third_party) == [other_pin.name, "sample-1"]


def test_concurrent_runs_make_one_tree(source: Path, third_party: Path) -> None:
    """Guards against two runs that both fetch, or of which one fails: the losers wait, verify and reuse."""
    slow = """
        fill = vendor._fill_tree
        def fill_slowly(*arguments):
            fill(*arguments)
            time.sleep(0.5)
        vendor._fill_tree = fill_slowly
        """
    children = [start_child(child_code(source, third_party, slow)) for _ in range(3)]
    outputs = [child.communicate(timeout=60) for child in children]
    assert sorted(stdout.strip() for stdout, _ in outputs) == ["made", "reused", "reused"], outputs
    assert visible(third_party) == ["sample-1"]


def test_busy_only_after_the_timeout(source: Path, third_party: Path) -> None:
    """Guards against failing at once, or waiting for ever, while another run holds the pin."""
    (third_party / "msa").mkdir()
    lock = third_party / "msa/.sample-1.lock"
    with hold_lock(lock, timeout_s=0, purpose="testing"):
        start = time.monotonic()
        with pytest.raises(BusyError) as caught:
            vendor_pin(PIN, MANIFEST, third_party, source=str(source), timeout_s=0.2)
        assert time.monotonic() - start >= 0.2
    assert str(caught.value) == (
        "another process is vendoring sample-1\n"
        f"  where:    {lock}\n"
        "  expected: its lock within 0.2 s\n"
        f"  got:      still held by process {os.getpid()}\n"
        "  next:     wait for that process, or end it, and run the same command again"
    )
    assert not vendor_pin(PIN, MANIFEST, third_party, source=str(source), timeout_s=0).reused


def test_waiting_run_goes_on_when_the_lock_is_released(tmp_path: Path) -> None:
    """Guards against a lock that is only tried once."""
    path, release = tmp_path / "x.lock", threading.Event()
    with contextlib.ExitStack() as holder:
        holder.enter_context(hold_lock(path, timeout_s=0, purpose="testing"))
        holder.callback(release.set)  # runs first: the last one in is the first one out
        timer = threading.Timer(0.15, holder.close)
        timer.start()
        with hold_lock(path, timeout_s=10, purpose="testing"):
            assert release.is_set()
        timer.join()


def test_lock_on_a_replaced_file_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the moment between opening a lock file and locking it, in which another process may replace the file."""
    path, flock = tmp_path / "x.lock", fcntl.flock
    calls: list[int] = []

    def replace_first(descriptor: int, operation: int) -> None:
        if not calls:
            path.unlink()
            path.touch()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", replace_first)
    with hold_lock(path, timeout_s=5, purpose="testing"):
        assert path.read_text() == f"{os.getpid()}\n"
    assert len(calls) == 2


# Deleting -----------------------------------------------------------------------------------------------------------


def test_remove_tree_deletes_read_only_folders_and_follows_no_link(source: Path, third_party: Path) -> None:
    """Guards the deletion of vendored trees, which plain rmtree refuses to users, and of what links point at."""
    tree = vendor_pin(PIN, MANIFEST, third_party, source=str(source)).path
    link, outside = third_party / "link", third_party / "outside"
    outside.mkdir(mode=0o500)
    make_writable(tree)
    (tree / "csrc/out").symlink_to(outside)
    link.symlink_to(outside)
    for path in (tree, link, third_party / "nothing"):
        remove_tree(path)
    assert sorted(path.name for path in third_party.iterdir()) == ["msa", "outside"]
    assert outside.stat().st_mode & 0o777 == 0o500
    assert visible(third_party) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="other users run every test of this file without root's privileges")
def test_everything_works_without_root_s_privileges(source: Path) -> None:
    """Guards renames, deletions and unreadable new folders (umask 0777): in the wrong order only root may do them."""
    # pytest's own folder, and whatever TMPDIR names, may be closed to others.
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        shutil.copytree(source, home / "source", copy_function=shutil.copyfile)
        for path in [home, *home.rglob("*")]:
            os.chown(path, 65534, 65534)
            path.chmod(0o755 if path.is_dir() else 0o644)
        drop = "os.setgid(65534); os.setuid(65534); os.umask(0o777)"
        replace_drifted = """
            tree = vendor.vendor_pin(test_vendor.PIN, test_vendor.MANIFEST, source.parent, source=str(source)).path
            os.umask(0o022)
            test_vendor.drift_tree(tree)
            tree.chmod(0o555)
            os.umask(0o777)
            made = vendor.vendor_pin(
                test_vendor.PIN, test_vendor.MANIFEST, source.parent, source=str(source), replace=True
            )
            assert not made.reused and not vendor.list_drift(tree, test_vendor.MANIFEST)
            test_vendor.remove_tree(tree)
            """
        before = f"{drop}; source = Path({str(home / 'source')!r})\n{textwrap.dedent(replace_drifted)}"
        stdout, stderr = start_child(child_code(home / "source", home, before)).communicate(timeout=60)
        assert stdout == "made\n", stderr
        assert visible(home) == ["sample-1"]
    finally:
        remove_tree(home)


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
