"""The whole backward in the emulator, through the real launcher: every stage that a GPU would run, on CPU tensors.

SM100 is emulated and race-checked, never executed on SM100 hardware. A child process per architecture, because the DSL
reads its target when it is imported. The error bound is 4e-3 against float64: P, dS and the results are rounded to bf16
(each up to 2^-9 = 2.0e-3); measured 2.2e-3 to 3.2e-3.
"""

from __future__ import annotations

from typing import Any

import pytest
from child_processes import run_module

TOLERANCE = 4e-3
LAUNCHES = ("sum_rows", "clear", "read_items", "check_rows", "scan_windows", "write_tables", "", "convert")
"""Device functions in order; the main kernel's name is its author's. On SM90, the largest keys come first."""

CROWDED = {"lengths": [260], "multiprocessors": 16, "resident_ctas": 16, "checked": False}
SCHEDULES = [["random", seed] for seed in (1, 2, 3)]

CASES: dict[str, dict[str, Any]] = {
    "documents": {"lengths": [130, 1, 5], "schedules": [["random", 3]]},
    "two key heads, fp32, another ratio and scale": {
        "lengths": [40],
        "key_heads": 2,
        "ratio": 4,
        "dq_accumulation": "fp32",
        "softmax_scale": 0.2,
    },
    "many CTAs at once": {**CROWDED, "schedules": SCHEDULES},
    "deterministic": {**CROWDED, "schedules": SCHEDULES[:2], "deterministic": True},
    "deterministic, checked": {"lengths": [40], "deterministic": True},
    "inconsistent": {"lengths": [40], "corrupt": "query"},
}


@pytest.fixture(scope="module", params=["sm_100a", "sm_90a"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """All cases on one architecture; each kernel is compiled once."""
    folder = tmp_path_factory.mktemp("backward")
    module = "ptx_emulator.backward_run"
    lines = iter(run_module(module, request.param, requests=CASES.values(), folder=folder, timeout_s=300))
    return {name: [next(lines) for _ in case.get("schedules", [0])] for name, case in CASES.items()}


@pytest.mark.parametrize("case", [name for name in CASES if name != "inconsistent"])
def test_gradients_agree_with_float64(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Guards the chain: arguments in another order, a pool read in another order, a table of another size, races."""
    for run in results[case]:
        assert run["findings"] == []
        assert max(run["errors"].values()) <= TOLERANCE
        assert run["outside"] == 0.0
        assert run["error_word"] == 0
        assert run["raised"] == ""


def test_deterministic_gradients_do_not_depend_on_who_comes_first(results: dict[str, list[dict[str, Any]]]) -> None:
    """Guards two CTAs that add to one sum; the same case without the option shows that the schedules differ enough."""
    assert len({run["digest"] for run in results["deterministic"]}) == 1
    assert len({run["digest"] for run in results["many CTAs at once"]}) > 1


def test_every_stage_was_launched_in_order(results: dict[str, list[dict[str, Any]]]) -> None:
    """Guards against a launch that the emulator never saw."""
    launches = results["documents"][0]["launches"]
    if "find_key_maxima" in launches[0]:
        launches = launches[1:]
    assert len(launches) == len(LAUNCHES)
    assert all(part in name for part, name in zip(LAUNCHES, launches, strict=True))


def test_an_inconsistent_schedule_is_reported_and_gives_no_numbers(results: dict[str, list[dict[str, Any]]]) -> None:
    """Guards silent zeros: a query position beyond its document leaves a row out."""
    (run,) = results["inconsistent"]
    assert run["findings"] == []
    assert set(run["errors"].values()) == {float("inf")}
    assert run["error_word"] == 34
    assert run["raised"] == "the query positions of a row do not ascend, or lie outside its document"
