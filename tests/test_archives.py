"""Archives: which members are read, and which refuse the whole archive."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
from pathlib import Path

import pytest
from archive_cases import FILES, make_tar, read_all, write_archive, write_zip

from msa_vendored.vendoring import archives
from msa_vendored.vendoring.archives import open_archive
from msa_vendored.vendoring.errors import ArchiveError


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
