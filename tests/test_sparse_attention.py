"""``sparse_attention`` against a dense masked float64 attention, and its gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_attention_cases import Case, make_case
from torch import Tensor

from msa_vendored.training import (
    Microbatch,
    ops,
    select_blocks,
    sparse_attention,
)

REAL_PACK = Path(__file__).parent / "data" / "training_pack.json"

EXACT = {"rtol": 0.0, "atol": 1e-11}
"""Both sides are float64 with sums of at most a few thousand terms of order one; measured differences are 1e-13."""


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small tensors are faster without threads, which wait for each other where cores are shared."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, microbatch: Microbatch, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition with one T x Tk mask per key/value head. Returns out and which rows see a key."""
    documents_q = torch.arange(microbatch.num_documents).repeat_interleave(microbatch.lengths)
    documents_k = torch.arange(microbatch.num_documents).repeat_interleave(microbatch.key_lengths)
    positions_k = torch.arange(k.shape[0]) - microbatch.key_cu_seqlens[:-1][documents_k]
    causal = positions_k[None, :] <= microbatch.document_positions[:, None]
    same = documents_q[:, None] == documents_k[None, :]
    ratio = q.shape[1] // k.shape[1]
    outs = []
    seen = []
    for head in range(q.shape[1]):
        ids = block_ids[head // ratio]
        selected = (ids[:, :, None] == (positions_k // 128)[None, None, :]).any(1)
        mask = selected & causal & same
        logits = (q[:, head] @ k[:, head // ratio].T * scale).masked_fill(~mask, -1e30)
        weights = logits.softmax(-1) * mask
        outs.append(weights @ v[:, head // ratio])
        seen.append(mask.any(1))
    return torch.stack(outs, 1), torch.stack(seen, 1)


def differentiate(case: Case, **keywords: Any) -> tuple[Tensor, ...]:
    out = sparse_attention(*case.inputs, case.block_ids, case.microbatch, **keywords)
    return out.detach(), *torch.autograd.grad(out, case.inputs, case.grad_out)


def differentiate_densely(case: Case, scale: float) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().double().requires_grad_() for tensor in case.inputs]
    out, _ = attend_densely(inputs[0], inputs[1], inputs[2], case.block_ids, case.microbatch, scale)
    return out.detach(), *torch.autograd.grad(out, inputs, case.grad_out.double())


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 64, 127, 128, 129, 260]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 1), (16, 1), (3, 3)]),
    topk=st.sampled_from([4, 8, 16, 32]),
    dim=st.sampled_from([4, 8, 20]),
    prefix=st.sampled_from([0, 0, 1, 130]),
    scale=st.sampled_from([None, 0.3, 1.5]),
    seed=st.integers(0, 2**31),
)
def test_output_and_gradients_are_those_of_dense_masked_attention(
    lengths: list[int],
    heads: tuple[int, int],
    topk: int,
    dim: int,
    prefix: int,
    scale: float | None,
    seed: int,
) -> None:
    """Guards the whole path: packing, index, forward, workspace, backward, scale, head ratios and prefixes."""
    case = make_case(lengths, heads=heads, topk=topk, dim=dim, prefix=prefix, seed=seed)
    ours = differentiate(case, softmax_scale=scale)
    dense = differentiate_densely(case, dim**-0.5 if scale is None else scale)
    for name, got, expected in zip(("out", "dq", "dk", "dv"), ours, dense, strict=True):
        torch.testing.assert_close(got, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_gradcheck_in_float64() -> None:
    """Guards gradients against finite differences, an independent witness."""
    case = make_case([3, 130], heads=(2, 1), dim=2, seed=3)
    assert torch.autograd.gradcheck(
        lambda q, k, v: sparse_attention(q, k, v, case.block_ids, case.microbatch), case.inputs, fast_mode=True
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)])
def test_lower_precision_rounds_only_inputs_and_results(dtype: torch.dtype, limit: float) -> None:
    """Guards sums in the input dtype. Limits are twice a result's own rounding error, 2**-9 for bfloat16."""
    case = make_case([300, 129, 5], heads=(8, 2), topk=4, dim=32, dtype=dtype, seed=7)
    for got, expected in zip(differentiate(case), differentiate_densely(case, 32**-0.5), strict=True):
        assert got.dtype == dtype
        assert float((got.double() - expected).norm() / expected.norm()) < limit


def test_rows_that_see_nothing_are_zero_and_give_no_gradient() -> None:
    """Guards exp(inf) and NaN from rows whose LSE is -inf: nothing selected, or only blocks of the future."""
    case = make_case([300], heads=(2, 1), seed=1)
    ids = torch.full_like(case.block_ids, -1)
    ids[0, 200:, 0] = 1
    ids[0, :100, 0] = 2
    out = sparse_attention(*case.inputs, ids, case.microbatch)
    grads = torch.autograd.grad(out, case.inputs, case.grad_out)
    assert not out[:200].any()
    assert not grads[0][:200].any()
    assert all(torch.isfinite(tensor).all() for tensor in (out, *grads))


