"""The errors with which a rebase stops: one kind a verdict, each with its exit code and the commands to go on."""

from __future__ import annotations

from pathlib import Path

from msa_vendored.errors import MSAVendoredError
from msa_vendored.vendoring.errors import ConflictError, MisplacedError, ObsoleteError, UpstreamedError
from msa_vendored.vendoring.rebase.pick import ConflictHunk, Outcome

_MAX_SIDE_LINES = 12
"""Lines of each side of a conflict that are printed; the work tree has them all."""


def make_stop(outcome: Outcome, revision: str, scratch: Path | None) -> MSAVendoredError:
    """The error for a patch that needs a decision.

    Args:
        outcome: what became of it.
        revision: id of the new pin.
        scratch: the scratch work tree, where a conflict waits; None after a dry run, which keeps none.
    """
    name = outcome.name
    go_on = "nox -s rebase -- --continue" if scratch else "the same command without --dry-run"
    skip = f"{go_on} --skip {name}" if scratch else f"{go_on} and with --skip {name}"
    keep = f"{go_on} --keep {name}" if scratch else f"{go_on} and with --keep {name}"
    details = "\n    ".join(["", *outcome.details])
    if outcome.verdict == "conflict":
        return _make_conflict(outcome, scratch, go_on, skip)
    if outcome.verdict == "upstreamed":
        return UpstreamedError(
            f"{name} seems to be upstream in {revision}",
            got=details,
            next_command=f"nox -s patch -- drop {name.removesuffix('.patch')}; then {go_on}"
            f"\n            (or, to carry it all the same: {keep})"
            if scratch
            else f"{skip}, or --keep {name} to carry it all the same",
        )
    if outcome.verdict == "misplaced":
        return MisplacedError(
            f"{name} ended up in another function than it was made for",
            got=details,
            next_command=f"look at it, then {keep} if that is right, or {skip}",
        )
    return ObsoleteError(
        f"{name} changes a file that is gone",
        got=details,
        next_command=f"{skip}; or, if its code lives elsewhere now: nox -s patch -- new, for the new pin",
    )


def _make_conflict(outcome: Outcome, scratch: Path | None, go_on: str, skip: str) -> ConflictError:
    paths = list(dict.fromkeys(conflict.path for conflict in outcome.conflicts))
    steps = f"edit {', '.join(paths)} in {scratch}; git -C {scratch} add {' '.join(paths)}; " if scratch else ""
    return ConflictError(
        f"{outcome.name}: upstream changed the lines that the patch changes",
        where=", ".join(f"{conflict.path}:{conflict.line}" for conflict in outcome.conflicts),
        got="".join(format_conflict(conflict) for conflict in outcome.conflicts),
        next_command=f"{steps}{go_on}\n            (or, to do without the patch: {skip}; "
        "to give up: nox -s rebase -- --abort)",
    )


def format_conflict(conflict: ConflictHunk) -> str:
    """Both sides of a conflict, for people."""
    rows = [f"\n    {conflict.path}:{conflict.line}"]
    for side, text in (("upstream", conflict.upstream), ("patch", conflict.patch)):
        lines = text.splitlines()
        rows += [f"      {side:<8} | {line}" for line in lines[:_MAX_SIDE_LINES]]
        if len(lines) > _MAX_SIDE_LINES:
            rows.append(f"      {side:<8} | and {len(lines) - _MAX_SIDE_LINES} more lines")
        if not lines:
            rows.append(f"      {side:<8} | (nothing)")
    return "\n".join(rows)
