"""Write several files of a checkout as one: after a kill at any moment either all of them are old or all are new.

The new files are made below ``build/publication/`` and flushed; then a journal that names them appears by a rename,
which is the moment that decides. From there on only renames are left. If they are interrupted, the next command that
reads the checkout does the rest (:func:`finish_publication`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from msa_vendored.vendoring.errors import UsageError
from msa_vendored.vendoring.locks import hold_lock

_TIMEOUT_S = 30.0
"""How long to wait for another process that is doing the renames: milliseconds, more on a network file system."""


def publish_files(root: Path, files: Mapping[str, bytes | None]) -> None:
    """Write, or for None delete, files of the checkout ``root``; all or none.

    Args:
        root: the checkout; its ``build/`` must be on the same file system, since files are renamed from there.
        files: bytes by POSIX path below ``root``.

    Raises:
        UsageError: ``build/`` is on another file system.
        BusyError: another process is publishing.
    """
    build = root / "build"
    build.mkdir(exist_ok=True)
    if build.stat().st_dev != root.stat().st_dev:
        raise UsageError(
            "build/ is on another file system than the checkout, so that nothing can be renamed into place",
            where=str(build),
            next_command=f"rm {build}",
        )
    with hold_lock(build / ".publication.lock", timeout_s=_TIMEOUT_S, purpose="writing lock and patches"):
        _roll_forward(root)
        staging = build / "publication"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        names = {path: None if data is None else f"{number}" for number, (path, data) in enumerate(files.items())}
        for path, data in files.items():
            if data is not None:
                _write(staging / str(names[path]), data)
        _write(staging / "journal.partial", json.dumps(names, indent=1).encode())
        (staging / "journal.partial").rename(staging / "journal.json")
        _flush(staging)
        _roll_forward(root)


def finish_publication(root: Path) -> None:
    """Do what an interrupted :func:`publish_files` has left to do; usually nothing, which costs one ``stat``."""
    if (root / "build" / "publication" / "journal.json").is_file():
        lock = root / "build" / ".publication.lock"
        with hold_lock(lock, timeout_s=_TIMEOUT_S, purpose="writing lock and patches"):
            _roll_forward(root)


def _roll_forward(root: Path) -> None:
    """Rename what the journal names, as far as that has not happened yet, and forget the journal."""
    staging = root / "build" / "publication"
    journal = staging / "journal.json"
    if not journal.is_file():
        return
    for path, name in json.loads(journal.read_text(encoding="utf-8")).items():
        target = root / path
        if name is None:
            target.unlink(missing_ok=True)
            if target.parent.is_dir() and not any(target.parent.iterdir()):
                target.parent.rmdir()
        elif (staging / name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / name).rename(target)
            _flush(target.parent)
    journal.unlink()
    shutil.rmtree(staging, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o644)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
