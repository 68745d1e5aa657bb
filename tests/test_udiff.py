"""Unified diffs: what is read, what is refused and with which words, and that applying is exact."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.udiff import (
    FilePatch,
    apply_file_patch,
    format_file_patch,
    make_udiff,
    parse_udiff,
    reverse,
)

GIT = b"diff --git a/f b/f\n"
NAMES = b"--- a/f\n+++ b/f\n"
EOF_MARK = b"\\ No newline at end of file\n"

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


CHANGE = b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"
CONTEXT_RULE = "1 line at either side (none at the file's start or end), at most 2 between changes: diff -U1"
AFTER_HUNK = "'@@ ', 'diff --git ', '--- ' or the end of the patch"
CONVERTED = "the patch itself was converted to CRLF: CR ends a line of the diff syntax"
COUNTS_MORE = "the hunk has fewer lines than its header counts"

# id: diff, what, line, expected, got
REFUSED: dict[str, tuple[bytes, str, int, str | None, str | None]] = {
    "empty": (b"", "no diff in the patch", 0, "a line that starts with 'diff --git ' or '--- '", "end of the patch"),
    "header only": (
        b"Description: x\n",
        "no diff in the patch",
        1,
        "a line that starts with 'diff --git ' or '--- '",
        "end of the patch",
    ),
    "hunk before the names": (
        b"@@ -1 +1 @@\n" + NAMES + CHANGE,
        "a hunk before the first file name",
        1,
        "'--- ' and '+++ ' above it",
        None,
    ),
    "cut off": (NAMES + CHANGE[:-1], "the patch is cut off: its last line has no newline", 7, None, "b' c'"),
    "rename": (
        b"diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n",
        "two names: a rename, a copy or other prefixes",
        1,
        "diff --git a/PATH b/PATH, with the same PATH",
        "b'a/f b/g'",
    ),
    "rename line": (
        GIT + b"rename from f\nrename to f\n",
        "renames and copies are not supported",
        2,
        "a deletion and an addition",
        "b'rename from f'",
    ),
    "copy line": (
        GIT + b"copy from f\ncopy to f\n",
        "renames and copies are not supported",
        2,
        "a deletion and an addition",
        "b'copy from f'",
    ),
    "rename, plain": (
        b"--- a/f\n+++ b/g\n" + CHANGE,
        "renames and copies are not supported",
        2,
        "+++ b/f",
        "+++ b/g",
    ),
    "git binary": (
        GIT + b"index 0123456..89abcde 100644\nGIT binary patch\nliteral 0\n",
        "binary patches are not supported",
        3,
        "git diff --text",
        "b'GIT binary patch'",
    ),
    "binary files differ": (
        GIT + b"Binary files a/f and b/f differ\n",
        "binary patches are not supported",
        2,
        "git diff --text",
        "b'Binary files a/f and b/f differ'",
    ),
    "quoted, git": (
        b'diff --git "a/\\303\\251" "b/\\303\\251"\n',
        "a quoted path",
        1,
        "diff --git a/PATH b/PATH, with the same PATH",
        r"""b'"a/\\303\\251" "b/\\303\\251"'""",
    ),
    "quoted, plain": (
        b'--- "a/f"\n+++ b/f\n' + CHANGE,
        "the path is quoted",
        1,
        "a plain relative path",
        """b'"a/f"'""",
    ),
    "absolute": (
        b"--- /etc/passwd\n+++ b/f\n" + CHANGE,
        "the path is absolute",
        1,
        "a plain relative path",
        "b'/etc/passwd'",
    ),
    "absolute after the prefix": (
        b"--- a/f\n+++ b//etc/passwd\n" + CHANGE,
        "the path is absolute",
        2,
        "a plain relative path",
        "b'/etc/passwd'",
    ),
    "escaping": (
        b"diff --git a/../f b/../f\n",
        "the path leaves its folder with '..'",
        1,
        "a plain relative path",
        "b'../f'",
    ),
    "path not UTF-8": (
        b"--- a/\xe9\n+++ b/\xe9\n" + CHANGE,
        "the path is not UTF-8",
        1,
        "a plain relative path",
        r"b'\xe9'",
    ),
    "no path": (b"--- a/\n+++ b/\n" + CHANGE, "the path is empty", 1, "a plain relative path", "b''"),
    "other prefixes": (
        b"--- old/f\n+++ new/f\n" + CHANGE,
        "a line with a file name is missing",
        1,
        "'--- a/PATH' or '--- /dev/null'",
        "b'--- old/f'",
    ),
    "second name missing": (
        b"--- a/f\n" + CHANGE,
        "a line with a file name is missing",
        2,
        "'+++ b/PATH' or '+++ /dev/null'",
        "b'@@ -1,3 +1,3 @@'",
    ),
    "no names": (b"--- /dev/null\n+++ /dev/null\n" + CHANGE, "both names are /dev/null", 2, "a path on one side", None),
    "names contradict": (
        GIT + b"--- a/g\n+++ b/g\n" + CHANGE,
        "the file names contradict the lines above them",
        3,
        "--- a/f, +++ b/f",
        "b'--- a/g', b'+++ b/g'",
    ),
    "added but has an old name": (
        GIT + b"new file mode 100644\n" + NAMES + CHANGE,
        "the file names contradict the lines above them",
        4,
        "--- /dev/null, +++ b/f",
        "b'--- a/f', b'+++ b/f'",
    ),
    "added without a mode line": (
        GIT + b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n",
        "the file names contradict the lines above them",
        3,
        "--- a/f, +++ b/f",
        "b'--- /dev/null', b'+++ b/f'",
    ),
    "added with old lines": (
        b"--- /dev/null\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n",
        "a hunk with lines on the side that is /dev/null",
        3,
        None,
        None,
    ),
    "deleted with new lines": (
        b"--- a/f\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n",
        "a hunk with lines on the side that is /dev/null",
        3,
        None,
        None,
    ),
    "symbolic link": (
        GIT + b"new file mode 120000\n",
        "modes that cannot be applied",
        2,
        "100644 or 100755, of one kind of change",
        "new file mode 120000",
    ),
    "changed symbolic link": (
        GIT + b"index 0123456..89abcde 120000\n" + NAMES + CHANGE,
        "a line that git does not write here",
        2,
        "a mode, 'index ' or '--- '",
        "b'index 0123456..89abcde 120000'",
    ),
    "half a mode change": (
        GIT + b"new mode 100755\n",
        "modes that cannot be applied",
        2,
        "100644 or 100755, of one kind of change",
        "new mode 100755",
    ),
    "names a file and stops": (
        GIT,
        "the patch names a file and does nothing to it",
        1,
        "'--- ' or a mode line",
        "f",
    ),
    "no hunks": (NAMES, "a file without hunks", 3, "'@@ '", "b''"),
    "the same file twice": (
        NAMES + CHANGE + GIT + NAMES + CHANGE,
        "the same file twice in one patch",
        8,
        "one section for each file",
        "f",
    ),
    "hunk header unreadable": (
        NAMES + b"@@ -1,3 +1,3\n a\n",
        "unreadable hunk header",
        3,
        "@@ -START,COUNT +START,COUNT @@",
        "b'@@ -1,3 +1,3'",
    ),
    "line 0": (
        NAMES + b"@@ -0,2 +1,2 @@\n-a\n+A\n b\n",
        "a hunk that starts at line 0",
        3,
        "a start from 1 on, 0 for an empty side",
        "b'@@ -0,2 +1,2 @@'",
    ),
    "counts too large": (
        NAMES + b"@@ -1,4 +1,4 @@\n a\n-b\n+B\n c\n",
        COUNTS_MORE,
        8,
        "' ', '-' or '+', as b'@@ -1,4 +1,4 @@' counts",
        "end of the patch",
    ),
    "counts too large before the next file": (
        NAMES + b"@@ -1,4 +1,4 @@\n a\n-b\n+B\n c\n" + GIT + NAMES + CHANGE,
        COUNTS_MORE,
        8,
        "' ', '-' or '+', as b'@@ -1,4 +1,4 @@' counts",
        "b'diff --git a/f b/f'",
    ),
    "counts too small": (
        NAMES + b"@@ -1,2 +1,2 @@\n a\n-b\n+B\n c\n",
        "the hunk above has more lines than its header counts",
        7,
        AFTER_HUNK,
        "b' c'",
    ),
    "counts of one side wrong": (
        NAMES + b"@@ -1,2 +1,3 @@\n a\n-b\n-c\n+B\n d\n",
        "the hunk's lines do not fit its counts",
        6,
        "b'@@ -1,2 +1,3 @@'",
        "one '-' too many",
    ),
    "blank of an empty line lost": (
        NAMES + b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n\n",
        COUNTS_MORE + " (an empty line of the file is ' ' in a diff)",
        7,
        "' ', '-' or '+', as b'@@ -1,3 +1,3 @@' counts",
        "b''",
    ),
    "new start wrong": (
        NAMES + b"@@ -1,2 +1 @@\n-1\n 2\n@@ -4,3 +4,3 @@\n 4\n-5\n+five\n 6\n",
        "the hunk's new start does not follow from its counts",
        6,
        "+3",
        "+4",
    ),
    "trailing text": (NAMES + CHANGE + b"the end\n", "text that belongs to no hunk", 8, AFTER_HUNK, "b'the end'"),
    "trailing empty line": (NAMES + CHANGE + b"\n", "text that belongs to no hunk", 8, AFTER_HUNK, "b''"),
    "mail signature": (
        NAMES + CHANGE + b"-- \n2.39.5\n\n",
        "a mail signature after the diff; git format-patch --no-signature leaves it out",
        8,
        AFTER_HUNK,
        "b'-- '",
    ),
    "a second marker": (
        NAMES + b"@@ -1 +1 @@\n-a\n+b\n" + EOF_MARK + EOF_MARK,
        "text that belongs to no hunk",
        7,
        AFTER_HUNK,
        r"b'\\ No newline at end of file'",
    ),
    "marker after an empty line": (
        NAMES + b"@@ -1 +1 @@\n-a\n+\n" + EOF_MARK,
        "a marker that ends no line",
        6,
        r"b'\\ No newline at end of file' after a line that is not empty",
        r"b'\\ No newline at end of file'",
    ),
    "marker in another language": (
        NAMES + b"@@ -1 +1 @@\n-a\n+b\n\\ Kein Zeilenumbruch am Dateiende.\n",
        "a marker that ends no line",
        6,
        r"b'\\ No newline at end of file' after a line that is not empty",
        r"b'\\ Kein Zeilenumbruch am Dateiende.'",
    ),
    "marker in the middle": (
        NAMES + b"@@ -1,2 +1,2 @@\n a\n" + EOF_MARK + b"-b\n+B\n",
        "a line without newline is not the last of its file",
        3,
        r"b'\\ No newline at end of file' after the last line only",
        None,
    ),
    "context goes on after a file without newline": (
        NAMES + b"@@ -1,2 +1,2 @@\n-a\n+A\n b\n" + EOF_MARK + b"@@ -3 +3,2 @@\n c\n+d\n",
        "a hunk with too little context: nothing follows its last change, yet it is not the file's last hunk",
        8,
        "1 line of context before the next hunk",
        "-3",
    ),
    "changes nothing": (
        NAMES + b"@@ -1,2 +1,2 @@\n a\n-b\n+b\n",
        "a hunk that changes nothing",
        3,
        "an added or a removed line",
        "3 lines",
    ),
    "overlapping": (
        NAMES + b"@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n@@ -3,3 +3,3 @@\n 3\n-4\n+four\n 5\n",
        "hunks that overlap or are not in the file's order",
        8,
        "a start after line 3 of the old file",
        "-3",
    ),
    "unordered": (
        NAMES + b"@@ -5,3 +5,3 @@\n 5\n-6\n+six\n 7\n" + CHANGE,
        "hunks that overlap or are not in the file's order",
        8,
        "a start after line 7 of the old file",
        "-1",
    ),
    "insertion without context": (
        NAMES + b"@@ -2,0 +3 @@\n+new\n",
        "a hunk with too little context",
        3,
        CONTEXT_RULE,
        "0 before, 0 after, 0 between",
    ),
    "no context before": (
        NAMES + b"@@ -2,2 +2,2 @@\n-b\n+B\n c\n",
        "a hunk with too little context",
        3,
        CONTEXT_RULE,
        "0 before, 1 after, 0 between",
    ),
    "no context after, and another hunk": (
        NAMES + b"@@ -1,2 +1,2 @@\n a\n-b\n+B\n@@ -4,3 +4,3 @@\n d\n-e\n+E\n f\n",
        "a hunk with too little context: nothing follows its last change, yet it is not the file's last hunk",
        7,
        "1 line of context before the next hunk",
        "-4",
    ),
    "two lines of context": (
        NAMES + b"@@ -1,4 +1,4 @@\n a\n b\n-c\n+C\n d\n",
        "a hunk with too much context",
        3,
        CONTEXT_RULE,
        "2 before, 1 after, 0 between",
    ),
    "three lines between changes": (
        NAMES + b"@@ -1,5 +1,5 @@\n-1\n+one\n 2\n 3\n 4\n-5\n+five\n",
        "a hunk with too much context",
        3,
        CONTEXT_RULE,
        "0 before, 0 after, 3 between",
    ),
    "CR in the git line": (
        (GIT + NAMES + CHANGE).replace(b"\n", b"\r\n"),
        CONVERTED,
        1,
        "b'diff --git a/f b/f'",
        r"b'diff --git a/f b/f\r'",
    ),
    "CR in the names": ((NAMES + CHANGE).replace(b"\n", b"\r\n"), CONVERTED, 1, "b'--- a/f'", r"b'--- a/f\r'"),
    "CR in a hunk header": (
        NAMES + b"@@ -1 +1 @@\r\n-a\n+b\n",
        CONVERTED,
        3,
        "b'@@ -1 +1 @@'",
        r"b'@@ -1 +1 @@\r'",
    ),
    "CR in a marker": (
        NAMES + b"@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\r\n",
        CONVERTED,
        6,
        r"b'\\ No newline at end of file'",
        r"b'\\ No newline at end of file\r'",
    ),
}


@pytest.mark.parametrize(("diff", "what", "line", "expected", "got"), REFUSED.values(), ids=REFUSED)
def test_refused_diff_names_line_and_cause(
    diff: bytes, what: str, line: int, expected: str | None, got: str | None
) -> None:
    """Guards: a diff that says more or less than it seems is applied (pitfalls 6 and 7), or the message misleads."""
    with pytest.raises(PatchError) as caught:
        parse_udiff(diff, "patches/x.patch")
    error = caught.value
    assert (error.what, error.where) == (what, f"patches/x.patch:{line}")
    assert (error.expected, error.got) == (expected, got)
    converted = "rm patches/x.patch && git -c core.autocrlf=false checkout -- patches/x.patch"
    correct = "correct patches/x.patch, or write its diff anew: git diff --no-index --no-prefix -U1 a/PATH b/PATH"
    assert error.next_command == (converted if what == CONVERTED else correct)


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


# Few distinct lines make repeated context likely, which is where a lenient applier goes wrong.
LINES = st.sampled_from([b"a\n", b"b\n", b"\n", b"\r\n", b"a\r\n", b"-- a\n", b"++ b\n", b"\\ x\n", b"\xe9\x00\n"])
TEXTS = st.builds(
    lambda lines, tail: b"".join(lines) + tail,
    st.lists(LINES, max_size=12),
    st.sampled_from([b"", b"a", b"\r", b"\xff"]),
)
CONTENTS = st.one_of(TEXTS, st.binary(max_size=40))
FILES = st.one_of(st.none(), CONTENTS)


@given(old=FILES, new=FILES)
def test_made_diff_is_read_back_and_gives_the_new_bytes(old: bytes | None, new: bytes | None) -> None:
    """Guards: bytes that the writer and the reader treat differently (CR, NUL, Latin-1, no newline at the end)."""
    assume(old != new)
    (patch,) = parse_udiff(make_udiff("f", old, new), "x.patch").files
    assert apply_file_patch(patch, old, "x.patch") == new
    assert format_file_patch(patch) == make_udiff("f", old, new)


@given(old=FILES, new=FILES)
def test_reverse_undoes_a_patch(old: bytes | None, new: bytes | None) -> None:
    """Guards: reverse loses a line, a newline or the file itself; or writes a diff that is refused."""
    assume(old != new)
    (patch,) = parse_udiff(make_udiff("f", old, new), "x.patch").files
    assert apply_file_patch(reverse(patch), new, "x.patch") == old
    assert reverse(reverse(patch)) == patch
    assert parse_udiff(format_file_patch(reverse(patch)), "x.patch").files == (reverse(patch),)


@given(old=CONTENTS, new=CONTENTS, data=st.data())
def test_one_changed_byte_in_quoted_lines_is_refused(old: bytes, new: bytes, data: st.DataObject) -> None:
    """Guards: a hunk applies to lines that are not its own. Bytes outside hunks are the digests' business."""
    assume(old != new)
    (patch,) = parse_udiff(make_udiff("f", old, new), "x.patch").files
    quoted = [(hunk.old_index, b"".join(hunk.old_lines)) for hunk in patch.hunks if hunk.old_lines]
    assume(quoted)
    index, text = data.draw(st.sampled_from(quoted))
    start = sum(len(line) + 1 for line in old.split(b"\n")[:index])
    position = start + data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.integers(1, 255))
    mutated = old[:position] + bytes([old[position] ^ other]) + old[position + 1 :]
    with pytest.raises(PatchError, match="the hunk does not match"):
        apply_file_patch(patch, mutated, "x.patch")


