"""Each check of the PTX emulator: a correct kernel with no finding, and defects seeded into it that must be found.

A defect replaces one text of the kernel by another; most delete one synchronisation instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from ptx_emulator import Report, emulate
from ptx_emulator.snippets import module


@dataclass(frozen=True, slots=True)
class Correct:
    """A kernel without a defect, and how to launch it."""

    body: str
    threads: int = 64
    shared_bytes: int = 2048
    grid: int = 1
    elements: int = 1024

    def run(self, old: str = "", new: str = "", **options: object) -> Report:
        assert old in self.body
        body = self.body.replace(old, new, 1) if old else self.body
        text = module(body, (".u64 a", ".u64 b"), threads=self.threads, shared_bytes=self.shared_bytes)
        a = torch.arange(self.elements, dtype=torch.int32)
        b = torch.zeros(self.elements, dtype=torch.int32)
        names = ("a", "b")
        settings = {"max_instructions": 100_000, "registers_per_thread": 128, **options}
        return emulate(text, a, b, names=names, grid=(self.grid,), **settings)  # type: ignore[arg-type]


START = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; and.b32 %r2, %r0, 31;
ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b];
mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
setp.eq.s32 %p0, %r1, 0; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r1, 1;
mov.u32 %r3, smem; shl.b32 %r4, %r0, 2; add.s32 %r5, %r3, %r4;
"""

EXCHANGE = Correct(
    START
    + """
ld.global.b32 %r10, [%d3]; st.shared.b32 [%r5], %r10;
bar.sync 0;
xor.b32 %r6, %r4, 128; add.s32 %r7, %r3, %r6; ld.shared.b32 %r11, [%r7];
bar.sync 1, 64;
st.shared.b32 [%r5], %r11;
st.global.b32 [%d4], %r11;
"""
)
BULK = Correct(
    START
    + """
@!%p1 bra SKIP;
mbarrier.init.shared.b64 [%r3+1024], 1;
fence.mbarrier_init.release.cluster;
SKIP: bar.sync 0;
@!%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3+1024], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d0], 256, [%r3+1024];
WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r3+1024], 0;
@!%p4 bra WAIT;
ld.shared.b32 %r10, [%r5]; add.s32 %r10, %r10, 1;
bar.sync 2;
st.shared.b32 [%r5], %r10;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r3], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
)
TMEM = Correct(
    START
    + """
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
bar.sync 0;
ld.shared.b32 %r8, [%r3];
shl.b32 %r9, %r1, 21; and.b32 %r9, %r9, 0x600000; add.s32 %r8, %r8, %r9;
setp.lt.u32 %p3, %r1, 4; setp.ge.u32 %p4, %r1, 4;
@!%p3 bra FIRST;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};
tcgen05.wait::st.sync.aligned;
FIRST: bar.sync 1;
@!%p4 bra SECOND;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8];
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%d4], %r11;
SECOND: bar.sync 2;
@!%p3 bra THIRD;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r2};
tcgen05.wait::st.sync.aligned;
THIRD: bar.sync 3;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
""",
    threads=256,
)
COPY = Correct(
    START
    + """
mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d0, %d5; shl.b32 %r12, %r0, 4; add.s32 %r13, %r3, %r12;
cp.async.cg.shared.global [%r13], [%d6], 16;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
xor.b32 %r6, %r12, 512; add.s32 %r7, %r3, %r6; ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r7];
st.global.b32 [%d4], %r20;
"""
)
REGISTERS = Correct(
    START
    + """
setp.ge.u32 %p3, %r1, 4;
@%p3 bra TAKE;
setmaxnreg.dec.sync.aligned.u32 64;
bra JOIN;
TAKE: setmaxnreg.inc.sync.aligned.u32 184;
JOIN: bar.sync 0;
""",
    threads=256,
)
CTAS = Correct(
    START
    + """
mov.u32 %r14, %ctaid.x; mul.wide.u32 %d7, %r14, 256; add.s64 %d8, %d4, %d7; add.s64 %d9, %d1, 2048;
st.global.b32 [%d8], %r0;
red.global.add.u32 [%d9], 1;
""",
    grid=4,
)
BARRIERS = Correct(
    START
    + """
