"""Go through the series: every patch gets its verdict, and the rebase comes as far as no decision is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msa_vendored.vendoring.errors import ConflictError, RebaseError
from msa_vendored.vendoring.filepatch import apply_file_patch
from msa_vendored.vendoring.rebase.content import Content
from msa_vendored.vendoring.rebase.export import header_of
from msa_vendored.vendoring.rebase.pick import CARRIED, Onto, Outcome, judge_commit, pick_patch, read_conflicts
from msa_vendored.vendoring.rebase.scratch import Scratch, Step
from msa_vendored.vendoring.rebase.state import State
from msa_vendored.vendoring.rebase.target import parse_pin
from msa_vendored.vendoring.series import Patch, PatchLock, apply_series


def make_steps(base: Content, patches: Sequence[Patch], locks: Sequence[PatchLock], pin_id: str) -> list[Step]:
    """One commit a patch; the message is the patch's header, the author its name.

    Raises:
        PatchError: lock and patches do not belong together, or a patch does not apply by the rules of the build.
    """
    apply_series(base.files, patches, locks, pin=pin_id)
    tree: dict[str, bytes | None] = dict(base.files)
    modes = dict(base.modes)
    steps = []
    for patch in patches:
        for file in patch.files:
            tree[file.path] = apply_file_patch(file, tree.get(file.path), patch.name)
            if file.is_new and file.new_mode:
                modes[file.path] = file.new_mode
        changes = {file.path: (tree[file.path], modes[file.path]) for file in patch.files}
        steps.append(Step(header_of(patch), patch.name, changes))
    return steps


def is_settled(outcome: Outcome, state: State) -> bool:
    """Whether nobody needs to decide about the patch (any more)."""
    return outcome.verdict in CARRIED or state.decisions.get(outcome.name) == "skip"


def advance(scratch: Scratch, state: State) -> tuple[State, tuple[Outcome, ...]]:
    """Move all patches that are left, as far as that goes.

    A patch that needs a decision does not hide what becomes of those after it: they are tried without it. On its own
    conflict git then stops again, so that the scratch work tree shows it.

    Returns:
        The state, and the outcomes of the patches after those that are settled; empty if the rebase is through.
    """
    found, head = [], state.head
    renames = scratch.list_renames(state.base, state.target)
    revision = parse_pin(state.pin_text).id
    scratch.check_out(head)
    for stage in state.stages[len(state.outcomes) :]:
        decision = state.decisions.get(stage.name)
        outcome = pick_patch(scratch, stage, Onto(head, renames, revision), keep=decision == "keep")
        if outcome.verdict in CARRIED and decision != "skip" and outcome.commit:
            head = outcome.commit
        else:
            outcome = replace(outcome, commit=None)
            scratch.check_out(head)
        found.append(outcome)
    settled = next((n for n, outcome in enumerate(found) if not is_settled(outcome, state)), len(found))
    commits = [outcome.commit for outcome in found[:settled] if outcome.commit]
    state = replace(state, outcomes=(*state.outcomes, *found[:settled]), head=commits[-1] if commits else state.head)
    scratch.check_out(state.head)
    if settled < len(found) and found[settled].verdict == "conflict":
        name = found[settled].name
        pick_patch(scratch, state.stages[len(state.outcomes)], Onto(state.head, renames, revision),
                   keep=state.decisions.get(name) == "keep")  # fmt: skip
        state = replace(state, stopped=name)
    return state, tuple(found[settled:])


def take_resolution(scratch: Scratch, state: State) -> tuple[State, Outcome]:
    """Take what the maintainer has made of a conflict.

    Either everything is added and git still stopped, or the maintainer has run ``git rebase --continue``.

    Returns:
        The state with the patch done, if it can be carried; and its outcome.

    Raises:
        ConflictError: something is not resolved or not added.
        RebaseError: the scratch repository has other commits than one on top of the last patch.
    """
    stage = state.stages[len(state.outcomes)]
    if scratch.is_rebasing:
        _check_resolved(scratch, stage.name)
        scratch.git("rebase", "--continue")
    commit = scratch.head()
    parents = scratch.git("rev-list", "--parents", "-n1", commit).decode().split()[1:]
    if commit != state.head and parents != [state.head]:
        raise RebaseError(
            "the scratch repository has other commits than the patch on top of those before it",
            where=str(scratch.root),
            expected=f"one commit on top of {state.head}",
            got=commit,
            next_command=f"git -C {scratch.root} reset --soft {state.head} && git -C {scratch.root} commit -C "
            f"{stage.commit}; then nox -s rebase -- --continue",
        )
    onto = Onto(state.head, scratch.list_renames(state.base, state.target), parse_pin(state.pin_text).id)
    outcome = judge_commit(scratch, stage, onto, commit, keep=state.decisions.get(stage.name) == "keep")
    if outcome.verdict not in CARRIED:
        return state, outcome
    outcome = replace(outcome, verdict="merged", details=("resolved by hand", *outcome.details))
    return replace(state, outcomes=(*state.outcomes, outcome), head=commit, stopped=None), outcome


def _check_resolved(scratch: Scratch, name: str) -> None:
    """Refuse unless everything is resolved and added, and nothing else lies about that would be lost."""
    problems = [f"{path} still has a conflict" for path in scratch.list_unmerged()]
    if not problems:
        listings = {
            "is changed but not added": ("diff", "--name-only", "-z"),
            "is new and not added": ("ls-files", "--others", "-z"),
        }
        for problem, command in listings.items():
            problems += [f"{path.decode()} {problem}" for path in scratch.git(*command).split(b"\0")[:-1]]
        changed = scratch.git("diff", "--cached", "--name-only", "--diff-filter=d", "-z").split(b"\0")[:-1]
        problems += [f"{path.decode()} has conflict markers" for path in changed if _has_markers(scratch, path)]
    if problems:
        conflicts = read_conflicts(scratch)
        raise ConflictError(
            f"the conflict of {name} is not resolved",
            where=str(scratch.root),
            expected="every file resolved and added with git add",
            got="; ".join(dict.fromkeys(problems)),
            next_command=f"git -C {scratch.root} add {conflicts[0].path if conflicts else 'FILE'}; "
            "then nox -s rebase -- --continue",
        )


def _has_markers(scratch: Scratch, path: bytes) -> bool:
    lines = scratch.git("show", f":{path.decode()}").split(b"\n")
    return any(line.startswith((b"<<<<<<< ", b"||||||| ", b">>>>>>> ")) for line in lines)
