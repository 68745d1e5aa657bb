"""The official forward and combine of the installed package, compiled for sm_100a, in the emulator.

Emulated and race-checked, never executed on SM100 hardware. A subprocess, because the DSL reads its target when it is
imported. Tolerances: O is rounded to bf16 (relative error 2^-9 = 2.0e-3) after bf16 partials and bf16 P, so 4e-3; the
LSE is float32 through ex2 and lg2, measured at most 1e-4, so 1e-3.
"""

from __future__ import annotations

from typing import Any

import pytest
from child_processes import run_module

SCHEDULES = [("eager", 0, True), ("lazy", 0, True), *(("random", seed, True) for seed in (1, 2, 3, 4))]
OUT_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3

CASES: dict[str, dict[str, Any]] = {
    "odd_lengths_topk4_many_tiles": {"query_lengths": [133, 61], "topk": 4, "sm_count": 1},
    "odd_lengths_topk16": {"query_lengths": [129, 37, 1], "topk": 16, "sm_count": 2},
    "padded_selection_more_keys_than_queries": {
        "query_lengths": [37, 90],
        "key_lengths": [300, 90],
        "topk": 4,
        "own_block": False,
        "sm_count": 1,
    },
    # Four heads a KV head: Q comes by gathers of four rows.
    "ratio4": {"query_lengths": [100, 60], "topk": 4, "ratio": 4, "sm_count": 1},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every case under every schedule; one process compiles the kernels once."""
    requests = [{**case, "schedules": SCHEDULES} for case in CASES.values()]
    folder = tmp_path_factory.mktemp("official")
    lines = run_module("ptx_emulator.official", requests=requests, folder=folder)
    count = len(SCHEDULES)
    return {name: lines[i * count : (i + 1) * count] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", range(len(SCHEDULES)), ids=lambda i: f"{SCHEDULES[i][0]}{SCHEDULES[i][1]}")
def test_forward_and_combine_agree_with_the_reference(
    results: dict[str, list[dict[str, Any]]], case: str, schedule: int
) -> None:
    """A patch or DSL that compiles to a wrong, hanging or racing kernel fails here, under one schedule or another."""
    run = results[case][schedule]
    assert run["findings"] == []
    assert run["nans"] == 0
    assert run["out_error"] <= OUT_TOLERANCE
    assert run["lse_error"] <= LSE_TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_all_four_kernels_ran(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    """A front that silently skips a launch would leave poisoned outputs or, worse, test nothing."""
    for run in results[case]:
        names = [launch["kernel"] for launch in run["launches"]]
        assert len(names) == 4
        for name, part in zip(
            names, ("PrepareFlatSchedule", "PrepareFwdSplit", "SparseAttentionForwardSm100", "Combine"), strict=True
        ):
            assert part in name
        assert run["launches"][2]["mma"] > 0


def test_the_known_findings_of_the_official_forward_are_still_seen(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    """docs/findings/ describes what is suppressed; if it is gone, the suppression has to go too."""
    seen = "\n".join(results["odd_lengths_topk4_many_tiles"][0]["suppressed"])
    assert "missing-tcgen05-wait" in seen
    assert "leftover-transactions" in seen
    assert "atten_fwd.py:" in seen
