"""Floating-point instructions of the table, conversions and comparisons."""

from __future__ import annotations

import re

from ptx_emulator.lane_table import add_op


def add_float_ops() -> None:
    """Enter them all."""
    _add_conversions()
    _add_float()
    _add_packed_half()
    _add_compares()


def _add_conversions() -> None:
    add_op("cvt.u64.u32", "u64", "u32", "a")
    add_op("cvt.s64.s32 cvt.u64.s32", "s64", "s32", "a")
    add_op("cvt.s64.u32", "u64", "u32", "a")
    add_op("cvt.u32.u64 cvt.s32.s64 cvt.u32.s64 cvt.s32.u64", "u32", "u64", "(u32)a")
    for source in ("u32", "s32"):
        add_op(f"cvt.u16.{source} cvt.s16.{source}", "h", "u32", "a")
        add_op(f"cvt.u8.{source}", "h", "u32", "a&255")
        add_op(f"cvt.s8.{source}", "h", "u32", "(u32)(s32)(int8_t)a")
    add_op("cvt.u16.u64 cvt.s16.s64", "h", "u64", "(u32)a")
    add_op("cvt.u32.u16 cvt.s32.u16", "u32", "h", "a")
    add_op("cvt.u64.u16", "u64", "h", "a")
    add_op("cvt.s32.s16 cvt.u32.s16", "u32", "hs", "a")
    add_op("cvt.s64.s16", "s64", "hs", "(s64)(s32)a")
    add_op("cvt.u32.u8 cvt.s32.u8", "u32", "h", "a&255")
    add_op("cvt.u16.u8 cvt.s16.u8", "h", "h", "a&255")
    add_op("cvt.s32.s8 cvt.u32.s8", "u32", "h", "(u32)(s32)(int8_t)a")
    add_op("cvt.s16.s8", "h", "h", "(u32)(s32)(int8_t)a")
    for kind, cpp in (("s32", "s32"), ("u32", "u32"), ("s64", "s64"), ("u64", "u64")):
        add_op(f"cvt.rn.f32.{kind}", "f32", kind, "(f32)a")
        add_op(f"cvt.rn.f64.{kind}", "f64", kind, "(f64)a")
        for rounding, function in (("rzi", "trunc"), ("rni", "nearbyint"), ("rmi", "floor"), ("rpi", "ceil")):
            add_op(f"cvt.{rounding}.{kind}.f64", kind, "f64", f"saturate<{cpp}>({function}(a))")
        for rounding, function in (("rzi", "truncf"), ("rni", "nearbyintf"), ("rmi", "floorf"), ("rpi", "ceilf")):
            for flush in ("", ".ftz"):
                add_op(
                    f"cvt.{rounding}{flush}.{kind}.f32",
                    kind,
                    "f32",
                    f"saturate<{cpp}>({function}({_flush('a', flush)}))",
                )
    for rounding, function in (("rzi", "truncf"), ("rni", "nearbyintf"), ("rmi", "floorf"), ("rpi", "ceilf")):
        add_op(f"cvt.{rounding}.f32.f32", "f32", "f32", f"{function}(a)")
    add_op("cvt.rn.f32.s16", "f32", "hs", "(f32)(s32)a")
    add_op("cvt.rn.f32.u16", "f32", "h", "(f32)a")
    add_op("cvt.rn.f32.s8", "f32", "h", "(f32)(int8_t)a")
    add_op("cvt.rn.f32.u8", "f32", "h", "(f32)(a&255)")
    add_op("cvt.f64.f32", "f64", "f32", "(f64)a")
    add_op("cvt.rn.f32.f64", "f32", "f64", "(f32)a")
    add_op("cvt.sat.f32.f32", "f32", "f32", "a>0.f?(a>1.f?1.f:a):0.f")
    add_op("cvt.rna.tf32.f32", "u32", "f32", "to_tf32(a)")
    for name, to_half, from_half in (("bf16", "to_bf16", "from_bf16"), ("f16", "to_f16", "from_f16")):
        add_op(f"cvt.f32.{name}", "f32", "h", f"{from_half}(a)")
        add_op(f"cvt.ftz.f32.{name}", "f32", "h", f"flush({from_half}(a))")
        add_op(f"cvt.rn.{name}.f32", "h", "f32", f"{to_half}(a)")
        add_op(f"cvt.rn.{name}x2.f32", "u32", "f32 f32", f"({to_half}(a)<<16)|{to_half}(b)")
        add_op(f"cvt.rn.relu.{name}x2.f32", "u32", "f32 f32", f"({to_half}(relu(a))<<16)|{to_half}(relu(b))")


