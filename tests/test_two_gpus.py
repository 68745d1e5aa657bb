"""Operands on a GPU that is not the current one, and two GPUs at once.

Peer access lets a kernel on the wrong GPU give right numbers, only late. So the stream of the current GPU is kept busy
during each call, and must still be busy when the other GPU has the results.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_vendored import kernels
from msa_vendored.backward.error_word import ScheduleError
from msa_vendored.bench import workload
from msa_vendored.bench.ours import LauncherCalls
from msa_vendored.bench.workload import Case, Operands
from msa_vendored.hopper import score, select
from msa_vendored.training import Microbatch

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
SLEEP_CYCLES = 3_000_000_000
"""About 1.5 s of the first GPU, of which a call and its synchronisation take milliseconds."""
TOLERANCE = 1e-2
"""Relative L2 of one call and its repetition: additions in another order, in bf16, differ by 5e-3 at most."""


def count_hopper_gpus() -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return sum(torch.cuda.get_device_capability(index) == (9, 0) for index in range(count))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_hopper_gpus() < 2, reason="NEEDS TWO HOPPER GPUs: nothing about a second one is tested"),
]


def move(operands: Operands, device: torch.device) -> Operands:
    """The same values on another device, and a micro-batch of its own there."""
    bounds = torch.tensor([0, *operands.case.lengths]).cumsum(0)
    tensors = {f.name: getattr(operands, f.name) for f in fields(operands)}
    moved = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
    return replace(operands, microbatch=Microbatch.from_cu_seqlens(bounds, device=device), **moved)


@pytest.fixture(scope="module")
def both() -> tuple[LauncherCalls, LauncherCalls]:
    """Calls on equal operands of either GPU; made while the first one is current, which compiles and loads."""
    operands = workload.make_operands(Case("two GPUs", (1100, 1, 129)), FIRST, seed=1)
    return LauncherCalls("sm90", operands), LauncherCalls("sm90", move(operands, SECOND))


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    torch.cuda.set_device(FIRST)
    yield
    assert torch.cuda.current_device() == 0, "the call left another device current"


@contextmanager
def first_gpu_busy() -> Iterator[None]:
    """Keep the first GPU's stream busy; in the end the second GPU must be done, and the first not."""
    torch.cuda.synchronize(FIRST)
    torch.cuda._sleep(SLEEP_CYCLES)
    yield
    torch.cuda.synchronize(SECOND)
    assert not torch.cuda.current_stream(FIRST).query(), "the call waited for the GPU that is current"


def score_blocks(calls: LauncherCalls) -> Tensor:
    operands, batch = calls.operands, calls.operands.microbatch
    bundle = kernels(backend="sm90")
    plan = bundle.fmha_sm100_plan(batch.lengths, batch.key_lengths, 4, num_kv_heads=1, output_maxscore=True)
    scores: Tensor = bundle.fmha_sm100(operands.index_q, operands.index_k, operands.index_k, plan, output_o=False)[1]
    return scores


def select_fused(calls: LauncherCalls) -> Tensor:
    operands, batch = calls.operands, calls.operands.microbatch
    plan = score.fmha_sm100_plan(batch.lengths, batch.key_lengths, 4, num_kv_heads=1, output_maxscore=True)[3]
    assert isinstance(plan, score.ScorePlan)
    device = operands.q.device
    with torch.cuda.device(device):  # this is below the launchers, which make the device current
        work = select.share_segments(plan, device, ctas=64)
        return select.select_fused(operands.index_q, operands.index_k, work, init=1, local=1, topk=16)


def build_index(calls: LauncherCalls) -> tuple[Tensor, ...]:
    row_ptr, q_indices, schedule = calls.build_index()
    return row_ptr, q_indices, schedule.scheduler_metadata, schedule.work_count, schedule.split_counts


CALLS: dict[str, Callable[[LauncherCalls], Any]] = {
    "build_k2q_csr": build_index,
    "fmha_sm100": score_blocks,
    "select_blocks": LauncherCalls.select,
    "select_blocks in one kernel": select_fused,
    "sparse_atten_func": LauncherCalls.attend,
    "run_backward": LauncherCalls.differentiate,
    "sparse_attention": LauncherCalls.run_layer,
    "sparse_attention and its backward": LauncherCalls.run_layer_both_ways,
}


