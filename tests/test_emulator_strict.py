"""Races between lanes, the letter of the ISA on tcgen05 fences, and clusters, which are refused."""

from __future__ import annotations

import ctypes as c

import pytest
import torch
from ptx_emulator import Report, UnsupportedPtxError, emulate
from ptx_emulator.bindings import library
from ptx_emulator.snippets import module

START = """
mov.u32 %r0, %tid.x; and.b32 %r2, %r0, 31; shr.u32 %r1, %r0, 5; mov.u32 %r3, smem;
shl.b32 %r4, %r2, 2; add.s32 %r5, %r3, %r4; xor.b32 %r6, %r4, 4; add.s32 %r7, %r3, %r6;
setp.eq.s32 %p0, %r2, 0; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r1, 0;
"""


def run(body: str, threads: int = 32, **options: object) -> Report:
    text = module(START + body, (".u64 a",), threads=threads, shared_bytes=2048)
    return emulate(text, torch.zeros(256), names=("a",), **options)  # type: ignore[arg-type]


MEET = {
    "bar.warp.sync": "bar.warp.sync -1;",
    "shuffle": "shfl.sync.idx.b32 %r30, %r2, 0, 31, -1;",
    "vote": "vote.sync.ballot.b32 %r30, %p0, -1;",
    "barrier": "bar.sync 0;",
}
FIRST = "st.shared.b32 [%r5], %r2; bar.warp.sync -1; ld.shared.b32 %r10, [%r5]; bar.warp.sync -1;"
ORDERS = {
    "read_after_write": "st.shared.b32 [%r5], %r2; MEET ld.shared.b32 %r10, [%r7];",
    "write_after_read": f"{FIRST} ld.shared.b32 %r10, [%r7]; MEET st.shared.b32 [%r5], %r10;",
    "write_after_write": "st.shared.b32 [%r5], %r2; MEET st.shared.b32 [%r7], %r2;",
    "same_place_other_values": "@%p0 st.shared.b32 [%r3], 7; MEET @!%p0 st.shared.b32 [%r3], %r2;",
    "bytes": f"{FIRST} st.shared.b8 [%r5], %r2; MEET ld.shared.b32 %r10, [%r7];",
}


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_that_do_not_meet_race(order: str) -> None:
    """A bar.warp.sync that is missing: in the interpreter the lanes run in step, on the card they need not."""
    report = run(ORDERS[order].replace("MEET", ""), checks=["lanes"])
    assert report.kinds == {"lane-race"}
    assert all(finding.address.startswith("shared+") and finding.other_place for finding in report.findings)
    run(ORDERS[order].replace("MEET", ""), checks=["races", "uninitialised"]).require_clean()  # seen by nothing else


@pytest.mark.parametrize("meet", MEET)
@pytest.mark.parametrize("order", [name for name in ORDERS if name != "same_place_other_values"])
def test_lanes_that_meet_are_ordered(order: str, meet: str) -> None:
    """A false finding across any instruction in which the lanes meet."""
    run(ORDERS[order].replace("MEET", MEET[meet]), checks=["lanes", "races"]).require_clean()


@pytest.mark.parametrize(
    "body",
    [
        "st.shared.b32 [%r5], %r2; ld.shared.b32 %r10, [%r5];",
        "st.shared.b32 [%r3], 5;",
        "mul.lo.u32 %r8, %r1, 128; add.s32 %r8, %r8, %r7; st.shared.b32 [%r8], %r2;",
        "shl.b32 %r8, %r2, 1; add.s32 %r8, %r3, %r8; st.shared.b16 [%r8], %r2; ld.shared.u16 %r10, [%r8];",
    ],
    ids=["own_data", "same_value", "other_warps", "halves_of_a_word"],
)
def test_lanes_that_do_not_touch_the_same_are_no_race(body: str) -> None:
    """A lane reads what it wrote; all lanes write one value; warps are the business of another check."""
    run(body, threads=64, checks=["lanes"]).require_clean()


BLOCKS = {
    # Warp 0 writes 16 bytes a lane, then warp 1 one word of each, or the other way round.
    "word_of_a_block": ("@%p2 st.shared.v4.b32 [%r8], {%r2, %r2, %r2, %r2};", "@!%p2 ld.shared.b32 %r10, [%r8+4];"),
    "block_over_a_word": ("@!%p2 ld.shared.b32 %r10, [%r8+8];", "@%p2 st.shared.v4.b32 [%r8], {%r2, %r2, %r2, %r2};"),
    "block_over_a_block": (
        "@!%p2 ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r8];",
        "@%p2 st.shared.v4.b32 [%r8], {%r2, %r2, %r2, %r2};",
    ),
}
FILL = "@%p2 st.shared.v4.b32 [%r8], {%r2, %r2, %r2, %r2}; bar.sync 0;"


