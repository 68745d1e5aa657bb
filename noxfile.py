"""Sessions of msa_vendored: ``nox -s build`` makes and proves the wheel, ``nox -s tests`` tests what it installed.

The work is in ``msa_vendored/vendoring``; each session only sets up an environment and calls it. Arguments after
``--`` go to the command: ``nox -s build -- --pin minimax-e2ebe765 --from ~/MSA``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "build", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
BUILD_REQUIRES = PROJECT["build-system"]["requires"]

DSL_VERSIONS = sorted(
    {pin["tested_with"]["nvidia-cutlass-dsl"] for pin in nox.project.load_toml("third_party/msa.lock.toml")["pins"]}
)
"""Versions of CuTe DSL that the pins were tested with."""

# A process a core, up to 8 for the memory's sake; a file stays in one, so that its fixtures compile each kernel once.
# The order is that of conftest.py. Not loadgroup: with pytest 9.2, xdist 3.8.0 ignores the groups without a word.
IN_PARALLEL = ("-n", "logical", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder")

# Keeps the current folder off sys.path, in subprocesses of the tests too: the checkout has no patched tree.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def run_vendoring(session: nox.Session, command: str, *arguments: str) -> None:
    """Run one command of the build-time tools from the checkout."""
    session.run("python", "-m", "msa_vendored.vendoring", command, *arguments, *session.posargs)


def install_group(session: nox.Session, name: str, *options: str) -> None:
    """Install one dependency group of pyproject.toml, so that versions stand in one place."""
    session.install(*options, *nox.project.dependency_groups(PROJECT, name))


def install_test_environment(session: nox.Session) -> None:
    """Install what the tests import; no msa_vendored yet."""
    install_group(session, "test")
    install_group(session, "test-no-deps", "--no-deps")


def install_wheel(session: nox.Session) -> None:
    """Build the wheel of this checkout and install it; a warm build takes two seconds, a stale wheel hides errors."""
    folder = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    # run_install: with --install-only too, else there would be nothing to install; with -R neither.
    session.run_install("python", "-m", "msa_vendored.vendoring", "build", "--out", str(folder))
    for wheel in folder.glob("*.whl"):
        session.install("--no-deps", "--no-index", "--force-reinstall", str(wheel))


@nox.session(reuse_venv=True)
def vendor(session: nox.Session) -> None:
    """Put the pinned MSA into third_party/msa/<pin>/ [-- --pin ID] [--from WHAT] [--offline] [--refresh]."""
    run_vendoring(session, "vendor")


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Vendor, verify, patch, rewrite, build the wheel, install it in an empty environment, prove it.

    The environment is made for this run alone: a stale one would hide a missing requirement, and two runs at once
    would delete each other's.
    """
    with tempfile.TemporaryDirectory(prefix="msa-vendored-build-") as folder:
        session.run(sys.executable, "-m", "venv", folder)
        python = str(Path(folder) / "bin" / "python")
        session.run(python, "-m", "pip", "install", "--quiet", *BUILD_REQUIRES)
        session.run(python, "-m", "msa_vendored.vendoring", "build", *session.posargs)


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Build the wheel, install it with what it needs, and test it [-- pytest arguments; -n 0: one process]."""
    install_test_environment(session)
    install_wheel(session)
    session.run("pytest", "-m", "not gpu", *IN_PARALLEL, *session.posargs, env=SAFE_PATH)


@nox.session(reuse_venv=True)
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; fails where there is none."""
    install_test_environment(session)
    install_wheel(session)
    session.run("pytest", "-m", "gpu", *session.posargs, env=SAFE_PATH)


