"""The written lock: it reads back the same, whatever its values."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.vendoring.lock import GitSource, Lock, Pin, Submodule, WheelSource, parse_lock
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.safe_paths import find_path_problem
from msa_vendored.vendoring.series import PatchLock, Touch

HEX = "0123456789abcdef"


def hex_digits(count: int) -> st.SearchStrategy[str]:
    return st.text(HEX, min_size=count, max_size=count)


# Everything that a path may hold, quotes and non-ASCII letters included, so that the writer's escapes are tried.
PATHS = st.text(min_size=1, max_size=12).filter(lambda path: find_path_problem(path) is None)
DIGESTS = hex_digits(64)
TOUCHES = st.builds(Touch, PATHS, DIGESTS | st.none(), DIGESTS | st.none()).filter(
    lambda touch: touch.pre or touch.post
)
PATCH_LOCKS = st.builds(
    PatchLock, PATHS, DIGESTS, st.lists(TOUCHES, max_size=3, unique_by=lambda touch: touch.path).map(tuple)
)
SUBMODULES = st.builds(
    Submodule,
    PATHS,
    st.just("https://example.org/x.git"),
    hex_digits(40),
    st.lists(PATHS, min_size=1, max_size=3, unique=True).map(tuple),
)
GIT_SOURCES = st.builds(
    GitSource,
    st.just("https://example.org/x.git"),
    hex_digits(40),
    PATHS,
    st.lists(SUBMODULES, max_size=2, unique_by=lambda submodule: submodule.path).map(tuple),
)
WHEEL_SOURCES = st.builds(
    WheelSource,
    st.just("a"),
    st.just("1.0"),
    st.just("a-1.0-py3-none-any.whl"),
    DIGESTS,
    st.integers(0, 1 << 40),
    st.just("manylinux_2_28_x86_64"),
    PATHS,
)
VERSIONS = st.from_regex(r"[0-9][0-9A-Za-z.!+_-]{0,6}", fullmatch=True)
PINS = st.builds(
    Pin,
    id=st.from_regex(r"[a-z0-9]{1,4}([._-][a-z0-9]{1,4}){0,2}", fullmatch=True),
    source=WHEEL_SOURCES | GIT_SOURCES,
    spdx=st.just("MIT AND BSD-3-Clause"),
    license_files=st.lists(PATHS, min_size=1, max_size=12, unique=True).map(tuple),
    tested_with=st.fixed_dictionaries(
        {"apache-tvm-ffi": VERSIONS, "nvidia-cutlass-dsl": VERSIONS, "quack-kernels": VERSIONS}
    ),
    manifest=PATHS,
    tree_digest=DIGESTS.map("sha256:".__add__),
    series=PATHS,
    source_date_epoch=st.none() | st.integers(0, 1 << 40),
    patches=st.lists(PATCH_LOCKS, max_size=3, unique_by=lambda patch: patch.file).map(tuple),
)
LOCKS = st.lists(PINS, min_size=1, max_size=3, unique_by=lambda pin: pin.id).map(
    lambda pins: Lock(pins[-1].id, tuple(pins))
)


@given(LOCKS)
def test_written_lock_reads_back_the_same(lock: Lock) -> None:
    """Guards against a refresh of patch digests that loses or alters another entry, or breaks the file's syntax."""
    text = dump_lock(lock)
    again = parse_lock(tomllib.loads(text), "lock.toml")
    assert again == lock
    assert dump_lock(again) == text
