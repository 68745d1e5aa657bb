"""Merges the partial outputs of the blocks that a query selected: ``out = sum_s w_s O_s / sum_s w_s``.

Partial outputs are bf16 and normalised, partial LSEs are base-2 logarithms of scaled logits, so
``w_s = 2^(lse_s - max)``.
The pass reads every partial output once and is bound by memory: each thread keeps 16 bytes of up to 16 slots in
flight, 64 KB for a CTA.

Both kernels know one layout, the accumulator fragment of wgmma: see :func:`partial_bytes`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from msa_vendored.compiling import compile_options

HEAD_DIM = 128
THREADS = 256
SLOT_BATCH = 16
"""Slots whose loads a thread issues before it uses the first: 64 registers."""
LN2 = 0.6931471805599453


def partial_bytes(tokens: int, query_heads: int, topk: int) -> int:
    """Bytes of the partial outputs of ``tokens`` tokens.

    The layout is ``[token, index head, slot, 4, heads of the group, 4, 8]`` bf16: element ``[k, h, c, 2 j + e]`` is
    column ``8 (4 k + j) + 2 c + e`` of head h. That is what lane ``c`` of a quad holds after a wgmma of 64 x 128, in
    four pieces of 16 bytes, so that the main kernel stores without a detour through shared memory, 512 contiguous
    bytes a warp instruction.
    """
    return tokens * query_heads * topk * HEAD_DIM * 2


class CombinePartials:
    """Grid: one CTA for each ``THREADS // (16 * ratio)`` pairs of token and index head.

    Args:
        ratio: query heads per index head, 1 to 16.
        topk: slots of a query.
        scaled: whether the output is multiplied by a float32 in device memory.
    """

    def __init__(self, ratio: int, topk: int, scaled: bool) -> None:
        self.ratio, self.topk, self.scaled = ratio, topk, scaled
        self.threads_per_pair = 16 * ratio
        self.pairs_per_cta = THREADS // self.threads_per_pair

    @cute.jit
    def __call__(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_counts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        output_scale: cute.Tensor,
        first_token: Int32,
        tokens: Int32,
        stream: Any,
    ) -> None:
        """Launch over ``tokens`` tokens from ``first_token`` on; the partials begin with that token."""
        pairs = tokens * split_counts.shape[1]
        self.kernel(partial_out, partial_lse, split_counts, out, lse, output_scale, first_token, pairs).launch(
            grid=(cute.ceil_div(pairs, self.pairs_per_cta), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        split_counts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        output_scale: cute.Tensor,
        first_token: Int32,
        pairs: Int32,
    ) -> None:
        """One thread: 8 columns of one head of one token."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        local_pair = thread // self.threads_per_pair
        pair = cta * self.pairs_per_cta + local_pair
        piece = thread % self.threads_per_pair
        # A warp of 32 threads holds whole quads; the quads of threads past the last pair go along, on pair 0.
        valid = local_pair < self.pairs_per_cta and pair < pairs
        if not valid:
            pair = Int32(0)
        lane = piece % 4
        head = (piece // 4) % self.ratio
        group = piece // (4 * self.ratio)
        index_heads = split_counts.shape[1]
        token = first_token + pair // index_heads
        index_head = pair % index_heads
        count = cutlass.min(split_counts[token, index_head], self.topk)
        sums, total, peak = self.merge_slots(partial_out, partial_lse, pair, piece, head, count)
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        if const_expr(self.scaled):
            inverse = inverse * output_scale[0]
        words = cute.make_rmem_tensor(8, BFloat16)
        for i in cutlass.range_constexpr(8):
            words[i] = (sums[i] * inverse).to(BFloat16)
        row = self.transpose_quad(words, lane)
        query_head = index_head * self.ratio + head
        if valid:
            # After the transposition lane c of a quad holds columns 8 (4 k + c) to 8 (4 k + c) + 7.
            offset = (Int64(token) * out.shape[1] + query_head) * HEAD_DIM + (group * 4 + lane) * 8
            target = cute.make_tensor(out.iterator + cute.assume(offset, divby=8), cute.make_layout(8))
            cute.autovec_copy(row, target)
            if group == 0 and lane == 0:
                lse[token, query_head] = (peak + cute.math.log2(total, fastmath=False)) * LN2

    @cute.jit
    def merge_slots(
        self,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        pair: Int32,
        piece: Int32,
        head: Int32,
        count: Int32,
    ) -> tuple[cute.Tensor, Float32, Float32]:
        """Weighted sums of 8 columns, the sum of the weights, and the exponent that they are relative to."""
        levels = cute.make_rmem_tensor(self.topk, Float32)
        peak = -Float32.inf
        for slot in cutlass.range_constexpr(self.topk):
            levels[slot] = -Float32.inf
            if slot < count:
                levels[slot] = partial_lse[(Int64(pair) * self.topk + slot) * self.ratio + head]
        for slot in cutlass.range_constexpr(self.topk):
            peak = cute.arch.fmax(peak, levels[slot])
        if peak == -Float32.inf:
            peak = Float32(0.0)
        sums = cute.make_rmem_tensor(8, Float32)
        sums.fill(0.0)
        total = Float32(0.0)
        batch = min(SLOT_BATCH, self.topk)
        for first in cutlass.range_constexpr(0, self.topk, batch):
            loaded = cute.make_rmem_tensor((8, batch), BFloat16)
            loaded.fill(0.0)
            for i in cutlass.range_constexpr(batch):
                if first + i < count:
                    offset = ((Int64(pair) * self.topk + first + i) * self.threads_per_pair + piece) * 8
                    source = cute.make_tensor(partial_out.iterator + cute.assume(offset, divby=8), cute.make_layout(8))
                    cute.autovec_copy(source, loaded[None, i])
            for i in cutlass.range_constexpr(batch):
                weight = cute.math.exp2(levels[first + i] - peak, fastmath=True)
                total += weight
                for j in cutlass.range_constexpr(8):
                    sums[j] += weight * loaded[j, i].to(Float32)
        return sums, total, peak

    @cute.jit
    def transpose_quad(self, words: cute.Tensor, lane: Int32) -> cute.Tensor:
        """4 x 4 transposition of 32-bit words across the lanes of a quad, in two exchanges."""
        source = cute.recast_tensor(words, Int32)
        middle = cute.make_rmem_tensor(4, Int32)
        odd = (lane & 1) != 0
        for i in cutlass.range_constexpr(2):
            send = source[2 * i] if odd else source[2 * i + 1]
            got = cute.arch.shuffle_sync_bfly(send, 1)
            middle[2 * i] = got if odd else source[2 * i]
            middle[2 * i + 1] = source[2 * i + 1] if odd else got
        high = (lane & 2) != 0
        result = cute.make_rmem_tensor(8, BFloat16)
        target = cute.recast_tensor(result, Int32)
        for i in cutlass.range_constexpr(2):
            send = middle[i] if high else middle[i + 2]
            got = cute.arch.shuffle_sync_bfly(send, 2)
            target[i] = got if high else middle[i]
            target[i + 2] = middle[i + 2] if high else got
        return result


def compile_combine(*, arch: str, ratio: int, topk: int, scaled: bool) -> Any:
    """Compile the combine pass.

    Call with ``partial_out`` bf16 and ``partial_lse`` float32, both flat, ``split_counts`` int32 ``[T, Hkv]``, ``out``
    bf16 ``[T, Hq, 128]``, ``lse`` float32 ``[T, Hq]``, ``output_scale`` float32 ``[>= 1]`` (not read unless
    ``scaled``), and int32 ``first_token, tokens``.
    """
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    def fake(dtype: Any, align: int, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    size = cute.sym_int
    tokens, heads = size(), size()
    return cute.compile(
        CombinePartials(ratio, topk, scaled),
        fake(BFloat16, 16, cute.sym_int64()), fake(Float32, 4, size()), fake(Int32, 4, tokens, size()),
        fake(BFloat16, 16, tokens, heads, HEAD_DIM), fake(Float32, 4, tokens, heads), fake(Float32, 4, size()),
        Int32(0), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )  # fmt: skip
