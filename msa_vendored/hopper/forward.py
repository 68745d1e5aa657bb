"""``sparse_atten_func`` on SM90: two kernels on the caller's stream, without a word from the device to the host.

1. :mod:`~msa_vendored.hopper.segments` orders the selected (query, key block) pairs by windows of tokens;
2. :mod:`~msa_vendored.hopper.forward_main` computes one partial output for each pair, and some of its CTAs merge the
   partial outputs of a window's queries (:mod:`~msa_vendored.hopper.combine`) while others are at the next windows.

Tokens go through 2 in chunks, so that the workspace stays below :data:`PARTIAL_BUDGET_BYTES` however long the
sequence is: 256 KiB of partial outputs a token at 64 heads and top-k 16.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from msa_vendored.backward.checks import ArgumentValueError, UnsupportedArgumentError, aligned_operand, require_shape
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.compiling import load_kernel
from msa_vendored.reference.arguments import require_block_size, require_cu_seqlens, require_qkv
from msa_vendored.reference.forward_checks import (
    ForwardSchedule,
    require_csr,
    require_lse_options,
    require_output,
    require_schedule_tensors,
)
from msa_vendored.reference.schedule import schedule_from_csr

ARCH = "sm_90a"
HEAD_DIM = 128
PARTIAL_BUDGET_BYTES = 2 << 30
"""Most bytes of partial outputs at a time, unless one window of tokens needs more."""
WINDOW_TOKENS = 1024
"""Tokens whose queries (4 KiB each for 16 heads) and key blocks are worked on together: 4 MiB of Q, well inside L2. On
an H200 at 32,768 tokens 512 takes 2 % longer, 2,048 and no windows at all 4 to 12 % (docs/hopper_log.md)."""
QUERIES_PER_CELL = 32
"""Windows grow with the number of key blocks, so that a key block is loaded for this many queries on average."""
SEGMENT_ROWS = 2048
"""Most rows (queries x heads) of one segment, 32 tiles: bounds the tail of the last CTAs."""
MERGE_CTAS, OF_CTAS = 27, 132
"""Of so many CTAs, so many merge only: 67 GB/s each, as long as the others take on an H200 (docs/hopper_log.md)."""
SMALLEST_SCALE = 1e-30
"""Stands for a softmax scale of 0, which would turn masked logits into -inf * 0 = NaN."""


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """How one call is cut, from sizes that the host knows.

    Attributes:
        window_tokens: tokens of a window.
        windows: number of windows.
        windows_per_chunk: windows whose partial outputs are kept at a time.
        chunks: number of chunks.
        segment_capacity: segments of a window at most, whatever the selection is.
        segment_queries: most queries of a segment.
        merge_ctas: CTAs that only merge.
    """

    window_tokens: int
    windows: int
    windows_per_chunk: int
    chunks: int
    segment_capacity: int
    segment_queries: int
    merge_ctas: int

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk; the last one may have fewer."""
        return self.windows_per_chunk * self.window_tokens


