"""Runs a PTX module on the CUDA device through the driver, for comparison with the emulator."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence

import torch

TILED_TYPES = {torch.bfloat16: 9, torch.float16: 6, torch.float32: 7}
"""torch dtype to CUtensorMapDataType."""


class DriverError(Exception):
    """A call of the CUDA driver failed; names the call and its result."""


class Card:
    """The current device's primary context, as torch made it."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.driver = c.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function.

        Raises:
            DriverError: it does not return 0.
        """
        result = getattr(self.driver, name)(*arguments)
        if result:
            raise DriverError(f"{name} returned {result}")

    def run(
        self, ptx: str, arguments: Sequence[torch.Tensor | bytes], threads: int = 32, entry: str = "test"
    ) -> list[torch.Tensor]:
        """Load, launch one CTA, and return CPU copies of the tensors after it. CPU tensors are copied first."""
        handle, function = c.c_void_p(), c.c_void_p()
        self.call("cuModuleLoadData", c.byref(handle), c.c_char_p(ptx.encode() + b"\0"))
        self.call("cuModuleGetFunction", c.byref(function), handle, c.c_char_p(entry.encode()))
        copies = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        values = [
            c.c_uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else (c.c_char * len(a)).from_buffer_copy(a)
            for a in copies
        ]
        pointers = (c.c_void_p * len(values))(*(c.cast(c.pointer(v), c.c_void_p) for v in values))
        sizes = (1, 1, 1, threads, 1, 1, 0)
        self.call("cuLaunchKernel", function, *sizes, None, pointers, None)
        torch.cuda.synchronize()
        results = [a.cpu() for a in copies if isinstance(a, torch.Tensor)]
        self.call("cuModuleUnload", handle)
        return results

    def encode_tensor_map(self, tensor: torch.Tensor, box: Sequence[int], swizzle_bytes: int = 0) -> bytes:
        """The driver's tensor map; arguments as in :func:`ptx_emulator.tensor_map.encode_tensor_map`."""
        rank = tensor.dim()
        storage = c.create_string_buffer(128 + 64)
        address = -(-c.addressof(storage) // 64) * 64
        sizes = (c.c_uint64 * rank)(*reversed(tensor.shape))
        strides = (c.c_uint64 * max(rank - 1, 1))(*[s * tensor.element_size() for s in reversed(tensor.stride())][1:])
        boxes, ones = (c.c_uint32 * rank)(*reversed(box)), (c.c_uint32 * rank)(*[1] * rank)
        swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle_bytes]
        self.call(
            "cuTensorMapEncodeTiled", c.c_void_p(address), TILED_TYPES[tensor.dtype], rank,
            c.c_void_p(tensor.data_ptr()), sizes, strides, boxes, ones, 0, swizzle, 0, 0,
        )  # fmt: skip
        return c.string_at(address, 128)
