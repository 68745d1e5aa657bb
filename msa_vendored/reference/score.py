"""``fmha_sm100_plan`` and ``fmha_sm100``: dense attention and the score pass that selections are made from."""

from __future__ import annotations

from typing import Any

import torch

from msa_vendored.backward.checks import (
    ArgumentTypeError,
    ArgumentValueError,
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
)
from msa_vendored.reference.arguments import (
    accumulation_dtype,
    refuse_unsupported,
    require_float,
    require_number,
    require_qkv,
)
from msa_vendored.reference.score_engine import ScoreDocument, run_document

SCORE_TILE = 128
"""Keys per maximum; the number of tiles is rounded up to a multiple of this as well."""

MAX_SCORE_ELEMENTS = 1 << 31

Plan = tuple[bool, int, int, "PlanInfo", None]


class PlanInfo(dict[str, Any]):
    """The dense plan inside the tuple of :func:`fmha_sm100_plan`: lengths, offsets, heads and ``max_k_tiles``."""


def fmha_sm100_plan(
    qo_segment_lens: torch.Tensor,
    kv_segment_lens: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    *,
    qo_offset: int | torch.Tensor | None = None,
    split_prefill_decode: bool = True,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    usable_SM_count: int = -1,
    causal: bool = True,
    sparse_kernel_mode: str = "auto",
    use_fp8_kvcache: bool = False,
    device: torch.device | str | int | None = None,
    stream: int | None = None,
) -> Plan:
    """A plan for :func:`fmha_sm100`. Mind that ``causal`` defaults to True here, unlike in ``sparse_atten_func``.

    ``split_prefill_decode`` and ``num_kv_splits`` cut work for the GPU without changing results, and are accepted
    for that reason; ``device`` is where the GPU planner would allocate, and the reference plan lives on the host.

    Args:
        qo_segment_lens: int32 or int64 ``[documents]``, query lengths, none zero. Read on the host.
        kv_segment_lens: int32 or int64 ``[documents]``, key lengths, none zero.
        num_qo_heads: query heads.
        num_kv_heads: key heads, -1 to take them from k.
        qo_offset: position of query 0 among the keys, one number or int ``[documents]``; None for ``kv - qo``, the
            bottom-right alignment.
        split_prefill_decode: no effect on results.
        num_kv_splits: no effect on results.
        page_size: not supported; -1.
        output_maxscore: whether :func:`fmha_sm100` shall return scores.
        kv_block_num: not supported; -1.
        usable_SM_count: not supported; -1.
        causal: query i sees key j only if ``j <= i + qo_offset``.
        sparse_kernel_mode: not supported; "auto".
        use_fp8_kvcache: not supported; False.
        device: no effect.
        stream: not supported; None.

    Returns:
        ``(False, 0, documents, plan, None)``, to be passed on unchanged. ``plan["max_k_tiles"]`` is
        ``ceil(ceil(longest kv / 128) / 128) * 128`` with ``output_maxscore``, else -1. It is -1, too, if heads x
        tiles x tokens exceeds 2**31, and :func:`fmha_sm100` then refuses to run; the official launcher prints a
        message and computes attention instead.

    Raises:
        TypeError: lengths or offsets are not integer tensors.
        ValueError: shapes differ, a document is empty, or a head count is not positive.
        NotImplementedError: an argument that only the GPU kernels use; the message names it.
    """
    for name, value, default, reason in (
        ("page_size", page_size, -1, "paged K/V"),
        ("kv_block_num", kv_block_num, -1, "block-sparse K/V"),
        ("usable_SM_count", usable_SM_count, -1, "size of the CUDA grid"),
        ("sparse_kernel_mode", sparse_kernel_mode, "auto", "choice of sparse kernel"),
        ("use_fp8_kvcache", use_fp8_kvcache, False, "FP8 K/V"),
        ("stream", stream, None, "CUDA stream"),
    ):
        refuse_unsupported(name, value, default=default, reason=reason)
    queries, keys = _lengths("qo_segment_lens", qo_segment_lens), _lengths("kv_segment_lens", kv_segment_lens)
    require_shape("kv_segment_lens", kv_segment_lens, qo_segment_lens.shape)
    _require_heads(num_qo_heads, num_kv_heads)
    tiles = score_tiles(max(keys)) if output_maxscore else -1
    too_large = num_qo_heads * tiles * sum(queries) > MAX_SCORE_ELEMENTS
    plan = PlanInfo(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        causal=bool(causal),
        output_maxscore=bool(output_maxscore),
        max_k_tiles=-1 if too_large else tiles,
        max_qo_len=max(queries),
        qo_segment_lens=queries,
        kv_segment_lens=keys,
        qo_offset=_offsets("qo_offset", qo_offset, [key - query for query, key in zip(queries, keys, strict=True)]),
    )
    return False, 0, len(queries), plan, None


