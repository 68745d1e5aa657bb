"""Runs that are killed, run at once, or have no privileges."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import vendor_cases
from vendor_cases import MANIFEST, PIN, ROOT, make_writable, visible

from msa_vendored.trees import scan_tree
from msa_vendored.vendoring.errors import BusyError
from msa_vendored.vendoring.locks import hold_lock, lock_folder
from msa_vendored.vendoring.partials import remove_tree
from msa_vendored.vendoring.vendor import vendor_pin

pytest_plugins = ["vendor_fixtures"]  # fixtures source, third_party


# Killed and concurrent runs ------------------------------------------------------------------------------------------


CHILD_IMPORTS = """
import importlib.util, os, signal, sys, time
from pathlib import Path
from msa_vendored.vendoring import partials, vendor
spec = importlib.util.spec_from_file_location("vendor_cases", {file!r})
vendor_cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vendor_cases)
"""
CHILD_RUN = """
result = vendor.vendor_pin(vendor_cases.PIN, vendor_cases.MANIFEST, Path({third_party!r}), source={source!r})
print("reused" if result.reused else "made")
"""


def child_code(source: Path, third_party: Path, before: str) -> str:
    """A program that vendors PIN, after ``before`` has prepared the modules ``vendor`` and ``vendor_cases``."""
    run = CHILD_RUN.format(third_party=str(third_party), source=str(source))
    return CHILD_IMPORTS.format(file=vendor_cases.__file__) + textwrap.dedent(before) + run


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
            tree = vendor.vendor_pin(vendor_cases.PIN, vendor_cases.MANIFEST, source.parent, source=str(source)).path
            os.umask(0o022)
            vendor_cases.drift_tree(tree)
            tree.chmod(0o555)
            os.umask(0o777)
            made = vendor.vendor_pin(
                vendor_cases.PIN, vendor_cases.MANIFEST, source.parent, source=str(source), replace=True
            )
            assert not made.reused and not vendor.list_drift(tree, vendor_cases.MANIFEST)
            partials.remove_tree(tree)
            """
        before = f"{drop}; source = Path({str(home / 'source')!r})\n{textwrap.dedent(replace_drifted)}"
        stdout, stderr = start_child(child_code(home / "source", home, before)).communicate(timeout=60)
        assert stdout == "made\n", stderr
        assert visible(home) == ["sample-1"]
    finally:
        remove_tree(home)
