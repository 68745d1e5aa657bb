"""Syntax trees of the rebase: which function a line belongs to, and whether an edit is already there."""

from __future__ import annotations

import pytest

from msa_vendored.vendoring.rebase.pick import parse_conflicts
from msa_vendored.vendoring.rebase.syntax import has_edit, is_same_syntax, name_lines

NESTED = b"""\
import a

@decorate
def f(x):
    y = 1

    def g():
        return y
    return g


class C:
    z = 2

    def f(self):
        return 3


def f(x):
    return 4
"""


def test_each_line_is_named_by_the_innermost_function() -> None:
    """Guards the anchors: decorators, nesting, methods, blank lines inside, and a name that is defined twice."""
    names = name_lines(NESTED)
    assert names is not None
    assert names[:10] == ["<module>", "<module>", "f", "f", "f", "f", "f.g", "f.g", "f", "<module>"]
    assert names[11:17] == ["C", "C", "C", "C.f", "C.f", "<module>"]
    assert names[18:20] == ["f (2)", "f (2)"]
    assert name_lines(b"def f(:\n") is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b"f(a, b)  # x\n", b"f(\n    a,\n    b,\n)\n", True),
        (b"x = 'a'\n", b'x = "a"\n', True),
        (b"f(a, b)\n", b"f(b, a)\n", False),
        (b"x = 1\n", b"x = 1.0\n", False),
        (b"def f(:\n", b"def f(:\n", False),
    ],
)
def test_formatting_is_no_difference(one: bytes, other: bytes, same: bool) -> None:
    """Guards the comparison: what Python reads as equal is equal, and nothing else."""
    assert is_same_syntax(one, other) is same


BASE = b"def f(a, b=1):\n    x = g(a)\n    return x\n\n\ndef h():\n    return 0\n"
EDITS = {
    "argument": (b"b=1", b"b=2"),
    "statement": (b"x = g(a)", b"x = g(a, 2)"),
    "decorator": (b"def f", b"@cached\ndef f"),
    "added": (b"    return x", b"    check(x)\n    return x"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_where_it_was_made(name: str) -> None:
    """Guards both answers for each kind of edit: it is in the patched text, it is not in the text without it."""
    patched = BASE.replace(*EDITS[name], 1)
    assert has_edit(BASE, patched, patched)
    assert has_edit(BASE, patched, b"import z\n" + patched.replace(b"return 0", b"return 1"))
    assert not has_edit(BASE, patched, BASE)
    assert not has_edit(BASE, patched, BASE.replace(b"def h():\n", b"def h():\n    " + EDITS[name][1] + b"\n"))


@pytest.mark.parametrize(
    ("patched", "current"),
    [
        (BASE.replace(b"    x = g(a)\n", b""), BASE.replace(b"    x = g(a)\n", b"    x = other(a)\n")),
        (BASE.replace(b"return x", b"return x  # why"), BASE),
        (BASE + b"y = 1\n", b"def f(:\n"),
        (BASE.replace(b"g(a)", b"g(a, 2)"), BASE.replace(b"x = g(a)", b"x = g(a)\n    x = g(a, 2)")),
    ],
    ids=["only-removes", "only-a-comment", "not-python", "upstream-has-both"],
)
def test_what_is_not_surely_there_is_not_found(patched: bytes, current: bytes) -> None:
    """Guards against dropping a patch that is needed: each of these must be left to git and the maintainer."""
    assert not has_edit(BASE, patched, current)


def test_conflicts_are_read_from_the_marked_file() -> None:
    """Guards the three sides and the line numbers, also where a side is empty or has separator lines of its own."""
    text = b"a\n<<<<<<< HEAD\nup\n||||||| parent\nbase\n=======\npatch\n>>>>>>> x\nb\n"
    text += b"<<<<<<< HEAD\n||||||| parent\nbase\n=======\n>>>>>>> x\n"
    found = [(c.line, c.upstream, c.base, c.patch) for c in parse_conflicts("f", text)]
    assert found == [(2, "up\n", "base\n", "patch\n"), (10, "", "base\n", "")]
