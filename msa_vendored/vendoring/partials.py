"""Folders in the making: locked while a process fills them, so that what a killed one left is known for what it is."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msa_vendored.vendoring.errors import BusyError
from msa_vendored.vendoring.locks import lock_folder

_ATTEMPTS = 8
"""A folder can be taken for a leftover, and removed, between its making and its locking; once is already rare."""

RANDOM_PART = "[0-9a-f]{8}"
"""Pattern of :func:`name_partial`'s middle."""


def name_partial(prefix: str, suffix: str = "") -> str:
    """A name that no other process makes up, on whatever host or in whatever container."""
    return f"{prefix}{secrets.token_hex(4)}{suffix}"


@contextmanager
def hold_partial(home: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """An empty folder of our own below ``home``, locked; it is deleted at the end, unless it was renamed.

    Raises:
        BusyError: others took every folder that was made.
    """
    for _ in range(_ATTEMPTS):
        path = home / name_partial(prefix, suffix)
        path.mkdir()
        path.chmod(0o700)
        if (descriptor := lock_folder(path)) is not None:
            break
    else:
        raise BusyError("another process took a folder that was just made", where=str(path))
    try:
        yield path
    finally:
        remove_tree(path)
        os.close(descriptor)


def remove_leftovers(home: Path, prefix: str, suffix: str = "") -> None:
    """Delete the partial folders of processes that were killed: nobody holds their locks any more.

    Args:
        home: where :func:`hold_partial` makes them.
        prefix: regular expression for the beginning of their names.
        suffix: regular expression for the end.
    """
    leftover = re.compile(f"{prefix}{RANDOM_PART}{suffix}")
    for path in home.iterdir():
        if leftover.fullmatch(path.name) and (descriptor := lock_folder(path)) is not None:
            remove_tree(path)
            os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Delete a file, link or folder, read-only folders included; nothing there is fine."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path):
        Path(folder).chmod(0o700)
    shutil.rmtree(path)
