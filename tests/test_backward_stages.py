"""Delta, task build and postprocess in the emulator, for sm_90a and sm_100a.

Emulated and race-checked, never executed on SM100 hardware; on an H200 see ``test_backward_stages_gpu.py``. A child
process for each architecture, because the DSL reads its target when it is imported. Everything is compared exactly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from stage_runs import CHECKS, SM100_CHECKS

TESTS = Path(__file__).resolve().parent


@lru_cache(maxsize=2)
def run_child(arch: str) -> dict[str, dict[str, Any]]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "stage_runs", arch],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result for result in results}


@pytest.mark.parametrize(
    ("arch", "name"), [*(("sm_90a", name) for name in CHECKS), *(("sm_100a", name) for name in SM100_CHECKS)]
)
def test_stages_equal_their_mirrors_without_a_finding(arch: str, name: str) -> None:
    """Wrong tables or gradients; races, uninitialised reads, accesses outside a tensor; tables beyond the last task."""
    result = run_child(arch)[name]
    assert result["error"] == ""
    assert result["instructions"] > 0
