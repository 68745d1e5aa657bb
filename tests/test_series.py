"""A series of patches: how it is read, and what applying it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from series_cases import FILES, HEADER, LOCKS, PATCHED, SERIES, digest

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.series import (
    added_modes,
    apply_series,
    compute_locks,
    parse_patch,
    read_series,
)
from msa_vendored.vendoring.udiff import make_udiff

CHANGE = b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two patches and no series file."""
    for name in ("one.patch", "two.patch"):
        (tmp_path / name).write_bytes(HEADER + CHANGE)
    return tmp_path


def test_series_is_read_in_its_own_order(folder: Path) -> None:
    """Guards: patches are applied in the order of their names, as a sorted glob does."""
    (folder / "series").write_text("# order matters\n\ntwo.patch  # first\none.patch")
    patches = read_series(folder)
    assert [patch.name for patch in patches] == ["two.patch", "one.patch"]
    assert patches[0].data == HEADER + CHANGE
    assert patches[0].sha256 == digest(HEADER + CHANGE)
    assert patches[0].header.subject == "change something"
    assert [file.path for file in patches[0].files] == ["f"]


def test_series_of_a_sub_folder_stands_alone(folder: Path) -> None:
    """Guards: a series for one pin takes part in, or is disturbed by, the common one."""
    (folder / "series").write_text("one.patch\ntwo.patch\n")
    (folder / "p1").mkdir()
    (folder / "p1" / "three.patch").write_bytes(HEADER + CHANGE)
    (folder / "p1" / "series").write_text("three.patch\n")
    assert [patch.name for patch in read_series(folder / "p1")] == ["three.patch"]
    assert len(read_series(folder)) == 2


def test_empty_series_is_no_error(tmp_path: Path) -> None:
    """Guards: a pin that needs no patch cannot be built."""
    (tmp_path / "series").write_text("# nothing to change\n")
    assert read_series(tmp_path) == ()


SERIES_PROBLEMS = {
    "unlisted": ("one.patch\n", "two.patch is not listed"),
    "missing": ("one.patch\ntwo.patch\nthree.patch\n", "three.patch does not exist"),
    "duplicate": ("one.patch\ntwo.patch\none.patch\n", "one.patch is listed 2 times"),
    "escapes": ("one.patch\ntwo.patch\n../x.patch\n", "'../x.patch' is not a file name like fmax.patch"),
    "options as of quilt": (
        "one.patch -p1\ntwo.patch\n",
        "'one.patch -p1' is not a file name like fmax.patch; one.patch is not listed",
    ),
    "not ASCII": ("one.patch\ntwo.patch\nü.patch\n", r"'\\xc3\\xbc.patch' is not a file name like fmax.patch"),
    "converted to CRLF": (
        "one.patch\r\ntwo.patch",
        r"'one.patch\r' is not a file name like fmax.patch; one.patch is not listed",
    ),
    "all at once": (
        "one.patch\nthree.patch\none.patch\nx/y.patch\n",
        "'x/y.patch' is not a file name like fmax.patch; one.patch is listed 2 times; three.patch does not exist; "
        "two.patch is not listed",
    ),
}


@pytest.mark.parametrize(("text", "problems"), SERIES_PROBLEMS.values(), ids=SERIES_PROBLEMS)
def test_series_and_folder_must_agree(folder: Path, text: str, problems: str) -> None:
    """Guards: a patch is left out silently; one problem hides another."""
    (folder / "series").write_bytes(text.encode())
    with pytest.raises(PatchError) as caught:
        read_series(folder)
    assert str(caught.value) == (
        "the series is refused\n"
        f"  where:    {folder}/series\n"
        f"  expected: each *.patch file of {folder} once, one a line\n"
        f"  got:      {problems}\n"
        f"  next:     edit {folder}/series"
    )


def test_missing_series_file_is_an_error(folder: Path) -> None:
    """Guards: a wrong folder means no patches."""
    with pytest.raises(PatchError) as caught:
        read_series(folder)
    assert str(caught.value) == (
        "there is no series file\n"
        f"  where:    {folder}/series\n"
        f"  next:     list the patches of {folder} in it, in order"
    )


@pytest.mark.parametrize(
    ("data", "what", "where"),
    [
        (CHANGE, "the patch header is refused", "p/x.patch"),
        (HEADER, "no diff in the patch", "p/x.patch:11"),
        (HEADER + CHANGE + b"\n", "text that belongs to no hunk", "p/x.patch:19"),
        (
            HEADER + b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n",
            "a patch changes the mode of an existing file; modes come from the pin",
            "p/x.patch: f",
        ),
        (
            (HEADER + CHANGE).replace(b"\n", b"\r\n"),
            "the patch itself was converted to CRLF: CR ends a line of the diff syntax",
            "p/x.patch:12",
        ),
    ],
)
def test_patch_file_is_refused_with_its_place(data: bytes, what: str, where: str) -> None:
    """Guards: half a patch is taken into the series (pitfalls 6 and 7)."""
    with pytest.raises(PatchError) as caught:
        parse_patch("x.patch", data, "p/x.patch")
    assert (caught.value.what, caught.value.where) == (what, where)


def test_locks_record_each_file_before_and_after_each_patch() -> None:
    """Guards: a lock that does not name a file, or names the wrong state of one that two patches touch."""
    assert compute_locks(FILES, SERIES) == LOCKS


def test_series_returns_exactly_the_changed_files() -> None:
    """Guards: pitfalls 8 and 9; a file that was added and deleted again, or not touched, counts as changed."""
    files = dict(FILES)
    assert apply_series(files, SERIES, LOCKS, pin="p1") == PATCHED
    assert files == FILES


def test_modes_of_added_files_are_those_of_the_patches() -> None:
    """Guards: an added script is written without its executable bit."""
    script = parse_patch("x.patch", HEADER + make_udiff("s", None, b"#!\n", mode="100755"), "x.patch")
    assert added_modes((*SERIES, script)) == {"d/n": "100644", "s": "100755"}
