"""The lane-wise instructions as one table, and the C++ that the table becomes.

An entry maps the opcode with all its modifiers to the type of the result, the types of the sources and a C
expression in ``a, b, c, d``. Registers of 8 and 16 bits live in 32-bit slots whose upper bits are zero; the types
``h`` (16 bits, zero-extended) and ``hs`` (sign-extended on reading) keep them so. Whatever is not in the table and
has no handler in ``lower.py`` is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CPP_TYPES = {
    "u32": "u32",
    "s32": "s32",
    "f32": "f32",
    "u64": "u64",
    "s64": "s64",
    "f64": "f64",
    "h": "u32",
    "hs": "u32",
}
WIDE = frozenset({"u64", "s64", "f64"})
"""Types that need a 64-bit register."""


@dataclass(frozen=True, slots=True)
class LaneOp:
    """One lane-wise instruction: ``result = expression(a, b, c, d)``, each of its type."""

    result: str
    sources: tuple[str, ...]
    expression: str

    @property
    def is_compare(self) -> bool:
        """Whether the result is a predicate."""
        return self.result == "pred"


LANE_OPS: dict[str, LaneOp] = {}


def _add(names: str, result: str, sources: str, expression: str) -> None:
    for name in names.split():
        LANE_OPS[name] = LaneOp(result, tuple(sources.split()), expression)


def _add_integer(bits: int) -> None:
    u, s = f"u{bits}", f"s{bits}"
    for name, expression in (("add", "a+b"), ("sub", "a-b"), ("mul.lo", "a*b")):
        _add(f"{name}.s{bits} {name}.u{bits}", u, f"{u} {u}", expression)
    _add(f"mad.lo.s{bits} mad.lo.u{bits}", u, f"{u} {u} {u}", "a*b+c")
    for kind, minimum in ((s, f"(s{bits})(1ull<<{bits - 1})"), (u, None)):
        overflow = f"(a=={minimum}&&b==-1)?a:" if minimum else ""
        _add(f"div.{kind}", kind, f"{kind} {kind}", f"b==0?({CPP_TYPES[kind]})-1:{overflow}a/b")
        overflow = f"(a=={minimum}&&b==-1)?0:" if minimum else ""
        _add(f"rem.{kind}", kind, f"{kind} {kind}", f"b==0?a:{overflow}a%b")
        _add(f"min.{kind}", kind, f"{kind} {kind}", "a<b?a:b")
        _add(f"max.{kind}", kind, f"{kind} {kind}", "a>b?a:b")
    _add(f"neg.s{bits}", u, u, "0-a")
    _add(f"abs.s{bits}", u, s, "a<0?0-(u64)a:(u64)a" if bits == 64 else "a<0?0u-(u32)a:(u32)a")
    for name, expression in (("and", "a&b"), ("or", "a|b"), ("xor", "a^b")):
        _add(f"{name}.b{bits}", u, f"{u} {u}", expression)
    _add(f"not.b{bits}", u, u, "~a")
    _add(f"shl.b{bits}", u, f"{u} u32", f"b>{bits - 1}?0:a<<(b&{bits - 1})")
    _add(f"shr.u{bits} shr.b{bits}", u, f"{u} u32", f"b>{bits - 1}?0:a>>(b&{bits - 1})")
    _add(f"shr.s{bits}", s, f"{s} u32", f"a>>(b>{bits - 1}?{bits - 1}:b)")


def _add_multiply_wide() -> None:
    _add("mul.wide.s32", "s64", "s32 s32", "(s64)a*(s64)b")
    _add("mul.wide.u32", "u64", "u32 u32", "(u64)a*b")
    _add("mul.wide.u16", "u32", "h h", "a*b")
    _add("mul.wide.s16", "s32", "hs hs", "(s32)a*(s32)b")
    _add("mad.wide.u32", "u64", "u32 u32 u64", "(u64)a*b+c")
    _add("mad.wide.s32", "u64", "s32 s32 u64", "(u64)((s64)a*b)+c")
    _add("mad.wide.u16", "u32", "h h u32", "a*b+c")
    _add("mul.hi.u32", "u32", "u32 u32", "(u32)(((u64)a*b)>>32)")
    _add("mul.hi.s32", "u32", "s32 s32", "(u32)(((s64)a*b)>>32)")
    _add("mul.hi.u64", "u64", "u64 u64", "(u64)(((unsigned __int128)a*b)>>64)")
    _add("mad.hi.u32", "u32", "u32 u32 u32", "(u32)(((u64)a*b)>>32)+c")
    _add("mul24.lo.u32", "u32", "u32 u32", "(a&0xffffffu)*(b&0xffffffu)")


def _add_short_integer() -> None:
    for name, expression in (("add", "a+b"), ("sub", "a-b"), ("mul.lo", "a*b")):
        _add(f"{name}.s16 {name}.u16", "h", "h h", expression)
    _add("mad.lo.s16 mad.lo.u16", "h", "h h h", "a*b+c")
    for name, expression in (("and", "a&b"), ("or", "a|b"), ("xor", "a^b")):
        _add(f"{name}.b16", "h", "h h", expression)
    _add("not.b16", "h", "h", "~a")
    _add("neg.s16", "h", "h", "0u-a")
    _add("min.s16", "h", "hs hs", "(s32)a<(s32)b?a:b")
    _add("max.s16", "h", "hs hs", "(s32)a>(s32)b?a:b")
    _add("min.u16", "h", "h h", "a<b?a:b")
    _add("max.u16", "h", "h h", "a>b?a:b")
    _add("shl.b16", "h", "h u32", "b>15?0:a<<(b&15)")
    _add("shr.u16 shr.b16", "h", "h u32", "b>15?0:a>>(b&15)")
    _add("shr.s16", "h", "hs u32", "(s32)a>>(b>15?15:b)")


def _add_bits() -> None:
    _add("prmt.b32", "u32", "u32 u32 u32", "permute_bytes(a,b,c)")
    _add("lop3.b32", "u32", "u32 u32 u32 u32", "logic3(a,b,c,d)")
    _add("bfe.u32", "u32", "u32 u32 u32", "extract_bits(a,b,c)")
    _add("bfe.s32", "u32", "u32 u32 u32", "extract_signed_bits(a,b,c)")
    _add("bfi.b32", "u32", "u32 u32 u32 u32", "insert_bits(a,b,c,d)")
    _add("bfi.b64", "u64", "u64 u64 u32 u32", "insert_wide_bits(a,b,c,d)")
    _add("bfe.u64", "u64", "u64 u32 u32", "extract_wide_bits(a,b,c)")
    _add("popc.b32", "u32", "u32", "(u32)__builtin_popcount(a)")
    _add("popc.b64", "u32", "u64", "(u32)__builtin_popcountll(a)")
    _add("clz.b32", "u32", "u32", "a?(u32)__builtin_clz(a):32u")
    _add("clz.b64", "u32", "u64", "a?(u32)__builtin_clzll(a):64u")
    _add("bfind.u32", "u32", "u32", "a?31u-(u32)__builtin_clz(a):~0u")
    _add("brev.b32", "u32", "u32", "reverse_bits(a)")
    _add("fns.b32", "u32", "u32 u32 s32", "find_nth_set(a,b,c)")
    _add("shf.l.wrap.b32", "u32", "u32 u32 u32", "(u32)(((((u64)b<<32)|a)<<(c&31))>>32)")
    _add("shf.r.wrap.b32", "u32", "u32 u32 u32", "(u32)((((u64)b<<32)|a)>>(c&31))")
    _add("shf.l.clamp.b32", "u32", "u32 u32 u32", "(u32)(((((u64)b<<32)|a)<<(c>32?32:c))>>32)")
    _add("shf.r.clamp.b32", "u32", "u32 u32 u32", "(u32)((((u64)b<<32)|a)>>(c>32?32:c))")


def _add_moves() -> None:
    _add("mov.b32 mov.u32 mov.s32 mov.f32", "u32", "u32", "a")
    _add("mov.b16 mov.u16 mov.s16", "h", "h", "a")
    _add("mov.b64 mov.u64 mov.s64 mov.f64", "u64", "u64", "a")
    # One flat numbering: shared and local windows lie below every host address, so that conversion changes nothing.
    spaces = ("global", "shared", "local", "param", "to.global", "to.shared", "to.local", "to.param", "shared::cta")
    for space in spaces:
        _add(f"cvta.{space}.u64", "u64", "u64", "a")
    for suffix in ("", ".to"):
        _add(f"cvta{suffix}.shared.u32", "u32", "u32", "a")


def _add_conversions() -> None:
    _add("cvt.u64.u32", "u64", "u32", "a")
    _add("cvt.s64.s32 cvt.u64.s32", "s64", "s32", "a")
    _add("cvt.s64.u32", "u64", "u32", "a")
    _add("cvt.u32.u64 cvt.s32.s64 cvt.u32.s64 cvt.s32.u64", "u32", "u64", "(u32)a")
    for source in ("u32", "s32"):
        _add(f"cvt.u16.{source} cvt.s16.{source}", "h", "u32", "a")
        _add(f"cvt.u8.{source}", "h", "u32", "a&255")
        _add(f"cvt.s8.{source}", "h", "u32", "(u32)(s32)(int8_t)a")
    _add("cvt.u16.u64 cvt.s16.s64", "h", "u64", "(u32)a")
    _add("cvt.u32.u16 cvt.s32.u16", "u32", "h", "a")
    _add("cvt.u64.u16", "u64", "h", "a")
    _add("cvt.s32.s16 cvt.u32.s16", "u32", "hs", "a")
    _add("cvt.s64.s16", "s64", "hs", "(s64)(s32)a")
    _add("cvt.u32.u8 cvt.s32.u8", "u32", "h", "a&255")
    _add("cvt.u16.u8 cvt.s16.u8", "h", "h", "a&255")
    _add("cvt.s32.s8 cvt.u32.s8", "u32", "h", "(u32)(s32)(int8_t)a")
    _add("cvt.s16.s8", "h", "h", "(u32)(s32)(int8_t)a")
    for kind, cpp in (("s32", "s32"), ("u32", "u32"), ("s64", "s64"), ("u64", "u64")):
        _add(f"cvt.rn.f32.{kind}", "f32", kind, "(f32)a")
        _add(f"cvt.rn.f64.{kind}", "f64", kind, "(f64)a")
        for rounding, function in (("rzi", "trunc"), ("rni", "nearbyint"), ("rmi", "floor"), ("rpi", "ceil")):
            _add(f"cvt.{rounding}.{kind}.f64", kind, "f64", f"saturate<{cpp}>({function}(a))")
        for rounding, function in (("rzi", "truncf"), ("rni", "nearbyintf"), ("rmi", "floorf"), ("rpi", "ceilf")):
            for flush in ("", ".ftz"):
                _add(
                    f"cvt.{rounding}{flush}.{kind}.f32",
                    kind,
                    "f32",
                    f"saturate<{cpp}>({function}({_flush('a', flush)}))",
                )
    for rounding, function in (("rzi", "truncf"), ("rni", "nearbyintf"), ("rmi", "floorf"), ("rpi", "ceilf")):
        _add(f"cvt.{rounding}.f32.f32", "f32", "f32", f"{function}(a)")
    _add("cvt.rn.f32.s16", "f32", "hs", "(f32)(s32)a")
    _add("cvt.rn.f32.u16", "f32", "h", "(f32)a")
    _add("cvt.rn.f32.s8", "f32", "h", "(f32)(int8_t)a")
    _add("cvt.rn.f32.u8", "f32", "h", "(f32)(a&255)")
    _add("cvt.f64.f32", "f64", "f32", "(f64)a")
    _add("cvt.rn.f32.f64", "f32", "f64", "(f32)a")
    _add("cvt.sat.f32.f32", "f32", "f32", "a>0.f?(a>1.f?1.f:a):0.f")
    _add("cvt.rna.tf32.f32", "u32", "f32", "to_tf32(a)")
    for name, to_half, from_half in (("bf16", "to_bf16", "from_bf16"), ("f16", "to_f16", "from_f16")):
        _add(f"cvt.f32.{name}", "f32", "h", f"{from_half}(a)")
        _add(f"cvt.ftz.f32.{name}", "f32", "h", f"flush({from_half}(a))")
        _add(f"cvt.rn.{name}.f32", "h", "f32", f"{to_half}(a)")
        _add(f"cvt.rn.{name}x2.f32", "u32", "f32 f32", f"({to_half}(a)<<16)|{to_half}(b)")
        _add(f"cvt.rn.relu.{name}x2.f32", "u32", "f32 f32", f"({to_half}(relu(a))<<16)|{to_half}(relu(b))")


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
                _add(f"{name}{rounding}{flush}.f32", "f32", "f32 f32", f"({{{read}{wrap(expression)};}})")
                pair = ",".join(wrap(_lane(expression, part, flush)) for part in ("low", "high"))
                _add(f"{name}{rounding}{flush}.f32x2", "u64", "u64 u64", f"pair({pair})")
        _add(f"fma.rn{flush}.f32", "f32", "f32 f32 f32", f"({{{read3}{wrap('__builtin_fmaf(a,b,c)')};}})")
        fused = ",".join(wrap(_lane("__builtin_fmaf(a,b,c)", part, flush)) for part in ("low", "high"))
        _add(f"fma.rn{flush}.f32x2", "u64", "u64 u64 u64", f"pair({fused})")
        for rounding, direction in (("rm", "-INFINITY"), ("rp", "INFINITY")):
            a, b = _flush("a", flush), _flush("b", flush)
            _add(f"add.{rounding}{flush}.f32", "f32", "f32 f32", wrap(f"add_directed({a},{b},{direction})"))
            _add(f"sub.{rounding}{flush}.f32", "f32", "f32 f32", wrap(f"add_directed({a},-{b},{direction})"))
            add = f"add_directed(a,b,{direction})"
            lanes = ",".join(wrap(_lane(add, part, flush)) for part in ("low", "high"))
            _add(f"add.{rounding}{flush}.f32x2", "u64", "u64 u64", f"pair({lanes})")
        _add_minmax(flush)
        _add(f"neg{flush}.f32", "f32", "f32", wrap("-a"))
        _add(f"abs{flush}.f32", "f32", "f32", wrap("__builtin_fabsf(a)"))
        _add_approximations(flush)
    _add("copysign.f32", "f32", "f32 f32", "__builtin_copysignf(b,a)")
    _add("add.f64 add.rn.f64", "f64", "f64 f64", "a+b")
    _add("sub.f64 sub.rn.f64", "f64", "f64 f64", "a-b")
    _add("mul.f64 mul.rn.f64", "f64", "f64 f64", "a*b")
    _add("fma.rn.f64", "f64", "f64 f64 f64", "__builtin_fma(a,b,c)")
    _add("div.rn.f64", "f64", "f64 f64", "a/b")


def _lane(expression: str, part: str, flush: str) -> str:
    """The expression on one half of packed operands."""
    return re.sub(r"\b([abc])\b", lambda match: _flush(f"{part}({match.group(1)})", flush), expression)


def _add_minmax(flush: str) -> None:
    for name, function in (("min", "min_number"), ("max", "max_number")):
        for nan, suffix in ((".NaN", "_nan"), ("", "")):
            a, b, c = (_flush(operand, flush) for operand in "abc")
            two = f"{function}{suffix}({a},{b})"
            _add(f"{name}{flush}{nan}.f32", "f32", "f32 f32", two)
            # The three-input form has the same spelling; lowering tells it by the number of operands.
            _add(f"{name}3{flush}{nan}.f32", "f32", "f32 f32 f32", f"{function}{suffix}({two},{c})")


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
        _add(names, "f32", sources, _flush(expression, flush))
    if not flush:
        _add("tanh.approx.f32", "f32", "f32", "tanhf(a)")


def _add_packed_half() -> None:
    for name, to_half, from_half in (("bf16", "to_bf16", "from_bf16"), ("f16", "to_f16", "from_f16")):
        for op, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            low = f"{to_half}({from_half}(a&0xffff){sign}{from_half}(b&0xffff))"
            high = f"{to_half}({from_half}(a>>16){sign}{from_half}(b>>16))"
            _add(f"{op}.{name}x2 {op}.rn.{name}x2", "u32", "u32 u32", f"{low}|({high}<<16)")
            _add(f"{op}.{name} {op}.rn.{name}", "h", "h h", f"{to_half}({from_half}(a){sign}{from_half}(b))")
        # The product of two 16-bit values is exact in double, and so is its sum with a third rounded once.
        low = f"{to_half}(fma_half({from_half}(a&0xffff),{from_half}(b&0xffff),{from_half}(c&0xffff)))"
        high = f"{to_half}(fma_half({from_half}(a>>16),{from_half}(b>>16),{from_half}(c>>16)))"
        _add(f"fma.rn.{name}x2", "u32", "u32 u32 u32", f"{low}|({high}<<16)")
        _add(f"add.rn.f32.{name}", "f32", "h f32", f"{from_half}(a)+b")
        _add(f"fma.rn.f32.{name}", "f32", "h h f32", f"__builtin_fmaf({from_half}(a),{from_half}(b),c)")


def _add_compares() -> None:
    ordered = {"eq": "a==b", "ne": "a!=b", "lt": "a<b", "le": "a<=b", "gt": "a>b", "ge": "a>=b"}
    kinds = {"s32": "s32", "u32": "u32", "b32": "u32", "s64": "s64", "u64": "u64", "b64": "u64", "u16": "h", "b16": "h"}
    for name, expression in ordered.items():
        for kind, source in kinds.items():
            if kind.startswith("b") and name not in ("eq", "ne"):
                continue  # bits have no order
            _add(f"setp.{name}.{kind}", "pred", f"{source} {source}", expression)
        signed = expression.replace("a", "(s32)a").replace("b", "(s32)b")
        _add(f"setp.{name}.s16", "pred", "hs hs", signed)
        # On floats ne is the ordered one: false if either side is a NaN.
        ordered_float = "a<b||a>b" if name == "ne" else expression
        _add_float_compare(name, ordered_float)
        _add(f"setp.{name}.f64", "pred", "f64 f64", ordered_float)
    for unsigned, signed_name in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        _add(f"setp.{unsigned}.u32", "pred", "u32 u32", ordered[signed_name])
        _add(f"setp.{unsigned}.u64", "pred", "u64 u64", ordered[signed_name])
    unordered = {"neu": "!(a==b)", "equ": "!(a<b||a>b)", "ltu": "!(a>=b)", "leu": "!(a>b)", "gtu": "!(a<=b)"}
    unordered |= {"geu": "!(a<b)", "nan": "a!=a||b!=b", "num": "a==a&&b==b"}
    for name, expression in unordered.items():
        _add_float_compare(name, expression)
        _add(f"setp.{name}.f64", "pred", "f64 f64", expression)


def _add_float_compare(name: str, expression: str) -> None:
    _add(f"setp.{name}.f32", "pred", "f32 f32", expression)
    flushed = re.sub(r"\b([ab])\b", r"flush(\1)", expression)
    _add(f"setp.{name}.ftz.f32", "pred", "f32 f32", flushed)


for _bits in (32, 64):
    _add_integer(_bits)
_add_multiply_wide()
_add_short_integer()
_add_bits()
_add_moves()
_add_conversions()
_add_float()
_add_packed_half()
_add_compares()

FIRST_LANE_OP = 200
LANE_OP_NUMBERS = {name: FIRST_LANE_OP + i for i, name in enumerate(LANE_OPS)}


def generate_cases() -> str:
    """C++ ``case`` blocks for the interpreter's switch; opcodes of one meaning share a block."""
    groups: dict[LaneOp, list[int]] = {}
    for name, op in LANE_OPS.items():
        groups.setdefault(op, []).append(LANE_OP_NUMBERS[name])
    return "\n".join(_generate_case(op, numbers) for op, numbers in groups.items())


