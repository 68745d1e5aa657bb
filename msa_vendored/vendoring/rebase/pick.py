"""Move one patch onto the tree that the new pin and the patches before it give, and say what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from msa_vendored.vendoring.filepatch import Hunk, compute_hunks
from msa_vendored.vendoring.rebase.anchors import find_anchors, find_misplaced
from msa_vendored.vendoring.rebase.scratch import Change, Scratch, Stage
from msa_vendored.vendoring.rebase.syntax import has_edit, is_same_syntax

Verdict = Literal["clean", "moved", "merged", "conflict", "upstreamed", "misplaced", "obsolete"]
"""``clean``: the same lines at the same place; ``moved``: the same lines elsewhere; ``merged``: other lines around or
inside; ``conflict``: git could not merge; ``upstreamed``: the new pin already says it; ``misplaced``: it ended up in
another function; ``obsolete``: a file that it changes is gone."""

CARRIED: tuple[Verdict, ...] = ("clean", "moved", "merged")
"""Verdicts with which a patch goes to the new pin without anybody's decision."""


@dataclass(frozen=True, slots=True)
class ConflictHunk:
    """One conflict: where it is in the scratch work tree, and the text of the three sides."""

    path: str
    line: int
    upstream: str
    base: str
    patch: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one patch.

    Attributes:
        name: file name of the patch.
        verdict: see :data:`Verdict`.
        details: lines that explain the verdict, one a file or hunk.
        conflicts: only with verdict ``conflict``.
        commit: the rebased commit; None if there is none.
    """

    name: str
    verdict: Verdict
    details: tuple[str, ...] = ()
    conflicts: tuple[ConflictHunk, ...] = ()
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Onto:
    """Where a patch goes: the commit below it, the names by which upstream renamed files, the revision's name."""

    head: str
    renames: Mapping[str, str]
    revision: str


def pick_patch(scratch: Scratch, stage: Stage, onto: Onto, *, keep: bool) -> Outcome:
    """Rebase one patch; on conflict git stays stopped in it.

    Args:
        scratch: the repository, its work tree at ``onto.head``.
        stage: the patch as it was for the old pin.
        onto: where it goes.
        keep: the maintainer has looked and carries it even if it seems upstreamed or misplaced.

    Raises:
        RebaseError: git failed, or the rebased commit touches files that the patch does not touch.
    """
    changes = scratch.list_changes(stage.parent, stage.commit)
    if gone := _list_gone(scratch, changes, onto):
        return Outcome(stage.name, "obsolete", tuple(f"{path} is not in {onto.revision}" for path in gone))
    if not keep and (reasons := _find_upstreamed(scratch, stage, changes, onto)):
        return Outcome(stage.name, "upstreamed", reasons)
    commit = scratch.rebase(stage, onto.head)
    if commit is None:
        conflicts = tuple(read_conflicts(scratch))
        return Outcome(stage.name, "conflict", tuple(f"{c.path}:{c.line}" for c in conflicts), conflicts)
    return judge_commit(scratch, stage, onto, commit, keep=keep)


def judge_commit(scratch: Scratch, stage: Stage, onto: Onto, commit: str, *, keep: bool) -> Outcome:
    """The verdict on a commit that git, or the maintainer after a conflict, has made of a patch."""
    paths = [change.path for change in scratch.list_changes(onto.head, commit)]
    if not paths:
        return Outcome(stage.name, "upstreamed", (f"the merge changes nothing in {onto.revision}",))
    if not keep and all(_is_formatting(scratch, onto.head, commit, path) for path in paths):
        return Outcome(stage.name, "upstreamed", (f"only formatting would differ from {onto.revision}",))
    old_paths = [change.path for change in scratch.list_changes(stage.parent, stage.commit)]
    made = find_anchors(scratch, stage.parent, stage.commit, old_paths)
    found = find_anchors(scratch, onto.head, commit, paths)
    wrong = find_misplaced(made, found, dict(onto.renames))
    if wrong and not keep:
        return Outcome(stage.name, "misplaced", tuple(item.to_line() for item in wrong), commit=commit)
    before, after = _hunks_of(scratch, stage.parent, stage.commit), _hunks_of(scratch, onto.head, commit)
    details = tuple(f"{old} is now {new}" for old, new in onto.renames.items() if old in old_paths)
    return Outcome(stage.name, _compare(before, after), details + tuple(_describe_moves(before, after)), commit=commit)


def _list_gone(scratch: Scratch, changes: list[Change], onto: Onto) -> list[str]:
    """Files that the patch modifies and that the new tree has under no name."""
    modified = [change.path for change in changes if change.old_mode and change.new_mode]
    return [p for p in modified if p not in onto.renames and scratch.read_file(onto.head, p) is None]


