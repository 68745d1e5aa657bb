"""The one direction of flow: pin -> verified tree -> patches -> built tree -> wheel -> proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, replace
from pathlib import Path

from msa_vendored.trees import Manifest
from msa_vendored.vendoring.built import BuiltTree, build_tree
from msa_vendored.vendoring.errors import DriftError, UsageError
from msa_vendored.vendoring.lock import Lock, Pin, read_lock, read_manifest
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.partials import hold_partial, remove_leftovers
from msa_vendored.vendoring.pin_series import read_pin_series
from msa_vendored.vendoring.publication import finish_publication
from msa_vendored.vendoring.series import Patch, compute_locks
from msa_vendored.vendoring.vendor import vendor_pin


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of msa_vendored and what it says about one pin."""

    root: Path
    lock: Lock
    pin: Pin
    manifest: Manifest
    patches: tuple[Patch, ...]

    @property
    def third_party(self) -> Path:
        """Folder of the lock, the manifests and the vendored trees."""
        return self.root / "third_party"

    @property
    def build(self) -> Path:
        """Folder of everything generated; git-ignored."""
        return self.root / "build"


def read_checkout(root: Path, pin_id: str | None = None) -> Checkout:
    """Read lock, manifest and series of a pin, checking each against the others.

    A rebase that was killed while it wrote these files is finished first.

    Raises:
        UsageError: ``root`` is no checkout of msa_vendored.
        LockError: the lock is not valid, has no such pin, or names another manifest by its digest.
        PatchError: the series or a patch cannot be read.
    """
    third_party = root / "third_party"
    if not (third_party / "msa.lock.toml").is_file():
        raise UsageError(
            "not a checkout of msa_vendored", where=str(root), expected="a folder with third_party/msa.lock.toml"
        )
    finish_publication(root)
    lock = read_lock(third_party / "msa.lock.toml")
    pin = lock.pin(pin_id)
    return Checkout(root, lock, pin, read_manifest(pin, third_party), read_pin_series(root, pin))


def prepare_built_tree(root: Path, *, pin_id: str | None, source: str | None, offline: bool) -> BuiltTree:
    """Vendor the pin if it is not there, apply the series, return the built tree."""
    checkout = read_checkout(root, pin_id)
    vendored = vendor_pin(checkout.pin, checkout.manifest, checkout.third_party, source=source, offline=offline)
    return build_tree(checkout.pin, vendored.path, checkout.manifest, checkout.patches, checkout.build / "trees")


def write_patch_locks(root: Path, pin_id: str | None, *, source: str | None, offline: bool) -> list[str]:
    """Recompute what the lock says about the patches of one pin; returns a line per patch.

    Each hunk must still meet its exact lines and bytes; only the digests are taken from what is there.

    Side effects:
        Rewrites ``third_party/msa.lock.toml`` if anything changed.
    """
    checkout = read_checkout(root, pin_id)
    tree = vendor_pin(checkout.pin, checkout.manifest, checkout.third_party, source=source, offline=offline)
    files = {entry.path: (tree.path / entry.path).read_bytes() for entry in checkout.manifest}
    locks = compute_locks(files, checkout.patches)
    before = {lock.file: lock for lock in checkout.pin.patches}
    pin = replace(checkout.pin, patches=locks)
    pins = tuple(pin if other.id == pin.id else other for other in checkout.lock.pins)
    text = dump_lock(replace(checkout.lock, pins=pins))
    path = checkout.third_party / "msa.lock.toml"
    if text != path.read_text(encoding="utf-8"):
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    gone = [f"{name}: removed from {pin.id}" for name in before if name not in {lock.file for lock in locks}]
    return [f"{k.file}: {'unchanged' if before.get(k.file) == k else 'locked'} for {pin.id}" for k in locks] + gone


def build_wheel(root: Path, out: Path, *, pin_id: str | None, source: str | None, offline: bool) -> Path:
    """Build the wheel into ``out``; it appears there whole or not at all.

    Raises:
        UsageError: hatchling failed; its output is in the message.
    """
    prepare_built_tree(root, pin_id=pin_id, source=source, offline=offline)
    out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "MSA_VENDORED_PIN": pin_id or "", "MSA_VENDORED_SOURCE": "", "MSA_VENDORED_OFFLINE": "1"}
    remove_leftovers(out, r"\.partial-")
    with hold_partial(out, ".partial-") as staging:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(staging)]
        result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
        wheels = list(staging.glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            raise UsageError(
                "hatchling did not build the wheel",
                where=" ".join(command),
                got=(result.stderr or result.stdout).strip(),
            )
        return wheels[0].replace(out / wheels[0].name)


def prove_wheel(root: Path, wheel: Path, *, pin_id: str | None) -> dict[str, object]:
    """Install ``wheel`` alone into an empty environment, verify every file there, compare provenance with the lock.

    The environment is made for this call and deleted: what a stale one would hide must show. Dependencies are not
    installed, since nothing that is proved here imports them.

    Returns:
        The provenance as the installed package reports it.

    Raises:
        DriftError: the installed tree or its provenance is not what lock and series say.
    """
    checkout = read_checkout(root, pin_id)
    with tempfile.TemporaryDirectory(prefix="msa-vendored-proof-") as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile"]
        _run([*pip, "--quiet", "--disable-pip-version-check", str(wheel.resolve())])
        _run([python, "-I", "-m", "msa_vendored", "verify"])
        code = "import json, msa_vendored; print(json.dumps(msa_vendored.provenance().to_dict()))"
        provenance: dict[str, object] = json.loads(_run([python, "-I", "-c", code]))
    built = build_tree(
        checkout.pin,
        checkout.third_party / "msa" / checkout.pin.id,
        checkout.manifest,
        checkout.patches,
        checkout.build / "trees",
    )
    if provenance != json.loads(json.dumps(built.provenance)):
        raise DriftError(
            "the installed wheel reports another provenance than lock and patches give",
            where=str(wheel),
            expected=json.dumps(built.provenance, sort_keys=True),
            got=json.dumps(provenance, sort_keys=True),
            next_command="nox -s build",
        )
    return provenance


def _run(command: list[str]) -> str:
    # A PYTHONPATH of the caller's would show pip another copy of the package, and it would install nothing.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir(), env=env)
    if result.returncode:
        raise DriftError(
            "the wheel does not prove itself in an empty environment",
            where=" ".join(command),
            got=(result.stdout + result.stderr).strip(),
        )
    return result.stdout
