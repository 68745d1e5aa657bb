"""Integer, bit and move instructions of the table."""

from __future__ import annotations

from ptx_emulator.lane_table import CPP_TYPES, add_op


def add_integer_ops() -> None:
    """Enter them all."""
    for bits in (32, 64):
        _add_integer(bits)
    _add_multiply_wide()
    _add_short_integer()
    _add_bits()
    _add_moves()


def _add_integer(bits: int) -> None:
    u, s = f"u{bits}", f"s{bits}"
    for name, expression in (("add", "a+b"), ("sub", "a-b"), ("mul.lo", "a*b")):
        add_op(f"{name}.s{bits} {name}.u{bits}", u, f"{u} {u}", expression)
    add_op(f"mad.lo.s{bits} mad.lo.u{bits}", u, f"{u} {u} {u}", "a*b+c")
    for kind, minimum in ((s, f"(s{bits})(1ull<<{bits - 1})"), (u, None)):
        overflow = f"(a=={minimum}&&b==-1)?a:" if minimum else ""
        add_op(f"div.{kind}", kind, f"{kind} {kind}", f"b==0?({CPP_TYPES[kind]})-1:{overflow}a/b")
        overflow = f"(a=={minimum}&&b==-1)?0:" if minimum else ""
        add_op(f"rem.{kind}", kind, f"{kind} {kind}", f"b==0?a:{overflow}a%b")
        add_op(f"min.{kind}", kind, f"{kind} {kind}", "a<b?a:b")
        add_op(f"max.{kind}", kind, f"{kind} {kind}", "a>b?a:b")
    add_op(f"neg.s{bits}", u, u, "0-a")
    add_op(f"abs.s{bits}", u, s, "a<0?0-(u64)a:(u64)a" if bits == 64 else "a<0?0u-(u32)a:(u32)a")
    for name, expression in (("and", "a&b"), ("or", "a|b"), ("xor", "a^b")):
        add_op(f"{name}.b{bits}", u, f"{u} {u}", expression)
    add_op(f"not.b{bits}", u, u, "~a")
    add_op(f"shl.b{bits}", u, f"{u} u32", f"b>{bits - 1}?0:a<<(b&{bits - 1})")
    add_op(f"shr.u{bits} shr.b{bits}", u, f"{u} u32", f"b>{bits - 1}?0:a>>(b&{bits - 1})")
    add_op(f"shr.s{bits}", s, f"{s} u32", f"a>>(b>{bits - 1}?{bits - 1}:b)")


def _add_multiply_wide() -> None:
    add_op("mul.wide.s32", "s64", "s32 s32", "(s64)a*(s64)b")
    add_op("mul.wide.u32", "u64", "u32 u32", "(u64)a*b")
    add_op("mul.wide.u16", "u32", "h h", "a*b")
    add_op("mul.wide.s16", "s32", "hs hs", "(s32)a*(s32)b")
    add_op("mad.wide.u32", "u64", "u32 u32 u64", "(u64)a*b+c")
    add_op("mad.wide.s32", "u64", "s32 s32 u64", "(u64)((s64)a*b)+c")
    add_op("mad.wide.u16", "u32", "h h u32", "a*b+c")
    add_op("mul.hi.u32", "u32", "u32 u32", "(u32)(((u64)a*b)>>32)")
    add_op("mul.hi.s32", "u32", "s32 s32", "(u32)(((s64)a*b)>>32)")
    add_op("mul.hi.u64", "u64", "u64 u64", "(u64)(((unsigned __int128)a*b)>>64)")
    add_op("mad.hi.u32", "u32", "u32 u32 u32", "(u32)(((u64)a*b)>>32)+c")
    add_op("mul24.lo.u32", "u32", "u32 u32", "(a&0xffffffu)*(b&0xffffffu)")


