"""Compiles the interpreter on first use and caches it by the digest of everything that decides its code."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ptx_emulator.alu import FIRST_LANE_OP, generate_functions
from ptx_emulator.program import KIND_NUMBERS

CORE = Path(__file__).resolve().parent / "core"
# No contraction: PTX says which multiply-adds are fused. -march=native for the MMA loops; the digest covers the CPU.
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-w",
)
UNITS = {
    "alu": ("alu",),
    "matmul": ("matmul",),
    "warp": ("warp", "groups", "lanes", "memory", "atomics", "barriers", "copies"),
}
"""Files that are compiled together, in parallel with other units; what is not named here makes one unit more. A unit a
file would read the same headers, half a second each, seventeen times."""
UNIT_FLAGS = {"matmul": ("-ffp-contract=fast",)}  # none of PTX's own arithmetic is in there


class BuildError(Exception):
    """The interpreter cannot be compiled; the message has the command and what the compiler said."""


@lru_cache(maxsize=1)
def library_path() -> Path:
    """Path of the shared library; compiles it (half a minute) if the cache has none of these sources.

    Raises:
        BuildError: there is no C++ compiler, or it fails.
    """
    compiler = find_compiler()
    generated = {"alu.inc": generate_functions(), "kinds.inc": _kinds()}
    folder = cache_folder() / _digest(compiler, generated)
    library = folder / "libemulator.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # One process builds, the others wait; the rename makes a half-written library impossible either way.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            _compile(compiler, generated, library)
    return library


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME`` or ``~/.cache``, below it a folder of our own."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "msa_vendored" / "ptx_emulator"


def find_compiler() -> tuple[str, ...]:
    """``$CXX``, else the system's C++ compiler, else the one of the ``ziglang`` package.

    Raises:
        BuildError: none is there.
    """
    configured = os.environ.get("CXX")
    if configured:
        return tuple(configured.split())
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return (name,)
    if find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise BuildError("no C++ compiler: install g++ or clang++, or `pip install ziglang`")


def _digest(compiler: tuple[str, ...], generated: dict[str, str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (*compiler, version, *FLAGS, str(UNITS), str(UNIT_FLAGS), platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    for name, text in sorted({**generated, **{p.name: p.read_text("utf-8") for p in CORE.iterdir()}}.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _kinds() -> str:
    names = ",\n".join(f"  KIND_{name} = {number}" for name, number in KIND_NUMBERS.items())
    return f"#pragma once\nenum Kind {{\n{names}\n}};\nconstexpr s32 FIRST_LANE_KIND = {FIRST_LANE_OP};\n"


def _compile(compiler: tuple[str, ...], generated: dict[str, str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        work = Path(name)
        for file, text in generated.items():
            (work / file).write_text(text, encoding="utf-8")
        commands = []
        for unit, sources in _units().items():
            text = "".join(f'#include "{source}.cpp"\n' for source in sources)
            (work / f"unit_{unit}.cpp").write_text(text, encoding="utf-8")
            flags = (*FLAGS, *UNIT_FLAGS.get(unit, ()), f"-I{work}", f"-I{CORE}")
            commands.append([*compiler, *flags, "-c", str(work / f"unit_{unit}.cpp"), "-o", str(work / f"{unit}.o")])
        objects = [command[-1] for command in commands]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run_compiler, commands))
        target = work / library.name
        _run_compiler([*compiler, *FLAGS, "-shared", *objects, "-o", str(target)])
        target.replace(library)


def _units() -> dict[str, tuple[str, ...]]:
    named = {source for sources in UNITS.values() for source in sources}
    rest = sorted(path.stem for path in CORE.glob("*.cpp") if path.stem not in named)
    return {"rest": tuple(rest), **UNITS}


def _run_compiler(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
