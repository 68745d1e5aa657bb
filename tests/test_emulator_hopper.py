"""The SM90 index, score and selection kernels, compiled for sm_90a, in the emulator: results, races, fences.

Integers and small bf16 integers: every comparison is exact. Work space and results are poisoned before each launch.
"""

from __future__ import annotations

import pytest
from child_processes import run_module
from hopper_kernels import CASES, SCHEDULES


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What went wrong, by case and schedule; empty where nothing did. One process compiles each kernel once."""
    lines = run_module("hopper_kernels", folder=tmp_path_factory.mktemp("hopper"))
    return {(line["case"], str(tuple(line["schedule"]))): line["error"] for line in lines}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda pair: f"{pair[0]}{pair[1]}")
def test_kernels_agree_with_the_reference_and_are_clean(
    errors: dict[tuple[str, str], str], case: str, schedule: tuple[str, int]
) -> None:
    """Guards order within CSR rows, work items, masks at diagonals and document ends, ties, and every hand-over."""
    assert errors[case, str(schedule)] == ""
