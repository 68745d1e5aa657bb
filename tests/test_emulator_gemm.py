"""The small GEMM of :mod:`ptx_emulator.gemm`: it is exact and clean, and each of its signals is missed when deleted."""

from __future__ import annotations

import pytest
from ptx_emulator import Options, Report
from ptx_emulator.gemm import A_BYTES, B_BYTES, BODY, DONE, EMPTY, FULL, subject, wait

SCHEDULES = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3), ("random", 4)]

SIGNALS = {
    "first barrier": ("bar.sync 0;", ""),
    "initialisation fence": ("fence.mbarrier_init.release.cluster;", ""),
    "wait for an empty stage": (wait("WAITEMPTY", "%r16", "%r14"), ""),
    "wait for a full stage": (wait("WAITFULL", "%r16", "%r13"), ""),
    "expected bytes": (f"mbarrier.arrive.expect_tx.shared.b64 _, [%r15+{FULL}], {A_BYTES + B_BYTES};", ""),
    "release of a stage": (
        f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r15+{EMPTY}];",
        "",
    ),
    "wait for the result": (wait("WAITDONE", "%r16", "0"), ""),
    "signal of the result": (
        f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+{DONE}];",
        "",
    ),
    "barrier before deallocation": ("bar.sync 1;", ""),
}


def run(k_blocks: int, body: str, schedule: str, seed: int) -> tuple[Report, bool]:
    """Two CTAs; returns the report and whether the product is right."""
    outcome = subject(body, k_blocks).run(Options(schedule, seed, max_instructions=300_000))
    return outcome.report, not outcome.wrong


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("k_blocks", [1, 5])
def test_gemm_is_exact_and_clean(k_blocks: int, schedule: str, seed: int) -> None:
    """Small integers: the sum is exact in any order. Five blocks take each stage through several phases."""
    report, right = run(k_blocks, BODY, schedule, seed)
    report.require_clean()
    assert right
    assert report.launches[0].mma == 2 * 4 * k_blocks


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_of_the_gemm_is_missed(name: str) -> None:
    """A signal that can be deleted unnoticed: either the kernel does not need it, or the emulator is blind to it."""
    old, new = SIGNALS[name]
    assert old in BODY
    noticed = []
    for schedule, seed in SCHEDULES[:4]:
        report, right = run(5, BODY.replace(old, new, 1), schedule, seed)
        noticed.append(bool(report.findings) or not right)
    assert any(noticed)
