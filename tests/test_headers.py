"""Patch headers: what is read, what is refused with which words, and that writing and reading agree."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.headers import PatchHeader, dump_header, parse_header

TEXT = b"""Description: choose the call by the installed binding
 The call dies with TypeError.
 .
   indented, as in a list
Author: A. Nonymous <a@example.org>
Origin: backport, https://example.org/commit/1
Forwarded: not-needed
Applied-Upstream: 1.2
Bug: https://example.org/issues/3
Last-Update: 2026-11-30
Kind: numerical
Drop-When: utils.py no longer tests the version
Test: tests/test_patched.py::test_forward_compiles[bf16]
Fails-With: takes 2 positional arguments
"""

HEADER = PatchHeader(
    description="choose the call by the installed binding\nThe call dies with TypeError.\n\n  indented, as in a list",
    author="A. Nonymous <a@example.org>",
    origin="backport, https://example.org/commit/1",
    forwarded="not-needed",
    last_update=date(2026, 11, 30),
    kind="numerical",
    drop_when="utils.py no longer tests the version",
    test="tests/test_patched.py::test_forward_compiles[bf16]",
    fails_with="takes 2 positional arguments",
    bug="https://example.org/issues/3",
    applied_upstream="1.2",
)

EXPECTED = (
    "fields Description, Author, Origin, Forwarded, Last-Update, Kind, Drop-When, Test, Fails-With; "
    "optional Bug, Applied-Upstream"
)


def test_header_is_read_field_by_field() -> None:
    """Guards: a field ends up in another one's place, or its continuation lines are lost."""
    assert parse_header(TEXT, "x.patch") == HEADER
    assert HEADER.subject == "choose the call by the installed binding"


def test_header_is_written_as_it_was_read() -> None:
    """Guards: refreshing a patch rewrites its header."""
    assert dump_header(HEADER) == TEXT


def test_empty_lines_before_the_diff_and_absent_optional_fields_are_accepted() -> None:
    """Guards: the customary empty line above the diff is refused; optional fields become required."""
    text = b"".join(line for line in TEXT.splitlines(keepends=True) if not line.startswith((b"Bug", b"Applied")))
    assert parse_header(text + b"\n\n", "x.patch") == replace(HEADER, bug=None, applied_upstream=None)


# id: bytes replaced in TEXT, their replacement, problem
REFUSED = {
    "unknown": (b"Author:", b"From:", "line 5: unknown field From; missing field Author"),
    "wrong case": (b"Last-Update:", b"Last-update:", "line 10: unknown field Last-update; missing field Last-Update"),
    "repeated": (b"Kind:", b"Kind: build\nKind:", "line 12: field Kind a second time"),
    "no name": (
        b"Forwarded:",
        b"Forwarded",
        "line 7: 'Forwarded not-needed' is neither 'Name: value' nor indented by one blank; missing field Forwarded",
    ),
    "empty line inside": (b" .\n", b"\n", "line 3: '' is neither 'Name: value' nor indented by one blank"),
    "indented by a tab": (
        b" The call",
        b"\tThe call",
        "line 2: '\\tThe call dies with TypeError.' is neither 'Name: value' nor indented by one blank",
    ),
    "starts indented": (
        b"Description",
        b" Description",
        "line 1: ' Description: choose the call by the installed binding' is neither 'Name: value' nor indented by "
        "one blank; line 2: ' The call dies with TypeError.' is neither 'Name: value' nor indented by one blank; "
        "line 3: ' .' is neither 'Name: value' nor indented by one blank; "
        "line 4: '   indented, as in a list' is neither 'Name: value' nor indented by one blank; "
        "missing field Description",
    ),
    "blank at the end": (b"TypeError.\n", b"TypeError. \n", "line 2: blanks at the end"),
    "two blanks": (b"Author: ", b"Author:  ", "field Author: more than one blank before the value"),
    "empty": (b"1.2\n", b"\n", "line 8: blanks at the end"),
    "value only below": (
        b"Drop-When: utils",
        b"Drop-When:\n utils",
        "field Drop-When: empty, or starts or ends with an empty line",
    ),
    "ends with an empty line": (
        b"as in a list\n",
        b"as in a list\n .\n",
        "field Description: empty, or starts or ends with an empty line",
    ),
    "no reason": (
        b"\n The call dies with TypeError.\n .\n   indented, as in a list\n",
        b"\n",
        "field Description: no line says why",
    ),
    "long subject": (
        b"choose",
        b"choose" + b"!" * 33,
        "field Description: subject of 73 characters, at most 72",
    ),
    "origin": (
        b"backport, ",
        b"stolen, ",
        "field Origin: expected upstream, backport, vendor or other, or a URL, "
        "got 'stolen, https://example.org/commit/1'",
    ),
    "forwarded": (b"not-needed", b"perhaps", "field Forwarded: expected no, not-needed or a URL, got 'perhaps'"),
    "bug": (b"https://example.org/issues/3", b"3", "field Bug: expected a URL, got '3'"),
    "date": (b"2026-11-30", b"2026-02-30", "field Last-Update: expected YYYY-MM-DD, got '2026-02-30'"),
    "compact date": (b"2026-11-30", b"20261130", "field Last-Update: expected YYYY-MM-DD, got '20261130'"),
    "kind": (b"numerical", b"cosmetic", "field Kind: expected numerical or build, got 'cosmetic'"),
    "test without name": (
        b"::test_forward_compiles[bf16]",
        b"",
        "field Test: expected a pytest node id, FILE.py::NAME, got 'tests/test_patched.py'",
    ),
    "test outside": (
        b"tests/test_patched.py",
        b"../test_patched.py",
        "field Test: expected a path without '..', got '../test_patched.py::test_forward_compiles[bf16]'",
    ),
    "several": (
        b"Kind: numerical\nDrop-When",
        b"Kind: odd\nDropWhen",
        "line 12: unknown field DropWhen; missing field Drop-When; field Kind: expected numerical or build, got 'odd'",
    ),
}