@nox.session(reuse_venv=True)
def sanitize(session: nox.Session) -> None:
    """Run every SM90 kernel under compute-sanitizer, which the CUDA toolkit brings [-- --only CASE --tools TOOLS]."""
    install_test_environment(session)
    install_wheel(session)
    env = {**SAFE_PATH, "PYTHONPATH": "tests"}
    session.run("python", "-m", "sanitize_kernels", *session.posargs, env=env)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measure on this GPU beside peers [-- arguments of ``python -m msa_vendored bench``]; [-- sm100 …] that script.

    Peers beside PyTorch's own are not installed here: ``nox -s bench --install-only``, then pip into its environment.
    """
    install_test_environment(session)
    install_group(session, "bench")
    install_wheel(session)
    if session.posargs[:1] == ["sm100"]:
        session.run("python", "benchmarks/sm100.py", *session.posargs[1:], env=SAFE_PATH)
        return
    session.run("python", "-m", "msa_vendored", "bench", *session.posargs, env=SAFE_PATH)


@nox.session(reuse_venv=True)
def verify(session: nox.Session) -> None:
    """Report all drift in lock, patches and trees [-- --red-green [--patch NAME]]: each patch's test both ways."""
    session.install(*BUILD_REQUIRES)
    if "--red-green" in session.posargs:
        install_test_environment(session)
    run_vendoring(session, "verify")


@nox.session(reuse_venv=True)
def lock(session: nox.Session) -> None:
    """Write the digests of the patches into third_party/msa.lock.toml, after a reviewed change of a patch."""
    session.install(*BUILD_REQUIRES)
    run_vendoring(session, "lock")


@nox.session(reuse_venv=True)
def rebase(session: nox.Session) -> None:
    """Move the patches to another pin [-- --to WHAT | --continue | --skip PATCH | --abort]: see docs/upgrade.md."""
    session.install(*BUILD_REQUIRES)
    run_vendoring(session, "rebase")


@nox.session(reuse_venv=True)
def patch(session: nox.Session) -> None:
    """Make, refresh, drop or list patches [-- new NAME | refresh NAME | drop NAME | list]: see docs/upgrade.md."""
    session.install(*BUILD_REQUIRES)
    run_vendoring(session, "patch")


@nox.session(reuse_venv=True)
@nox.parametrize("dsl", DSL_VERSIONS)
def kernels(session: nox.Session, dsl: str) -> None:
    """Compile our kernels for three architectures with each DSL that a pin wants; fail on spills and other limits.

    [-- --only NAME]: part of the stage's name. ``nox -s "kernels(dsl='4.6.2')"`` takes one version.
    """
    install_group(session, "test")
    session.install(f"nvidia-cutlass-dsl=={dsl}")
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        session.run("python", "-m", "msa_vendored.kernel_report", "--arch", arch, *session.posargs)


def run_emulator_module(session: nox.Session, module: str, default: str) -> None:
    """Run a command of tests/ptx_emulator against the built wheel, with the static verifier at hand."""
    install_test_environment(session)
    install_group(session, "second-opinion", "--no-deps")
    install_wheel(session)
    env = {**SAFE_PATH, "PYTHONPATH": str(Path("tests").resolve())}
    session.run("python", "-m", f"ptx_emulator.{module}", *(session.posargs or [default]), env=env)


@nox.session(reuse_venv=True)
def mutate(session: nox.Session) -> None:
    """Delete each synchronisation of a kernel in turn; fails below 90 % caught or shown redundant [-- KERNEL|all]."""
    run_emulator_module(session, "mutate", "forward")


@nox.session(reuse_venv=True)
def sentry(session: nox.Session) -> None:
    """Ask SentryWard, a static verifier, about small cases of kernels and about mutants of them [-- KERNEL|all]."""
    run_emulator_module(session, "sentry", "all")


@nox.session(reuse_venv=True)
def speed(session: nox.Session) -> None:
    """Print the emulator's table of instructions and seconds [-- KERNEL|all]."""
    run_emulator_module(session, "speed", "all")


@nox.session(reuse_venv=True)
def repro(session: nox.Session) -> None:
    """Build twice under different umask, folder, time zone and locale; the wheels must be equal byte for byte."""
    session.install(*BUILD_REQUIRES)
    run_vendoring(session, "repro")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style, formatting and types; [-- --fix] repairs what ruff can."""
    install_group(session, "lint")
    fix = ["--fix"] if "--fix" in session.posargs else []
    session.run("ruff", "check", *fix, ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("mypy")


@nox.session(reuse_venv=True)
def clean_tree(session: nox.Session) -> None:
    """Fail if a session left anything in the checkout that git would show."""
    status = session.run("git", "status", "--porcelain", external=True, silent=True)
    if status:
        session.error(f"the checkout is not clean:\n{status}")
