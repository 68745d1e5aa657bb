"""Unified diffs: what is read, that applying is exact, and what a mismatch says."""

from __future__ import annotations

import pytest
from udiff_cases import EOF_MARK, GIT, NAMES

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.udiff import (
    FilePatch,
    apply_file_patch,
    make_udiff,
    parse_udiff,
    reverse,
)

# id: old bytes (None: no file), diff, new bytes
ACCEPTED: dict[str, tuple[bytes | None, bytes, bytes | None]] = {
    "plain": (b"a\nb\nc\n", NAMES + b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n", b"a\nB\nc\n"),
    "git": (b"a\nb\nc\n", GIT + NAMES + b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n", b"a\nB\nc\n"),
    "git index line and function heading": (
        b"def x():\na\nb\nc\n",
        GIT + b"index 0123456..89abcde 100755\n" + NAMES + b"@@ -2,3 +2,3 @@ def x():\n a\n-b\n+B\n c\n",
        b"def x():\na\nB\nc\n",
    ),
    "GNU time stamps": (
        b"a\nb\n",
        b"--- a/f\t2026-01-01 00:00:00.0 +0000\n+++ b/f\t2026-01-02 00:00:00.0 +0000\n@@ -1,2 +1 @@\n-a\n b\n",
        b"b\n",
    ),
    "at the file's start": (b"a\nb\nc\n", NAMES + b"@@ -1 +1,2 @@\n+new\n a\n", b"new\na\nb\nc\n"),
    "at the file's end": (b"a\nb\nc\n", NAMES + b"@@ -3 +3,2 @@\n c\n+new\n", b"a\nb\nc\nnew\n"),
    "two hunks": (
        b"1\n2\n3\n4\n5\n6\n7\n",
        NAMES + b"@@ -1,3 +1,4 @@\n 1\n-2\n+two\n+too\n 3\n@@ -5,3 +6,2 @@\n 5\n-6\n 7\n",
        b"1\ntwo\ntoo\n3\n4\n5\n7\n",
    ),
    "two unchanged lines between changes": (
        b"1\n2\n3\n4\n",
        NAMES + b"@@ -1,4 +1,4 @@\n-1\n+one\n 2\n 3\n-4\n+four\n",
        b"one\n2\n3\nfour\n",
    ),
    "an empty file gets content": (b"", NAMES + b"@@ -0,0 +1,2 @@\n+a\n+b\n", b"a\nb\n"),
    "a file becomes empty": (b"a\nb\n", NAMES + b"@@ -1,2 +0,0 @@\n-a\n-b\n", b""),
    "added, git": (None, GIT + b"new file mode 100644\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n", b"a\n"),
    "added, plain": (None, b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n", b"a\n"),
    "added, empty": (None, GIT + b"new file mode 100755\nindex 0000000..e69de29\n", b""),
    "deleted, git": (b"a\n", GIT + b"deleted file mode 100644\n--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", None),
    "deleted, plain": (b"a\n", b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", None),
    "deleted, empty": (b"", GIT + b"deleted file mode 100644\n", None),
    "mode only": (b"a\n", GIT + b"old mode 100644\nnew mode 100755\n", b"a\n"),
    "CRLF content": (b"a\r\nb\r\nc\r\n", NAMES + b"@@ -1,3 +1,3 @@\n a\r\n-b\r\n+B\r\n c\r\n", b"a\r\nB\r\nc\r\n"),
    "CR inside and alone": (b"a\rb\n\r\n", NAMES + b"@@ -1,2 +1,2 @@\n-a\rb\n+\r\r\n \r\n", b"\r\r\n\r\n"),
    "newline at the end lost": (
        b"a\nb\n",
        NAMES + b"@@ -1,2 +1,2 @@\n a\n-b\n+b\n" + EOF_MARK,
        b"a\nb",
    ),
    "newline at the end gained": (
        b"a\nb",
        NAMES + b"@@ -1,2 +1,2 @@\n a\n-b\n" + EOF_MARK + b"+b\n",
        b"a\nb\n",
    ),
    "no newline on either side": (
        b"a\nb",
        NAMES + b"@@ -1,2 +1,2 @@\n a\n-b\n" + EOF_MARK + b"+c\n" + EOF_MARK,
        b"a\nc",
    ),
    "context without newline": (b"a\nb", NAMES + b"@@ -1,2 +1,2 @@\n-a\n+A\n b\n" + EOF_MARK, b"A\nb"),
    "lines added after one without newline": (
        b"a",
        NAMES + b"@@ -1 +1,2 @@\n-a\n" + EOF_MARK + b"+a\n+b\n" + EOF_MARK,
        b"a\nb",
    ),
    "Latin-1 and NUL": (
        b"caf\xe9\n\x00\n",
        NAMES + b"@@ -1,2 +1,2 @@\n-caf\xe9\n+th\xe9\xff\n \x00\n",
        b"th\xe9\xff\n\x00\n",
    ),
    "lines that look like syntax": (
        b"-- x\n++ y\n@@ -1 +1 @@\ndiff --git a/g b/g\n",
        NAMES + b"@@ -1,3 +1,3 @@\n--- x\n-++ y\n+++ y\n+-- x\n @@ -1 +1 @@\n",
        b"++ y\n-- x\n@@ -1 +1 @@\ndiff --git a/g b/g\n",
    ),
}


@pytest.mark.parametrize(("old", "diff", "new"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_diff_gives_exactly_the_new_bytes(old: bytes | None, diff: bytes, new: bytes | None) -> None:
    """Guards: a form that git or GNU diff writes is not read, or its bytes are not kept (pitfalls 8 and 9)."""
    (patch,) = parse_udiff(diff, "x.patch").files
    assert patch.path == "f"
    assert (patch.is_new, patch.is_deleted) == (old is None, new is None)
    assert apply_file_patch(patch, old, "x.patch") == new
    assert apply_file_patch(reverse(patch), new, "x.patch") == old


def test_text_before_the_first_diff_is_the_header() -> None:
    """Guards: header lines are lost or taken for a diff."""
    header = b"Description: x\n why, --- said he\n\n"
    diff = parse_udiff(header + ACCEPTED["plain"][1] + ACCEPTED["git"][1].replace(b"/f", b"/dir/g h"), "x.patch")
    assert diff.header == header
    assert [file.path for file in diff.files] == ["f", "dir/g h"]


@pytest.mark.parametrize(
    ("diff", "old_mode", "new_mode"),
    [
        (ACCEPTED["plain"][1], None, None),
        (ACCEPTED["added, plain"][1], None, "100644"),
        (ACCEPTED["added, git"][1], None, "100644"),
        (ACCEPTED["added, empty"][1], None, "100755"),
        (ACCEPTED["deleted, git"][1], "100644", None),
        (ACCEPTED["mode only"][1], "100644", "100755"),
    ],
)
def test_modes_are_those_the_diff_states(diff: bytes, old_mode: str | None, new_mode: str | None) -> None:
    """Guards: an added script loses its executable bit."""
    (patch,) = parse_udiff(diff, "x.patch").files
    assert (patch.old_mode, patch.new_mode) == (old_mode, new_mode)


PATCH = parse_udiff(b"--- a/d/f\n+++ b/d/f\n@@ -2,3 +2,3 @@\n a\n-b\n+B\n c\n", "x.patch").files[0]
LAST = parse_udiff(b"--- a/d/f\n+++ b/d/f\n@@ -2 +2,2 @@\n a\n+b\n", "x.patch").files[0]
ADDED = parse_udiff(b"--- /dev/null\n+++ b/d/f\n@@ -0,0 +1 @@\n+a\n", "x.patch").files[0]
DELETED_EMPTY = parse_udiff(GIT.replace(b"/f", b"/d/f") + b"deleted file mode 100644\n", "x.patch").files[0]

# id: patch, old bytes, message
MISMATCHES: dict[str, tuple[FilePatch, bytes | None, str]] = {
    "other bytes": (
        PATCH,
        b"0\na\nx\nc\n",
        "the hunk does not match: the line has other bytes\n"
        "  where:    x.patch: d/f, hunk 1, line 3\n"
        "  expected: b'b\\n'\n"
        "  got:      b'x\\n'\n"
        "  next:     nox -s rebase",
    ),
    "one line further down": (
        PATCH,
        b"0\n0\na\nb\nc\n",
        "the hunk does not match: the line has other bytes\n"
        "  where:    x.patch: d/f, hunk 1, line 2\n"
        "  expected: b'a\\n'\n"
        "  got:      b'0\\n'\n"
        "  next:     nox -s rebase",
    ),
    "context differs": (
        PATCH,
        b"0\na\nb\nC\n",
        "the hunk does not match: the line has other bytes\n"
        "  where:    x.patch: d/f, hunk 1, line 4\n"
        "  expected: b'c\\n'\n"
        "  got:      b'C\\n'\n"
        "  next:     nox -s rebase",
    ),
    "file was converted to CRLF": (
        PATCH,
        b"0\r\na\r\nb\r\nc\r\n",
        "the hunk does not match: only CR at the line's end differs, so the file or the patch was converted\n"
        "  where:    x.patch: d/f, hunk 1, line 2\n"
        "  expected: b'a\\n'\n"
        "  got:      b'a\\r\\n'\n"
        "  next:     nox -s rebase",
    ),
    "no newline at the end": (
        PATCH,
        b"0\na\nb\nc",
        "the hunk does not match: only the newline at the end of the file differs\n"
        "  where:    x.patch: d/f, hunk 1, line 4\n"
        "  expected: b'c\\n'\n"
        "  got:      b'c'\n"
        "  next:     nox -s rebase",
    ),
    "file too short": (
        PATCH,
        b"0\na\n",
        "the hunk does not match: the file ends before the hunk does\n"
        "  where:    x.patch: d/f, hunk 1, line 3\n"
        "  expected: b'b\\n'\n"
        "  got:      end of file\n"
        "  next:     nox -s rebase",
    ),
    "no context after it, but the file goes on": (
        LAST,
        b"0\na\nmore\n",
        "the hunk does not match: no context follows its last change, but the file goes on\n"
        "  where:    x.patch: d/f, hunk 1, line 3\n"
        "  expected: end of file\n"
        "  got:      b'more\\n'\n"
        "  next:     nox -s rebase",
    ),
    "a line longer than a message should be": (
        PATCH,
        b"0\n" + b"x" * 200 + b"\nb\nc\n",
        "the hunk does not match: the line has other bytes\n"
        "  where:    x.patch: d/f, hunk 1, line 2\n"
        "  expected: b'a\\n'\n"
        f"  got:      b'{'x' * 160}' and 41 more bytes\n"
        "  next:     nox -s rebase",
    ),
    "no such file": (
        PATCH,
        None,
        "the file to patch does not exist\n  where:    x.patch: d/f\n  next:     nox -s rebase",
    ),
    "file to add exists": (
        ADDED,
        b"",
        "the file to add exists already\n  where:    x.patch: d/f\n  next:     nox -s rebase",
    ),
    "file to delete is not empty": (
        DELETED_EMPTY,
        b"kept\n",
        "the file to delete has more lines than the patch removes\n"
        "  where:    x.patch: d/f\n"
        "  got:      b'kept\\n'\n"
        "  next:     nox -s rebase",
    ),
}


@pytest.mark.parametrize(("patch", "old", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatch_is_refused_with_hunk_and_line(patch: FilePatch, old: bytes | None, message: str) -> None:
    """Guards: fuzz, offsets or ignored white space (pitfalls 2 and 7); a message that does not say where."""
    with pytest.raises(PatchError) as caught:
        apply_file_patch(patch, old, "x.patch")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("path", "what"),
    [("../f", "the path leaves its folder with '..'"), ("a\nb", "the path has a control character or is not UTF-8")],
)
def test_make_udiff_refuses_a_path_it_could_not_read_back(path: str, what: str) -> None:
    """Guards: a refresh writes a patch file that the next build refuses."""
    with pytest.raises(PatchError) as caught:
        make_udiff(path, b"", b"a")
    assert (caught.value.what, caught.value.where) == (what, path)


def test_make_udiff_writes_git_format_with_one_line_of_context() -> None:
    """Guards: a refresh quotes more of upstream than it must, or drops a mode."""
    old = b"".join(b"%d\n" % number for number in range(1, 10))
    assert make_udiff("d/f g", old, old.replace(b"5\n", b"five\n").replace(b"9\n", b"9")) == (
        b"diff --git a/d/f g b/d/f g\n--- a/d/f g\t\n+++ b/d/f g\t\n"
        b"@@ -4,3 +4,3 @@\n 4\n-5\n+five\n 6\n"
        b"@@ -8,2 +8,2 @@\n 8\n-9\n+9\n" + EOF_MARK
    )
    assert make_udiff("f", None, b"", mode="100755") == b"diff --git a/f b/f\nnew file mode 100755\n"
    assert make_udiff("f", b"x\n", None) == ACCEPTED["deleted, git"][1].replace(b"-a\n", b"-x\n")
    assert make_udiff("f", b"x", b"x") == make_udiff("f", None, None) == b""
