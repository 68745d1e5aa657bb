"""The mutation session judges itself: variants of the small GEMM whose every deletion has a known verdict."""

from __future__ import annotations

import pytest
from ptx_emulator import Options, mutate, redundancy, sentry
from ptx_emulator.controls import CONTROLS, Control, find_blindness, is_noticed
from ptx_emulator.gemm import BODY, TMEM_AT, subject
from ptx_emulator.mutation import CAUGHT, NAMES, NotCleanError, Schedule, Session, Site, Trial, Verdict

CHECKED = Options().checks
SCHEDULES: tuple[Schedule, ...] = (("eager", 0), ("random", 1))
FENCE = "fence.proxy.async.shared::cta;"
SPARE = f"mbarrier.init.shared.b64 [%r3+{TMEM_AT + 8}], 1"
PAIR = BODY.replace("bar.sync 1;", "bar.sync 1; bar.sync 2;")
UNUSED = BODY.replace("fence.mbarrier_init", f"{SPARE}; fence.mbarrier_init")
IDLE_FENCE = BODY.replace("EPILOGUE:", f"EPILOGUE: {FENCE}")
WAIT = "tcgen05.wait::ld.sync.aligned;"
LATE_WAIT = BODY.replace("setp.lt.u32 %p5, %r24", f"{WAIT} setp.lt.u32 %p5, %r24")
EXTRA_WAIT = BODY.replace(
    "shl.b32 %r22", "AGAIN: mbarrier.try_wait.parity.shared.b64 %p9, [%r16], 0; @!%p9 bra AGAIN; shl.b32 %r22"
)


def judge(body: str) -> dict[str, Verdict]:
    """Verdicts on a variant of two blocks of K, by the text of the instruction."""
    session = Session(subject(body, 3), SCHEDULES, (("random", 3),))
    return {f"{v.site.line}: {v.site.text}": v for v in redundancy.judge(session)}


def find(verdicts: dict[str, Verdict], part: str) -> list[Verdict]:
    return [verdict for text, verdict in verdicts.items() if part in text]


@pytest.fixture(autouse=True)
def no_second_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the emulator's own verdicts, wherever they run."""
    monkeypatch.setattr(sentry, "is_available", lambda: False)


def test_every_signal_of_the_gemm_is_caught_but_the_one_that_orders_nothing() -> None:
    """A deletion that is not applied, or applied to the wrong place, would survive or take the rest with it."""
    verdicts = judge(BODY)
    assert len(verdicts) == 16
    others = {text.partition(": ")[2]: verdict.name for text, verdict in verdicts.items() if verdict.name not in CAUGHT}
    assert others == {"bar.warp.sync -1": "redundant"}
    assert find(verdicts, "wait::ld")[0].name == "finding"
    assert "deadlock" in find(verdicts, "tcgen05.commit")[0].signs


def test_two_barriers_that_do_the_same_cover_for_each_other() -> None:
    """Each survives alone. Called redundant both, somebody would delete both."""
    verdicts = judge(PAIR)
    (first,), (second,) = find(verdicts, "bar.sync 1"), find(verdicts, "bar.sync 2")
    assert second.name == "covered"
    assert f"by line {first.site.line}: without both, tmem-race" in second.evidence
    assert first.name not in CAUGHT


def test_a_barrier_that_nothing_uses_is_proven_unused() -> None:
    """An mbarrier.init survives only if no instruction uses the barrier."""
    verdicts = find(judge(UNUSED), SPARE)
    assert [verdict.name for verdict in verdicts] == ["unused"]


@pytest.mark.parametrize(("body", "part", "name"), [(IDLE_FENCE, "fence.proxy", "redundant"), (EXTRA_WAIT, "%p9", "")])
def test_what_nothing_needs_is_shown_redundant(body: str, part: str, name: str) -> None:
    """A fence with no store before it; a second wait for the same phase, of which one has to stay."""
    found = find(judge(body), part)
    if name:
        assert [verdict.name for verdict in found] == [name]
        assert "joint set of 2" in found[0].evidence
    else:
        assert sorted(v.name for v in found[-2:]) == ["covered", "redundant"]


def test_a_wait_before_the_use_of_loaded_registers_is_not_redundant() -> None:
    """A second wait orders the memory; the first is what makes the registers valid where they are stored."""
    first, second = find(judge(LATE_WAIT), "tcgen05.wait::ld")
    assert first.name == "finding"
    assert first.signs == {"tcgen05-ld-used-before-wait"}
    assert second.name == "redundant"


