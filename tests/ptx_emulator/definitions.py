"""Definitions of the lane-wise instructions, read off their names: the exact arithmetic that the tests compare with.

Integers are Python's, floats are fractions that one rounding turns into a number of the format. Nothing here is shared
with the interpreter.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

M32 = (1 << 32) - 1


def signed(value: int, bits: int = 32) -> int:
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def bfe(a: int, position: int, length: int) -> int:
    """A field of 32 bits, zero-extended."""
    position, length = position & 255, length & 255
    return a >> position & ((1 << length) - 1) & M32 if position < 32 else 0


def bfi(a: int, b: int, position: int, length: int) -> int:
    """A field put into 32 bits."""
    position, length = position & 255, length & 255
    mask = (((1 << length) - 1) << position) & M32
    return b & ~mask | a << position & mask


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format: bits of the significand, exponents of normal numbers, bits in all."""

    precision: int
    lowest: int
    highest: int
    bits: int

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        return Fraction(2) ** (self.highest + 1) - Fraction(2) ** (self.highest + 1 - self.precision)


FORMATS = {
    "f16": Format(11, -14, 15, 16), "bf16": Format(8, -126, 127, 16), "f32": Format(24, -126, 127, 32),
    "f64": Format(53, -1022, 1023, 64),
}  # fmt: skip


TOWARD: dict[str, Callable[[Fraction], int]] = {"rn": round, "rm": math.floor, "rp": math.ceil, "rz": math.trunc}
"""Rounding mode to what it does to a multiple of the unit; round() takes the even neighbour of a tie."""


