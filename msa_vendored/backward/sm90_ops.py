"""PTX instructions and shared-memory views that the SM90 kernels need and CuTe DSL has no name for."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

SWIZZLE_128B = (3, 4, 3)
LOG2_E = 1.4426950408889634


def swizzled(pointer: Any) -> Any:
    """A bf16 pointer into shared memory whose accesses go through the 128-byte swizzle of TMA and wgmma."""
    return cute.recast_ptr(pointer, cute.make_swizzle(*SWIZZLE_128B), dtype=BFloat16)


def _emit(text: str, constraints: str, operands: list[Any]) -> None:
    llvm.inline_asm(
        None, operands, text, constraints, has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


@dsl_user_op
def bulk_add_f32(target: Int64, source: Int32, size_bytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """Add fp32 from shared memory to global memory, asynchronously; part of the thread's next bulk group."""
    operands = [Int64(target).ir_value(loc=loc, ip=ip), Int32(source).ir_value(loc=loc, ip=ip)]
    operands.append(Int32(size_bytes).ir_value(loc=loc, ip=ip))
    _emit("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", "l,r,r", operands)


@dsl_user_op
def store_shared_f32x2(address: Int32, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Two fp32 to shared memory, 8-byte aligned."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), *[Float32(v).ir_value(loc=loc, ip=ip) for v in values]]
    _emit("st.shared.v2.f32 [$0], {$1, $2};", "r,f,f", operands)


@dsl_user_op
def store_shared_f32x4(address: Int32, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Four fp32 to shared memory, 16-byte aligned."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), *[Float32(v).ir_value(loc=loc, ip=ip) for v in values]]
    _emit("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f", operands)


@dsl_user_op
def store_matrix_x4(address: Int32, words: Any, *, loc: Any = None, ip: Any = None) -> None:
    """``stmatrix``: four 8x8 matrices of bf16, lane l gives the shared-memory address of row l % 8 of matrix l / 8."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), *[Int32(w).ir_value(loc=loc, ip=ip) for w in words]]
    llvm.inline_asm(
        None,
        operands,
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def pack_bf16(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 rounded to nearest even as one register of two bf16, ``low`` in the low half."""
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            operands,
            "cvt.rn.bf16x2.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def pack_fp16(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 rounded to nearest even as one register of two fp16, ``low`` in the low half."""
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            operands,
            "cvt.rn.f16x2.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def exp2_approx(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``ex2.approx.ftz``: relative error 2^-22 (PTX ISA); exp2(-inf) = 0."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(x).ir_value(loc=loc, ip=ip)],
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``a * b + c`` with one rounding."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b, c)],
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def float_of_bits(bits: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The fp32 with these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def bits_of_float(value: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The bits of an fp32."""
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def unpack_bf16(word: Int32) -> tuple[Float32, Float32]:
    """The two bf16 of a register, low half first, as fp32."""
    return float_of_bits(word << 16), float_of_bits(word & Int32(-65536))


def multiply(mma: Any, accumulator: Any, a: Any, b: Any, *, accumulate: bool) -> None:
    """Issue ``accumulator (+)= a b`` over all 16-wide steps of the contraction; does not commit or wait."""
    for k in range(cute.size(a, mode=[2])):
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
