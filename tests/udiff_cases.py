"""Pieces of diffs, and what a refused one must say."""

from __future__ import annotations

import pytest

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.udiff import parse_udiff

GIT = b"diff --git a/f b/f\n"
NAMES = b"--- a/f\n+++ b/f\n"
EOF_MARK = b"\\ No newline at end of file\n"
CHANGE = b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"
CONTEXT_RULE = "1 line at either side (none at the file's start or end), at most 2 between changes: diff -U1"
AFTER_HUNK = "'@@ ', 'diff --git ', '--- ' or the end of the patch"
CONVERTED = "the patch itself was converted to CRLF: CR ends a line of the diff syntax"
COUNTS_MORE = "the hunk has fewer lines than its header counts"


def check_refusal(diff: bytes, what: str, line: int, expected: str | None, got: str | None) -> None:
    """Reading ``diff`` must fail with these words, and name the way on."""
    with pytest.raises(PatchError) as caught:
        parse_udiff(diff, "patches/x.patch")
    error = caught.value
    assert (error.what, error.where) == (what, f"patches/x.patch:{line}")
    assert (error.expected, error.got) == (expected, got)
    converted = "rm patches/x.patch && git -c core.autocrlf=false checkout -- patches/x.patch"
    correct = "correct patches/x.patch, or write its diff anew: git diff --no-index --no-prefix -U1 a/PATH b/PATH"
    assert error.next_command == (converted if what == CONVERTED else correct)
