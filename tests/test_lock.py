"""The lock file: strict reading, deterministic writing, and the pins that are committed."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.trees import Manifest, compare_manifests
from msa_vendored.vendoring.errors import LockError
from msa_vendored.vendoring.lock import (
    GitSource,
    Lock,
    Pin,
    Submodule,
    WheelSource,
    dump_lock,
    parse_lock,
    read_lock,
    read_manifest,
)
from msa_vendored.vendoring.safe_paths import MAX_DEPTH, MAX_PATH_BYTES, find_collision, find_path_problem
from msa_vendored.vendoring.series import PatchLock, Touch

THIRD_PARTY = Path(__file__).parents[1] / "third_party"
COMMITTED = THIRD_PARTY / "msa.lock.toml"
HEX = "0123456789abcdef"

SAMPLE: dict[str, Any] = {
    "schema": 1,
    "default_pin": "a-1",
    "pins": [
        {
            "id": "a-1",
            "kind": "wheel",
            "spdx": "MIT AND (BSD-3-Clause OR Apache-2.0)",
            "license_files": ["licenses/MIT.txt"],
            "manifest": "a-1.manifest.tsv",
            "tree_digest": "sha256:" + "a" * 64,
            "source": {
                "project": "a",
                "version": "1.0",
                "file_name": "a-1.0-py3-none-any.whl",
                "sha256": "b" * 64,
                "size_bytes": 10,
                "platform": "manylinux_2_28_x86_64",
                "folder": "a/b",
            },
            "tested_with": {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"},
            "patches": [
                {"file": "0001.patch", "sha256": "d" * 64, "touches": [{"path": "x.py", "pre": "1" * 64}]},
                {"file": "0002.patch", "sha256": "e" * 64, "touches": [{"path": "y.py", "post": "2" * 64}]},
            ],
        },
        {
            "id": "b-2",
            "kind": "git",
            "spdx": "MIT",
            "license_files": ["licenses/MIT.txt"],
            "manifest": "b-2.manifest.tsv",
            "tree_digest": "sha256:" + "c" * 64,
            "series": "patches/b",
            "source_date_epoch": 0,
            "source": {
                "url": "https://example.org/b.git",
                "commit": "d" * 40,
                "folder": "python/b",
                "submodules": [
                    {"path": "c", "url": "https://example.org/c.git", "commit": "e" * 40, "include": ["include"]}
                ],
            },
            "tested_with": {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"},
        },
    ],
}


def change_sample(key_path: str, value: object) -> dict[str, Any]:
    """SAMPLE with one value set, by a key path such as ``pins[1].source.commit``; None deletes the key."""
    data = copy.deepcopy(SAMPLE)
    *parents, last = key_path.replace("[", ".").replace("]", "").split(".")
    place: Any = data
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    key_or_index: Any = int(last) if last.isdigit() else last
    if value is None:
        del place[key_or_index]
    else:
        place[key_or_index] = value
    return data


REFUSED = {
    "unknown_root_key": ("extra", 1, "unknown key in the lock file", "one of: default_pin, pins, schema", None),
    "unknown_pin_key": (
        "pins[0].sha",
        "x",
        "unknown key in the lock file",
        "one of: id, kind, license_files, manifest, patches, series, source, source_date_epoch, spdx, tested_with, "
        "tree_digest",
        None,
    ),
    "misspelt_source_key": (
        "pins[1].source.sha",
        "d" * 40,
        "unknown key in the lock file",
        "one of: commit, folder, submodules, url",
        None,
    ),
    "unknown_distribution": (
        "pins[0].tested_with.torch",
        "2.9",
        "unknown key in the lock file",
        "one of: apache-tvm-ffi, nvidia-cutlass-dsl, quack-kernels",
        None,
    ),
    "unknown_touch_key": (
        "pins[0].patches[0].touches[0].oid",
        "x",
        "unknown key in the lock file",
        "one of: path, post, pre",
        None,
    ),
    "missing_key": (
        "pins[0].source.sha256",
        None,
        "missing key in the lock file",
        "all of: project, version, file_name, sha256, size_bytes, platform, folder",
        None,
    ),
    "missing_both_digests": (
        "pins[0].patches[0].touches[0].pre",
        None,
        "missing key in the lock file",
        "pre, post or both",
        None,
    ),
    "unknown_schema": ("schema", 2, "unknown schema of the lock file", "1", "2"),
    "schema_true_is_no_integer": ("schema", True, "wrong type in the lock file", "an integer, 0 or more", "a boolean"),
    "pins_no_array": ("pins", 3, "wrong type in the lock file", "an array of tables", "an integer"),
    "pin_no_table": ("pins[1]", 3, "wrong type in the lock file", "a table", "an integer"),
    "source_no_table": ("pins[1].source", "x", "wrong type in the lock file", "a table", "a string"),
    "size_no_integer": (
        "pins[0].source.size_bytes",
        1.5,
        "wrong type in the lock file",
        "an integer, 0 or more",
        "a float",
    ),
    "size_negative": ("pins[0].source.size_bytes", -1, "wrong value in the lock file", "an integer, 0 or more", "-1"),
    "unknown_kind": ("pins[0].kind", "svn", "wrong value in the lock file", "wheel or git", "'svn'"),
    "upper_case_hex": (
        "pins[0].source.sha256",
        "B" * 64,
        "wrong value in the lock file",
        "64 lower-case hex digits",
        repr("B" * 64),
    ),
    "short_hex": (
        "pins[0].patches[1].sha256",
        "b" * 63,
        "wrong value in the lock file",
        "64 lower-case hex digits",
        repr("b" * 63),
    ),
    "branch_for_commit": (
        "pins[1].source.commit",
        "main",
        "wrong value in the lock file",
        "a commit: 40 lower-case hex digits",
        "'main'",
    ),
    "digest_without_algorithm": (
        "pins[1].tree_digest",
        "c" * 64,
        "wrong value in the lock file",
        "sha256: and 64 lower-case hex digits",
        repr("c" * 64),
    ),
    "command_for_url": (
        "pins[1].source.url",
        "ext::sh -c true",
        "wrong value in the lock file",
        "an https:// URL",
        "'ext::sh -c true'",
    ),
    "id_leaves_folder": (
        "pins[0].id",
        "../x",
        "wrong value in the lock file",
        "lower-case letters and digits, joined by single '.', '_' or '-'",
        "'../x'",
    ),
    "folder_leaves_archive": (
        "pins[0].source.folder",
        "a/../../b",
        "wrong value in the lock file",
        "a plain relative path with '/' between its parts",
        "'a/../../b'",
    ),
    "no_licence_file": (
        "pins[0].license_files",
        [],
        "wrong value in the lock file",
        "an array of one or more different strings, each a plain relative path with '/' between its parts",
        "[]",
    ),
    "include_no_string": (
        "pins[1].source.submodules[0].include[0]",
        3,
        "wrong type in the lock file",
        "a plain relative path with '/' between its parts",
        "an integer",
    ),
    "file_name_of_other_version": (
        "pins[0].source.file_name",
        "a-1.1-py3-none-any.whl",
        "wrong value in the lock file",
        "a name starting a-1.0-",
        "a-1.1-py3-none-any.whl",
    ),
    "id_twice": ("pins[1].id", "a-1", "a name appears twice in the lock file", "each once", "'a-1'"),
    "patch_twice": (
        "pins[0].patches[1].file",
        "0001.patch",
        "a name appears twice in the lock file",
        "each once",
        "'0001.patch'",
    ),
    "default_not_there": (
        "default_pin",
        "c-3",
        "the default pin is not in the lock file",
        "one of: a-1, b-2",
        "'c-3'",
    ),
}


@pytest.mark.parametrize(("key_path", "value", "what", "expected", "got"), REFUSED.values(), ids=REFUSED.keys())
def test_read_refuses_and_names_key_path(
    key_path: str, value: object, what: str, expected: str, got: str | None
) -> None:
    """Guards against a misspelt or malformed entry that is silently ignored, or refused without saying where."""
    with pytest.raises(LockError) as caught:
        parse_lock(change_sample(key_path, value), "lock.toml")
    error = caught.value
    assert (error.what, error.where) == (what, f"lock.toml: {key_path}")
    assert (error.expected, error.got, error.next_command) == (expected, got, "edit lock.toml")


def test_sample_is_accepted() -> None:
    """Guards the table above: each case must be refused for its one change, not for the sample's own faults."""
    lock = parse_lock(copy.deepcopy(SAMPLE), "lock.toml")
    assert [(pin.id, pin.kind, pin.folder) for pin in lock.pins] == [
        ("a-1", "wheel", "a/b"),
        ("b-2", "git", "python/b"),
    ]
    assert lock.pins[0].patches[0].touches == (Touch("x.py", "1" * 64, None),)
    assert (lock.pins[1].series, lock.pins[1].source_date_epoch) == ("patches/b", 0)


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"schema = ", "Invalid value (at end of document)"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (None, "[Errno 2] No such file or directory: '{path}'"),
    ],
    ids=["not_toml", "not_utf8", "no_file"],
)
def test_unreadable_file_is_a_lock_error(tmp_path: Path, data: bytes | None, got: str) -> None:
    """Guards against a traceback of the TOML parser in place of an error that names the file."""
    path = tmp_path / "lock.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(LockError) as caught:
        read_lock(path)
    assert (caught.value.where, caught.value.got) == (str(path), got.format(path=path))


