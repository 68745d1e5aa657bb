"""The SM90 launchers together, through ``select_blocks`` and ``sparse_attention``, on a Hopper GPU.

Tolerances, relative L2 against float32: out, dk and dv are rounded to bf16 (2^-9 = 2.0e-3 at most) after bf16 P and dS.
Measured here 2.1e-3, 3.0e-3 and 2.3e-3, as in other bf16 kernels (2.1e-3 to 3.0e-3); so 3e-3, and 3.5e-3 for dk, which
also has the rounding of ``out`` through delta. dq adds up to 16 blocks: 3e-3 with float32 sums and with fp16
sums, the default, 2.4e-3 for both over 16 blocks; with bf16 sums, each addition rounds, measured 3.3e-3 to 5.4e-3, and
7e-3 is the limit of NeMo Automodel's tests. The LSE is float32 through ex2 and lg2, so 1e-4.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_vendored import compiling, kernels
from msa_vendored.bench import check, workload
from msa_vendored.hopper import csr, score, select
from msa_vendored.training import (
    Microbatch,
    ops,
    resolve_backend,
    select_blocks,
    sparse_attention,
)

CUDA = torch.device("cuda", 0)
TOLERANCES = {"out": 3e-3, "dq": 3e-3, "dk": 3.5e-3, "dv": 3e-3}
BF16_SUMS_TOLERANCE, LSE_TOLERANCE = 7e-3, 1e-4


def is_hopper() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) == (9, 0))


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")]


@pytest.fixture(autouse=True)
def exact_and_poisoned() -> Iterator[None]:
    """No TF32 in the yardstick, and NaN in the memory that launchers get for results and work space."""
    with check.exact_float32():
        torch.cuda.empty_cache()
        poison = [torch.full((size,), torch.nan, device=CUDA) for size in (1 << 28, 1 << 22, 1 << 22, 1 << 16)]
        del poison
        yield


@dataclass(frozen=True, slots=True)
class Layer:
    """Inputs of one call; fresh random numbers for each seed."""

    microbatch: Microbatch
    inputs: tuple[Tensor, Tensor, Tensor]
    block_ids: Tensor
    grad_out: Tensor

    def run(self, backend: str | None = None, **options: Any) -> list[Tensor]:
        """Output and gradients."""
        q, k, v = inputs = [tensor.detach().requires_grad_() for tensor in self.inputs]
        out = sparse_attention(q, k, v, self.block_ids, self.microbatch, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad_out)]

    def to_float(self) -> Layer:
        q, k, v = (tensor.float() for tensor in self.inputs)
        return Layer(self.microbatch, (q, k, v), self.block_ids, self.grad_out.float())


def make_layer(
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (64, 4),
    topk: int = 16,
    keys: Sequence[int] | None = None,
    seed: int = 0,
    selection: str = "random",
) -> Layer:
    generator = torch.Generator(device=CUDA).manual_seed(seed)

    def normal(tokens: int, count: int) -> Tensor:
        return torch.randn((tokens, count, 128), generator=generator, device=CUDA).bfloat16()

    bounds = torch.tensor([0, *lengths]).cumsum(0)
    key_bounds = None if keys is None else torch.tensor([0, *keys]).cumsum(0)
    batch = Microbatch.from_cu_seqlens(bounds, key_cu_seqlens=key_bounds, device=CUDA)
    ids = workload.select_at_random(batch.document_positions, max(keys or lengths), selection, generator)[:, :, :topk]
    if topk > ids.shape[2]:
        ids = torch.nn.functional.pad(ids, (0, topk - ids.shape[2]), value=-1)
    # Every other query drops the blocks beyond half of the width: tails of -1 where there are candidates.
    dropped = (torch.arange(topk, device=CUDA) >= topk // 2) & (batch.document_positions % 2 == 0)[:, None]
    ids = ids[: heads[1]].masked_fill(dropped, -1)
    tokens, key_tokens = batch.num_tokens, batch.num_key_tokens
    inputs = normal(tokens, heads[0]), normal(key_tokens, heads[1]), normal(key_tokens, heads[1])
    return Layer(batch, inputs, ids.contiguous(), normal(tokens, heads[0]))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2; where nothing but rounding is left, as in dq of documents of one token, relative to 1e-3 each."""
    floor = 1e-3 * want.numel() ** 0.5
    return float((got.double() - want.double()).norm() / max(float(want.double().norm()), floor))


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    errors = {name: relative_error(a, b) for name, a, b in zip(TOLERANCES, got, want, strict=True)}
    assert {name: error for name, error in errors.items() if not error < TOLERANCES[name]} == {}, errors


