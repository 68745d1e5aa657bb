"""What a series refuses: other locks, a tree in another state, a patch applied twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from series_cases import FILES, LOCKS, PATCHED, SERIES, digest, make_patch, refused

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.series import (
    PatchLock,
    Touch,
    apply_series,
    compute_locks,
)


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
