"""Our own CuTe DSL kernels, compiled once: per process, and per host through a folder of exported objects.

A kernel module exposes ``compile_<stage>(*, arch, **structural_options)``, which calls ``cute.compile`` on fake tensors
and returns the result. A launcher never calls it directly but through :func:`load_kernel`, which compiles a given
(function, architecture, options) at most once in a process and looks for it on disk first. What is on disk is the
object file that the DSL exports, loaded by the DSL's own linker: no compiler, linker or Python version is involved, and
loading takes milliseconds instead of seconds.

The folder is ``MSA_VENDORED_KERNEL_CACHE`` if set, else ``msa_vendored/kernels`` below ``XDG_CACHE_HOME`` or
``~/.cache``; ``off`` switches it off. Whoever can write to it decides what code this process runs, as with every cache
of compiled code. If it cannot be written, a :class:`KernelCacheWarning` says so once and the kernel that was just
compiled is used from memory: the same code, compiled again by the next process.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from msa_vendored.caches import describe_dsl, hold_flock

CACHE_VARIABLE = "MSA_VENDORED_KERNEL_CACHE"
"""Environment variable that names the folder of compiled kernels, or is ``off``."""

KERNEL_SOURCES = ("backward/**/*.py", "hopper/**/*.py", "compiling.py")
"""Files of this package that make kernels. A change of any of them renames every entry: helpers are shared."""

ABANDONED_AFTER_S = 86_400.0

_MAGIC = b"msa_vendored-k1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size

Kernel = Callable[..., Any]
"""A compiled launcher: positional arguments only, on the stream that TVM-FFI takes from torch."""


class KernelCacheWarning(RuntimeWarning):
    """The folder of compiled kernels cannot be used, or an entry in it had to be made again."""


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What tells one compiled kernel of this version from another.

    Attributes:
        name: qualified name of its ``compile_<stage>``, without the package.
        arch: architecture it is compiled for, such as ``"sm_100a"``.
        options: structural options as JSON, sorted by name: text, because ``True == 1``.
    """

    name: str
    arch: str
    options: str

    def describe(self) -> str:
        """All that the object depends on, as JSON; equal texts mean interchangeable objects."""
        return json.dumps(
            {
                "name": self.name,
                "arch": self.arch,
                "options": self.options,
                "sources": digest_sources(),
                "dsl": describe_dsl(),
            },
            separators=(",", ":"),
        )

    def file_name(self, description: str) -> str:
        """``<stage>-<arch>-<sources>-<everything>.o``; the last two are 12 hexadecimal digits each."""
        stage = self.name.rpartition(".")[2].removeprefix("compile_")
        return f"{stage}-{self.arch}-{digest_sources()[:12]}-{_digest(description)[:12]}.o"


_by_call: dict[tuple[Any, ...], Kernel] = {}
"""Kernels by what a launcher passes: found in a microsecond, as it asks for each at every call."""
_loaded: dict[KernelKey, Kernel] = {}
_locks: dict[KernelKey, threading.Lock] = {}
_registry_lock = threading.Lock()
_compiler_lock = threading.RLock()
"""The DSL keeps the options of the compilation in progress in a global object, so compilations take turns."""


def load_kernel(compile_stage: Callable[..., Any], *, arch: str, **options: str | int | bool) -> Kernel:
    """The kernel that ``compile_stage(arch=arch, **options)`` makes: from memory, from disk, or compiled now.

    Thread-safe; threads that ask for one kernel at once compile it once, and so do processes that share the folder.
    A failure is raised and not remembered.

    Args:
        compile_stage: a function of a module below this package that calls ``cute.compile`` with
            :func:`compile_options` and returns the result. No size may be among what it compiles in.
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        **options: the other keyword arguments of ``compile_stage``; part of the key, as they are.

    Returns:
        The launcher. Call it with positional arguments only: an object from disk knows no names.

    Raises:
        Exception: whatever ``compile_stage`` raises.

    Side effects:
        Writes one file, and one lock file beside it, in the folder of compiled kernels.
    """
    call = (compile_stage, arch, *((name, type(value), value) for name, value in options.items()))
    if (kernel := _by_call.get(call)) is None:
        kernel = _by_call[call] = _get_kernel(compile_stage, arch, options)
    return kernel


def _get_kernel(compile_stage: Callable[..., Any], arch: str, options: dict[str, str | int | bool]) -> Kernel:
    name = f"{compile_stage.__module__}.{compile_stage.__qualname__}".removeprefix(f"{__package__}.")
    key = KernelKey(name, arch, json.dumps(options, sort_keys=True))
    with _registry_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _loaded:
            _loaded[key] = _find_or_build(key, lambda: compile_stage(arch=arch, **options))
        return _loaded[key]