def round_fraction(value: Fraction, form: Format, mode: str = "rn") -> float:
    """The number of a format that a rounding mode (rn, rm, rp, rz) takes for an exact value."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(form.lowest, magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (exponent - form.precision + 1)
    rounded = TOWARD[mode](value / unit) * unit
    if abs(rounded) > form.largest:
        infinite = mode == "rn" or (mode == "rp") == (value > 0)
        return math.copysign(math.inf if infinite and mode != "rz" else float(form.largest), value)
    return math.copysign(float(abs(rounded)), value)


def encode(value: float, kind: str) -> int:
    """Bits of a number that the format holds exactly; NaN as None is compared apart."""
    if kind == "f64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if kind == "f16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    word = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return word >> 16 if kind == "bf16" else word


def decode(bits: int, kind: str) -> float:
    """The number that some bits stand for."""
    if kind == "f64":
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    if kind == "f16":
        return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])
    return float(struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16 if kind == "bf16" else bits & M32))[0])


def flush(value: float, ftz: bool) -> float:
    return math.copysign(0.0, value) if ftz and abs(value) < 2.0**-126 else value


def arithmetic(name: str, values: list[float], kind: str, mode: str, ftz: bool) -> float:
    """One of add, sub, mul and fma, rounded once."""
    values = [flush(value, ftz) for value in values]
    if name == "sub":
        name, values = "add", [values[0], -values[1]]
    product = name in ("mul", "fma")
    if not all(map(math.isfinite, values)):
        first = values[0] * values[1] if product else values[0]
        return first if name == "mul" else first + values[-1]
    factors = [Fraction(value) for value in values]
    head = factors[0] * factors[1] if product else factors[0]
    exact = head if name == "mul" else head + factors[-1]
    if exact:
        return flush(round_fraction(exact, FORMATS[kind], mode), ftz)
    signs = [math.copysign(1, values[0]) * math.copysign(1, values[1])] if product else [math.copysign(1, values[0])]
    signs += [] if name == "mul" else [math.copysign(1, values[-1])]
    negative = any(s < 0 for s in signs) if mode == "rm" else all(s < 0 for s in signs)
    return -0.0 if negative else 0.0


def extreme(name: str, values: list[float], nan: bool, ftz: bool) -> float:
    """Minimum and maximum of PTX: a NaN loses unless .NaN says otherwise, -0 is below +0."""
    values = [flush(value, ftz) for value in values]
    if nan and any(map(math.isnan, values)):
        return math.nan
    numbers = [value for value in values if not math.isnan(value)]
    choose = min if name == "min" else max
    return choose(numbers, key=lambda v: (v, math.copysign(1, v))) if numbers else math.nan


def float_instruction(opcode: str, sources: list[int]) -> float | None:
    """A scalar float instruction on the bits of its sources; None if the name is none of these."""
    name, *modifiers = opcode.split(".")
    kind, ftz = modifiers[-1], "ftz" in modifiers
    mode = next((m for m in ("rm", "rp") if m in modifiers), "rn")
    if name == "cvt" or kind not in FORMATS:
        return None
    if len(modifiers) > 1 and modifiers[-2] == "f32" and kind in ("bf16", "f16"):  # f32 += 16-bit operands
        values = [*(decode(bits, kind) for bits in sources[:-1]), decode(sources[-1], "f32")]
        return arithmetic(name, values, "f32", mode, False)
    values = [decode(bits, kind) for bits in sources]
    if name in ("add", "sub", "mul", "fma"):
        return arithmetic(name, values, kind, mode, ftz)
    if name.rstrip("3") in ("min", "max"):
        return extreme(name.rstrip("3"), values, "NaN" in modifiers, ftz)
    first = flush(values[0], ftz)
    simple: dict[str, Callable[[], float]] = {
        "neg": lambda: -first, "abs": lambda: abs(first),
        "copysign": lambda: math.copysign(values[1], values[0]),
    }  # fmt: skip
    return simple[name]() if name in simple else None


def integer_instruction(opcode: str, sources: list[int]) -> int | None:
    """An integer instruction; division by zero and of the smallest number by -1 are left out by the operands."""
    name, *modifiers = opcode.split(".")
    kind = modifiers[-1]
    if kind[0] not in "sub" or not kind[1:].isdigit():
        return None
    bits = int(kind[1:])
    a, *rest = [signed(s, bits) if kind[0] == "s" else s & ((1 << bits) - 1) for s in sources]
    b = rest[0] if rest else 0
    if name in ("shl", "shr"):
        b = sources[1]
        return (a << b if b < bits else 0) if name == "shl" else a >> min(b, bits)
    if name in ("mul", "mad"):
        product = a * b >> bits if "hi" in modifiers else a * b
        wide = 2 * bits if "wide" in modifiers else bits
        return product + (sources[2] & ((1 << wide) - 1) if name == "mad" else 0)
    table: dict[str, Callable[[], int]] = {
        "add": lambda: a + b, "sub": lambda: a - b, "min": lambda: min(a, b), "max": lambda: max(a, b),
        "neg": lambda: -a, "abs": lambda: abs(a), "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
        "not": lambda: ~a, "popc": a.bit_count, "clz": lambda: bits - a.bit_length(),
        "div": lambda: int(Fraction(a, b)), "rem": lambda: a - b * int(Fraction(a, b)),
    }  # fmt: skip
    return table[name]() if name in table else None


COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def compare(opcode: str, sources: list[int]) -> int:
    """Comparison: ordered compares are false for NaN, unordered ones true."""
    _, name, *modifiers = opcode.split(".")
    kind = modifiers[-1]
    if kind[0] != "f":
        bits = int(kind[1:])
        a, b = (signed(s, bits) if kind[0] == "s" else s & ((1 << bits) - 1) for s in sources)
        return int(COMPARES[name](a, b))
    x, y = (flush(decode(s, kind), "ftz" in modifiers) for s in sources)
    unordered = math.isnan(x) or math.isnan(y)
    if name in ("nan", "num"):
        return int(unordered == (name == "nan"))
    if name in COMPARES:
        return int(not unordered and COMPARES[name](x, y))
    return int(unordered or COMPARES[name[:-1]](x, y))


ROUNDS: dict[str, Callable[[Fraction], int]] = {
    "rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil,
}  # fmt: skip


def convert(opcode: str, source: int) -> int | float | None:
    """Conversion between integers, from and to floats; None for forms with a test of their own."""
    _, *modifiers = opcode.split(".")
    to, source_kind = modifiers[-2:]
    is_integer = [kind[0] in "su" and kind[1:].isdigit() for kind in (to, source_kind)]
    mode = next((m for m in ROUNDS if m in modifiers), None)
    if is_integer[1]:
        bits = int(source_kind[1:])
        value = signed(source, bits) if source_kind[0] == "s" else source & ((1 << bits) - 1)
        if not is_integer[0]:
            return round_fraction(Fraction(value), FORMATS[to])
        target = int(to[1:])
        return signed(value, target) if to[0] == "s" else value & ((1 << target) - 1)
    if source_kind not in FORMATS or to.endswith("x2"):
        return None
    number = flush(decode(source, source_kind), "ftz" in modifiers)
    if is_integer[0] and mode:
        bits = int(to[1:])
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
        if math.isnan(number):  # as the card does
            return 1 << (bits - 1) if 64 in (bits, FORMATS[source_kind].bits) else 0
        if math.isinf(number):
            return high if number > 0 else low
        return max(low, min(high, ROUNDS[mode](Fraction(number))))
    if mode:
        return math.copysign(float(ROUNDS[mode](Fraction(number))), number) if math.isfinite(number) else number
    if "sat" in modifiers:
        return 0.0 if math.isnan(number) or number <= 0 else min(number, 1.0)
    if to in FORMATS and not {"relu", "rna"} & set(modifiers):
        return round_fraction(Fraction(number), FORMATS[to]) if math.isfinite(number) and number else number
    return None


def bfe_signed(a: int, position: int, length: int) -> int:
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    return signed(a, 32) >> min(position, 31) if position + length > 31 else signed(bfe(a, position, length), length)


def wide_mask(position: int, length: int) -> int:
    return ((1 << (length & 255)) - 1) << (position & 255) & ((1 << 64) - 1)


def nth_set(mask: int, base: int, offset: int) -> int:
    offset = signed(offset, 32)
    if base > 31:
        return M32
    places = [i for i in (range(base, 32) if offset >= 0 else range(base, -1, -1)) if mask >> i & 1]
    if offset == 0:
        return base if mask >> base & 1 else M32
    return places[abs(offset) - 1] if abs(offset) <= len(places) else M32


SPECIAL: dict[str, Callable[..., int]] = {
    "mul24.lo.u32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "bfe.s32": bfe_signed,
    "bfe.u32": bfe,
    "bfe.u64": lambda a, p, n: (a & wide_mask(p, n)) >> (p & 255) if p & 255 < 64 else 0,
    "bfi.b64": lambda a, b, p, n: b & ~wide_mask(p, n) | a << (p & 255) & wide_mask(p, n),
    "bfi.b32": bfi,
    "fns.b32": nth_set,
    "shf.l.clamp.b32": lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32,
    "cvt.rna.tf32.f32": lambda a: a & 0xFFFFE000 if a & 0x7F800000 == 0x7F800000 else (a + 0x1000) & 0xFFFFE000,
}
ROOTS: dict[str, Callable[[float], float]] = {
    "ex2": lambda x: 2.0**x, "lg2": math.log2, "rcp": lambda x: 1 / x, "sqrt": math.sqrt, "sin": math.sin,
    "cos": math.cos, "tanh": math.tanh, "rsqrt": lambda x: x**-0.5,
}  # fmt: skip


def expect(opcode: str, sources: list[int]) -> int | float | None:
    """The result of an instruction on the bits of its sources: an integer, or a number; None if not defined here."""
    name = opcode.split(".")[0]
    if opcode in SPECIAL:
        return SPECIAL[opcode](*sources)
    if name == "setp":
        return compare(opcode, sources)
    if name in ("cvta", "mov"):
        return sources[0]
    if name == "cvt":
        return convert(opcode, sources[0])
    result = float_instruction(opcode, sources)
    return integer_instruction(opcode, sources) if result is None else result


def encode_rounded(value: float, form: str) -> int:
    finite = math.isfinite(value) and value != 0
    return encode(round_fraction(Fraction(value), FORMATS[form]) if finite else value, form)
