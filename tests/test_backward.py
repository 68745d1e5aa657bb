"""``run_backward`` of the reference in the SM100 bundle's shapes, against dense float64 autograd, and its contract."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msa_vendored.backward import MSABackwardSchedule
from msa_vendored.backward.checks import aligned_operand
from msa_vendored.backward.documents import workspace_documents
from msa_vendored.backward.tiles import TileShape
from msa_vendored.backward.torch_engine import BackwardOperands, differentiate
from msa_vendored.backward.worklist import schedule_worklist
from msa_vendored.reference import BackwardSchedule, dense_attention, run_backward, sparse_atten_func
from msa_vendored.reference.cases import PackedCase, Workspace, invert_selection, make_case, plan_workspace

# NeMo Automodel's published tolerances of a bf16 backward against float32: (largest error, L2 error / L2 norm).
TOLERANCES = {"dq": (0.035, 0.007), "dk": (0.075, 0.007), "dv": (0.1, 0.007)}
# NeMo Automodel's test documents: each side of a block boundary, single tokens, and one exact block.
DOCUMENTS = (127, 129, 1, 2, 3, 5, 128)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Arguments of run_backward, and where the compact keys went."""

    operands: dict[str, torch.Tensor]
    schedule: MSABackwardSchedule
    workspace: Workspace

    def run(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return run_backward(**{**self.operands, "schedule": self.schedule, **changes})


def make_call(case: PackedCase, *, fill: float = 0.0, kind: type[MSABackwardSchedule] = MSABackwardSchedule) -> Call:
    q, k, v, cu_q, cu_k = case.q, case.k, case.v, case.cu_seqlens_q, case.cu_seqlens_k
    row_ptr, q_indices, forward = invert_selection(case)
    topk, longest_q, longest_k = case.q2k_indices.shape[2], case.max_seqlen_q, case.max_seqlen_k
    out, lse = sparse_atten_func(
        q, k, v, row_ptr, q_indices, topk, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, causal=True, return_softmax_lse=True, schedule=forward,
    )  # fmt: skip
    workspace = plan_workspace(cu_k)
    schedule = kind(row_ptr, q_indices, forward.scheduler_metadata, forward.work_count, cu_q, workspace.starts)
    operands = {
        "q": q,
        "k_aligned": workspace.align(k, fill),
        "v_aligned": workspace.align(v, fill),
        "grad_out": case.grad_out,
        "lse": lse,
        "out": out,
    }
    return Call(operands, schedule, workspace)


@pytest.fixture(scope="module")
def case() -> PackedCase:
    return make_case(DOCUMENTS, seed=7)


@pytest.fixture(scope="module")
def call(case: PackedCase) -> Call:
    return make_call(case)


def dense_gradients(case: PackedCase, *, index_heads: int = 4) -> tuple[torch.Tensor, ...]:
    leaves = [t.double().requires_grad_() for t in (case.q, case.k, case.v)]
    ratio = case.q.shape[1] // case.k.shape[1] * index_heads
    part = (leaves[0][:, :ratio], leaves[1][:, :index_heads], leaves[2][:, :index_heads])
    out, _ = dense_attention(*part, case.q2k_indices[:index_heads], case.cu_seqlens_q, case.cu_seqlens_k, causal=True)
    gradients: tuple[torch.Tensor, ...] = torch.autograd.grad(out, leaves, case.grad_out[:, :ratio].double())
    return gradients


def assert_within_tolerances(
    results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], workspace: Workspace
) -> None:
    for (name, (largest, relative)), got, want in zip(TOLERANCES.items(), results, expected, strict=True):
        compact = got if name == "dq" else got[workspace.positions]
        difference = compact.double() - want
        assert difference.abs().max() <= largest, name
        assert difference.norm() <= relative * want.norm(), name


def test_gradients_match_dense_float64_autograd(case: PackedCase, call: Call) -> None:
    """Guards the maths: both sides of block boundaries, single-token documents, partial selections."""
    assert_within_tolerances(call.run(), dense_gradients(case), call.workspace)


