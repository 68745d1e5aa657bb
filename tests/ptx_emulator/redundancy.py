"""Judges the deletions of one kernel: singles first, then the survivors together (see :mod:`ptx_emulator.mutation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ptx_emulator import sentry
from ptx_emulator.controls import CONTROLS, Control, find_blindness
from ptx_emulator.controls import subject as make_control
from ptx_emulator.mutation import CAUGHT, Schedule, Session, Site, Trial, Verdict
from ptx_emulator.subjects import Subject

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
    for verdict in verdicts:
        if verdict.site in covered:
            others, trial = covered[verdict.site]
            lines = ", ".join(str(other.line) for other in others)
            verdict.name, verdict.evidence = "covered", f"by line {lines}: without both, {trial.first}"
    judge_joined(session, [v for v in verdicts if v.site in joined], verdicts, log)
    return verdicts


def judge_joined(session: Session, joined: Sequence[Verdict], verdicts: Sequence[Verdict], log: Log) -> None:
    """Decide on the members of the joint set: redundant where the model sees what they order, else as SentryWard says.

    The static verifier, if it is installed, sees every thread; fences it does not see.
    """
    caught = {verdict.site.kind for verdict in verdicts if verdict.name in CAUGHT}
    blindness = {v.site.kind: find_blindness(session, v.site.kind, v.site.kind in caught) for v in joined}
    unseen = [verdict.site for verdict in joined if blindness[verdict.site.kind]]
    opinions = consult(session.subject, unseen, log) if unseen and sentry.is_available() else {}
    for verdict in joined:
        verdict.name, verdict.evidence = "redundant", f"joint set of {len(joined)}"
        if blind := blindness[verdict.site.kind]:
            shown, opinion = opinions.get(verdict.site, (False, "no second opinion"))
            verdict.name = "redundant" if shown else "missed"
            verdict.evidence += f", but {blind}; SentryWard: {opinion}"


Opinions = dict[Site, tuple[bool, str]]


def consult(subject: Subject, sites: Sequence[Site], log: Log) -> Opinions:
    """Ask SentryWard about deletions, as many together as it accepts: whether each is shown redundant, its words."""
    if not all(_rejects(control) for control in CONTROLS if control.kind in {site.kind for site in sites}):
        return dict.fromkeys(sites, (False, "it does not reject the control either"))
    verifier = sentry.Verifier(subject)
    whole = verifier.ask()
    log(f"SentryWard, whole kernel: {whole}")
    if whole.result != "race_free":
        return {site: (False, str(whole)) for site in sites}
    opinions: Opinions = dict.fromkeys(sites, (False, "not executed in the small case"))
    open_sites = [site for site in sites if site.pc in verifier.executed]
    together = verifier.ask(open_sites)
    log(f"SentryWard, without {len(open_sites)}: {together}")
    if together.result == "race_free":
        return opinions | {site: (True, f"race_free without these {len(open_sites)}") for site in open_sites}
    accepted: list[Site] = []
    for site in open_sites:
        opinion = verifier.ask([*accepted, site])
        log(f"SentryWard, without {site}: {opinion}")
        shown = opinion.result == "race_free"
        accepted += [site] if shown else []
        opinions[site] = (shown, opinion.result if shown else str(opinion))
    return opinions


def _rejects(control: Control) -> bool:
    session = Session(make_control(control), extra_schedules=())
    verifier = sentry.Verifier(session.subject)
    sites = [site for site in session.sites if site.kind == control.kind]
    return verifier.ask().result == "race_free" and verifier.ask(sites).result in sentry.REJECTED


def judge_alone(session: Session, site: Site, log: Log) -> Verdict:
    """Delete one site: ``functional``, ``finding``, ``unused`` or, for now, ``survived``."""
    trial = session.try_deletion([site], stop=False)
    name = "functional" if trial.functional else "finding" if trial.strict else "survived"
    evidence = trial.first
    if name == "survived" and site.kind == "MB_INIT":
        name, evidence = "unused", "no instruction that ran uses the barrier: a use would have been a fault"
    log(f"{name:11} {site}")
    return Verdict(site, name, evidence, trial.functional | trial.strict)


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