def _add_short_integer() -> None:
    for name, expression in (("add", "a+b"), ("sub", "a-b"), ("mul.lo", "a*b")):
        add_op(f"{name}.s16 {name}.u16", "h", "h h", expression)
    add_op("mad.lo.s16 mad.lo.u16", "h", "h h h", "a*b+c")
    for name, expression in (("and", "a&b"), ("or", "a|b"), ("xor", "a^b")):
        add_op(f"{name}.b16", "h", "h h", expression)
    add_op("not.b16", "h", "h", "~a")
    add_op("neg.s16", "h", "h", "0u-a")
    add_op("min.s16", "h", "hs hs", "(s32)a<(s32)b?a:b")
    add_op("max.s16", "h", "hs hs", "(s32)a>(s32)b?a:b")
    add_op("min.u16", "h", "h h", "a<b?a:b")
    add_op("max.u16", "h", "h h", "a>b?a:b")
    add_op("shl.b16", "h", "h u32", "b>15?0:a<<(b&15)")
    add_op("shr.u16 shr.b16", "h", "h u32", "b>15?0:a>>(b&15)")
    add_op("shr.s16", "h", "hs u32", "(s32)a>>(b>15?15:b)")


def _add_bits() -> None:
    add_op("prmt.b32", "u32", "u32 u32 u32", "permute_bytes(a,b,c)")
    add_op("lop3.b32", "u32", "u32 u32 u32 u32", "logic3(a,b,c,d)")
    add_op("bfe.u32", "u32", "u32 u32 u32", "extract_bits(a,b,c)")
    add_op("bfe.s32", "u32", "u32 u32 u32", "extract_signed_bits(a,b,c)")
    add_op("bfi.b32", "u32", "u32 u32 u32 u32", "insert_bits(a,b,c,d)")
    add_op("bfi.b64", "u64", "u64 u64 u32 u32", "insert_wide_bits(a,b,c,d)")
    add_op("bfe.u64", "u64", "u64 u32 u32", "extract_wide_bits(a,b,c)")
    add_op("popc.b32", "u32", "u32", "(u32)__builtin_popcount(a)")
    add_op("popc.b64", "u32", "u64", "(u32)__builtin_popcountll(a)")
    add_op("clz.b32", "u32", "u32", "a?(u32)__builtin_clz(a):32u")
    add_op("clz.b64", "u32", "u64", "a?(u32)__builtin_clzll(a):64u")
    add_op("bfind.u32", "u32", "u32", "a?31u-(u32)__builtin_clz(a):~0u")
    add_op("brev.b32", "u32", "u32", "reverse_bits(a)")
    add_op("fns.b32", "u32", "u32 u32 s32", "find_nth_set(a,b,c)")
    add_op("shf.l.wrap.b32", "u32", "u32 u32 u32", "(u32)(((((u64)b<<32)|a)<<(c&31))>>32)")
    add_op("shf.r.wrap.b32", "u32", "u32 u32 u32", "(u32)((((u64)b<<32)|a)>>(c&31))")
    add_op("shf.l.clamp.b32", "u32", "u32 u32 u32", "(u32)(((((u64)b<<32)|a)<<(c>32?32:c))>>32)")
    add_op("shf.r.clamp.b32", "u32", "u32 u32 u32", "(u32)((((u64)b<<32)|a)>>(c>32?32:c))")


def _add_moves() -> None:
    add_op("mov.b32 mov.u32 mov.s32 mov.f32", "u32", "u32", "a")
    add_op("mov.b16 mov.u16 mov.s16", "h", "h", "a")
    add_op("mov.b64 mov.u64 mov.s64 mov.f64", "u64", "u64", "a")
    # One flat numbering: shared and local windows lie below every host address, so that conversion changes nothing.
    spaces = ("global", "shared", "local", "param", "to.global", "to.shared", "to.local", "to.param", "shared::cta")
    for space in spaces:
        add_op(f"cvta.{space}.u64", "u64", "u64", "a")
    for suffix in ("", ".to"):
        add_op(f"cvta{suffix}.shared.u32", "u32", "u32", "a")
