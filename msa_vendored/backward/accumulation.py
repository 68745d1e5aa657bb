"""In what dQ is summed between key blocks: the names that users give and what they stand for, nowhere else."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from msa_vendored.backward.checks import ArgumentValueError, UnsupportedArgumentError

DQAccumulation = Literal["bf16", "fp16", "fp32"]

DQ_ACCUMULATIONS: tuple[str, ...] = get_args(DQAccumulation)

DQ_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Element type of the sums."""

ARCH_ACCUMULATIONS: dict[str, tuple[str, ...]] = {
    "sm_90a": ("fp16", "bf16", "fp32"),
    "sm_100a": ("bf16", "fp32"),
    "sm_103a": ("bf16", "fp32"),
}
"""What the main kernels have, the default first."""


def require_dq_accumulation(name: object) -> str:
    """The name itself.

    Raises:
        ArgumentValueError: (a ValueError) it is not one of :data:`DQ_ACCUMULATIONS`.
    """
    if name not in DQ_ACCUMULATIONS:
        raise ArgumentValueError(
            "unknown accumulation of dq",
            where="argument dq_accumulation",
            expected=" or ".join(repr(known) for known in DQ_ACCUMULATIONS),
            got=repr(name),
        )
    return str(name)


def choose_dq_accumulation(arch: str, name: object) -> str:
    """The name itself, or the default of an architecture for None.

    Raises:
        ArgumentValueError: (a ValueError) it is not one of :data:`DQ_ACCUMULATIONS`.
        UnsupportedArgumentError: (a NotImplementedError) the architecture's main kernel does not have it.
    """
    supported = ARCH_ACCUMULATIONS[arch]
    if name is None:
        return supported[0]
    if require_dq_accumulation(name) not in supported:
        raise UnsupportedArgumentError(
            f"the kernels for {arch} do not sum dq like this",
            where="argument dq_accumulation",
            expected=" or ".join(repr(known) for known in supported),
            got=repr(name),
        )
    return str(name)
