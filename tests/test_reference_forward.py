"""``sparse_atten_func`` of the reference: official defaults, sentinels, options, and refusals."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_calls import FLOAT64_TOLERANCE, attend

from msa_vendored.backward.checks import UnsupportedArgumentError
from msa_vendored.reference import build_k2q_csr, dense_attention, sparse_atten_func
from msa_vendored.reference.cases import PackedCase, invert_selection, make_case


def dense(case: PackedCase, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return dense_attention(
        case.q.double(), case.k.double(), case.v.double(), case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k,
        **options,
    )  # fmt: skip


def small_case(**options: Any) -> PackedCase:
    defaults: dict[str, Any] = {"index_heads": 2, "heads_per_index_head": 2, "head_dim": 8, "dtype": torch.float64}
    return make_case((140, 3), **{**defaults, **options})


def test_causal_is_off_and_the_lse_is_not_returned_by_default() -> None:
    """Guards the official defaults, surprising as they are."""
    case = small_case(own_block=False)
    row_ptr, q_indices, _ = invert_selection(case)
    out = sparse_atten_func(
        case.q, case.k, case.v, row_ptr, q_indices, 4, cu_seqlens_q=case.cu_seqlens_q, cu_seqlens_k=case.cu_seqlens_k,
        max_seqlen_q=140, max_seqlen_k=140,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, dense(case, causal=False)[0], **FLOAT64_TOLERANCE)


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    """Guards the sentinels of a query that selected nothing, or only blocks after itself."""
    case = small_case()
    case.q2k_indices[:, 3] = -1
    case.q2k_indices[:, 5] = torch.tensor([1, -1, -1, -1], dtype=torch.int32)
    out, lse = attend(case)
    for row in (3, 5):
        assert not out[row].any()
        assert torch.isneginf(lse[row]).all()
    assert torch.isfinite(lse[[2, 4, 6]]).all()


def test_documents_do_not_see_each_other() -> None:
    """Guards the partial last block: its missing keys are the next document's in compact storage."""
    case = small_case()
    poisoned = replace(case, k=case.k.clone(), v=case.v.clone())
    poisoned.k[140:], poisoned.v[140:] = torch.nan, torch.nan
    assert torch.equal(attend(poisoned)[0][:140], attend(case)[0][:140])


def test_a_schedule_is_built_if_none_is_given() -> None:
    """Guards the official default schedule=None."""
    case = small_case(own_block=False)
    for got, want in zip(attend(case, schedule=None), attend(case), strict=True):
        torch.testing.assert_close(got, want, **FLOAT64_TOLERANCE)


def test_extra_rows_of_the_csr_are_empty() -> None:
    """Guards a row bound larger than exact, which callers pass when they do not know the lengths on the host."""
    case = small_case()
    result: Any = build_k2q_csr(
        case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k, 128, total_k=143, max_seqlen_q=140, max_seqlen_k=140,
        total_rows=9, return_schedule=True,
    )  # fmt: skip
    got = attend(case, k2q_row_ptr=result[0], k2q_q_indices=result[1], schedule=result[2])
    assert torch.equal(got[0], attend(case)[0])


def test_temperature_lse_output_scale_and_out_buffer() -> None:
    """Guards the three remaining outputs of the official launcher."""
    case = small_case()
    out, lse = attend(case)
    _, expected = dense(case, causal=True, softmax_scale=8**-0.5 / 3)
    buffer = torch.full_like(case.q, torch.nan)
    scale = torch.tensor([2.0, torch.nan])
    doubled, same, cooler = attend(
        case, return_temperature_lse=True, lse_temperature_scale=3.0, output_scale=scale, out=buffer
    )
    assert doubled is buffer
    torch.testing.assert_close(doubled, 2 * out, **FLOAT64_TOLERANCE)
    torch.testing.assert_close(same, lse, **FLOAT64_TOLERANCE)
    torch.testing.assert_close(cooler, expected, **FLOAT64_TOLERANCE)


def test_operands_of_any_layout_are_accepted_and_not_written_to() -> None:
    """Guards views of a fused projection: strided, at odd offsets, and with autograd on."""
    case = small_case()
    fused = torch.cat([case.q, case.k, case.v], dim=1)[:, :, None].repeat(1, 1, 2, 1)[:, :, 1].requires_grad_()
    before = fused.detach().clone()
    q, k, v = fused.split([4, 2, 2], dim=1)
    out, lse = attend(case, q=q, k=k, v=v)
    assert not out.requires_grad
    assert torch.equal(out, attend(case)[0])
    assert torch.equal(lse, attend(case)[1])
    assert torch.equal(fused, before)


