"""``sparse_atten_func`` and ``run_backward`` of the reference against dense masked float64 attention."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_calls import FLOAT64_TOLERANCE, attend

from msa_vendored.reference import (
    BackwardSchedule,
    dense_attention,
    run_backward,
)
from msa_vendored.reference.cases import PackedCase, invert_selection, make_case, plan_workspace

LENGTHS = st.lists(st.sampled_from([1, 2, 127, 128, 129, 260]), min_size=1, max_size=3)
# NeMo Automodel's published tolerances of a bf16 forward against float32: (largest error, L2 error / L2 norm).
OUT_TOLERANCE, LSE_TOLERANCE = (0.025, 0.006), (0.002, 0.001)


def differentiate(case: PackedCase, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Compact dq, dk, dv of the reference."""
    row_ptr, q_indices, schedule = invert_selection(case)
    workspace = plan_workspace(case.cu_seqlens_k)
    dq, dk, dv = run_backward(
        q=case.q, k_aligned=workspace.align(case.k), v_aligned=workspace.align(case.v), grad_out=case.grad_out,
        lse=lse, out=out, cu_seqlens_k=case.cu_seqlens_k,
        schedule=BackwardSchedule(
            row_ptr, q_indices, schedule.scheduler_metadata, schedule.work_count, case.cu_seqlens_q, workspace.starts
        ),
        **options,
    )  # fmt: skip
    return dq, dk[workspace.positions], dv[workspace.positions]


