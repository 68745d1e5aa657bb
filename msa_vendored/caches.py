"""Where compiled kernels are kept: every name contains the sources, the compiler and the architecture.

MSA loads a compiled kernel whenever a file of the right name exists, and its names say nothing about the sources.
The patched MSA asks this module for its names. Three caches, three compilers:

- ``jit.py``: shared objects made by nvcc, one folder a kernel, below :func:`keyed_cache_folder`;
- ``aot_cache.py``: object files made by CuTe DSL; their names end with :func:`aot_cache_key`;
- two torch extensions, made by the nvcc that torch finds; their names begin with :func:`extension_name`.

Keys never contain paths or times, so that hosts of one kind can share a home directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_vendored.installed import provenance
from msa_vendored.toolchain import ToolchainError, find_nvcc, fingerprint_nvcc

_NVCC_SETTINGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
"""Variables that nvcc itself reads."""

_MSA_SWITCHES = ("GPU_TRACE", "SM_TIMING", "FMHA_GMEM_CHECK")
"""Variables whose mere presence adds a define to MSA's nvcc flags. MSA keeps such builds apart only while
MINFER_FMHA_CACHE_DIR is unset."""

_DSL_SETTINGS = ("CUTE_DSL_COMPILER_OPT", "CUTE_DSL_ENABLE_ASSERTIONS", "CUTE_DSL_LINEINFO", "CUTE_DSL_DEBUG")
"""Variables that change the code that CuTe DSL 4.6.2 generates."""


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of compiled kernels: what fills it, where it is, what this build has in it."""

    name: str
    path: Path
    files: int
    size_bytes: int


def keyed_cache_folder(base: Path) -> Path:
    """The folder for MSA's nvcc kernels: ``base/<tree>-<compiler>-<settings>``, all three in hexadecimal.

    nvcc is identified without being run, see :func:`msa_vendored.toolchain.fingerprint_nvcc`. The list of targets is
    not in the name: it follows from the sources and the release of nvcc. Creates nothing.

    Args:
        base: MSA's own choice, from ``MINFER_FMHA_CACHE_DIR`` or its default.

    Returns:
        Where there is no nvcc to compile with: the folder of the same tree and settings that holds most kernels
        (the last by name among equals), since a machine without a compiler may run from a warm cache; or, if there
        is none, a folder of the same form with ``no-nvcc`` for the compiler.

    Raises:
        UnavailableError: nothing is built here.
    """
    tree, settings = provenance().tree12, _digest(_jit_settings())[:8]
    nvcc = find_nvcc()
    if nvcc is not None:
        try:
            return base / f"{tree}-{fingerprint_nvcc(nvcc)}-{settings}"
        except ToolchainError:
            # It does not answer. Kernels compiled earlier may still be run; compiling asks it again and raises.
            pass
    warm = [(_count_kernels(folder), folder.name) for folder in base.glob(f"{tree}-*-{settings}")]
    kernels, name = max(warm, default=(0, ""))
    return base / (name if kernels else f"{tree}-no-nvcc-{settings}")