@pytest.mark.slow
def test_gradients_match_where_top_16_truncates() -> None:
    """Guards selections that leave blocks out: 2,177 tokens have 18 blocks, of which a query selects 16.

    Index head 0 is compared; the others select nothing, to save time, and must be exactly zero.
    """
    case = make_case((2177,), topk=16, seed=3)
    case.q2k_indices[1:] = -1
    call = make_call(case)
    dq, dk, dv = call.run()
    assert not dq[:, 16:].any()
    assert not dk[:, 1:].any()
    assert not dv[:, 1:].any()
    assert_within_tolerances((dq, dk, dv), dense_gradients(case, index_heads=1), call.workspace)


def test_results_have_the_contract_shapes_and_share_storage(call: Call) -> None:
    """Guards the return contract: bf16, workspace rows, dk and dv two views of one buffer."""
    dq, dk, dv = call.run()
    assert dq.shape == call.operands["q"].shape
    assert dk.shape == dv.shape == call.operands["k_aligned"].shape
    assert {t.dtype for t in (dq, dk, dv)} == {torch.bfloat16}
    assert dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr()
    assert not any(t.requires_grad for t in (dq, dk, dv))


def test_unselected_blocks_and_padding_rows_are_exactly_zero() -> None:
    """Guards against uninitialised or stray gradients: block 1 is selected by nobody, and padding is poisoned."""
    case = make_case((300, 5), seed=1)
    selected = torch.full_like(case.q2k_indices, -1)
    selected[:, :, 0] = 0
    call = make_call(replace(case, q2k_indices=selected), fill=float("nan"))
    # Freed memory full of NaN, for the allocator to hand out again.
    del_me = [torch.full_like(call.operands["k_aligned"], float("nan"), dtype=torch.float32) for _ in range(4)]
    del del_me
    for gradient in call.run()[1:]:
        assert gradient[:128].any()
        assert not gradient[128:384].any()
        assert gradient[384:389].any()
        assert not gradient[389:].any()


def test_rows_without_keys_give_zeros() -> None:
    """Guards lse = -inf: exp(S + inf) is inf, and inf x 0 would be a NaN in dq, dk and dv."""
    case = make_case((130, 1), seed=2)
    case.q2k_indices[:, 7] = -1
    call = make_call(case)
    assert torch.isneginf(call.operands["lse"][7]).all()
    dq, dk, dv = call.run()
    assert not dq[7].any()
    assert all(torch.isfinite(t).all() for t in (dq, dk, dv))
    # The work list may still hold the row: then lse alone must silence it, whatever `out` holds.
    alive = make_call(make_case((130, 1), seed=2))
    lse, out = alive.operands["lse"].clone(), alive.operands["out"].clone()
    lse[7], out[7] = -torch.inf, torch.nan
    dq2, dk2, dv2 = alive.run(lse=lse, out=out)
    assert not dq2[7].any()
    for got, want in ((dk2, dk), (dv2, dv)):
        # Other batches, other summation order: one bf16 rounding apart.
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


def test_single_token_documents_have_no_score_gradient() -> None:
    """Guards the smallest document: P is 1, so dv is the sum of grad_out over heads and dq is rounding only."""
    case = make_case((1, 1, 1), seed=4)
    call = make_call(case)
    dq, _, dv = call.run()
    expected = case.grad_out.double().view(3, 4, 16, 128).sum(2)
    torch.testing.assert_close(dv[::128].double(), expected, rtol=2**-8, atol=1e-6)
    # out is bf16, so delta misses dP by its rounding: 2**-9 of |out| summed over 128 products.
    assert dq.abs().max() < 0.1


