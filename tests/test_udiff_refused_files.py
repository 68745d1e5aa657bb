"""Diffs that are refused for the files they name: paths, modes, copies, binaries, nothing at all."""

from __future__ import annotations

import pytest
from udiff_cases import CHANGE, GIT, NAMES, check_refusal

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
}


@pytest.mark.parametrize(("diff", "what", "line", "expected", "got"), REFUSED.values(), ids=REFUSED)
def test_refused_diff_names_line_and_cause(
    diff: bytes, what: str, line: int, expected: str | None, got: str | None
) -> None:
    """Guards: a diff that says more or less than it seems is applied (pitfalls 6 and 7), or the message misleads."""
    check_refusal(diff, what, line, expected, got)