@st.composite
def damaged_diffs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Old bytes, and a diff of them of which up to two lines were removed, repeated, swapped or altered."""
    old = draw(TEXTS)
    lines = make_udiff("f", old, draw(TEXTS)).split(b"\n")
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(lines) - 1))
        other = draw(
            st.sampled_from(lines) | st.sampled_from([b" a", b"-a", b"+a", b"@@ -1 +1 @@", b"@@ -2,2 +2,3 @@"])
        )
        edit = draw(st.sampled_from([[], [lines[index], other], [other], [lines[index][1:]]]))
        lines[index : index + 1] = edit
        assume(lines)
    return old, b"\n".join(lines)


@given(diff=st.one_of(st.binary(max_size=80), damaged_diffs().map(lambda pair: pair[1])))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(diff: bytes) -> None:
    """Guards: the reader dies with another error than its own, or reads something that it cannot write."""
    try:
        files = parse_udiff(diff, "x.patch").files
    except PatchError:
        return
    written = b"".join(format_file_patch(file) for file in files)
    assert parse_udiff(written, "x.patch").files == files


def run_git(folder: Path, *arguments: str, ok: tuple[int, ...] = (0,)) -> bytes:
    """Run git away from any repository and any configuration of the user (pitfalls 1 and 10)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env |= {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    result = subprocess.run(["git", *arguments], cwd=folder, env=env, capture_output=True, check=False)
    assert result.returncode in ok, result.stderr
    return result.stdout


def apply_with_git(diff: bytes, old: bytes | None) -> bytes | None:
    """What ``git apply`` makes of the file ``f``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if old is not None:
            (folder / "f").write_bytes(old)
        (folder / "x.patch").write_bytes(diff)
        run_git(folder, "apply", "--whitespace=nowarn", "x.patch")
        return (folder / "f").read_bytes() if (folder / "f").exists() else None


@given(old=FILES, new=FILES)
@settings(max_examples=25, deadline=None)
def test_git_applies_our_diffs_alike(old: bytes | None, new: bytes | None) -> None:
    """Guards: our writer's dialect differs from the one that everybody's tools read."""
    assume(old != new)
    assert apply_with_git(make_udiff("f", old, new), old) == new


@given(pair=damaged_diffs())
@settings(max_examples=500, deadline=None)
def test_git_agrees_on_whatever_we_accept(pair: tuple[bytes, bytes]) -> None:
    """Guards: our reader accepts a diff that git refuses, or takes it to mean something else."""
    old, diff = pair
    try:
        (patch,) = parse_udiff(diff, "x.patch").files
        new = apply_file_patch(patch, old, "x.patch")
    except PatchError:
        return
    assert apply_with_git(diff, old) == new


@given(old=CONTENTS, new=CONTENTS)
@settings(max_examples=25, deadline=None)
def test_diffs_written_by_git_are_accepted(old: bytes, new: bytes) -> None:
    """Guards: a maintainer's ``git diff -U1`` is refused or read differently."""
    assume(old != new)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, content in (("a", old), ("b", new)):
            (folder / side).mkdir()
            (folder / side / "f").write_bytes(content)
        diff = run_git(folder, "diff", "--no-index", "--no-prefix", "--text", "-U1", "a/f", "b/f", ok=(1,))
    (patch,) = parse_udiff(diff, "x.patch").files
    assert apply_file_patch(patch, old, "x.patch") == new


def launcher(name: str, limit: int) -> bytes:
    return b"def launch_%b(grid):\n    if grid > %d:\n        refuse()\n    run(grid)\n\n" % (name.encode(), limit)


def test_hunk_never_lands_in_a_twin_of_its_function() -> None:
    """Guards pitfall 2: git moves the hunk to a twin of the function when a third one is inserted above."""
    old = launcher("fwd", 4) + launcher("bwd", 4)
    diff = make_udiff("f", old, old[: len(old) // 2] + old[len(old) // 2 :].replace(b"run(grid)", b"run(grid + 1)"))
    upstream = launcher("pre", 4) + old
    by_git = apply_with_git(diff, upstream)
    assert by_git == launcher("pre", 4) + launcher("fwd", 4).replace(b"run(grid)", b"run(grid + 1)") + launcher(
        "bwd", 4
    )
    (patch,) = parse_udiff(diff, "x.patch").files
    with pytest.raises(PatchError, match="the hunk does not match"):
        apply_file_patch(patch, b"# one line\n" + old, "x.patch")
