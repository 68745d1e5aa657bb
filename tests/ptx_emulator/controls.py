"""Small kernels that need a synchronisation: a model that does not miss it there may not call it redundant elsewhere.

Each control is a correct kernel of two warps whose instructions of one kind are all needed. ``facet`` says what it
orders. A kind may have several facets; blindness for any of them is blindness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ptx_emulator.launch import Kernel, Options, emulate
from ptx_emulator.mutation import Session
from ptx_emulator.ptx import parse_entries
from ptx_emulator.snippets import module
from ptx_emulator.subjects import Outcome, Subject

START = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b];
mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2; setp.eq.s32 %p1, %r0, 0;
mov.u32 %r3, smem; shl.b32 %r4, %r0, 2; add.s32 %r5, %r3, %r4;
"""
COPY = START + (
    "mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d0, %d5; shl.b32 %r12, %r0, 4; add.s32 %r13, %r3, %r12;"
    "xor.b32 %r6, %r12, 512; add.s32 %r7, %r3, %r6; cp.async.cg.shared.global [%r13], [%d6], 16;"
)
BULK_STORE = START + (
    "st.shared.b32 [%r5], %r0; fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra END;"
    "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r3], 256;"
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"
)


@dataclass(frozen=True, slots=True)
class Control:
    """A kernel that needs every instruction of ``kind`` in it, for what ``facet`` says.

    ``signals``: the facet is of no matter to a kernel in which nothing is signalled by one lane.
    """

    kind: str
    facet: str
    body: str
    signals: bool = False


def _exchange(barrier: str, mask: int) -> str:
    return START + (
        f"st.shared.b32 [%r5], %r0; {barrier} xor.b32 %r6, %r4, {mask}; add.s32 %r7, %r3, %r6;"
        "ld.shared.b32 %r11, [%r7]; st.global.b32 [%d4], %r11;"
    )


def _release(barrier: str) -> str:
    return START + (
        "@!%p1 bra SKIP; mbarrier.init.shared.b64 [%r3+1024], 1; SKIP: bar.sync 0; setp.eq.u32 %p2, %r1, 0;"
        f"@!%p2 bra WAIT; st.shared.b32 [%r5], %r0; {barrier} @%p1 mbarrier.arrive.shared.b64 _, [%r3+1024]; bra END;"
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r3+1024], 0; @!%p4 bra WAIT;"
        "ld.shared.b32 %r11, [%r5+-128]; st.global.b32 [%d4], %r11; END:"
    )


CONTROLS = (
    Control("BAR", "order between warps", _exchange("bar.sync 0;", 128)),
    Control("BAR", "order between lanes of a warp", _exchange("bar.sync 0;", 4)),
    Control("SYNCWARP", "order between lanes of a warp", _exchange("bar.warp.sync -1;", 4)),
    Control("BAR", "what all lanes did before one lane signals", _release("bar.sync 1, 32;"), signals=True),
    Control("SYNCWARP", "what all lanes did before one lane signals", _release("bar.warp.sync -1;"), signals=True),
    Control("FENCE_PROXY", "ordinary stores before a bulk copy", BULK_STORE),
    Control("BULK_COMMIT", "a bulk store before the CTA ends", BULK_STORE),
    Control("BULK_WAIT", "a bulk store before the CTA ends", BULK_STORE),
    Control(
        "FENCE_MBAR_INIT",
        "initialisation before asynchronous use",
        START + "@!%p1 bra SKIP; mbarrier.init.shared.b64 [%r3+1024], 1; fence.mbarrier_init.release.cluster;"
        "SKIP: bar.sync 0;"
        "@!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%r3+1024], 256;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d0], 256, [%r3+1024];"
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r3+1024], 0; @!%p4 bra WAIT;",
    ),
    Control(
        "CP_WAIT",
        "copies before another warp reads",
        COPY + "cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r20, [%r7];",
    ),
    Control(
        "CP_COMMIT",
        "copies before another warp reads",
        COPY + "cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r20, [%r7];",
    ),
)


def subject(control: Control) -> Subject:
    """A control as a subject."""
    text = module(control.body, (".u64 a", ".u64 b"), threads=64, shared_bytes=2048)
    kernels = {"test": Kernel(parse_entries(text)["test"])}

    def run(options: Options) -> Outcome:
        a, b = torch.arange(1024, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
        limit = min(options.max_instructions, 100_000)
        return Outcome(
            emulate(kernels["test"], a, b, schedule=options.schedule, seed=options.seed, max_instructions=limit)
        )

    return Subject(control.facet, kernels, "test", run, text)


@cache
def is_noticed(control: Control, checks: frozenset[str]) -> bool:
    """Whether the emulator, with these checks, notices each deletion of the control's kind in it."""
    session = Session(subject(control), extra_schedules=(), checks=checks)
    sites = [site for site in session.sites if site.kind == control.kind]
    return bool(sites) and all(session.try_deletion([site]).caught for site in sites)


def find_blindness(session: Session, kind: str, seen: bool) -> str:
    """What the emulator does not see of a kind, in words; empty if it sees all that there are controls for.

    Args:
        session: of the kernel.
        kind: of the instruction.
        seen: whether a deletion of the kind was caught in the kernel itself, which stands for a control.
    """
    controls = [c for c in CONTROLS if c.kind == kind and (session.signals or not c.signals)]
    blind = [control.facet for control in controls if not is_noticed(control, session.checks)]
    if blind:
        return f"the model does not see {' and '.join(blind)}"
    return "" if seen or controls else "no deletion of this kind was noticed anywhere"
