"""Checks that the reference launchers share."""

from __future__ import annotations

import torch

from msa_vendored.backward.checks import (
    ArgumentTypeError,
    ArgumentValueError,
    UnsupportedArgumentError,
    require_dtype,
    require_shape,
    require_tensor,
)
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.backward.schedule import require_extent

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SUPPORTED_TOPK = (4, 8, 16, 32)
MAX_HEAD_RATIO = 16


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 for float64 operands, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_unsupported(
    name: str, value: object, *, default: object, reason: str, launchers: str = "the reference launchers"
) -> None:
    """Refuses a value other than the default of an argument that only the official kernels use.

    Args:
        name: argument name.
        value: what was passed.
        default: the official default, which is accepted.
        reason: what the argument is for, in a few words.
        launchers: who refuses, for the message.

    Raises:
        UnsupportedArgumentError: ``value`` is not ``default``; also a NotImplementedError.
    """
    if value is default or (not isinstance(value, torch.Tensor) and value == default):
        return
    raise UnsupportedArgumentError(
        f"{launchers} do not support {name} ({reason})",
        where=f"argument {name}",
        expected=repr(default),
        got=f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value),
        next_command="leave the argument out, or use the SM100 bundle: msa_vendored.kernels()",
    )


def require_float(name: str, tensor: torch.Tensor) -> None:
    """Refuses anything but a bf16, fp16, fp32 or fp64 tensor; quantised storage is named as unsupported."""
    require_tensor(name, tensor)
    if tensor.dtype not in FLOAT_DTYPES and (tensor.dtype == torch.uint8 or tensor.dtype.is_floating_point):
        raise UnsupportedArgumentError(
            f"the reference launchers do not support FP8 or FP4 storage of {name}",
            where=f"argument {name}",
            expected=" or ".join(str(dtype) for dtype in FLOAT_DTYPES),
            got=str(tensor.dtype),
            next_command=f"dequantise {name} first, or use the SM100 bundle: msa_vendored.kernels()",
        )
    require_dtype(name, tensor, FLOAT_DTYPES)


def require_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str] = ("k", "v")) -> int:
    """Checks q ``[total_q, Hq, D]`` against k and v ``[total_k, Hkv, D]``, which errors call by ``names``.

    Returns:
        Query heads per key head.

    Raises:
        ArgumentTypeError: dtypes differ or are not floating point.
        ArgumentValueError: shapes or devices do not fit together, or the head ratio is not a whole number.
    """
    for name, tensor in (("q", q), (names[0], k), (names[1], v)):
        require_float(name, tensor)
        require_dtype(name, tensor, (q.dtype,))
        if tensor.device != q.device:
            raise ArgumentValueError(
                f"{name} is on another device than q",
                where=f"argument {name}",
                expected=str(q.device),
                got=str(tensor.device),
            )
    require_shape("q", q, ("total_q", "Hq", "D"))
    require_shape(names[0], k, ("total_k", "Hkv", q.shape[2]))
    require_shape(names[1], v, k.shape)
    return head_ratio(q.shape[1], k.shape[1])


def head_ratio(query_heads: int, key_heads: int) -> int:
    """Query heads per key head; refuses a ratio that is not a whole number from 1 to 16."""
    if key_heads <= 0 or query_heads % key_heads or not 1 <= query_heads // key_heads <= MAX_HEAD_RATIO:
        raise ArgumentValueError(
            "query heads and key heads do not form a supported ratio",
            where="arguments q and k, axis 1",
            expected=f"Hq = ratio x Hkv with a ratio from 1 to {MAX_HEAD_RATIO}",
            got=f"Hq = {query_heads}, Hkv = {key_heads}",
        )
    return query_heads // key_heads


def require_cu_seqlens(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> None:
    """Refuses prefix sums that are not a contiguous int32 vector of at least two entries on ``device``."""
    require_tensor(name, cu_seqlens)
    require_dtype(name, cu_seqlens, (torch.int32,))
    require_shape(name, cu_seqlens, ("documents + 1",))
    require_extent(name, cu_seqlens, axis=0, minimum=2)
    if cu_seqlens.device != device or not cu_seqlens.is_contiguous():
        raise ArgumentValueError(
            f"{name} must be contiguous and on the device of the other operands",
            where=f"argument {name}",
            expected=f"contiguous, {device}",
            got=f"stride {cu_seqlens.stride(0)}, {cu_seqlens.device}",
        )


def require_topk(topk: int) -> None:
    """Refuses a selection width that the kernels do not have."""
    if topk not in SUPPORTED_TOPK:
        raise ArgumentValueError(
            "topK is not supported",
            where="argument topK",
            expected=f"one of {SUPPORTED_TOPK}",
            got=str(topk),
        )


def require_block_size(name: str, block_size: int) -> None:
    """Refuses a key block other than 128 keys; with another size the kernels would read wrong keys."""
    if block_size != BLOCK_SIZE:
        raise ArgumentValueError(
            f"{name} is not supported", where=f"argument {name}", expected=str(BLOCK_SIZE), got=str(block_size)
        )


def require_longest(name: str, bound: int, lengths: torch.Tensor) -> None:
    """Refuses a maximum length below the longest document: the kernels drop what lies beyond it."""
    longest = int(lengths.max())
    if int(bound) < longest:
        raise ArgumentValueError(
            f"{name} is shorter than the longest document",
            where=f"argument {name}",
            expected=f"at least {longest}",
            got=str(bound),
        )


def require_present(name: str, value: object, why: str) -> None:
    """Refuses None where the official launcher needs a number on the host."""
    if value is None:
        raise ArgumentValueError(f"{name} is required {why}", where=f"argument {name}", expected="int", got="None")


def require_number(name: str, value: object) -> None:
    """Refuses anything but an int or float with :class:`ArgumentTypeError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(
            f"{name} must be a number", where=f"argument {name}", expected="float", got=type(value).__name__
        )
