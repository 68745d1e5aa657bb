"""Hostile archives: what is refused, with which words, before a byte of any member is handed out."""

from __future__ import annotations

import gzip
import io
import lzma
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_vendored.vendoring import archives
from msa_vendored.vendoring.archives import open_archive
from msa_vendored.vendoring.errors import ArchiveError, UsageError
from msa_vendored.vendoring.safe_paths import find_path_problem

FILES = {"pkg/a.py": b"a = 1\n", "pkg/sub/b.cu": b"\r\n\xff\n", "pkg/empty": b""}


def write_zip(path: Path, members: list[tuple[str, bytes]], mode: int = stat.S_IFREG | 0o644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, data)
    return path


def make_tar(members: list[tuple[str, bytes, bytes]]) -> bytes:
    """Members are name, type and bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "pkg/a.py", len(data)
            target.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix in (".whl", ".zip"):
        return write_zip(path, list(files.items()))
    compress: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".tgz": gzip.compress, ".xz": lzma.compress}
    data = make_tar([(name, tarfile.REGTYPE, data) for name, data in files.items()])
    path.write_bytes(compress.get(path.suffix, bytes)(data))
    return path


def read_all(path: Path) -> dict[str, bytes]:
    with open_archive(path) as archive:
        return dict(archive.read(list(archive.sizes)))


@pytest.mark.parametrize("suffix", archives.ARCHIVE_SUFFIXES)
def test_regular_members_are_read_byte_for_byte(tmp_path: Path, suffix: str) -> None:
    """Guards the plain case of every format: CR LF, bytes that are not UTF-8, an empty file."""
    path = write_archive(tmp_path / f"a{suffix}", FILES)
    with open_archive(path) as archive:
        assert archive.sizes == {name: len(data) for name, data in FILES.items()}
        assert dict(archive.read(["pkg/sub/b.cu"])) == {"pkg/sub/b.cu": b"\r\n\xff\n"}
    assert read_all(path) == FILES


def test_tar_of_a_dot_folder_is_read(tmp_path: Path) -> None:
    """Guards against refusing what ``tar -C folder -cf x.tar .`` writes: '.', './pkg/' and './pkg/a.py'."""
    path = tmp_path / "a.tar"
    folders = [(".", tarfile.DIRTYPE, b""), ("./pkg/", tarfile.DIRTYPE, b"")]
    path.write_bytes(make_tar([*folders, ("./pkg/a.py", tarfile.REGTYPE, b"x")]))
    assert read_all(path) == {"pkg/a.py": b"x"}


UNSAFE = {
    "zip_slip": ("../evil", "the path leaves its folder with '..'"),
    "zip_slip_inside": ("pkg/../../evil", "the path leaves its folder with '..'"),
    "absolute": ("/etc/evil", "the path is absolute"),
    "drive": ("C:/evil", "the path is absolute"),
    "backslash": ("pkg\\evil", "the path has a backslash"),
    "backslash_slip": ("..\\evil", "the path has a backslash"),
    "empty_component": ("pkg//evil", "the path has an empty or '.' component"),
    "control": ("pkg/evil\n", "the path has a control character or is not UTF-8"),
    "too_long": ("a" * 1025, "the path is longer than 1,024 bytes"),
    "same_path": ("pkg/a.py", "the archive holds a path twice"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")  # zipfile's own words when the test writes it
@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
@pytest.mark.parametrize(("name", "what"), UNSAFE.values(), ids=UNSAFE.keys())
def test_unsafe_path_refuses_the_archive(tmp_path: Path, suffix: str, name: str, what: str) -> None:
    """Guards against a file written outside the tree, or one member standing in for another."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".zip":
        write_zip(path, [*FILES.items(), (name, b"x")])
    else:
        members = [(n, tarfile.REGTYPE, d) for n, d in [*FILES.items(), (name, b"x")]]
        path.write_bytes(gzip.compress(make_tar(members)))
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert (caught.value.what, caught.value.where) == (what, f"{path}: {name!r}")
    assert caught.value.next_command == "unpack it yourself and pass the folder with --from"


