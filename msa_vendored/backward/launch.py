"""``run_backward`` of the SM100 bundle: the GPU engine behind NeMo Automodel's contract, on SM100 and SM103 only."""

from __future__ import annotations

import torch

from msa_vendored.backward import engine
from msa_vendored.backward.accumulation import DQAccumulation
from msa_vendored.backward.checks import require_tensor
from msa_vendored.backward.schedule import MSABackwardSchedule
from msa_vendored.backward.stages import describe_device, find_arch
from msa_vendored.errors import UnavailableError

ARCHITECTURES = ("sm_100a", "sm_103a")


def run_backward(
    *,
    q: torch.Tensor,
    k_aligned: torch.Tensor,
    v_aligned: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    schedule: MSABackwardSchedule,
    softmax_scale: float | None = None,
    dq_accumulation: DQAccumulation | None = None,
    deterministic: bool = False,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of causal block-sparse attention on an SM100 or SM103 GPU.

    Emulated and race-checked, never executed on SM100 hardware. Arguments, results and errors are those of
    :func:`msa_vendored.backward.engine.run_backward`. NeMo Automodel's contract are the first seven with 64 query and
    4 key heads; it has no others. A schedule of another number of key heads is a
    :class:`msa_vendored.reference.BackwardSchedule`.

    Raises:
        UnavailableError: q is not on such a GPU. Nothing was compiled or launched.
        TypeError, ValueError, NotImplementedError, RuntimeError: as the engine raises them.
    """
    require_tensor("q", q)
    if find_arch(q.device) not in ARCHITECTURES:
        raise UnavailableError(
            "the sm100 launcher run_backward cannot run on this device",
            where=f"tensors on {q.device}",
            expected="an NVIDIA GPU of compute capability 10.0 or 10.3 (B200, B300)",
            got=describe_device(q.device),
            next_command='use kernels(backend="sm90") on a Hopper GPU, kernels(backend="reference") on any device',
        )
    return engine.run_backward(
        q=q,
        k_aligned=k_aligned,
        v_aligned=v_aligned,
        grad_out=grad_out,
        lse=lse,
        out=out,
        schedule=schedule,
        softmax_scale=softmax_scale,
        dq_accumulation=dq_accumulation,
        deterministic=deterministic,
        check=check,
    )