def _flush(text: str, flush: str) -> str:
    return f"flush({text})" if flush else text


def _add_float() -> None:
    binary = {"add": "a+b", "sub": "a-b", "mul": "a*b"}
    for flush in ("", ".ftz"):
        read = "".join(f"{name}=flush({name});" for name in "ab") if flush else ""
        read3 = read + ("c=flush(c);" if flush else "")

        def wrap(expression: str, flush: str = flush) -> str:
            return _flush(expression, flush)

        for rounding in ("", ".rn"):
            for name, expression in binary.items():
                add_op(f"{name}{rounding}{flush}.f32", "f32", "f32 f32", f"({{{read}{wrap(expression)};}})")
                pair = ",".join(wrap(_lane(expression, part, flush)) for part in ("low", "high"))
                add_op(f"{name}{rounding}{flush}.f32x2", "u64", "u64 u64", f"pair({pair})")
        add_op(f"fma.rn{flush}.f32", "f32", "f32 f32 f32", f"({{{read3}{wrap('__builtin_fmaf(a,b,c)')};}})")
        fused = ",".join(wrap(_lane("__builtin_fmaf(a,b,c)", part, flush)) for part in ("low", "high"))
        add_op(f"fma.rn{flush}.f32x2", "u64", "u64 u64 u64", f"pair({fused})")
        for rounding, direction in (("rm", "-INFINITY"), ("rp", "INFINITY")):
            a, b = _flush("a", flush), _flush("b", flush)
            add_op(f"add.{rounding}{flush}.f32", "f32", "f32 f32", wrap(f"add_directed({a},{b},{direction})"))
            add_op(f"sub.{rounding}{flush}.f32", "f32", "f32 f32", wrap(f"add_directed({a},-{b},{direction})"))
            add = f"add_directed(a,b,{direction})"
            lanes = ",".join(wrap(_lane(add, part, flush)) for part in ("low", "high"))
            add_op(f"add.{rounding}{flush}.f32x2", "u64", "u64 u64", f"pair({lanes})")
        _add_minmax(flush)
        add_op(f"neg{flush}.f32", "f32", "f32", wrap("-a"))
        add_op(f"abs{flush}.f32", "f32", "f32", wrap("__builtin_fabsf(a)"))
        _add_approximations(flush)
    add_op("copysign.f32", "f32", "f32 f32", "__builtin_copysignf(b,a)")
    add_op("add.f64 add.rn.f64", "f64", "f64 f64", "a+b")
    add_op("sub.f64 sub.rn.f64", "f64", "f64 f64", "a-b")
    add_op("mul.f64 mul.rn.f64", "f64", "f64 f64", "a*b")
    add_op("fma.rn.f64", "f64", "f64 f64 f64", "__builtin_fma(a,b,c)")
    add_op("div.rn.f64", "f64", "f64 f64", "a/b")


def _lane(expression: str, part: str, flush: str) -> str:
    """The expression on one half of packed operands."""
    return re.sub(r"\b([abc])\b", lambda match: _flush(f"{part}({match.group(1)})", flush), expression)


def _add_minmax(flush: str) -> None:
    for name, function in (("min", "min_number"), ("max", "max_number")):
        for nan, suffix in ((".NaN", "_nan"), ("", "")):
            a, b, c = (_flush(operand, flush) for operand in "abc")
            two = f"{function}{suffix}({a},{b})"
            add_op(f"{name}{flush}{nan}.f32", "f32", "f32 f32", two)
            # The three-input form has the same spelling; lowering tells it by the number of operands.
            add_op(f"{name}3{flush}{nan}.f32", "f32", "f32 f32 f32", f"{function}{suffix}({two},{c})")


