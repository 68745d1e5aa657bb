"""A second opinion: the static verifier SentryWard on small cases, ``python -m ptx_emulator.sentry KERNEL...|all``.

SentryWard (package ``sentryward``, 0.1.1) takes PTX and one launch and proves, for every schedule and every thread,
that the kernel is well synchronised and free of races; by its own words it does not model fences. It is asked about
each kernel as its host code launches it, and about mutants of it that the emulator catches, of which it must reject
one at least: a verifier that accepts everything would agree with everybody.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ptx_emulator import subjects
from ptx_emulator.launch import Options
from ptx_emulator.mutation import NAMES, SCHEDULES, Session, Site
from ptx_emulator.sentry_input import build_input, delete_statement, replace_reductions
from ptx_emulator.subjects import Recorder, Subject

QUESTION_SECONDS = 300
"""Time for one question, if ``--seconds`` does not say otherwise; most take less than a minute."""
NO_TIME = "timeout"
"""SentryWard's result when its time is over."""
REJECTED = ("not_wellsynced", "potential_race", "invalid_lifecycle")
SEEDED_KINDS = ("MB_WAIT", "T5_COMMIT", "CP_WAIT", "BAR", "T5_WAIT", "MB_ARRIVE", "MB_ARRIVE_TX")
"""Kinds of which the first caught deletion is a seeded mutant, until one is rejected."""
UNANSWERED = 3
"""Mutants without an answer in time after which no other is asked about."""
VERIFIED, FAILED, UNSUPPORTED, NOTHING_TO_DELETE, NO_ANSWER = 0, 1, 2, 3, 4
WORDS = {
    VERIFIED: "verified, mutant rejected",
    FAILED: "FAILED",
    UNSUPPORTED: "unsupported, as registered",
    NOTHING_TO_DELETE: "verified; no deletion that the emulator catches, so no mutant",
    NO_ANSWER: "no answer in time, about the kernel or about a mutant, with no other rejected",
}
"""Exit status of one kernel's process, in words."""
NOT_STATIC, ATOMIC_ADD = "control_predicate_not_static", "atomic_add_memory_semantics_unsupported"
ALIAS = "allocation_alias_relation_unknown"
EXPECTED_UNSUPPORTED: dict[str, str] = {
    "schedule": NOT_STATIC,
    "split": NOT_STATIC,
    "backward_sm90": NOT_STATIC,
    "tasks read_items": ATOMIC_ADD,
    "tasks check_rows": NOT_STATIC,
    "tasks scan_windows": NOT_STATIC,
    "tasks write_tables": NOT_STATIC,
    "forward_sm90 BuildSegments": ATOMIC_ADD,
    "forward_sm90 ForwardMain": NOT_STATIC,
    "index_sm90 map_rows": ALIAS,
    "index_sm90 count_edges": NOT_STATIC,
    "index_sm90 scan_chunks": "dynamic_address_overlap_unresolved",
    "index_sm90 scan_rows": ALIAS,
    "index_sm90 place_edges": NOT_STATIC,
    "index_sm90 write_items": NOT_STATIC,
    "score_sm90": "unsupported_ptx_instruction, no source semantics for wgmma",
    "select_sm90": NOT_STATIC,
}
"""Kernels, with their label where a function has several, that SentryWard cannot take, and its code for the reason.

Any other that it does not take fails the session, and so does one of these that it takes: then the entry has to go.
"""


@dataclass(frozen=True, slots=True)
class Opinion:
    """SentryWard's answer.

    Attributes:
        result: ``race_free``, one of :data:`REJECTED`, ``unsupported``, ``timeout``, ...
        detail: its first diagnostic, with the PTX line if it names one.
        seconds: wall time.
    """

    result: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        if self.result == NO_TIME:
            return f"no answer in {self.seconds:.0f} s"
        return f"{self.result}{detail} ({self.seconds:.0f} s)"


def is_available() -> bool:
    """Whether SentryWard is installed here."""
    return find_spec("sentryward") is not None


