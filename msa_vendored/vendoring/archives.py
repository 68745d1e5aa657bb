"""Read single members of archives that may be hostile; nothing is ever extracted to disk.

The whole member list is judged before the first byte of any member is handed out: one link, device, unsafe or
colliding path refuses the archive. Supported: ``.whl`` and ``.zip``; ``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.xz``.
"""

from __future__ import annotations

import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from msa_vendored.vendoring.errors import ArchiveError, UsageError
from msa_vendored.vendoring.safe_paths import find_collision, find_path_problem

MAX_MEMBERS = 50_000
"""vllm 0.33.0 has 5,802 members and grows by some hundreds a release; each costs memory before it is judged."""

MAX_MEMBER_BYTES = 64 << 20
"""The largest file of a pin has 2.9 MB. Only members that are read count: wheels hold libraries of 190 MB."""

MAX_TOTAL_BYTES = 512 << 20
"""A pin has 29 MB. The sum over the members that are read."""

MAX_STREAM_BYTES = 4 << 30
"""A compressed tar is inflated from its start even to skip members; a checkout with its history stays below."""

ZIP_SUFFIXES = (".whl", ".zip")
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz")
ARCHIVE_SUFFIXES = ZIP_SUFFIXES + TAR_SUFFIXES

# What zipfile, tarfile and the decompressors raise on malformed input, apart from their own classes.
_MALFORMED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    OSError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Archive:
    """An open archive whose member list has been judged.

    Attributes:
        path: the archive file.
        sizes: declared size in bytes of each regular member, by its path; folders do not appear.
    """

    path: Path
    sizes: dict[str, int]
    _positions: dict[str, int]
    _open: Callable[[str], IO[bytes]]

    def read(self, members: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield path and bytes of each of ``members``, in the order in which the archive stores them.

        Raises:
            ArchiveError: a member or their sum is over a cap (checked on the declared sizes, before anything is
                read), a member has other bytes than it declares, or the archive is damaged.
        """
        check_sizes({member: self.sizes[member] for member in members}, str(self.path))
        for member in sorted(members, key=self._positions.__getitem__):
            yield member, self._read_one(member)

    def _read_one(self, member: str) -> bytes:
        size = self.sizes[member]
        with _malformed_refused(self.path, member), self._open(member) as stream:
            # One byte more than declared, so that a header that lies shows and costs no more than that byte.
            data = stream.read(size + 1)
        if len(data) != size:
            where = f"{self.path}: {member!r}"
            raise _refuse_size(where, f"{size:,} bytes, as its header declares", len(data))
        return data


def check_sizes(sizes: Mapping[str, int], where: str) -> None:
    """Raise ArchiveError if a file of these sizes in bytes, or all of them together, are over the caps."""
    for path, size_bytes in sizes.items():
        if size_bytes > MAX_MEMBER_BYTES:
            raise _refuse_size(f"{where}: {path!r}", f"at most {MAX_MEMBER_BYTES:,} bytes a file", size_bytes)
    if (total_bytes := sum(sizes.values())) > MAX_TOTAL_BYTES:
        raise _refuse_size(where, f"at most {MAX_TOTAL_BYTES:,} bytes in all", total_bytes)


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open an archive and judge its member list.

    Raises:
        UsageError: no such file, or a suffix that is not one of ``ARCHIVE_SUFFIXES``.
        ArchiveError: a link, device or other special member; an absolute, escaping or otherwise unsafe path; paths
            that collide; a path twice; more than ``MAX_MEMBERS``; encryption; a damaged archive.
    """
    if not path.is_file() or not path.name.endswith(ARCHIVE_SUFFIXES):
        accepted = f"an existing file ending in {', '.join(ARCHIVE_SUFFIXES)}"
        raise UsageError("not an archive that can be read", where=str(path), expected=accepted)
    with ExitStack() as stack:
        with _malformed_refused(path):
            judge = _open_zip if path.name.endswith(ZIP_SUFFIXES) else _open_tar
            archive = judge(path, stack)
        yield archive


@dataclass(frozen=True, slots=True)
class _Member:
    """A member as the judge sees it: raw name, kind ("file", "folder" or what else it is), declared size."""

    name: str
    kind: str
    size_bytes: int


def _judge_members(archive: Path, members: Iterable[_Member]) -> dict[str, int]:
    """Sizes by path of the regular members, in archive order; raises at the first member that is refused."""
    sizes: dict[str, int] = {}
    for number, member in enumerate(members, 1):
        if number > MAX_MEMBERS:
            raise _refusal(archive, None, "too many members", f"at most {MAX_MEMBERS:,}", f"{MAX_MEMBERS:,} and more")
        if member.kind not in ("file", "folder"):
            raise _refusal(archive, member.name, "not a regular file", "regular files and folders only", member.kind)
        path = _plain_path(member)
        if path == "" and member.kind == "folder":
            continue
        if problem := find_path_problem(path):
            raise _refusal(archive, member.name, f"the path {problem}", "a plain path below the archive's root")
        if member.size_bytes < 0:
            raise _refusal(archive, member.name, "negative size", "0 or more bytes", f"{member.size_bytes} bytes")
        if member.kind == "folder":
            continue
        if path in sizes:
            raise _refusal(archive, member.name, "the archive holds a path twice", "each path once")
        sizes[path] = member.size_bytes
    if collision := find_collision(sizes):
        both = f"{collision[0]!r} and {collision[1]!r}"
        raise _refusal(archive, None, "two members are one file on some file systems", "distinct paths", both)
    return sizes


def _plain_path(member: _Member) -> str:
    """The member's path without the ``./`` that ``tar -C folder .`` writes and without a folder's closing slash."""
    path = "" if member.name == "." else member.name.removeprefix("./")
    return path.removesuffix("/") if member.kind == "folder" else path


def _open_zip(path: Path, stack: ExitStack) -> Archive:
    source = stack.enter_context(zipfile.ZipFile(path))
    infos = source.infolist()
    # orig_filename: zipfile cuts filename at a NUL byte, which would hide what follows.
    sizes = _judge_members(path, (_Member(i.orig_filename, _zip_kind(i), i.file_size) for i in infos))
    by_path = {_plain_path(_Member(i.filename, "file", 0)): i for i in infos}
    positions = {member: by_path[member].header_offset for member in sizes}
    return Archive(path, sizes, positions, lambda member: source.open(by_path[member]))


def _zip_kind(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x1:
        return "an encrypted file"
    # Zip files written outside Unix leave the upper half, the Unix mode, at zero.
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a symbolic link" if kind == stat.S_IFLNK else "a special file"
    return "folder" if info.orig_filename.endswith("/") else "file"


def _open_tar(path: Path, stack: ExitStack) -> Archive:
    stream = stack.enter_context(_inflated(path))
    source = stack.enter_context(tarfile.TarFile(fileobj=_BoundedStream(path, stream)))
    infos: list[tarfile.TarInfo] = []

    def members() -> Iterator[_Member]:
        for info in source:
            infos.append(info)
            yield _Member(info.name, _tar_kind(info), info.size)

    sizes = _judge_members(path, members())
    by_path = {_plain_path(_Member(i.name, "file", 0)): i for i in infos if i.isreg()}
    positions = {member: by_path[member].offset for member in sizes}
    return Archive(path, sizes, positions, lambda member: _extracted(source, by_path[member]))


def _inflated(path: Path) -> io.BufferedIOBase:
    if path.name.endswith((".gz", ".tgz")):
        return gzip.GzipFile(path)
    return lzma.LZMAFile(path) if path.name.endswith(".xz") else path.open("rb")


def _extracted(source: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    stream = source.extractfile(info)
    if stream is None:
        raise tarfile.ReadError("not a regular file")
    return stream


_TAR_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
}


def _tar_kind(info: tarfile.TarInfo) -> str:
    if info.issparse():
        return "a sparse file"
    return _TAR_KINDS.get(info.type, "a special file")


class _BoundedStream(io.RawIOBase):
    """What tarfile reads from: refuses single reads and positions that only a bomb asks for.

    tarfile reads the extended header of a member in one piece, of whatever size the header names.
    """

    def __init__(self, path: Path, stream: io.BufferedIOBase) -> None:
        self._path, self._stream = path, stream

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_MEMBER_BYTES + 1 or self._stream.tell() + size > MAX_STREAM_BYTES + MAX_MEMBER_BYTES:
            raise self._refuse(self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or not 0 <= offset <= MAX_STREAM_BYTES:
            raise self._refuse(offset)
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def _refuse(self, position: int) -> ArchiveError:
        cap = f"at most {MAX_MEMBER_BYTES:,} bytes a header and {MAX_STREAM_BYTES:,} in all"
        return _refuse_size(str(self._path), cap, position)


@contextmanager
def _malformed_refused(archive: Path, member: str | None = None) -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        got = str(error) or type(error).__name__
        raise _refusal(archive, member, "the archive cannot be read", "an undamaged archive", got) from error


def _refuse_size(where: str, expected: str, got_bytes: int) -> ArchiveError:
    return ArchiveError("refused for its size", where=where, expected=expected, got=f"{got_bytes:,} bytes")


def _refusal(archive: Path, member: str | None, what: str, expected: str, got: str | None = None) -> ArchiveError:
    where = str(archive) if member is None else f"{archive}: {member!r}"
    return ArchiveError(
        what, where=where, expected=expected, got=got, next_command="unpack it yourself and pass the folder with --from"
    )
