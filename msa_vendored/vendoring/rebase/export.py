"""From the rebased commits to files of the checkout: export, apply again strictly from zero, compare, then lay out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msa_vendored.vendoring.errors import PatchError, RebaseError
from msa_vendored.vendoring.filepatch import apply_file_patch
from msa_vendored.vendoring.lock import Lock, Pin
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.rebase.content import Content
from msa_vendored.vendoring.rebase.scratch import Scratch
from msa_vendored.vendoring.series import Patch, added_modes, apply_series, compute_locks, parse_patch
from msa_vendored.vendoring.udiff import make_udiff, parse_udiff


@dataclass(frozen=True, slots=True)
class Carried:
    """A patch that goes on: as it was, and the rebased commit with the commit before it."""

    patch: Patch
    parent: str
    commit: str


def export_patches(scratch: Scratch, carried: Sequence[Carried], common: Mapping[str, Patch]) -> tuple[Patch, ...]:
    """The rebased commits as patches.

    Where the common patch of that name does the same, under the same header, it is taken as it is, so that pins share
    a file whenever they can.

    Raises:
        RebaseError: a commit changes the mode of a file.
        PatchError: a commit message is no patch header, or a path cannot stand in a diff.
    """
    return tuple(_export(scratch, item, common.get(item.patch.name)) for item in carried)


def _export(scratch: Scratch, item: Carried, common: Patch | None) -> Patch:
    header = header_of(item.patch)
    message = scratch.read_message(item.commit).rstrip(b"\n")
    if message != header.rstrip(b"\n"):
        header = message + b"\n\n"  # the maintainer amended it
    name, before, after, diffs = item.patch.name, {}, {}, []
    order = {file.path: number for number, file in enumerate(item.patch.files)}
    changes = scratch.list_changes(item.parent, item.commit)
    for change in sorted(changes, key=lambda c: (order.get(c.path, len(order)), c.path)):
        path = change.path
        if change.old_mode and change.new_mode and change.old_mode != change.new_mode:
            raise RebaseError("a rebased patch changes the mode of a file", where=f"{name}: {path}",
                              expected=change.old_mode, got=change.new_mode,
                              next_command=f"git -C {scratch.root} commit --amend, with its mode put back")  # fmt: skip
        before[path], after[path] = scratch.read_file(item.parent, path), scratch.read_file(item.commit, path)
        mode = change.new_mode or change.old_mode or ""
        diffs.append(make_udiff(path, before[path], after[path], mode=mode))
    if common is not None and _does_same(common, header, before, after):
        return common
    return parse_patch(name, header + b"".join(diffs), name)


def header_of(patch: Patch) -> bytes:
    """The text above the first diff of a patch file, byte for byte."""
    return parse_udiff(patch.data, patch.name).header


def _does_same(
    common: Patch, header: bytes, before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]
) -> bool:
    if header_of(common) != header or {file.path for file in common.files} != set(after):
        return False
    try:
        return all(apply_file_patch(f, before[f.path], common.name) == after[f.path] for f in common.files)
    except PatchError:
        return False


def apply_strictly(
    scratch: Scratch, target: str, head: str, content: Content, patches: Sequence[Patch], pin: Pin
) -> Pin:
    """Apply the exported patches from zero on the new pristine tree, by the rules of the build.

    Returns:
        The pin with the locks of the patches.

    Raises:
        PatchError: a hunk is not exactly at its place.
        RebaseError: the result is not, byte for byte and mode for mode, what git has.
    """
    locks = compute_locks(content.files, patches)
    result = apply_series(content.files, patches, locks, pin=pin.id)
    changes = scratch.list_changes(target, head)
    wanted = {change.path: scratch.read_file(head, change.path) for change in changes}
    modes = {change.path: change.new_mode for change in changes if change.old_mode is None and change.new_mode}
    if result != wanted or added_modes(patches) != modes:
        differing = sorted(path for path in {*result, *wanted} if result.get(path) != wanted.get(path))
        raise RebaseError(
            "the exported patches do not give the tree that git has",
            where=str(scratch.root),
            got=", ".join(differing) or "other modes of added files",
            next_command="report this with the scratch repository; nothing was written",
        )
    return replace(pin, patches=locks)


def lay_out(
    lock: Lock, pin: Pin, content: Content, patches: Sequence[Patch], common: Sequence[Patch], own: Sequence[str]
) -> dict[str, bytes | None]:
    """The files of the checkout that change: lock, manifest, and the pin's folder below the series.

    Args:
        lock: the lock as it is.
        pin: the new pin, with its locks.
        content: its pristine tree.
        patches: its patches, in order.
        common: the patches of the common series, in order; none of their files changes.
        own: names of the files that the pin's folder has now.

    Returns:
        Bytes by path below the checkout; None for a file to delete.
    """
    shared = {patch.name: patch for patch in common}
    folder = f"{pin.series}/{pin.id}"
    files: dict[str, bytes | None] = {f"{folder}/{name}": None for name in own}
    files |= {f"{folder}/{p.name}": p.data for p in patches if shared.get(p.name) != p}
    if [patch.name for patch in patches] != list(shared):
        files[f"{folder}/series"] = format_series(pin.id, [patch.name for patch in patches])
    manifest = content.manifest.to_text().encode()
    return {**files, f"third_party/{pin.manifest}": manifest, "third_party/msa.lock.toml": dump_lock(lock).encode()}


def format_series(pin_id: str, names: Sequence[str]) -> bytes:
    """The text of a pin's own series file."""
    head = f"# The patches of {pin_id}, whose list differs from ../series; a name is looked for here, then there.\n"
    return (head + "".join(f"{name}\n" for name in names)).encode()


def put_pin(lock: Lock, pin: Pin, *, make_default: bool) -> Lock:
    """The lock with ``pin`` in the place of the pin of its id, or added at the end."""
    pins = tuple(pin if other.id == pin.id else other for other in lock.pins)
    pins = pins if pin in pins else (*pins, pin)
    return replace(lock, pins=pins, default_pin=pin.id if make_default else lock.default_pin)