def verify(ptx: str, config: dict[str, Any], limit_seconds: float = QUESTION_SECONDS) -> Opinion:
    """Ask SentryWard about one kernel and launch; needs the package."""
    with tempfile.TemporaryDirectory(prefix="sentry-") as folder:
        kernel, settings = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        kernel.write_text(ptx)
        settings.write_text(json.dumps(config))
        command = [sys.executable, "-m", "sentryward", str(kernel), "--input", str(settings)]
        started = time.perf_counter()
        done = subprocess.run([*command, "--timeout", str(limit_seconds)], capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    return Opinion(answer["result"], _first_diagnostic(answer, ptx), time.perf_counter() - started)


def _first_diagnostic(answer: dict[str, Any], ptx: str) -> str:
    for diagnostic in answer.get("diagnostics", []):
        text = f"{diagnostic.get('code')}, {diagnostic.get('message') or ''}".rstrip(", ")
        line = ((diagnostic.get("details") or {}).get("location") or {}).get("line")
        return f"{text}, line {line}: {ptx.splitlines()[line - 1].strip()}" if line else text
    return ""


class Verifier:
    """Asks about one subject: as it is, and with synchronisation deleted from the text; seconds for one question."""

    def __init__(self, subject: Subject, limit_seconds: float = QUESTION_SECONDS) -> None:
        self.limit_seconds = limit_seconds
        self.subject = replace(subject, run=subject.tiny or subject.run)
        recorder = Recorder(subject.kernel)
        subject.kernels[subject.entry] = recorder
        try:
            outcome = self.subject.run(Options())
        finally:
            subject.kernels[subject.entry] = recorder.whole
        if outcome.wrong or outcome.report.findings:
            raise AssertionError(f"not right in the emulator: {outcome.wrong} {outcome.report.findings}")
        self.config = build_input(subject.ptx, recorder.entry, recorder.launches[0], subject.verifier)
        self.executed = frozenset(pc for pc, count in enumerate(recorder.counts) if count)

    def ask(self, deleted: Iterable[Site] = ()) -> Opinion:
        """The opinion on the kernel without some of its synchronisation."""
        text = self.subject.ptx
        # From the end: lines before stay where they are.
        for site in sorted(deleted, key=lambda site: -site.pc):
            text = delete_statement(text, site.line, site.text)
        return verify(replace_reductions(text), self.config, self.limit_seconds)


def seed_mutants(verifier: Verifier) -> list[tuple[Site, str, Opinion]]:
    """Deletions that the emulator catches in the small case, with its sign and SentryWard's opinion."""
    session = Session(verifier.subject, SCHEDULES[::2], ())
    tried: list[tuple[Site, str, Opinion]] = []
    for kind in SEEDED_KINDS:
        for site in (site for site in session.sites if site.kind == kind):
            trial = session.try_deletion([site])
            if trial.caught:
                tried.append((site, trial.first, verifier.ask([site])))
                break
        results = [opinion.result for _, _, opinion in tried]
        if results and (results[-1] in REJECTED or results.count(NO_TIME) >= UNANSWERED):
            break
    return tried


def run_one(name: str, limit_seconds: float = QUESTION_SECONDS) -> int:
    """The session for one name: one of :data:`WORDS`; for several kernels failure, then what says most."""
    statuses = {run_subject(f"{name} {s.label}".rstrip(), s, limit_seconds) for s in subjects.load(name)}
    order = (FAILED, VERIFIED, NO_ANSWER, NOTHING_TO_DELETE, UNSUPPORTED)
    return next(status for status in order if status in statuses)


def run_subject(name: str, subject: Subject, limit_seconds: float) -> int:
    """The session for one kernel."""
    verifier = Verifier(subject, limit_seconds)
    opinion = verifier.ask()
    print(f"{name}: {opinion}", flush=True)
    if opinion.result == NO_TIME:
        return NO_ANSWER
    expected, unsupported = EXPECTED_UNSUPPORTED.get(name), opinion.result == "unsupported"
    if unsupported != bool(expected) or (expected and not opinion.detail.startswith(expected)):
        print(f"  expected: {f'unsupported, {expected}' if expected else 'an answer'}", flush=True)
        return FAILED
    if opinion.result != "race_free":
        return UNSUPPORTED if unsupported else FAILED
    return judge_mutants(seed_mutants(verifier))


def judge_mutants(mutants: Sequence[tuple[Site, str, Opinion]]) -> int:
    """Print the opinions on mutants of a verified kernel; its status."""
    for site, sign, answer in mutants:
        print(f"  without {NAMES[site.kind]}, {site}\n    emulator: {sign}\n    SentryWard: {answer}", flush=True)
    results = {answer.result for _, _, answer in mutants}
    if results & set(REJECTED):
        return VERIFIED
    if NO_TIME in results:
        return NO_ANSWER
    return FAILED if mutants else NOTHING_TO_DELETE


def run_several(names: Sequence[str], limit_seconds: float) -> int:
    """Each kernel in a process of its own; 0 if none fails and one at least is verified with a mutant rejected."""
    results, seconds = {}, {}
    for name in names:
        started = time.perf_counter()
        command = [sys.executable, "-m", "ptx_emulator.sentry", "--one", name, "--seconds", str(limit_seconds)]
        results[name] = subprocess.run(command, check=False).returncode
        seconds[name] = time.perf_counter() - started
    print("\n".join(f"{n}: {WORDS.get(code, WORDS[FAILED])} ({seconds[n]:.0f} s)" for n, code in results.items()))
    return 0 if VERIFIED in results.values() and set(results.values()) <= WORDS.keys() - {FAILED} else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator.sentry", description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="+", help=f"{', '.join(subjects.REGISTRY)}, module:function, or all")
    parser.add_argument("--seconds", type=float, default=QUESTION_SECONDS, help="for one question")
    parser.add_argument("--one", action="store_true", help="in this process; the status says more")
    options = parser.parse_args(arguments)
    if not is_available():
        raise SystemExit("sentryward is not installed: pip install sentryward==0.1.1")
    names = list(subjects.REGISTRY) if options.kernels == ["all"] else options.kernels
    return run_one(names[0], options.seconds) if options.one else run_several(names, options.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