def dense(case: PackedCase, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return dense_attention(
        case.q.double(), case.k.double(), case.v.double(), case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k,
        **options,
    )  # fmt: skip


@st.composite
def float64_cases(draw: st.DrawFn) -> PackedCase:
    lengths_q = draw(LENGTHS)
    lengths_k = draw(
        st.one_of(st.just(lengths_q), st.tuples(*(st.sampled_from([1, 128, 129, 400]) for _ in lengths_q)))
    )
    return make_case(
        lengths_q, lengths_k, topk=draw(st.sampled_from([4, 8, 16, 32])), index_heads=draw(st.integers(1, 2)),
        heads_per_index_head=draw(st.integers(1, 16)), head_dim=draw(st.sampled_from([3, 8, 16])), dtype=torch.float64,
        own_block=draw(st.booleans()), seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(float64_cases(), st.booleans(), st.sampled_from([None, 0.5, 2.0]))
def test_forward_and_backward_match_dense_attention(case: PackedCase, causal: bool, scale: float | None) -> None:
    """Guards the semantics: alignment, masks, documents, -1 tails, head groups, scale, rows and blocks without use."""
    leaves = q, k, v = tuple(t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    expected, expected_lse = dense_attention(
        q, k, v, case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k, causal=causal, softmax_scale=scale
    )
    out, lse = attend(case, causal=causal, softmax_scale=scale)
    torch.testing.assert_close(out, expected, **FLOAT64_TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, **FLOAT64_TOLERANCE)
    gradients = differentiate(case, out, lse, causal=causal, softmax_scale=scale)
    for got, want in zip(gradients, torch.autograd.grad(expected, leaves, case.grad_out), strict=True):
        torch.testing.assert_close(got, want, **FLOAT64_TOLERANCE)


class Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped for mypy here
    """The two launchers joined, as an autograd layer joins them."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: PackedCase) -> torch.Tensor:
        ctx.case = replace(case, q=q, k=k, v=v)
        out, lse = attend(ctx.case)
        ctx.save_for_backward(out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *differentiate(replace(ctx.case, grad_out=grad_out), *ctx.saved_tensors), None


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "own_block"),
    [((129, 1, 3), (129, 1, 3), True), ((5, 2), (130, 129), True), ((131,), (131,), False)],
    ids=["documents", "prefix", "rows-without-keys"],
)
def test_gradcheck(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], own_block: bool) -> None:
    """Guards the backward against the forward itself, by finite differences in float64."""
    case = make_case(
        lengths_q,
        lengths_k,
        index_heads=2,
        heads_per_index_head=2,
        head_dim=2,
        dtype=torch.float64,
        own_block=own_block,
    )
    leaves = tuple(t.requires_grad_() for t in (case.q, case.k, case.v))
    assert torch.autograd.gradcheck(lambda q, k, v: Attention.apply(q, k, v, case), leaves, fast_mode=True)


def test_bf16_forward_is_within_the_published_tolerances() -> None:
    """Guards accumulation in float32, and the dtypes of the results."""
    case = make_case((127, 129, 1, 2, 3, 5, 128), seed=11)
    expected, expected_lse = dense(case, causal=True)
    out, lse = attend(case)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    for got, want, (largest, relative) in ((out, expected, OUT_TOLERANCE), (lse, expected_lse, LSE_TOLERANCE)):
        assert (got - want).abs().max() <= largest
        assert (got - want).norm() <= relative * want.norm()


@pytest.mark.slow
def test_a_real_training_pack_cut_to_8192_tokens() -> None:
    """Guards document lengths as they occur, and eight of up to 18 blocks.

    The lengths are the first six documents of case 14 in the public workload manifest of MiniMax-AI/MSA
    (cp16_192k_cases_v1), the last one cut.
    """
    lengths = (1833, 1259, 981, 1143, 2266, 710)
    case = make_case(lengths, topk=8, index_heads=2, heads_per_index_head=2, head_dim=32, dtype=torch.float64, seed=14)
    q, k, v = leaves = tuple(t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    expected, expected_lse = dense_attention(
        q, k, v, case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k, causal=True
    )
    out, lse = attend(case)
    torch.testing.assert_close(out, expected, **FLOAT64_TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, **FLOAT64_TOLERANCE)
    wanted = torch.autograd.grad(expected, leaves, case.grad_out)
    for got, want in zip(differentiate(case, out, lse), wanted, strict=True):
        torch.testing.assert_close(got, want, **FLOAT64_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_accumulate_in_float32(dtype: torch.dtype) -> None:
    """Guards the dtype contract of results: output as q, LSE in the accumulation dtype."""
    case = make_case((130,), index_heads=1, heads_per_index_head=3, head_dim=8, dtype=dtype)
    out, lse = attend(case)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    tolerance = 2**-10 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), dense(case, causal=True)[0], rtol=tolerance, atol=tolerance)


def small_case(**options: Any) -> PackedCase:
    defaults: dict[str, Any] = {"index_heads": 2, "heads_per_index_head": 2, "head_dim": 8, "dtype": torch.float64}
    return make_case((140, 3), **{**defaults, **options})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lse": lambda t: t["lse"].float()}, TypeError, "lse has the wrong dtype"),
        ({"grad_out": lambda t: t["grad_out"][1:]}, ValueError, "grad_out has the wrong shape"),
        ({"k_aligned": lambda t: t["k_aligned"][1:]}, ValueError, "v_aligned has the wrong shape"),
        ({"q": lambda t: t["q"].to(torch.float8_e4m3fn)}, NotImplementedError, "FP8 or FP4 storage of q"),
        ({"cu_seqlens_k": lambda t: torch.tensor([0, 140])}, TypeError, "cu_seqlens_k has the wrong dtype"),
        ({"cu_seqlens_k": lambda t: torch.tensor([0, 400, 403]).int()}, ValueError, "does not lie in the workspace"),
        ({"schedule": lambda t: None}, TypeError, "schedule must be a backward schedule"),
    ],
)
def test_bad_backward_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """Guards the checks of the general backward."""
    case = small_case()
    row_ptr, q_indices, schedule = invert_selection(case)
    workspace = plan_workspace(case.cu_seqlens_k)
    out, lse = attend(case)
    operands: dict[str, Any] = {
        "q": case.q, "k_aligned": workspace.align(case.k), "v_aligned": workspace.align(case.v), "out": out, "lse": lse,
        "grad_out": case.grad_out, "cu_seqlens_k": None,
        "schedule": BackwardSchedule(
            row_ptr, q_indices, schedule.scheduler_metadata, schedule.work_count, case.cu_seqlens_q, workspace.starts
        ),
    }  # fmt: skip
    run_backward(**operands)
    with pytest.raises(error, match=message):
        run_backward(**{**operands, **{name: make(operands) for name, make in changes.items()}})


def test_the_backward_extends_the_contract_by_optional_arguments() -> None:
    """Guards drop-in use of the reference where the SM100 bundle's run_backward is called."""
    backward = inspect.signature(run_backward).parameters.values()
    assert {p.kind for p in backward} == {inspect.Parameter.KEYWORD_ONLY}
    assert [p.name for p in backward if p.default is p.empty] == [
        "q", "k_aligned", "v_aligned", "grad_out", "lse", "out", "schedule",
    ]  # fmt: skip