def as_list(results: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def assert_same(got: list[Tensor], want: list[Tensor], device: torch.device) -> None:
    assert len(got) == len(want) > 0
    for mine, theirs in zip(got, want, strict=True):
        assert mine.device == device
        a, b = mine.cpu(), theirs.cpu()
        if not a.dtype.is_floating_point:
            assert torch.equal(a, b)
            continue
        assert torch.equal(a.isneginf(), b.isneginf())
        a, b = (x.double().masked_fill(x.isneginf(), 0) for x in (a, b))
        assert float((a - b).norm()) <= TOLERANCE * float(b.norm())


@pytest.mark.parametrize("name", CALLS)
def test_operands_decide_where_a_call_runs(both: tuple[LauncherCalls, LauncherCalls], name: str) -> None:
    """Guards launches, allocations, streams and tables on the current device rather than on that of the operands."""
    here, there = both
    want = as_list(CALLS[name](here))
    CALLS[name](there)  # whatever is loaded or copied at a first call
    torch.cuda.synchronize(SECOND)
    with first_gpu_busy():
        got = as_list(CALLS[name](there))
    assert_same(got, want, SECOND)


def test_results_follow_the_stream_of_their_device(both: tuple[LauncherCalls, LauncherCalls]) -> None:
    """Guards the default stream of the second GPU in place of the one that is current there."""
    here, there = both
    want = as_list(here.attend())
    stream = torch.cuda.Stream(SECOND)
    late = replace(there.operands, q=torch.zeros_like(there.operands.q))
    source, there.operands = there.operands, late
    try:
        torch.cuda.synchronize(SECOND)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES // 20)
            late.q.copy_(source.q)
            torch.cuda.set_device(FIRST)  # streams are current for each device
            got = as_list(there.attend())
        stream.synchronize()
    finally:
        there.operands = source
    assert_same(got, want, SECOND)


def test_two_gpus_at_once(both: tuple[LauncherCalls, LauncherCalls]) -> None:
    """Guards work space, plans or kernel handles that two devices share: a thread for each, twenty rounds."""

    def train(calls: LauncherCalls) -> list[list[Tensor]]:
        torch.cuda.set_device(FIRST)
        rounds = [[calls.select(), *calls.run_layer_both_ways()] for _ in range(20)]
        torch.cuda.synchronize(calls.operands.q.device)
        return rounds

    want = [both[0].select(), *both[0].run_layer_both_ways()]
    with ThreadPoolExecutor(2) as pool:
        for calls, rounds in zip(both, pool.map(train, both), strict=True):
            for got in rounds:
                assert_same(got, want, calls.operands.q.device)


def test_a_graph_of_the_second_gpu(both: tuple[LauncherCalls, LauncherCalls]) -> None:
    """Guards a capture that waits for the first GPU, or whose kernels are of another context."""
    here, there = both
    want = as_list(here.run_layer_both_ways())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(SECOND):
        there.run_layer_both_ways()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = as_list(there.run_layer_both_ways())
    with first_gpu_busy():
        graph.replay()
    assert_same(got, want, SECOND)


def test_a_schedule_error_belongs_to_its_device(both: tuple[LauncherCalls, LauncherCalls]) -> None:
    """Guards an error word that all devices share: the wrong call would raise."""
    here, there = both
    good = there.schedule
    there.schedule = replace(good, q_indices=good.q_indices.clone().fill_(1 << 20))
    try:
        gradients = there.differentiate()
        torch.cuda.synchronize(SECOND)
        assert all(bool(gradient.isnan().all()) for gradient in gradients)
        here.differentiate()
        there.schedule = good
        with pytest.raises(ScheduleError, match="an earlier call of run_backward on this device"):
            there.differentiate()
    finally:
        there.schedule = good
    assert_same(as_list(there.differentiate()), as_list(here.differentiate()), SECOND)


def test_operands_of_two_gpus_are_refused(both: tuple[LauncherCalls, LauncherCalls]) -> None:
    """Guards pointers of one GPU that a kernel on another dereferences."""
    here, there = both
    operands, other = here.operands, there.operands
    mixed = replace(operands, k=other.k)
    for call in (LauncherCalls.attend, LauncherCalls.run_layer):
        here.operands = mixed
        try:
            with pytest.raises(ValueError, match="device"):
                call(here)
        finally:
            here.operands = operands
    torch.cuda.synchronize(FIRST)
    torch.cuda.synchronize(SECOND)


FIRST_CALL = """
import torch
from msa_vendored.bench import workload
from msa_vendored.bench.check import compare_sample
from msa_vendored.bench.ours import LauncherCalls
operands = workload.make_operands(workload.Case("x", (300, 40)), torch.device("cuda", 1), seed=1)
calls = LauncherCalls("sm90", operands)
calls.select()
errors = compare_sample(operands, calls.collect(), dense=False)
torch.cuda.synchronize(1)
assert torch.cuda.current_device() == 0
assert max(errors.values()) < 7e-3, errors
assert torch.cuda.memory_reserved(0) == 0, "something was allocated on the GPU that is current"
print("right")
"""


def test_the_first_call_of_a_process_may_be_on_the_second_gpu() -> None:
    """Guards kernels that are loaded into the current device's context, and work space that is allocated there."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "right\n", done.stderr[-3000:]
