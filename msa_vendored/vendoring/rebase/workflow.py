"""The rebase as a whole: start, go on after a stop, give up."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from msa_vendored.errors import MSAVendoredError
from msa_vendored.vendoring.errors import UsageError
from msa_vendored.vendoring.locks import hold_lock
from msa_vendored.vendoring.pipeline import Checkout, read_checkout
from msa_vendored.vendoring.publication import finish_publication
from msa_vendored.vendoring.rebase.advance import advance, make_steps, take_resolution
from msa_vendored.vendoring.rebase.content import read_content
from msa_vendored.vendoring.rebase.landing import check_unchanged, prepare_files, vendor_content, write_files
from msa_vendored.vendoring.rebase.pick import CARRIED, Outcome
from msa_vendored.vendoring.rebase.scratch import Scratch
from msa_vendored.vendoring.rebase.state import (
    SCRATCH_PREFIX,
    Decision,
    State,
    load_state,
    remove_state,
    save_state,
    state_folder,
    take_fingerprint,
)
from msa_vendored.vendoring.rebase.stops import make_stop
from msa_vendored.vendoring.rebase.summary import Summary, summarise
from msa_vendored.vendoring.rebase.target import Wish, format_pin, parse_pin, resolve_target
from msa_vendored.vendoring.vendor import vendor_pin

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """Where a rebase stands after a command.

    Attributes:
        state: the state as it was last saved.
        outcomes: one a patch, in the order of the series; those after a stop are what they would be without the
            patches that need a decision.
        summary: what changed upstream.
        stop: the error that says why it stopped; None if it is through.
        written: paths of the checkout that were written; after a dry run, that would be.
    """

    state: State
    outcomes: tuple[Outcome, ...]
    summary: Summary
    stop: MSAVendoredError | None = None
    written: tuple[str, ...] = ()

    @property
    def new_pin(self) -> str:
        """Id of the pin that the patches go to."""
        return parse_pin(self.state.pin_text).id


def start_rebase(
    root: Path,
    wish: Wish,
    *,
    pin_id: str | None,
    decisions: Mapping[str, Decision],
    report: Report,
    old_source: str | None = None,
    dry_run: bool = False,
    make_default: bool = False,
    replace_patches: bool = False,
) -> Result:
    """Begin to move the patches of the pin ``pin_id`` to what ``wish`` names.

    Args:
        root: the checkout.
        wish: what to move to.
        pin_id: the pin to move from; None for the default one.
        decisions: by patch name, as far as the maintainer knows already.
        report: told in one line what is being fetched.
        old_source: where to take the old tree from, if it is not vendored yet.
        dry_run: write nothing, keep nothing.
        make_default: make the new pin the default one.
        replace_patches: the new pin may be one of the lock that has patches already, which are replaced.

    Raises:
        UsageError: a rebase is in progress, a decision names no patch, the new pin has patches already, or see
            ``resolve_target``.
        BusyError: another process is rebasing this checkout.
        MSAVendoredError: the old or the new tree could not be had; nothing is left behind then.
    """
    with _exclusive(root):
        refuse_during_rebase(root)
        checkout = read_checkout(root, pin_id)
        check_names(decisions, [patch.name for patch in checkout.patches])
        folder = _make_scratch_folder(root)
        try:
            state = _set_up(checkout, folder, wish, old_source, report)
            if not dry_run and not replace_patches:
                _refuse_replacing(checkout, parse_pin(state.pin_text).id)
            state = replace(state, decisions=dict(decisions), make_default=make_default)
            result = _go_on(root, state, dry_run=dry_run)
        except BaseException:  # also a keyboard interrupt: this is none of the stops, there is nothing to continue
            remove_state(root)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if dry_run:
            shutil.rmtree(folder, ignore_errors=True)
        return result


def _refuse_replacing(checkout: Checkout, pin_id: str) -> None:
    """A pin of the lock may have patches that were edited for it, or that no other pin has."""
    patches = [patch.file for pin in checkout.lock.pins if pin.id == pin_id for patch in pin.patches]
    if patches:
        raise UsageError(
            f"pin {pin_id} has patches already, which the rebase would replace",
            where=f"{checkout.root}: third_party/msa.lock.toml",
            got=", ".join(patches),
            next_command="the same command with --dry-run to look, or with --replace; to add one patch to the pin: "
            f"nox -s patch -- new NAME --pin {pin_id} --only",
        )


def continue_rebase(root: Path, *, decisions: Mapping[str, Decision], report: Report) -> Result:
    """Go on after a stop, with the maintainer's resolution of a conflict, or decisions.

    Raises:
        UsageError: no rebase is in progress, or a decision names no patch.
        ConflictError: the conflict is not resolved.
        RebaseError: lock or patches of the checkout, or the scratch repository, are not as the stop left them.
    """
    with _exclusive(root):
        state = load_state(root)
        check_names(decisions, [stage.name for stage in state.stages])
        state = replace(state, decisions={**state.decisions, **decisions})
        check_unchanged(root, state, parse_pin(state.pin_text).series)
        scratch = Scratch(Path(state.scratch))
        report(f"going on in {scratch.root}")
        if state.stopped is not None and state.decisions.get(state.stopped) != "skip":
            state, outcome = take_resolution(scratch, state)
            if outcome.verdict not in CARRIED:
                raise make_stop(outcome, parse_pin(state.pin_text).id, scratch.root)
        return _go_on(root, replace(state, stopped=None), dry_run=False)


def abort_rebase(root: Path) -> None:
    """Give up: delete state and scratch repository. The checkout was not touched.

    Raises:
        UsageError: no rebase is in progress.
    """
    with _exclusive(root):
        if not (state_folder(root) / "state.json").exists():
            raise UsageError("no rebase is in progress", where=str(root), next_command="nox -s rebase -- --to WHAT")
        remove_state(root)


def decide_skip(root: Path, name: str, pin_id: str | None) -> str | None:
    """Record that the new pin of the rebase in progress does without a patch.

    Returns:
        Id of the new pin; None if no rebase is in progress.

    Raises:
        UsageError: ``pin_id`` is another pin, or there is no such patch.
    """
    if not (state_folder(root) / "state.json").exists():
        return None
    with _exclusive(root):
        state = load_state(root)
        target = parse_pin(state.pin_text).id
        if pin_id not in (None, target):
            refuse_during_rebase(root)
        check_names({name: "skip"}, [stage.name for stage in state.stages])
        save_state(root, replace(state, decisions={**state.decisions, name: "skip"}))
        return target


def refuse_during_rebase(root: Path) -> None:
    """Raise UsageError if a rebase is in progress, which starts from the patches as they are."""
    if (state_folder(root) / "state.json").exists():
        raise UsageError(
            "a rebase is in progress",
            where=str(root),
            next_command="nox -s rebase -- --continue, or nox -s rebase -- --abort",
        )


def check_names(decisions: Mapping[str, Decision], names: Sequence[str]) -> None:
    """Refuse decisions about patches that there are not."""
    if unknown := [name for name in decisions if name not in names]:
        raise UsageError("no such patch", expected=", ".join(names), got=", ".join(unknown))


def _go_on(root: Path, state: State, *, dry_run: bool) -> Result:
    """Advance; at the end write the checkout, unless it is a dry run."""
    scratch = Scratch(Path(state.scratch))
    if not dry_run:
        save_state(root, state)
    state, rest = advance(scratch, state)
    pin = parse_pin(state.pin_text)
    old = read_checkout(root, state.old_pin).pin
    summary = summarise(scratch.read_tree(state.base), scratch.read_tree(state.target), old, pin)
    result = Result(state, (*state.outcomes, *rest), summary)
    if rest:
        if not dry_run:
            save_state(root, state)
        return replace(result, stop=make_stop(rest[0], pin.id, None if dry_run else scratch.root))
    files = prepare_files(root, scratch, state)
    if dry_run:
        return replace(result, written=tuple(files))
    written = write_files(root, files)
    vendor_content(root, pin.id, scratch.read_tree(state.target))
    shutil.rmtree(scratch.root, ignore_errors=True)
    return replace(result, written=written)


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """One rebase of a checkout at a time; a second process is refused at once."""
    if not (root / "third_party" / "msa.lock.toml").is_file():
        raise UsageError("not a checkout of msa_vendored", where=str(root))
    with hold_lock(state_folder(root) / ".lock", timeout_s=0, purpose="rebasing the patches"):
        finish_publication(root)
        yield


def cache_folder(root: Path) -> Path:
    """The folder of the user's cache for scratch repositories, which must not be inside the checkout."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msa_vendored"
    if cache.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            "the scratch repository would be inside the checkout",
            where=str(cache),
            expected="a cache folder outside of it: git would take its files for yours",
            next_command="unset XDG_CACHE_HOME",
        )
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _make_scratch_folder(root: Path) -> Path:
    """An empty folder; those that killed runs on the same checkout have left are deleted, since we hold its lock."""
    cache = cache_folder(root)
    prefix = f"{SCRATCH_PREFIX}{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:8]}-"
    for leftover in cache.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=cache))