def test_unknown_pin_lists_the_known_ones() -> None:
    """Guards against an error that leaves the user guessing ids."""
    lock = parse_lock(copy.deepcopy(SAMPLE), "lock.toml")
    assert lock.pin().id == lock.pin("a-1").id == "a-1"
    with pytest.raises(LockError) as caught:
        lock.pin("c")
    assert str(caught.value) == (
        "no such pin\n  expected: one of: a-1, b-2\n  got:      c\n  next:     pass one of these ids with --pin"
    )


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


def test_committed_lock_is_what_the_writer_writes() -> None:
    """Guards against hand edits that the next refresh would reorder or drop, comments included."""
    assert COMMITTED.read_text(encoding="utf-8") == dump_lock(read_lock(COMMITTED))


def read_committed(pin_id: str | None) -> tuple[Pin, Manifest]:
    pin = read_lock(COMMITTED).pin(pin_id)
    return pin, read_manifest(pin, THIRD_PARTY)


@pytest.mark.parametrize(("pin_id", "files"), [("vllm-0.24.0", 960), ("minimax-e2ebe765", 961)])
def test_committed_manifest_is_the_one_locked(pin_id: str, files: int) -> None:
    """Guards against a manifest or tree digest that was edited alone, and against paths that cannot be vendored."""
    pin, manifest = read_committed(pin_id)
    assert (len(manifest), manifest.digest) == (files, pin.tree_digest)
    assert [path for path in manifest.by_path if find_path_problem(path)] == []
    assert find_collision(manifest.by_path) is None


