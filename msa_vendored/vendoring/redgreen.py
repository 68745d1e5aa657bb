"""Red/green: each patch's ``Test:`` fails without the patch and passes with it.

For each patch a package is staged that has every other patch, and the patch's test runs against it; then all tests
run against the complete package. A red run counts only if pytest reports failed tests (not an error of
collection or usage) and the output contains the header's ``Fails-With``, so that a test which fails for another
reason is not taken for a guard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msa_vendored.vendoring.built import BuiltTree, build_tree
from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.pipeline import Checkout
from msa_vendored.vendoring.series import Patch

PYTEST_TESTS_FAILED = 1
"""pytest's exit status when tests were collected, ran, and some failed; 2 to 5 are errors of other kinds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one patch's test."""

    patch: str
    colour: str
    """``red``: without the patch; ``green``: with the whole series."""
    ok: bool
    """The run went as it should: failed as the header says, or passed."""
    detail: str

    def to_line(self) -> str:
        """One line for people."""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.colour:<5} {self.patch}: {self.detail}"


def stage_site(root: Path, built: BuiltTree, site: Path) -> None:
    """Lay out an importable copy of the package in ``site``: our modules of the checkout, and the built tree."""
    shutil.rmtree(site, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "_msa*", "_provenance.json")
    shutil.copytree(root / "msa_vendored", site / "msa_vendored", ignore=ignored)
    shutil.copytree(built.root / "msa_vendored", site / "msa_vendored", dirs_exist_ok=True)


def run_red_green(
    checkout: Checkout,
    pristine: Path,
    names: Sequence[str] = (),
    *,
    report: Callable[[Outcome], None],
    python: str = sys.executable,
) -> list[Outcome]:
    """Run the check for all patches, or for those named; needs the test environment's packages.

    ``report`` is called after each run, since the whole takes minutes. ``python`` is the interpreter of an
    environment that has the versions that the pin is tested with.

    Side effects:
        Writes below ``build/``; runs pytest in subprocesses.
    """
    chosen = [patch for patch in checkout.patches if not names or patch.name in names]
    outcomes = []
    for patch in chosen:
        for omit in (patch.name, None):
            outcomes.append(_run(checkout, pristine, patch, omit, python))
            report(outcomes[-1])
    return outcomes


def _run(checkout: Checkout, pristine: Path, patch: Patch, omit: str | None, python: str) -> Outcome:
    trees = checkout.build / "trees"
    try:
        built = build_tree(checkout.pin, pristine, checkout.manifest, checkout.patches, trees, omit=omit)
    except PatchError as error:
        if omit is None:
            raise
        # Without this patch there is no tree to test; that is red too, if it is the failure that the header names.
        return Outcome(patch.name, "red", patch.header.fails_with in error.what, f"no tree: {error.what}")
    site = checkout.build / "red-green" / (f"without-{omit}" if omit else "complete")
    stage_site(checkout.root, built, site)
    status, output = _run_test(checkout.root, patch.header.test, site, python)
    if omit is None:
        return Outcome(patch.name, "green", status == 0, _last_line(output))
    fails_with = patch.header.fails_with
    ok = status == PYTEST_TESTS_FAILED and fails_with in output
    missing = "" if fails_with in output else f"; the output does not contain {fails_with!r}"
    return Outcome(patch.name, "red", ok, f"pytest exit {status}: {_last_line(output)}{missing}")


def _run_test(root: Path, test: str, site: Path, python: str) -> tuple[int, str]:
    """Exit status and output of one test on the package in ``site``."""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "--no-header",
        test,
    ]
    # --import-mode=importlib keeps the checkout off sys.path; -P keeps the current folder off it.
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])  # ninja is looked for there
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "PATH": path}
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
