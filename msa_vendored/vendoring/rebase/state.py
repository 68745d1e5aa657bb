"""What a rebase that has stopped remembers: ``build/rebase/state.json``, written whole by a rename."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from msa_vendored.vendoring.errors import RebaseError, UsageError
from msa_vendored.vendoring.rebase.pick import ConflictHunk, Outcome
from msa_vendored.vendoring.rebase.scratch import Stage

Decision = Literal["skip", "keep"]
"""``skip``: the new pin does without the patch; ``keep``: carried although it seems upstreamed or misplaced."""

SCHEMA = 1

SCRATCH_PREFIX = "msa-vendored-rebase-"
"""Only folders of such a name are ever deleted, so that a state file that was tampered with can do no harm."""


@dataclass(frozen=True, slots=True)
class State:
    """A rebase between two commands.

    Attributes:
        scratch: folder of the scratch repository.
        old_pin: id of the pin that the patches are moved from.
        pin_text: the new pin, as the text of a lock file.
        base: commit of the old pristine tree.
        target: commit of the new pristine tree.
        stages: the patches as they were, in order.
        outcomes: what became of the patches that are done, in order; the next is ``stages[len(outcomes)]``.
        head: the commit on which the next patch goes.
        decisions: the maintainer's, by patch name.
        stopped: name of the patch in whose conflict git has stopped; None if it has not.
        fingerprint: digest of lock and patches at the start, which must not change meanwhile.
        notes: where the tested versions of the new pin come from.
        extras: extras of distributions that the new pin asks for.
        make_default: make the new pin the default one.
    """

    scratch: str
    old_pin: str
    pin_text: str
    base: str
    target: str
    stages: tuple[Stage, ...]
    head: str
    fingerprint: str
    outcomes: tuple[Outcome, ...] = ()
    decisions: dict[str, Decision] = field(default_factory=dict)
    stopped: str | None = None
    notes: tuple[str, ...] = ()
    extras: dict[str, tuple[str, ...]] = field(default_factory=dict)
    make_default: bool = False


def state_folder(root: Path) -> Path:
    """Where the checkout keeps the state; made if need be."""
    folder = root / "build" / "rebase"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_state(root: Path, state: State) -> None:
    """Write the state; a kill leaves the one before."""
    path = state_folder(root) / "state.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"schema": SCHEMA, **asdict(state)}, indent=1), encoding="utf-8")
    partial.replace(path)


def load_state(root: Path) -> State:
    """The state of the rebase in progress.

    Raises:
        UsageError: there is none.
        RebaseError: it cannot be read, or its scratch repository is gone.
    """
    path = state_folder(root) / "state.json"
    if not path.is_file():
        raise UsageError("no rebase is in progress", where=str(root), next_command="nox -s rebase -- --to WHAT")
    try:
        state = _parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RebaseError(
            "the state of the rebase cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            next_command="nox -s rebase -- --abort",
        ) from error
    if not (Path(state.scratch) / ".git").is_dir():
        raise RebaseError("the scratch repository is gone", where=state.scratch,
                          next_command="nox -s rebase -- --abort")  # fmt: skip
    return state


def _parse(data: dict[str, Any]) -> State:
    if data.pop("schema") != SCHEMA:
        raise ValueError("written by another version of this tool")
    data["stages"] = tuple(Stage(**stage) for stage in data["stages"])
    data["outcomes"] = tuple(_parse_outcome(item) for item in data["outcomes"])
    data["notes"] = tuple(data["notes"])
    data["extras"] = {name: tuple(extras) for name, extras in data["extras"].items()}
    return State(**data)


def _parse_outcome(item: dict[str, Any]) -> Outcome:
    item["conflicts"] = tuple(ConflictHunk(**hunk) for hunk in item["conflicts"])
    item["details"] = tuple(item["details"])
    return Outcome(**item)


def remove_state(root: Path) -> None:
    """Forget the rebase and delete its scratch repository, whatever condition they are in."""
    path = state_folder(root) / "state.json"
    try:
        scratch = Path(json.loads(path.read_text(encoding="utf-8"))["scratch"])
    except (OSError, ValueError, KeyError, TypeError):
        scratch = None
    path.unlink(missing_ok=True)
    if scratch is not None and scratch.name.startswith(SCRATCH_PREFIX):
        shutil.rmtree(scratch, ignore_errors=True)


def take_fingerprint(root: Path, series: str) -> str:
    """Digest of the lock and of every file of the patches: what a rebase starts from and will write."""
    digest = hashlib.sha256()
    files = sorted(path for path in (root / series).rglob("*") if path.is_file())
    for path in (root / "third_party" / "msa.lock.toml", *files):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
