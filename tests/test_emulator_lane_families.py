"""Every lane-wise instruction of the emulator's table against a definition that is read off its name.

``test_emulator_lane_ops.py`` has hand-written cases for the common ones; here the type, rounding and flushing in the
name select exact arithmetic on fractions, so that no form is left without a test.
"""

from __future__ import annotations

import math

import pytest
from ptx_emulator.alu import LANE_OPS
from ptx_emulator.definitions import FORMATS, M32, ROOTS, decode, encode, encode_rounded, expect
from ptx_emulator.snippets import WIDTHS
from test_emulator_lane_ops import FLOATS, INTEGERS, f32, run_op, spread


def split_halves(opcode: str, sources: list[int], width: int) -> list[int | float | None]:
    """A packed instruction as two scalar ones, low half first."""
    scalar = opcode.removesuffix("x2")
    mask = (1 << width) - 1
    return [expect(scalar, [s >> width * half & mask for s in sources]) for half in range(2)]


def operands(opcode: str) -> list[list[int]]:
    """Bits of 32 values for each source, special ones among them."""
    floats = [f32(value) for value in FLOATS]
    columns = []
    for i, kind in enumerate(LANE_OPS[opcode].sources):
        bits = 8 * WIDTHS[kind]
        packed = next((k for k in ("bf16", "f16") if f"{k}x2" in opcode and kind == "u32"), None)
        narrow = next((k for k in ("bf16", "f16") if opcode.endswith(f".{k}") and kind == "h"), None)
        if kind in ("f32", "f64"):
            column = [encode(value, kind) for value in floats]
        elif packed or narrow:
            form = packed or narrow or ""
            words = [encode_rounded(value, form) for value in floats]
            column = [w | words[(j + 5) % len(words)] << 16 for j, w in enumerate(words)] if packed else words
        elif "f32x2" in opcode:
            words = [encode(value, "f32") for value in floats]
            column = [w | words[(j + 5) % len(words)] << 32 for j, w in enumerate(words)]
        else:
            column = [value << 29 | value if bits == 64 else value for value in INTEGERS]
        column = [value & ((1 << bits) - 1) for value in spread(column, 2 * i + 1)]
        if opcode.startswith(("div.", "rem.")) and i == 1 and kind[0] in "su":
            column = [value | 1 if value != (1 << bits) - 1 else 3 for value in column]
        columns.append(column)
    return columns


def matches(got: int, want: int | float, kind: str) -> bool:
    """Bit for bit; any NaN for a NaN."""
    if isinstance(want, int):
        return got == want & ((1 << 64) - 1 if kind == "f64" else M32 if kind == "f32" else 0xFFFF)
    if math.isnan(want):
        return math.isnan(decode(got, kind))
    return got == encode(want, kind)


def raw_results(opcode: str, columns: list[list[int]]) -> list[int]:
    """Results of 32 lanes as bits."""
    sources = [
        [decode(value, kind) for value in column] if kind in ("f32", "f64") else column
        for kind, column in zip(LANE_OPS[opcode].sources, columns, strict=True)
    ]
    kind = LANE_OPS[opcode].result
    width = 32 if kind == "pred" else 8 * WIDTHS[kind]
    results = run_op(opcode, sources)
    return [encode(r, kind) if kind in ("f32", "f64") else r & ((1 << width) - 1) for r in results]


APPROXIMATE = tuple(
    op for op in LANE_OPS if op.split(".")[0] in ROOTS or op.startswith(("div.rn", "div.approx", "div.full"))
)
ELSEWHERE = {"prmt.b32", "lop3.b32", "brev.b32", "bfind.u32", "shf.l.wrap.b32", "shf.r.wrap.b32", "shf.r.clamp.b32"}
"""With cases of their own in test_emulator_lane_ops.py."""
PACKED = tuple(op for op in LANE_OPS if op.endswith("x2") and not op.startswith("cvt"))
CONVERT_PAIRS = tuple(op for op in LANE_OPS if op.startswith("cvt") and "x2" in op)
SCALAR = tuple(op for op in LANE_OPS if op not in {*APPROXIMATE, *ELSEWHERE, *PACKED, *CONVERT_PAIRS})


@pytest.mark.parametrize("opcode", SCALAR)
def test_scalar_instruction(opcode: str) -> None:
    """A form of an instruction that only its neighbours' tests cover: width, sign, rounding, flushing, NaN."""
    columns = operands(opcode)
    kind = LANE_OPS[opcode].result
    bits = 32 if kind == "pred" else 8 * WIDTHS[kind]
    for lane, got in zip(zip(*columns, strict=True), raw_results(opcode, columns), strict=True):
        want = expect(opcode, list(lane))
        assert want is not None, "no definition"
        name = next((k for k in ("bf16", "f16") if opcode.split(".")[-1] == k or f".{k}.f32" in opcode), kind)
        form = name if kind == "h" and isinstance(want, float) else kind
        good = got == want & ((1 << bits) - 1) if isinstance(want, int) else matches(got, want, form)
        assert good, (list(map(hex, lane)), hex(got), want)


@pytest.mark.parametrize("opcode", PACKED)
def test_packed_instruction(opcode: str) -> None:
    """One half computed from the other, or not at all."""
    columns = operands(opcode)
    kind = opcode.split(".")[-1].removesuffix("x2")
    width = FORMATS[kind].bits
    for lane, got in zip(zip(*columns, strict=True), raw_results(opcode, columns), strict=True):
        for half, want in enumerate(split_halves(opcode, list(lane), width)):
            assert want is not None, "no definition"
            part = got >> width * half & ((1 << width) - 1)
            good = math.isnan(decode(part, kind)) if math.isnan(want) else part == encode(want, kind)
            assert good, (half, list(map(hex, lane)), hex(got), want)


@pytest.mark.parametrize("opcode", CONVERT_PAIRS)
def test_conversion_to_a_pair(opcode: str) -> None:
    """The first source goes to the upper half; relu turns negative numbers into zero."""
    columns = operands(opcode)
    kind = "bf16" if "bf16x2" in opcode else "f16"
    for lane, got in zip(zip(*columns, strict=True), raw_results(opcode, columns), strict=True):
        for half, source in enumerate(reversed(lane)):
            number = decode(source, "f32")
            number = 0.0 if "relu" in opcode and number <= 0 else number
            part = got >> 16 * half & 0xFFFF
            good = part == 0x7FFF if math.isnan(number) else part == encode_rounded(number, kind)
            assert good, (half, hex(source), hex(got))


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximate_instruction(opcode: str) -> None:
    """Within 2^-20 on moderate arguments (2^-10 for tanh): the ISA bounds the error and not the bits."""
    name, kind = opcode.split(".")[0], opcode.split(".")[-1]
    first = [f32(0.1 + 0.37 * i) for i in range(32)]
    second = [f32(7.5 - 0.21 * i) for i in range(32)]
    inputs = [first, second][: len(LANE_OPS[opcode].sources)]
    bound = 2**-10 if name == "tanh" else 2**-50 if kind == "f64" else 2**-20
    for a, b, got in zip(first, second, run_op(opcode, inputs), strict=True):
        want = a / b if name == "div" else ROOTS[name](a)
        assert got == pytest.approx(want, rel=bound, abs=2**-22 if kind == "f32" else 0)
