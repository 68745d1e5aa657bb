"""The GPU backward as a user calls it: graphs, streams, odd storage, the current device, errors, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from msa_vendored.backward.engine import CaptureError, run_backward
from msa_vendored.backward.error_word import ScheduleError, get_error_word
from msa_vendored.errors import UnavailableError
from msa_vendored.reference import BackwardSchedule, sparse_atten_func
from msa_vendored.reference import run_backward as run_reference
from msa_vendored.reference.cases import invert_selection, make_case, plan_workspace

pytestmark = pytest.mark.gpu

TOLERANCE = 4e-3
"""Relative Frobenius error against the float64 reference: bf16 rounding of P, dS and the result, 2^-9 = 2.0e-3 each in
the worst case; measured in the emulator 2.2e-3 to 3.2e-3."""
DOCUMENTS = (127, 129, 1, 2, 3, 5, 128, 700)
FIELDS = tuple(field.name for field in fields(BackwardSchedule))
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_schedule(schedule: BackwardSchedule, change: Callable[[torch.Tensor], torch.Tensor]) -> BackwardSchedule:
    return BackwardSchedule(*(change(getattr(schedule, name)) for name in FIELDS))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Arguments on a GPU; expected gradients, and workspace rows that hold a key, on the CPU."""

    operands: dict[str, torch.Tensor]
    schedule: BackwardSchedule
    expected: Gradients
    key_rows: torch.Tensor

    def run(self, **changes: Any) -> Gradients:
        return run_backward(**{**self.operands, "schedule": self.schedule, **changes})

    def require_right(self, gradients: Gradients) -> None:
        for name, got, want in zip(("dq", "dk", "dv"), gradients, self.expected, strict=True):
            error = float((got.cpu().double() - want).norm() / want.norm())
            assert error <= TOLERANCE, f"{name}: {error}"


def make_call(
    lengths: tuple[int, ...] = DOCUMENTS,
    *,
    key_heads: int = 4,
    ratio: int = 16,
    seed: int = 0,
    device: str = "cuda:0",
    softmax_scale: float | None = None,
) -> Call:
    case = make_case(lengths, topk=4, index_heads=key_heads, heads_per_index_head=ratio, seed=seed)
    cu = case.cu_seqlens_q
    row_ptr, q_indices, forward = invert_selection(case)
    out, lse = sparse_atten_func(
        case.q, case.k, case.v, row_ptr, q_indices, 4, cu_seqlens_q=cu, cu_seqlens_k=cu,
        max_seqlen_q=case.max_seqlen_q, max_seqlen_k=case.max_seqlen_k, causal=True, return_softmax_lse=True,
        schedule=forward, softmax_scale=softmax_scale,
    )  # fmt: skip
    workspace = plan_workspace(cu)
    tensors = (row_ptr, q_indices, forward.scheduler_metadata, forward.work_count, cu, workspace.starts)
    operands = {"q": case.q, "grad_out": case.grad_out, "out": out}
    aligned = {"k_aligned": case.k, "v_aligned": case.v}
    exact = {name: tensor.double() for name, tensor in operands.items()}
    exact |= {name: workspace.align(tensor).double() for name, tensor in aligned.items()}
    expected = run_reference(
        **exact, lse=lse.double(), schedule=BackwardSchedule(*tensors), softmax_scale=softmax_scale
    )
    operands |= {name: workspace.align(tensor, torch.nan) for name, tensor in aligned.items()}
    operands["lse"] = lse
    schedule = BackwardSchedule(*(tensor.to(device) for tensor in tensors))
    return Call({name: tensor.to(device) for name, tensor in operands.items()}, schedule, expected, workspace.positions)


@pytest.fixture(scope="module")
def call() -> Call:
    return make_call()


@pytest.fixture(autouse=True)
def no_error_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    get_error_word(torch.device("cuda", 0)).raise_seen()


def test_gradients_are_right_and_padding_is_zero(call: Call) -> None:
    """Guards the whole chain on the card: NaN in padding rows must neither spread nor come back."""
    gradients = call.run(check=True)
    call.require_right(gradients)
    outside = torch.ones(gradients[1].shape[0], dtype=torch.bool).index_fill_(0, call.key_rows, False)
    assert outside.any()
    assert not gradients[1].cpu()[outside].any()
    assert not gradients[2].cpu()[outside].any()
    assert not any(gradient.requires_grad for gradient in gradients)


@pytest.mark.parametrize("dq_accumulation", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("ratio", "key_heads"), [(1, 2), (2, 3), (4, 1), (8, 2), (16, 1)])
def test_every_geometry_and_accumulation(ratio: int, key_heads: int, dq_accumulation: str) -> None:
    """Guards the wider contract on the card."""
    call = make_call((129, 40), key_heads=key_heads, ratio=ratio, seed=ratio)
    call.require_right(call.run(dq_accumulation=dq_accumulation, check=True))


