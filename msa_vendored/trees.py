"""File trees as values: entries, manifests, digests and differences.

Shared by the build (pin -> tree -> built tree) and by the check of an installed wheel. Standard library only.

A manifest is text, one line a file, sorted by path: ``path<TAB>mode<TAB>size<TAB>sha256``; mode is git's, 100644
or 100755, because only the executable bit survives every transport. The digest of a tree is the SHA-256 of that
text, so it does not depend on walk order, umask, time stamps or the archive that the files came in.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msa_vendored.errors import MSAVendoredError

REGULAR, EXECUTABLE = "100644", "100755"


class TreeError(MSAVendoredError):
    """A tree holds something that a manifest cannot describe, or a manifest cannot be read."""

    exit_code = 10


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file: POSIX path below the root of its tree, git mode, size in bytes, SHA-256 of its bytes."""

    path: str
    mode: str
    size_bytes: int
    sha256: str

    @classmethod
    def from_bytes(cls, path: str, data: bytes, mode: str = REGULAR) -> FileEntry:
        """The entry of a file with these bytes."""
        return cls(path, mode, len(data), hashlib.sha256(data).hexdigest())

    def to_line(self) -> str:
        """The manifest line, newline included."""
        return f"{self.path}\t{self.mode}\t{self.size_bytes}\t{self.sha256}\n"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a tree, sorted by path."""

    entries: tuple[FileEntry, ...]
    by_path: dict[str, FileEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(sorted(self.entries)))
        object.__setattr__(self, "by_path", {entry.path: entry for entry in self.entries})
        if len(self.by_path) != len(self.entries):
            paths = [entry.path for entry in self.entries]
            raise TreeError("a manifest names a file twice", where=next(p for p in paths if paths.count(p) > 1))

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def to_text(self) -> str:
        """The manifest file's text."""
        return "".join(entry.to_line() for entry in self.entries)

    @property
    def digest(self) -> str:
        """``sha256:<hex>`` of :meth:`to_text`."""
        return "sha256:" + hashlib.sha256(self.to_text().encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Drift:
    """Every difference between an expected and a found tree, by path."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.changed or self.mode)

    def to_lines(self) -> list[str]:
        """``kind: path`` lines in a fixed order: missing, extra, changed, mode."""
        kinds = (("missing", self.missing), ("extra", self.extra), ("changed", self.changed), ("mode", self.mode))
        return [f"{kind}: {path}" for kind, paths in kinds for path in paths]


def parse_manifest(text: str, where: str) -> Manifest:
    """Read a manifest; ``where`` names the file in errors.

    Raises:
        TreeError: a line has other than four fields, a bad mode, size or digest, or a path appears twice.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("\t")
        if (
            len(fields) != 4
            or fields[1] not in (REGULAR, EXECUTABLE)
            or not fields[2].isdigit()
            or len(fields[3]) != 64
        ):
            raise TreeError(
                "unreadable manifest line",
                where=f"{where}:{number}",
                expected="path, mode 100644 or 100755, size, sha256; separated by tabs",
                got=repr(line[:120]),
            )
        entries.append(FileEntry(fields[0], fields[1], int(fields[2]), fields[3]))
    return Manifest(tuple(entries))


def list_files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file below ``root`` with its status, in no particular order.

    Raises:
        TreeError: something is neither a folder nor a regular file (a link, a socket, …).
    """
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            relative = path.relative_to(root).as_posix()
            if not stat.S_ISREG(status.st_mode):
                raise TreeError("not a regular file", where=f"{root}: {relative}")
            yield relative, status


def scan_tree(root: Path, *, ignore_suffixes: tuple[str, ...] = ()) -> Manifest:
    """Hash every file below ``root``; files with one of ``ignore_suffixes`` do not count (``.pyc`` of an install)."""
    entries = []
    for path, status in list_files(root):
        if path.endswith(ignore_suffixes):  # never true for an empty tuple
            continue
        mode = EXECUTABLE if status.st_mode & stat.S_IXUSR else REGULAR
        entries.append(FileEntry.from_bytes(path, (root / path).read_bytes(), mode))
    return Manifest(tuple(entries))


def compare_manifests(expected: Manifest, found: Manifest) -> Drift:
    """What differs, everything at once; a file whose bytes changed is not also listed for its mode."""
    common = [path for path in expected.by_path if path in found.by_path]
    changed = [p for p in common if expected.by_path[p].sha256 != found.by_path[p].sha256]
    return Drift(
        missing=tuple(path for path in expected.by_path if path not in found.by_path),
        extra=tuple(path for path in found.by_path if path not in expected.by_path),
        changed=tuple(changed),
        mode=tuple(p for p in common if p not in changed and expected.by_path[p].mode != found.by_path[p].mode),
    )
