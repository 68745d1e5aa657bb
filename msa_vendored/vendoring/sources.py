"""Places that the files of a pin can be read from: a folder, an archive, a git repository.

A source only lists and reads; ``vendor.py`` decides whether what it holds is the pin.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msa_vendored.trees import Manifest
from msa_vendored.vendoring.archives import MAX_MEMBER_BYTES, MAX_MEMBERS, Archive, check_sizes
from msa_vendored.vendoring.errors import ArchiveError, BadHashError, UsageError
from msa_vendored.vendoring.git import TreeEntry, fetch_commit, is_repository, list_tree, read_blobs
from msa_vendored.vendoring.lock import GitSource, Pin, Submodule

IGNORED_FOLDERS = frozenset({".git", "__pycache__"})
"""What git and Python leave in a checkout; no pin has a file below a folder of such a name."""

_GIT_LINK_MODE = "120000"


class Source(Protocol):
    """Something that holds the files of a package.

    Attributes:
        name: what it is, for errors and reports.
    """

    @property
    def name(self) -> str:
        """What it is, for errors and reports."""

    def list_files(self) -> frozenset[str]:
        """Path of each file of the package, relative to the package's folder."""

    def read(self, paths: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield path and bytes of each of ``paths``, in an order of the source's choice."""


def is_ours(pin: Pin, path: str) -> bool:
    """Whether a file of the package's folder counts: not tool residue, not an unused part of a submodule."""
    if not IGNORED_FOLDERS.isdisjoint(path.split("/")):
        return False
    for submodule in pin.source.submodules if isinstance(pin.source, GitSource) else ():
        if path.startswith(f"{submodule.path}/"):
            return path.startswith(tuple(f"{submodule.path}/{folder}/" for folder in submodule.include))
    return True


def choose_root(paths: Iterable[str], roots: Iterable[str], manifest: Manifest, pin: Pin, name: str) -> str:
    """The prefix among ``roots`` below which most files of ``manifest`` are found.

    Raises:
        UsageError: there is none below any of them.
    """
    known, roots = frozenset(paths), tuple(roots)
    counts = {root: sum(root + path in known for path in manifest.by_path) for root in roots}
    best = max(roots, key=lambda root: counts[root])
    if not counts[best]:
        raise UsageError(
            f"no file of pin {pin.id} is there",
            where=name,
            expected=f"the package itself, or a folder that holds it as {pin.folder}/",
            next_command="pass another --from",
        )
    return best


@dataclass(frozen=True, slots=True)
class FolderTree:
    """A package folder on disk; what ``is_ours`` refuses is not looked at."""

    root: Path
    pin: Pin

    @property
    def name(self) -> str:
        """The folder's path."""
        return str(self.root)

    def list_files(self) -> frozenset[str]:
        """Every file that counts.

        Raises:
            ArchiveError: a file or folder that counts is a link or a special file, or there are too many.
        """
        found: set[str] = set()
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if name not in IGNORED_FOLDERS]
            links = [name for name in folders if Path(folder, name).is_symlink()]
            paths = [Path(folder, name) for name in names + links]
            found.update(path for path in map(self._checked, paths) if path is not None)
            if len(found) > MAX_MEMBERS:
                raise ArchiveError("too many files", where=self.name, expected=f"at most {MAX_MEMBERS:,}")
        return frozenset(found)

    def read(self, paths: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield path and bytes of each of ``paths``."""
        for path in paths:
            yield path, self._read_one(path)

    def _checked(self, path: Path) -> str | None:
        relative = path.relative_to(self.root).as_posix()
        if not is_ours(self.pin, relative):
            return None
        if not stat.S_ISREG(path.lstat().st_mode):
            raise refuse_special(f"{self.root}: {relative}")
        return relative

    def _read_one(self, path: str) -> bytes:
        # O_NONBLOCK: a pipe put there since the listing must not hang the open.
        with os.fdopen(os.open(self.root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refuse_special(f"{self.root}: {path}")
            data = file.read(MAX_MEMBER_BYTES + 1)
        if len(data) > MAX_MEMBER_BYTES:
            raise ArchiveError(
                "a file is too large", where=f"{self.root}: {path}", expected=f"at most {MAX_MEMBER_BYTES:,} bytes"
            )
        return data


@dataclass(frozen=True, slots=True)
class ArchiveTree:
    """The package's folder inside an open archive; ``root`` is that folder's prefix, ``""`` or ending in ``/``."""

    archive: Archive
    root: str
    pin: Pin

    @property
    def name(self) -> str:
        """The archive's path."""
        return str(self.archive.path)

    def list_files(self) -> frozenset[str]:
        """Every file that counts."""
        below = (path.removeprefix(self.root) for path in self.archive.sizes if path.startswith(self.root))
        return frozenset(path for path in below if is_ours(self.pin, path))

    def read(self, paths: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield path and bytes of each of ``paths``, in the archive's order."""
        for member, data in self.archive.read([self.root + path for path in paths]):
            yield member.removeprefix(self.root), data


@dataclass(frozen=True, slots=True)
class GitTree:
    """The package's folder at a commit, submodules filled in: repository and entry of each file."""

    name: str
    files: dict[str, tuple[Path, TreeEntry]]

    def list_files(self) -> frozenset[str]:
        """Every file that counts."""
        return frozenset(self.files)

    def read(self, paths: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield path and bytes of each of ``paths``, one repository after the other.

        Raises:
            ArchiveError: a file, or all of them together, are over the caps for archives; nothing is read then.
        """
        chosen = {path: self.files[path] for path in paths}
        check_sizes({path: entry.size_bytes for path, (_, entry) in chosen.items()}, self.name)
        for repository in sorted({repository for repository, _ in chosen.values()}):
            ours = [path for path, (home, _) in chosen.items() if home == repository]
            blobs = read_blobs(repository, [chosen[path][1].oid for path in ours])
            yield from zip(ours, (data for _, data in blobs), strict=True)


def open_folder_tree(folder: Path, pin: Pin, manifest: Manifest) -> FolderTree:
    """The package in ``folder``: the folder itself, or ``pin.folder`` below it.

    Raises:
        UsageError: it is in neither place.
    """
    roots = {"": folder, f"{pin.folder}/": folder / pin.folder}
    known = (prefix + path for prefix, root in roots.items() for path in manifest.by_path if (root / path).is_file())
    return FolderTree(roots[choose_root(known, roots, manifest, pin, str(folder))], pin)


def open_archive_tree(archive: Archive, pin: Pin, manifest: Manifest) -> ArchiveTree:
    """The package in an archive: at its root, below ``pin.folder``, or either inside the one top folder.

    Raises:
        UsageError: it is in none of these places.
    """
    roots = ["", f"{pin.folder}/"]
    if len(tops := {path.partition("/")[0] for path in archive.sizes}) == 1:
        roots += [f"{top}/{root}" for top in tops for root in roots]
    return ArchiveTree(archive, choose_root(archive.sizes, roots, manifest, pin, str(archive.path)), pin)


def fetch_git_tree(url: str, pin: Pin, work: Path, submodule_urls: Mapping[str, str]) -> GitTree:
    """Fetch the pinned commit of ``url``, and of its submodules, into bare repositories below ``work``.

    Args:
        url: a git URL or the path of a local repository.
        pin: a pin of kind ``git``.
        work: an existing folder that outlives the result.
        submodule_urls: where to fetch a submodule from, by its path, other than where the lock says.

    Raises:
        OfflineError: a repository cannot be reached.
        BadHashError: a repository does not have its commit, or a submodule is at another commit than the lock says.
        ArchiveError: a file is a symbolic link.
    """
    source = pin.source
    assert isinstance(source, GitSource)  # noqa: S101 - the caller tells the kinds apart
    otherwise = f"bring a checkout with its submodules, then: nox -s vendor -- --pin {pin.id} --from CHECKOUT"
    main = work / "main"
    fetch_commit(main, url, source.commit, otherwise=otherwise)
    entries = list_tree(main, source.commit, source.folder)
    files = {path.removeprefix(f"{source.folder}/"): (main, entry) for path, entry in entries.items()}
    for index, submodule in enumerate(source.submodules):
        _check_gitlink(files.pop(submodule.path, None), submodule, url)
        repository = work / f"submodule-{index}"
        address = submodule_urls.get(submodule.path, submodule.url)
        fetch_commit(repository, address, submodule.commit, otherwise=otherwise)
        for folder in submodule.include:
            for path, entry in list_tree(repository, submodule.commit, folder).items():
                files[f"{submodule.path}/{path}"] = (repository, entry)
    ours = {path: where for path, where in files.items() if is_ours(pin, path)}
    for path, (_, entry) in ours.items():
        if entry.mode == _GIT_LINK_MODE:
            raise refuse_special(f"{url}: {path}")
    return GitTree(f"{url} at {source.commit}", ours)


def find_local_submodules(checkout: Path, source: GitSource) -> dict[str, str]:
    """Submodules that are checked out below ``checkout``, by path: their commits need no network."""
    places = {module.path: checkout / source.folder / module.path for module in source.submodules}
    return {path: str(place) for path, place in places.items() if is_repository(place)}


def _check_gitlink(found: tuple[Path, TreeEntry] | None, submodule: Submodule, url: str) -> None:
    oid = found[1].oid if found and found[1].kind == "commit" else "no submodule"
    if oid != submodule.commit:
        raise BadHashError(
            "a submodule is not at the pinned commit",
            where=f"{url}: {submodule.path}",
            expected=submodule.commit,
            got=oid,
            next_command="correct the submodule's commit in third_party/msa.lock.toml, or pass another --from",
        )


def refuse_special(where: str) -> ArchiveError:
    """The error about a link, device or the like among the files of a package."""
    return ArchiveError("not a regular file", where=where, expected="regular files and folders only")
