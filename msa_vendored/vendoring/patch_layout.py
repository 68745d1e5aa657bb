"""Where the patches of all pins lie, and how a change to some of them is written: with the locks it changes, as one.

Common patches lie in ``patches/``, those of one pin in ``patches/<pin id>/`` (``pin_series.py`` has the rule). A pin
whose tree is not on this machine is locked all the same if its files are those of a pin that is: the same patch on
the same bytes leaves the same bytes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msa_vendored.trees import Manifest
from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.errors import PatchError, UsageError
from msa_vendored.vendoring.lock import Lock, Pin, read_lock, read_manifest
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.pin_series import list_own_names, read_pin_series
from msa_vendored.vendoring.publication import publish_files
from msa_vendored.vendoring.rebase.content import read_content
from msa_vendored.vendoring.rebase.export import format_series
from msa_vendored.vendoring.series import Patch, PatchLock, Touch, compute_locks, read_series

Files = dict[str, bytes | None]
"""Bytes by path below the checkout; None for a file to delete."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One patch of the checkout, and for each pin where it comes from.

    ``common``: the common file; ``moved``: a file of the pin's own that differs in line numbers only; ``own``: one
    that says something else; ``-``: the pin does without it.
    """

    name: str
    subject: str
    kind: str
    pins: Mapping[str, str]


def list_placements(root: Path, lock: Lock) -> list[Placement]:
    """Every patch of every pin, the common ones first."""
    found: dict[str, Patch] = {patch.name: patch for patch in read_series(root / lock.pins[0].series)}
    by_pin = {pin.id: {patch.name: patch for patch in read_pin_series(root, pin)} for pin in lock.pins}
    common = dict(found)
    for patches in by_pin.values():
        found = {**patches, **found}
    order = [*common, *(name for name in found if name not in common)]

    def place(pin_id: str, name: str) -> str:
        patch, shared = by_pin[pin_id].get(name), common.get(name)
        if patch is None or shared is None:
            return "-" if patch is None else "own"
        return "common" if patch == shared else "moved" if is_moved(shared, patch) else "own"

    return [
        Placement(name, found[name].header.subject, found[name].header.kind, {p: place(p, name) for p in by_pin})
        for name in order
    ]


def is_moved(one: Patch, other: Patch) -> bool:
    """Whether two patches differ in line numbers only."""

    def unplace(patch: Patch) -> list[object]:
        hunks = [(file, [replace(hunk, old_start=0, new_start=0) for hunk in file.hunks]) for file in patch.files]
        return [patch.header, *((replace(file, hunks=()), lines) for file, lines in hunks)]

    return unplace(one) == unplace(other)


def lay_out_common(root: Path, pin: Pin, patches: Sequence[Patch]) -> Files:
    """The files that make ``patches`` the common series; comments of the series file stay."""
    path = root / pin.series / "series"
    old = {patch.name: patch for patch in read_series(root / pin.series)}
    names = [patch.name for patch in patches]
    files: Files = {f"{pin.series}/{name}": None for name in old if name not in names}
    files |= {f"{pin.series}/{patch.name}": patch.data for patch in patches if old.get(patch.name) != patch}
    if names != list(old):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.partition("#")[0].strip() in ("", *names)]
        kept += [f"{name}\n" for name in names if name not in old]
        files[f"{pin.series}/series"] = "".join(kept).encode()
    return files


def lay_out_own(root: Path, pin: Pin, patches: Sequence[Patch], common: Sequence[Patch]) -> Files:
    """The files below the pin's folder that make ``patches`` its series, given the common one."""
    shared = {patch.name: patch for patch in common}
    folder = f"{pin.series}/{pin.id}"
    existing = sorted(path.name for path in (root / folder).iterdir()) if (root / folder).is_dir() else []
    files: Files = {f"{folder}/{name}": None for name in existing}
    files |= {f"{folder}/{patch.name}": patch.data for patch in patches if shared.get(patch.name) != patch}
    if [patch.name for patch in patches] != list(shared):
        files[f"{folder}/series"] = format_series(pin.id, [patch.name for patch in patches])
    return files


def without_patch(root: Path, pin: Pin, name: str) -> Files:
    """The files below the pin's folder without a patch, for a pin whose tree is not at hand."""
    folder = root / pin.series / pin.id
    files: Files = {f"{pin.series}/{pin.id}/{name}": None} if (folder / name).is_file() else {}
    if (folder / "series").is_file() and name in (names := list_own_names(folder)):
        files[f"{pin.series}/{pin.id}/series"] = format_series(pin.id, [other for other in names if other != name])
    return files


