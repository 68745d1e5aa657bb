"""File locks between processes: flock, released by the kernel when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msa_vendored.vendoring.errors import BusyError

_POLL_S = 0.05


@contextmanager
def hold_lock(path: Path, *, timeout_s: float, purpose: str) -> Iterator[None]:
    """Hold the lock file ``path`` for the length of a ``with`` block; its folder must exist.

    The file stays behind, empty or with the process id of its last holder: removing it would let two processes
    hold two different files of the same name.

    Args:
        path: the lock file, created if need be.
        timeout_s: how long to wait for another holder, in seconds; 0 tries once.
        purpose: what the holder does, for the error: "vendoring vllm-0.24.0".

    Raises:
        BusyError: another process holds the lock and kept it for ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise BusyError(
                f"another process is {purpose}",
                where=str(path),
                expected=f"its lock within {timeout_s:g} s",
                got=f"still held by process {_holder(path)}",
                next_command="wait for that process, or end it, and run the same command again",
            )
        time.sleep(_POLL_S)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o644)  # the umask may have made it unreadable to the next run
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def lock_folder(path: Path) -> int | None:
    """Lock the folder itself and return its descriptor (closing it unlocks); None if it is held or gone."""
    return _flock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _try_lock(path: Path) -> int | None:
    return _flock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def _flock(path: Path, flags: int) -> int | None:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The path may have been removed or replaced since it was opened; a lock on the old file excludes nobody.
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip() or "(unknown)"
    except OSError:
        return "(unknown)"