@pytest.mark.parametrize("order", BLOCKS)
def test_words_and_blocks_of_shared_memory_share_their_history(order: str) -> None:
    """Shadow memory keeps four words as one while they are accessed together: what it forgets when they part."""
    address = "shl.b32 %r8, %r2, 4; add.s32 %r8, %r3, %r8;" + FILL
    first, second = BLOCKS[order]
    report = run(address + first + second, threads=64, checks=["races"])
    assert report.kinds == {"shared-race"}
    words = 128 if order == "block_over_a_block" else 32
    assert report.findings[0].count == words
    run(address + first + "bar.sync 0;" + second, threads=64, checks=["races"]).require_clean()


def test_each_word_of_a_block_remembers_all_that_read_it() -> None:
    """Words that part from a block that two warps have read, and know of one reader or of none."""
    body = FILL + "@!%p2 ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r8];"
    writes = "".join(f"@%p2 st.shared.b32 [%r8+{4 * word}], %r2;" for word in range(4))
    report = run("shl.b32 %r8, %r2, 4; add.s32 %r8, %r3, %r8;" + body + writes, threads=96, checks=["races"])
    assert report.kinds == {"shared-race"}
    assert [finding.count for finding in report.findings] == [32] * 8, "four words, each read by two warps"


def test_warps_that_write_their_own_words_of_a_block_are_no_race() -> None:
    """A finding about words that only lie in the same block."""
    body = FILL + "shl.b32 %r9, %r1, 2; add.s32 %r9, %r8, %r9; st.shared.b32 [%r9], %r2; ld.shared.b32 %r10, [%r9];"
    run("shl.b32 %r8, %r2, 4; add.s32 %r8, %r3, %r8;" + body, threads=64, checks=["races", "lanes"]).require_clean()


HAND_OVER = """
@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+1024], 32;
@%p1 mbarrier.init.shared.b64 [%r3+1032], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0; ld.shared.b32 %r8, [%r3+1024];
mad.lo.u32 %r20, %r0, 16, %r3; mov.b32 %r21, 0; @%p2 st.shared.v4.b32 [%r20], {%r21, %r21, %r21, %r21};
@%p2 st.shared.v4.b32 [%r20+512], {%r21, %r21, %r21, %r21};
fence.proxy.async.shared::cta; bar.sync 0;
shl.b32 %r11, %r1, 21; add.s32 %r12, %r8, %r11; add.s32 %r13, %r12, 8;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], %r21; tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 1;
@!%p1 bra W;
tcgen05.fence::after_thread_sync;
shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9; add.s64 %d21, %d20, 34360262656;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r8+8], %d21;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+1032];
W: mbarrier.try_wait.parity.shared.b64 %p9, [%r3+1032], 0; @!%p9 bra W;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r40}, [%r13]; tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 2;
tcgen05.fence::after_thread_sync;
@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_fenced_hand_over_is_clean(schedule: str) -> None:
    """A finding of the strict check where the letter of the ISA is kept."""
    checks = ["uninitialised", "races", "tcgen05-fences"]
    run(HAND_OVER, threads=128, checks=checks, schedule=schedule, seed=1).require_clean()


@pytest.mark.parametrize("nth", range(HAND_OVER.count("tcgen05.fence")))
def test_every_tcgen05_fence_is_missed(nth: int) -> None:
    """A fence on one side of a barrier does not order what is on the other side of it."""
    parts = HAND_OVER.split("tcgen05.fence")
    body = "tcgen05.fence".join(parts[: nth + 1]) + "//" + "tcgen05.fence".join(["", *parts[nth + 1 :]])
    assert run(body, threads=128, checks=["races", "tcgen05-fences"]).kinds == {"missing-tcgen05-fence"}
    run(body, threads=128).require_clean()  # off by default


def test_cluster_of_two_is_refused_by_the_reader() -> None:
    """A kernel for two CTAs that runs as if each were alone."""
    text = module("ret;").replace(".reqntid", ".reqnctapercluster 2, 1, 1\n.reqntid")
    with pytest.raises(UnsupportedPtxError, match="clusters of 2 CTAs"):
        emulate(text)


class _Attribute(c.Structure):
    _fields_ = [("id", c.c_int), ("padding", c.c_int), ("value", c.c_uint * 16)]


class _Settings(c.Structure):
    _fields_ = [("grid", c.c_uint * 3), ("block", c.c_uint * 3), ("shared", c.c_size_t), ("stream", c.c_void_p),
                ("attributes", c.POINTER(_Attribute)), ("count", c.c_uint)]  # fmt: skip


def test_cluster_of_two_is_refused_at_launch() -> None:
    """Host code asks for clusters by an attribute of the launch (4: cluster dimension), not always in the PTX."""
    attribute = _Attribute(4, 0, (c.c_uint * 16)(2, 1, 1))
    settings = _Settings((1, 1, 1), (32, 1, 1), 0, None, c.pointer(attribute), 1)
    describe = library()._cudaGetErrorString
    describe.restype = c.c_char_p
    error = library()._cudaLaunchKernelEx(c.byref(settings), b"kernel", None)
    assert error
    assert b"clusters of more than one CTA" in describe(error)