def forget_kernels() -> None:
    """Forget what is loaded, so that the next call looks on disk again; for tests. Running launches are unaffected."""
    with _registry_lock:
        _by_call.clear()
        _loaded.clear()
        digest_sources.cache_clear()


def compile_options(arch: str, *more: str) -> str:
    """The ``options`` string for ``cute.compile``: TVM-FFI calling convention, and ``arch`` whatever the DSL's own."""
    return " ".join(("--enable-tvm-ffi", f"--gpu-arch {arch}", *more))


def kernel_cache_folder() -> Path | None:
    """Where compiled kernels are kept, None if that is switched off. Creates nothing."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msa_vendored" / "kernels"


@lru_cache(maxsize=1)
def digest_sources() -> str:
    """SHA-256 over names and contents of :data:`KERNEL_SOURCES`, in hexadecimal."""
    root = Path(__file__).resolve().parent
    total = hashlib.sha256()
    for path in sorted(path for pattern in KERNEL_SOURCES for path in root.glob(pattern)):
        content = path.read_bytes()
        total.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def _find_or_build(key: KernelKey, build: Callable[[], Kernel]) -> Kernel:
    folder = kernel_cache_folder()
    if folder is None:
        return _compile(build)
    description = key.describe()
    path = folder / key.file_name(description)
    if (kernel := _load_entry(path, description)) is not None:  # before the lock: the folder may be read-only
        return kernel
    with _hold_entry(path) as writable:
        if writable and (kernel := _load_entry(path, description)) is not None:
            return kernel
        compiled = _compile(build)
        if writable and _store_entry(path, description, compiled):
            # What the next process will run is what this one runs.
            return _load_entry(path, description) or compiled
        return compiled


@contextmanager
def _hold_entry(path: Path) -> Iterator[bool]:
    """Hold the lock of an entry; gives False, after a warning, where no lock can be had."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_flock(path.with_suffix(".lock")))
        except OSError as error:
            _warn(f"the folder of compiled kernels cannot be written, {path.name} serves this process only: {error}")
            yield False
        else:
            yield True


def _compile(build: Callable[[], Kernel]) -> Kernel:
    with _compiler_lock:
        return build()


def _store_entry(path: Path, description: str, compiled: Any) -> bool:
    """Export to a private file, seal it, rename it: a reader sees a whole entry or none. False if the disk refuses."""
    # Not the process id: containers that share the folder have the same ones, and not always each other's locks.
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.o")
    try:
        _remove_abandoned(path)
        with _compiler_lock:
            compiled.export_to_c(str(partial), function_name=_function_name(description))
        content = partial.read_bytes()
        partial.write_bytes(content + _seal(content, description))
        partial.replace(path)
    except OSError as error:
        _warn(f"{path} cannot be written, the kernel serves this process only: {error}")
        return False
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return True


def _remove_abandoned(path: Path) -> None:
    """Delete private files of an entry whose writers were killed: a kernel takes seconds, these are a day old."""
    for partial in path.parent.glob(f".{path.stem}.*.o"):
        with suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S:
                partial.unlink()


def _load_entry(path: Path, description: str) -> Kernel | None:
    """The kernel in an entry; None if there is none or it is damaged, which is said in a warning."""
    try:
        content = path.read_bytes()
    except OSError:
        return None  # if it is not merely missing, writing it says so
    size = len(content) - len(_seal(b"", description))
    if size <= 0 or content[size:] != _seal(content[:size], description):
        _warn(f"{path} is damaged; it is compiled again")
        return None
    import cutlass.cute as cute

    try:
        # The seal behind the object does not disturb the linker: an ELF file says itself where its parts are.
        kernel: Kernel = getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _function_name(description))
    except Exception as error:  # noqa: BLE001 - the DSL's linker raises RuntimeError and errors of its own
        _warn(f"{path} cannot be loaded ({error}); it is compiled again")
        return None
    return kernel


def _seal(content: bytes, description: str) -> bytes:
    digest = hashlib.sha256(content + description.encode()).digest()
    return description.encode() + digest + _MAGIC


def _function_name(description: str) -> str:
    """Symbol in the object; unique, so that objects in one process cannot take each other's."""
    return f"msa_vendored_{_digest(description)[:24]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _warn(message: str) -> None:
    warnings.warn(message, KernelCacheWarning, stacklevel=2)