def _set_up(checkout: Checkout, folder: Path, wish: Wish, old_source: str | None, report: Report) -> State:
    """Get both trees and make the scratch repository."""
    fingerprint = take_fingerprint(checkout.root, checkout.pin.series)
    home, offline = checkout.third_party, wish.offline
    old = vendor_pin(checkout.pin, checkout.manifest, home, source=old_source, offline=offline, report=report)
    base = read_content(old.path, checkout.manifest)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-download-", dir=folder.parent) as work:
        target = resolve_target(checkout.lock, checkout.pin, wish, third_party=home, work=Path(work), report=report)
    known = {pin.id for pin in checkout.lock.pins}
    pin = replace(target.pin, patches=())
    if pin.id not in known:
        pin = replace(pin, series=checkout.pin.series)
    scratch = Scratch(folder)
    scratch.create()
    steps = make_steps(base, checkout.patches, checkout.pin.patches, checkout.pin.id)
    layout = scratch.import_commits(base, steps, target.content)
    return State(
        scratch=str(folder),
        old_pin=checkout.pin.id,
        pin_text=format_pin(pin),
        base=layout.base,
        target=layout.target,
        stages=layout.stages,
        head=layout.target,
        fingerprint=fingerprint,
        notes=target.notes,
        extras=dict(target.extras),
    )
