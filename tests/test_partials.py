"""Partial folders: what a killed process leaves is removed by the next one, what a living one fills is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from msa_vendored.trees import scan_tree
from msa_vendored.vendoring import partials
from msa_vendored.vendoring.built import build_tree
from msa_vendored.vendoring.errors import BusyError
from msa_vendored.vendoring.lock import Pin, WheelSource
from msa_vendored.vendoring.locks import lock_folder
from msa_vendored.vendoring.partials import hold_partial

FILES = {"__init__.py": b"VALUE = 1\n", "csrc/a.cu": b"// a\n"}
LEFTOVER = "0123456789abcdef.partial-89abcdef"

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_partials
from msa_vendored.vendoring import built
write, count = built._write_file, []
def write_two(*arguments):
    count.append(1) or write(*arguments)
    len(count) == 2 and os.kill(os.getpid(), signal.SIGKILL)
built._write_file = write_two
test_partials.build(Path({root!r}))
"""


def build(root: Path) -> Path:
    """Build a small tree below ``root/trees``."""
    pristine = root / "pristine"
    for path, data in FILES.items():
        (pristine / path).parent.mkdir(parents=True, exist_ok=True)
        (pristine / path).write_bytes(data)
    manifest = scan_tree(pristine)
    source = WheelSource("vllm", "1.0", "vllm-1.0-py3-none-any.whl", "0" * 64, 1, "any", "vllm/msa")
    pin = Pin("vllm-1.0", source, "MIT", (), {"nvidia-cutlass-dsl": "4.6.2"}, "m.tsv", manifest.digest)
    return build_tree(pin, pristine, manifest, [], root / "trees").root


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_build_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    """Guards build/trees against filling up; a build that finds its tree made cleans up too."""
    code = KILLED.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = names(tmp_path / "trees")
    assert ".partial-" in left
    made = build(tmp_path)
    assert names(tmp_path / "trees") == [made.name]
    (tmp_path / "trees" / left).mkdir()
    build(tmp_path)
    assert names(tmp_path / "trees") == [made.name]


def test_what_a_living_build_fills_and_what_is_not_ours_stay(tmp_path: Path) -> None:
    """Guards a build at the same time against losing its folder, and users' own files."""
    trees = tmp_path / "trees"
    for name in (LEFTOVER, "notes.partial-89abcdef", "0123456789abcdef.partial-notes"):
        (trees / name).mkdir(parents=True)
    descriptor = lock_folder(trees / LEFTOVER)
    assert descriptor is not None
    made = build(tmp_path)
    assert LEFTOVER in names(trees)
    os.close(descriptor)
    build(tmp_path)
    assert names(trees) == sorted([made.name, "notes.partial-89abcdef", "0123456789abcdef.partial-notes"])


@pytest.mark.parametrize("taken", [1, 3])
def test_a_folder_taken_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Guards the window between making and locking, in which another process takes the folder for a leftover."""
    seen: list[Path] = []

    def lock(path: Path) -> int | None:
        seen.append(path)
        if len(seen) <= taken:
            partials.remove_tree(path)
        return lock_folder(path)

    monkeypatch.setattr(partials, "lock_folder", lock)
    with hold_partial(tmp_path, "x-") as path:
        assert names(tmp_path) == [path.name]
        assert len(set(seen)) == taken + 1
    assert names(tmp_path) == []


def test_a_folder_that_is_taken_every_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an endless loop where folders cannot be locked."""
    monkeypatch.setattr(partials, "lock_folder", lambda _path: None)
    with pytest.raises(BusyError, match="another process took a folder that was just made"):
        hold_partial(tmp_path, "x-").__enter__()
