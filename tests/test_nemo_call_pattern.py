"""Our bundle behind a layer that calls it as NeMo Automodel's bindings do: same names, order and keywords.

The layer is written here from the contract. Nothing of the training API is used in it except Microbatch, whose fields
have the names of Automodel's MSAMicrobatch.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import msa_vendored
from msa_vendored import Microbatch, MSABackwardSchedule, MSAKernels, UnavailableError, kernels
from msa_vendored.reference import dense_attention
from msa_vendored.training import select_blocks, sparse_attention

DOCUMENTS = [[127, 129, 1, 3], [2, 5, 128]]
"""Two rows of 260 tokens, padded; document lengths around the block size."""

LIMITS = {
    # Against float32 with bf16 inputs: largest difference, relative L2. Automodel's own bounds for this case.
    "out": (0.025, 0.006),
    "lse": (0.002, 0.001),
    "dq": (0.035, 0.007),
    "dk": (0.075, 0.007),
    "dv": (0.1, 0.007),
}


class BoundAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Forward and backward over the bundle, on compact tokens, with the saved tensors of the contract."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q2k: Tensor, microbatch: Microbatch, bundle: MSAKernels, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        cu_seqlens, longest = microbatch.cu_seqlens, microbatch.max_seqlen
        row_ptr, q_indices, schedule = bundle.build_k2q_csr(
            q2k,
            cu_seqlens,
            cu_seqlens,
            128,
            total_k=k.shape[0],
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            total_rows=microbatch.workspace_size // 128,
            qhead_per_kv=16,
            return_schedule=True,
        )
        out, lse = bundle.sparse_atten_func(
            q,
            k,
            v,
            row_ptr,
            q_indices,
            16,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            blk_kv=128,
            causal=True,
            softmax_scale=scale,
            partial_dtype=torch.bfloat16,
            return_softmax_lse=True,
            schedule=schedule,
        )
        ctx.bundle, ctx.workspace_size = bundle, microbatch.workspace_size
        ctx.save_for_backward(
            q,
            k,
            v,
            out,
            lse,
            row_ptr,
            q_indices,
            schedule.scheduler_metadata,
            schedule.work_count,
            microbatch.workspace_positions,
            microbatch.document_workspace_starts,
            cu_seqlens,
        )
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # torch is untyped here
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, row_ptr, q_indices, metadata, work_count, positions, starts, cu_seqlens = ctx.saved_tensors
        k_aligned, v_aligned = k.new_zeros(2, ctx.workspace_size, *k.shape[1:])
        k_aligned[positions], v_aligned[positions] = k, v
        dq, dk_aligned, dv_aligned = ctx.bundle.run_backward(
            q=q,
            k_aligned=k_aligned,
            v_aligned=v_aligned,
            grad_out=torch.zeros_like(out) if grad_out is None else grad_out,
            lse=lse,
            out=out,
            schedule=MSABackwardSchedule(
                row_ptr=row_ptr,
                q_indices=q_indices,
                scheduler_metadata=metadata,
                work_count=work_count,
                cu_seqlens=cu_seqlens,
                document_workspace_starts=starts,
            ),
        )
        return dq, dk_aligned[positions], dv_aligned[positions], None, None, None, None


def select(index_q: Tensor, index_k: Tensor, microbatch: Microbatch, bundle: MSAKernels) -> Tensor:
    """The score pass and the ranking of the contract: forced blocks to +inf, future ones to -inf, torch.topk."""
    lengths = microbatch.cu_seqlens.diff()
    plan = bundle.fmha_sm100_plan(
        lengths,
        lengths,
        4,
        num_kv_heads=1,
        causal=True,
        output_maxscore=True,
        num_kv_splits=1,
        split_prefill_decode=False,
    )
    max_k_tiles = plan[3]["max_k_tiles"]
    assert max_k_tiles > 0
    scratch = torch.full((4, max_k_tiles, index_q.shape[0]), -torch.inf)
    _, scores = bundle.fmha_sm100(
        index_q, index_k, index_k, plan, max_score=scratch, output_o=False, output_maxscore=True
    )
    own = microbatch.document_positions // 128
    blocks = torch.arange(max_k_tiles)[:, None]
    init, local = microbatch.forced_blocks
    forced = (blocks < init) | ((blocks == own) if local else torch.zeros_like(blocks == own))
    scores = scores.masked_fill(forced, torch.inf).masked_fill(blocks > own, -torch.inf)
    best, ids = scores.topk(16, dim=1)
    return ids.masked_fill(best == -torch.inf, -1).transpose(1, 2).to(torch.int32).contiguous()


@pytest.fixture(scope="module")
def packed() -> tuple[Microbatch, dict[str, Tensor]]:
    doc_ids = torch.zeros(2, 260, dtype=torch.int64)
    for row, lengths in enumerate(DOCUMENTS):
        filled = torch.cat([torch.full((length,), ordinal + 1) for ordinal, length in enumerate(lengths)])
        doc_ids[row, : filled.numel()] = filled
    microbatch = Microbatch.from_document_map(doc_ids, forced_blocks=(1, 1))
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 64, "k": 4, "v": 4, "grad_out": 64, "index_q": 4, "index_k": 1}
    batch = {name: torch.randn(2, 260, count, 128, generator=generator).bfloat16() for name, count in heads.items()}
    return microbatch, {name: microbatch.pack(tensor) for name, tensor in batch.items()}


def test_layer_over_our_bundle_meets_the_published_bounds(packed: tuple[Microbatch, dict[str, Tensor]]) -> None:
    """Guards names, positional order, keywords, shapes and sentinels of all five launchers, and the numbers."""
    microbatch, tensors = packed
    bundle = kernels(backend="reference")
    q2k = select(tensors["index_q"], tensors["index_k"], microbatch, bundle)
    inputs = [tensors[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out, lse = BoundAttention.apply(*inputs, q2k, microbatch, bundle, 128**-0.5)
    out.backward(tensors["grad_out"])
    q, k, v = wide = [tensors[name].float().requires_grad_() for name in ("q", "k", "v")]
    dense, dense_lse = dense_attention(q, k, v, q2k, microbatch.cu_seqlens, microbatch.cu_seqlens, causal=True)
    dense.backward(tensors["grad_out"].float())
    pairs = {
        "out": (out, dense),
        "lse": (lse, dense_lse),
        **{name: (got.grad, want.grad) for name, got, want in zip(("dq", "dk", "dv"), inputs, wide, strict=True)},
    }
    for name, (got, want) in pairs.items():
        largest, relative = LIMITS[name]
        want = want.detach()
        error = got.detach().float() - want
        assert float(error.abs().max()) < largest, name
        assert float(error.norm() / want.norm()) < relative, name


def test_training_api_computes_what_the_layer_computes(packed: tuple[Microbatch, dict[str, Tensor]]) -> None:
    """Guards our own API drifting from the call pattern: same selection, same output, same gradients."""
    microbatch, tensors = packed
    bundle = kernels(backend="reference")
    q2k = select(tensors["index_q"], tensors["index_k"], microbatch, bundle)
    ids = select_blocks(tensors["index_q"], tensors["index_k"], microbatch)
    ascending = torch.where(q2k < 0, 2**30, q2k).sort(-1).values
    assert torch.equal(torch.where(ascending == 2**30, -1, ascending), ids)

    def by_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = BoundAttention.apply(q, k, v, q2k, microbatch, bundle, 128**-0.5)[0]
        return out

    def by_api(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, ids, microbatch)

    results = []
    for attend in (by_layer, by_api):
        q, k, v = inputs = [tensors[name].clone().requires_grad_() for name in ("q", "k", "v")]
        out = attend(q, k, v)
        results.append((out.detach(), *torch.autograd.grad(out, inputs, tensors["grad_out"])))
    for ours, theirs in zip(*results, strict=True):
        # One rounding to bf16 at most: float32 sums in another order of blocks.
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=2e-3)


def test_bundle_has_the_fields_and_the_call_that_the_layer_expects() -> None:
    """Guards a bundle that unpacks in another order, or that needs an argument."""
    names = ["build_k2q_csr", "sparse_atten_func", "fmha_sm100", "fmha_sm100_plan", "run_backward"]
    assert [field.name for field in fields(MSAKernels)] == names
    assert all(
        parameter.default is not inspect.Parameter.empty
        for parameter in inspect.signature(msa_vendored.kernels).parameters.values()
    )
    assert callable(kernels.cache_clear)
    assert issubclass(UnavailableError, Exception)
    assert not issubclass(UnavailableError, ImportError)


def test_microbatch_has_the_fields_that_the_layer_reads() -> None:
    """Guards renamed fields: the layer reads these off its micro-batch."""
    names = {field.name for field in fields(Microbatch)}
    assert names >= {
        "padding_mask",
        "token_rows",
        "workspace_positions",
        "document_positions",
        "document_workspace_starts",
        "cu_seqlens",
        "workspace_size",
        "max_seqlen",
    }


def test_plan_of_another_micro_batch_is_refused(packed: tuple[Microbatch, dict[str, Tensor]]) -> None:
    """Guards the stale plan of a checkpointed layer: its tokens are not those of index_q."""
    microbatch, tensors = packed
    stale = Microbatch.from_document_map(torch.ones(1, 100, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not belong to this micro-batch"):
        select_blocks(tensors["index_q"], tensors["index_k"], stale)
    ids = torch.zeros(4, 100, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected: \[4, 395, topk\]"):
        sparse_attention(tensors["q"], tensors["k"], tensors["v"], ids, microbatch)
