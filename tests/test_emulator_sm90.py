"""SM90 in the emulator: a CuTe DSL kernel of ours with wgmma, and what must be reported when its order is broken.

The kernel (``ptx_emulator/hopper_example.py``) also runs on the card, in test_emulator_card.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from child_processes import run_module
from ptx_emulator import Report, emulate
from ptx_emulator.snippets import module

SCHEDULES = [("eager", 0), ("lazy", 0), *(("random", seed) for seed in (1, 2, 3, 4))]
DELETIONS: dict[str, tuple[str, int, str]] = {
    "fence_of_first_wgmma": ("WGMMA_FENCE", 0, "missing-wgmma-fence"),
    "fence_after_conversion_to_a": ("WGMMA_FENCE", 1, "missing-wgmma-fence"),
    "commit": ("WGMMA_COMMIT", 0, "wgmma-not-waited"),
    "wait_before_accumulators": ("WGMMA_WAIT", 0, "wgmma-not-waited"),
    "wait_before_shared_is_reused": ("WGMMA_WAIT", 2, "wgmma-not-waited"),
    "fence_between_stmatrix_and_wgmma": ("FENCE_PROXY", 0, "missing-proxy-fence"),
    "fence_between_stmatrix_and_store": ("FENCE_PROXY", 1, "missing-proxy-fence"),
    "barrier_between_stmatrix_and_wgmma": ("BAR", 1, "shared-race"),
    "barrier_between_stmatrix_and_store": ("BAR", 3, "shared-race"),
    "wait_for_the_loads": ("MB_WAIT", 0, "shared-race"),
    "bulk_wait": ("BULK_WAIT", 0, "leftover-transactions"),
    "release_of_registers": ("SETMAXNREG", 0, "deadlock"),
}
"""Kind of the deleted instruction, which occurrence, and the finding that must come."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every schedule, every deletion, then what was exported, in one process that compiles once."""
    requests: list[dict[str, Any]] = [{"schedule": s, "seed": seed, "tiles": 2} for s, seed in SCHEDULES]
    requests += [
        {"schedule": "eager", "seed": 1, "tiles": 1, "delete": [kind, nth]} for kind, nth, _ in DELETIONS.values()
    ]
    requests.append({"export": str(tmp_path_factory.mktemp("export"))})
    folder = tmp_path_factory.mktemp("hopper")
    return run_module("ptx_emulator.hopper_example", requests=requests, folder=folder, timeout_s=300)


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)), ids=lambda i: f"{SCHEDULES[i][0]}{SCHEDULES[i][1]}")
def test_kernel_is_exact_and_clean(results: list[dict[str, Any]], schedule: int) -> None:
    """wgmma, stmatrix, copies or reductions computing anything else than their definition, or a false finding."""
    result = results[schedule]
    assert result["findings"] == []
    assert result["wrong"] == []
    assert result["mma"] == 2 * 2 * 3 * 4  # tiles x warpgroups x products x steps of K


@pytest.mark.parametrize("deletion", DELETIONS)
def test_deletion_is_found(results: list[dict[str, Any]], deletion: str) -> None:
    """A broken order of a wgmma kernel that passes, because its results are right by luck."""
    place = len(SCHEDULES) + list(DELETIONS).index(deletion)
    assert DELETIONS[deletion][2] in results[place]["kinds"]


def test_exported_function_runs(results: list[dict[str, Any]]) -> None:
    """A function from ``export_to_c`` and ``load_module``, as the on-disk cache has them; it needs its PTX given."""
    exported = results[len(SCHEDULES) + len(DELETIONS) :]
    assert len(exported) == 2  # the object file and a shared library
    for result in exported:
        assert result["findings"] == []
        assert result["right"]
        assert "holds no PTX" in result["refusal"]