def test_padding_keys_and_garbage_items_do_not_matter(call: Call, case: PackedCase) -> None:
    """Guards masking by position: NaN past the end of documents, garbage above work_count and past the last edge."""
    schedule = call.schedule
    metadata, q_indices = schedule.scheduler_metadata.clone(), schedule.q_indices.clone()
    metadata[int(schedule.work_count) :] = 1 << 30
    for head in range(4):
        q_indices[head, int(schedule.row_ptr[head, -1]) :] = 12345
    poisoned = make_call(case, fill=float("nan"))
    changed = replace(schedule, scheduler_metadata=metadata, q_indices=q_indices)
    for got, want in zip(poisoned.run(schedule=changed), call.run(), strict=True):
        assert torch.equal(got, want)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at a storage offset of one element."""
    storage = tensor.new_empty(tensor.numel() + 1)
    view = storage[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the first two axes swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", [unaligned, strided])
def test_any_layout_is_accepted(call: Call, layout: Any) -> None:
    """Guards operands that are views of a larger tensor: they are copied, as 128-bit loads would fault on them."""
    operands = {name: layout(tensor) for name, tensor in call.operands.items()}
    if layout is unaligned:
        assert all(t.data_ptr() % 16 for t in operands.values())
    for got, want in zip(call.run(**operands), call.run(), strict=True):
        assert torch.equal(got, want)


def test_kernel_operands_are_detached_contiguous_and_at_16_byte_addresses() -> None:
    """Guards what the kernels are given: a copy only where the caller's tensor will not do."""
    good = torch.zeros((4, 8), dtype=torch.bfloat16, requires_grad=True)
    assert aligned_operand(good).data_ptr() == good.data_ptr()
    assert not aligned_operand(good).requires_grad
    for bad in (unaligned(good.detach()), strided(good.detach())):
        operand = aligned_operand(bad)
        assert operand.is_contiguous()
        assert operand.data_ptr() % 16 == 0
        assert operand.data_ptr() != bad.data_ptr()
        assert torch.equal(operand, bad)


def test_an_empty_work_list_gives_zeros() -> None:
    """Guards the batching loop against a selection of nothing at all."""
    case = make_case((130, 1), seed=6)
    call = make_call(replace(case, q2k_indices=torch.full_like(case.q2k_indices, -1)))
    assert int(call.schedule.work_count) == 0
    assert not any(gradient.any() for gradient in call.run())


def test_no_operand_is_written_to_and_no_graph_is_recorded(call: Call) -> None:
    """Guards in-place arithmetic on saved activations, which autograd would report only much later."""
    everything = {**call.operands, **{f.name: getattr(call.schedule, f.name) for f in fields(call.schedule)}}
    before = {name: (tensor.clone(), tensor._version) for name, tensor in everything.items()}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in call.operands.items()}
    assert not any(t.requires_grad for t in call.run(**leaves))
    for name, tensor in everything.items():
        assert torch.equal(tensor, before[name][0]), name
        assert tensor._version == before[name][1], name


def test_one_chunk_and_many_chunks_agree(case: PackedCase, call: Call) -> None:
    """Guards the batching: a budget of one tile per batch must cover the same edges as the default."""
    operands = BackwardOperands(*(t.float() for t in call.operands.values()))
    tokens, rows = operands.q.shape[0], operands.k.shape[0]
    documents = workspace_documents(call.schedule, tokens=tokens, workspace_rows=rows)
    worklist = schedule_worklist(call.schedule, documents, 128)
    results = [
        differentiate(
            operands, worklist, call.schedule.q_indices, documents, TileShape(16, 128, True, element_budget=budget),
            softmax_scale=128**-0.5, accumulation_dtype=torch.float32,
        )
        for budget in (1 << 15, 1 << 23)
    ]  # fmt: skip
    for few, many in zip(*results, strict=True):
        # Summation order differs: float32 rounding of sums of up to a few hundred terms.
        torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-4)


