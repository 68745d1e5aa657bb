"""Other projects' attention for training, called as their documentation says; none is required."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.bench.check import Results
from msa_vendored.bench.implementations import Implementation, Peer, Prepared
from msa_vendored.bench.workload import KEY_HEADS, QUERY_HEADS, RATIO, SOFTMAX_SCALE, Operands

FLEX_ROWS = 128
"""Rows of one flex_attention block: 8 tokens x 16 heads, each row with the selection of its token."""


def from_autograd(
    attend: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor, restore: Callable[[Tensor], Tensor]
) -> Prepared:
    """A peer that differentiates through autograd.

    Args:
        attend: output from the three inputs.
        inputs: q, k and v in the peer's layout.
        grad_out: in the layout of the output.
        restore: from the peer's layout to ``[T, heads, 128]``.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        return grads

    def results() -> Results:
        return Results(restore(forward()), None, *(restore(grad) for grad in backward()))

    return Prepared({"forward": forward, "backward": backward}, results)


def head_major(tensor: Tensor) -> Tensor:
    """``[T, heads, 128]`` -> contiguous ``[1, heads, T, 128]``."""
    return tensor.transpose(0, 1).contiguous()[None]


def token_major(tensor: Tensor) -> Tensor:
    """``[1, heads, T, 128]`` -> ``[T, heads, 128]``."""
    return tensor[0].transpose(0, 1)


def prepare_flash_attention(operands: Operands) -> Prepared:
    """FlashAttention-4, dense causal, packed documents by its varlen function."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    batch = operands.microbatch
    inputs = [operands.q, operands.k, operands.v]
    if len(operands.case.lengths) == 1:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _first(flash_attn_func(q[None], k[None], v[None], softmax_scale=SOFTMAX_SCALE, causal=True))[0]

        return from_autograd(attend, inputs, operands.grad_out, lambda x: x)
    bounds: dict[str, Any] = {"cu_seqlens_q": batch.cu_seqlens, "cu_seqlens_k": batch.cu_seqlens}
    bounds |= {"max_seqlen_q": batch.max_seqlen, "max_seqlen_k": batch.max_seqlen}

    def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _first(flash_attn_varlen_func(q, k, v, **bounds, softmax_scale=SOFTMAX_SCALE, causal=True))

    return from_autograd(attend_packed, inputs, operands.grad_out, lambda x: x)


def _first(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def prepare_sdpa(backend: str) -> Callable[[Operands], Prepared]:
    """PyTorch's ``scaled_dot_product_attention`` with one of its back ends, dense causal."""

    def prepare(operands: Operands) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=SOFTMAX_SCALE, enable_gqa=True
                )

        inputs = [head_major(tensor) for tensor in (operands.q, operands.k, operands.v)]
        return from_autograd(attend, inputs, head_major(operands.grad_out), token_major)

    return prepare


