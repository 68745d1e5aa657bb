"""Deletes synchronisation from a kernel and decides what became of it: caught, shown redundant, or missed.

A deletion is *caught* if, under one of the schedules, the run deadlocks, faults, gives a wrong result or has a finding;
the whole kernel has none. So is one after which registers of ``tcgen05.ld`` are read before ``tcgen05.wait::ld``
(:mod:`ptx_emulator.early_uses`), where the whole kernel waits. What survives alone is then deleted together with other
survivors:

- **unused**: an mbarrier.init whose barrier no executed instruction used. A use without initialisation is a fault, so
  that surviving its deletion is the proof.
- **redundant**: in a set whose joint deletion leaves the kernel right and clean under every schedule and several more
  seeds. Without all of them, every conflicting pair of accesses that ran is still ordered.
- **covered**: not in the set, because deleting it together with a few of the set (the smallest such group found) is
  caught: each does the other's work. Keep one of them.

All of this is in the happens-before model, on the paths that ran. So that blindness of the model does not count as
redundancy, a member of the set is *missed* unless a deletion of its kind is caught somewhere: in the same kernel, or in
a small kernel that needs it (:mod:`ptx_emulator.controls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ptx_emulator.bindings import CHECKS
from ptx_emulator.early_uses import find_early_uses
from ptx_emulator.launch import Kernel, Options
from ptx_emulator.program import KIND_NUMBERS, ROLES, Program
from ptx_emulator.subjects import Outcome, Recorder, Subject, change_kernel

NAMES = {
    "MB_INIT": "mbarrier.init",
    "MB_WAIT": "mbarrier wait",
    "MB_ARRIVE": "mbarrier.arrive",
    "MB_ARRIVE_TX": "mbarrier.arrive.expect_tx",
    "MB_EXPECT_TX": "mbarrier.expect_tx",
    "BAR": "bar.sync, bar.arrive",
    "SYNCWARP": "bar.warp.sync",
    "FENCE_PROXY": "fence.proxy.async",
    "FENCE_MBAR_INIT": "fence.mbarrier_init",
    "T5_WAIT": "tcgen05.wait",
    "T5_COMMIT": "tcgen05.commit",
    "T5_FENCE": "tcgen05.fence",
    "BULK_COMMIT": "cp.async.bulk.commit_group",
    "BULK_WAIT": "cp.async.bulk.wait_group",
    "CP_ARRIVE": "cp.async.mbarrier.arrive",
    "CP_COMMIT": "cp.async.commit_group",
    "CP_WAIT": "cp.async.wait_group",
    "WGMMA_FENCE": "wgmma.fence",
    "WGMMA_COMMIT": "wgmma.commit_group",
    "WGMMA_WAIT": "wgmma.wait_group",
}
"""Kinds that are deleted, and how the table calls them."""

SIGNALS = (
    "MB_ARRIVE", "MB_ARRIVE_TX", "MB_EXPECT_TX", "CP_ARRIVE", "TMA_LOAD", "TMA_STORE", "BULK_LOAD", "BULK_STORE",
    "T5_MMA", "T5_CP", "T5_COMMIT",
)  # fmt: skip
Schedule = tuple[str, int]
SCHEDULES: tuple[Schedule, ...] = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))
EXTRA_SCHEDULES: tuple[Schedule, ...] = tuple(("random", seed) for seed in range(3, 9))
"""More seeds for the joint set: an attempt to refute it."""
EARLY_USE = "tcgen05-ld-used-before-wait"
CAUGHT = ("functional", "finding")
SHOWN = ("unused", "redundant", "covered")


@dataclass(frozen=True, slots=True)
class Site:
    """One synchronisation instruction that ran."""

    pc: int
    kind: str
    line: int
    text: str
    source: str

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"line {self.line}: {self.text[:70]}{source}"


@dataclass(slots=True)
class Verdict:
    """What became of the deletion of one site.

    Attributes:
        site: what was deleted.
        name: ``functional``, ``finding``, ``unused``, ``redundant``, ``covered`` or ``missed``.
        evidence: what was seen, in words.
        signs: kinds of findings and faults under all schedules, ``wrong: name`` for results.
    """

    site: Site
    name: str
    evidence: str = ""
    signs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Trial:
    """One deletion of one or more sites, run until it was noticed."""

    functional: frozenset[str]
    strict: frozenset[str]
    first: str = ""
    """The first sign, with its schedule."""

    @property
    def caught(self) -> bool:
        """Whether anything was noticed."""
        return bool(self.functional or self.strict)


class NotCleanError(Exception):
    """The whole kernel is not right, or not without findings, to begin with."""


def delete(pcs: Iterable[int]) -> Callable[[Program], None]:
    """A change that makes instructions do nothing; a wait on an mbarrier always succeeds."""

    def change(program: Program) -> None:
        for pc in pcs:
            kind, guard, negated, _, _, _, _, at, _ = program.instructions[pc]
            if kind == KIND_NUMBERS["MB_WAIT"]:
                target = len(program.operands)
                program.operands += [program.operands[at + 1], -1]
                program.roles += [ROLES["define_predicate"], ROLES["none"]]
                program.instructions[pc] = (KIND_NUMBERS["PRED_MOV"], guard, negated, 0, 0, 0, 2, target, 1)
            else:
                program.instructions[pc] = (KIND_NUMBERS["NOP"], -1, 0, 0, 0, 0, 0, at, 0)

    return change


@dataclass(slots=True)
class Session:
    """Mutations of one kernel of one subject."""

    subject: Subject
    schedules: Sequence[Schedule] = SCHEDULES
    extra_schedules: Sequence[Schedule] = EXTRA_SCHEDULES
    checks: frozenset[str] = frozenset()
    """If empty all that the whole kernel passes: those that are usually on, and what others it is clean under."""
    runs: int = 0
    whole: Kernel = field(init=False)
    sites: list[Site] = field(init=False)
    signals: bool = field(init=False)
    """Whether anything that ran may be done by one lane on behalf of its warp."""
    max_instructions: int = field(init=False)

    def __post_init__(self) -> None:
        """Run the whole kernel under every schedule; find the sites that execute.

        Raises:
            NotCleanError: it is wrong or has findings.
        """
        self.whole = self.subject.kernel
        recorder = Recorder(self.whole)
        self.max_instructions = 1 << 33
        if not self.checks:
            self.checks = self._find_checks()
        longest = 0
        for schedule in (*self.schedules, *self.extra_schedules):
            outcome = self._run(recorder, schedule)
            if outcome.wrong or outcome.report.findings:
                found = "\n".join(map(str, outcome.report.findings))
                raise NotCleanError(f"before any deletion, {schedule}: wrong {sorted(outcome.wrong)}\n{found}")
            longest = max(longest, *(launch.instructions for launch in outcome.report.launches))
        # A mutant that spins is stopped early.
        self.max_instructions = 4 * longest + 100_000
        executed = [pc for pc, count in enumerate(recorder.counts) if count]
        self.signals = any(self._is_signal(pc) for pc in executed)
        kinds = {KIND_NUMBERS[kind]: kind for kind in NAMES}
        placed = ((pc, self.whole.program.instructions[pc][0]) for pc in executed)
        self.sites = [self._site(pc, kinds[number]) for pc, number in placed if number in kinds]

    def _is_signal(self, pc: int) -> bool:
        text = self.whole.program.statement(pc).text
        return self.whole.program.kind(pc) in SIGNALS or ".release" in text or ".acq_rel" in text

    def _find_checks(self) -> frozenset[str]:
        chosen = Options().checks
        for check in sorted(CHECKS.keys() - chosen):
            self.checks = chosen | {check}
            if not self._run(self.whole, self.schedules[0]).report.findings:
                chosen = self.checks
        return chosen

    def _site(self, pc: int, kind: str) -> Site:
        statement = self.whole.program.statement(pc)
        source = (statement.source or "").rpartition("/")[2]
        return Site(pc, kind, statement.line, statement.text, source)

    def _run(self, kernel: Kernel, schedule: Schedule) -> Outcome:
        self.runs += 1
        self.subject.kernels[self.subject.entry] = kernel
        try:
            return self.subject.run(Options(*schedule, self.checks, max_instructions=self.max_instructions))
        finally:
            self.subject.kernels[self.subject.entry] = self.whole

    def try_deletion(self, sites: Iterable[Site], schedules: Sequence[Schedule] = (), stop: bool = True) -> Trial:
        """Delete sites together and run the schedules.

        Args:
            sites: what to delete.
            schedules: the session's by default.
            stop: at the first sign of any kind; else at the first functional one.
        """
        kernel = change_kernel(self.whole, delete(site.pc for site in sites))
        functional: set[str] = set()
        early = sorted(find_early_uses(kernel.program) - find_early_uses(self.whole.program))
        strict = {EARLY_USE} if early else set()
        first = f"{EARLY_USE} (PTX line {self.whole.program.statement(early[0][1]).line})" if early else ""
        if early and stop:
            return Trial(frozenset(), frozenset(strict), first)
        for schedule in schedules or self.schedules:
            outcome = self._run(kernel, schedule)
            fatal = outcome.report.fatal
            functional |= {fatal.kind} if fatal else {f"wrong {name}" for name in outcome.wrong}
            strict |= {f.kind for f in outcome.report.findings if not f.fatal}
            if not first and (functional or strict):
                first = f"{_describe(outcome)} under {schedule[0]} {schedule[1]}"
            if functional or (stop and strict):
                break
        return Trial(frozenset(functional), frozenset(strict), first)


def _describe(outcome: Outcome) -> str:
    finding = outcome.report.fatal or next(iter(outcome.report.findings), None)
    if finding is None:
        return f"wrong {', '.join(sorted(outcome.wrong))}"
    places = [str(place.line) for place in (finding.other_place, finding.place) if place]
    return finding.kind + (f" (PTX lines {', '.join(places)})" if places else "")