def test_the_call_of_a_training_layer() -> None:
    """Guards the exact call pattern of NeMo Automodel: positional order and keyword names."""
    case = make_case((130, 129), topk=16, index_heads=4, heads_per_index_head=2, head_dim=16, seed=5)
    cu, total, longest = case.cu_seqlens_q, 259, 130
    csr: Any = build_k2q_csr(
        case.q2k_indices, cu, cu, 128, total_k=total, max_seqlen_q=longest, max_seqlen_k=longest,
        total_rows=512 // 128, qhead_per_kv=16, return_schedule=True,
    )  # fmt: skip
    row_ptr, q_indices, schedule = csr
    out, lse = sparse_atten_func(
        case.q, case.k, case.v, row_ptr, q_indices, 16, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
        max_seqlen_k=longest, blk_kv=128, causal=True, softmax_scale=16**-0.5, partial_dtype=torch.bfloat16,
        return_softmax_lse=True, schedule=schedule,
    )  # fmt: skip
    torch.testing.assert_close(lse.double(), dense(case, causal=True)[1], rtol=1e-5, atol=1e-5)
    assert out.shape == case.q.shape


UNSUPPORTED: list[tuple[str, Any]] = [
    ("page_table", torch.zeros((2, 1), dtype=torch.int32)),
    ("seqused_k", torch.zeros((2,), dtype=torch.int32)),
    ("usable_SM_count", 64),
    ("qk_dtype", torch.float8_e4m3fn),
    ("pv_dtype", torch.bfloat16),
    ("partial_dtype", torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_arguments_of_the_kernels_alone_are_refused_by_name(name: str, value: Any) -> None:
    """Guards against an argument that is taken and silently ignored."""
    with pytest.raises(NotImplementedError, match=f"do not support {name}") as caught:
        attend(small_case(), **{name: value})
    assert isinstance(caught.value, UnsupportedArgumentError)
    assert caught.value.where == f"argument {name}"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantised_storage_is_refused(dtype: torch.dtype) -> None:
    """Guards against FP8 or packed FP4 keys that would be read as numbers."""
    case = small_case()
    with pytest.raises(NotImplementedError, match="FP8 or FP4 storage of k"):
        attend(case, k=case.k.to(dtype))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": lambda c: c.q.int()}, TypeError, "q has the wrong dtype"),
        ({"v": lambda c: c.v.float()}, TypeError, "v has the wrong dtype"),
        ({"k": lambda c: c.k[..., :4]}, ValueError, "k has the wrong shape"),
        ({"v": lambda c: c.v[:-1]}, ValueError, "v has the wrong shape"),
        ({"k": lambda c: c.k.to("meta")}, ValueError, "k is on another device than q"),
        ({"q": lambda c: c.q[:, :3]}, ValueError, "query heads and key heads do not form a supported ratio"),
        ({"q": lambda c: c.q.repeat(1, 17, 1)}, ValueError, "query heads and key heads do not form a supported ratio"),
        ({"topK": lambda c: 3}, ValueError, "topK is not supported"),
        ({"topK": lambda c: 8}, ValueError, "k2q_q_indices has the wrong shape"),
        ({"blk_kv": lambda c: 64}, ValueError, "blk_kv is not supported"),
        ({"max_seqlen_q": lambda c: 139}, ValueError, "max_seqlen_q is shorter than the longest document"),
        ({"max_seqlen_k": lambda c: 139}, ValueError, "max_seqlen_k is shorter than the longest document"),
        ({"cu_seqlens_q": lambda c: c.cu_seqlens_q.long()}, TypeError, "cu_seqlens_q has the wrong dtype"),
        ({"cu_seqlens_k": lambda c: c.cu_seqlens_k[[0, 2]]}, ValueError, "cu_seqlens_k has the wrong shape"),
        ({"cu_seqlens_k": lambda c: c.cu_seqlens_k[[0, 0, 2]]}, ValueError, "cu_seqlens_k has an empty document"),
        ({"partial_dtype": lambda c: torch.float64}, TypeError, "partial_dtype is not supported"),
        ({"lse_temperature_scale": lambda c: 0.0}, ValueError, "lse_temperature_scale must be finite and positive"),
        ({"lse_temperature_scale": lambda c: "1"}, TypeError, "lse_temperature_scale must be a number"),
        (
            {"return_temperature_lse": lambda c: True, "return_softmax_lse": lambda c: False},
            ValueError,
            "return_temperature_lse needs return_softmax_lse",
        ),
        ({"out": lambda c: c.q.float()}, TypeError, "out has the wrong dtype"),
        ({"out": lambda c: c.q[1:]}, ValueError, "out has the wrong shape"),
        ({"output_scale": lambda c: torch.ones(1).double()}, TypeError, "output_scale has the wrong dtype"),
        ({"output_scale": lambda c: torch.ones(0)}, ValueError, "output_scale is empty"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """Guards every check of the forward, each by its message."""
    case = small_case()
    with pytest.raises(error, match=message):
        attend(case, **{name: make(case) for name, make in changes.items()})


def swap_slots(schedule: Any) -> torch.Tensor:
    return torch.where(schedule.qsplit_indices < 0, -1, schedule.qsplit_indices & 0xFFFFFF)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"scheduler_metadata": s.scheduler_metadata.long()}, "scheduler_metadata has the wrong dtype"),
        (lambda s: {"split_counts": s.split_counts[1:]}, "split_counts has the wrong shape"),
        (lambda s: {"work_count": s.work_count - 1}, "the schedule does not cover every selected block"),
        (lambda s: {"qsplit_indices": s.qsplit_indices ^ 1}, "the schedule was built for another selection"),
        (lambda s: {"qsplit_indices": s.qsplit_indices | (4 << 24)}, "the schedule was built for another selection"),
        (lambda s: {"qsplit_indices": swap_slots(s)}, "two blocks of one query have the same slot"),
        (
            lambda s: {"scheduler_metadata": s.scheduler_metadata * torch.tensor([1, 1, 1, 1, 1, 0]).int()},
            "the schedule numbers its rows for other key lengths",
        ),
    ],
)
def test_a_schedule_of_another_selection_is_refused(change: Any, message: str) -> None:
    """Guards the stale schedule: softmax over part of a selection is wrong without any sign of it."""
    case = make_case((300,), index_heads=1, heads_per_index_head=1, head_dim=4, dtype=torch.float64)
    schedule = invert_selection(case)[2]
    with pytest.raises((TypeError, ValueError), match=message):
        attend(case, schedule=replace(schedule, **change(schedule)))