@pytest.mark.parametrize(("old", "new", "problem"), REFUSED.values(), ids=REFUSED)
def test_refused_header_names_each_field(old: bytes, new: bytes, problem: str) -> None:
    """Guards: a patch without a reason, a test or an end is taken into the series; one problem hides another."""
    assert TEXT.count(old) == 1
    with pytest.raises(PatchError) as caught:
        parse_header(TEXT.replace(old, new), "patches/x.patch")
    assert str(caught.value) == (
        "the patch header is refused\n"
        "  where:    patches/x.patch\n"
        f"  expected: {EXPECTED}\n"
        f"  got:      {problem}\n"
        "  next:     edit the lines above the diff in patches/x.patch"
    )


@pytest.mark.parametrize("text", [b"", b"\n\n"])
def test_absent_header_lists_every_required_field(text: bytes) -> None:
    """Guards: a bare diff is taken into the series."""
    with pytest.raises(PatchError) as caught:
        parse_header(text, "x.patch")
    required = EXPECTED.removeprefix("fields ").partition(";")[0].split(", ")
    assert caught.value.got == "; ".join(f"missing field {name}" for name in required)


def test_converted_header_names_cr_as_the_cause() -> None:
    """Guards pitfall 7: a CRLF checkout shows up as a puzzling complaint about the fields."""
    with pytest.raises(PatchError) as caught:
        parse_header(TEXT.replace(b"\n", b"\r\n"), "patches/x.patch")
    assert str(caught.value) == (
        "the patch itself was converted to CRLF: its header contains CR\n"
        "  where:    patches/x.patch:1\n"
        "  next:     rm patches/x.patch && git -c core.autocrlf=false checkout -- patches/x.patch"
    )


def test_header_of_another_encoding_points_at_the_byte() -> None:
    """Guards pitfall 9: UnicodeDecodeError without a place."""
    with pytest.raises(PatchError) as caught:
        parse_header(TEXT.replace(b"Nonymous", b"Nonym\xf6s"), "patches/x.patch")
    assert str(caught.value) == (
        "the patch header is not UTF-8\n"
        "  where:    patches/x.patch:5\n"
        "  got:      byte 0xf6\n"
        "  next:     write the header of patches/x.patch in UTF-8"
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"author": ""}, "the patch header is refused"),
        ({"fails_with": "two\n"}, "the patch header is refused"),
        ({"drop_when": "one\n.\ntwo"}, "cannot be written so that it is read back equal"),
    ],
)
def test_header_that_cannot_be_read_back_is_not_written(change: dict[str, str], match: str) -> None:
    """Guards: a refresh writes a patch file that the next build refuses or understands differently."""
    with pytest.raises(PatchError, match=match):
        dump_header(replace(HEADER, **change))  # type: ignore[arg-type]  # the table has only str fields


WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
LINES = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)


@given(
    subject=WORDS,
    why=st.lists(LINES | st.just("") | LINES.map("  {}".format), max_size=5),
    end=LINES.filter(lambda line: line != "."),
    author=LINES,
    day=st.dates(min_value=date(1000, 1, 1)),
    bug=st.none() | st.just("https://example.org/1"),
)
def test_writing_and_reading_agree(
    subject: str, why: list[str], end: str, author: str, day: date, bug: str | None
) -> None:
    """Guards: text that the format treats specially (indents, empty lines, colons, other alphabets)."""
    description = "\n".join([subject, *(line for line in why if line != "."), end])
    header = replace(HEADER, description=description, author=author, last_update=day, drop_when=end, bug=bug)
    assert parse_header(dump_header(header), "x.patch") == header