def test_what_the_model_cannot_see_is_missed_not_redundant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check for proxy fences every fence survives; blindness must not count as redundancy."""
    monkeypatch.setattr(
        redundancy, "find_blindness", lambda _session, kind, *_a: "blind" if kind == "FENCE_PROXY" else ""
    )
    (verdict,) = find(judge(IDLE_FENCE), "fence.proxy")
    assert verdict.name == "missed"
    assert "blind" in verdict.evidence


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: f"{c.kind}, {c.facet}")
def test_controls_are_noticed(control: Control) -> None:
    """A control that the emulator no longer notices: survivors of its kind would turn from redundant to missed."""
    assert is_noticed(control, CHECKED)


def test_a_kind_without_control_is_blind_unless_seen_in_the_kernel() -> None:
    """No evidence at all that the model sees a kind."""
    session = Session(subject(BODY, 3), SCHEDULES[:1], ())
    assert session.signals
    assert find_blindness(session, "T5_WAIT", seen=False)
    assert not find_blindness(session, "T5_WAIT", seen=True)
    assert not find_blindness(session, "SYNCWARP", seen=False)


def test_second_opinion_decides_on_what_the_model_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that rejects must leave the deletion missed, one that accepts must be quoted."""
    monkeypatch.setattr(redundancy, "find_blindness", lambda _session, _kind, *_a: "blind")
    for shown in (True, False):
        monkeypatch.setattr(sentry, "is_available", lambda: True)
        monkeypatch.setattr(
            redundancy, "consult", lambda _s, sites, _l, ok=shown: dict.fromkeys(sites, (ok, "its word"))
        )
        (verdict,) = find(judge(BODY), "bar.warp.sync")
        assert verdict.name == ("redundant" if shown else "missed")
        assert "its word" in verdict.evidence


def test_a_refuted_joint_set_is_grown_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that a further seed refutes may not stand; the seed joins the schedules."""
    session = Session(subject(PAIR, 3), (("eager", 0),), (("random", 3),))
    pair = [site for site in session.sites if site.text in ("bar.sync 1", "bar.sync 2")]
    real = Session.try_deletion

    def blind_when_eager(self: Session, sites: list[Site], schedules: list[Schedule], stop: bool = True) -> Trial:
        seeing = [schedule for schedule in schedules if schedule[0] == "random"]
        return real(self, sites, seeing, stop) if seeing else Trial(frozenset(), frozenset())

    monkeypatch.setattr(Session, "try_deletion", blind_when_eager)
    told: list[str] = []
    joined, covered = redundancy.join_survivors(session, pair, told.append)
    assert any("the joint set of 2 is refuted by ('random', 3)" in text for text in told)
    assert [site.text for site in joined] == ["bar.sync 1"]
    assert [site.text for site in covered] == ["bar.sync 2"]


def test_a_kernel_that_is_not_clean_is_refused() -> None:
    """Mutants of a kernel that is wrong to begin with are all caught: a score of 100 % that says nothing."""
    with pytest.raises(NotCleanError, match="tmem-race"):
        Session(subject(BODY.replace("bar.sync 1;", ""), 3), SCHEDULES, ())


def test_score_counts_what_is_caught_or_shown_and_decides_the_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit status that is always 0, or a table that hides a survivor."""
    site = Site(0, "BAR", 7, "bar.sync 0", "kernel.py:3")

    def verdicts(*names: str) -> list[Verdict]:
        return [Verdict(site, name, f"evidence of {name}") for name in names]

    assert mutate.compute_score(verdicts("functional", "finding", "unused", "redundant", "covered")) == 1
    assert mutate.compute_score(verdicts("functional", "missed")) == 0.5
    assert mutate.compute_score([]) == 0
    for count, status in ((9, 0), (8, 1)):
        made = verdicts(*["functional"] * count, *["missed"] * (10 - count))
        monkeypatch.setattr(mutate, "judge", lambda *_a, made=made: made)
        assert mutate.main(["gemm"]) == status
        printed = capsys.readouterr().out
        assert f"| **total** | **10** | **{count}** |" in printed
        assert printed.count("evidence of missed") == 10 - count
        assert NAMES["BAR"] in printed
    with pytest.raises(SystemExit, match="no kernel 'nothing'"):
        mutate.main(["nothing"])