def test_a_csr_with_queries_of_another_document_is_refused() -> None:
    """Guards the forward without a schedule, where the CSR is all there is to check."""
    case = small_case()
    row_ptr, q_indices, _ = invert_selection(case)
    broken = q_indices.clone()
    broken[0, 0] = 140
    with pytest.raises(ValueError, match="a query lies outside its document"):
        attend(case, k2q_q_indices=broken, schedule=None)
    with pytest.raises(ValueError, match="k2q_row_ptr has the wrong shape"):
        attend(case, k2q_row_ptr=row_ptr[:, :-1].contiguous(), schedule=None)


def test_the_signature_is_the_official_one() -> None:
    """Guards drop-in use: names, order and defaults of the official launcher."""
    forward = inspect.signature(sparse_atten_func).parameters
    assert list(forward)[:6] == ["q", "k", "v", "k2q_row_ptr", "k2q_q_indices", "topK"]
    keywords = {p.name: p.default for p in forward.values() if p.kind is p.KEYWORD_ONLY}
    required = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert [name for name, default in keywords.items() if default is inspect.Parameter.empty] == required
    assert {name: default for name, default in keywords.items() if name not in required} == {
        "blk_kv": 128,
        "causal": False,
        "softmax_scale": None,
        "lse_temperature_scale": 1.0,
        "return_temperature_lse": False,
        "partial_dtype": torch.bfloat16,
        "return_softmax_lse": False,
        "page_table": None,
        "seqused_k": None,
        "schedule": None,
        "usable_SM_count": -1,
        "qk_dtype": None,
        "pv_dtype": None,
        "output_scale": None,
        "out": None,
    }
