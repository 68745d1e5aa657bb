"""Judges the deletions of one kernel: singles first, then the survivors together (see :mod:`ptx_emulator.mutation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ptx_emulator.controls import find_blindness
from ptx_emulator.mutation import CAUGHT, Schedule, Session, Site, Trial, Verdict

Log = Callable[[str], None]


def judge(session: Session, limit: int | None = None, log: Log = lambda _text: None) -> list[Verdict]:
    """The verdict on every site, in the order of the program.

    Args:
        session: of the kernel.
        limit: sites to look at; all by default.
        log: is told of the progress.
    """
    verdicts = [judge_alone(session, site, log) for site in session.sites[:limit]]
    survivors = [verdict.site for verdict in verdicts if verdict.name == "survived"]
    joined, covered = join_survivors(session, survivors, log)
    blind: dict[str, str] = {}
    for verdict in verdicts:
        if verdict.site in covered:
            others, trial = covered[verdict.site]
            lines = ", ".join(str(other.line) for other in others)
            verdict.name, verdict.evidence = "covered", f"by line {lines}: without both, {trial.first}"
        elif verdict.site in joined:
            kind = verdict.site.kind
            if kind not in blind:
                seen = any(v.site.kind == kind and v.name in CAUGHT for v in verdicts)
                blind[kind] = find_blindness(kind, seen)
            verdict.name, verdict.evidence = judge_joined(len(joined), blind[kind])
    return verdicts


def judge_alone(session: Session, site: Site, log: Log) -> Verdict:
    """Delete one site: ``functional``, ``finding``, ``unused`` or, for now, ``survived``."""
    trial = session.try_deletion([site], stop=False)
    name = "functional" if trial.functional else "finding" if trial.strict else "survived"
    evidence = trial.first
    if name == "survived" and site.kind == "MB_INIT":
        name, evidence = "unused", "no instruction that ran uses the barrier: a use would have been a fault"
    log(f"{name:11} {site}")
    return Verdict(site, name, evidence, trial.functional | trial.strict)


def judge_joined(size: int, blindness: str) -> tuple[str, str]:
    """Verdict and evidence for a member of the joint set."""
    if blindness:
        return "missed", f"deleted in a joint set of {size} unnoticed, but {blindness}"
    return "redundant", f"joint set of {size}"


Covered = dict[Site, tuple[list[Site], Trial]]


def join_survivors(session: Session, survivors: Sequence[Site], log: Log) -> tuple[list[Site], Covered]:
    """Grow a set of survivors whose joint deletion goes unnoticed; for each that does not fit, what covers for it.

    The set is then run with the session's extra seeds. A seed that refutes it is added to the schedules, and the set
    is grown anew.
    """
    schedules = list(session.schedules)
    while True:
        joined, covered = _grow(session, survivors, schedules, log)
        refuting = next((s for s in session.extra_schedules if session.try_deletion(joined, [s]).caught), None)
        if not joined or refuting is None:
            return joined, covered
        log(f"the joint set of {len(joined)} is refuted by {refuting}")
        schedules.insert(0, refuting)


def _grow(
    session: Session, survivors: Sequence[Site], schedules: Sequence[Schedule], log: Log
) -> tuple[list[Site], Covered]:
    joined: list[Site] = []
    covered: Covered = {}
    for site in survivors:
        trial = session.try_deletion([*joined, site], schedules)
        if not trial.caught:
            joined.append(site)
            continue
        covered[site] = find_cover(session, site, joined, trial, schedules)
        log(f"covered     {site} by {', '.join(str(other.line) for other in covered[site][0])}")
    return joined, covered


def find_cover(
    session: Session, site: Site, joined: Sequence[Site], trial: Trial, schedules: Sequence[Schedule]
) -> tuple[list[Site], Trial]:
    """A smallest group (none of its members can be left out) whose deletion together with ``site`` is caught."""
    group = list(joined)
    for other in joined:
        smaller = [member for member in group if member != other]
        attempt = session.try_deletion([*smaller, site], schedules)
        if attempt.caught:
            group, trial = smaller, attempt
    return group, trial
