"""Lane-wise instructions of the PTX emulator against values computed from the PTX ISA's definitions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_emulator import UnsupportedPtxError, emulate
from ptx_emulator.alu import LANE_OPS
from ptx_emulator.definitions import bfe, bfi, signed
from ptx_emulator.snippets import WIDTHS, lane_op_module, module

FORMATS = {"u32": "<I", "s32": "<i", "f32": "<f", "u64": "<Q", "s64": "<q", "f64": "<d", "h": "<H", "hs": "<h"}
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
INTEGERS = [0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678]
INTEGERS += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFF0000, 0x00FF00FF]
INTEGERS += [0x55555555, 0xAAAAAAAA, 0x0F0F0F0F, 7, 100]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.25, 3.4e38, -3.4e38, 1e-38, 1e-40, -1e-40, math.inf, -math.inf, math.nan]
FLOATS += [1 + 2**-23, 1 - 2**-24, 2.0**31, -(2.0**31), 2.0**32, 65504.0, 65520.0, 1e-8, 6e-8, 0.1, 1 / 3, 2.5, -3.5]
FLOATS += [1e10, 123456.789, 2.0**24, 3.0]


def run_op(opcode: str, inputs: Sequence[Sequence[Any]]) -> list[Any]:
    """Run one instruction on 32 lanes; ``inputs`` has 32 values for each source."""
    op = LANE_OPS[opcode]
    sources = []
    for kind, values in zip(op.sources, inputs, strict=True):
        data = bytearray(b"".join(pack(kind, value) for value in values))
        sources.append(align_copy(torch.frombuffer(data, dtype=torch.uint8)))
    kind = "u32" if op.is_compare else op.result
    width = WIDTHS[kind]
    result = align_copy(torch.zeros(32 * width, dtype=torch.uint8))
    emulate(lane_op_module(opcode), *sources, result).require_clean()
    raw = bytes(result.tolist())
    return [unpack(kind, raw[i * width : (i + 1) * width]) for i in range(32)]


def align_copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.zeros(tensor.numel() // 8 + 1, dtype=torch.int64).view(torch.uint8)[: tensor.numel()]
    storage.copy_(tensor)
    return storage


def pack(kind: str, value: Any) -> bytes:
    if kind in ("f32", "f64"):
        return struct.pack(FORMATS[kind], value)
    bits = 8 * WIDTHS[kind]
    return int(value & ((1 << bits) - 1)).to_bytes(bits // 8, "little")


def unpack(kind: str, raw: bytes) -> Any:
    return struct.unpack(FORMATS[kind], raw)[0]


def truncating_division(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def spread(values: Sequence[Any], step: int = 1) -> list[Any]:
    """32 of the values, starting elsewhere for each ``step``: pairs of operands meet in many combinations."""
    return [values[(i * step + 3 * (step - 1)) % len(values)] for i in range(32)]


def prmt(a: int, b: int, selector: int) -> int:
    data = (a | b << 32).to_bytes(8, "little")
    result = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data[nibble & 7]
        result |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return result


def lop3(a: int, b: int, c: int, table: int) -> int:
    bits = (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1 for i in range(32))
    return sum(bit << i for i, bit in enumerate(bits))


INTEGER_CASES: dict[str, Callable[..., int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "mul.wide.u32": lambda a, b: a * b,
    "mul.wide.s32": lambda a, b: signed(a) * signed(b),
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "div.u32": lambda a, b: a // b if b else M32,
    "div.s32": lambda a, b: truncating_division(signed(a), signed(b)) if b else -1,
    "rem.u32": lambda a, b: a % b if b else a,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.s32": lambda a, b: max(signed(a), signed(b)),
    "min.u32": min,
    "max.u32": max,
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(signed(a)),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> min(b, 32),
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "shl.b64": lambda a, b: a << b if b < 64 else 0,
    "shr.s64": lambda a, b: signed(a, 64) >> min(b, 63),
    "add.s64": lambda a, b: a + b,
    "mul.lo.s64": lambda a, b: a * b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "bfe.u32": bfe,
    "bfi.b32": bfi,
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "bfind.u32": lambda a: a.bit_length() - 1,
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "shf.l.wrap.b32": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.r.clamp.b32": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "cvt.u64.u32": lambda a: a,
    "cvt.s64.s32": signed,
    "cvt.u32.u64": lambda a: a,
    "cvt.s32.s16": lambda a: signed(a, 16),
    "cvt.u32.u16": lambda a: a,
    "cvt.u16.u32": lambda a: a,
    "add.s16": lambda a, b: a + b,
    "shr.s16": lambda a, b: signed(a, 16) >> min(b, 15),
    "mul.wide.s16": lambda a, b: signed(a, 16) * signed(b, 16),
    "setp.lt.s32": lambda a, b: int(signed(a) < signed(b)),
    "setp.lt.u32": lambda a, b: int(a < b),
    "setp.ge.s64": lambda a, b: int(signed(a, 64) >= signed(b, 64)),
    "setp.eq.b32": lambda a, b: int(a == b),
    "setp.gt.s16": lambda a, b: int(signed(a, 16) > signed(b, 16)),
}


@pytest.mark.parametrize("opcode", INTEGER_CASES)
def test_integer_instruction(opcode: str) -> None:
    """A wrong sign, width, clamp or operand order of an integer instruction."""
    op = LANE_OPS[opcode]
    inputs = []
    for i, kind in enumerate(op.sources):
        mask = (1 << 8 * WIDTHS[kind]) - 1
        wide = [v << 29 | v for v in INTEGERS] if WIDTHS[kind] == 8 else INTEGERS
        inputs.append([v & mask for v in spread(wide, 2 * i + 1)])
    bits = 32 if op.is_compare else 8 * WIDTHS[op.result]
    expected = [INTEGER_CASES[opcode](*lane) & ((1 << bits) - 1) for lane in zip(*inputs, strict=True)]
    assert [value & ((1 << bits) - 1) for value in run_op(opcode, inputs)] == expected


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_byte_and_bit_instructions_on_any_operands(data: st.DataObject) -> None:
    """A selector, table or field that the fixed values do not reach."""
    word = st.integers(0, M32)
    for opcode in ("prmt.b32", "lop3.b32", "bfe.u32", "bfi.b32"):
        count = len(LANE_OPS[opcode].sources)
        inputs = [[data.draw(word) for _ in range(4)] * 8 for _ in range(count)]
        if opcode != "prmt.b32":
            inputs[-1] = [value & 255 for value in inputs[-1]]
        expected = [INTEGER_CASES[opcode](*lane) & M32 for lane in zip(*inputs, strict=True)]
        assert run_op(opcode, inputs) == expected


def f32(value: float) -> float:
    """Round to float32, to nearest even."""
    return float(np.float32(value))


def flushed(value: float) -> float:
    """Subnormal float32 to a zero of its sign."""
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def half(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=torch.float32).to(dtype).view(torch.int16)) & 0xFFFF


def minimum(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min(a, b, key=lambda v: (v, math.copysign(1, v)))


def exact_sum_rounded_down(a: float, b: float) -> float:
    if not math.isfinite(a) or not math.isfinite(b):
        return f32(a + b)
    from fractions import Fraction

    total = Fraction(a) + Fraction(b)
    nearest = np.float32(a) + np.float32(b)
    if math.isinf(nearest):
        return float(nearest if nearest < 0 else np.finfo(np.float32).max)
    return float(nearest if Fraction(float(nearest)) <= total else np.nextafter(nearest, np.float32(-math.inf)))


def saturated(value: float, low: int, high: int) -> int:
    return (
        0
        if math.isnan(value)
        else max(low, min(high, math.trunc(value) if math.isfinite(value) else (high if value > 0 else low)))
    )


BF16, F16 = torch.bfloat16, torch.float16
FLOAT_CASES: dict[str, Callable[..., Any]] = {
    "add.f32": lambda a, b: np.float32(a) + np.float32(b),
    "sub.f32": lambda a, b: np.float32(a) - np.float32(b),
    "mul.f32": lambda a, b: np.float32(a) * np.float32(b),
    "mul.ftz.f32": lambda a, b: flushed(float(np.float32(flushed(a)) * np.float32(flushed(b)))),
    "add.ftz.f32": lambda a, b: flushed(float(np.float32(flushed(a)) + np.float32(flushed(b)))),
    "min.f32": minimum,
    "max.f32": lambda a, b: -minimum(-a, -b),
    "max.NaN.f32": lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else -minimum(-a, -b),
    "max3.f32": lambda a, b, c: -minimum(minimum(-a, -b), -c),
    "neg.f32": lambda a: -a,
    "abs.f32": abs,
    "div.rn.f32": lambda a, b: np.float32(a) / np.float32(b),
    "cvt.rn.bf16.f32": lambda a: 0x7FFF if math.isnan(a) else half(a, BF16),
    "cvt.rn.f16.f32": lambda a: 0x7FFF if math.isnan(a) else half(a, F16),
    "cvt.rn.bf16x2.f32": lambda a, b: (
        (0x7FFF if math.isnan(a) else half(a, BF16)) << 16 | (0x7FFF if math.isnan(b) else half(b, BF16))
    ),
    "cvt.rzi.s32.f32": lambda a: saturated(a, -(1 << 31), (1 << 31) - 1),
    "cvt.rzi.u32.f32": lambda a: saturated(a, 0, M32),
    "add.rm.f32": exact_sum_rounded_down,
    "setp.lt.f32": lambda a, b: int(a < b),
    "setp.ne.f32": lambda a, b: int(a < b or a > b),
    "setp.neu.f32": lambda a, b: int(a != b),
    "setp.leu.f32": lambda a, b: int(not a > b),
    "setp.nan.f32": lambda a, b: int(math.isnan(a) or math.isnan(b)),
}


@pytest.mark.parametrize("opcode", FLOAT_CASES)
def test_float_instruction(opcode: str) -> None:
    """A wrong rounding, NaN rule, signed zero, saturation or flush of a float instruction."""
    values = [f32(v) for v in FLOATS]
    inputs = [spread(values, 2 * i + 1) for i in range(len(LANE_OPS[opcode].sources))]
    got = run_op(opcode, inputs)
    with np.errstate(all="ignore"):
        for lane, result in zip(zip(*inputs, strict=True), got, strict=True):
            expected = FLOAT_CASES[opcode](*lane)
            if isinstance(expected, int):
                assert result == expected, (lane, result, expected)
            else:
                assert struct.pack("<f", result) == struct.pack("<f", expected) or (
                    math.isnan(result) and math.isnan(expected)
                ), (lane, result, expected)


@pytest.mark.parametrize(
    ("opcode", "exact", "relative"),
    [
        ("ex2.approx.ftz.f32", lambda a: 2.0**a, 2**-22),
        ("lg2.approx.ftz.f32", lambda a: math.log2(a), 2**-22),
        ("rcp.approx.ftz.f32", lambda a: 1 / a, 2**-23),
        ("rsqrt.approx.f32", lambda a: a**-0.5, 2**-22),
    ],
)
def test_approximation_is_within_the_bound_of_the_isa(
    opcode: str, exact: Callable[[float], float], relative: float
) -> None:
    """An approximation that computes another function; the ISA bounds the error, not the bits."""
    values = [f32(0.1 + 0.37 * i) for i in range(32)]
    for value, result in zip(values, run_op(opcode, [values]), strict=True):
        assert result == pytest.approx(exact(value), rel=relative + 2**-24, abs=2**-22)


def test_packed_float_instructions_work_on_both_halves() -> None:
    """f32x2 whose halves are swapped or of which only one is computed."""
    pairs = [(f32(i + 0.5), f32(-3.0 * i)) for i in range(32)]
    word = [struct.unpack("<Q", struct.pack("<ff", *pair))[0] for pair in pairs]
    other = word[1:] + word[:1]
    others = pairs[1:] + pairs[:1]
    for opcode, function in (("add.rn.f32x2", np.add), ("mul.f32x2", np.multiply)):
        expected = [
            struct.pack("<ff", *(f32(function(x, y)) for x, y in zip(a, b, strict=True)))
            for a, b in zip(pairs, others, strict=True)
        ]
        assert [struct.pack("<Q", v) for v in run_op(opcode, [word, other])] == expected
    fused: list[int] = run_op("fma.rn.f32x2", [word, other, word])
    for a, b, result in zip(pairs, others, fused, strict=True):
        both = [f32(x * y + x) for x, y in zip(a, b, strict=True)]  # exact in double for these values
        assert list(struct.unpack("<ff", struct.pack("<Q", result))) == both


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mixed_precision_fma_rounds_once_to_f32(kind: str) -> None:
    """A product rounded to its 16-bit type, or to f32 before the addition."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    a = torch.linspace(-3, 3, 32).to(dtype)
    b = a.flip(0) + 1
    c = torch.tensor([f32(-float(x) * float(y) * (1 + 2**-20)) for x, y in zip(a, b, strict=True)])
    words = [[v & 0xFFFF for v in t.view(torch.int16).tolist()] for t in (a, b)]
    # Exact in double: products have at most 22 bits, and c is within 2^-20 of them.
    expected = [f32(float(x) * float(y) + float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert any(expected)
    assert run_op(f"fma.rn.f32.{kind}", [*words, c.tolist()]) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "frobnicate.b32 %r0, %r1;",
        "add.sat.s32 %r0, %r1, %r2;",
        "ld.global.frob.b32 %r0, [%d0];",
        "tcgen05.mma.cta_group::2.kind::f16 [%r0], %d0, %d1, %r1, %p0;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4 [%r0], %d0, %d1, %r1, %p0;",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r0], [%d0], [%r3];",
        "mbarrier.arrive.frob.shared.b64 _, [%r0];",
    ],
)
def test_unknown_opcode_or_modifier_is_refused_by_name(statement: str) -> None:
    """An instruction that is skipped or taken for another one; nothing may run then."""
    with pytest.raises(UnsupportedPtxError) as caught:
        emulate(module(statement))
    assert statement.split()[0] in str(caught.value)
    assert "line " in str(caught.value)


def test_register_of_the_wrong_width_is_refused() -> None:
    """A 64-bit register that is silently read as 32 bits gives wrong numbers."""
    with pytest.raises(UnsupportedPtxError, match="%d0 is 64 bits wide, 32 expected"):
        emulate(module("add.s32 %r0, %d0, %r1;"))