class LargestAllocation(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped for mypy here
    """Records the number of elements of the largest tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, int(value.numel()))
        return result


def largest_temporary(tokens: int) -> int:
    case = make_case((tokens,), index_heads=1, heads_per_index_head=1, head_dim=8, topk=4, dtype=torch.float32)
    call = make_call(case, kind=BackwardSchedule)
    documents = workspace_documents(call.schedule, tokens=tokens, workspace_rows=call.workspace.rows)
    shape = TileShape(1, 8, True, element_budget=1 << 16)
    with LargestAllocation() as record:
        differentiate(
            BackwardOperands(*call.operands.values()), schedule_worklist(call.schedule, documents, 128),
            call.schedule.q_indices, documents, shape, softmax_scale=1.0, accumulation_dtype=torch.float32,
        )  # fmt: skip
    return int(record.elements)


def test_memory_is_linear_in_tokens() -> None:
    """Guards against a T x T temporary: twice the tokens may at most double the largest tensor."""
    small, large = largest_temporary(4096), largest_temporary(8192)
    assert large <= 2 * small
    # dk and dv together: 2 x T x 8. A T x T mask would have 2**26 elements.
    assert large == 2 * 8192 * 8


SHAPE_CASES = [
    ("q", lambda t: t[0], "[total_q, Hq, D]"),
    ("v_aligned", lambda t: t[:-128], "[1024, 4, 128]"),
    ("grad_out", lambda t: t[:-1], "[395, 64, 128]"),
    ("lse", lambda t: t[:, :4], "[395, 64]"),
    ("out", lambda t: t[:-1], "[395, 64, 128]"),
]


@pytest.mark.parametrize(("name", "change", "expected"), SHAPE_CASES)
def test_other_shapes_are_value_errors(call: Call, name: str, change: Any, expected: str) -> None:
    """Guards against reading outside an operand: NeMo's launcher checks none of these."""
    with pytest.raises(ValueError, match=f"{name} has the wrong") as caught:
        call.run(**{name: change(call.operands[name])})
    assert caught.value.expected == expected  # type: ignore[attr-defined]  # ours, see the class below
    assert type(caught.value).__name__ == "ArgumentValueError"


@pytest.mark.parametrize("name", ["k_aligned", "v_aligned", "grad_out", "out", "lse"])
def test_other_dtypes_are_type_errors(call: Call, name: str) -> None:
    """Guards against operands that a kernel would reinterpret, float32 LSE kept in bf16 among them."""
    wrong, right = (torch.bfloat16, "torch.float32") if name == "lse" else (torch.float16, "torch.bfloat16")
    with pytest.raises(TypeError) as caught:
        call.run(**{name: call.operands[name].to(wrong)})
    assert str(caught.value) == (
        f"{name} has the wrong dtype\n  where:    argument {name}\n  expected: {right}\n  got:      {wrong}"
    )


def test_other_types_and_devices_are_refused(call: Call) -> None:
    """Guards None from a forward without LSE, a plain tuple as schedule, and operands spread over devices."""
    with pytest.raises(TypeError, match="lse must be a tensor"):
        call.run(lse=None)
    with pytest.raises(TypeError, match="schedule must be a backward schedule"):
        call.run(schedule=tuple(getattr(call.schedule, f.name) for f in fields(call.schedule)))
    with pytest.raises(ValueError, match="out is on another device than q"):
        call.run(out=call.operands["out"].to("meta"))
    with pytest.raises(ValueError, match=r"schedule.work_count is on another device than q"):
        call.run(schedule=replace(call.schedule, work_count=call.schedule.work_count.to("meta")))
    with pytest.raises(TypeError, match="positional"):
        run_backward(*call.operands.values(), call.schedule)  # type: ignore[call-arg]  # what must fail


def test_a_schedule_of_other_tokens_is_refused(call: Call) -> None:
    """Guards the stale plan: a schedule of 395 tokens with the operands of 394."""
    short = {name: call.operands[name][:-1] for name in ("q", "grad_out", "lse", "out")}
    with pytest.raises(ValueError, match="does not end at the number of tokens"):
        call.run(**short)
