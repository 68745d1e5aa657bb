"""The end of a rebase: export, prove, and write lock, manifest and patches into the checkout as one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.errors import RebaseError
from msa_vendored.vendoring.lock import Pin, read_lock
from msa_vendored.vendoring.pipeline import read_checkout
from msa_vendored.vendoring.publication import publish_files
from msa_vendored.vendoring.rebase.content import Content, write_content
from msa_vendored.vendoring.rebase.export import Carried, apply_strictly, export_patches, lay_out, put_pin
from msa_vendored.vendoring.rebase.scratch import Scratch
from msa_vendored.vendoring.rebase.state import State, take_fingerprint
from msa_vendored.vendoring.rebase.target import parse_pin
from msa_vendored.vendoring.series import read_series
from msa_vendored.vendoring.vendor import vendor_pin


def prepare_files(root: Path, scratch: Scratch, state: State) -> dict[str, bytes | None]:
    """What the checkout will hold, proved: bytes by path, None for a file to delete, the lock last.

    Raises:
        RebaseError: lock or patches of the checkout have changed since the start; or the export does not give what
            git has; or the checkout would not verify.
        PatchError: an exported patch cannot be read or applied.
    """
    checkout = read_checkout(root, state.old_pin)
    check_unchanged(root, state, checkout.pin.series)
    pin, content = parse_pin(state.pin_text), scratch.read_tree(state.target)
    if content.manifest.digest != pin.tree_digest:
        raise RebaseError(
            "the scratch repository no longer holds the new pristine tree",
            where=str(scratch.root),
            expected=pin.tree_digest,
            got=content.manifest.digest,
            next_command="nox -s rebase -- --abort",
        )
    by_name = {patch.name: patch for patch in checkout.patches}
    carried, parent = [], state.target
    for outcome in state.outcomes:
        if outcome.commit is not None:
            carried.append(Carried(by_name[outcome.name], parent, outcome.commit))
            parent = outcome.commit
    common = read_series(root / pin.series)
    patches = export_patches(scratch, carried, {patch.name: patch for patch in common})
    pin = apply_strictly(scratch, state.target, state.head, content, patches, pin)
    lock = put_pin(checkout.lock, pin, make_default=state.make_default)
    folder = root / pin.series / pin.id
    own = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    files = lay_out(lock, pin, content, patches, common, own)
    _rehearse(root, pin, files)
    return files


def check_unchanged(root: Path, state: State, series: str) -> None:
    """Refuse if somebody has edited lock or patches while the rebase was under way.

    Raises:
        RebaseError: they are not what the rebase started from.
    """
    if take_fingerprint(root, series) != state.fingerprint:
        raise RebaseError(
            "lock or patches of the checkout have changed since the rebase began",
            where=f"{root}: third_party/msa.lock.toml, {series}/",
            expected="the files as they were: nothing of yours is overwritten",
            next_command="put the change aside and run the command again; or nox -s rebase -- --abort",
        )


def _rehearse(root: Path, pin: Pin, files: Mapping[str, bytes | None]) -> None:
    """Lay the files out in a copy, and verify every pin there as ``nox -s verify`` does."""
    with tempfile.TemporaryDirectory(prefix="msa-vendored-rehearsal-") as name:
        copy = Path(name) / "checkout"
        shutil.copytree(root / "third_party", copy / "third_party", ignore=shutil.ignore_patterns("msa"))
        known = read_lock(root / "third_party" / "msa.lock.toml").pins
        for series in {pin.series, *(other.series for other in known)}:
            shutil.copytree(root / series, copy / series)
        publish_files(copy, files)
        for other in read_lock(copy / "third_party" / "msa.lock.toml").pins:
            _, findings = verify_checkout(copy, other.id)
            if findings:
                raise RebaseError(
                    "the checkout would not verify with the rebased patches; nothing was written",
                    where=other.id,
                    got="; ".join(f"{finding.subject}: {finding.problem}" for finding in findings),
                )


def write_files(root: Path, files: Mapping[str, bytes | None]) -> tuple[str, ...]:
    """Publish the files and forget the rebase, in one; returns the paths that changed."""
    current = {path: (root / path).read_bytes() if (root / path).is_file() else None for path in files}
    changed = tuple(path for path in files if current[path] != files[path])
    publish_files(root, {**{path: files[path] for path in changed}, "build/rebase/state.json": None})
    return changed


def vendor_content(root: Path, pin_id: str, content: Content) -> None:
    """Put the new pristine tree, which is at hand, into ``third_party/msa/<pin>/``: the build need not fetch it."""
    checkout = read_checkout(root, pin_id)
    with tempfile.TemporaryDirectory(prefix="msa-vendored-tree-") as folder:
        write_content(content, Path(folder))
        vendor_pin(checkout.pin, checkout.manifest, checkout.third_party, source=folder, replace=True)