def _add_approximations(flush: str) -> None:
    a, b = _flush("a", flush), _flush("b", flush)
    for names, sources, expression in (
        (f"ex2.approx{flush}.f32", "f32", f"exp2f({a})"),
        (f"lg2.approx{flush}.f32", "f32", f"log2f({a})"),
        (f"rcp.approx{flush}.f32 rcp.rn{flush}.f32", "f32", f"1.f/{a}"),
        (f"rsqrt.approx{flush}.f32", "f32", f"1.f/sqrtf({a})"),
        (f"sqrt.approx{flush}.f32 sqrt.rn{flush}.f32", "f32", f"sqrtf({a})"),
        (f"div.rn{flush}.f32 div.approx{flush}.f32 div.full{flush}.f32", "f32 f32", f"{a}/{b}"),
        (f"sin.approx{flush}.f32", "f32", f"sinf({a})"),
        (f"cos.approx{flush}.f32", "f32", f"cosf({a})"),
    ):
        add_op(names, "f32", sources, _flush(expression, flush))
    if not flush:
        add_op("tanh.approx.f32", "f32", "f32", "tanhf(a)")


def _add_packed_half() -> None:
    for name, to_half, from_half in (("bf16", "to_bf16", "from_bf16"), ("f16", "to_f16", "from_f16")):
        for op, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            low = f"{to_half}({from_half}(a&0xffff){sign}{from_half}(b&0xffff))"
            high = f"{to_half}({from_half}(a>>16){sign}{from_half}(b>>16))"
            add_op(f"{op}.{name}x2 {op}.rn.{name}x2", "u32", "u32 u32", f"{low}|({high}<<16)")
            add_op(f"{op}.{name} {op}.rn.{name}", "h", "h h", f"{to_half}({from_half}(a){sign}{from_half}(b))")
        # The product of two 16-bit values is exact in double, and so is its sum with a third rounded once.
        low = f"{to_half}(fma_half({from_half}(a&0xffff),{from_half}(b&0xffff),{from_half}(c&0xffff)))"
        high = f"{to_half}(fma_half({from_half}(a>>16),{from_half}(b>>16),{from_half}(c>>16)))"
        add_op(f"fma.rn.{name}x2", "u32", "u32 u32 u32", f"{low}|({high}<<16)")
        add_op(f"add.rn.f32.{name}", "f32", "h f32", f"{from_half}(a)+b")
        add_op(f"fma.rn.f32.{name}", "f32", "h h f32", f"__builtin_fmaf({from_half}(a),{from_half}(b),c)")


def _add_compares() -> None:
    ordered = {"eq": "a==b", "ne": "a!=b", "lt": "a<b", "le": "a<=b", "gt": "a>b", "ge": "a>=b"}
    kinds = {"s32": "s32", "u32": "u32", "b32": "u32", "s64": "s64", "u64": "u64", "b64": "u64", "u16": "h", "b16": "h"}
    for name, expression in ordered.items():
        for kind, source in kinds.items():
            if kind.startswith("b") and name not in ("eq", "ne"):
                continue  # bits have no order
            add_op(f"setp.{name}.{kind}", "pred", f"{source} {source}", expression)
        signed = expression.replace("a", "(s32)a").replace("b", "(s32)b")
        add_op(f"setp.{name}.s16", "pred", "hs hs", signed)
        # On floats ne is the ordered one: false if either side is a NaN.
        ordered_float = "a<b||a>b" if name == "ne" else expression
        _add_float_compare(name, ordered_float)
        add_op(f"setp.{name}.f64", "pred", "f64 f64", ordered_float)
    for unsigned, signed_name in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        add_op(f"setp.{unsigned}.u32", "pred", "u32 u32", ordered[signed_name])
        add_op(f"setp.{unsigned}.u64", "pred", "u64 u64", ordered[signed_name])
    unordered = {"neu": "!(a==b)", "equ": "!(a<b||a>b)", "ltu": "!(a>=b)", "leu": "!(a>b)", "gtu": "!(a<=b)"}
    unordered |= {"geu": "!(a<b)", "nan": "a!=a||b!=b", "num": "a==a&&b==b"}
    for name, expression in unordered.items():
        _add_float_compare(name, expression)
        add_op(f"setp.{name}.f64", "pred", "f64 f64", expression)


def _add_float_compare(name: str, expression: str) -> None:
    add_op(f"setp.{name}.f32", "pred", "f32 f32", expression)
    flushed = re.sub(r"\b([ab])\b", r"flush(\1)", expression)
    add_op(f"setp.{name}.ftz.f32", "pred", "f32 f32", flushed)