def aot_cache_key() -> str:
    """Tail of the name of a kernel compiled by CuTe DSL: ``<tree>-<DSL version>-<cu12|cu13>-<arch>-<settings>``.

    The architecture is the one that the DSL compiles for, asked of the DSL itself: ``CUTE_DSL_ARCH`` as it was when
    the DSL was imported, else that of the first visible device (not of torch's current one), else the DSL's default,
    sm_100a. CUDA is not initialised if ``CUTE_DSL_ARCH`` was set.

    Raises:
        ImportError: CuTe DSL is not installed.
        UnavailableError: nothing is built here.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    version, flavour, settings = _dsl_parts()
    return f"{provenance().tree12}-{version}-{flavour}-{CuTeDSL._get_dsl().envar.arch}-{settings}"


def describe_dsl() -> str:
    """``<DSL version>-<cu12|cu13>-<settings>``: what besides sources and target decides the DSL's code.

    The settings are machine, tvm-ffi, quack and the variables in ``_DSL_SETTINGS``. Needs nothing built.

    Raises:
        ImportError: CuTe DSL is not installed.
    """
    return "-".join(_dsl_parts())


def _dsl_parts() -> tuple[str, str, str]:
    import cutlass

    return cutlass.__version__, f"cu{cutlass.CUDA_VERSION.major}", _digest(_dsl_settings())[:8]


def extension_name(name: str, flags: Sequence[str] = ()) -> str:
    """Name of a torch extension: ``<name>_<tree>_<compiler and settings>``, a valid C identifier.

    torch makes the name the extension's folder, its shared object and its init function, and rebuilds only if
    sources or flags look newer.

    Args:
        name: MSA's own name of the extension.
        flags: compiler flags given to torch, architecture flags among them; part of the key.

    Raises:
        UnavailableError: nothing is built here.
    """
    return f"{name}_{provenance().tree12}_{_digest([*_extension_settings(), *flags])[:12]}"


def load_extension(name: str, **arguments: Any) -> Any:
    """``torch.utils.cpp_extension.load`` under a keyed name and a lock that dies with its holder.

    torch's own lock is a file that a killed process leaves behind; from then on every process waits for ever. Here a
    kernel lock is held around the load, so a file that is found is nobody's and is removed.

    Args:
        name: MSA's own name of the extension.
        **arguments: as for ``torch.utils.cpp_extension.load``; without ``build_directory`` the extension goes
            below ``TORCH_EXTENSIONS_DIR`` or torch's default.

    Returns:
        What ``load`` returns: the imported extension.

    Raises:
        UnavailableError: nothing is built here.
        Exception: whatever ``load`` raises.
    """
    from torch.utils import cpp_extension

    flags = [
        flag for key in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags") for flag in arguments.get(key) or ()
    ]
    keyed = extension_name(name, flags)
    folder = Path(arguments.pop("build_directory", None) or _extensions_root() / keyed)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_flock(folder.with_name(f"{folder.name}.lock")):
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(name=keyed, build_directory=str(folder), **arguments)


def list_cache_folders() -> tuple[CacheFolder, ...]:
    """The caches as the next launch would use them, with the number and size of this build's files there.

    Three of the official launchers, then that of our own kernels, unless it is switched off.

    Raises:
        UnavailableError: nothing is built here.
    """
    from msa_vendored.compiling import digest_sources, kernel_cache_folder

    tree = provenance().tree12
    jit = keyed_cache_folder(_jit_base())
    aot = Path(os.environ.get("MM_SPARSE_ATTN_AOT_CACHE") or Path.home() / ".cache/minfer/mm_sparse_attn")
    extensions = _extensions_root()
    own = kernel_cache_folder()
    return (
        _measure("nvcc kernels", jit, [jit]),
        _measure("CuTe DSL kernels", aot, aot.glob(f"*_{tree}-*")),
        _measure("torch extensions", extensions, extensions.glob(f"*_{tree}_*")),
        *([_measure("own kernels", own, own.glob(f"*-{digest_sources()[:12]}-*.o"))] if own is not None else []),
    )


def _jit_settings() -> list[str]:
    settings = [f"{name}={os.environ.get(name, '')}" for name in _NVCC_SETTINGS]
    switches = [name for name in _MSA_SWITCHES if name in os.environ]
    return [platform.machine(), f"tvm-ffi={_version('apache-tvm-ffi')}", *settings, *switches]


def _dsl_settings() -> list[str]:
    inlined = [f"{name}={_version(name)}" for name in ("quack-kernels", "apache-tvm-ffi")]
    return [platform.machine(), *inlined, *(f"{name}={os.environ.get(name, '')}" for name in _DSL_SETTINGS)]


def _extension_settings() -> list[str]:
    settings = [f"{name}={os.environ.get(name, '')}" for name in (*_NVCC_SETTINGS, "CXX", "PYTORCH_NVCC")]
    nvcc = _torch_nvcc()
    compiler = fingerprint_nvcc(nvcc) if nvcc is not None else "no-nvcc"
    abi = str(sysconfig.get_config_var("SOABI"))
    return [platform.machine(), abi, f"torch={_version('torch')}", compiler, *settings]


def _torch_nvcc() -> str | None:
    """The nvcc that torch runs, found another way than MSA's: ``PYTORCH_NVCC`` or torch's search at its import."""
    from torch.utils import cpp_extension

    command = os.environ.get("PYTORCH_NVCC") or (
        f"{cpp_extension.CUDA_HOME}/bin/nvcc" if cpp_extension.CUDA_HOME else ""
    )
    # The variable holds a shell command, such as "ccache nvcc".
    return shutil.which((shlex.split(command) or [""])[-1])


def _extensions_root() -> Path:
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root)
    from torch.utils import cpp_extension

    return Path(cpp_extension.get_default_build_root())


def _jit_base() -> Path:
    """Where MSA's ``jit.py`` keeps its kernels, before our key."""
    if explicit := os.environ.get("MINFER_FMHA_CACHE_DIR"):
        return Path(explicit)
    suffixes = zip(_MSA_SWITCHES, ("_gpu_trace", "_sm_timing", "_gmem_check"), strict=True)
    suffix = "".join(suffix for switch, suffix in suffixes if switch in os.environ)
    return Path.home() / f".cache/minfer/fmha_sm100{suffix}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _count_kernels(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.so"))


def _measure(name: str, path: Path, roots: Iterator[Path] | Sequence[Path]) -> CacheFolder:
    files = [f for root in roots for f in (root.rglob("*") if root.is_dir() else (root,)) if f.is_file()]
    return CacheFolder(name, path, len(files), sum(file.stat().st_size for file in files))


@contextmanager
def hold_flock(path: Path) -> Iterator[None]:
    """Hold a kernel lock on ``path``; the file stays, since removing it would let two holders hold two files."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
