"""Accumulators to gradients: the dQ pool to bf16 dq, fp32 dK and dV to bf16, in one launch.

The first CTAs convert dQ, the others dK and dV. A pool is one of :data:`DQ_POOLS`:

- ``"fp32"``: fp32 ``[T, Hq, 128]``, the order of dq;
- ``"bf16_pairs"``: bf16 ``[T, Hq / 2, 128, 2]``: heads 2m and 2m + 1 side by side, as a 4-byte packed reduction of one
  head-dim index adds them.

dK and dV are one fp32 buffer in the order of the result. Each thread moves 16 bytes at a time where it reads, four
times; neighbouring threads move neighbouring bytes. Bytes moved: 6 per fp32 and 4 per bf16 element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from msa_vendored.compiling import compile_options

DQ_POOLS = ("fp32", "bf16_pairs")
HEAD_DIM = 128
THREADS = 256
STEPS = 4
"""Independent moves of a thread; a CTA converts ``THREADS * STEPS`` granules."""
GRANULES_PER_CTA = THREADS * STEPS
CAST_VALUES = 4
"""fp32 values of a granule: one 16-byte load, one 8-byte store."""
PAIR_VALUES = 8
"""Values of a head-pair granule: one 16-byte load, 8 bytes to each of two heads."""


class Postprocess:
    """Host function and kernel for one layout of the dQ pool."""

    def __init__(self, dq_pool: str) -> None:
        self.paired = {"fp32": False, "bf16_pairs": True}[dq_pool]

    @cute.jit
    def __call__(
        self, dq_pool: cute.Tensor, dq: cute.Tensor, dkv_sums: cute.Tensor, dkv: cute.Tensor, stream: Any
    ) -> None:
        # Granules number at most a quarter of the elements, which may exceed int32 themselves.
        dq_granules = dq.shape[0] * (dq.shape[1] * (HEAD_DIM // (PAIR_VALUES if self.paired else CAST_VALUES)))
        dkv_granules = 2 * dkv.shape[1] * (dkv.shape[2] * (HEAD_DIM // CAST_VALUES))
        dq_ctas = cute.ceil_div(dq_granules, GRANULES_PER_CTA)
        grid = (dq_ctas + cute.ceil_div(dkv_granules, GRANULES_PER_CTA), 1, 1)
        self.convert(
            dq_pool.iterator, dq.iterator, dkv_sums.iterator, dkv.iterator, dq_ctas, dq_granules, dkv_granules
        ).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def convert(
        self,
        dq_pool: cute.Pointer,
        dq: cute.Pointer,
        dkv_sums: cute.Pointer,
        dkv: cute.Pointer,
        dq_ctas: Int32,
        dq_granules: Int32,
        dkv_granules: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if cta < dq_ctas:
            if cutlass.const_expr(self.paired):
                _split_pairs(dq_pool, dq, cta * GRANULES_PER_CTA + thread, dq_granules)
            else:
                _cast(dq_pool, dq, cta * GRANULES_PER_CTA + thread, dq_granules)
        else:
            _cast(dkv_sums, dkv, (cta - dq_ctas) * GRANULES_PER_CTA + thread, dkv_granules)


@cute.jit
def _vector(base: cute.Pointer, granule: Int32, stride: cutlass.Constexpr, align: cutlass.Constexpr) -> cute.Tensor:
    """``stride`` values at granule number ``granule``, as one ``align``-byte access."""
    return cute.make_tensor((base + Int64(granule) * stride).align(align), cute.make_layout(stride))


@cute.jit
def _cast(source: cute.Pointer, target: cute.Pointer, first: Int32, granules: Int32) -> None:
    loaded = []
    for i in cutlass.range_constexpr(STEPS):
        loaded.append(_vector(source, cutlass.min(first + i * THREADS, granules - 1), CAST_VALUES, 16).load())
    for i in cutlass.range_constexpr(STEPS):
        if first + i * THREADS < granules:
            _vector(target, first + i * THREADS, CAST_VALUES, 8).store(loaded[i].to(BFloat16))


@cute.jit
def _split_pairs(source: cute.Pointer, target: cute.Pointer, first: Int32, granules: Int32) -> None:
    """Granule g holds head-dim indices 4 * (g % 32) to + 3 of the head pair g // 32; a word is one index of two heads."""
    words = cute.recast_ptr(source, dtype=Uint32)
    halves = cute.recast_ptr(target, dtype=Uint32)
    per_head = HEAD_DIM // (PAIR_VALUES // 2)
    loaded = []
    for i in cutlass.range_constexpr(STEPS):
        loaded.append(_vector(words, cutlass.min(first + i * THREADS, granules - 1), PAIR_VALUES // 2, 16).load())
    for i in cutlass.range_constexpr(STEPS):
        if first + i * THREADS < granules:
            pair, place = (first + i * THREADS) // per_head, (first + i * THREADS) % per_head
            even, odd = cute.make_rmem_tensor(2, Uint32), cute.make_rmem_tensor(2, Uint32)
            for j in cutlass.range_constexpr(2):
                x, y = loaded[i][2 * j], loaded[i][2 * j + 1]
                even[j] = (x & Uint32(0xFFFF)) | (y << 16)
                odd[j] = (x >> 16) | (y & Uint32(0xFFFF0000))
            _vector(halves, 2 * pair * per_head + place, 2, 8).store(even.load())
            _vector(halves, (2 * pair + 1) * per_head + place, 2, 8).store(odd.load())


def compile_postprocess(*, arch: str, dq_pool: str) -> Callable[..., None]:
    """Compiles the stage for one layout of the dQ pool.

    Args:
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        dq_pool: one of :data:`DQ_POOLS`.

    Returns:
        A function ``(dq_pool, dq, dkv_sums, dkv)`` on the current stream: the pool, fp32 ``[T, Hq, 128]`` or bf16
        ``[T, Hq / 2, 128, 2]``; dq, bf16 ``[T, Hq, 128]``; fp32 and bf16 ``[2, W, Hkv, 128]``, dK first. All
        contiguous, on one device, at 16-byte addresses. Overwrites ``dq`` and ``dkv``. Rounds to nearest, ties to even.

    Raises:
        KeyError: the pool is unknown.
    """
    stage = Postprocess(dq_pool)
    tokens, heads, pairs, rows, kv_heads = (cute.sym_int() for _ in range(5))

    def fake(dtype: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    pool = fake(BFloat16, tokens, pairs, HEAD_DIM, 2) if stage.paired else fake(Float32, tokens, heads, HEAD_DIM)
    return cute.compile(
        stage,
        pool,
        fake(BFloat16, tokens, heads, HEAD_DIM),
        fake(Float32, 2, rows, kv_heads, HEAD_DIM),
        fake(BFloat16, 2, rows, kv_heads, HEAD_DIM),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