def test_nul_in_a_zip_name_refuses_the_archive(tmp_path: Path) -> None:
    """Guards against zipfile's cut at the NUL byte, which turns 'pkg/z.py<NUL>.txt' into 'pkg/z.py'."""
    path = write_zip(tmp_path / "a.zip", [("pkg/z.py#.txt", b"x")])
    path.write_bytes(path.read_bytes().replace(b"z.py#", b"z.py\0"))
    with pytest.raises(ArchiveError, match="the path has a control character"):
        read_all(path)


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
@pytest.mark.parametrize(
    ("names", "both"),
    [
        (["README", "readme"], "'README' and 'readme'"),
        (["A/x", "a/y"], "'A' and 'a'"),
        (["caf\u00e9", "cafe\u0301"], "'caf\u00e9' and 'cafe\u0301'"),
        (["a", "a/b"], "'a' and 'a'"),
    ],
    ids=["case", "folder_case", "unicode_form", "file_and_folder"],
)
def test_colliding_paths_refuse_the_archive(tmp_path: Path, suffix: str, names: list[str], both: str) -> None:
    """Guards against trees that differ between file systems."""
    path = write_archive(tmp_path / f"a{suffix}", dict.fromkeys(names, b"x"))
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert (caught.value.what, caught.value.got) == ("two members are one file on some file systems", both)


TAR_KINDS = {
    "symlink": (tarfile.SYMTYPE, "a symbolic link"),
    "hardlink": (tarfile.LNKTYPE, "a hard link"),
    "character_device": (tarfile.CHRTYPE, "a character device"),
    "block_device": (tarfile.BLKTYPE, "a block device"),
    "pipe": (tarfile.FIFOTYPE, "a named pipe"),
    "contiguous": (tarfile.CONTTYPE, "a special file"),
    "unknown": (b"Z", "a special file"),
}


@pytest.mark.parametrize(("kind", "got"), TAR_KINDS.values(), ids=TAR_KINDS.keys())
def test_special_tar_member_refuses_the_archive(tmp_path: Path, kind: bytes, got: str) -> None:
    """Guards against links that redirect later members, and against devices."""
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar([("pkg/a.py", tarfile.REGTYPE, b"x"), ("pkg/evil", kind, b"")]))
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert str(caught.value) == (
        "not a regular file\n"
        f"  where:    {path}: 'pkg/evil'\n"
        "  expected: regular files and folders only\n"
        f"  got:      {got}\n"
        "  next:     unpack it yourself and pass the folder with --from"
    )


def test_sparse_tar_member_refuses_the_archive(tmp_path: Path) -> None:
    """Guards against a few bytes that unfold to terabytes of zeros: tarfile counts sparse files as regular."""
    path = tmp_path / "a.tar"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        info = tarfile.TarInfo("pkg/evil")
        info.size = 4
        info.pax_headers = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,4"}
        target.addfile(info, io.BytesIO(b"1234"))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert caught.value.got == "a sparse file"


