"""sparse_attention within autograd: absent gradients, saved tensors, checkpointing, second derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from msa_vendored.reference import cases
from msa_vendored.training import Microbatch, StalePlanError, ops, select_blocks, sparse_attention


@dataclass(frozen=True, slots=True)
class Case:
    """One random problem in float64; q, k and v require gradients."""

    microbatch: Microbatch
    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    block_ids: Tensor


def make_case(lengths: list[int]) -> Case:
    packed = cases.make_case(lengths, index_heads=2, heads_per_index_head=2, head_dim=8, dtype=torch.float64)
    q, k, v = (tensor.requires_grad_() for tensor in (packed.q, packed.k, packed.v))
    return Case(Microbatch.from_cu_seqlens(packed.cu_seqlens_q), (q, k, v), packed.grad_out, packed.q2k_indices)


def pack(lengths: list[int]) -> Microbatch:
    return Microbatch.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))


def differentiate(case: Case) -> tuple[Tensor, ...]:
    out = sparse_attention(*case.inputs, case.block_ids, case.microbatch)
    return out.detach(), *torch.autograd.grad(out, case.inputs, case.grad_out)


def test_second_derivatives_are_refused() -> None:
    """Guards a gradient penalty that would silently be zero."""
    case = make_case([5])
    out = sparse_attention(*case.inputs, case.block_ids, case.microbatch)
    (dq,) = torch.autograd.grad(out, case.inputs[0], case.grad_out, create_graph=True)
    with pytest.raises(NotImplementedError, match="sparse_attention is differentiable once"):
        dq.sum().backward()


class NoGradient(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Passes its input on and no gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_absent_gradient_gives_zeros_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards materialised zeros going through a whole backward, or a crash on None."""
    case = make_case([5])
    monkeypatch.setattr(ops, "sparse_attention_backward", None)
    NoGradient.apply(sparse_attention(*case.inputs, case.block_ids, case.microbatch)).sum().backward()
    for tensor in case.inputs:
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_only_the_inputs_that_need_it_get_a_gradient() -> None:
    """Guards gradients accumulated into frozen projections."""
    case = make_case([5, 130])
    q, k, v = case.inputs
    out = sparse_attention(q.detach(), k, v.detach(), case.block_ids, case.microbatch)
    (dk,) = torch.autograd.grad(out, k, case.grad_out)
    assert torch.equal(dk, differentiate(case)[2])


def test_nothing_quadratic_is_saved_for_backward() -> None:
    """Guards memory: what is saved must be linear in tokens, and the list is the contract's."""
    sizes: dict[int, list[int]] = {}
    for tokens in (512, 1024):
        case = make_case([tokens])
        sizes[tokens] = []

        def note(tensor: Tensor, tokens: int = tokens) -> Tensor:
            sizes[tokens].append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            sparse_attention(*case.inputs, case.block_ids, case.microbatch)
    assert len(sizes[512]) == 12
    assert all(large <= 2 * small for small, large in zip(sizes[512], sizes[1024], strict=True))


def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, holder: dict[str, Microbatch]) -> Tensor:
    microbatch = holder["current"]
    ids = select_blocks(index[:, :2], index[:, 2:], microbatch, topk=4)
    return sparse_attention(q, k, v, ids, microbatch)


def checkpointed(case: Case, holder: dict[str, Microbatch]) -> Tensor:
    index = torch.randn(case.grad_out.shape[0], 3, 8, generator=torch.Generator().manual_seed(0))
    out: Tensor = checkpoint(attend, *case.inputs, index, holder, use_reentrant=False)
    return out


def test_checkpointing_recomputes_the_same_gradients() -> None:
    """Guards non-reentrant activation checkpointing, the usual way to train long contexts."""
    case = make_case([300, 129])
    out = checkpointed(case, {"current": case.microbatch})
    grads = torch.autograd.grad(out, case.inputs, case.grad_out)
    index = torch.randn(case.grad_out.shape[0], 3, 8, generator=torch.Generator().manual_seed(0))
    plain = attend(*case.inputs, index, {"current": case.microbatch})
    for got, expected in zip(grads, torch.autograd.grad(plain, case.inputs, case.grad_out), strict=True):
        assert torch.equal(got, expected)


STALE = {
    "other number of tokens": ([300, 128], StalePlanError),
    "same sizes, other boundaries": ([299, 130], StalePlanError),
    "same tokens, other number of documents": ([300, 100, 29], CheckpointError),
    "same tokens, other number of blocks": ([301, 128], CheckpointError),
}


@pytest.mark.parametrize(("lengths", "error"), STALE.values(), ids=STALE.keys())
def test_checkpointing_with_a_replaced_micro_batch_fails(lengths: list[int], error: type[Exception]) -> None:
    """Guards gradients of another micro-batch: a pipeline replaced the module's state before recomputation.

    Where sizes differ PyTorch notices itself; the second case is the one that only our comparison catches.
    """
    case = make_case([300, 129])
    holder = {"current": case.microbatch}
    out = checkpointed(case, holder)
    holder["current"] = pack(lengths)
    with pytest.raises(error):
        torch.autograd.grad(out, case.inputs, case.grad_out)


def test_checkpointing_with_an_equal_micro_batch_is_accepted() -> None:
    """Guards an identity check where equality is meant: the loader may rebuild the value."""
    case = make_case([300, 129])
    holder = {"current": case.microbatch}
    out = checkpointed(case, holder)
    holder["current"] = pack([300, 129])
    torch.autograd.grad(out, case.inputs, case.grad_out)


def test_saved_tensors_moved_to_the_host_and_back_are_accepted() -> None:
    """Guards ``save_on_cpu`` offloading, after which saved tensors have other addresses."""
    case = make_case([300, 129])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = sparse_attention(*case.inputs, case.block_ids, case.microbatch)
    grads = torch.autograd.grad(out, case.inputs, case.grad_out)
    assert torch.equal(grads[0], differentiate(case)[1])
