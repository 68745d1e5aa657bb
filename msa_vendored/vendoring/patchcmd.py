"""``nox -s patch``: make, refresh, drop and list patches.

``new`` and ``refresh`` take two runs: the first lays out an edited tree to work on, a git repository outside the
checkout; the second makes the patch from what was changed in it. The lock follows, for every pin that the patch is
in; a pin to which it does not apply exactly is an error, and nothing is written then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from msa_vendored.vendoring.errors import UsageError
from msa_vendored.vendoring.headers import parse_header
from msa_vendored.vendoring.lock import Pin
from msa_vendored.vendoring.locks import hold_lock
from msa_vendored.vendoring.patch_layout import (
    Files,
    lay_out_common,
    lay_out_own,
    list_placements,
    without_patch,
    write_patches,
)
from msa_vendored.vendoring.pin_series import read_pin_series
from msa_vendored.vendoring.pipeline import Checkout, read_checkout
from msa_vendored.vendoring.rebase.advance import make_steps
from msa_vendored.vendoring.rebase.command import patch_file
from msa_vendored.vendoring.rebase.content import read_content
from msa_vendored.vendoring.rebase.export import Carried, export_patches, header_of
from msa_vendored.vendoring.rebase.pick import CARRIED, Onto, pick_patch
from msa_vendored.vendoring.rebase.scratch import Layout, Scratch, Stage
from msa_vendored.vendoring.rebase.state import SCRATCH_PREFIX, state_folder
from msa_vendored.vendoring.rebase.stops import make_stop
from msa_vendored.vendoring.rebase.workflow import cache_folder, decide_skip, refuse_during_rebase
from msa_vendored.vendoring.series import Patch, parse_patch, read_series
from msa_vendored.vendoring.udiff import make_udiff
from msa_vendored.vendoring.vendor import vendor_pin

_TODO = "TODO"


@dataclass(frozen=True, slots=True)
class Desk:
    """A scratch tree on which one patch is being edited, between two runs.

    Attributes:
        folder: holds ``tree/``, the git repository, and ``HEADER``, the text of the patch's header.
        pin: id of the pin.
        base: commit of the tree without the patch.
    """

    folder: str
    pin: str
    base: str

    @property
    def scratch(self) -> Scratch:
        """The repository."""
        return Scratch(Path(self.folder) / "tree")

    @property
    def header(self) -> Path:
        """The file of the header."""
        return Path(self.folder) / "HEADER"


def run_patch(options: argparse.Namespace) -> None:
    """Make a patch from an edited tree, refresh it, drop it, or list all: new|refresh|drop NAME, or list."""
    actions = {"new": _edit, "refresh": _edit, "drop": _drop, "list": _list}
    if (options.action == "list") != (options.name is None):
        raise UsageError(f"patch {options.action} {'takes no name' if options.name else 'needs the name of a patch'}")
    if options.name is not None:
        options.name = patch_file(options.name)
    actions[options.action](options)


def _list(options: argparse.Namespace) -> None:
    lock = read_checkout(options.root).lock
    rows = list_placements(options.root, lock)
    width = max((len(row.name) for row in rows), default=0)
    columns = {pin.id: max(len(pin.id), 6) for pin in lock.pins}
    print("  ".join([f"{'':<{width}}", *(f"{name:<{size}}" for name, size in columns.items())]))
    for row in rows:
        cells = [f"{row.pins[name]:<{size}}" for name, size in columns.items()]
        print("  ".join([f"{row.name:<{width}}", *cells, f"{row.kind:<9}", row.subject]))


def _drop(options: argparse.Namespace) -> None:
    """Without ``--pin`` for every pin that has it, with it for that pin alone; during a rebase, for its new pin."""
    root, name = options.root, options.name
    if (target := decide_skip(root, name, options.pin)) is not None:
        print(f"{target} will do without {name}; now: nox -s rebase -- --continue")
        return
    with hold_lock(state_folder(root) / ".lock", timeout_s=0, purpose="changing the patches"):
        lock = read_checkout(root, options.pin).lock
        pins = [pin for pin in lock.pins if options.pin in (None, pin.id)]
        having = [pin for pin in pins if name in {patch.name for patch in read_pin_series(root, pin)}]
        if not having:
            raise UsageError("no such patch", got=name, where=", ".join(pin.id for pin in pins))
        for path in write_patches(root, _lay_out_without(root, name, having, everywhere=options.pin is None)):
            print(f"wrote {path}" if (root / path).exists() else f"deleted {path}")


def _lay_out_without(root: Path, name: str, pins: list[Pin], *, everywhere: bool) -> Files:
    """The files when the pins do without the patch; what comes after it in the same file moves up."""
    leader = read_checkout(root)  # the default pin, which decides about the common patches
    here = [pin for pin in pins if pin.id == leader.pin.id or (root / "third_party" / "msa" / pin.id).is_dir()]
    stacks = {pin.id: _carry_without(root, pin.id, name) for pin in here}
    common = read_series(root / pins[0].series)
    files: Files = {}
    if everywhere:
        moved = {patch.name: patch for patch in stacks.get(leader.pin.id, ())}
        taken = set(leader.patches) & set(common)
        common = tuple(moved.get(p.name, p) if p in taken else p for p in common if p.name != name)
        files = lay_out_common(root, pins[0], common)
    for pin in pins:
        files |= lay_out_own(root, pin, stacks[pin.id], common) if pin.id in stacks else without_patch(root, pin, name)
    return files


def _carry_without(root: Path, pin_id: str, name: str) -> tuple[Patch, ...]:
    checkout = read_checkout(root, pin_id)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}drop-") as folder:
        scratch = Scratch(Path(folder))
        layout = _import(scratch, checkout)
        number = [patch.name for patch in checkout.patches].index(name)
        later = layout.stages[number + 1 :]
        moved = _carry(scratch, checkout, later, layout.stages[number].parent)
    return (*checkout.patches[:number], *moved)


def _import(scratch: Scratch, checkout: Checkout) -> Layout:
    """The pristine tree and one commit a patch."""
    tree = vendor_pin(checkout.pin, checkout.manifest, checkout.third_party).path
    base = read_content(tree, checkout.manifest)
    scratch.create()
    steps = make_steps(base, checkout.patches, checkout.pin.patches, checkout.pin.id)
    return scratch.import_commits(base, steps, None)


def _carry(scratch: Scratch, checkout: Checkout, stages: tuple[Stage, ...], head: str) -> tuple[Patch, ...]:
    """Rebase the patches of ``stages`` onto ``head``; one that needs a decision is an error."""
    by_name = {patch.name: patch for patch in checkout.patches}
    carried = []
    scratch.check_out(head)
    for stage in stages:
        outcome = pick_patch(scratch, stage, Onto(head, {}, checkout.pin.id), keep=False)
        if outcome.verdict not in CARRIED or outcome.commit is None:
            error = make_stop(outcome, checkout.pin.id, None)
            error.next_command = (
                f"change {stage.name} first, so that it does not depend on the other; nothing was written"
            )
            raise error
        carried.append(Carried(by_name[stage.name], head, outcome.commit))
        head = outcome.commit
    return export_patches(scratch, carried, by_name)


def _edit(options: argparse.Namespace) -> None:
    """The first run lays out the desk, the second makes the patch; ``--abort`` clears the desk."""
    with hold_lock(state_folder(options.root) / ".lock", timeout_s=0, purpose="changing the patches"):
        refuse_during_rebase(options.root)
        path = state_folder(options.root) / f"{options.name}.json"
        if not path.is_file():
            if options.abort:
                raise UsageError(f"{options.name} is not being edited", where=str(options.root))
            _open_desk(options, path)
            return
        desk = Desk(**json.loads(path.read_text(encoding="utf-8")))
        if not options.abort:
            _check_desk(options, desk)
            for written in write_patches(options.root, _lay_out_edit(options, desk)):
                print(f"wrote {written}")
        path.unlink()
        shutil.rmtree(desk.folder, ignore_errors=True)


def _open_desk(options: argparse.Namespace, path: Path) -> None:
    checkout = read_checkout(options.root, options.pin)
    names = [patch.name for patch in checkout.patches]
    if (options.name in names) != (options.action == "refresh"):
        what = "there is a patch of that name" if options.name in names else "no such patch"
        raise UsageError(what, got=options.name, where=checkout.pin.id, next_command="nox -s patch -- list")
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}edit-", dir=cache_folder(options.root)))
    scratch = Scratch(folder / "tree")
    scratch.root.mkdir()
    layout = _import(scratch, checkout)
    number = names.index(options.name) if options.name in names else len(names)
    commits = [layout.base, *(stage.commit for stage in layout.stages)]
    scratch.check_out(commits[min(number + 1, len(names))])
    scratch.git("reset", "--quiet", "--soft", commits[number])
    desk = Desk(str(folder), checkout.pin.id, commits[number])
    is_known = options.action == "refresh"
    desk.header.write_bytes(header_of(checkout.patches[number]) if is_known else _blank_header())
    path.write_text(json.dumps({"folder": desk.folder, "pin": desk.pin, "base": desk.base}), encoding="utf-8")
    print(f"edit the files below {scratch.root} (git diff HEAD there shows the patch)")
    print(f"{'look through' if is_known else 'fill in'} {desk.header}")
    print(f"then run the same command again; to give up: nox -s patch -- {options.action} {options.name} --abort")


def _blank_header() -> bytes:
    return f"""\
