"""Accumulators to gradients: the dQ pool to bf16 dq, the fp32 dK and dV pools to bf16, in one launch.

The pools are in the order in which a main kernel adds to them (:mod:`msa_vendored.backward.pool_order`); the first CTAs
convert dQ, the others dK and dV. A thread reads a granule, whole 16-byte vectors, permutes it in registers and writes
whole 16-byte octets. Bytes moved: 6 per fp32 and 4 per bf16 element.

A call whose schedule was found inconsistent gets NaN everywhere: incomplete gradients must not look like gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64

from msa_vendored.backward.dq_scale import factor_exponent, power_of_two
from msa_vendored.backward.pool_order import IN_PLACE, VECTOR_BYTES, GranulePlan, plan_granules
from msa_vendored.compiling import compile_options

POOL_DTYPES = {"fp32": Float32, "bf16": BFloat16, "fp16": Float16}
HEAD_DIM = 128
KEYS_PER_BLOCK = 128
OCTET = 8
THREADS = 256
LANES_PER_ROW = HEAD_DIM // OCTET
VECTORS_IN_FLIGHT = 8
"""16-byte loads that a thread issues before it stores."""


class PoolReader:
    """Device code that converts one pool; a plan and numbers that are known when it is compiled.

    A thread converts ``granules`` granules, ``THREADS`` apart.
    """

    def __init__(self, dtype: str, order: str) -> None:
        self.dtype = POOL_DTYPES[dtype]
        self.plan: GranulePlan = plan_granules(order, self.dtype.width // 8)
        self.granules = max(1, VECTORS_IN_FLIGHT // len(self.plan.vectors))
        self.tile_elements = self.plan.tile_rows * HEAD_DIM

    def ctas(self, rows: Int32) -> Int32:
        """CTAs for ``rows`` rows, a multiple of the rows of a tile."""
        granules = rows // self.plan.tile_rows * self.plan.granules_per_tile
        return cute.ceil_div(granules, THREADS * self.granules)

    @cute.jit
    def convert(
        self,
        source: cute.Pointer,
        target: cute.Pointer,
        cta: Int32,
        rows: Int32,
        inner: Int32,
        spoilt: Boolean,
        scale: Any = None,
    ) -> None:
        """One CTA's granules. Row r of tile t is the target's ``(t // inner * tile_rows + r) * inner + t % inner``."""
        thread, _, _ = cute.arch.thread_idx()
        first = cta * (THREADS * self.granules) + thread
        granules = rows // self.plan.tile_rows * self.plan.granules_per_tile
        loaded = []
        for i in cutlass.range_constexpr(self.granules):
            # Granules beyond the last read the last; nothing is stored for them.
            tile, pool, _, _ = self.locate(cutlass.min(first + i * THREADS, granules - 1))
            base = Int64(tile) * self.tile_elements + pool
            loaded.append([self.load(source, base + offset) for offset in self.plan.vectors])
        for i in cutlass.range_constexpr(self.granules):
            if first + i * THREADS < granules:
                tile, _, row, d = self.locate(first + i * THREADS)
                outer = Int64(tile // inner * self.plan.tile_rows + row) * inner + tile % inner
                for octet_row, octet_d, sources in self.plan.octets:
                    base = (outer + octet_row * inner) * HEAD_DIM + (d + octet_d)
                    octet = cute.make_tensor(target + cute.assume(base, divby=OCTET), cute.make_layout(OCTET))
                    octet.store(self.octet(loaded[i], sources, spoilt).load())

    @cute.jit
    def octet(
        self, vectors: list[cute.TensorSSA], sources: tuple[tuple[int, int], ...], spoilt: Boolean
    ) -> cute.Tensor:
        """Eight neighbouring values of a row from the vectors of a granule, rounded."""
        values = cute.make_rmem_tensor(OCTET, BFloat16)
        for k in cutlass.range_constexpr(OCTET):
            values[k] = vectors[sources[k][0]][sources[k][1]].to(BFloat16)
        if spoilt:
            values.fill(BFloat16(math.nan))
        return values

    @cute.jit
    def locate(self, granule: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Tile of a granule, and its offset in the tile's pool elements, its first row and d."""
        tile, pool, row, d = granule // self.plan.granules_per_tile, Int32(0), Int32(0), Int32(0)
        for bit in cutlass.range_constexpr(len(self.plan.strides)):
            value = (granule >> bit) & 1
            stride = self.plan.strides[bit]
            pool += value * stride.pool
            row += value * stride.row
            d += value * stride.d
        return tile, pool, row, d

    @cute.jit
    def load(self, source: cute.Pointer, offset: Int64) -> cute.TensorSSA:
        """The 16-byte vector at an element offset, a multiple of its length."""
        values = VECTOR_BYTES * 8 // self.dtype.width
        return cute.make_tensor(source + cute.assume(offset, divby=values), cute.make_layout(values)).load()


class InPlace:
    """In place of a reader of the dQ pool where the main kernel adds to dq itself: there is nothing to convert."""

    def ctas(self, rows: Int32) -> int:
        """Few, since all that they ever do is to make a result NaN."""
        return 128

    @cute.jit
    def convert(
        self,
        source: cute.Pointer,
        target: cute.Pointer,
        cta: Int32,
        rows: Int32,
        inner: Int32,
        spoilt: Boolean,
        scale: Any = None,
    ) -> None:
        """NaN everywhere if ``spoilt``."""
        if spoilt:
            thread, _, _ = cute.arch.thread_idx()
            values = cute.make_rmem_tensor(OCTET, BFloat16)
            values.fill(BFloat16(math.nan))
            for octet in cutlass.range(cta * THREADS + thread, rows * (HEAD_DIM // OCTET), self.ctas(rows) * THREADS):
                base = cute.assume(Int64(octet) * OCTET, divby=OCTET)
                cute.make_tensor(target + base, cute.make_layout(OCTET)).store(values.load())


class ScaledInPlace:
    """Turns dQ from fp16, each row times a power of two, into bf16 where it is."""

    def ctas(self, rows: Int32) -> Int32:
        """CTAs for ``rows`` rows."""
        return cute.ceil_div(rows * (HEAD_DIM // OCTET), THREADS * VECTORS_IN_FLIGHT)

    @cute.jit
    def convert(
        self,
        source: cute.Pointer,
        target: cute.Pointer,
        cta: Int32,
        rows: Int32,
        inner: Int32,
        spoilt: Boolean,
        scale: Any,
    ) -> None:
        """One CTA's octets; a thread's are ``THREADS`` apart. No octet is read but by the thread that writes it."""
        thread, _, _ = cute.arch.thread_idx()
        first, limit = cta * (THREADS * VECTORS_IN_FLIGHT) + thread, rows * (HEAD_DIM // OCTET)
        loaded = [cute.make_rmem_tensor(OCTET, Float16) for _ in range(VECTORS_IN_FLIGHT)]
        # A warp's octets i are in two rows; lane 2 i + j finds what undoes the factor of row j.
        lane, step = thread % 32, THREADS // LANES_PER_ROW
        row, inverse = first // LANES_PER_ROW - lane // LANES_PER_ROW + lane // 2 % VECTORS_IN_FLIGHT * step, Float32(1)
        row += lane % 2
        if row < rows:
            inverse = self.inverse_factor(row, scale)
        for i in cutlass.range_constexpr(VECTORS_IN_FLIGHT):
            if first + i * THREADS < limit:
                loaded[i].store(self.locate(source, first + i * THREADS).load())
        for i in cutlass.range_constexpr(VECTORS_IN_FLIGHT):
            mine = cute.arch.shuffle_sync(inverse, 2 * i + lane // LANES_PER_ROW)
            if first + i * THREADS < limit:
                values = cute.make_rmem_tensor(OCTET, BFloat16)
                values.store((loaded[i].load().to(Float32) * mine).to(BFloat16))
                if spoilt:
                    values.fill(BFloat16(math.nan))
                self.locate(target, first + i * THREADS).store(values.load())

    def locate(self, base: cute.Pointer, octet: Int32) -> cute.Tensor:
        """An octet of dq."""
        return cute.make_tensor(base + cute.assume(Int64(octet) * OCTET, divby=OCTET), cute.make_layout(OCTET))

    @cute.jit
    def inverse_factor(self, row: Int32, scale: Any) -> Float32:
        """What undoes the factor of a row, token * heads + head."""
        norms, key_maxima, softmax_scale = scale
        heads, kv_heads = norms.shape[1], key_maxima.shape[0]
        kv_head = row % heads // (heads // kv_heads)
        norm = cute.make_tensor(norms.iterator + row, cute.make_layout(1))[0]
        biased = factor_exponent(norm, key_maxima[kv_head, 0], key_maxima[kv_head, 1], softmax_scale)
        return power_of_two(2 * 127 - biased)


def choose_reader(dtype: str, order: str) -> Any:
    """What converts the dQ pool."""
    if order != IN_PLACE:
        return PoolReader(dtype, order)
    return ScaledInPlace() if dtype == "fp16" else InPlace()


class Postprocess:
    """Host function and kernel for one dtype and order of the dQ pool and one order of the dK and dV pools."""

    def __init__(self, dq_dtype: str, dq_order: str, dkv_order: str) -> None:
        self.dq_dtype = POOL_DTYPES[dq_dtype]
        self.dq = choose_reader(dq_dtype, dq_order)
        self.dkv = PoolReader("fp32", dkv_order)

    @cute.jit
    def __call__(
        self, dq_pool: cute.Tensor, dq: cute.Tensor, dkv_pool: cute.Tensor, dkv: cute.Tensor, stream: Any
    ) -> None:
        """One launch; see :func:`compile_postprocess`."""
        self.launch(dq_pool, dq, dkv_pool, dkv, None, None, stream)

    @cute.jit
    def report(
        self,
        dq_pool: cute.Tensor,
        dq: cute.Tensor,
        dkv_pool: cute.Tensor,
        dkv: cute.Tensor,
        error_word: cute.Tensor,
        device_word: cute.Tensor,
        stream: Any,
    ) -> None:
        """One launch that also reports; see :func:`compile_postprocess`."""
        self.launch(dq_pool, dq, dkv_pool, dkv, (error_word, device_word), None, stream)

    @cute.jit
    def report_scaled(
        self,
        dq_pool: cute.Tensor,
        dq: cute.Tensor,
        dkv_pool: cute.Tensor,
        dkv: cute.Tensor,
        error_word: cute.Tensor,
        device_word: cute.Tensor,
        norms: cute.Tensor,
        key_maxima: cute.Tensor,
        softmax_scale: Float32,
        stream: Any,
    ) -> None:
        """As :meth:`report`, of scaled sums."""
        scale = (norms, key_maxima, softmax_scale)
        self.launch(dq_pool, dq, dkv_pool, dkv, (error_word, device_word), scale, stream)

    @cute.jit
    def launch(
        self,
        dq_pool: cute.Tensor,
        dq: cute.Tensor,
        dkv_pool: cute.Tensor,
        dkv: cute.Tensor,
        words: Any,
        scale: Any,
        stream: Any,
    ) -> None:
        """CTAs for dQ, then CTAs for dK and dV."""
        dq_rows, dkv_rows, kv_heads = dq.shape[0] * dq.shape[1], 2 * dkv.shape[1] * dkv.shape[2], dkv.shape[2]
        dq_ctas = self.dq.ctas(dq_rows)
        self.convert(
            dq_pool.iterator, dq.iterator, dkv_pool.iterator, dkv.iterator, words, scale, dq_ctas, dq_rows, dkv_rows,
            kv_heads,
        ).launch(grid=(dq_ctas + self.dkv.ctas(dkv_rows), 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def convert(
        self,
        dq_pool: cute.Pointer,
        dq: cute.Pointer,
        dkv_pool: cute.Pointer,
        dkv: cute.Pointer,
        words: Any,
        scale: Any,
        dq_ctas: Int32,
        dq_rows: Int32,
        dkv_rows: Int32,
        kv_heads: Int32,
    ) -> None:
        """All heads of a token are neighbouring rows of dq; those of a key block are apart in dk and dv."""
        cta, _, _ = cute.arch.block_idx()
        spoilt = Boolean(False)
        if cutlass.const_expr(words is not None):
            error_word, device_word = words
            spoilt = error_word[0] != 0
            thread, _, _ = cute.arch.thread_idx()
            if spoilt & (cta == 0) & (thread == 0):
                cute.arch.atomic_or(device_word.iterator, error_word[0])
        if cta < dq_ctas:
            self.dq.convert(dq_pool, dq, cta, dq_rows, 1, spoilt, scale)
        else:
            self.dkv.convert(dkv_pool, dkv, cta - dq_ctas, dkv_rows, kv_heads, spoilt)


def compile_postprocess(
    *, arch: str, dq_dtype: str, dq_order: str, dkv_order: str, report_errors: bool = False
) -> Callable[..., None]:
    """Compiles the stage for the pools of one main kernel.

    Args:
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        dq_dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``, type of the dQ pool.
        dq_order: order of the dQ pool; its tiles are groups of neighbouring heads of a token. Or
            :data:`~msa_vendored.backward.pool_order.IN_PLACE`: the pool is dq itself. If it is of fp16, its rows are
            scaled, and errors have to be reported.
        dkv_order: order of the fp32 dK and dV pools; its tiles are the 128 keys of a key block and kv head.
        report_errors: two more arguments ``(error_word, device_word)``, int32 ``[1]``: if the first is not 0, it is
            ORed into the second and the gradients become NaN. In fp16 three more: ``(norms, key_maxima,
            softmax_scale)``, see :mod:`msa_vendored.backward.dq_scale`.

    Returns:
        A function ``(dq_pool, dq, dkv_pool, dkv)`` on the current stream: flat pools of ``T * Hq * 128`` and
        ``2 * W * Hkv * 128`` elements, dK before dV, and within each tiles by (key block, kv head); bf16 dq
        ``[T, Hq, 128]`` and dkv ``[2, W, Hkv, 128]``. All contiguous, on one device, at 16-byte addresses; W a
        multiple of 128, Hq of the tile's rows. Overwrites ``dq`` and ``dkv``; rounds to nearest, ties to even.

    Raises:
        KeyError: the dtype is unknown.
        ValueError: an order is not one.
    """
    stage = Postprocess(dq_dtype, dq_order, dkv_order)
    if stage.dkv.plan.tile_rows != KEYS_PER_BLOCK:
        raise ValueError(f"tiles of dK and dV hold {KEYS_PER_BLOCK} keys: {dkv_order!r}")
    tokens, heads, rows, kv_heads = (cute.sym_int() for _ in range(4))

    def fake(dtype: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=VECTOR_BYTES)

    words = [cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4)] * 2 if report_errors else []
    scale: list[Any] = []
    function = stage.report if report_errors else stage
    if dq_dtype == "fp16":
        if not report_errors or dq_order != IN_PLACE:
            raise ValueError("sums in fp16 are converted in place, with errors reported")
        function, scale = stage.report_scaled, [fake(Float32, tokens, heads), fake(Float32, kv_heads, 2), Float32(1)]
    return cute.compile(
        function,
        fake(stage.dq_dtype, cute.sym_int64()),
        fake(BFloat16, tokens, heads, HEAD_DIM),
        fake(Float32, cute.sym_int64()),
        fake(BFloat16, 2, rows, kv_heads, HEAD_DIM),
        *words,
        *scale,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