@pytest.mark.parametrize(
    ("mode", "flag", "got"),
    [
        (stat.S_IFLNK | 0o777, 0, "a symbolic link"),
        (stat.S_IFIFO | 0o644, 0, "a special file"),
        (stat.S_IFCHR | 0o644, 0, "a special file"),
        (stat.S_IFREG | 0o644, 1, "an encrypted file"),
    ],
    ids=["symlink", "pipe", "device", "encrypted"],
)
def test_special_zip_member_refuses_the_archive(tmp_path: Path, mode: int, flag: int, got: str) -> None:
    """Guards against Unix file types in a zip's external attributes, and against a password prompt."""
    path = write_zip(tmp_path / "a.zip", [("pkg/evil", b"/etc/passwd")], mode)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= flag
    path.write_bytes(data)
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert (caught.value.what, caught.value.got) == ("not a regular file", got)


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_too_many_members_refuse_the_archive(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against archives of millions of empty members."""
    path = write_archive(tmp_path / f"a{suffix}", FILES)
    monkeypatch.setattr(archives, "MAX_MEMBERS", len(FILES))
    assert read_all(path) == FILES
    monkeypatch.setattr(archives, "MAX_MEMBERS", len(FILES) - 1)
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert (caught.value.what, caught.value.expected) == ("too many members", "at most 2")


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz", ".tar.xz"])
def test_bomb_is_refused_by_its_declared_size(tmp_path: Path, suffix: str) -> None:
    """Guards against a small archive that fills the memory; a large member that nobody reads is fine."""
    size = archives.MAX_MEMBER_BYTES + 1
    path = write_archive(tmp_path / f"a{suffix}", {**FILES, "bomb": bytes(size)})
    assert path.stat().st_size < 200_000
    with open_archive(path) as archive:
        assert dict(archive.read(list(FILES))) == FILES
        with pytest.raises(ArchiveError) as caught:
            list(archive.read(["bomb"]))
    assert str(caught.value) == (
        "refused for its size\n"
        f"  where:    {path}: 'bomb'\n"
        "  expected: at most 67,108,864 bytes a file\n"
        "  got:      67,108,865 bytes"
    )


def test_sum_of_the_read_members_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against many members, each below the cap of one, and against reading before the sum is known."""
    path = write_archive(tmp_path / "a.zip", {"a": bytes(60), "b": bytes(60)})
    monkeypatch.setattr(archives, "MAX_TOTAL_BYTES", 100)
    with open_archive(path) as archive:
        assert dict(archive.read(["a"])) == {"a": bytes(60)}
        with pytest.raises(ArchiveError) as caught:
            next(archive.read(["a", "b"]))
    assert (caught.value.expected, caught.value.got) == ("at most 100 bytes in all", "120 bytes")


@pytest.mark.parametrize("declared", [10, 200_000], ids=["smaller", "larger"])
def test_zip_that_lies_about_a_size_is_refused(tmp_path: Path, declared: int) -> None:
    """Guards against a header that declares little for a member that inflates to much, or more than there is."""
    path = write_zip(tmp_path / "a.zip", [("bomb", bytes(100_000))])
    data = path.read_bytes()
    path.write_bytes(data.replace((100_000).to_bytes(4, "little"), declared.to_bytes(4, "little")))
    with open_archive(path) as archive:
        assert archive.sizes == {"bomb": declared}
        with pytest.raises(ArchiveError):
            list(archive.read(["bomb"]))


def test_bytes_beyond_the_declared_size_are_not_read(tmp_path: Path) -> None:
    """Guards the reading itself: one byte more than declared is asked for, whatever the member would yield."""
    asked = []

    class Endless(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return bytes(size or 0)

    archive = archives.Archive(tmp_path / "a.zip", {"a": 10}, {"a": 0}, lambda _member: Endless())
    with pytest.raises(ArchiveError) as caught:
        list(archive.read(["a"]))
    assert asked == [11]
    assert (caught.value.expected, caught.value.got) == ("10 bytes, as its header declares", "11 bytes")


def test_huge_extended_header_is_refused(tmp_path: Path) -> None:
    """Guards against tarfile reading an extended header of any size in one piece: 100 MB here, 98 kB on disk."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 100 << 20
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf() + bytes(100 << 20), 9))
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert caught.value.expected == "at most 67,108,864 bytes a header and 4,294,967,296 in all"


def test_skipped_members_count_against_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a compressed tar whose members must be inflated, for ever, only to be skipped."""
    path = write_archive(tmp_path / "a.tar.gz", {"skipped": bytes(1 << 20), **FILES})
    assert read_all(path)["skipped"] == bytes(1 << 20)
    monkeypatch.setattr(archives, "MAX_STREAM_BYTES", 1 << 19)
    with pytest.raises(ArchiveError, match="refused for its size"):
        read_all(path)


def test_negative_tar_size_is_refused(tmp_path: Path) -> None:
    """Guards against a member that sends the reader backwards, for ever."""
    path = tmp_path / "a.tar"
    data = bytearray(make_tar([("pkg/a.py", tarfile.REGTYPE, b"x")]))
    data[124:136] = b"\xff" * 11 + b"\x00"  # base-256, -256 bytes
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert (caught.value.what, caught.value.got) == ("negative size", "-256 bytes")


@pytest.mark.parametrize("suffix", archives.ARCHIVE_SUFFIXES)
@pytest.mark.parametrize("data", [b"", b"not an archive" * 90], ids=["empty", "text"])
def test_what_is_no_archive_is_an_archive_error(tmp_path: Path, suffix: str, data: bytes) -> None:
    """Guards against a traceback of the library, or an empty listing, for a file that only has the name."""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match="the archive cannot be read"):
        read_all(path)


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz", ".tar.xz"])
def test_truncated_archive_is_an_archive_error(tmp_path: Path, suffix: str) -> None:
    """Guards against half a download that passes for an archive with fewer members."""
    path = write_archive(tmp_path / f"a{suffix}", {"a": bytes(range(256)) * 40, **FILES})
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ArchiveError, match="the archive cannot be read"):
        read_all(path)


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
DAMAGES = {
    "unknown_method": ([(LOCAL, 8, b"\x63"), (CENTRAL, 10, b"\x63")], "That compression method is not supported"),
    "name_not_utf8": (
        [(LOCAL, 30, b"\xff"), (CENTRAL, 46, b"\xff")],
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "deflate": ([(LOCAL, 32, b"\xff" * 6)], "Error -3 while decompressing data: invalid block type"),
}


@pytest.mark.parametrize(("changes", "got"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_zip_is_an_archive_error(tmp_path: Path, changes: list[tuple[bytes, int, bytes]], got: str) -> None:
    """Guards against the exceptions of zipfile and zlib that random damage rarely meets.

    A change is a header's signature, an offset from it, and the bytes to put there.
    """
    path = write_zip(tmp_path / "a.zip", [("\u00e9", b"abc" * 9)])  # not ASCII, so that the name is flagged as UTF-8
    data = bytearray(path.read_bytes())
    for signature, offset, damage in changes:
        place = data.index(signature) + offset
        data[place : place + len(damage)] = damage
    path.write_bytes(data)
    with pytest.raises(ArchiveError) as caught:
        read_all(path)
    assert (caught.value.what, caught.value.got) == ("the archive cannot be read", got)


@pytest.mark.parametrize("name", ["missing.zip", "a.rar", "folder.zip"])
def test_other_files_are_a_usage_error(tmp_path: Path, name: str) -> None:
    """Guards against guessing at formats, and against a traceback for a missing file."""
    (tmp_path / "a.rar").touch()
    (tmp_path / "folder.zip").mkdir()
    with pytest.raises(UsageError) as caught:
        read_all(tmp_path / name)
    assert str(caught.value) == (
        "not an archive that can be read\n"
        f"  where:    {tmp_path / name}\n"
        "  expected: an existing file ending in .whl, .zip, .tar, .tar.gz, .tgz, .tar.xz"
    )


def test_errors_of_the_reader_s_caller_pass_through(tmp_path: Path) -> None:
    """Guards against a full disk, met while a member is written, that is reported as a damaged archive."""
    path = write_archive(tmp_path / "a.zip", FILES)
    with pytest.raises(OSError, match=re.escape("no space left")), open_archive(path):
        raise OSError("no space left")


@settings(max_examples=150)
@given(
    suffix=st.sampled_from([".zip", ".tar"]),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_archive_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, changes: list[tuple[int, int]]
) -> None:
    """Guards against exceptions of zipfile and tarfile that nobody listed, and against unsafe paths they let by."""
    path = write_archive(tmp_path_factory.mktemp("damaged") / f"a{suffix}", FILES)
    data = bytearray(path.read_bytes())
    for position, value in changes:
        data[position % len(data)] = value
    path.write_bytes(data)
    try:
        found = read_all(path)
    except ArchiveError:
        return
    assert [name for name in found if find_path_problem(name)] == []
