"""``fmha_sm100_plan`` and ``fmha_sm100`` on SM90: the score pass; attention output is not computed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msa_vendored.backward.checks import (
    ArgumentTypeError,
    ArgumentValueError,
    UnsupportedArgumentError,
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
)
from msa_vendored.compiling import Kernel, load_kernel
from msa_vendored.hopper import ARCH
from msa_vendored.hopper.score_tables import NO_LIMIT, ScoreTables, make_tables
from msa_vendored.reference import score as reference
from msa_vendored.reference.arguments import refuse_unsupported, require_qkv
from msa_vendored.reference.score import Plan, PlanInfo

HEAD_DIM = 128

_LAUNCHERS = "the sm90 launchers"


class ScorePlan(PlanInfo):
    """A plan with the tables of the kernel, one set for each device that it has run on."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.tables: dict[torch.device, ScoreTables] = {}
        self.work: dict[torch.device, Any] = {}


def fmha_sm100_plan(
    qo_segment_lens: torch.Tensor,
    kv_segment_lens: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    *,
    qo_offset: int | torch.Tensor | None = None,
    split_prefill_decode: bool = True,
    num_kv_splits: int = -1,
    output_maxscore: bool = False,
    causal: bool = True,
    device: torch.device | str | int | None = None,
    **official: Any,
) -> Plan:
    """A plan for :func:`fmha_sm100`; arguments and result as in :func:`msa_vendored.reference.fmha_sm100_plan`.

    Reads the lengths on the host: pass them on the CPU to avoid a synchronisation. The first :func:`fmha_sm100` with
    the plan copies its tables (32 bytes for each 128 queries) to the device; do that before a CUDA graph is captured.

    Args:
        qo_segment_lens: int32 or int64 ``[documents]``, query lengths, none zero.
        kv_segment_lens: int32 or int64 ``[documents]``, key lengths, none zero.
        num_qo_heads: query heads.
        num_kv_heads: key heads, -1 to take them from k.
        qo_offset: position of query 0 among the keys, one number or int ``[documents]``; None for ``kv - qo``.
        split_prefill_decode: no effect; work is always cut evenly.
        num_kv_splits: no effect.
        output_maxscore: must be True for :func:`fmha_sm100` to have anything to do.
        causal: query i sees key j only if ``j <= i + qo_offset``.
        device: no effect; tables go where the operands are.
        **official: further arguments of the official planner, all of which must have their defaults.

    Raises:
        TypeError: lengths or offsets are not integer tensors, or there is no such argument.
        ValueError: shapes differ, a document is empty, or a head count is not positive.
        UnsupportedArgumentError: (a NotImplementedError) an official argument with another value than its default.
    """
    _refuse_official(official)
    plan = reference.fmha_sm100_plan(
        qo_segment_lens,
        kv_segment_lens,
        num_qo_heads,
        num_kv_heads,
        qo_offset=qo_offset,
        output_maxscore=output_maxscore,
        causal=causal,
    )
    return (*plan[:3], ScorePlan(plan[3]), None)


def fmha_sm100(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan_info: Plan,
    kv_indices: torch.Tensor | None = None,
    kv_block_indexes: torch.Tensor | None = None,
    q_offset_override: int | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    max_score: torch.Tensor | None = None,
    *,
    output_maxscore: bool = True,
    output_o: bool = True,
    sm_scale: float | None = None,
    **official: Any,
) -> tuple[None, torch.Tensor]:
    """Per query and 128 keys, the largest **raw** product q.k, before the softmax scale. No autograd.

    Runs on the current stream and allocates nothing but ``max_score``. A NaN product makes its block's maximum NaN.

    Args:
        q: ``[total_q, Hq, 128]`` bfloat16; copied where not 16-byte aligned with strides that are multiples of 8.
        k: ``[total_k, Hkv, 128]`` bfloat16, same device; Hq / Hkv from 1 to 16.
        v: must be passed, as to the official launcher; not read.
        plan_info: from :func:`fmha_sm100_plan`, with ``output_maxscore``.
        kv_indices: not supported; None.
        kv_block_indexes: not supported; None.
        q_offset_override: replaces ``qo_offset`` of a causal plan; its tables are built and copied anew.
        out: not supported; None.
        max_score: ``[Hq, max_k_tiles, total_q]`` float32, innermost stride 1: written where a query sees a key, and
            only there, so fill it with -inf before. Allocated and filled if None.
        output_maxscore: must be True.
        output_o: must be False: this launcher has no attention output.
        sm_scale: no effect on scores.
        **official: further arguments of the official launcher, all of which must have their defaults.

    Returns:
        ``(None, max_score)``.

    Raises:
        TypeError: an operand has the wrong type or dtype, or there is no such argument.
        ValueError: operands do not fit the plan, or the scores exceed 2**31 elements.
        UnsupportedArgumentError: (a NotImplementedError) ``output_o``, no ``output_maxscore``, or an official argument
            with another value than its default; the message names it.
    """
    for name, value, default, reason in (
        ("kv_indices", kv_indices, None, "paged K/V"),
        ("kv_block_indexes", kv_block_indexes, None, "block-sparse paged K/V"),
        ("out", out, None, "attention output"),
        ("output_o", output_o, False, "attention output: use sparse_atten_func"),
        ("output_maxscore", output_maxscore, True, "a call without scores"),
    ):
        refuse_unsupported(name, value, default=default, reason=reason, launchers=_LAUNCHERS)
    _refuse_official(official)
    plan = _require_plan(plan_info)
    _require_operands(plan, q, k, v)
    scores = _score_buffer(plan, q, max_score)
    launch_scores(q, k, _find_tables(plan, q.device, q_offset_override), scores)
    return None, scores


