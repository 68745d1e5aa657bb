"""Diffs that are refused for their hunks: counts, context, order, markers, converted line ends."""

from __future__ import annotations

import pytest
from udiff_cases import AFTER_HUNK, CHANGE, CONTEXT_RULE, CONVERTED, COUNTS_MORE, EOF_MARK, GIT, NAMES, check_refusal

# id: diff, what, line, expected, got
REFUSED: dict[str, tuple[bytes, str, int, str | None, str | None]] = {
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
    check_refusal(diff, what, line, expected, got)
