"""The committed lock and manifests: as the writer writes them, complete, and in agreement."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_vendored.trees import Manifest, compare_manifests
from msa_vendored.vendoring.errors import LockError
from msa_vendored.vendoring.lock import Pin, read_lock, read_manifest
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.safe_paths import find_collision, find_path_problem

THIRD_PARTY = Path(__file__).parents[1] / "third_party"
COMMITTED = THIRD_PARTY / "msa.lock.toml"


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
