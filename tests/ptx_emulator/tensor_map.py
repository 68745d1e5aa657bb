"""Makes tensor maps for tests: the 128 bytes that host code passes to kernels, as far as they are understood.

The fields were read off maps that CuTe DSL's host code builds; the kernels of NVIDIA and MSA that run correctly with
them are the evidence. Not documented by NVIDIA.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FORMATS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 10, torch.int32: 3, torch.uint8: 0}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def encode_tensor_map(tensor: torch.Tensor, box: Sequence[int], swizzle_bytes: int = 0) -> bytes:
    """The map of a tensor whose last dimension is contiguous; ``box`` in the order of the tensor's dimensions."""
    rank = tensor.dim()
    sizes = [*reversed(tensor.shape), *[1] * (5 - rank)]
    strides = [stride * tensor.element_size() for stride in reversed(tensor.stride())][1:]
    if any(stride % 16 for stride in strides) or tensor.stride(-1) != 1:
        raise ValueError("strides: multiples of 16 bytes and a contiguous last dimension expected")
    strides = [stride // 16 for stride in strides] + [0] * (5 - rank)
    boxes = [*reversed(box), *[1] * (5 - rank)]
    fields = (rank - 1) << 4 | FORMATS[tensor.dtype] << 7 | SWIZZLES[swizzle_bytes] << 13
    words = [tensor.data_ptr(), fields | strides[0] << 32, strides[1] | strides[2] << 32, strides[3]]
    words += [sizes[0] - 1 | sizes[1] - 1 << 32, sizes[2] - 1 | sizes[3] - 1 << 32]
    words += [sizes[4] - 1 | boxes[0] - 1 << 56, sum((boxes[d] - 1) << 8 * (d - 1) for d in range(1, 5))]
    return struct.pack("<8Q", *words) + bytes(64)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What a tensor map says; dimensions from the innermost out."""

    base: int
    format: int
    swizzle_bytes: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of the second dimension on."""
    box: tuple[int, ...]


def decode_tensor_map(data: bytes) -> TensorMap:
    """Read the 128 bytes back; strides of less than 64 GiB."""
    words = struct.unpack("<8Q", data[:64])
    low = [word & 0xFFFFFFFF for word in words]
    high = [word >> 32 for word in words]
    rank = (low[1] >> 4 & 7) + 1
    sizes = [n + 1 for n in (low[4], high[4], low[5], high[5], low[6])]
    strides = [16 * n for n in (high[1], low[2], high[2], low[3])]
    box = [(words[6] >> 56) + 1, *((words[7] >> 8 * d & 255) + 1 for d in range(4))]
    swizzle = {number: size for size, number in SWIZZLES.items()}[low[1] >> 13 & 3]
    return TensorMap(
        words[0], low[1] >> 7 & 15, swizzle, tuple(sizes[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank])
    )
