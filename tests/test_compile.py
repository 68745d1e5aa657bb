"""torch.compile, torch.export and torch.library.opcheck on the three custom operators."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from msa_vendored.training import Microbatch, ops, select_blocks, selection, sparse_attention

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Microbatch]


def layer(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, microbatch: Microbatch) -> Tensor:
    ids = select_blocks(index_q, index_k, microbatch, topk=4)
    return sparse_attention(q, k, v, ids, microbatch)


def make_batch(lengths: list[int], *, prefix: int = 0, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    keys = torch.tensor([0, *(length + prefix for length in lengths)]).cumsum(0) if prefix else None
    microbatch = Microbatch.from_cu_seqlens(bounds, key_cu_seqlens=keys)

    def draw(tokens: int, heads: int, *, grad: bool) -> Tensor:
        return torch.randn(tokens, heads, 8, generator=generator).requires_grad_(grad)

    tokens, key_tokens = microbatch.num_tokens, microbatch.num_key_tokens
    return (
        draw(tokens, 4, grad=True),
        draw(key_tokens, 2, grad=True),
        draw(key_tokens, 2, grad=True),
        draw(tokens, 2, grad=False),
        draw(key_tokens, 1, grad=False),
        microbatch,
    )


def run(function: Any, batch: Batch) -> tuple[Tensor, ...]:
    out = function(*batch)
    grads = torch.autograd.grad(out.square().sum(), batch[:3])
    return out.detach(), *grads


def assert_same(function: Any, batch: Batch) -> None:
    for got, expected in zip(run(function, batch), run(layer, batch), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)  # the same kernels: only dispatch differs


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("prefix", [0, 40])
def test_compiles_as_one_graph_with_gradients(prefix: int) -> None:
    """Guards graph breaks, and a fake implementation whose shapes or dtypes differ from the real one's."""
    assert_same(torch.compile(layer, fullgraph=True, backend="aot_eager"), make_batch([300, 5, 129], prefix=prefix))


def test_new_document_lengths_do_not_recompile_for_ever() -> None:
    """Guards a recompilation per step: the first change may make sizes dynamic, later ones must reuse that graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for step, lengths in enumerate([[300, 5, 129], [200, 200], [131, 7, 256, 90], [500], [129, 140, 9], [64, 300]]):
        assert_same(compiled, make_batch(lengths, seed=step))
    assert counter.frame_count <= 3  # static sizes, dynamic sizes, and one document only (sizes of 1 are special)


def test_compiles_under_activation_checkpointing() -> None:
    """Guards the usual combination of compiled layers and non-reentrant checkpointing."""

    def checkpointed(*batch: Any) -> Tensor:
        out: Tensor = checkpoint(layer, *batch, use_reentrant=False)
        return out

    assert_same(torch.compile(checkpointed, fullgraph=True, backend="aot_eager"), make_batch([300, 129]))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # inductor's own import
def test_compiles_with_inductor() -> None:
    """Guards the default backend, which also runs the packing around the operators."""

    def packed(*batch: Any) -> Tensor:
        microbatch = batch[-1]
        q, k, v, index_q, index_k = (microbatch.pack(microbatch.unpack(tensor * 1.0)) for tensor in batch[:-1])
        return layer(q, k, v, index_q, index_k, microbatch)

    assert_same(torch.compile(packed, fullgraph=True), make_batch([300, 129]))


class Layer(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """``layer`` as the module that torch.export wants."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, microbatch: Microbatch
    ) -> Tensor:
        return layer(q, k, v, index_q, index_k, microbatch)


def test_exports_and_loads_again() -> None:
    """Guards the pytree registration of Microbatch and the schemas of the operators, through serialisation."""
    batch = make_batch([300, 5, 129])
    exported = torch.export.export(Layer(), batch)
    names = [str(node.target) for node in exported.graph.nodes if "msa_vendored" in str(node.target)]
    assert names == ["msa_vendored.select_blocks.default", "msa_vendored.sparse_attention.default"]
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.export.load(buffer).module()(*batch), layer(*batch))


def test_program_exported_for_one_micro_batch_refuses_another() -> None:
    """Guards a program that would run with another micro-batch's longest document baked in."""
    exported = torch.export.export(Layer(), make_batch([300, 129])).module()
    with pytest.raises(AssertionError, match=r"Guard failed: microbatch\.max_seqlen == 300"):
        exported(*make_batch([279, 150]))


def test_exports_for_any_document_lengths() -> None:
    """Guards sizes that tracing would fix: number of tokens, of documents, of workspace rows, longest document."""
    batch, other, unseen = (
        make_batch(lengths) for lengths in ([300, 5, 129], [130, 40, 60, 77], [200, 7, 9, 256, 300])
    )
    inputs = torch.export.AdditionalInputs()
    inputs.add(batch)
    inputs.add(other)
    exported = torch.export.export(Layer(), batch, dynamic_shapes=inputs).module()
    torch.testing.assert_close(exported(*unseen), layer(*unseen))


OPTIONS = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")}


def forward_arguments(batch: Batch, accumulation: str = "fp32") -> tuple[Any, ...]:
    q, k, v, index_q, index_k, microbatch = batch
    return (
        q,
        k,
        v,
        select_blocks(index_q, index_k, microbatch, topk=4),
        microbatch.key_cu_seqlens,
        microbatch.workspace_positions,
        microbatch.document_workspace_starts,
        microbatch.csr_rows,
        microbatch.max_key_seqlen,
        0.5,
        "reference",
        True,
        accumulation,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_forward_operator_passes_opcheck(dtype: torch.dtype) -> None:
    """Guards schema, autograd registration, fake shapes and dtypes (the LSE's too) and dynamic tracing."""
    batch = make_batch([130, 1, 129])
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in batch[:3])
    arguments = (q, k, v, *forward_arguments(batch)[3:])
    results = torch.library.opcheck(ops.sparse_attention_forward, arguments, **OPTIONS)
    assert set(results.values()) == {"SUCCESS"}


def test_backward_operator_passes_opcheck() -> None:
    """Guards the same of the backward, which AOT autograd traces on its own."""
    batch = make_batch([130, 1, 129])
    microbatch = batch[-1]
    arguments = forward_arguments(batch)
    with torch.no_grad():
        out, lse, row_ptr, q_indices, metadata, work_count = ops.sparse_attention_forward(*arguments)
        q, k, v = (tensor.detach() for tensor in batch[:3])
    saved = (q, k, v, out, lse, row_ptr, q_indices, metadata, work_count)
    layout = (microbatch.workspace_positions, microbatch.document_workspace_starts, microbatch.cu_seqlens)
    options = (0.5, "reference", "bf16")
    results = torch.library.opcheck(
        ops.sparse_attention_backward,
        (torch.randn_like(out), *saved, *layout, microbatch.cu_seqlens, microbatch.workspace_size, *options),
        **OPTIONS,
    )
    assert set(results.values()) == {"SUCCESS"}


def test_selection_operator_passes_opcheck() -> None:
    """Guards the same of the selection."""
    *_, index_q, index_k, microbatch = make_batch([130, 1, 129])
    results = torch.library.opcheck(
        selection.select_blocks_op,
        (
            index_q,
            index_k,
            microbatch.lengths,
            microbatch.key_lengths,
            microbatch.document_positions,
            microbatch.max_key_seqlen,
            1,
            1,
            4,
            "reference",
        ),
        **OPTIONS,
    )
    assert set(results.values()) == {"SUCCESS"}
