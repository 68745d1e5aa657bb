"""The backward's main kernel for Hopper: in the emulator, and (marked gpu) on the card.

A child process emulates, because the DSL reads its target when it is imported. Tolerances: P and dS are rounded to
bf16 (2^-9 = 2.0e-3 at most, 1.1e-3 to 1.7e-3 root mean square) before products in fp32, so 3e-3 for dK, dV and fp32
or fp16 sums of dQ. A bf16 sum rounds once per key block on top: 3e-3 for up to 4 of them, 7e-3 for 16.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from backward_cases import make_problem, relative_error
from child_processes import run_module

TOLERANCE, SUM_TOLERANCE_16 = 3e-3, 7e-3
EAGER, LAZY, RANDOM = ("eager", 0), ("lazy", 0), ("random", 3)

CASES: dict[str, dict[str, Any]] = {
    "many_segments": {"lengths": [140, 37, 1], "schedules": [EAGER, LAZY, RANDOM]},
    "one_long_segment_per_cta": {
        "lengths": [260],
        "topk": 2,
        "window": 512,
        "rows_per_chunk": 64,
        "schedules": [RANDOM],
    },
    "fp32_sums_two_heads": {"lengths": [133], "dq_accumulation": "fp32", "kv_heads": 2, "schedules": [RANDOM]},
    "documents_of_1_2_3_127_129": {"lengths": [1, 2, 3, 127, 129], "topk": 2, "grid": 3},
    "hot_block": {"lengths": [200], "selection": "hot"},
    "nothing_selected": {"lengths": [60, 5], "selection": "none"},
    "lse_not_finite": {"lengths": [40], "dead_rows": True},
    "tiny_gradients": {"lengths": [40], "ratio": 2, "grad_scale": 1e-6, "dq_accumulation": "fp16"},
    "huge_gradients": {"lengths": [40], "ratio": 2, "grad_scale": 1e4, "dq_accumulation": "fp16"},
    "dq_alone": {"lengths": [140], "dq_accumulation": "fp32", "gradients": "dq", "grid": 1},
    "ratio_2": {"lengths": [140, 3], "ratio": 2, "dq_accumulation": "fp16", "schedules": [RANDOM]},
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every case under its schedules; one process compiles each kernel once."""
    folder = tmp_path_factory.mktemp("backward_sm90")
    results = iter(run_module("backward_sm90_emulated", requests=CASES.values(), folder=folder))
    return {name: [next(results) for _ in case.get("schedules", [EAGER])] for name, case in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_emulated_gradients_agree_with_float64(emulated: dict[str, list[dict[str, Any]]], case: str) -> None:
    """A wrong layout, mask, scale or element order, and a NaN that spreads, fail here."""
    for run in emulated[case]:
        assert max(run["errors"]) <= TOLERANCE
        assert run["outside"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_emulated_kernel_has_no_race(emulated: dict[str, list[dict[str, Any]]], case: str) -> None:
    """A missing barrier, wait or proxy fence fails here even where the result happens to be right."""
    for run in emulated[case]:
        assert run["findings"] == []


def test_dq_alone_waits_for_additions(emulated: dict[str, list[dict[str, Any]]]) -> None:
    """Where TMA has only read, it may add two tasks' gradients of a row in either order: other last bits.

    The emulator takes read for added, so this counts instructions.
    """
    waits = {name: runs[0]["read_waits"] for name, runs in emulated.items()}
    assert waits["dq_alone"] < waits["fp32_sums_two_heads"]


def test_emulated_cases_have_work(emulated: dict[str, list[dict[str, Any]]]) -> None:
    """Tables that are empty by mistake would make every case above pass on zeros."""
    for name, runs in emulated.items():
        assert all((run["tasks"] > 0) == (name != "nothing_selected") for run in runs)
        assert all(math.isfinite(error) for run in runs for error in run["errors"])


# On the card.


def find_kernel(ratio: int, dq_accumulation: str) -> Any:
    """The kernel for the card, as ``run_backward`` finds it, from disk if it is there."""
    from msa_vendored.backward.stages import compile_main_sm90
    from msa_vendored.compiling import load_kernel

    return load_kernel(compile_main_sm90, arch="sm_90a", ratio=ratio, dq_accumulation=dq_accumulation, gradients="all")


def run_on_card(dq_accumulation: str = "fp32", **problem: Any) -> tuple[list[float], tuple[torch.Tensor, ...]]:
    """Relative errors of dq, dk, dv, and these, of one call with one CTA a multiprocessor."""
    from backward_sm90 import prepare_call

    operands = make_problem(**{"kv_heads": 4, "ratio": 16, "topk": 4, "device": "cuda", **problem})
    grid = torch.cuda.get_device_properties(0).multi_processor_count
    call = prepare_call(operands, dq_accumulation=dq_accumulation, grid=grid, rows_per_chunk=16)
    find_kernel(operands.ratio, dq_accumulation)(*call.arguments())
    torch.cuda.synchronize()
    assert operands.gradients is not None
    gradients = call.gradients()
    return [relative_error(a, b) for a, b in zip(gradients, operands.gradients, strict=True)], gradients


MIXED_DOCUMENTS = (127, 129, 1, 2, 3, 5, 128, 700)


@pytest.mark.gpu
@pytest.mark.parametrize("dq_accumulation", ["fp32", "fp16", "bf16"])
def test_packed_documents_on_the_card(dq_accumulation: str) -> None:
    """Documents of one token, of a whole block and of one more, whose padding keys hold NaN."""
    errors, _ = run_on_card(dq_accumulation, lengths=MIXED_DOCUMENTS)
    assert max(errors) <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dq_accumulation", ["fp32", "fp16", "bf16"])
def test_fresh_inputs_on_the_card(dq_accumulation: str, seed: int) -> None:
    """A race between warps shows as an error that moves with the inputs; 16 of 20 blocks selected."""
    errors, _ = run_on_card(dq_accumulation, lengths=(2500,), topk=16, seed=seed)
    assert max(errors[1:]) <= TOLERANCE
    assert errors[0] <= (SUM_TOLERANCE_16 if dq_accumulation == "bf16" else TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [8, 4, 2, 1])
def test_head_ratios_on_the_card(ratio: int) -> None:
    """Below 8 heads a task's TMA boxes are narrower than the swizzle: the card may place them otherwise."""
    for dq_accumulation in ("fp16", "fp32" if ratio in (2, 1) else "bf16"):
        errors, _ = run_on_card(dq_accumulation, lengths=(300, 77, 1), ratio=ratio)
        assert max(errors) <= TOLERANCE


@pytest.mark.gpu
def test_hot_block_and_blocks_that_nobody_selects_on_the_card() -> None:
    """Every CTA adds to one key block; all other blocks must stay exactly zero."""
    selection = torch.full((4, 1500, 4), -1, dtype=torch.int32, device="cuda")
    selection[:, :, 0] = 0
    errors, (_, dk, dv) = run_on_card(lengths=(1500,), selection=selection)
    assert max(errors) <= TOLERANCE
    assert not dk[128:].any()
    assert not dv[128:].any()


@pytest.mark.gpu
def test_rows_without_a_finite_lse_on_the_card() -> None:
    """exp(S + inf) would be infinite and the gradients of 128 rows NaN."""
    dead = [(0, 0, -math.inf), (1, 63, math.inf), (2, 17, math.nan)]
    errors, (dq, _, _) = run_on_card(lengths=(300,), dead_rows=dead)
    assert max(errors) <= TOLERANCE
    assert not any(dq[token, head].any() for token, head, _ in dead)


@pytest.mark.gpu
@pytest.mark.parametrize("dq_accumulation", ["fp32", "fp16"])
@pytest.mark.parametrize("grad_scale", [1e-6, 1e4])
def test_scale_of_gradients_on_the_card(grad_scale: float, dq_accumulation: str) -> None:
    """Sums that flush or overflow at the edges of a narrow type."""
    errors, _ = run_on_card(dq_accumulation, lengths=(300,), grad_scale=grad_scale)
    assert max(errors) <= TOLERANCE
