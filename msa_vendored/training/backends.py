"""Which launchers a call uses, and what they can do: decided by an explicit rule, never by what happens to work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from msa_vendored.backward.accumulation import choose_dq_accumulation
from msa_vendored.errors import UnavailableError
from msa_vendored.training.errors import ArgumentValueError

if TYPE_CHECKING:
    from msa_vendored.bundle import MSAKernels

BACKENDS: Final = ("sm100", "sm90", "reference")
"""Names that ``backend`` accepts beside None."""

TOPK_CHOICES: Final = (4, 8, 16, 32)
"""Selected blocks per query that the official CSR builder and forward accept."""

HEAD_RATIOS: Final = (1, 2, 4, 8, 16)
"""Query heads per key/value head that the official forward accepts."""

_ARCH_OF: Final = {"sm90": "sm_90a", "sm100": "sm_100a"}
"""Architecture that speaks for the backend; the kernels of sm_103a have what those of sm_100a have."""

_BACKEND_OF: Final = {(10, 0): "sm100", (10, 3): "sm100", (9, 0): "sm90"}


def resolve_backend(backend: str | None, device: torch.device) -> str:
    """Name of the backend that tensors on ``device`` use.

    The rule, in full. A name is taken at its word. None means: on the CPU ``"reference"``; on a CUDA device of
    compute capability 10.0 or 10.3 ``"sm100"``, of 9.0 ``"sm90"``. Any other device has no kernels, and None is refused
    there: the reference runs on it too, but only if it is asked for, since it is no substitute for a kernel.

    Args:
        backend: ``"sm100"``, ``"sm90"``, ``"reference"`` or None.
        device: where q, k and v are.

    Raises:
        ArgumentValueError: (a ValueError) an unknown name.
        UnavailableError: the device has no kernels, or not those that ``backend`` names.
    """
    if backend is not None and backend not in BACKENDS:
        raise ArgumentValueError(
            "unknown backend",
            where="backend",
            expected="None or one of " + ", ".join(repr(name) for name in BACKENDS),
            got=repr(backend),
        )
    if backend == "reference" or (backend is None and device.type == "cpu"):
        return "reference"
    own = _kernels_of(device)
    if own is None or (backend is not None and backend != own):
        raise UnavailableError(
            f"no {backend or 'kernel'} backend for this device",
            where=_device_words(device),
            expected="CUDA compute capability 10.0 or 10.3 for 'sm100', 9.0 for 'sm90'",
            got=f"backend={backend!r}",
            next_command='pass backend="reference" to compute the same in PyTorch',
        )
    return own


def _kernels_of(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return _BACKEND_OF.get(torch.cuda.get_device_capability(device))


def _device_words(device: torch.device) -> str:
    if device.type != "cuda":
        return f"device {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"device {device}, {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def bind_kernels(backend: str) -> MSAKernels:
    """The five launchers of a resolved backend.

    Raises:
        UnavailableError: they cannot be bound on this host; the message ends with the way to the reference.
    """
    from msa_vendored.bundle import kernels

    try:
        return kernels() if backend == "sm100" else kernels(backend=backend)
    except UnavailableError as error:
        if backend == "reference":
            raise
        raise UnavailableError(
            error.what,
            where=error.where,
            expected=error.expected,
            got=error.got,
            next_command=f'{error.next_command or "see the error above"}; or pass backend="reference"',
        ) from error


def require_supported(backend: str, *, q: Tensor, softmax_scale: float) -> None:
    """Refuse a call that the backend has no kernels for, before anything is launched.

    The reference takes every head dimension, float32 and float64 too. SM100 and SM90 take bfloat16 and head dimension
    128, any number of key heads, and whatever ``HEAD_RATIOS`` and ``TOPK_CHOICES`` list; all take any finite scale.

    Raises:
        ArgumentValueError: (a ValueError) one of the numbers differs.
    """
    if not math.isfinite(softmax_scale):
        raise ArgumentValueError(
            "softmax_scale must be finite", where="softmax_scale", expected="a finite number", got=str(softmax_scale)
        )
    if backend == "reference":
        return
    for name, expected, got in (("q.dtype", torch.bfloat16, q.dtype), ("head dimension", 128, q.shape[2])):
        if expected != got:
            raise ArgumentValueError(
                f"the {backend} backend does not support this {name}",
                where=name,
                expected=str(expected),
                got=str(got),
                next_command='use the shape it is built for, or pass backend="reference"',
            )


def require_accumulation(backend: str, dq_accumulation: str) -> None:
    """Refuse a call whose backward the backend could not do, before its forward is launched.

    Args:
        backend: a resolved name.
        dq_accumulation: a name, or ``""`` for the launcher's default.

    Raises:
        ArgumentValueError: (a ValueError) an unknown name.
        UnsupportedArgumentError: (a NotImplementedError) the backend's kernels do not have it.
    """
    if backend != "reference":
        choose_dq_accumulation(_ARCH_OF[backend], dq_accumulation or None)


def backward_options(backend: str, dq_accumulation: str) -> dict[str, Any]:
    """Keywords of ``run_backward`` beyond the contract that a call needs; none where the defaults are meant.

    ``torch.use_deterministic_algorithms(True)``, with ``warn_only`` too, asks the kernels for the passes in which every
    sum has one owner. The reference consists of PyTorch operators: those follow the flag themselves, and sum in float32
    or float64 whatever ``dq_accumulation`` allows.

    Args:
        backend: a resolved name.
        dq_accumulation: a name, or ``""`` for the launcher's default.
    """
    if backend == "reference":
        return {}
    options: dict[str, Any] = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    if dq_accumulation:
        options["dq_accumulation"] = dq_accumulation
    return options


@contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Make the tensor's GPU the current device: the official CSR extension launches on the current one."""
    if tensor.device.type != "cuda":
        yield
        return
    with torch.cuda.device(tensor.device):
        yield