def test_keys_that_nobody_selected_get_exactly_zero() -> None:
    """Guards uninitialised accumulators and gradients leaking between blocks and documents."""
    case = make_case([129, 300], heads=(4, 2), seed=2)
    ids = torch.full_like(case.block_ids, -1)
    ids[0, :, 0] = 0
    ids[1, 129:, 0] = 1
    out = sparse_attention(*case.inputs, ids, case.microbatch)
    _, dk, dv = torch.autograd.grad(out, case.inputs, case.grad_out)
    touched = torch.zeros(429, 2, dtype=torch.bool)
    touched[:128, 0] = touched[129:257, 0] = touched[257:385, 1] = True
    for grad in (dk, dv):
        assert torch.equal(grad.any(-1), touched)


def test_order_of_ids_means_nothing() -> None:
    """Guards a backend that takes the first id for the local block."""
    case = make_case([600], heads=(4, 2), topk=8, seed=5)
    for token in range(case.block_ids.shape[1]):
        kept = int((case.block_ids[0, token] >= 0).sum())
        case.block_ids[1, token] = case.block_ids[0, token]
        case.block_ids[1, token, :kept] = case.block_ids[0, token, :kept].flip(0)
    q, k, v = (tensor.detach() for tensor in case.inputs)
    q[:, 2:], k[:, 1], v[:, 1] = q[:, :2], k[:, 0], v[:, 0]
    out = sparse_attention(q, k, v, case.block_ids, case.microbatch)
    torch.testing.assert_close(out[:, 2:], out[:, :2], **EXACT)


@pytest.mark.slow
def test_real_training_pack_cut_to_8192_tokens() -> None:
    """Guards real lengths: 7 documents of 290 to 4,463 tokens (the last one cut), and 16 of up to 35 blocks."""
    cu_seqlens = torch.tensor(json.loads(REAL_PACK.read_text())["cu_seqlens"])
    cu_seqlens = torch.cat([cu_seqlens[cu_seqlens < 8192], torch.tensor([8192])])
    microbatch = Microbatch.from_cu_seqlens(cu_seqlens, (0, 1))
    torch.manual_seed(0)
    q, k, v = (torch.randn(8192, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    ids = select_blocks(torch.randn(8192, 2, 32), torch.randn(8192, 1, 32), microbatch)
    grad_out = torch.randn_like(q)
    out = sparse_attention(q, k, v, ids, microbatch)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        alone = Microbatch.from_cu_seqlens(torch.tensor([0, end - begin]))
        query, key, value = (tensor[begin:end] for tensor in doubles)
        dense, _ = attend_densely(query, key, value, ids[:, begin:end], alone, 0.125)
        dense.backward(grad_out[begin:end].double())
        torch.testing.assert_close(out[begin:end].double(), dense, rtol=0, atol=5e-6)
    for grad, double in zip(grads, doubles, strict=True):
        expected = double.grad
        assert expected is not None
        assert float((grad.double() - expected).norm() / expected.norm()) < 2e-6  # float32 sums of up to 4,463 terms


@pytest.mark.parametrize("view", ["transposed", "unaligned", "fused"])
def test_views_and_unaligned_storage_give_the_same(view: str) -> None:
    """Guards 128-bit loads from addresses that are no multiple of 16 bytes, and strides taken for granted."""

    def dress(tensor: Tensor) -> Tensor:
        if view == "transposed":
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        if view == "unaligned":
            return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]

    case = make_case([200, 3], heads=(4, 2), dtype=torch.float32, seed=9)
    ids = torch.cat([torch.zeros(1, dtype=torch.int32), case.block_ids.flatten()])[1:].view_as(case.block_ids)
    dressed = [dress(tensor.detach()).requires_grad_() for tensor in case.inputs]
    out = sparse_attention(dressed[0], dressed[1], dressed[2], ids, case.microbatch)
    grads = torch.autograd.grad(out, dressed, dress(case.grad_out))
    for got, expected in zip((out, *grads), differentiate(case), strict=True):
        assert torch.equal(got, expected)


def test_work_items_cover_every_edge_once() -> None:
    """Guards the backward's schedule: each edge of the CSR in one item, columns as the contract names them."""
    case = make_case([300, 1, 129], heads=(2, 2), seed=4)
    microbatch = case.microbatch
    _, _, row_ptr, q_indices, metadata, work_count = ops.sparse_attention_forward(
        *case.inputs,
        case.block_ids,
        microbatch.cu_seqlens,
        microbatch.workspace_positions,
        microbatch.document_workspace_starts,
        microbatch.csr_rows,
        microbatch.max_seqlen,
        0.5,
        "",
        True,
    )
    edges = set()
    for head, row, begin, count, document, block in metadata[: int(work_count)].tolist():
        for edge in range(int(row_ptr[head, row]) + begin, int(row_ptr[head, row]) + begin + count):
            edges.add((head, int(q_indices[head, edge]) + int(microbatch.cu_seqlens[document]), block))
    expected = {
        (head, token, block)
        for head, rows in enumerate(case.block_ids.tolist())
        for token, ids in enumerate(rows)
        for block in ids
        if block >= 0
    }
    assert edges == expected
    assert int(metadata[:, 3].sum()) == len(expected)