Description: {_TODO}: what it does, in one line of at most 72 characters
 {_TODO}: why it is needed.
Author: {_TODO}
Origin: vendor
Forwarded: no
Last-Update: {date.today().isoformat()}
Kind: build
Drop-When: {_TODO}: how to see that upstream no longer needs it
Test: tests/test_patched_msa.py::{_TODO}
Fails-With: {_TODO}: text in the output of the test without the patch

""".encode()


def _check_desk(options: argparse.Namespace, desk: Desk) -> None:
    if options.pin not in (None, desk.pin):
        raise UsageError(f"{options.name} is being edited for {desk.pin}", got=f"--pin {options.pin}")
    header = desk.header.read_bytes()
    if _TODO.encode() in header:
        raise UsageError("the header is not filled in", where=str(desk.header), next_command=f"edit {desk.header}")
    parse_header(header, str(desk.header))


def _lay_out_edit(options: argparse.Namespace, desk: Desk) -> Files:
    """The files of the checkout after the edit: the patch itself, and those after it in the series as they move."""
    checkout = read_checkout(options.root, desk.pin)
    patch, commit = _make_patch(options.name, desk)
    names = [p.name for p in checkout.patches]
    number = names.index(patch.name) if patch.name in names else len(names)
    scratch = desk.scratch
    later = _find_stages(scratch, desk, checkout, number)
    try:
        stack = (*checkout.patches[:number], patch, *_carry(scratch, checkout, later, commit))
    finally:  # the desk stays as it was edited, for another try
        scratch.check_out(commit)
        scratch.git("reset", "--quiet", "--soft", desk.base)
    common = read_series(options.root / checkout.pin.series)
    old = {p.name: p for p in common}
    was_own = number < len(names) and checkout.patches[number] != old.get(patch.name)
    if options.only or was_own:
        return lay_out_own(options.root, checkout.pin, stack, common)
    taken = {p.name for p in checkout.patches if p == old.get(p.name)} | {patch.name}
    by_name = {p.name: p for p in stack if p.name in taken}
    common = tuple(by_name.get(n, p) for n, p in {**old, patch.name: patch}.items())
    return lay_out_common(options.root, checkout.pin, common) | lay_out_own(options.root, checkout.pin, stack, common)


def _make_patch(name: str, desk: Desk) -> tuple[Patch, str]:
    """The patch from what was edited, and its commit."""
    scratch = desk.scratch
    scratch.git("add", "--all", "--force", "--", ".", ":(exclude,glob)**/__pycache__/**")
    tree = scratch.git("write-tree").decode().strip()
    commit = scratch.git("commit-tree", tree, "-p", desk.base, stdin=b"edited\n").decode().strip()
    changes = scratch.list_changes(desk.base, commit)
    if not changes:
        raise UsageError("the tree was not edited", where=str(scratch.root), expected="a change below it")
    diffs = b""
    for change in changes:
        old, new = scratch.read_file(desk.base, change.path), scratch.read_file(commit, change.path)
        diffs += make_udiff(change.path, old, new, mode=change.new_mode or change.old_mode or "")
    header = desk.header.read_bytes().rstrip(b"\n") + b"\n\n"
    return parse_patch(name, header + diffs, name), commit


def _find_stages(scratch: Scratch, desk: Desk, checkout: Checkout, number: int) -> tuple[Stage, ...]:
    """The commits of the patches after the edited one."""
    listing = scratch.git("rev-list", "--reverse", f"{desk.base}..refs/heads/series").decode().split()
    parents = [desk.base, *listing]
    stages = [Stage(patch.name, c, p) for patch, c, p in zip(checkout.patches[number:], listing, parents, strict=False)]
    return tuple(stages[1:])