def _require_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    if num_qo_heads <= 0 or (num_kv_heads != -1 and (num_kv_heads <= 0 or num_qo_heads % num_kv_heads)):
        raise ArgumentValueError(
            "query heads are not a multiple of key heads",
            where="arguments num_qo_heads and num_kv_heads",
            expected="num_qo_heads = n x num_kv_heads, both positive",
            got=f"{num_qo_heads} and {num_kv_heads}",
        )


def score_tiles(longest: int) -> int:
    """Score tiles for documents of up to ``longest`` keys: one per 128 keys, rounded up to a multiple of 128."""
    tiles = -(-longest // SCORE_TILE)
    return -(-tiles // SCORE_TILE) * SCORE_TILE


def _lengths(name: str, lengths: torch.Tensor) -> list[int]:
    require_tensor(name, lengths)
    require_dtype(name, lengths, (torch.int32, torch.int64))
    require_shape(name, lengths, ("documents",))
    values: list[int] = lengths.tolist()
    if not values or min(values) <= 0:
        raise ArgumentValueError(
            f"{name} has an empty document", where=f"argument {name}", expected="lengths >= 1", got=str(values)
        )
    return values


def _offsets(name: str, offset: int | torch.Tensor | None, default: list[int]) -> list[int]:
    if offset is None:
        return default
    if isinstance(offset, int):
        return [offset] * len(default)
    require_tensor(name, offset)
    require_dtype(name, offset, (torch.int32, torch.int64))
    require_shape(name, offset, (len(default),))
    values: list[int] = offset.tolist()
    return values


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
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_scale: float | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
    check_input_valid: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dense attention and, per query and 128 keys, the largest **raw** product q.k, before the softmax scale.

    Sums run in float32, in float64 for float64 operands. No autograd.

    Args:
        q: ``[total_q, Hq, D]``, bf16, fp16, fp32 or fp64.
        k: ``[total_k, Hkv, D]``, same dtype and device; Hq / Hkv from 1 to 16.
        v: ``[total_k, Hkv, D]``; must be passed even if only scores are wanted.
        plan_info: from :func:`fmha_sm100_plan`.
        kv_indices: not supported; None.
        kv_block_indexes: not supported; None.
        q_offset_override: replaces ``qo_offset`` of a causal plan.
        out: ``[total_q, Hq, D]``, dtype of q: filled and returned as the output.
        max_score: ``[Hq, max_k_tiles, total_q]``, accumulation dtype: written where a query sees a key, and only
            there, so fill it with -inf before. Allocated and filled if None.
        sm_scale: factor on the logits of the output; ``D ** -0.5`` if None. Scores do not have it.
        q_scale: FP8 only; None or 1.
        k_scale: FP8 only; None or 1.
        v_scale: FP8 only; None or 1.
        o_scale: FP8 only; None or 1.
        output_maxscore: return scores, if the plan has them.
        output_o: return the output.
        check_input_valid: the reference always checks.

    Returns:
        ``(out, max_score)``; out None without ``output_o``, max_score None without ``output_maxscore`` in plan or
        call. Rows that see no key have output 0; tiles of which a query sees no key are -inf.

    Raises:
        TypeError: an operand has the wrong type or dtype.
        ValueError: operands do not fit the plan, or there is nothing to return, or the scores exceed 2**31 elements.
        NotImplementedError: an argument that only the GPU kernels use; the message names it.
    """
    refuse_unsupported("kv_indices", kv_indices, default=None, reason="paged K/V")
    refuse_unsupported("kv_block_indexes", kv_block_indexes, default=None, reason="block-sparse paged K/V")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale), ("o_scale", o_scale)):
        refuse_unsupported(name, 1.0 if scale is None else scale, default=1.0, reason="FP8")
    plan = _require_plan(plan_info)
    require_qkv(q, k, v)
    require_plan_fits(plan, q, k)
    offsets = resolve_offsets(plan, q_offset_override)
    scores = _score_buffer(plan, q, max_score, wanted=output_maxscore)
    if scores is None and not output_o:
        raise ArgumentValueError(
            "there is nothing to compute",
            where="arguments output_o and output_maxscore",
            expected="output_o=True, or a plan and a call with output_maxscore=True",
            got="neither",
        )
    result = _output_buffer(q, out) if output_o else None
    if sm_scale is not None:
        require_number("sm_scale", sm_scale)
    scale = q.shape[2] ** -0.5 if sm_scale is None else float(sm_scale)
    with torch.no_grad():
        query_start = key_start = 0
        for queries, keys, offset in zip(plan["qo_segment_lens"], plan["kv_segment_lens"], offsets, strict=True):
            part = ScoreDocument(slice(query_start, query_start + queries), slice(key_start, key_start + keys), offset)
            run_document(q, k, v, part, scale=scale, out=result, max_score=scores)
            query_start, key_start = query_start + queries, key_start + keys
    return result, scores


def _require_plan(plan_info: object) -> PlanInfo:
    if not isinstance(plan_info, tuple) or len(plan_info) != 5 or not isinstance(plan_info[3], PlanInfo):
        raise ArgumentTypeError(
            "plan_info is not a plan of the reference fmha_sm100_plan",
            where="argument plan_info",
            expected="the tuple that msa_vendored.reference.fmha_sm100_plan returned",
            got=type(plan_info).__name__,
        )
    return plan_info[3]


def require_plan_fits(plan: PlanInfo, q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuses operands of other token or head counts than the plan's."""
    require_shape("q", q, (sum(plan["qo_segment_lens"]), plan["num_qo_heads"], "D"))
    require_shape("k", k, (sum(plan["kv_segment_lens"]), "Hkv", "D"))
    if plan["num_kv_heads"] != -1:
        require_shape("k", k, ("total_k", plan["num_kv_heads"], "D"))


def resolve_offsets(plan: PlanInfo, override: int | torch.Tensor | None) -> list[int]:
    """Position of query 0 among the keys, document by document, with ``q_offset_override`` applied."""
    longest = max(plan["kv_segment_lens"])
    if plan["causal"]:
        return _offsets("q_offset_override", override, plan["qo_offset"])
    if override is not None:
        raise ArgumentValueError(
            "q_offset_override needs a causal plan",
            where="argument q_offset_override",
            expected="None with causal=False",
            got="an offset",
        )
    return [longest] * len(plan["kv_segment_lens"])


def _score_buffer(
    plan: PlanInfo, q: torch.Tensor, max_score: torch.Tensor | None, *, wanted: bool
) -> torch.Tensor | None:
    if not wanted or not plan["output_maxscore"]:
        return None
    if plan["max_k_tiles"] <= 0:
        raise ArgumentValueError(
            "the scores exceed 2**31 elements",
            where="argument plan_info",
            expected=f"heads x tiles x tokens up to {MAX_SCORE_ELEMENTS}",
            got=f"{plan['num_qo_heads']} heads, {q.shape[0]} tokens, longest document {max(plan['kv_segment_lens'])}",
            next_command="score fewer documents or heads per call",
        )
    shape, dtype = (q.shape[1], plan["max_k_tiles"], q.shape[0]), accumulation_dtype(q.dtype)
    if max_score is None:
        return q.new_full(shape, -torch.inf, dtype=dtype)
    require_tensor("max_score", max_score)
    require_dtype("max_score", max_score, (dtype,))
    require_shape("max_score", max_score, shape)
    require_device("max_score", max_score, q.device)
    return max_score


def _output_buffer(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format, requires_grad=False)
    require_float("out", out)
    require_dtype("out", out, (q.dtype,))
    require_shape("out", out, q.shape)
    require_device("out", out, q.device)
    return out