@!%p1 bra SKIP;
mbarrier.init.shared.b64 [%r3], 2;
SKIP: bar.sync 0;
setp.eq.s32 %p5, %r2, 0;
@%p5 mbarrier.arrive.shared.b64 _, [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;
@!%p4 bra WAIT;
bar.arrive 4, 64;
bar.sync 5;
""".replace("bar.arrive 4, 64;", "@%p0 bra TWO; bar.arrive 4, 64; bra THREE; TWO: bar.sync 4, 64; THREE:")
)

KERNELS = {
    "exchange": EXCHANGE, "bulk": BULK, "tmem": TMEM, "copy": COPY, "registers": REGISTERS, "ctas": CTAS,
    "barriers": BARRIERS,
}  # fmt: skip

DEFECTS = {
    "read before the barrier": ("exchange", "bar.sync 0;", "", "shared-race"),
    "overwrite before the barrier": ("exchange", "bar.sync 1, 64;", "", "shared-race"),
    "load past the end": ("exchange", "[%d3]", "[%d3+4092]", "out-of-bounds"),
    "misaligned load": ("exchange", "[%d3]", "[%d3+2]", "misaligned"),
    "shared store past the end": (
        "exchange", "st.shared.b32 [%r5], %r10", "st.shared.b32 [%r5+2040], %r10", "out-of-bounds",
    ),
    "misaligned shared load": ("exchange", "%r11, [%r7]", "%r11, [%r7+1]", "misaligned"),
    "shared memory never written": ("exchange", "%r11, [%r7]", "%r11, [%r7+1024]", "uninitialised-shared"),
    "register never written": (
        "exchange", "st.global.b32 [%d4], %r11", "st.global.b32 [%d4], %r40", "uninitialised-register",
    ),
    "barrier for half a warp": ("exchange", "bar.sync 1, 64", "bar.sync 1, 48", "barrier-misuse"),
    "barrier that one warp skips": ("exchange", "bar.sync 1, 64", "@%p0 bar.sync 1, 64", "deadlock"),
    "barrier under a divergent guard": ("exchange", "bar.sync 1, 64", "@%p1 bar.sync 1, 64", "divergence"),
    "generic write without a proxy fence": ("bulk", "fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
    "barrier initialisation without a fence": (
        "bulk", "fence.mbarrier_init.release.cluster;", "", "missing-proxy-fence",
    ),
    "use before initialisation is ordered": ("bulk", "SKIP: bar.sync 0;", "SKIP:", "barrier-misuse"),
    "no wait for the load": ("bulk", "@!%p4 bra WAIT;", "", "shared-race"),
    "overwrite while another warp reads": ("bulk", "bar.sync 0;\n@!%p1 bra END;", "@!%p1 bra END;", "shared-race"),
    "store that nothing waits for": ("bulk", "cp.async.bulk.wait_group 0;", "", "leftover-transactions"),
    "more bytes expected than come": ("bulk", "[%r3+1024], 256;", "[%r3+1024], 272;", "deadlock"),
    "fewer bytes copied than expected": ("bulk", "[%d0], 256,", "[%d0], 240,", "deadlock"),
    "bytes expected after the last phase": (
        "bulk", "END:", "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r3+1024], 16;\nEND:", "leftover-transactions",
    ),
    "bulk copy of odd size": (
        "bulk", "[%r3], 256;\ncp.async.bulk.commit", "[%r3], 250;\ncp.async.bulk.commit", "misaligned",
    ),
    "bulk store past the end": ("bulk", "cta.bulk_group [%d1]", "cta.bulk_group [%d1+4000]", "out-of-bounds"),
    "ordinary store over a barrier": ("bulk", "END:", "END: st.shared.b32 [%r3+1024], %r10;", "barrier-misuse"),
    "st not waited for": ("tmem", "tcgen05.wait::st.sync.aligned;\nFIRST", "FIRST", "missing-tcgen05-wait"),
    "ld used but not waited for": ("tmem", "tcgen05.wait::ld.sync.aligned;", "", "missing-tcgen05-wait"),
    "ld neither used nor waited for": (
        "tmem", "tcgen05.wait::ld.sync.aligned;\nst.global.b32 [%d4], %r11;", "", "tmem-race",
    ),
    "tensor memory read before the barrier": ("tmem", "FIRST: bar.sync 1;", "FIRST:", "tmem-race"),
    "tensor memory overwritten before the barrier": ("tmem", "SECOND: bar.sync 2;", "SECOND:", "tmem-race"),
    "deallocated while in use": ("tmem", "THIRD: bar.sync 3;", "THIRD:", "tmem-race"),
    "not deallocated": ("tmem", "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;", "", "tmem-leak"),
    "used after deallocation": (
        "tmem",
        "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;",
        "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32; bar.sync 4; "
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8];",
        "tmem-use-after-dealloc",
    ),
    "column that is not allocated": ("tmem", "[%r8], {%r0};", "[%r8+32], {%r0};", "tmem-unallocated"),
    "lanes of another warp": ("tmem", "and.b32 %r9, %r9, 0x600000;", "mov.b32 %r9, 0;", "tmem-lanes"),
    "tensor memory never written": (
        "tmem", "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};", "", "uninitialised-tmem",
    ),
    "allocation of 24 columns": ("tmem", "[%r3], 32;", "[%r3], 24;", "tmem-allocation"),
    "cp.async not waited for": ("copy", "cp.async.wait_group 0;", "", "shared-race"),
    "cp.async group left open": ("copy", "cp.async.commit_group;", "", "shared-race"),
    "own cp.async data read too early": (
        "copy", "cp.async.wait_group 0;\nbar.sync 0;", "ld.shared.b32 %r30, [%r13];", "copy-not-waited",
    ),
    "more registers wanted than given back": (
        "registers", "inc.sync.aligned.u32 184", "inc.sync.aligned.u32 248", "deadlock",
    ),
    "nothing given back": ("registers", "setmaxnreg.dec.sync.aligned.u32 64;", "", "deadlock"),
    "decrease below what the warp has": (
        "registers", "dec.sync.aligned.u32 64", "dec.sync.aligned.u32 256", "register-budget",
    ),
    "two CTAs write one place": ("ctas", "[%d8], %r0", "[%d4], %r0", "global-conflict"),
    "read of another CTA's sum": ("ctas", "red.global", "ld.global.b32 %r15, [%d9]; red.global", "global-conflict"),
    "arrival missing": ("barriers", "@%p5 mbarrier.arrive", "@%p1 mbarrier.arrive", "deadlock"),
    "barrier without initialisation": ("barriers", "mbarrier.init.shared.b64 [%r3], 2;", "", "barrier-misuse"),
    "initialised twice": (
        "barriers", "mbarrier.init.shared.b64 [%r3], 2;",
        "mbarrier.init.shared.b64 [%r3], 2; mbarrier.init.shared.b64 [%r3], 2;",
        "barrier-misuse",
    ),
    "too many arrivals at once": (
        "barriers", "mbarrier.arrive.shared.b64 _, [%r3];", "mbarrier.arrive.shared.b64 _, [%r3], 3;", "barrier-misuse",
    ),
    "arrivals left at a named barrier": ("barriers", "TWO: bar.sync 4, 64;", "TWO:", "barrier-misuse"),
    "misaligned mbarrier": (
        "barriers", "mbarrier.init.shared.b64 [%r3], 2;", "mbarrier.init.shared.b64 [%r3+4], 2;", "misaligned",
    ),
    "endless loop": ("barriers", "bar.sync 5;", "AGAIN: bra AGAIN;", "instruction-limit"),
}  # fmt: skip
SCHEDULES = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_correct_kernel_has_no_finding(name: str, schedule: tuple[str, int]) -> None:
    """A check that reports what is right: its findings would be suppressed, and then also the true ones."""
    report = KERNELS[name].run(schedule=schedule[0], seed=schedule[1])
    report.require_clean()
    assert report.instructions > 0


@pytest.mark.parametrize("name", DEFECTS)
def test_seeded_defect_is_found(name: str) -> None:
    """A check that no longer sees its defect under any of the schedules that CI runs."""
    kernel, old, new, kind = DEFECTS[name]
    kinds: set[str] = set()
    for schedule, seed in SCHEDULES:
        kinds |= KERNELS[kernel].run(old, new, schedule=schedule, seed=seed).kinds
    assert kind in kinds


def test_race_names_lines_agents_and_address() -> None:
    """A finding that cannot be acted on: no line, no counterpart, or an address that nobody can map back."""
    report = EXCHANGE.run("bar.sync 1, 64;", "")
    assert report.kinds == {"shared-race"}
    finding = report.findings[0]
    assert finding.place is not None
    assert finding.other_place is not None
    texts = {finding.place.text, finding.other_place.text}
    assert texts == {"st.shared.b32 [%r5], %r11", "ld.shared.b32 %r11, [%r7]"}
    assert finding.place.line != finding.other_place.line
    assert {finding.agent, finding.other_agent} == {"warp 0", "warp 1"}
    assert finding.address in ("shared+0", "shared+128")
    assert finding.count == 32


def test_address_is_given_in_tensor_coordinates() -> None:
    """An out-of-bounds address in bytes from nowhere."""
    text = module("ld.param.u64 %d0, [a]; st.global.b32 [%d0+44], 1; st.global.b32 [%d0+48], 1;", (".u64 a",))
    tensor = torch.zeros(3, 4, dtype=torch.int32)
    (finding,) = emulate(text, tensor, names=["dq"]).findings
    assert finding.address == "0 B past the end of dq"
    assert int(tensor[2, 3]) == 1
    conflict = module(
        "ld.param.u64 %d0, [a]; mov.u32 %r0, %tid.x; @%p0 bra E; st.global.b32 [%d0+24], %r0; E:", (".u64 a",)
    )
    conflict = conflict.replace("@%p0", "setp.ne.u32 %p0, %r0, 0; @%p0")
    report = emulate(conflict, tensor, names=["dq"], grid=(2,))
    assert [f.address for f in report.findings] == ["dq[1, 2]"]
    assert report.findings[0].other_agent == "CTA 0"


def test_deadlock_says_who_waits_for_what() -> None:
    """A hang whose report does not name the barrier, its state and the waiting warps."""
    report = BARRIERS.run("@%p5 mbarrier.arrive", "@%p1 mbarrier.arrive")
    assert report.fatal is not None
    assert report.fatal.kind == "deadlock"
    for warp in (0, 1):
        expected = (
            f"warp {warp} waits for parity 0 of mbarrier at shared+0 (phase 0, 1 of 2 arrivals missing, tx-count 0)"
        )
        assert expected in report.fatal.text


def test_register_deadlock_names_the_pool() -> None:
    """An unbalanced setmaxnreg budget hung on a B200; here the report has the numbers."""
    report = REGISTERS.run("inc.sync.aligned.u32 184", "inc.sync.aligned.u32 248")
    assert report.fatal is not None
    assert "waits for registers: has 128, wants 248" in report.fatal.text


def test_suppressed_finding_stays_in_the_report() -> None:
    """A suppression that hides instead of filing, or that matches other kinds and kernels."""
    from ptx_emulator import Suppression

    known = Suppression("shared-race", "test", "seeded")
    report = EXCHANGE.run("bar.sync 1, 64;", "", suppress=(known,))
    assert report.findings == []
    assert {s for _, s in report.suppressed} == {known}
    other = Suppression("shared-race", "another kernel", "seeded")
    assert EXCHANGE.run("bar.sync 1, 64;", "", suppress=(other,)).kinds == {"shared-race"}


def test_random_schedule_is_reproducible() -> None:
    """A seed that does not decide the order: a failure of CI could not be repeated."""
    runs = [BULK.run(schedule="random", seed=7).instructions for _ in range(2)]
    assert runs[0] == runs[1]
