"""Archives that are too large, damaged, or none: refused with an error of ours, and bounded in memory."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from pathlib import Path

import pytest
from archive_cases import FILES, make_tar, read_all, write_archive, write_zip
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_vendored.vendoring import archives
from msa_vendored.vendoring.archives import open_archive
from msa_vendored.vendoring.errors import ArchiveError, UsageError
from msa_vendored.vendoring.safe_paths import find_path_problem


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
