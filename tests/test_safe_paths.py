"""Paths of a manifest or lock: which are refused, and which two are one file somewhere."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.vendoring.safe_paths import MAX_DEPTH, MAX_PATH_BYTES, find_collision, find_path_problem

UNSAFE_PATHS = {
    "": "is empty",
    "/etc/passwd": "is absolute",
    "C:/x": "is absolute",
    "c:x": "is absolute",
    "..": "leaves its folder with '..'",
    "a/../b": "leaves its folder with '..'",
    "a//b": "has an empty or '.' component",
    "a/": "has an empty or '.' component",
    "./a": "has an empty or '.' component",
    "a\\b": "has a backslash",
    "..\\b": "has a backslash",
    "a\0b": "has a control character or is not UTF-8",
    "a\nb": "has a control character or is not UTF-8",
    "a\udc80": "has a control character or is not UTF-8",
    "a" * (MAX_PATH_BYTES + 1): "is longer than 1,024 bytes",
    "/".join("a" * (MAX_DEPTH + 1)): "has more than 32 components",
}


@pytest.mark.parametrize(("path", "problem"), UNSAFE_PATHS.items(), ids=[repr(path)[:24] for path in UNSAFE_PATHS])
def test_unsafe_path_is_named(path: str, problem: str) -> None:
    """Guards against a member or manifest line that writes outside the tree."""
    assert find_path_problem(path) == problem


@given(st.text(alphabet=st.sampled_from("ab./\\:C\0\n~é"), max_size=12) | st.text(max_size=12))
def test_accepted_path_names_a_place_below_the_root(path: str) -> None:
    """Guards against spellings that nobody listed: whatever is accepted is already in normal form and relative."""
    if find_path_problem(path) is None:
        parts = PurePosixPath(path).parts
        assert "/".join(parts) == path
        assert ".." not in parts
        assert not PurePosixPath(path).is_absolute()
        assert b"\0" not in path.encode()


COLLISIONS = {
    "case": (["b", "README", "readme"], ("README", "readme")),
    "folder_case": (["A/x", "a/y"], ("A", "a")),
    "unicode_form": (["caf\u00e9", "cafe\u0301"], ("caf\u00e9", "cafe\u0301")),
    "case_and_form": (["CAF\u00c9", "cafe\u0301"], ("CAF\u00c9", "cafe\u0301")),
    "file_and_folder": (["a", "a/b"], ("a", "a")),
    "none": (["a/b", "a/c", "b"], None),
}


@pytest.mark.parametrize(("paths", "collision"), COLLISIONS.values(), ids=COLLISIONS.keys())
def test_paths_that_some_file_system_merges_are_found(paths: list[str], collision: tuple[str, str] | None) -> None:
    """Guards against trees whose digest differs on case-insensitive or normalising file systems."""
    assert find_collision(paths) == collision