def test_another_softmax_scale() -> None:
    """Guards a scale that only some of the stages use."""
    call = make_call((200,), key_heads=1, softmax_scale=0.2)
    call.require_right(call.run(softmax_scale=0.2, check=True))


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return storage[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("change", [unaligned, strided])
def test_storage_of_any_kind(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Guards misaligned 128-bit loads and tensor maps, which fault, and strides that are not looked at."""
    operands = {name: change(tensor) for name, tensor in call.operands.items()}
    fields = {
        name: getattr(call.schedule, name) for name in BackwardSchedule.__dataclass_fields__ if name != "index_heads"
    }
    schedule = BackwardSchedule(*(unaligned(tensor) for tensor in fields.values()))
    call.require_right(run_backward(**operands, schedule=schedule, check=True))


def test_the_callers_stream_is_used(call: Call) -> None:
    """Guards launches on the default stream: here the operands are only right after a wait on the caller's stream."""
    call.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = {name: torch.zeros_like(tensor) for name, tensor in call.operands.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for name, tensor in call.operands.items():
            late[name].copy_(tensor)
        gradients = run_backward(**late, schedule=call.schedule)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    call.require_right(gradients)


def test_a_graph_replays_with_another_selection(call: Call) -> None:
    """Guards capture (no sync, no allocation outside the pool) and sizes or tables that the host would bake in."""
    other = make_call(seed=5)
    assert not torch.equal(other.schedule.q_indices, call.schedule.q_indices)
    operands = {name: tensor.clone() for name, tensor in call.operands.items()}
    capacity = max(c.schedule.scheduler_metadata.shape[0] for c in (call, other))

    def padded(c: Call) -> list[torch.Tensor]:
        tensors = [getattr(c.schedule, name).clone() for name in FIELDS]
        tensors[2] = torch.nn.functional.pad(tensors[2], (0, 0, 0, capacity - tensors[2].shape[0]), value=-7)
        return tensors

    tensors = padded(call)
    schedule = BackwardSchedule(*tensors)
    run_backward(**operands, schedule=schedule)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = run_backward(**operands, schedule=schedule)
    for source in (other, call, other):
        for name, tensor in source.operands.items():
            operands[name].copy_(tensor)
        for target, tensor in zip(tensors, padded(source), strict=True):
            target.copy_(tensor)
        for gradient in gradients:
            gradient.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        source.require_right(gradients)


def test_a_first_call_inside_a_capture_is_refused() -> None:
    """Guards a capture that dies in the driver; another head ratio needs other kernels."""
    call = make_call((40,), key_heads=1, ratio=8, seed=9)
    from msa_vendored.backward import engine

    engine._ready.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")  # torch warns about an empty graph
        with pytest.raises(CaptureError, match="call run_backward once, then capture"):
            call.run()
    call.require_right(call.run(check=True))


def corrupted(call: Call) -> BackwardSchedule:
    schedule = make_schedule(call.schedule, torch.clone)
    schedule.q_indices[0, 0] = 1 << 20
    return schedule


def test_an_inconsistent_schedule_gives_nan_and_the_next_call_raises(call: Call) -> None:
    """Guards silent zeros and out-of-bounds reads: a query position beyond the document."""
    gradients = call.run(schedule=corrupted(call))
    torch.cuda.synchronize()
    assert all(bool(gradient.isnan().all()) for gradient in gradients)
    with pytest.raises(ScheduleError, match="an earlier call of run_backward on this device"):
        call.run()
    call.require_right(call.run(check=True))


def test_check_raises_in_the_call(call: Call) -> None:
    """Guards the debugging option; the error is not raised again."""
    with pytest.raises(ScheduleError, match="where:    argument schedule"):
        call.run(schedule=corrupted(call), check=True)
    call.require_right(call.run(check=True))


def test_a_replayed_graph_reports_too(call: Call) -> None:
    """Guards training loops that only replay: the copy of the word is part of the graph."""
    schedule = make_schedule(call.schedule, torch.clone)
    call.run(schedule=schedule)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(schedule=schedule)
    schedule.q_indices[0, 0] = 1 << 20
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ScheduleError):
        call.run()


def test_repeats_of_one_call_agree(call: Call) -> None:
    """Guards races, which show as an error that moves: twenty runs, each within the tolerance."""
    for _ in range(20):
        call.require_right(call.run())


@pytest.mark.parametrize(("ratio", "key_heads", "dq_accumulation"), [(16, 4, "bf16"), (16, 4, "fp16"), (4, 2, "fp32")])
def test_deterministic_gradients_repeat_bit_by_bit(ratio: int, key_heads: int, dq_accumulation: str) -> None:
    """Guards sums that two CTAs add to. Without the option, the same calls differ (next test)."""
    call = make_call((700, 300), key_heads=key_heads, ratio=ratio)
    first = call.run(deterministic=True, dq_accumulation=dq_accumulation, check=True)
    call.require_right(first)
    for _ in range(5):
        again = call.run(deterministic=True, dq_accumulation=dq_accumulation)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_other_gradients_do_not_repeat() -> None:
    """Guards the test before: if its case were too small to differ, it would prove nothing."""
    call = make_call((700, 300))
    first = call.run()
    assert any(not torch.equal(first[0], call.run()[0]) for _ in range(20))


def test_what_this_gpu_lacks_is_refused(call: Call) -> None:
    """Guards tensors on the CPU."""
    with pytest.raises(UnavailableError):
        run_backward(
            **{name: tensor.cpu() for name, tensor in call.operands.items()},
            schedule=make_schedule(call.schedule, torch.Tensor.cpu),
        )
