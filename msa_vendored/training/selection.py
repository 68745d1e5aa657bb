"""Block selection: the indexer's score pass, then forced blocks, causality and top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_vendored.training.backends import TOPK_CHOICES, bind_kernels, on_device_of, resolve_backend
from msa_vendored.training.errors import ArgumentValueError, SelectionBufferError, StalePlanError
from msa_vendored.training.layout import BLOCK_SIZE, TensorMemo
from msa_vendored.training.microbatch import Microbatch

SCORE_CAPACITY = 2**31
"""Elements of ``max_score`` beyond which the official planner drops it and computes attention output instead."""

_RANK_CHUNK = 2**22
"""Scores ranked at a time: their int64 keys and top-k scratch are then about 100 MiB at most."""

_PLANS: TensorMemo[Any] = TensorMemo()


def select_blocks(
    index_q: Tensor,
    index_k: Tensor,
    microbatch: Microbatch,
    *,
    topk: int = 16,
    backend: str | None = None,
) -> Tensor:
    """Choose the key blocks that each query attends to, per index head.

    A block's score is the largest raw ``index_q . index_k`` over its causally visible keys, without a softmax scale.
    Candidates of a query are the blocks of its document up to the one it lies in. The forced blocks of the
    micro-batch come first: blocks below ``init``, and the query's own block if ``local`` is positive. The rest are
    the candidates of highest score; of equal scores the lower block id wins. Backends differ only where scores
    differ by rounding. Not differentiable: the indexer gets no gradient through this.

    Args:
        index_q: ``[T, index_heads, index_dim]``, compact query tokens; bfloat16 on a GPU, index_heads 4 and index_dim
            128 for ``"sm100"``. Copied if not contiguous.
        index_k: ``[Tk, 1, index_dim]``, compact key tokens, shared by the index heads; dtype and device of index_q.
        microbatch: the documents; its plan of the score pass is kept with it and reused by every layer.
        topk: blocks per query: 4, 8, 16 or 32.
        backend: see :func:`msa_vendored.training.resolve_backend`.

    Returns:
        ``[index_heads, T, topk]`` int32, document-local block ids, ascending, then -1 where a query has fewer
        candidates than ``topk``.

    Raises:
        StalePlanError: (a ValueError) token counts differ from the micro-batch's.
        ArgumentValueError: (a ValueError) other shapes, dtypes, ``topk``, or more forced blocks than ``topk``.
        SelectionBufferError: (a RuntimeError) more than 2**31 scores, except on SM90; use shorter documents or fewer
            tokens.
        UnsupportedArgumentError: (a NotImplementedError) SM90, and not bfloat16 or index_dim not 128.
        UnavailableError: the backend cannot run here.
    """
    _require_index_shapes(index_q, index_k, microbatch)
    init, local = microbatch.forced_blocks
    if topk not in TOPK_CHOICES or init + min(local, 1) > topk:
        raise ArgumentValueError(
            "topk does not fit",
            where="topk",
            expected=f"one of {TOPK_CHOICES}, at least the {init + min(local, 1)} forced blocks",
            got=str(topk),
        )
    ids: Tensor = select_blocks_op(
        index_q.detach(),
        index_k.detach(),
        microbatch.lengths,
        microbatch.key_lengths,
        microbatch.document_positions,
        microbatch.max_key_seqlen,
        init,
        local,
        topk,
        backend or "",
    )
    return ids


def _require_index_shapes(index_q: Tensor, index_k: Tensor, microbatch: Microbatch) -> None:
    tokens, key_tokens = microbatch.num_tokens, microbatch.num_key_tokens
    if index_q.ndim != 3 or index_k.ndim != 3 or index_k.shape[1] != 1 or index_k.shape[2] != index_q.shape[2]:
        raise ArgumentValueError(
            "index_q and index_k have the wrong shape",
            where="index_q, index_k",
            expected=f"[{tokens}, index_heads, index_dim] and [{key_tokens}, 1, index_dim]",
            got=f"{tuple(index_q.shape)} and {tuple(index_k.shape)}",
        )
    if index_q.shape[0] != tokens or index_k.shape[0] != key_tokens:
        raise StalePlanError(
            "index_q and index_k do not belong to this micro-batch",
            where="microbatch",
            expected=f"{tokens} query tokens and {key_tokens} key tokens",
            got=f"{index_q.shape[0]} and {index_k.shape[0]}",
            next_command="build the Microbatch from the document map of this batch, and pass that one",
        )
    if index_q.dtype != index_k.dtype or index_q.device != index_k.device:
        raise ArgumentValueError(
            "index_q and index_k differ in dtype or device",
            where="index_k",
            expected=f"{index_q.dtype} on {index_q.device}",
            got=f"{index_k.dtype} on {index_k.device}",
        )


def launch_selection(
    index_q: Tensor,
    index_k: Tensor,
    lengths: Tensor,
    key_lengths: Tensor,
    document_positions: Tensor,
    max_key_seqlen: int,
    init: int,
    local: int,
    topk: int,
    backend: str,
) -> Tensor:
    """Score pass and ranking; see :func:`select_blocks`. ``lengths`` and ``key_lengths`` are on the CPU."""
    tokens, heads, _ = index_q.shape
    name = resolve_backend(backend or None, index_q.device)
    if name == "sm90":
        return _select_on_hopper(
            index_q, index_k, lengths, key_lengths, document_positions, init=init, local=local, topk=topk
        )
    tiles = score_tiles(max_key_seqlen)
    if heads * tiles * tokens > SCORE_CAPACITY:
        raise SelectionBufferError(
            "the score pass cannot return block maxima for this many tokens",
            where="index_q",
            expected=f"heads * tiles * tokens of at most {SCORE_CAPACITY}",
            got=f"{heads} * {tiles} * {tokens} = {heads * tiles * tokens}",
            next_command="select in smaller micro-batches",
        )
    scores = _score_blocks(index_q, index_k, lengths, key_lengths, tiles, name)
    blocks = -(-max_key_seqlen // BLOCK_SIZE)
    return rank_blocks(scores[:, :blocks], document_positions, init=init, local=local, topk=topk)


def _select_on_hopper(
    index_q: Tensor,
    index_k: Tensor,
    lengths: Tensor,
    key_lengths: Tensor,
    document_positions: Tensor,
    *,
    init: int,
    local: int,
    topk: int,
) -> Tensor:
    # Ranking by kernel: PyTorch's top-k takes longer than the score pass, and wants scores padded to 128 blocks.
    bundle = bind_kernels("sm90")
    from msa_vendored.hopper.select import select_on_device

    with on_device_of(index_q):
        heads = index_q.shape[1]
        plan = _plan_scores(bundle.fmha_sm100_plan, lengths, key_lengths, heads, "sm90", index_q.device)
        return select_on_device(index_q, index_k, plan[3], document_positions, init=init, local=local, topk=topk)


def _shape_selection(
    index_q: Tensor,
    index_k: Tensor,
    lengths: Tensor,
    key_lengths: Tensor,
    document_positions: Tensor,
    max_key_seqlen: int,
    init: int,
    local: int,
    topk: int,
    backend: str,
) -> Tensor:
    return index_q.new_empty((index_q.shape[1], index_q.shape[0], topk), dtype=torch.int32)


def score_tiles(max_key_seqlen: int) -> int:
    """Key blocks that the score pass lays out for documents of up to ``max_key_seqlen`` tokens: a multiple of 128."""
    blocks = -(-max_key_seqlen // BLOCK_SIZE)
    return -(-blocks // 128) * 128


def _score_blocks(
    index_q: Tensor, index_k: Tensor, lengths: Tensor, key_lengths: Tensor, tiles: int, backend: str
) -> Tensor:
    bundle = bind_kernels(backend)
    tokens, heads, _ = index_q.shape
    queries, keys = index_q.contiguous(), index_k.contiguous()
    with on_device_of(queries):
        scores = torch.full(
            (heads, tiles, tokens), -torch.inf, dtype=_score_dtype(queries.dtype), device=queries.device
        )
        plan = _plan_scores(bundle.fmha_sm100_plan, lengths, key_lengths, heads, backend, queries.device)
        _, max_score = bundle.fmha_sm100(
            queries, keys, keys, plan, max_score=scores, output_o=False, output_maxscore=True
        )
    if max_score is None:
        raise SelectionBufferError(
            "the score pass returned no block maxima",
            where=f"fmha_sm100 of backend {backend!r}",
            expected=f"max_score [{heads}, {tiles}, {tokens}]",
            got="None",
            next_command="report this with the micro-batch's document lengths",
        )
    scored: Tensor = max_score
    return scored


def _score_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _plan_scores(
    make_plan: Any, lengths: Tensor, key_lengths: Tensor, heads: int, backend: str, device: torch.device
) -> Any:
    # An official plan holds work lists and workspaces that kernels on a stream write: one per stream, and one per
    # micro-batch rather than per layer, since planning synchronises with the host. A plan of SM90 is only read, so that
    # one made before a CUDA graph serves its capture, which is on another stream.
    streams = device.type == "cuda" and backend != "sm90"
    stream = torch.cuda.current_stream(device).cuda_stream if streams else 0

    def build() -> Any:
        return make_plan(
            lengths,
            key_lengths,
            heads,
            num_kv_heads=1,
            causal=True,
            output_maxscore=True,
            num_kv_splits=1,
            split_prefill_decode=False,
        )

    return _PLANS.get(lengths, (key_lengths.data_ptr(), key_lengths._version, heads, backend, device, stream), build)


def rank_blocks(scores: Tensor, document_positions: Tensor, *, init: int, local: int, topk: int) -> Tensor:
    """Forced blocks, causality and top-k over block scores; the part of :func:`select_blocks` after the score pass.

    Args:
        scores: ``[index_heads, blocks, T]`` float32 or float64 (ranked as float32), any strides, any value where a
            block is no candidate. A NaN ranks above every number and below the forced blocks.
        document_positions: ``[T]`` int64, tokens, position of each query among its document's keys.
        init: leading blocks that are forced where they are candidates.
        local: whether (positive) the query's own block is forced.
        topk: blocks per query.

    Returns:
        ``[index_heads, T, topk]`` int32 block ids, ascending, then -1.
    """
    heads, blocks, tokens = scores.shape
    ids = torch.empty((heads, tokens, topk), dtype=torch.int32, device=scores.device)
    step = max(1, _RANK_CHUNK // (heads * blocks))
    for begin in range(0, tokens, step):
        chunk = slice(begin, begin + step)
        own = torch.div(document_positions[chunk], BLOCK_SIZE, rounding_mode="floor")
        ids[:, chunk] = _rank_chunk(scores[:, :, chunk].transpose(1, 2), own, init, local, topk)
    return ids


def _rank_chunk(scores: Tensor, own: Tensor, init: int, local: int, topk: int) -> Tensor:
    # torch.topk promises no order among equal scores, so the rank goes into one int64 per (query, block): the score
    # as an order-preserving int32 above, the complement of the block id below. All keys differ, hence no ties.
    blocks = scores.shape[2]
    block = torch.arange(blocks, device=scores.device)
    scores = torch.nan_to_num(scores.float(), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal scores
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    forced = block < init
    if local > 0:
        forced = forced | (block == own[:, None])
    rank = rank.masked_fill(forced, 0x7FFFFFFF)
    keys = rank * 2**32 + (0x7FFFFFFF - block)
    outside = (block > own[:, None]) | ((scores == -torch.inf) & ~forced)
    keys = keys.masked_fill(outside, torch.iinfo(torch.int64).min)
    best = keys.topk(min(topk, blocks), dim=-1, sorted=False).values
    chosen = torch.where(best == torch.iinfo(torch.int64).min, 0x7FFFFFFF, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    chosen = chosen.sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == 0x7FFFFFFF, -1)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1).to(torch.int32)


select_blocks_op = torch.library.custom_op("msa_vendored::select_blocks", launch_selection, mutates_args=())
select_blocks_op.register_fake(_shape_selection)
