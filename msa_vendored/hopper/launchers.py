"""What ``kernels(backend="sm90")`` binds: each launcher behind one check, that its tensors are on a Hopper GPU.

The modules behind them are imported at the first call, so that binding imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msa_vendored.errors import UnavailableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CAPABILITY = (9, 0)
"""The kernels are compiled for sm_90a, which no other compute capability runs."""

_HOPPER_DEVICES: set[torch.device] = set()
"""Devices that were found to be right: asking PyTorch again takes microseconds in every call."""

__all__ = ["build_k2q_csr", "fmha_sm100", "fmha_sm100_plan", "run_backward", "sparse_atten_func"]


def build_k2q_csr(q2k_indices: Tensor, *arguments: Any, **options: Any) -> Any:
    """Inverts a selection; see :func:`msa_vendored.hopper.csr.build_k2q_csr`."""
    with on_hopper("build_k2q_csr", q2k_indices):
        from msa_vendored.hopper.csr import build_k2q_csr

        return build_k2q_csr(q2k_indices, *arguments, **options)


def sparse_atten_func(q: Tensor, *arguments: Any, **options: Any) -> Any:
    """Block-sparse attention over a CSR; see :func:`msa_vendored.hopper.forward.sparse_atten_func`."""
    with on_hopper("sparse_atten_func", q):
        from msa_vendored.hopper.forward import sparse_atten_func

        return sparse_atten_func(q, *arguments, **options)


def fmha_sm100_plan(*arguments: Any, **options: Any) -> tuple[Any, ...]:
    """A plan of the score pass, on the host; see :func:`msa_vendored.hopper.score.fmha_sm100_plan`."""
    from msa_vendored.hopper.score import fmha_sm100_plan

    return fmha_sm100_plan(*arguments, **options)


def fmha_sm100(q: Tensor, *arguments: Any, **options: Any) -> Any:
    """Block maxima of the raw products; see :func:`msa_vendored.hopper.score.fmha_sm100`."""
    with on_hopper("fmha_sm100", q):
        from msa_vendored.hopper.score import fmha_sm100

        return fmha_sm100(q, *arguments, **options)


def run_backward(**operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients on the SM90 kernels; see :func:`msa_vendored.backward.engine.run_backward`."""
    with on_hopper("run_backward", operands.get("q")):
        from msa_vendored.backward.engine import run_backward

        return run_backward(**operands)


@contextmanager
def on_hopper(launcher: str, operand: Any) -> Iterator[None]:
    """Make the GPU of ``operand`` the current device, after a check that it runs these kernels.

    Raises:
        ArgumentTypeError: (a TypeError) ``operand`` is no tensor.
        UnavailableError: it is not on a GPU of compute capability 9.0; nothing was compiled or launched.
    """
    import torch

    from msa_vendored.backward.checks import require_tensor

    require_tensor("the first operand", operand)
    found = None if operand.device in _HOPPER_DEVICES else describe_mismatch(operand.device)
    if found is not None:
        raise UnavailableError(
            f"the sm90 launcher {launcher} cannot run on this device",
            where=f"{launcher}, tensors on {operand.device}",
            expected="an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200)",
            got=found,
            next_command='move the tensors to such a GPU, or use kernels(backend="reference")',
        )
    _HOPPER_DEVICES.add(operand.device)
    with torch.cuda.device(operand.device):
        yield


def describe_mismatch(device: torch.device) -> str | None:
    """What ``device`` is if it is no Hopper GPU, in words; None if it is one."""
    import torch

    if device.type != "cuda":
        return f"device {device}"
    found = torch.cuda.get_device_capability(device)
    if found == CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)}, compute capability {found[0]}.{found[1]}"
