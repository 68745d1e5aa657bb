"""A tree held in memory: bytes and git mode of each file. Trees of pins have 12 to 30 MB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msa_vendored.trees import EXECUTABLE, FileEntry, Manifest
from msa_vendored.vendoring.errors import ArchiveError, DriftError
from msa_vendored.vendoring.safe_paths import find_collision, find_path_problem


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes and git mode (100644 or 100755) of each file of a tree, by POSIX path."""

    files: Mapping[str, bytes]
    modes: Mapping[str, str]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the tree."""
        return Manifest(tuple(FileEntry.from_bytes(p, data, self.modes[p]) for p, data in self.files.items()))


def read_content(folder: Path, manifest: Manifest) -> Content:
    """The files of ``manifest`` in ``folder``, verified.

    Raises:
        DriftError: a file has other bytes than the manifest says.
    """
    files = {entry.path: (folder / entry.path).read_bytes() for entry in manifest}
    content = Content(files, {entry.path: entry.mode for entry in manifest})
    if content.manifest.digest != manifest.digest:
        wrong = [e.path for e in manifest if content.manifest.by_path[e.path] != e]
        raise DriftError(
            "the pristine tree is not the pinned one",
            where=str(folder),
            got=", ".join(wrong),
            next_command="nox -s vendor -- --refresh",
        )
    return content


def write_content(content: Content, folder: Path) -> None:
    """Write every file below the existing folder ``folder``."""
    for path, data in content.files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if content.modes[path] == EXECUTABLE else 0o644)


def check_paths(content: Content, where: str) -> None:
    """Refuse a tree whose paths could not be written safely everywhere.

    Raises:
        ArchiveError: a path is unsafe, or two paths are one on some file systems.
    """
    for path in content.files:
        if problem := find_path_problem(path):
            raise ArchiveError(f"a path of the new tree {problem}", where=where, got=repr(path))
    if pair := find_collision(content.files):
        raise ArchiveError("two paths of the new tree are one on some file systems", where=where, got=str(pair))
