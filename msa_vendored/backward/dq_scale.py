"""The power of two by which a row of dQ is scaled while its sums are fp16.

fp16 has 11 significant bits where bf16 has 8, and a range of 2^-24 to 65,504. For a row (token, head) of dQ,
dQ = scale * sum_j P_j (dP_j - delta) K_j with P_j >= 0, sum_j P_j = 1, and by Hoelder |dP_j| <= |dO|_1 * max |V|, of
which delta is a mean over j. No element of dQ, nor any part of that sum, then exceeds::

    bound = 2 * |scale| * |dO|_1 * max |K| * max |V|           (largest finite elements of the kv head's selected keys)

so that ``2^e * dQ`` with ``2^14 <= 2^e * bound < 2^15`` cannot overflow, with a factor of 2 in hand for roundings.
Elements that are 2^-28 of the bound still have all their 11 bits. With normally distributed operands the bound is
2^13 times a typical element; the 1-norm loses a factor of 2 on the 2-norm, but neither over- nor underflows.

e depends on the inputs alone, so the main kernel (which multiplies) and the postprocess (which divides, exactly) each
work it out. Rows of dO and keys that are not finite are not bounded by it: what is not finite in dQ stays so, in its
row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from msa_vendored.backward.sm90_ops import bits_of_float, float_of_bits
from msa_vendored.compiling import compile_options

HEAD_DIM = 128
KEYS_PER_BLOCK = 128
THREADS = 256
LANES_PER_ROW = 16
VALUES_PER_LANE = 8
ROWS_AT_ONCE = THREADS // LANES_PER_ROW
INFINITY_BITS = 0x7F80
"""Of bf16, without its sign; what is above is NaN."""

SMALLEST_NORMAL = 2.0**-126
LARGEST_FACTOR, FACTOR_OF_ONE = 253, 268
"""Biased exponents: a bound of biased exponent b has the factor 2^(14 - (b - 127)), hence 268 - b, at most 2^126. The
smallest, for an infinite bound, is 13: what is finite in fp32 becomes less than 2^15."""


@cute.jit
def factor_exponent(norm: Float32, key: Float32, value: Float32, softmax_scale: Float32) -> Int32:
    """Biased exponent of a row's factor, 13 to 253, from |dO|_1 and its kv head's largest keys and values."""
    slope = cute.arch.fmax(norm * value, Float32(SMALLEST_NORMAL))
    length = cute.arch.fmax(2.0 * key * cute.arch.fmax(softmax_scale, -softmax_scale), Float32(SMALLEST_NORMAL))
    biased = (bits_of_float(slope * length) >> 23) & 0xFF
    return cutlass.min(FACTOR_OF_ONE - biased, LARGEST_FACTOR)


@cute.jit
def power_of_two(biased: Int32) -> Float32:
    """2^(biased - 127), for 1 to 254."""
    return float_of_bits(biased << 23)


@cute.jit
def launch_key_maxima(
    k: cute.Tensor,
    v: cute.Tensor,
    items: cute.Tensor,
    work_count: cute.Tensor,
    cu_seqlens: cute.Tensor,
    document_workspace_starts: cute.Tensor,
    key_maxima: cute.Tensor,
    stream: Any,
) -> None:
    """One launch, a CTA for each work item; see :func:`compile_key_maxima`."""
    find_key_maxima(k, v, items, work_count, cu_seqlens, document_workspace_starts, key_maxima).launch(
        grid=(items.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def find_key_maxima(
    k: cute.Tensor,
    v: cute.Tensor,
    items: cute.Tensor,
    work_count: cute.Tensor,
    cu_seqlens: cute.Tensor,
    document_workspace_starts: cute.Tensor,
    key_maxima: cute.Tensor,
) -> None:
    """The key block of the item that begins a row. An item that the task build will refuse must not be followed."""
    thread, _, _ = cute.arch.thread_idx()
    item, _, _ = cute.arch.block_idx()
    head, begin, edges, document, block = (items[item, i] for i in (0, 2, 3, 4, 5))
    valid = (item < work_count[0]) & (begin == 0) & (edges > 0) & (head >= 0) & (head < k.shape[1])
    valid = valid & (document >= 0) & (document < document_workspace_starts.shape[0]) & (block >= 0)
    if valid:
        start = document_workspace_starts[document]
        length = cu_seqlens[document + 1] - cu_seqlens[document]
        first = block * KEYS_PER_BLOCK
        keys = cutlass.min(length - first, KEYS_PER_BLOCK)
        if (block < k.shape[0] // KEYS_PER_BLOCK) & (start >= 0) & (start <= k.shape[0] - first - keys):
            for side in cutlass.range_constexpr(2):
                tensor = (k, v)[side]
                largest = Int32(0)
                for i in cutlass.range_constexpr(KEYS_PER_BLOCK // ROWS_AT_ONCE):
                    key = i * ROWS_AT_ONCE + thread // LANES_PER_ROW
                    if key < keys:
                        row = Int64(start + first + key) * tensor.shape[1] + head
                        offset = row * HEAD_DIM + thread % LANES_PER_ROW * VALUES_PER_LANE
                        largest = cutlass.max(largest, _largest_bits(tensor.iterator, offset))
                largest = cute.arch.warp_redux_sync(largest, "max")
                if thread % 32 == 0:
                    cute.arch.atomic_max(key_maxima.iterator + (head * 2 + side), largest << 16)


@cute.jit
def _largest_bits(base: cute.Pointer, offset: Int64) -> Int32:
    """Bits of the largest finite magnitude of 8 bf16 values; those of floats >= 0 are ordered as the floats are."""
    pointer = cute.recast_ptr(base + cute.assume(offset, divby=VALUES_PER_LANE), dtype=Int32)
    words = cute.make_tensor(pointer, cute.make_layout(VALUES_PER_LANE // 2)).load()
    largest = Int32(0)
    for i in cutlass.range_constexpr(VALUES_PER_LANE // 2):
        for bits in (words[i] & 0x7FFF, (words[i] >> 16) & 0x7FFF):
            if bits < INFINITY_BITS:
                largest = cutlass.max(largest, bits)
    return largest


def compile_key_maxima(*, arch: str) -> Callable[..., None]:
    """Compiles the stage.

    Args:
        arch: ``"sm_90a"``.

    Returns:
        A function ``(k, v, scheduler_metadata, work_count, cu_seqlens, document_workspace_starts, key_maxima)`` on the
        current stream: bf16 ``[W, Hkv, 128]`` twice, the schedule's int32 tensors, and int32 ``[Hkv, 2]``, zero: gets
        the bits of the largest finite magnitude of the selected key blocks in k and in v, as fp32. Rows past the end
        of a document are not read. Contiguous, on one device; k and v at 16-byte addresses.
    """
    symbol, fake = cute.sym_int, cute.runtime.make_fake_compact_tensor
    rows, heads, documents = symbol(), symbol(), symbol()

    def tensor(dtype: Any, *shape: Any, align: int = 4) -> Any:
        return fake(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)

    return cute.compile(
        launch_key_maxima,
        tensor(BFloat16, rows, heads, HEAD_DIM, align=16),
        tensor(BFloat16, rows, heads, HEAD_DIM, align=16),
        tensor(Int32, symbol(), 6),
        tensor(Int32, 1),
        tensor(Int32, symbol()),
        tensor(Int32, documents),
        tensor(Int32, heads, 2),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