def launch_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    tables: ScoreTables,
    scores: torch.Tensor,
    load: Callable[..., Kernel] = load_kernel,
) -> None:
    """The kernel on checked operands; the scores of keys that a query does not see are left as they are.

    Args:
        q: ``[T, H, 128]`` bfloat16.
        k: ``[Tk, Hk, 128]`` bfloat16.
        tables: work.
        scores: ``[H, tiles, columns]`` float32.
        load: ``(compile_stage, *, arch, **options)`` to a launcher; tests emulate here.
    """
    from msa_vendored.hopper.score_kernel import compile_score

    queries, keys = strided_operand(q), strided_operand(k)
    load(compile_score, arch=ARCH)(queries, keys, tables.segments, tables.starts, scores, tables.starts.shape[0])


def strided_operand(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if tensor copies of 16 bytes cannot read it."""
    *outer, inner = tensor.stride()
    if inner == 1 and tensor.data_ptr() % 16 == 0 and not any(stride % 8 for stride in outer):
        return tensor.detach()
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _find_tables(plan: ScorePlan, device: torch.device, override: int | torch.Tensor | None) -> ScoreTables:
    queries, keys = plan["qo_segment_lens"], plan["kv_segment_lens"]
    if override is not None:
        return make_tables(queries, keys, reference.resolve_offsets(plan, override), device)
    if device not in plan.tables:
        offsets = plan["qo_offset"] if plan["causal"] else [NO_LIMIT] * len(keys)
        plan.tables[device] = make_tables(queries, keys, offsets, device)
    return plan.tables[device]


_OFFICIAL = {
    "page_size": (-1, "paged K/V"),
    "kv_block_num": (-1, "block-sparse K/V"),
    "usable_SM_count": (-1, "size of the CUDA grid"),
    "sparse_kernel_mode": ("auto", "choice of sparse kernel"),
    "use_fp8_kvcache": (False, "FP8 K/V"),
    "stream": (None, "CUDA stream"),
    "q_scale": (None, "FP8"),
    "k_scale": (None, "FP8"),
    "v_scale": (None, "FP8"),
    "o_scale": (None, "FP8"),
    "check_input_valid": (False, "further checks"),
}


def _refuse_official(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _OFFICIAL:
            raise ArgumentTypeError(
                f"there is no argument {name}", where=f"argument {name}", expected=", ".join(_OFFICIAL), got=repr(value)
            )
        default, reason = _OFFICIAL[name]
        refuse_unsupported(name, value, default=default, reason=reason, launchers=_LAUNCHERS)


def _require_plan(plan_info: object) -> ScorePlan:
    if not isinstance(plan_info, tuple) or len(plan_info) != 5 or not isinstance(plan_info[3], ScorePlan):
        raise ArgumentTypeError(
            "plan_info is not a plan of the sm90 fmha_sm100_plan",
            where="argument plan_info",
            expected='the tuple that kernels(backend="sm90").fmha_sm100_plan returned',
            got=type(plan_info).__name__,
        )
    return plan_info[3]


def _require_operands(plan: ScorePlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    require_qkv(q, k, v)
    reference.require_plan_fits(plan, q, k)
    if q.dtype != torch.bfloat16 or q.shape[2] != HEAD_DIM:
        raise UnsupportedArgumentError(
            f"{_LAUNCHERS} score bfloat16 heads of {HEAD_DIM} only",
            where="arguments q and k",
            expected=f"torch.bfloat16, head dimension {HEAD_DIM}",
            got=f"{q.dtype}, head dimension {q.shape[2]}",
            next_command='use kernels(backend="reference")',
        )


def _score_buffer(plan: ScorePlan, q: torch.Tensor, max_score: torch.Tensor | None) -> torch.Tensor:
    if plan["max_k_tiles"] <= 0:
        raise ArgumentValueError(
            "the plan has no scores",
            where="argument plan_info",
            expected="output_maxscore=True and heads x tiles x tokens up to 2**31",
            got=f"{plan['num_qo_heads']} heads, {q.shape[0]} tokens, longest document {max(plan['kv_segment_lens'])}",
            next_command="plan with output_maxscore=True, for fewer documents or heads",
        )
    shape = (q.shape[1], plan["max_k_tiles"], q.shape[0])
    if max_score is None:
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    require_tensor("max_score", max_score)
    require_dtype("max_score", max_score, (torch.float32,))
    require_shape("max_score", max_score, shape)
    require_device("max_score", max_score, q.device)
    if max_score.stride(2) != 1:
        raise ArgumentValueError(
            "max_score is not contiguous along its tokens",
            where="argument max_score",
            expected="innermost stride 1",
            got=f"strides {list(max_score.stride())}",
        )
    return max_score
