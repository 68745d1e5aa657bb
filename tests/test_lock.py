"""The lock file: strict reading, deterministic writing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from msa_vendored.vendoring.errors import LockError
from msa_vendored.vendoring.lock import (
    parse_lock,
    read_lock,
)
from msa_vendored.vendoring.series import Touch

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
