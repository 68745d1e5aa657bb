"""Sparse attention with gradients: compact tokens in, compact tokens out, over the five launchers of a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_vendored.backward.accumulation import DQAccumulation, require_dq_accumulation
from msa_vendored.training import ops
from msa_vendored.training.backends import HEAD_RATIOS, TOPK_CHOICES
from msa_vendored.training.errors import ArgumentValueError, StalePlanError
from msa_vendored.training.microbatch import Microbatch

_STALE_HINT = "build the Microbatch and select_blocks from this batch, and pass both to the same call"


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    microbatch: Microbatch,
    *,
    softmax_scale: float | None = None,
    backend: str | None = None,
    check_selection: bool = True,
    dq_accumulation: DQAccumulation | None = None,
) -> Tensor:
    """Causal attention of each query over the key blocks selected for it, within its document.

    Query head h uses key/value head ``h // (Hq / Hkv)`` and the selection of that head. Key j of a selected block is
    visible to the query at document position p if j <= p; a query with no visible key gets zeros. Gradients go to q,
    k and v; keys that no query selected get exact zeros. Differentiable once. Traceable by ``torch.compile`` with
    ``fullgraph=True`` and by ``torch.export``: the work is in the custom operators ``msa_vendored::sparse_attention``
    and ``msa_vendored::sparse_attention_backward``. No T x T matrix is made; saved for backward are q, k, v, out, the
    LSE (``[T, Hq]``) and the index (4 bytes per query, key/value head and selected block, and per block).

    With a prefix (``T < Tk``) the queries are laid out among their document's keys first, so time and memory grow
    with Tk, as for T = Tk.

    Under ``torch.use_deterministic_algorithms(True)`` the kernels take two passes over the gradients, every sum is made
    by one CTA in a fixed order, and they repeat bit by bit. The flag is read when the backward runs.

    Under ``torch.utils.checkpoint`` (``use_reentrant=False``) recomputation uses the micro-batch that it is given;
    where that is not the one of the forward, backward raises :class:`StalePlanError`. Select blocks outside the
    checkpointed function if near-ties of scores must not be decided twice.

    Args:
        q: ``[T, Hq, D]`` compact query tokens. bfloat16 on the kernels, with D = 128; the reference also takes
            float16, float32 and float64 and any D. Copied where not contiguous or not 16-byte aligned.
        k: ``[Tk, Hkv, D]`` compact key tokens; dtype and device of q. Hq / Hkv is 1, 2, 4, 8 or 16.
        v: like k.
        block_ids: ``[Hkv, T, topk]`` int32, document-local block ids, -1 after the last; topk is 4, 8, 16 or 32.
            The order of the ids means nothing; what :func:`select_blocks` returns.
        microbatch: the documents.
        softmax_scale: factor of the logits, any finite number; None is ``D ** -0.5``.
        backend: see :func:`msa_vendored.training.resolve_backend`; None uses the kernels on a GPU that has them.
        check_selection: kernels do not notice duplicates, ids outside the document and ids after a -1; True adds a
            device-side assertion against them, without synchronisation, and False trusts the caller. The reference
            always refuses them with a ValueError.
        dq_accumulation: what the kernels of the backward sum dq in between key blocks, see ``run_backward``; None is
            its default, ``"fp16"`` on SM90, else ``"bf16"``. The reference sums in float32, float64 for float64 inputs,
            whatever this allows.

    Returns:
        ``[T, Hq, D]``, dtype and device of q, contiguous.

    Raises:
        StalePlanError: (a ValueError) token counts differ from the micro-batch's.
        ArgumentValueError: (a ValueError) other shapes, dtypes, devices or ids, an unknown ``dq_accumulation``, or
            nothing the backend is built for.
        UnsupportedArgumentError: (a NotImplementedError) a ``dq_accumulation`` that the backend's kernels do not have.
        UnavailableError: the backend cannot run here.
    """
    _require_shapes(q, k, v)
    _require_matching(q, k, v, block_ids)
    _require_tokens(q, k, block_ids, microbatch)
    accumulation = "" if dq_accumulation is None else require_dq_accumulation(dq_accumulation)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    rows = microbatch.query_rows
    if rows is not None:
        q, block_ids = _among_keys(q, block_ids, rows, microbatch.num_key_tokens)
    out = ops.sparse_attention_forward(
        q,
        k,
        v,
        block_ids,
        microbatch.key_cu_seqlens,
        microbatch.workspace_positions,
        microbatch.document_workspace_starts,
        microbatch.csr_rows,
        microbatch.max_key_seqlen,
        scale,
        backend or "",
        check_selection,
        accumulation,
    )[0]
    return out if rows is None else out.index_select(0, rows)


def _among_keys(q: Tensor, block_ids: Tensor, rows: Tensor, key_tokens: int) -> tuple[Tensor, Tensor]:
    # run_backward has one cu_seqlens for queries and keys. Rows of the prefix select nothing, so they cost no edges.
    q = q.new_zeros((key_tokens, *q.shape[1:])).index_copy(0, rows, q)
    ids = block_ids.new_full((block_ids.shape[0], key_tokens, block_ids.shape[2]), -1).index_copy(1, rows, block_ids)
    return q, ids


def _require_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ArgumentValueError(
            "q, k and v have the wrong shape",
            where="q, k, v",
            expected="[T, Hq, D], [Tk, Hkv, D] and [Tk, Hkv, D]",
            got=f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}",
        )
    if q.shape[1] not in [ratio * k.shape[1] for ratio in HEAD_RATIOS]:
        raise ArgumentValueError(
            "query heads per key/value head must be a power of two up to 16",
            where="q, k",
            expected=f"Hq / Hkv one of {HEAD_RATIOS}",
            got=f"Hq = {q.shape[1]}, Hkv = {k.shape[1]}",
        )


def _require_matching(q: Tensor, k: Tensor, v: Tensor, block_ids: Tensor) -> None:
    if not q.dtype.is_floating_point or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ArgumentValueError(
            "q, k and v must be of one floating-point dtype",
            where="q, k, v",
            expected="bfloat16 thrice (the reference: also float16, float32, float64)",
            got=f"{q.dtype}, {k.dtype} and {v.dtype}",
        )
    if block_ids.dtype != torch.int32:
        raise ArgumentValueError(
            "block_ids must be int32", where="block_ids", expected="torch.int32", got=str(block_ids.dtype)
        )
    if k.device != q.device or v.device != q.device or block_ids.device != q.device:
        raise ArgumentValueError(
            "q, k, v and block_ids must be on one device",
            where="q, k, v, block_ids",
            expected=str(q.device),
            got=f"{k.device}, {v.device} and {block_ids.device}",
        )


def _require_tokens(q: Tensor, k: Tensor, block_ids: Tensor, microbatch: Microbatch) -> None:
    if q.shape[0] != microbatch.num_tokens or k.shape[0] != microbatch.num_key_tokens:
        raise StalePlanError(
            "q and k do not belong to this micro-batch",
            where="microbatch",
            expected=f"{microbatch.num_tokens} query tokens and {microbatch.num_key_tokens} key tokens",
            got=f"{q.shape[0]} and {k.shape[0]}",
            next_command=_STALE_HINT,
        )
    _require_selection(q, k, block_ids)
    if microbatch.cu_seqlens.device != q.device:
        raise ArgumentValueError(
            "the micro-batch is on another device than q",
            where="microbatch",
            expected=str(q.device),
            got=str(microbatch.cu_seqlens.device),
            next_command="build the Microbatch with device=q.device",
        )


def _require_selection(q: Tensor, k: Tensor, block_ids: Tensor) -> None:
    if block_ids.ndim != 3 or block_ids.shape[0] != k.shape[1] or block_ids.shape[1] != q.shape[0]:
        raise StalePlanError(
            "block_ids do not belong to these tensors",
            where="block_ids",
            expected=f"[{k.shape[1]}, {q.shape[0]}, topk]",
            got=str(tuple(block_ids.shape)),
            next_command=_STALE_HINT,
        )
    if block_ids.shape[2] not in TOPK_CHOICES:
        raise ArgumentValueError(
            "block_ids select another number of blocks than the launchers take",
            where="block_ids",
            expected=f"topk one of {TOPK_CHOICES}; pad with -1",
            got=f"topk = {block_ids.shape[2]}",
        )
