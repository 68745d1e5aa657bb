"""delta[t, h] = sum over d of out[t, h, d] * dO[t, h, d], in fp32: the row statistic of the softmax backward.

Sixteen lanes share a row of 128 bf16 values, 16 bytes each of ``out`` and of ``dO``, and own four consecutive rows, so
that eight 128-bit loads a thread are in flight and a warp writes one 32-byte sector. The order of the additions is
fixed (eight fused multiply-adds up a lane's values, then lanes at distance 8, 4, 2, 1), so results are the same bit for
bit on every device. Bytes moved: 516 per (token, head).

Where the main kernel adds to dQ in place, the same pass zeroes it: 256 bytes more. Where dQ is summed in fp16, it also
gives the 1-norm of every row of dO (:mod:`msa_vendored.backward.dq_scale`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from msa_vendored.compiling import compile_options

HEAD_DIM = 128
THREADS = 256
LANES_PER_ROW = 16
VALUES_PER_LANE = HEAD_DIM // LANES_PER_ROW
ROWS_PER_GROUP = 4
ROWS_PER_CTA = THREADS // LANES_PER_ROW * ROWS_PER_GROUP


@cute.jit
def launch_delta(out: cute.Tensor, grad_out: cute.Tensor, delta: cute.Tensor, stream: Any) -> None:
    """One launch over all rows of ``[T, Hq, 128]``; see :func:`compile_delta`."""
    launch_rows(out, grad_out, delta, None, None, stream)


@cute.jit
def launch_zeroing(
    out: cute.Tensor, grad_out: cute.Tensor, delta: cute.Tensor, zeros: cute.Tensor, stream: Any
) -> None:
    """As :func:`launch_delta`, and zeroes ``[T, Hq, 128]``."""
    launch_rows(out, grad_out, delta, zeros.iterator, None, stream)


@cute.jit
def launch_norms(
    out: cute.Tensor, grad_out: cute.Tensor, delta: cute.Tensor, zeros: cute.Tensor, norms: cute.Tensor, stream: Any
) -> None:
    """As :func:`launch_zeroing`, with the 1-norms of ``grad_out``."""
    launch_rows(out, grad_out, delta, zeros.iterator, norms.iterator, stream)


@cute.jit
def launch_rows(
    out: cute.Tensor, grad_out: cute.Tensor, delta: cute.Tensor, zeros: Any, norms: Any, stream: Any
) -> None:
    """The launch that all share; what is None is left out."""
    rows = delta.shape[0] * delta.shape[1]
    grid = (cute.ceil_div(rows, ROWS_PER_CTA), 1, 1)
    sum_rows(out.iterator, grad_out.iterator, delta.iterator, zeros, norms, rows).launch(
        grid=grid, block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def sum_rows(
    out: cute.Pointer, grad_out: cute.Pointer, delta: cute.Pointer, zeros: Any, norms: Any, rows: Int32
) -> None:
    """The stage's kernel: :data:`ROWS_PER_CTA` rows for each CTA."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    lane = thread % LANES_PER_ROW
    first = cta * ROWS_PER_CTA + thread // LANES_PER_ROW * ROWS_PER_GROUP
    factors = []
    for i in cutlass.range_constexpr(ROWS_PER_GROUP):
        # Rows beyond the last read the last; nothing is stored for them. In elements, rows can exceed int32.
        offset = Int64(cutlass.min(first + i, rows - 1)) * HEAD_DIM + lane * VALUES_PER_LANE
        offset = cute.assume(offset, divby=VALUES_PER_LANE)
        factors.append((_load_values(out + offset), _load_values(grad_out + offset)))
        if cutlass.const_expr(zeros is not None):
            _clear_values(zeros + offset, first + i < rows)
    mine, norm = Float32(0), Float32(0)
    for i in cutlass.range_constexpr(ROWS_PER_GROUP):
        a, b = factors[i]
        total = a[0] * b[0]
        for k in cutlass.range_constexpr(1, VALUES_PER_LANE):
            total = cute.math.fma(a[k], b[k], total)
        for step in cutlass.range_constexpr(4):
            total += cute.arch.shuffle_sync_bfly(total, 8 >> step)
        if lane == i:
            mine = total
        if cutlass.const_expr(norms is not None):
            total = cute.math.absf(b[0])
            for k in cutlass.range_constexpr(1, VALUES_PER_LANE):
                total += cute.math.absf(b[k])
            for step in cutlass.range_constexpr(4):
                total += cute.arch.shuffle_sync_bfly(total, 8 >> step)
            if lane == i:
                norm = total
    row = first + lane
    if (lane < ROWS_PER_GROUP) & (row < rows):
        cute.make_tensor(delta + row, cute.make_layout(1))[0] = mine
        if cutlass.const_expr(norms is not None):
            cute.make_tensor(norms + row, cute.make_layout(1))[0] = norm


@cute.jit
def _load_values(pointer: cute.Pointer) -> cute.TensorSSA:
    return cute.make_tensor(pointer, cute.make_layout(VALUES_PER_LANE)).load().to(Float32)


@cute.jit
def _clear_values(pointer: cute.Pointer, wanted: Boolean) -> None:
    if wanted:
        values = cute.make_rmem_tensor(VALUES_PER_LANE, BFloat16)
        values.fill(BFloat16(0))
        cute.make_tensor(pointer, cute.make_layout(VALUES_PER_LANE)).store(values.load())


def compile_delta(*, arch: str, zeroes: bool = False, norms: bool = False) -> Callable[..., None]:
    """Compiles the stage.

    Args:
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        zeroes: one more argument, bf16 ``[T, Hq, 128]``, at a 16-byte address: becomes zero.
        norms: with ``zeroes``; then one more, fp32 ``[T, Hq]``: gets the sum of the magnitudes of each row of
            ``grad_out``.

    Returns:
        A function ``(out, grad_out, delta)`` on the current stream: bf16 ``[T, Hq, 128]`` twice and fp32 ``[T, Hq]``,
        contiguous, on one device, the first two at 16-byte addresses. Overwrites ``delta``. T and Hq are free.

    Raises:
        ValueError: ``norms`` without ``zeroes``.
    """
    if norms and not zeroes:
        raise ValueError("norms are for sums of dQ in place, which are zeroed")
    tokens, heads = cute.sym_int(), cute.sym_int()
    order = (2, 1, 0)
    rows = cute.runtime.make_fake_compact_tensor(
        BFloat16, (tokens, heads, HEAD_DIM), stride_order=order, assumed_align=16
    )
    delta = cute.runtime.make_fake_compact_tensor(Float32, (tokens, heads), stride_order=(1, 0), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    function = launch_norms if norms else launch_zeroing if zeroes else launch_delta
    more = [rows] * zeroes + [delta] * norms
    return cute.compile(function, rows, rows, delta, *more, stream, options=compile_options(arch))
