"""Delta, task build and postprocess in the emulator, for sm_90a and sm_100a.

Emulated and race-checked, never executed on SM100 hardware; on an H200 see ``test_backward_stages_gpu.py``. A child
process for each architecture, because the DSL reads its target when it is imported. Everything is compared exactly.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from child_processes import run_module
from stage_runs import CHECKS, SM100_CHECKS


@lru_cache(maxsize=2)
def run_child(arch: str) -> dict[str, dict[str, Any]]:
    results = run_module("stage_runs", arch)
    return {result["name"]: result for result in results}


@pytest.mark.parametrize(
    ("arch", "name"), [*(("sm_90a", name) for name in CHECKS), *(("sm_100a", name) for name in SM100_CHECKS)]
)
def test_stages_equal_their_mirrors_without_a_finding(arch: str, name: str) -> None:
    """Wrong tables or gradients; races, uninitialised reads, accesses outside a tensor; tables beyond the last task."""
    result = run_child(arch)[name]
    assert result["error"] == ""
    assert result["instructions"] > 0
