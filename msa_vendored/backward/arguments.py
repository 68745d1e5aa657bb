"""Arguments of the GPU backward: what is refused, before anything is compiled, allocated or launched."""

from __future__ import annotations

import math

import torch

from msa_vendored.backward.accumulation import require_dq_accumulation
from msa_vendored.backward.checks import (
    ArgumentTypeError,
    ArgumentValueError,
    UnsupportedArgumentError,
    require_device,
    require_dtype,
    require_positive_multiple,
    require_shape,
    require_tensor,
)
from msa_vendored.backward.plan import HEAD_DIM, Sizes
from msa_vendored.backward.schedule import MSABackwardSchedule, require_schedule, require_schedule_device
from msa_vendored.backward.tasks import KEYS_PER_BLOCK, RATIOS


def require_operands(schedule: object, dq_accumulation: object, operands: dict[str, torch.Tensor]) -> Sizes:
    """Refuse what the kernels cannot take, without looking at the device.

    Raises:
        ArgumentTypeError: not a tensor, wrong dtype, or not a schedule.
        ArgumentValueError: wrong shape or device, or an unknown ``dq_accumulation``.
        UnsupportedArgumentError: a head ratio that the kernels do not fold.
    """
    for name, tensor in operands.items():
        require_tensor(name, tensor)
        require_dtype(name, tensor, (torch.float32,) if name == "lse" else (torch.bfloat16,))
    q, k = operands["q"], operands["k_aligned"]
    require_shape("q", q, ("T", "Hq", HEAD_DIM))
    require_shape("k_aligned", k, ("W", "Hkv", HEAD_DIM))
    require_positive_multiple("k_aligned", k.shape[0], KEYS_PER_BLOCK)
    for name, like in (("v_aligned", k), ("grad_out", q), ("out", q)):
        require_shape(name, operands[name], like.shape)
    require_shape("lse", operands["lse"], q.shape[:2])
    for name, tensor in operands.items():
        require_device(name, tensor, q.device)
    _require_heads(q, k)
    require_schedule(schedule)
    assert isinstance(schedule, MSABackwardSchedule)  # noqa: S101 -- for the type checker
    require_schedule_device(schedule, q.device)
    require_shape("schedule.row_ptr", schedule.row_ptr, (k.shape[1], "rows + 1"))
    accumulation = require_dq_accumulation(dq_accumulation)
    rows, edges, work = schedule.row_ptr.shape[1] - 1, schedule.q_indices.shape[1], schedule.scheduler_metadata.shape[0]
    return Sizes(q.shape[0], k.shape[0], q.shape[1], k.shape[1], rows, edges, work, accumulation)


def _require_heads(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.shape[0] == 0 or k.shape[1] == 0:
        raise ArgumentValueError("there is nothing to differentiate", where="argument q", expected="tokens and heads")
    ratio, rest = divmod(q.shape[1], k.shape[1])
    if rest or ratio not in RATIOS:
        raise UnsupportedArgumentError(
            "the kernels do not fold this number of query heads",
            where="arguments q and k_aligned",
            expected=f"Hq / Hkv one of {', '.join(map(str, RATIOS))}",
            got=f"{q.shape[1]} / {k.shape[1]}",
            next_command='use kernels(backend="reference")',
        )


def require_scale(softmax_scale: float | None) -> float:
    """The scale as a float, ``128 ** -0.5`` for None.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentValueError: not finite.
    """
    if softmax_scale is None:
        return float(HEAD_DIM**-0.5)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise ArgumentTypeError(
            "softmax_scale must be a number", where="argument softmax_scale", expected="float or None",
            got=type(softmax_scale).__name__,
        )  # fmt: skip
    if not math.isfinite(softmax_scale):
        raise ArgumentValueError(
            "softmax_scale must be finite", where="argument softmax_scale", expected="a finite number",
            got=str(softmax_scale),
        )  # fmt: skip
    return float(softmax_scale)
