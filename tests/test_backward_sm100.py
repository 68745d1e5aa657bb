"""The SM100 main backward kernel: its plans, and what it computes in the emulator.

Emulated and race-checked, never executed on SM100 hardware. Results are compared with float64 after rounding to bf16,
as the postprocess rounds them: that alone is 1.7e-3 of relative Frobenius error, and P and dS rounded to bf16 for the
tensor cores bring it to 2.3e-3 to 2.6e-3, hence 3e-3. dQ added up in bf16 grows with the number of blocks of a query.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_processes import run_module

from msa_vendored.backward import sm100_layout as plan

TESTS = Path(__file__).resolve().parent
TOLERANCE, BF16_DQ_TOLERANCE = 3e-3, 3.5e-3
DOCUMENTS = [127, 129, 1, 2, 3, 5, 128]
CHECKED = [("eager", 0, True), ("lazy", 0, True), ("random", 1, True), ("random", 2, True)]
ONE_RANDOM = [("eager", 0, True), ("random", 7, True)]

CASES: dict[str, dict[str, Any]] = {
    "documents_of_two_rows_one_cta": {"lengths": 2 * DOCUMENTS, "topk": 2, "ctas": 1, "schedules": CHECKED},
    "documents_any_selection_two_heads": {
        "lengths": DOCUMENTS, "key_heads": 2, "selection": "sparse", "ctas": 3, "chunk": 7, "schedules": CHECKED,
    },
    "top4_of_600_tokens": {
        "lengths": [600], "topk": 4, "ctas": 2, "chunk": 40,
        "schedules": [("eager", 0, True), ("lazy", 0, False), ("random", 5, False)],
    },
    "hot_block_tiny_gradient": {
        "lengths": [260, 70], "selection": "hot", "grad_scale": 1e-6, "chunk": 5, "schedules": ONE_RANDOM,
    },
    "hot_block_huge_gradient_and_bad_lse": {
        "lengths": [260, 70], "selection": "hot", "grad_scale": 1e4, "chunk": 5, "schedules": ONE_RANDOM,
        "bad_lse": [[3, 2, -math.inf], [77, 0, math.inf], [200, 5, math.nan], [261, 3, math.inf]],
    },
    "fp32_dq": {
        "lengths": DOCUMENTS, "accumulation": "fp32", "selection": "sparse", "chunk": 9, "schedules": ONE_RANDOM,
    },
    **{
        f"ratio_{ratio}": {
            "lengths": DOCUMENTS, "ratio": ratio, "key_heads": 2, "selection": "sparse", "chunk": 5,
            "schedules": ONE_RANDOM,
        }
        for ratio in (8, 4, 2, 1)
    },
    "ratio_2_fp32_dq": {
        "lengths": DOCUMENTS, "ratio": 2, "key_heads": 2, "accumulation": "fp32", "chunk": 5, "schedules": ONE_RANDOM,
    },
}  # fmt: skip


def run_cases(folder: Path, arch: str, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each case under each of its schedules, in one process."""
    lines = iter(run_module("sm100_backward", arch, requests=cases, folder=folder, timeout_s=900))
    return [[next(lines) for _ in case["schedules"]] for case in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every case under its schedules; one process compiles each variant once."""
    folder = tmp_path_factory.mktemp("sm100_backward")
    return dict(zip(CASES, run_cases(folder, "sm_100a", list(CASES.values())), strict=True))


def require_right(case: dict[str, Any], run: dict[str, Any]) -> None:
    """Within tolerance, exactly zero where nothing reaches, and without a finding."""
    assert run["findings"] == []
    assert run["nans"] == 0
    assert run["stray"] == 0
    bf16 = case.get("accumulation", "bf16") == "bf16"
    assert run["errors"]["dq"] <= (BF16_DQ_TOLERANCE if bf16 else TOLERANCE)
    assert run["errors"]["dk"] <= TOLERANCE
    assert run["errors"]["dv"] <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right_and_nothing_races(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """A wrong product, a lost or doubled reduction, a missing signal or fence: under one schedule or another.

    Padding rows of K and V are NaN in every case; a kernel that multiplies them by zero spreads them.
    """
    for run in results[name]:
        require_right(CASES[name], run)
        assert run["tasks"] >= 10
        assert run["segments"] >= 2


def test_instructions_stay_within_budget(results: dict[str, list[dict[str, Any]]]) -> None:
    """Code that grows unseen. Measured: 5,342 warp instructions a tile, 1,208 a segment, 514 a CTA (docs)."""
    run = results["top4_of_600_tokens"][0]
    assert run["instructions"] <= 5_700 * run["tasks"] + 1_500 * run["segments"] + 2 * 700


def test_confirmation_script_refuses_a_machine_without_a_gpu() -> None:
    """A script that prints times of another device, or passes where nothing ran."""
    script = TESTS.parent / "benchmarks" / "sm100.py"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "needs a GPU of compute capability 10.0 or 10.3, found no CUDA device\n"


def test_sm103_compiles_and_computes_the_same(tmp_path: Path) -> None:
    """An instruction or a layout that only sm_100a accepts."""
    case = {"lengths": [133, 3], "topk": 2, "ctas": 1, "schedules": ONE_RANDOM}
    for run in run_cases(tmp_path, "sm_103a", [case])[0]:
        require_right(case, run)


@pytest.mark.parametrize("ratio", plan.RATIOS)
def test_shared_memory_regions_do_not_overlap(ratio: int) -> None:
    """A region that runs into the next, or an operand off the 1024 bytes that its swizzle needs."""
    assert list(plan.Smem) == sorted(plan.Smem)
    for region, size in zip(plan.Smem, [32768, 32768, 65536, 65536, 32768, 1024, 1024, 256, 16], strict=False):
        following = min((start for start in plan.Smem if start > region), default=plan.smem_bytes(ratio))
        assert region + size <= following
        assert size < 32768 or region % 1024 == 0
    assert 8 * plan.BARRIERS <= 256
    assert plan.smem_bytes(ratio) <= plan.SMEM_LIMIT_BYTES


def test_barriers_have_their_places_and_arrivals() -> None:
    """Two barriers of one index, or a stage without a barrier of its own."""
    two = {"Q_FULL", "Q_EMPTY", "DO_FULL", "DO_EMPTY", "ROW_FULL", "ROW_EMPTY", "P_READY", "DS_READY"}
    taken = [barrier + stage for barrier in plan.Barrier for stage in range(2 if barrier.name in two else 1)]
    assert sorted(taken) == list(range(plan.BARRIERS))
    arrivals = plan.barrier_arrivals()
    assert all(arrivals[b] == arrivals[b + 1] for b in plan.Barrier if b.name in two)
    assert arrivals[plan.Barrier.DS_READY + 1] == plan.COMPUTE_WARPS
    assert arrivals[plan.Barrier.K_FULL] == 1


def test_tensor_memory_is_used_up_without_overlap() -> None:
    """Regions of 128 columns that overlap, or exceed what a CTA can have."""
    assert [int(column) for column in plan.Column] == [128 * i for i in range(4)]
    assert max(plan.Column) + 128 == plan.TMEM_COLUMNS


def test_registers_fit_the_file() -> None:
    """A setmaxnreg that waits for ever: more registers than the CTA was launched with, or than a sub-partition has.

    ptxas gives a kernel of n threads at most 65,536 / n registers a thread, rounded down to 8.
    """
    registers, threads = plan.PLAN.registers, plan.PLAN.threads
    launched = 65536 // threads // 8 * 8
    assert threads == 128 * len(registers)
    assert sum(registers) <= launched * len(registers) <= 512
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in registers)
    assert registers[plan.SERVICE_GROUP] <= launched <= min(registers[plan.COMPUTE_GROUP], registers[plan.REDUCE_GROUP])


def test_operand_offsets_are_a_bijection_that_the_swizzle_keeps() -> None:
    """Two elements of an operand at one place."""
    offsets = {plan.operand_offset(row, dim) for row in range(128) for dim in range(128)}
    assert offsets == set(range(0, plan.OPERAND_BYTES, 2))
    assert {plan.swizzle(offset) for offset in offsets} == offsets


def test_k_steps_start_where_their_elements_lie() -> None:
    """A product that multiplies the wrong sixteenth."""
    assert [plan.k_step_bytes(s, along_dims=True) for s in range(8)] == [
        plan.operand_offset(0, 16 * s) for s in range(8)
    ]
    assert [plan.k_step_bytes(s, along_dims=False) for s in range(8)] == [
        plan.operand_offset(16 * s, 0) for s in range(8)
    ]


def test_descriptors_have_the_bits_that_the_isa_asks() -> None:
    """A field in the wrong place (PTX ISA, tcgen05 matrix and instruction descriptors)."""
    rows, dims = plan.matrix_descriptor(along_dims=False), plan.matrix_descriptor(along_dims=True)
    assert (rows >> 16 & 0x3FFF) * 16 == plan.operand_offset(0, 64)
    assert (rows >> 32 & 0x3FFF) * 16 == (dims >> 32 & 0x3FFF) * 16 == plan.operand_offset(8, 0)
    assert rows >> 46 & 7 == 1
    assert rows >> 61 == 2
    assert rows & 0x3FFF == 0
    assert dims >> 16 & 0x3FFF == 1
    word = plan.instruction_descriptor(a_along_rows=True, b_along_rows=False)
    assert (word >> 4 & 3, word >> 7 & 7, word >> 10 & 7) == (1, 1, 1)
    assert (word >> 15 & 1, word >> 16 & 1) == (1, 0)
    assert ((word >> 17 & 63) * 8, (word >> 24 & 31) * 16) == (128, 128)


@pytest.mark.parametrize(
    ("ratio", "size", "group"),
    [(16, 2, 8), (8, 2, 8), (4, 2, 4), (2, 2, 2), (1, 2, 1), (16, 4, 4), (4, 4, 4), (2, 4, 2), (1, 4, 1)],
)
def test_head_groups_fill_16_bytes_where_they_can(ratio: int, size: int, group: int) -> None:
    """A dQ pool whose layout the postprocess does not read."""
    assert plan.head_group(ratio, size) == group