def test_licence_files_of_every_pin_exist() -> None:
    """Guards against a wheel without the texts that the licences demand, over a name that nobody checks."""
    pins = read_lock(COMMITTED).pins
    assert [name for pin in pins for name in pin.license_files if not (THIRD_PARTY / name).is_file()] == []


def test_pins_agree_where_one_series_serves_both() -> None:
    """Guards the reason for one series: the files of the fmax and sm_103a patches and CUTLASS are the same bytes."""
    default, (_, other) = read_committed(None)[1], read_committed("minimax-e2ebe765")
    drift = compare_manifests(default, other)
    assert not {"jit.py", "cute/src/common/utils.py"} & set(drift.changed)
    assert not any(path.startswith("cutlass/") for path in (*drift.missing, *drift.extra, *drift.changed))
    assert (drift.missing, drift.extra, drift.mode) == ((), ("cute/.gitignore",), ())


def test_manifest_of_another_tree_is_refused(tmp_path: Path) -> None:
    """Guards against a manifest that was swapped or edited: its digest would verify any tree that was too."""
    pin, manifest = read_committed(None)
    (tmp_path / pin.manifest).write_text(manifest.to_text().replace("100644", "100755", 1))
    with pytest.raises(LockError) as caught:
        read_manifest(pin, tmp_path)
    error = caught.value
    assert error.what == "the manifest is not the one that pin vllm-0.24.0 names by tree_digest"
    assert error.expected == pin.tree_digest
    (tmp_path / pin.manifest).unlink()
    with pytest.raises(LockError, match="a manifest cannot be read"):
        read_manifest(pin, tmp_path)


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
