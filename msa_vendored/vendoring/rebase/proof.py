"""After a rebase: run what the build runs, and compile the forward under the DSL that the new pin wants.

The compiler has an environment of its own below ``build/``, since two pins want two versions of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_vendored.errors import MSAVendoredError
from msa_vendored.vendoring.built import build_tree
from msa_vendored.vendoring.errors import CheckError
from msa_vendored.vendoring.lock import Pin
from msa_vendored.vendoring.locks import hold_lock
from msa_vendored.vendoring.pipeline import Checkout, build_wheel, prove_wheel, read_checkout
from msa_vendored.vendoring.vendor import vendor_pin

COMPILE_TIMEOUT_S = 600.0
"""The forward takes 4 s to compile on two idle cores; the first import of torch and the DSL may take a minute."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was run, whether it passed, and what it found."""

    name: str
    ok: bool
    detail: str

    def to_line(self) -> str:
        """One line for people."""
        return f"{'pass' if self.ok else 'FAIL'}  {self.name}: {self.detail}"


def run_checks(
    root: Path, pin_id: str, extras: Mapping[str, tuple[str, ...]], *, offline: bool, report: Callable[[Check], None]
) -> list[Check]:
    """Run every check for a pin of the checkout; the first that fails ends it, since each needs the one before.

    Args:
        root: the checkout.
        pin_id: the pin.
        extras: extras to install with the distributions of ``tested_with``, such as ``cu13`` with the DSL.
        offline: fetch no sources; the environment of the compiler is installed by pip all the same.
        report: told of each check as it is done.

    Side effects:
        Writes ``third_party/msa/<pin>/`` and below ``build/``; the wheel stays in ``build/rebase/dist/``.
    """
    proof = _Proof(read_checkout(root, pin_id), extras, offline)
    steps = {
        "pristine tree": proof.vendor,
        "patched tree": proof.build,
        "wheel": proof.make_wheel,
        "environment": proof.install,
        "kernels()": proof.bind,
        "forward for sm_100a": proof.compile_forward,
    }
    checks: list[Check] = []
    for name, step in steps.items():
        try:
            checks.append(Check(name, True, step()))
        except MSAVendoredError as error:
            checks.append(Check(name, False, str(error)))
        report(checks[-1])
        if not checks[-1].ok:
            break
    return checks


@dataclass
class _Proof:
    """The checks of one pin; each returns what it found, and needs those above it to have been run."""

    checkout: Checkout
    extras: Mapping[str, tuple[str, ...]]
    offline: bool
    wheel: Path = Path()
    python: str = ""

    def vendor(self) -> str:
        pin, manifest = self.checkout.pin, self.checkout.manifest
        result = vendor_pin(pin, manifest, self.checkout.third_party, offline=self.offline)
        return f"{len(manifest)} files, {pin.tree_digest}{', reused' if result.reused else ''}"

    def build(self) -> str:
        here = self.checkout
        pristine = here.third_party / "msa" / here.pin.id
        built = build_tree(here.pin, pristine, here.manifest, here.patches, here.build / "trees")
        return f"{len(here.patches)} patches applied, {built.package}"

    def make_wheel(self) -> str:
        root, pin_id = self.checkout.root, self.checkout.pin.id
        out = self.checkout.build / "rebase" / "dist"
        shutil.rmtree(out, ignore_errors=True)
        self.wheel = build_wheel(root, out, pin_id=pin_id, source=None, offline=True)
        prove_wheel(root, self.wheel, pin_id=pin_id)
        return f"{self.wheel.name}, installed alone and verified file by file"

    def install(self) -> str:
        pin = self.checkout.pin
        self.python = str(prepare_environment(self.checkout.root, pin, self.extras) / "bin" / "python")
        _run(_pip(self.python), "install", "--no-deps", "--no-index", "--force-reinstall", str(self.wheel))
        return ", ".join(f"{name} {version}" for name, version in pin.tested_with.items())

    def bind(self) -> str:
        _run([self.python, "-I", "-c", "import msa_vendored; msa_vendored.kernels()"])
        return "the five launchers are bound"

    def compile_forward(self) -> str:
        output = _run([self.python, "-I", "-m", "msa_vendored.offline_compile", "--arch", "sm_100a"])
        report = json.loads(output.splitlines()[-1])
        return f"head ratio 16, {report['ptx_bytes']:,} bytes of PTX, {report['cubin_bytes']:,} of cubin"


def prepare_environment(root: Path, pin: Pin, extras: Mapping[str, tuple[str, ...]]) -> Path:
    """A virtual environment with what the launchers of ``pin`` need, made once a set of versions.

    Raises:
        CheckError: pip could not install it.
        BusyError: another process is making it.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    whole, alone = list_requirements(project, pin.tested_with, extras)
    key = hashlib.sha256("\n".join([sys.version, *whole, *alone]).encode()).hexdigest()[:12]
    home = root / "build" / "compile-env"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{pin.id}-{key}"
    with hold_lock(home / f".{folder.name}.lock", timeout_s=COMPILE_TIMEOUT_S, purpose="installing the compiler"):
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=False, symlinks=True)
            pip = _pip(str(folder / "bin" / "python"))
            _run(pip, "install", *whole)
            _run(pip, "install", "--no-deps", *alone)
            (folder / "complete").touch()
    return folder


def list_requirements(
    project: Mapping[str, Any], tested_with: Mapping[str, str], extras: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], list[str]]:
    """What to install, and what to install without dependencies: the test environment of pyproject.toml.

    The versions of ``tested_with`` take the place of those that the groups name for the default pin.
    """
    groups: Mapping[str, list[str]] = project["dependency-groups"]
    whole, alone = ([_pinned(item, tested_with, extras) for item in groups[name]] for name in ("test", "test-no-deps"))
    return whole, alone


def _pinned(item: str, tested_with: Mapping[str, str], extras: Mapping[str, tuple[str, ...]]) -> str:
    name = _name_of(item)
    if name not in tested_with:
        return item
    wanted = f"[{','.join(extras[name])}]" if extras.get(name) else ""
    return f"{name}{wanted}=={tested_with[name]}"


def _name_of(requirement: str) -> str:
    match = _NAME.match(requirement)
    return match[0].lower().replace("_", "-") if match else requirement


def _pip(python: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check", "--no-input"]


def _run(command: list[str], *more: str) -> str:
    """Run a command; its output, or CheckError with the end of what it wrote."""
    command = [*command, *more]
    # The DSL writes CUTE_DSL_LIBS into its process; a child with another DSL would load the library of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=COMPILE_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError("a check did not end", where=" ".join(command), got=str(error)) from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise CheckError("a check failed", where=" ".join(command), got="\n    ".join(["", *lines[-12:]]))
    return done.stdout