MULTIPLY = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
FIRST = "{%f0, %f1, %f2, %f3}, {%r10, %r11, %r12, %r13}, %d20, 1, 1, 1, 0;"
LAST = f"{MULTIPLY} {FIRST} wgmma.commit_group.sync.aligned;"
REGISTER_A = f"""
    mov.u32 %r0, %tid.x; mov.u32 %r3, smem;
    mov.b32 %r4, 0x3f803f80;
    shl.b32 %r5, %r0, 2; add.s32 %r6, %r3, %r5; st.shared.b32 [%r6], %r4;
    fence.proxy.async.shared::cta; bar.sync 0;
    cvt.u64.u32 %d20, %r3; shr.u64 %d20, %d20, 4; add.s64 %d20, %d20, {128 >> 4 << 16 | 128 >> 4 << 32};
    mov.b32 %r10, 0x3f803f80; mov.b32 %r11, %r10; mov.b32 %r12, %r10; mov.b32 %r13, %r10;
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    wgmma.fence.sync.aligned;
    {MULTIPLY} {FIRST}
    {LAST}
    wgmma.wait_group.sync.aligned 0;
    mov.b32 %r10, 0;
    ld.param.u64 %d0, [out]; mul.wide.u32 %d1, %r0, 16; add.s64 %d0, %d0, %d1;
    st.global.v4.f32 [%d0], {{%f0, %f1, %f2, %f3}};
    OUT:
"""
"""Two products of ones, A from registers, B of 8 x 16 without swizzle (leading 128 B, stride 128 B)."""


def run_register_a(old: str = "", new: str = "", **options: Any) -> tuple[Report, torch.Tensor]:
    assert old in REGISTER_A
    out = torch.zeros(128, 4)
    text = module(REGISTER_A.replace(old, new, 1), [".u64 out"], threads=128, shared_bytes=1024, target="sm_90a")
    return emulate(text, out, **options), out


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_a_from_registers(schedule: str) -> None:
    """The accumulation of two wgmma in a row; no fence between products of one shape is needed."""
    report, out = run_register_a(schedule=schedule, seed=3)
    report.require_clean()
    assert (out == 32).all()


def last(old: str, new: str) -> str:
    """The second product with an operand exchanged."""
    assert old in LAST
    return LAST.replace(old, new)


FENCE = "wgmma.fence.sync.aligned;"
DEFECTS: dict[str, tuple[str, str, str | None]] = {
    "a_overwritten": (LAST, f"{LAST} mov.b32 %r10, 0;", "wgmma-not-waited"),
    "accumulator_as_a": (LAST, last("{%r10,", "{%f0,"), "wgmma-not-waited"),
    "fresh_accumulator": (
        LAST,
        last("{%f0, %f1, %f2, %f3}", "{%f4, %f5, %f6, %f7}").replace("%d20, 1", "%d20, 0"),
        None,
    ),
    "unwritten_accumulator": (LAST, last("{%f0, %f1, %f2, %f3}", "{%f4, %f5, %f6, %f7}"), "uninitialised-register"),
    "no_fence": (FENCE, "", "missing-wgmma-fence"),
    "written_after_fence": (FENCE, f"{FENCE} mov.b32 %r10, %r11;", "missing-wgmma-fence"),
    "no_proxy_fence": ("fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
    "no_barrier": ("bar.sync 0;", "", "shared-race"),
    "waits_for_too_little": ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1", "wgmma-not-waited"),
    "three_warps": (FENCE, f"setp.lt.u32 %p1, %r0, 96; @!%p1 bra OUT; {FENCE}", "deadlock"),
    "warps_differ": (FENCE, f"setp.lt.u32 %p1, %r0, 96; @%p1 add.s64 %d20, %d20, 8; {FENCE}", "divergence"),
}
"""What is replaced by what, and the finding; None is a correct variant."""


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_around_wgmma(defect: str) -> None:
    """A rule of the asynchronous multiply that nobody checks."""
    old, new, kind = DEFECTS[defect]
    report, _ = run_register_a(old, new)
    assert report.kinds == ({kind} if kind else set())


@pytest.mark.parametrize("signs", [("1", "1"), ("-1", "1"), ("1", "-1"), ("-1", "-1")])
def test_negated_operands(signs: tuple[str, str]) -> None:
    """imm-scale-a and imm-scale-b."""
    _, out = run_register_a(LAST, last("%d20, 1, 1, 1,", f"%d20, 0, {signs[0]}, {signs[1]},"))
    assert (out == 16 * int(signs[0]) * int(signs[1])).all()


def test_overwritten_a_is_seen_in_the_result() -> None:
    """Only a check says that A was overwritten in flight: a lazy wgmma reads what is there when it runs."""
    _, out = run_register_a(LAST, f"{LAST} mov.b32 %r10, 0;", schedule="lazy")
    assert not (out == 32).all()
