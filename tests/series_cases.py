"""Patches and trees for the tests of a series."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.series import (
    Patch,
    PatchLock,
    Touch,
    apply_series,
    parse_patch,
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
