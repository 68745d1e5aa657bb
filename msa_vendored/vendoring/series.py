"""The patch series: read it, apply it to a tree's bytes, compute what its lock must say. Pure but for reading files.

Applying is all or nothing and checks, for each patch in order: its own digest, the set of files it touches, each
file's digest before, every hunk, each file's digest after. The digests make the position of a hunk certain where
repeated code would let a hunk match at a wrong place.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.filepatch import FilePatch, apply_file_patch
from msa_vendored.vendoring.headers import PatchHeader, parse_header
from msa_vendored.vendoring.safe_paths import find_collision
from msa_vendored.vendoring.udiff import parse_udiff

_NO_FILE = "no such file"
_PATCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.patch")


@dataclass(frozen=True, slots=True)
class Touch:
    """One file that a patch touches: SHA-256 (hex) before and after; None where there is no file."""

    path: str
    pre: str | None
    post: str | None


@dataclass(frozen=True, slots=True)
class PatchLock:
    """What the lock says about a patch: its file name, the file's SHA-256 (hex), the files it touches by path."""

    file: str
    sha256: str
    touches: tuple[Touch, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of the series: file name, header, what it does to each file, SHA-256 (hex) and bytes of its file."""

    name: str
    header: PatchHeader
    files: tuple[FilePatch, ...]
    sha256: str
    data: bytes


def read_series(folder: Path, name: str = "series") -> tuple[Patch, ...]:
    """Read the file ``name`` of ``folder``, one patch file name a line and ``#`` comments, and the patches it lists.

    Raises:
        PatchError: there is no such file; it lists a patch twice, one that does not exist or no file name; the folder
            has a patch that is not listed (all of these at once); or a patch cannot be read.
    """
    path = folder / name
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        what = "there is no series file"
        raise PatchError(what, where=str(path), next_command=f"list the patches of {folder} in it, in order") from error
    entries = [line.partition("#")[0].strip(" \t") for line in text.decode("ascii", "backslashreplace").split("\n")]
    entries = [entry for entry in entries if entry]
    problems = _find_series_problems(folder, entries)
    if problems:
        raise PatchError(
            "the series is refused",
            where=str(path),
            expected=f"each *.patch file of {folder} once, one a line",
            got="; ".join(problems),
            next_command=f"edit {path}",
        )
    return tuple(parse_patch(entry, (folder / entry).read_bytes(), str(folder / entry)) for entry in entries)


def _find_series_problems(folder: Path, entries: Sequence[str]) -> list[str]:
    bad = [entry for entry in entries if not _PATCH_NAME.fullmatch(entry)]
    counts = Counter(entry for entry in entries if entry not in bad)
    return [
        *(f"{entry!r} is not a file name like fmax.patch" for entry in bad),
        *(f"{entry} is listed {count} times" for entry, count in counts.items() if count > 1),
        *(f"{entry} does not exist" for entry in counts if not (folder / entry).is_file()),
        *(f"{file.name} is not listed" for file in sorted(folder.glob("*.patch")) if file.name not in counts),
    ]


def parse_patch(name: str, data: bytes, where: str) -> Patch:
    """Read one patch file: header and diff.

    Raises:
        PatchError: its header or diff is refused, or it changes the mode of a file that it does not add.
    """
    diff = parse_udiff(data, where)
    header = parse_header(diff.header, where)
    for file in diff.files:
        if not file.is_new and not file.is_deleted and file.old_mode != file.new_mode:
            raise PatchError(
                "a patch changes the mode of an existing file; modes come from the pin",
                where=f"{where}: {file.path}",
                expected="no 'old mode' and 'new mode' lines",
                got=f"{file.old_mode} to {file.new_mode}",
                next_command=f"delete both lines from {where}",
            )
    return Patch(name, header, diff.files, hashlib.sha256(data).hexdigest(), data)


def added_modes(patches: Sequence[Patch]) -> dict[str, str]:
    """Git modes (100644, 100755) of the files that the whole series adds, by path."""
    modes: dict[str, str] = {}
    for file in (file for patch in patches for file in patch.files):
        if file.is_new and file.new_mode:
            modes[file.path] = file.new_mode
        elif file.is_deleted:
            modes.pop(file.path, None)
    return modes


def compute_locks(files: Mapping[str, bytes], patches: Sequence[Patch]) -> tuple[PatchLock, ...]:
    """The locks of a series over a pristine tree, for a maintainer to review.

    Nothing but the hunks themselves tells here that they are at their place; see :func:`apply_series`.

    Raises:
        PatchError: a hunk is not exactly at its place, or added files collide with others.
    """
    tree: dict[str, bytes | None] = dict(files)
    locks = []
    for patch in patches:
        touches = []
        for file in sorted(patch.files, key=lambda file: file.path):
            old = tree.get(file.path)
            tree[file.path] = apply_file_patch(file, old, patch.name)
            touches.append(Touch(file.path, _digest(old), _digest(tree[file.path])))
        locks.append(PatchLock(patch.name, patch.sha256, tuple(touches)))
    _check_collisions(tree, patches)
    return tuple(locks)


def apply_series(
    files: Mapping[str, bytes], patches: Sequence[Patch], locks: Sequence[PatchLock], *, pin: str
) -> dict[str, bytes | None]:
    """Apply a whole series to a pristine tree, or nothing of it.

    Args:
        files: bytes by POSIX path below the root of the tree; not changed.
        patches: the series, in order.
        locks: the pin's lock of each patch, in the same order.
        pin: id of the pin, for the next command in errors.

    Returns:
        The files that differ from ``files`` afterwards; None for a deleted one. Modes of added files are given by
        :func:`added_modes`; the modes of all others stay.

    Raises:
        PatchError: patches and locks do not belong together, or a file is not what its lock says before or after a
            patch, or a hunk does not match.
    """
    _check_locks(patches, locks, pin)
    tree: dict[str, bytes | None] = dict(files)
    posts = {(touch.path, touch.post): lock.file for lock in locks for touch in lock.touches}
    changed: set[str] = set()
    for patch, lock in zip(patches, locks, strict=True):
        touches = {touch.path: touch for touch in lock.touches}
        for file in patch.files:
            old, touch = tree.get(file.path), touches[file.path]
            where = f"{patch.name}: {file.path}"
            if _digest(old) != touch.pre and file.path in changed:
                what = "the lock's pre-image is not what the patches before this one leave"
                raise _lock_error(what, where, touch.pre, _digest(old), pin)
            if _digest(old) != touch.pre:
                raise _pre_image_error(patch, file, old, touch.pre, posts.get((file.path, _digest(old))), pin)
            new = tree[file.path] = apply_file_patch(file, old, patch.name)
            if _digest(new) != touch.post:
                raise _lock_error("the patched file is not the locked post-image", where, touch.post, _digest(new), pin)
            changed.add(file.path)
    _check_collisions(tree, patches)
    return {path: tree[path] for path in sorted(changed) if tree[path] != files.get(path)}


def _check_locks(patches: Sequence[Patch], locks: Sequence[PatchLock], pin: str) -> None:
    """Refuse unless each patch has its lock, in order, with its digest and exactly the files it touches."""
    names, locked = ", ".join(patch.name for patch in patches), ", ".join(lock.file for lock in locks)
    if names != locked:
        raise _lock_error("the lock names other patches than the series, or in another order", pin, locked, names, pin)
    for patch, lock in zip(patches, locks, strict=True):
        if patch.sha256 != lock.sha256:
            raise _lock_error("the patch is not the locked one", patch.name, lock.sha256, patch.sha256, pin)
        expected = ", ".join(sorted(touch.path for touch in lock.touches))
        got = ", ".join(sorted(file.path for file in patch.files))
        if got != expected:
            raise _lock_error("the patch touches other files than its lock says", patch.name, expected, got, pin)


def _lock_error(what: str, where: str, expected: str | None, got: str | None, pin: str) -> PatchError:
    return PatchError(
        what,
        where=where,
        expected=expected or _NO_FILE,
        got=got or _NO_FILE,
        next_command=f"review the change, then nox -s lock -- --pin {pin}",
    )


def _pre_image_error(
    patch: Patch, file: FilePatch, old: bytes | None, pre: str | None, patched_by: str | None, pin: str
) -> PatchError:
    """The error for a file that is not pristine; ``patched_by`` is the patch that leaves these very bytes."""
    got = _digest(old) or _NO_FILE
    where = f"{patch.name}: {file.path}"
    if patched_by is not None:
        what, got = "the file is already patched", f"{got}, as {patched_by} leaves it"
        next_command = f"nox -s vendor -- --pin {pin} --refresh"
    else:
        what, got = (
            "the file is neither pristine nor already patched",
            f"{got}; {_describe_hunks(file, old, patch.name)}",
        )
        next_command = "nox -s rebase"
    return PatchError(what, where=where, expected=pre or _NO_FILE, got=got, next_command=next_command)


def _describe_hunks(file: FilePatch, old: bytes | None, patch_name: str) -> str:
    """Which hunk fails first; a help in finding the difference, never a reason to apply."""
    try:
        apply_file_patch(file, old, patch_name)
    except PatchError as error:
        return f"{error.where}: {error.what}"
    return "its hunks match, but another part of the file differs"


def _check_collisions(tree: Mapping[str, bytes | None], patches: Sequence[Patch]) -> None:
    """Refuse added files that some file system takes for another one, or for a folder."""
    added = added_modes(patches)
    pair = find_collision(sorted(path for path, data in tree.items() if data is not None)) if added else None
    if pair is None:
        return
    paths = [path for path in added if any(path == place or path.startswith(f"{place}/") for place in pair)]
    raise PatchError(
        "an added file collides with another path",
        where=", ".join(paths) or ", ".join(added),
        got=f"{pair[0]}, a file and a folder" if pair[0] == pair[1] else " and ".join(pair),
        next_command="choose another path for the added file",
    )


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()