def prepare_flex(operands: Operands) -> Prepared:
    """PyTorch's ``flex_attention``, compiled, on rows that hold one token's 16 heads side by side."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = make_flex_mask(operands)
    tokens = operands.case.tokens

    def fold(tensor: Tensor) -> Tensor:
        rows = tensor.view(tokens, KEY_HEADS, RATIO, -1).permute(1, 0, 2, 3)
        return rows.reshape(1, KEY_HEADS, tokens * RATIO, -1).contiguous()

    def unfold(tensor: Tensor) -> Tensor:
        if tensor.shape[2] == tokens:
            return token_major(tensor)
        return tensor[0].view(KEY_HEADS, tokens, RATIO, -1).permute(1, 0, 2, 3).reshape(tokens, QUERY_HEADS, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask, scale=SOFTMAX_SCALE)
        return out

    inputs = [fold(operands.q), head_major(operands.k), head_major(operands.v)]
    return from_autograd(attend, inputs, fold(operands.grad_out), unfold)


def make_flex_mask(operands: Operands) -> Any:
    """Block mask of the folded rows: a block is full where all its tokens selected it and lie behind it."""
    from torch.nn.attention.flex_attention import BlockMask

    tokens, device = operands.case.tokens, operands.q.device
    blocks, group = tokens // BLOCK_SIZE, FLEX_ROWS // RATIO
    chosen = torch.zeros((KEY_HEADS, tokens, blocks + 1), dtype=torch.bool, device=device)
    ids = operands.block_ids.long()
    chosen.scatter_(2, torch.where(ids < 0, blocks, ids), True)
    chosen = chosen[:, :, :blocks].contiguous()
    grouped = chosen.view(KEY_HEADS, tokens // group, group, blocks)
    own = torch.div(torch.arange(tokens // group, device=device) * group, BLOCK_SIZE, rounding_mode="floor")
    full = grouped.all(2) & (torch.arange(blocks, device=device) < own[:, None])
    partial = grouped.any(2) & ~full

    def keep(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        token = row // RATIO
        return chosen[head, token, key // BLOCK_SIZE] & (token >= key)

    def order(mask: Tensor) -> tuple[Tensor, Tensor]:
        indices = (~mask).to(torch.int8).argsort(dim=-1, stable=True)
        return mask.sum(-1).int()[None].contiguous(), indices.int()[None].contiguous()

    return BlockMask.from_kv_blocks(
        *order(partial),
        *order(full),
        BLOCK_SIZE=(FLEX_ROWS, BLOCK_SIZE),
        mask_mod=keep,
        seq_lengths=(tokens * RATIO, tokens),
    )


def prepare_flash_msa(operands: Operands) -> Prepared:
    """flash-msa: its metadata, main forward and main backward; the proxy's part switched off by a scale of 0."""
    from flash_msa.msa_backward_cutedsl import run_fused_backward
    from flash_msa.msa_forward_cutedsl import run_main_forward
    from flash_msa.reverse_index_cuda import build_sparse_attention_metadata_cuda

    tokens = operands.case.tokens
    operand_list = (operands.q, operands.k, operands.v, operands.grad_out, operands.index_q, operands.index_k)
    q, k, v, grad_out, index_q, index_k = (head_major(tensor) for tensor in operand_list)
    ids = operands.block_ids.masked_fill(operands.block_ids < 0, tokens // BLOCK_SIZE)[None].contiguous()

    def index() -> Any:
        return build_sparse_attention_metadata_cuda(ids, backward_query_chunk=128 // RATIO)

    metadata = index()

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = run_main_forward(q, k, v, scale=SOFTMAX_SCALE, metadata=metadata)
        return result

    out, lse, _ = forward()
    delta = (out.float() * grad_out.float()).sum(-1)
    index_lse = torch.zeros((1, KEY_HEADS, tokens), device=q.device)

    def backward() -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = run_fused_backward(
            index_q, index_k, q, k, v, grad_out, lse, index_lse, delta, metadata.task_meta, metadata.task_qids,
            scale=SOFTMAX_SCALE, grad_kl_scale=0.0,
        )  # fmt: skip
        return grads[2:]

    def results() -> Results:
        out, lse, _ = forward()
        return Results(token_major(out), lse[0].T, *(token_major(grad) for grad in backward()))

    parts: dict[str, Callable[[], Any]] = {"forward": forward, "backward": backward, "index": index}
    return Prepared(parts, results, "backward without delta; recompiles when the number of tasks changes")


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Peer(
        "FlashAttention-4 dense",
        True,
        "flash-attn-4",
        prepare_flash_attention,
        module="flash_attn.cute.interface",
        extra_versions=("nvidia-cutlass-dsl",),
    ),
    Peer("cuDNN SDPA dense", True, "torch", prepare_sdpa("CUDNN_ATTENTION"), single_document=True),
    Peer("flash SDPA dense", True, "torch", prepare_sdpa("FLASH_ATTENTION"), single_document=True),
    Peer(
        "flex_attention",
        False,
        "torch",
        prepare_flex,
        single_document=True,
        most_tokens=32768,
        multiple=BLOCK_SIZE,
        extra_versions=("triton",),
    ),
    Peer(
        "flash-msa",
        False,
        "flash-msa",
        prepare_flash_msa,
        module="flash_msa",
        single_document=True,
        most_tokens=32768,
        multiple=BLOCK_SIZE,
        extra_versions=("nvidia-cutlass-dsl",),
    ),
)
