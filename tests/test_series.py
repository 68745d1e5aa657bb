"""The series: which folders are refused, and that applying is exact, checked before and after, and all or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.series import (
    Patch,
    PatchLock,
    Touch,
    added_modes,
    apply_series,
    compute_locks,
    parse_patch,
    read_series,
)
from msa_vendored.vendoring.udiff import make_udiff

HEADER = b"""Description: change something
 Something is wrong.
Author: A. Nonymous
Origin: vendor
Forwarded: no
Last-Update: 2026-11-30
Kind: build
Drop-When: nothing is wrong
Test: tests/test_x.py::test_x
Fails-With: wrong

"""
CHANGE = b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_patch(name: str, changes: Mapping[str, tuple[bytes | None, bytes | None]]) -> Patch:
    """A patch from path -> bytes before and after; None where there is no file."""
    diffs = b"".join(make_udiff(path, old, new) for path, (old, new) in changes.items())
    return parse_patch(name, HEADER + diffs, f"patches/{name}")


def refused(*arguments: object, pin: str = "p1") -> str:
    """The message with which a series is refused."""
    with pytest.raises(PatchError) as caught:
        apply_series(*arguments, pin=pin)  # type: ignore[arg-type]  # passes on what the caller has
    return str(caught.value)


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


FILES = {"d/a": b"1\n2\n3\n", "b": b"caf\xe9\r\nx", "c": b"gone\n", "e": b"", "untouched": b"\x00"}
SERIES = (
    make_patch("one.patch", {"d/a": (FILES["d/a"], b"1\ntwo\n3\n"), "c": (FILES["c"], None), "n": (None, b"new\n")}),
    make_patch("two.patch", {"d/a": (b"1\ntwo\n3\n", b"1\ntwo\nthree\n"), "b": (FILES["b"], b"th\xe9\r\nx\n")}),
    make_patch("three.patch", {"n": (b"new\n", None), "d/n": (None, b""), "e": (b"", b"x")}),
)
LOCKS = (
    PatchLock(
        "one.patch",
        SERIES[0].sha256,
        (
            Touch("c", digest(b"gone\n"), None),
            Touch("d/a", digest(b"1\n2\n3\n"), digest(b"1\ntwo\n3\n")),
            Touch("n", None, digest(b"new\n")),
        ),
    ),
    PatchLock(
        "two.patch",
        SERIES[1].sha256,
        (
            Touch("b", digest(b"caf\xe9\r\nx"), digest(b"th\xe9\r\nx\n")),
            Touch("d/a", digest(b"1\ntwo\n3\n"), digest(b"1\ntwo\nthree\n")),
        ),
    ),
    PatchLock(
        "three.patch",
        SERIES[2].sha256,
        (
            Touch("d/n", None, digest(b"")),
            Touch("e", digest(b""), digest(b"x")),
            Touch("n", digest(b"new\n"), None),
        ),
    ),
)
PATCHED = {"b": b"th\xe9\r\nx\n", "c": None, "d/a": b"1\ntwo\nthree\n", "d/n": b"", "e": b"x"}


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


def with_touch(touch: Touch) -> list[PatchLock]:
    """The locks with another touch for the last patch that touches its path."""
    locks = list(LOCKS)
    index = max(i for i, lock in enumerate(locks) if any(known.path == touch.path for known in lock.touches))
    touches = tuple(touch if known.path == touch.path else known for known in locks[index].touches)
    locks[index] = replace(locks[index], touches=touches)
    return locks


OTHER = digest(b"other")

# id: locks, what, where, expected, got
LOCK_PROBLEMS: dict[str, tuple[list[PatchLock], str, str, str, str]] = {
    "order": (
        [LOCKS[1], LOCKS[0], LOCKS[2]],
        "the lock names other patches than the series, or in another order",
        "p1",
        "two.patch, one.patch, three.patch",
        "one.patch, two.patch, three.patch",
    ),
    "a patch more": (
        list(LOCKS[:2]),
        "the lock names other patches than the series, or in another order",
        "p1",
        "one.patch, two.patch",
        "one.patch, two.patch, three.patch",
    ),
    "patch digest": (
        [LOCKS[0], replace(LOCKS[1], sha256=OTHER), LOCKS[2]],
        "the patch is not the locked one",
        "two.patch",
        OTHER,
        SERIES[1].sha256,
    ),
    "touches more than locked": (
        [LOCKS[0], replace(LOCKS[1], touches=LOCKS[1].touches[:1]), LOCKS[2]],
        "the patch touches other files than its lock says",
        "two.patch",
        "b",
        "b, d/a",
    ),
    "touches less than locked": (
        [LOCKS[0], replace(LOCKS[1], touches=(*LOCKS[1].touches, Touch("z", None, OTHER))), LOCKS[2]],
        "the patch touches other files than its lock says",
        "two.patch",
        "b, d/a, z",
        "b, d/a",
    ),
    "post-image": (
        with_touch(Touch("b", digest(FILES["b"]), OTHER)),
        "the patched file is not the locked post-image",
        "two.patch: b",
        OTHER,
        digest(b"th\xe9\r\nx\n"),
    ),
    "post-image of a deleted file": (
        with_touch(Touch("n", digest(b"new\n"), OTHER)),
        "the patched file is not the locked post-image",
        "three.patch: n",
        OTHER,
        "no such file",
    ),
    "pre-image between patches": (
        with_touch(Touch("d/a", OTHER, digest(b"1\ntwo\nthree\n"))),
        "the lock's pre-image is not what the patches before this one leave",
        "two.patch: d/a",
        OTHER,
        digest(b"1\ntwo\n3\n"),
    ),
}


@pytest.mark.parametrize(("locks", "what", "where", "expected", "got"), LOCK_PROBLEMS.values(), ids=LOCK_PROBLEMS)
def test_patches_must_be_the_locked_ones(
    locks: list[PatchLock], what: str, where: str, expected: str, got: str
) -> None:
    """Guards: a patch is edited, added or reordered without review, or does something else than was reviewed."""
    assert refused(FILES, SERIES, locks) == (
        f"{what}\n"
        f"  where:    {where}\n"
        f"  expected: {expected}\n"
        f"  got:      {got}\n"
        "  next:     review the change, then nox -s lock -- --pin p1"
    )


# id: changed files of the tree (None: deleted), patch and file, expected, rest of the message after the digest
NOT_PRISTINE: dict[str, tuple[dict[str, bytes | None], str, str, str]] = {
    "changed in a hunk": (
        {"d/a": b"1\n2!\n3\n"},
        "one.patch: d/a",
        digest(b"1\n2\n3\n"),
        "one.patch: d/a, hunk 1, line 2: the hunk does not match: the line has other bytes",
    ),
    "changed outside the hunks": (
        {"d/a": b"1\n2\n3\n4\n"},
        "one.patch: d/a",
        digest(b"1\n2\n3\n"),
        "its hunks match, but another part of the file differs",
    ),
    "missing": (
        {"b": None},
        "two.patch: b",
        digest(b"caf\xe9\r\nx"),
        "two.patch: b: the file to patch does not exist",
    ),
    "to be added, but there": (
        {"n": b"mine\n"},
        "one.patch: n",
        "no such file",
        "one.patch: n: the file to add exists already",
    ),
    "converted to CRLF": (
        {"d/a": b"1\r\n2\r\n3\r\n"},
        "one.patch: d/a",
        digest(b"1\n2\n3\n"),
        "one.patch: d/a, hunk 1, line 1: the hunk does not match: only CR at the line's end differs, "
        "so the file or the patch was converted",
    ),
}


def tree_with(changes: Mapping[str, bytes | None]) -> dict[str, bytes]:
    return {path: data for path, data in {**FILES, **changes}.items() if data is not None}


@pytest.mark.parametrize(("changes", "where", "expected", "fault"), NOT_PRISTINE.values(), ids=NOT_PRISTINE)
def test_file_in_an_unknown_state_is_refused(
    changes: dict[str, bytes | None], where: str, expected: str, fault: str
) -> None:
    """Guards pitfall 3: "does not apply" is taken for "already applied"; a hunk that fits is taken for enough."""
    (data,) = changes.values()
    got = "no such file" if data is None else digest(data)
    assert refused(tree_with(changes), SERIES, LOCKS) == (
        "the file is neither pristine nor already patched\n"
        f"  where:    {where}\n"
        f"  expected: {expected}\n"
        f"  got:      {got}; {fault}\n"
        "  next:     nox -s rebase"
    )


# id: the one file that is patched, patch and file that stop, expected, got
ALREADY_PATCHED: dict[str, tuple[dict[str, bytes | None], str, str, str]] = {
    "by this patch": ({"d/a": b"1\ntwo\n3\n"}, "one.patch: d/a", digest(b"1\n2\n3\n"), "one.patch"),
    "by the last patch of the file": ({"d/a": PATCHED["d/a"]}, "one.patch: d/a", digest(b"1\n2\n3\n"), "two.patch"),
    "added": ({"n": b"new\n"}, "one.patch: n", "no such file", "one.patch"),
    "deleted": ({"c": None}, "one.patch: c", digest(b"gone\n"), "one.patch"),
}


@pytest.mark.parametrize(("changes", "where", "expected", "by"), ALREADY_PATCHED.values(), ids=ALREADY_PATCHED)
def test_patched_file_is_named_as_such(changes: dict[str, bytes | None], where: str, expected: str, by: str) -> None:
    """Guards pitfalls 3 and 4: a second run appends a block once more, or reports a puzzling mismatch."""
    (data,) = changes.values()
    got = "no such file" if data is None else digest(data)
    assert refused(tree_with(changes), SERIES, LOCKS) == (
        "the file is already patched\n"
        f"  where:    {where}\n"
        f"  expected: {expected}\n"
        f"  got:      {got}, as {by} leaves it\n"
        "  next:     nox -s vendor -- --pin p1 --refresh"
    )


def test_lock_that_agrees_with_a_wrong_tree_does_not_make_hunks_match() -> None:
    """Guards: digests alone are trusted and a hunk replaces whatever lines are at its place."""
    files = {**FILES, "d/a": b"1\nx\n3\n"}
    touches = tuple(replace(t, pre=digest(files["d/a"])) if t.path == "d/a" else t for t in LOCKS[0].touches)
    assert refused(files, SERIES, [replace(LOCKS[0], touches=touches), *LOCKS[1:]]) == (
        "the hunk does not match: the line has other bytes\n"
        "  where:    one.patch: d/a, hunk 1, line 2\n"
        "  expected: b'2\\n'\n"
        "  got:      b'x\\n'\n"
        "  next:     nox -s rebase"
    )


def test_failure_in_the_last_patch_leaves_nothing_applied() -> None:
    """Guards pitfall 5: the files of the first patches are changed, and the next run meets a half-patched tree."""
    files = {**FILES, "e": b"drifted"}
    before = dict(files)
    assert refused(files, SERIES, LOCKS).startswith("the file is neither pristine nor already patched\n")
    assert files == before


def launcher(name: str) -> bytes:
    return b"def launch_%b(grid):\n    check(grid)\n    run(grid)\n\n" % name.encode()


@pytest.mark.parametrize("inserted", [launcher("pre"), b"# a line\n"], ids=["a twin, so that the hunk fits", "a line"])
def test_series_never_patches_a_twin_of_its_function(inserted: bytes) -> None:
    """Guards pitfall 2: upstream inserts a third near-identical function above the one that the patch edits.

    With a twin of the same length the hunk's lines are at its exact place, in the wrong function; only the digest
    of the file tells.
    """
    old = launcher("fwd") + launcher("bwd")
    new = launcher("fwd") + launcher("bwd").replace(b"run(grid)", b"run(grid + 1)")
    patches = (make_patch("x.patch", {"f": (old, new)}),)
    locks = compute_locks({"f": old}, patches)
    assert apply_series({"f": old}, patches, locks, pin="p1") == {"f": new}
    assert refused({"f": inserted + old}, patches, locks).startswith("the file is neither pristine nor")


@pytest.mark.parametrize(
    ("path", "got"),
    [("D/x", "D and d"), ("b/x", "b, a file and a folder"), ("UNTOUCHED", "UNTOUCHED and untouched")],
)
def test_added_file_must_not_collide(path: str, got: str) -> None:
    """Guards pitfall 15: a tree that differs between file systems, or a path that is a file and a folder."""
    patches = (make_patch("x.patch", {path: (None, b"x\n")}),)
    with pytest.raises(PatchError) as caught:
        compute_locks(FILES, patches)
    message = (
        "an added file collides with another path\n"
        f"  where:    {path}\n"
        f"  got:      {got}\n"
        "  next:     choose another path for the added file"
    )
    assert str(caught.value) == message
    locks = (PatchLock("x.patch", patches[0].sha256, (Touch(path, None, digest(b"x\n")),)),)
    assert refused(FILES, patches, locks) == message


def test_locks_are_not_computed_over_a_tree_that_does_not_match() -> None:
    """Guards: a new lock accepts what a rebase should have moved."""
    with pytest.raises(PatchError, match="the hunk does not match: the line has other bytes"):
        compute_locks({**FILES, "d/a": b"0\n" + FILES["d/a"]}, SERIES)


CONTENTS = st.lists(st.sampled_from([b"a\n", b"b\n", b"\r\n", b"\xe9\n"]), max_size=8).map(b"".join) | st.binary(
    max_size=20
)
FILE_STATES = st.none() | CONTENTS


@st.composite
def stacks(draw: st.DrawFn) -> tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]]:
    """A tree, a series over it of up to four patches of up to three files, and all files afterwards."""
    tree: dict[str, bytes | None] = {path: draw(FILE_STATES) for path in ("a", "b", "d/c")}
    files = {path: data for path, data in tree.items() if data is not None}
    patches = []
    for number in range(draw(st.integers(1, 4))):
        new = {path: draw(FILE_STATES) for path in draw(st.sets(st.sampled_from(sorted(tree)), min_size=1))}
        changes = {path: (tree[path], data) for path, data in new.items() if data != tree[path]}
        if changes:
            patches.append(make_patch(f"{number}.patch", changes))
            tree.update(new)
    return files, tuple(patches), tree


@given(stack=stacks())
def test_locked_series_leads_to_the_wanted_files(
    stack: tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]],
) -> None:
    """Guards: patches of the same file, additions and deletions in a row give other bytes than intended."""
    files, patches, after = stack
    changed = apply_series(files, patches, compute_locks(files, patches), pin="p1")
    assert changed == {path: data for path, data in after.items() if data != files.get(path)}


@given(stack=stacks(), data=st.data())
def test_one_changed_byte_in_any_touched_file_is_refused(
    stack: tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]], data: st.DataObject
) -> None:
    """Guards: a pre-image that is almost the pinned one is patched."""
    files, patches, _ = stack
    touched = {file.path for patch in patches for file in patch.files}
    candidates = sorted(path for path in touched if files.get(path))
    assume(candidates)
    path = data.draw(st.sampled_from(candidates))
    position = data.draw(st.integers(0, len(files[path]) - 1))
    mutated = bytearray(files[path])
    mutated[position] ^= data.draw(st.integers(1, 255))
    message = refused({**files, path: bytes(mutated)}, patches, compute_locks(files, patches))
    assert message.startswith(("the file is neither pristine nor already patched\n", "the file is already patched\n"))


@given(stack=stacks())
def test_applying_twice_is_refused_as_already_patched(
    stack: tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]],
) -> None:
    """Guards pitfall 4: a second run changes the tree again."""
    files, patches, _ = stack
    locks = compute_locks(files, patches)
    changed = apply_series(files, patches, locks, pin="p1")
    first = {file.path for file in patches[0].files} if patches else set()
    assume(first and first <= changed.keys())  # a file that the series changes back is pristine after it
    again = {path: data for path, data in {**files, **changed}.items() if data is not None}
    assert refused(again, patches, locks).startswith("the file is already patched\n")


@given(
    contents=st.lists(
        st.tuples(FILE_STATES, FILE_STATES).filter(lambda pair: pair[0] != pair[1]), min_size=2, max_size=3
    )
)
def test_independent_patches_commute(contents: list[tuple[bytes | None, bytes | None]]) -> None:
    """Guards: state carried from one patch to the next."""
    changes = {f"f{number}": pair for number, pair in enumerate(contents)}
    files = {path: old for path, (old, _) in changes.items() if old is not None}
    patches = [make_patch(f"{path}.patch", {path: pair}) for path, pair in changes.items()]
    for order in permutations(patches):
        changed = apply_series(files, order, compute_locks(files, order), pin="p1")
        assert changed == {path: new for path, (_, new) in changes.items()}
