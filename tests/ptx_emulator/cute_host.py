"""Runs functions that CuTe DSL compiled, through their own host code, on CPU tensors.

The DSL reads its settings when it is imported, so :func:`prepare` comes first. Host code expects CUDA tensors; it
gets CPU tensors through DLPack capsules that claim to be on CUDA device 0.
"""

from __future__ import annotations

import ctypes as c
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ptx_emulator.bindings import library, replace_cuda
from ptx_emulator.build import library_path
from ptx_emulator.frames import remember_frames
from ptx_emulator.launch import EmulationError, Kernel, Options, load_kernels, name_tensors
from ptx_emulator.report import NamedTensor, Report

LAUNCH = c.CFUNCTYPE(c.c_int, c.c_char_p, c.POINTER(c.c_uint), c.c_size_t, c.POINTER(c.c_void_p))
MEMSET = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int, c.c_size_t)
CUDA_DEVICE = 2
DLPACK_TYPES = {
    torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int32: (0, 32),
    torch.int64: (0, 64), torch.uint8: (1, 8), torch.float8_e4m3fn: (10, 8), torch.bool: (6, 8),
}  # fmt: skip
"""torch dtype to DLPack type code and bits."""


def prepare(arch: str = "sm_100a", dump_folder: Path | None = None) -> None:
    """Set up the process so that CuTe DSL compiles for ``arch`` and its launches come here.

    Raises:
        RuntimeError: ``cutlass`` is imported already and has read other settings.

    Side effects:
        Environment variables of the DSL; the emulator's library is loaded with global symbols;
        ``inspect.getframeinfo`` remembers.
    """
    if "cutlass" in sys.modules:
        raise RuntimeError("cutlass is already imported; prepare() must come first")
    import tempfile
    from importlib.util import find_spec

    spec = find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("nvidia_cutlass_dsl is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    runtime = next(path for path in sorted(root.glob("*/lib/libcute_dsl_runtime.so")))
    replace_cuda()
    remember_frames()
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        CUTE_DSL_KEEP="ptx",
        CUTE_DSL_DUMP_DIR=str(dump_folder or tempfile.mkdtemp(prefix="ptx-emulator-")),
        CUTE_DSL_LINEINFO="1",
        CUTE_DSL_NO_CACHE="1",
        CUTE_DSL_LIBS=f"{library_path()}:{runtime}",
    )


class _Device(c.Structure):
    _fields_ = [("kind", c.c_int32), ("index", c.c_int32)]


class _Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device", _Device),
        ("rank", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("offset", c.c_uint64),
    ]


class _Managed(c.Structure):
    _fields_ = [("tensor", _Tensor), ("context", c.c_void_p), ("deleter", c.c_void_p)]


_kept: list[Any] = []


class FakeCuda:
    """Exports a CPU tensor as a DLPack tensor on CUDA device 0: the same bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA_DEVICE, 0)

    def __dlpack__(self, **_options: Any) -> Any:
        tensor = self.tensor
        code, bits = DLPACK_TYPES[tensor.dtype]
        rank = tensor.dim()
        shape = (c.c_int64 * max(rank, 1))(*tensor.shape)
        strides = (c.c_int64 * max(rank, 1))(*tensor.stride())
        record = _Tensor(tensor.data_ptr(), _Device(CUDA_DEVICE, 0), rank, code, bits, 1, shape, strides, 0)
        # A C function: one of Python's would be called when the interpreter may be gone.
        deleter = c.cast(library().emulator_keep, c.c_void_p)
        managed = _Managed(record, None, deleter)
        # Compile-time tensors may live as long as the process; what they point to must too. A few hundred bytes each.
        _kept.append((managed, shape, strides))
        new_capsule = c.pythonapi.PyCapsule_New
        new_capsule.restype = c.py_object
        new_capsule.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
        return new_capsule(c.addressof(managed), b"dltensor", None)


class _Host:
    """Receives the launches of host code. One in a process, as the callbacks of the library are."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.tensors: list[NamedTensor] = []
        self.options = Options()
        self.report = Report()
        self.error: Exception | None = None
        self.callbacks = (LAUNCH(self._launch), MEMSET(self._memset))
        library().emulator_set_callbacks(*self.callbacks)

    def _launch(self, name: bytes, sizes: Any, shared_bytes: int, arguments: Any) -> int:
        try:
            kernel = self.kernels[name.decode()]
            values = [c.string_at(arguments[i], p.size_bytes) for i, p in enumerate(kernel.parameters)]
            grid, block = list(sizes[0:3]), list(sizes[3:6])
            kernel.run(grid, block, shared_bytes, values, self.tensors, self.options, self.report)
        except Exception as error:  # noqa: BLE001 -- nothing may cross the C frames; raised again by run()
            self.error = error
            return 999
        return 0

    def _memset(self, target: int, value: int, size_bytes: int) -> int:
        c.memset(target, value, size_bytes)
        return 0


_host: list[_Host] = []


def _get_host() -> _Host:
    if not _host:
        _host.append(_Host())
    return _host[0]


class CompiledFunction:
    """A compiled function with its own table of kernels: names are not unique between functions.

    Args:
        function: what ``cute.compile`` or ``cute.runtime.load_module`` gave.
        ptx: its PTX. A compiled function has its own; an exported one holds machine code only.

    Raises:
        ValueError: there is no PTX.
    """

    def __init__(self, function: Any, ptx: str | None = None) -> None:
        text = ptx or getattr(function, "__ptx__", None)
        if not text:
            raise ValueError("ptx: an exported function holds no PTX; give the __ptx__ of the one that was exported")
        self.function = function
        self.kernels = load_kernels(text)

    def run(self, arguments: Sequence[Any], options: Options, report: Report, names: Sequence[str] = ()) -> None:
        """Call the host code; its launches add to the report.

        Raises:
            EmulationError: a launch ended in a fault.
        """
        import tvm_ffi

        host = _get_host()
        host.kernels, host.options, host.report, host.error = self.kernels, options, report, None
        host.tensors = name_tensors(arguments, names)
        converted = [tvm_ffi.from_dlpack(FakeCuda(a)) if isinstance(a, torch.Tensor) else a for a in arguments]
        try:
            self.function(*converted)
        except Exception as error:
            if host.error is None:
                raise
            raise host.error from error
        if host.error is not None:
            raise host.error


__all__ = ["CompiledFunction", "EmulationError", "FakeCuda", "prepare"]