def plan_forward(
    total_q: int,
    max_seqlen_k: int,
    *,
    topk: int,
    index_heads: int,
    ratio: int,
    schedule_items: int,
    ctas: int,
    budget_bytes: int = PARTIAL_BUDGET_BYTES,
) -> ForwardPlan:
    """Windows, chunks and the capacity of the segment table.

    Args:
        total_q: tokens.
        max_seqlen_k: longest key length; only the size of windows depends on it.
        topk: selection width.
        index_heads: key heads.
        ratio: query heads per key head.
        schedule_items: rows of ``scheduler_metadata``.
        ctas: persistent CTAs.
        budget_bytes: most bytes of partial outputs.
    """
    blocks = -(-max_seqlen_k // BLOCK_SIZE)
    window = WINDOW_TOKENS
    while window * topk < QUERIES_PER_CELL * blocks:
        window *= 2
    windows = -(-total_q // window)
    window_bytes = window * index_heads * ratio * topk * HEAD_DIM * 2
    per_chunk = min(windows, max(1, budget_bytes // window_bytes))
    queries = max(1, SEGMENT_ROWS // ratio)
    edges = min(total_q, window) * topk * index_heads
    # One segment for each item that has queries in the window, and one more for each `queries` edges.
    capacity = min(edges, schedule_items) + edges // queries
    # None for a single window, of which little can be merged before all is computed.
    merge_ctas = ctas * MERGE_CTAS // OF_CTAS if windows > 1 else 0
    return ForwardPlan(window, windows, per_chunk, -(-windows // per_chunk), capacity, queries, merge_ctas)


def sparse_atten_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k2q_row_ptr: torch.Tensor,
    k2q_q_indices: torch.Tensor,
    topK: int,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    schedule: ForwardSchedule | None = None,
    usable_SM_count: int = -1,
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
    output_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention of every query over the keys of the blocks it selected; arguments as in the reference launcher.

    Runs on the current stream of q's device and can be captured in a CUDA graph; a replay reads selection and
    lengths anew. Only types, shapes and devices are checked: contents would have to be read back. No autograd.

    Args:
        q: bf16 ``[total_q, Hq, 128]``, any strides (copied unless contiguous and 16-byte aligned); Hq / Hkv 1 to 16.
        k: bf16 ``[total_k, Hkv, 128]``, likewise, compact.
        v: bf16 ``[total_k, Hkv, 128]``, likewise.
        k2q_row_ptr: int32 ``[Hkv, total_rows + 1]`` from ``build_k2q_csr``.
        k2q_q_indices: int32 ``[Hkv, >= total_q * topK]`` from ``build_k2q_csr``.
        topK: selection width: 4, 8, 16 or 32.
        cu_seqlens_q: int32 ``[documents + 1]``, contiguous.
        cu_seqlens_k: int32 ``[documents + 1]``, contiguous.
        max_seqlen_q: accepted as in the official launcher; not needed.
        max_seqlen_k: longest key length; sizes windows.
        blk_kv: 128.
        causal: mask keys after the query, bottom-right aligned.
        softmax_scale: factor on the logits; ``128 ** -0.5`` if None.
        lse_temperature_scale: accepted; no temperature LSE is computed.
        return_temperature_lse: not supported.
        partial_dtype: bf16; others are not supported.
        return_softmax_lse: also return the LSE.
        page_table: not supported; None.
        seqused_k: not supported; None.
        schedule: from ``build_k2q_csr(..., return_schedule=True)``. None derives it from the CSR in PyTorch, which
            synchronises with the host.
        usable_SM_count: not supported; -1.
        qk_dtype: None or bf16.
        pv_dtype: None or bf16.
        output_scale: float32 tensor of at least one element, factor on the output.
        out: bf16 ``[total_q, Hq, 128]``: filled and returned as the output.

    Returns:
        The output bf16 ``[total_q, Hq, 128]``; with ``return_softmax_lse`` a tuple with the LSE, float32
        ``[total_q, Hq]``, natural log of the sum of exp of scaled logits. Rows that see no key: output 0, LSE -inf.

    Raises:
        TypeError: an operand has the wrong type or dtype.
        ValueError: a shape or device does not fit. Nothing has been launched then.
        NotImplementedError: something that these kernels do not do; the message names it.

    Side effects:
        Allocates partial outputs of up to 2 GiB and their LSEs from the caching allocator, for the call.
    """
    for name, value, default in (
        ("page_table", page_table, None), ("seqused_k", seqused_k, None), ("usable_SM_count", usable_SM_count, -1),
        ("return_temperature_lse", return_temperature_lse, False), ("qk_dtype", qk_dtype or q.dtype, q.dtype),
        ("pv_dtype", pv_dtype or q.dtype, q.dtype), ("partial_dtype", partial_dtype, torch.bfloat16),
    ):  # fmt: skip
        refuse_unsupported(name, value, default)
    ratio = require_qkv(q, k, v)
    refuse_unsupported("q.dtype", q.dtype, torch.bfloat16)
    refuse_unsupported("head dim", q.shape[2], HEAD_DIM)
    require_block_size("blk_kv", blk_kv)
    require_lse_options(lse_temperature_scale, return_temperature_lse, return_softmax_lse)
    require_csr(q, k, k2q_row_ptr, k2q_q_indices, topK)
    require_output(q, out, output_scale)
    require_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    require_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
    require_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    if schedule is None:
        schedule = schedule_from_csr(
            k2q_row_ptr, k2q_q_indices, cu_seqlens_q, cu_seqlens_k, topk=topK, heads_per_index_head=ratio
        )
    require_schedule_tensors(schedule, k2q_row_ptr, k2q_q_indices, q.shape[0])
    require_int32_edges(schedule.qsplit_indices)
    scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    with torch.no_grad():
        # The kernel takes maxima of raw logits, which are those of scaled logits if the scale is positive.
        q = aligned_operand(-q if scale < 0 else q)
        result = out if out is not None and aligned_operand(out).data_ptr() == out.data_ptr() else torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        plan = plan_forward(
            q.shape[0], max_seqlen_k, topk=topK, index_heads=k.shape[1], ratio=ratio,
            schedule_items=schedule.scheduler_metadata.shape[0], ctas=count_multiprocessors(q.device),
        )  # fmt: skip
        run_forward(
            q, aligned_operand(k), aligned_operand(v), k2q_row_ptr, schedule, cu_seqlens_q, cu_seqlens_k, plan,
            topk=topK, causal=causal, scale=max(abs(scale), SMALLEST_SCALE), output_scale=output_scale, out=result,
            lse=lse,
        )  # fmt: skip
        if out is not None and result is not out:
            result = out.copy_(result)
    return (result, lse) if return_softmax_lse else result


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_ptr: torch.Tensor,
    schedule: ForwardSchedule,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    plan: ForwardPlan,
    *,
    topk: int,
    causal: bool,
    scale: float,
    output_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Launch the kernels on checked, aligned operands. ``scale`` is positive."""
    from msa_vendored.hopper.forward_main import compile_forward
    from msa_vendored.hopper.segments import COUNTER_FIELDS, SEGMENT_FIELDS, compile_segments

    ratio, index_heads = q.shape[1] // k.shape[1], k.shape[1]
    qsplit_indices = schedule.qsplit_indices.contiguous()
    build = load_kernel(compile_segments, arch=ARCH)
    attend = load_kernel(compile_forward, arch=ARCH, ratio=ratio, topk=topk, scaled=output_scale is not None)
    segments = q.new_empty((plan.windows, plan.segment_capacity, SEGMENT_FIELDS), dtype=torch.int32)
    bucket_rows = plan.chunks * index_heads * plan.windows_per_chunk
    counters = q.new_zeros((plan.chunks + bucket_rows, COUNTER_FIELDS), dtype=torch.int32)
    tickets, buckets = counters[: plan.chunks], counters[plan.chunks :]
    build(
        schedule.scheduler_metadata.contiguous(), schedule.work_count, row_ptr.contiguous(), qsplit_indices,
        cu_seqlens_q, cu_seqlens_k, segments, buckets, plan.window_tokens, plan.windows_per_chunk,
        plan.segment_queries, int(causal),
    )  # fmt: skip
    tokens = min(q.shape[0], plan.chunk_tokens)
    partial_out = q.new_empty(tokens * q.shape[1] * topk * HEAD_DIM)
    partial_lse = q.new_empty((tokens, index_heads, topk * ratio), dtype=torch.float32)
    split_counts = schedule.split_counts.contiguous()
    factor = lse if output_scale is None else output_scale.contiguous()
    for chunk in range(plan.chunks):
        attend(
            q, k, v, qsplit_indices.view(-1), segments, tickets, buckets, split_counts, partial_out, partial_lse, out,
            lse, factor.view(-1), chunk, plan.window_tokens, plan.windows_per_chunk, scale * math.log2(math.e),
            count_multiprocessors(q.device), plan.merge_ctas,
        )  # fmt: skip


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU: CTAs of the persistent kernel."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def refuse_unsupported(name: str, value: object, default: object) -> None:
    """Refuse a value other than ``default`` with :class:`UnsupportedArgumentError` (also a NotImplementedError)."""
    if value is default or (not isinstance(value, torch.Tensor) and value == default):
        return
    raise UnsupportedArgumentError(
        f"the sm90 forward does not support this {name}",
        where=f"argument {name}",
        expected=repr(default),
        got=f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value),
        next_command='use kernels(backend="reference")',
    )


def require_int32_edges(qsplit_indices: torch.Tensor) -> None:
    """Refuse a selection whose entries int32 cannot count."""
    if qsplit_indices.numel() >= 1 << 31:
        raise ArgumentValueError(
            "the selection is too large",
            where="argument k2q_q_indices",
            expected="fewer than 2^31 entries over all heads",
            got=str(qsplit_indices.numel()),
        )