LAYERS: dict[str, dict[str, Any]] = {
    "lengths around a block": {"lengths": [127, 129, 1, 2, 3, 5, 128]},
    "documents of one token": {"lengths": [1] * 9},
    "truncated to 16 of 18 blocks": {"lengths": [2177]},
    "long and short, mixed": {"lengths": [2500, 1, 1500, 64], "selection": "mixed"},
    "a prefix of keys": {"lengths": [130, 5, 40], "keys": [700, 5, 168]},
    # Every ratio and width compiles for seconds; the tests of forward and backward have the others.
    "ratio 4, top-4": {"lengths": [700, 129], "heads": (8, 2), "topk": 4},
    "ratio 1, one head of each": {"lengths": [300, 129], "heads": (1, 1)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_agrees_with_float32(name: str) -> None:
    """Guards the chain of index, forward and backward in every geometry that it says it takes."""
    layer = make_layer(**LAYERS[name])
    assert resolve_backend(None, CUDA) == "sm90"
    assert_close(layer.run(), layer.to_float().run("reference"))


@pytest.mark.parametrize("seed", range(3))
def test_fresh_inputs_every_time(seed: int) -> None:
    """Guards results left over from a call before, and errors that show on some inputs only."""
    layer = make_layer([900, 400, 33], seed=seed + 10)
    assert_close(layer.run(), layer.to_float().run("reference"))


def launch_forward(layer: Layer, backend: str) -> Any:
    batch = layer.microbatch
    return ops.sparse_attention_forward(
        *layer.inputs, layer.block_ids, batch.cu_seqlens, batch.workspace_positions,
        batch.document_workspace_starts, batch.csr_rows, batch.max_key_seqlen, 128**-0.5, backend, True,
    )  # fmt: skip


def test_lse_and_index_agree_with_the_reference() -> None:
    """Guards the LSE in another base or with the scale left out, and a CSR in another order."""
    layer = make_layer([1500, 1, 129])
    got, want = launch_forward(layer, "sm90"), launch_forward(layer.to_float(), "reference")
    assert float((got[1] - want[1]).abs().max()) < LSE_TOLERANCE
    for mine, theirs in zip(got[2:], want[2:], strict=True):
        assert torch.equal(mine, theirs)


def assert_same_index(block_ids: Tensor, batch: Microbatch, spare_rows: int) -> None:
    rows = batch.csr_rows.shape[0] + spare_rows
    sizes = {"total_k": batch.num_tokens, "max_seqlen_k": batch.max_seqlen, "max_seqlen_q": batch.max_seqlen}
    got, want = (
        kernels(backend=name).build_k2q_csr(
            block_ids, batch.cu_seqlens, batch.cu_seqlens, 128, **sizes, total_rows=rows, qhead_per_kv=16,
            return_schedule=True,
        )
        for name in ("sm90", "reference")
    )  # fmt: skip
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for name in ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts"):
        assert torch.equal(getattr(got[2], name), getattr(want[2], name)), name


def test_types_of_the_sums_of_dq() -> None:
    """Guards the accumulation type against being dropped on the way, and the kernels behind it."""
    layer = make_layer([2177, 300])
    want = layer.to_float().run("reference")
    errors = {name: relative_error(layer.run(dq_accumulation=name)[1], want[1]) for name in ("fp32", "fp16", "bf16")}
    assert errors["fp32"] < TOLERANCES["dq"]
    assert errors["fp16"] < TOLERANCES["dq"]
    assert errors["fp16"] < errors["bf16"] < BF16_SUMS_TOLERANCE


@pytest.mark.parametrize("topk", [4, 8, 16, 32])
def test_index_is_the_references_bit_for_bit(topk: int) -> None:
    """Guards ranks decided by the order in which threads run, with more rows than needed and a schedule."""
    layer = make_layer([3000, 1, 700, 128], topk=topk)
    assert_same_index(layer.block_ids, layer.microbatch, 2)


@pytest.mark.parametrize(("rows", "chunk"), [(6400, 256), (7200, 64)])
def test_index_of_many_rows(rows: int, chunk: int) -> None:
    """Guards shared memory beyond 48 KB, which needs an attribute, and the smaller chunk where 256 bits do not fit."""
    assert csr.chunk_queries(rows) == chunk
    layer = make_layer([128] * (rows - 100) + [1] * 100, heads=(1, 1), topk=4)
    assert_same_index(layer.block_ids, layer.microbatch, 0)


def test_keys_that_nobody_selected_get_exact_zeros() -> None:
    """Guards gradients of blocks without work, which no kernel writes."""
    layer = make_layer([1000])
    ids = layer.block_ids
    ids[:] = -1
    ids[:, :, 0] = 2
    ids[:, :256] = -1
    out, dq, dk, dv = layer.run()
    assert not out[:256].any()
    assert not dq[:256].any()
    for grad in (dk, dv):
        assert not grad[:256].any()
        assert not grad[384:].any()
        assert grad[256:384].any()
    assert_close([out, dq, dk, dv], layer.to_float().run("reference"))


def test_unaligned_and_strided_operands() -> None:
    """Guards 16-byte loads from a view at an odd offset, and layouts that are read as contiguous."""
    layer = make_layer([300, 129])
    want = layer.run()
    views = []
    for tensor in (*layer.inputs, layer.grad_out):
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=CUDA)
        buffer[1:] = tensor.flatten()
        views.append(buffer[1:].view_as(tensor))
    transposed = layer.inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    ids = torch.nn.functional.pad(layer.block_ids, (0, 3))[:, :, :16]
    assert views[0].data_ptr() % 16 == 2
    shifted = Layer(layer.microbatch, (views[0], views[1], views[2]), ids, views[3])
    strided = Layer(layer.microbatch, (transposed, *layer.inputs[1:]), layer.block_ids, layer.grad_out)
    for other in (shifted, strided):
        assert_close(other.run(), want)


def test_another_stream_sees_its_own_inputs() -> None:
    """Guards work on the default stream: the inputs are written late, on the stream of the call."""
    layer = make_layer([1200, 300])
    want = layer.run()
    late = [torch.full_like(tensor, torch.nan) for tensor in (*layer.inputs, layer.grad_out)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for target, source in zip(late, (*layer.inputs, layer.grad_out), strict=True):
            target.copy_(source)
        got = Layer(layer.microbatch, (late[0], late[1], late[2]), layer.block_ids, late[3]).run()
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(got, want)


def capture(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def test_a_captured_layer_replays_with_another_selection() -> None:
    """Guards work lists, counts or maxima that are read on the host, or frozen into a graph."""
    lengths = [2600, 129, 1]  # 21 blocks: with 16 or fewer every selection would be the same
    layer, other = make_layer(lengths, seed=1), make_layer(lengths, seed=2)
    assert not torch.equal(layer.block_ids, other.block_ids)
    graph, results = capture(layer.run)
    for source in (layer, other):
        layer.block_ids.copy_(source.block_ids)
        for target, value in zip(layer.inputs, source.inputs, strict=True):
            target.copy_(value)
        graph.replay()
        assert_close(results, layer.to_float().run("reference"))


def test_a_captured_selection_replays_with_other_scores() -> None:
    """Guards scores of a call before in memory that is not initialised."""
    batch = Microbatch.from_cu_seqlens(torch.tensor([0, 2500, 2600]), device=CUDA)
    index_q, index_k = (torch.randn(2600, heads, 128, device=CUDA).bfloat16() for heads in (4, 1))
    graph, (ids,) = capture(lambda: [select_blocks(index_q, index_k, batch)])
    index_q.normal_()
    graph.replay()
    assert torch.equal(ids, select_blocks(index_q, index_k, batch))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device_and_nothing_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a synchronisation in every layer, and a compilation for every new selection or length."""
    make_layer([800, 30]).run()
    first, second = make_layer([801, 30], seed=5), make_layer([2000], seed=6)

    def refuse(build: Callable[[], Any]) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_compile", refuse)
    for layer in (first, second):
        try:
            torch.cuda.set_sync_debug_mode("error")
            layer.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lengths", [[2177], [700, 1, 64, 1300], [1, 1, 1]])
@pytest.mark.parametrize("topk", [4, 16])
def test_selection_agrees_with_the_reference(lengths: list[int], topk: int) -> None:
    """Guards ties, forced blocks and document ends; small integers, so that scores and ties are exact."""
    torch.manual_seed(topk)
    batch = Microbatch.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), (1, 1), device=CUDA)
    index_q, index_k = (torch.randint(-1, 2, (sum(lengths), heads, 128), device=CUDA).bfloat16() for heads in (4, 1))
    want = select_blocks(index_q.float(), index_k.float(), batch, topk=topk, backend="reference")
    assert torch.equal(select_blocks(index_q, index_k, batch, topk=topk), want)
    plan = score.fmha_sm100_plan(batch.lengths, batch.key_lengths, 4, num_kv_heads=1, output_maxscore=True)[3]
    assert isinstance(plan, score.ScorePlan)
    chunks = select.make_chunks(plan, CUDA, ctas=7, budget=4 * 10 * 300)
    positions = batch.document_positions
    got = select.select_in_chunks(index_q, index_k, chunks, positions, init=1, local=1, topk=topk)
    assert torch.equal(got, want)
    work = select.share_segments(plan, CUDA, ctas=7)
    assert torch.equal(select.select_fused(index_q, index_k, work, init=1, local=1, topk=topk), want)


def test_scores_agree_with_the_reference() -> None:
    """Guards the launcher itself: raw maxima, -inf where nothing is seen, a buffer of the caller."""
    lengths = torch.tensor([700, 1, 1300])
    q, k = (torch.randn(2001, heads, 128, device=CUDA).bfloat16() for heads in (6, 2))
    results = []
    for name in ("sm90", "reference"):
        bundle = kernels(backend=name)
        plan = bundle.fmha_sm100_plan(lengths, lengths, 6, num_kv_heads=2, output_maxscore=True)
        buffer = torch.full((6, 128, 2001), -torch.inf, device=CUDA)
        _, scores = bundle.fmha_sm100(q, k, k, plan, max_score=buffer, output_o=False)
        assert scores is buffer
        results.append(scores)
    seen = results[1] > -torch.inf
    assert torch.equal(results[0] > -torch.inf, seen)
    # Sums of 128 products in another order: a few units in the last place of values around 30.
    assert float((results[0] - results[1])[seen].abs().max()) < 1e-4


def test_a_whole_pack_of_196608_tokens() -> None:
    """Guards products of token, head and dimension beyond int32, in memory, against float32 on a sample."""
    case = workload.Case("pack", (131073, *workload.draw_pack(65535)))
    assert case.tokens == 196608
    operands = workload.make_operands(case, CUDA, seed=4)
    batch = operands.microbatch
    layer = Layer(batch, (operands.q, operands.k, operands.v), operands.block_ids, operands.grad_out)
    results = layer.run()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results)
    errors = check.compare_sample(operands, check.Results(results[0], None, *results[1:]), dense=False)
    assert set(errors) == set(TOLERANCES)
    assert {name: error for name, error in errors.items() if not error < TOLERANCES[name]} == {}, errors
    ids = select_blocks(operands.index_q, operands.index_k, batch)
    assert ids.shape == (4, 196608, 16)
    assert bool((ids.amax(2) == batch.document_positions // 128).all())


def test_deterministic_algorithms_repeat_bitwise() -> None:
    """Guards a forward that depends on timing, and a backward whose sums do, although they were asked not to."""
    layer = make_layer([1500, 300])
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (layer.run() for _ in range(4))
        index, *indices = (launch_forward(layer, "sm90") for _ in range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, again, strict=True))
    for again in indices:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(index, again, strict=True))
    assert_close(first, layer.to_float().run("reference"))


FAULT = """
import torch
from msa_vendored.training import Microbatch, sparse_attention
batch = Microbatch.from_cu_seqlens(torch.tensor([0, 300, 400]), device="cuda")
q, k, v = (torch.randn(400, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
ids = torch.tensor([0, -1, -1, -1], dtype=torch.int32, device="cuda").repeat(2, 400, 1)
ids[:, :300, 1] = 2
sparse_attention(q, k, v, ids, batch)
torch.cuda.synchronize()
print("usable")
ids[1, 290, 1] = 0
sparse_attention(q, k, v, ids, batch, check_selection=False)
torch.cuda.synchronize()
print("trusted")
sparse_attention(q, k, v, ids, batch)
print("issued")
torch.cuda.synchronize()
print("not noticed")
"""


def test_an_unusable_selection_ends_the_run_at_the_next_synchronisation() -> None:
    """Guards keys that are counted twice; a process of its own, since the device is lost with the assertion."""
    result = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == "usable\ntrusted\nissued\n", result.stderr[-2000:]
    assert result.returncode != 0
    assert "assert" in result.stderr
