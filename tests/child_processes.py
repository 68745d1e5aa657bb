"""Child processes of tests: an emulated run, as one process compiles for one architecture, and fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msa_vendored

TESTS = Path(__file__).resolve().parent
SITE = Path(msa_vendored.__file__).resolve().parents[1]


def run_module(
    module: str,
    *arguments: str,
    requests: Iterable[dict[str, Any]] = (),
    folder: Path | None = None,
    timeout_s: float = 600,
) -> list[dict[str, Any]]:
    """Run a module that lies beside the tests; the objects that it printed, one a line.

    Args:
        module: its name, for ``python -m``.
        arguments: its command line.
        requests: what it reads from its standard input, an object a line.
        folder: to run in; None is the current one.
        timeout_s: seconds after which it is killed.

    Raises:
        AssertionError: its exit status is not 0; with the end of its errors.
    """
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input="\n".join(json.dumps(request) for request in requests),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def evaluate_code(code: str, **environment: str) -> Any:
    """Run code in a fresh interpreter that imports the same msa_vendored as this one; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SITE), "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