def write_patches(root: Path, files: Files) -> tuple[str, ...]:
    """Write changed patches together with the locks of every pin that they change; all or nothing.

    Returns:
        The paths that changed.

    Raises:
        PatchError: a patch does not apply to a pin, or a pin cannot be locked because its tree is not here.
        UsageError: nothing would change.
    """
    lock = read_lock(root / "third_party" / "msa.lock.toml")
    series = {pin.series for pin in lock.pins}
    with tempfile.TemporaryDirectory(prefix="msa-vendored-rehearsal-") as name:
        copy = Path(name) / "checkout"
        shutil.copytree(root / "third_party", copy / "third_party", ignore=shutil.ignore_patterns("msa"))
        for folder in series:
            shutil.copytree(root / folder, copy / folder)
        publish_files(copy, files)
        lock = relock(root, copy, lock)
        files = {**files, "third_party/msa.lock.toml": dump_lock(lock).encode()}
        publish_files(copy, files)
        findings = [finding for pin in lock.pins for finding in verify_checkout(copy, pin.id)[1]]
        if findings:
            raise PatchError(
                "the checkout would not verify; nothing was written",
                got="; ".join(f"{finding.subject}: {finding.problem}" for finding in findings),
            )
    current = {path: (root / path).read_bytes() if (root / path).is_file() else None for path in files}
    changed = {path: data for path, data in files.items() if data != current[path]}
    if not changed:
        raise UsageError("nothing has changed", where=str(root), expected="an edit in the scratch tree")
    publish_files(root, changed)
    return tuple(changed)


def relock(root: Path, copy: Path, lock: Lock) -> Lock:
    """The lock for the patches that lie in ``copy``; trees are looked for in ``root``."""
    known: dict[tuple[str, str, str | None], str | None] = {}
    for pin in lock.pins:
        _remember(known, pin.patches)
    pins = {pin.id: pin for pin in lock.pins}
    # Pins whose trees are here first: what they lock serves the others.
    for pin in sorted(lock.pins, key=lambda pin: not (root / "third_party" / "msa" / pin.id).is_dir()):
        patches = read_pin_series(copy, pin)
        if [(p.name, p.sha256) for p in patches] != [(k.file, k.sha256) for k in pin.patches]:
            pins[pin.id] = replace(pin, patches=_lock_pin(root, pin, patches, known))
            _remember(known, pins[pin.id].patches)
    return replace(lock, pins=tuple(pins[pin.id] for pin in lock.pins))


def _remember(known: dict[tuple[str, str, str | None], str | None], locks: Iterable[PatchLock]) -> None:
    for patch in locks:
        known.update({(patch.sha256, touch.path, touch.pre): touch.post for touch in patch.touches})


def _lock_pin(
    root: Path, pin: Pin, patches: Sequence[Patch], known: Mapping[tuple[str, str, str | None], str | None]
) -> tuple[PatchLock, ...]:
    third_party = root / "third_party"
    manifest = read_manifest(pin, third_party)
    folder = third_party / "msa" / pin.id
    if not folder.is_dir():
        return _transfer_locks(pin, manifest, patches, known)
    try:
        return compute_locks(read_content(folder, manifest).files, patches)
    except PatchError as error:
        raise PatchError(
            f"on pin {pin.id} a patch does not apply any more: {error.what}",
            where=error.where,
            expected=error.expected,
            got=error.got,
            next_command="the same command for one pin alone, with --pin ID --only; then for the other",
        ) from error


def _transfer_locks(
    pin: Pin, manifest: Manifest, patches: Sequence[Patch], known: Mapping[tuple[str, str, str | None], str | None]
) -> tuple[PatchLock, ...]:
    """Locks without the tree, from what the same patches do to the same bytes elsewhere."""
    digests: dict[str, str | None] = {entry.path: entry.sha256 for entry in manifest}
    locks = []
    for patch in patches:
        touches = []
        for path in sorted(file.path for file in patch.files):
            pre = digests.get(path)
            if (patch.sha256, path, pre) not in known:
                raise PatchError(
                    f"pin {pin.id} cannot be locked: its tree is not here, and no other pin has the same file",
                    where=f"{patch.name}: {path}",
                    expected=f"third_party/msa/{pin.id}/",
                    next_command=f"nox -s vendor -- --pin {pin.id}; or the same command with --pin ID --only",
                )
            digests[path] = known[patch.sha256, path, pre]
            touches.append(Touch(path, pre, digests[path]))
        locks.append(PatchLock(patch.name, patch.sha256, tuple(touches)))
    return tuple(locks)