def _generate_case(op: LaneOp, numbers: list[int]) -> str:
    labels = " ".join(f"case {number}:" for number in numbers)
    names = "abcd"[: len(op.sources)]
    pointers = "".join(
        f"const {CPP_TYPES[kind]}* p{name}=(const {CPP_TYPES[kind]}*)(R+o[{i + 1}]);"
        for i, (kind, name) in enumerate(zip(op.sources, names, strict=True))
    )
    loads = "".join(
        f"{CPP_TYPES[kind]} {name}={f'(u32)(s32)(int16_t)p{name}[l]' if kind == 'hs' else f'p{name}[l]'};"
        for kind, name in zip(op.sources, names, strict=True)
    )
    if op.is_compare:
        body = f"u32 r=0; for(int l=0;l<32;l++){{ {loads} r|=(u32)({op.expression})<<l; }} P[o[0]]=(P[o[0]]&~m)|(r&m);"
        return f"{labels} {{ {pointers} {body} break; }}"
    result = CPP_TYPES[op.result]
    value = f"({op.expression})&0xffffu" if op.result == "h" else op.expression
    store = f"{loads} to[l]=({result})({value});"
    return (
        f"{labels} {{ {result}* to=({result}*)(R+o[0]); {pointers} if(m==~0u){{ for(int l=0;l<32;l++){{ {store} }} }} "
        f"else for(int l=0;l<32;l++) if(m>>l&1){{ {store} }} break; }}"
    )