def _find_upstreamed(scratch: Scratch, stage: Stage, changes: list[Change], onto: Onto) -> tuple[str, ...]:
    """One reason a file why the new tree already says what the patch does there; empty unless it does everywhere."""
    reasons = []
    for change in changes:
        old_path = change.path
        path = onto.renames.get(old_path, old_path)
        before, after = scratch.read_file(stage.parent, old_path), scratch.read_file(stage.commit, old_path)
        reason = _compare_file(scratch, path, before, after, scratch.read_file(onto.head, path))
        if reason is None:
            return ()
        reasons.append(f"{path}: {reason} in {onto.revision}")
    return tuple(reasons)


def _compare_file(
    scratch: Scratch, path: str, before: bytes | None, after: bytes | None, current: bytes | None
) -> str | None:
    if after == current:
        return "the file is gone, as the patch wants," if after is None else "the post-image is already there"
    if before is None or after is None or current is None:
        return None
    merged, has_conflict = scratch.merge_file(current, before, after)
    if not has_conflict and merged == current:
        return "the merge changes nothing"
    if path.endswith(".py") and is_same_syntax(after, current):
        return "the syntax tree is already there, formatted otherwise,"
    if path.endswith(".py") and has_edit(before, after, current):
        return "each changed statement is already there, formatted or nested otherwise,"
    return None


def _is_formatting(scratch: Scratch, old: str, new: str, path: str) -> bool:
    before, after = scratch.read_file(old, path), scratch.read_file(new, path)
    return path.endswith(".py") and before is not None and after is not None and is_same_syntax(before, after)


def _hunks_of(scratch: Scratch, old: str, new: str) -> dict[str, tuple[Hunk, ...]]:
    return {
        change.path: compute_hunks(
            scratch.read_file(old, change.path) or b"", scratch.read_file(new, change.path) or b""
        )
        for change in scratch.list_changes(old, new)
    }


def _compare(before: Mapping[str, tuple[Hunk, ...]], after: Mapping[str, tuple[Hunk, ...]]) -> Verdict:
    if before == after:
        return "clean"
    return "moved" if _unplaced(before) == _unplaced(after) else "merged"


def _unplaced(hunks: Mapping[str, tuple[Hunk, ...]]) -> dict[str, list[Hunk]]:
    return {path: [replace(hunk, old_start=0, new_start=0) for hunk in found] for path, found in hunks.items()}


def _describe_moves(before: Mapping[str, tuple[Hunk, ...]], after: Mapping[str, tuple[Hunk, ...]]) -> list[str]:
    lines = []
    for path, hunks in after.items():
        old = before.get(path, ())
        if len(old) != len(hunks):
            lines.append(f"{path}: {len(old)} hunks became {len(hunks)}")
        elif moves := [f"{o.old_start} to {n.old_start}" for o, n in zip(old, hunks, strict=True) if o != n]:
            lines.append(f"{path}: line {', '.join(moves)}")
    return lines


def read_conflicts(scratch: Scratch) -> list[ConflictHunk]:
    """The conflicts in which git has stopped."""
    found = []
    for path, sides in sorted(scratch.list_unmerged().items()):
        file = scratch.root / path
        hunks = parse_conflicts(path, file.read_bytes()) if file.is_file() and not file.is_symlink() else []
        if not hunks:
            has = {"1": "the base", "2": "upstream", "3": "the patch"}
            text = f"the file is in {' and '.join(has[side] for side in sorted(sides))} only"
            hunks = [ConflictHunk(path, 1, text, "", "")]
        found += hunks
    return found


def parse_conflicts(path: str, data: bytes) -> list[ConflictHunk]:
    """The conflicts that git marked in a file, in its ``diff3`` style."""
    found: list[ConflictHunk] = []
    side, start, texts = "", 0, {"<": b"", "|": b"", "=": b""}
    for number, line in enumerate(data.split(b"\n"), 1):
        mark = line[:1].decode("latin-1") if line[:7] in (b"<<<<<<<", b"|||||||", b"=======", b">>>>>>>") else ""
        if mark == "<":
            side, start, texts = "<", number, {"<": b"", "|": b"", "=": b""}
        elif side and mark in ("|", "="):
            side = mark
        elif side and mark == ">":
            upstream, base, patch = (texts[key].decode(errors="backslashreplace") for key in ("<", "|", "="))
            found.append(ConflictHunk(path, start, upstream, base, patch))
            side = ""
        elif side:
            texts[side] += line + b"\n"
    return found
