"""CTAs of a launch spread over threads: the same results and findings as one thread."""

from __future__ import annotations

import pytest
import torch
from ptx_emulator import Report, emulate
from ptx_emulator.snippets import module

START = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b];
mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
mov.u32 %r5, %ntid.x; mad.lo.u32 %r6, %r1, %r5, %r0; mul.wide.u32 %d5, %r6, 4; add.s64 %d6, %d1, %d5;
"""
CTAS = 7


def run(body: str, a: torch.Tensor, b: torch.Tensor, **options: object) -> Report:
    text = module(START + body, (".u64 a", ".u64 b"), threads=64, shared_bytes=512)
    settings = {"max_instructions": 100_000, **options}
    return emulate(text, a, b, names=("a", "b"), grid=(CTAS,), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_reductions_add_up(workers: int, schedule: str) -> None:
    """An addition that is lost between two threads, or a CTA that no worker or two of them run."""
    body = """
    cvt.rn.f32.u32 %f0, %r1; red.global.add.f32 [%d4], %f0; mov.u32 %r7, 1; red.global.add.u32 [%d3], %r7;
    mov.u32 %r20, smem; shl.b32 %r21, %r0, 2; add.s32 %r21, %r20, %r21; st.shared.f32 [%r21], %f0;
    fence.proxy.async.shared::cta; bar.sync 0; setp.ne.s32 %p0, %r0, 0; @%p0 bra END;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r20], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:
    """
    a, b = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    report = run(body, a, b, workers=workers, schedule=schedule, seed=5)
    report.require_clean()
    assert (a == CTAS).all()
    assert (b == 2 * sum(range(CTAS))).all()
    assert report.launches[0].ctas == CTAS


def test_counts_are_those_of_one_worker() -> None:
    """Instructions of a worker that are not counted."""
    counts = {
        run("st.global.b32 [%d6], %r0;", torch.zeros(1), torch.zeros(448), workers=n).instructions for n in (1, 3)
    }
    assert len(counts) == 1


ACCESSES = {
    "two_writes": "st.global.b32 [%d4], %r1;",
    "read_of_a_write": "setp.eq.s32 %p0, %r1, 0; @%p0 st.global.b32 [%d4], %r1; @!%p0 ld.global.b32 %r9, [%d4];",
    "write_of_a_read": "setp.eq.s32 %p0, %r1, 0; @!%p0 st.global.b32 [%d6], %r1; @%p0 ld.global.b32 %r9, [%d4+256];",
    "reduction_over_write": "setp.eq.s32 %p0, %r1, 0; @%p0 st.global.b32 [%d4], 0; @!%p0 red.global.add.u32 [%d4], 1;",
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("access", ACCESSES)
def test_conflict_between_ctas_is_found(access: str, workers: int) -> None:
    """CTAs of different workers that touch the same memory: each worker alone sees nothing wrong."""
    report = run(ACCESSES[access], torch.zeros(1), torch.zeros(448), workers=workers, resident_ctas=1)
    assert report.kinds == {"global-conflict"}
    assert any(finding.address.startswith("b[") for finding in report.findings)
    assert all(finding.other_agent and finding.other_agent.startswith("CTA") for finding in report.findings)


def test_reads_by_all_and_writes_apart_are_no_conflict() -> None:
    """A false finding of the comparison between workers."""
    body = "ld.global.b32 %r9, [%d3]; st.global.b32 [%d6], %r9; red.global.add.u32 [%d0+256], 1;"
    run(body, torch.zeros(65, dtype=torch.int32), torch.zeros(448, dtype=torch.int32), workers=2).require_clean()


def test_fault_in_one_worker_ends_the_launch() -> None:
    """A fault in a thread that is not the first, and workers that go on after it."""
    body = """
    setp.eq.s32 %p0, %r1, 1; @%p0 ld.global.b32 %r9, [%d4+100000];
    L: @!%p0 bra L;
    """
    report = run(body, torch.zeros(1), torch.zeros(64), workers=2, max_instructions=1 << 40)
    assert report.fatal is not None
    assert report.fatal.kind == "out-of-bounds"
    assert report.fatal.cta == 1


def test_ctas_of_two_workers_wait_for_each_other() -> None:
    """Workers whose tensors are not the same memory."""
    body = """
    setp.ne.s32 %p0, %r1, 0; @%p0 bra SET;
    L: ld.acquire.gpu.global.b32 %r9, [%d1]; setp.eq.s32 %p1, %r9, 0; @%p1 bra L; bra END;
    SET: setp.ne.s32 %p1, %r1, 1; @%p1 bra END; mov.u32 %r9, 1; st.release.gpu.global.b32 [%d1], %r9;
    END:
    """
    report = run(body, torch.zeros(1), torch.zeros(64), workers=2, resident_ctas=1, max_instructions=1 << 40, checks=())
    report.require_clean()


@pytest.mark.parametrize("option", ["workers", "resident_ctas"])
def test_no_worker_is_refused(option: str) -> None:
    """A launch that nobody runs and that reports nothing."""
    with pytest.raises(ValueError, match="at least 1"):
        run("", torch.zeros(1), torch.zeros(1), **{option: 0})
