"""The CUDA compiler that MSA will run: where it is, which release it is, which targets it accepts.

The patched ``jit.py`` imports this module. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msa_vendored.errors import MSAVendoredError

MIN_SM103A_NVCC = (12, 9)
"""First release whose assembler knows sm_103a: ptxas 12.9.41 accepts it, 12.8.93 says that it is not defined."""

SM103A_FLAG = "-gencode=arch=compute_103a,code=sm_103a"

NVCC_TIMEOUT_S = 30.0
"""``nvcc --version`` takes 5 ms from a warm page cache; a wrapper on a network file system may take seconds."""

_RELEASE = re.compile(r"\brelease (\d+)\.(\d+)\b")
_FORWARDER = re.compile(rb"""(?:exec\s+)?(/[^\s"'$`\\;&|<>*?()]+)\s+"\$@"\s*;?""")
_COMPANIONS = ("nvcc.profile", "ptxas", "fatbinary", "cudafe++", "cicc", "../nvvm/bin/cicc")
_EDGE_BYTES = 65_536
_MAX_FORWARDS = 8

_reports: dict[str, str] = {}
_reports_lock = threading.Lock()


class ToolchainError(MSAVendoredError):
    """An nvcc that is there does not say which release it is."""


def find_cuda_home() -> str | None:
    """The toolkit root that MSA takes: ``CUDA_HOME``, the nvcc on ``PATH``, ``/usr/local/cuda``, ``/opt/cuda``.

    Returns:
        The root, or None where MSA raises because it finds none.
    """
    if "CUDA_HOME" in os.environ:
        return os.environ["CUDA_HOME"]
    if on_path := shutil.which("nvcc"):
        return str(Path(on_path).resolve().parent.parent)
    return next((root for root in ("/usr/local/cuda", "/opt/cuda") if Path(root).is_dir()), None)


def find_nvcc() -> str | None:
    """The nvcc that MSA will run, or None if MSA finds no toolkit or the toolkit has no nvcc that can be executed."""
    home = find_cuda_home()
    return None if home is None else nvcc_of(home)


def nvcc_of(cuda_home: str) -> str | None:
    """``<cuda_home>/bin/nvcc`` if it is a file that can be executed."""
    nvcc = Path(cuda_home) / "bin" / "nvcc"
    return str(nvcc) if nvcc.is_file() and os.access(nvcc, os.X_OK) else None


def nvcc_report(nvcc: str) -> str:
    """What ``nvcc --version`` prints; run once per path in a process, however many threads ask.

    Raises:
        FileNotFoundError: there is no such file.
        ToolchainError: it cannot be run, fails, or does not answer within :data:`NVCC_TIMEOUT_S`.
    """
    with _reports_lock:
        if nvcc not in _reports:
            _reports[nvcc] = _run_nvcc(nvcc)
        return _reports[nvcc]


def nvcc_release(nvcc: str) -> tuple[int, int]:
    """Release of an nvcc, such as ``(12, 9)``; see :func:`nvcc_report` for what it runs and raises.

    Raises:
        ToolchainError: also if the answer names no release.
    """
    report = nvcc_report(nvcc)
    if (found := _RELEASE.search(report)) is None:
        raise _error(nvcc, "text with 'release X.Y'", repr(report[-200:]))
    return int(found[1]), int(found[2])


def sm103a_flags(cuda_home: str) -> tuple[str, ...]:
    """The nvcc flags for the target sm_103a: one, or none where the toolkit is too old to know it.

    Args:
        cuda_home: what MSA's own search for the toolkit returned.

    Returns:
        ``(SM103A_FLAG,)`` for nvcc 12.9 and later, ``()`` for an older one. If there is no nvcc the flag stays, so that
        the failure is MSA's own, which names the file that it could not run.

    Raises:
        ToolchainError: an nvcc is there and does not say which release it is.
    """
    nvcc = nvcc_of(cuda_home)
    if nvcc is None or nvcc_release(nvcc) >= MIN_SM103A_NVCC:
        return (SM103A_FLAG,)
    return ()


def fingerprint_nvcc(nvcc: str) -> str:
    """12 hex digits that identify the compiler behind ``nvcc``, without running it if that can be avoided.

    A binary is identified by its bytes (30 MB in CUDA 13.0, 0.1 s, once a process) and by size and edges of the
    programs beside it that it calls, since pip installs them from separate distributions. A script that does nothing
    but forward to one absolute path is identified by that path's file. What any other script, or a compiler cache
    under the name of nvcc, runs depends on variables and ``PATH``, so it is asked for its version, once a process.

    Raises:
        FileNotFoundError: there is no such file.
        ToolchainError: it has to be asked and does not answer.
    """
    digest = hashlib.sha256()
    for part in _identify(Path(nvcc), _MAX_FORWARDS):
        digest.update(part + b"\n")
    return digest.hexdigest()[:12]


def _identify(called_as: Path, forwards: int) -> Iterator[bytes]:
    path = called_as.resolve(strict=True)
    status = path.stat()
    yield _digest_file(path, status.st_size, status.st_mtime_ns)
    with path.open("rb") as file:
        is_script = file.read(2) == b"#!"
    target = _forward_target(path.read_bytes()) if is_script else None
    if target is not None and forwards and target.exists():
        yield from _identify(target, forwards - 1)
    elif is_script or not path.name.startswith("nvcc"):
        yield nvcc_report(str(called_as)).encode()
    else:
        yield from _identify_companions(path.parent)


def _forward_target(script: bytes) -> Path | None:
    lines = [line.strip() for line in script.splitlines()]
    code = [line for line in lines if line and not line.startswith(b"#")]
    found = _FORWARDER.fullmatch(code[0]) if len(code) == 1 else None
    return Path(os.fsdecode(found[1])) if found else None


def _identify_companions(folder: Path) -> Iterator[bytes]:
    """Size and both edges: an ELF file's headers are at its start, its section table at its end."""
    for name in _COMPANIONS:
        try:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                edges = file.read(_EDGE_BYTES)
                file.seek(max(0, size - _EDGE_BYTES))
                edges += file.read(_EDGE_BYTES)
        except OSError:
            continue
        yield f"{name} {size} {hashlib.sha256(edges).hexdigest()}".encode()


@lru_cache(maxsize=16)
def _digest_file(path: Path, size_bytes: int, mtime_ns: int) -> bytes:
    """Size and time are arguments only to make a replaced file another cache entry."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()


def _run_nvcc(nvcc: str) -> str:
    try:
        result = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, errors="replace", timeout=NVCC_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise
    except subprocess.TimeoutExpired as error:
        raise _error(nvcc, f"an answer within {NVCC_TIMEOUT_S:g} s", "none") from error
    except OSError as error:
        raise _error(nvcc, "a program that can be run", str(error)) from error
    if result.returncode:
        raise _error(nvcc, "exit status 0", f"{result.returncode}: {result.stderr.strip()[-200:]}")
    return result.stdout


def _error(nvcc: str, expected: str, got: str) -> ToolchainError:
    return ToolchainError(
        "nvcc does not say which release it is",
        where=nvcc,
        expected=expected,
        got=got,
        next_command=f"{nvcc} --version",
    )
