"""Lowering of tcgen05, setmaxnreg and the tensor instructions of SM90 and before."""

from __future__ import annotations

import re

from ptx_emulator.lower import Lowering, opcode
from ptx_emulator.program import ALWAYS_FALSE, ALWAYS_TRUE, LoweringError, Operand

SHAPES = {"32x32b": (0, 1), "16x64b": (1, 1), "16x128b": (2, 2), "16x256b": (3, 4), "16x32bx2": (4, 1)}
"""tcgen05.ld/st shape to its number here and the registers of one repetition."""
CP_SHAPES = ("128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4")


@opcode(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned(\.shared::cta)?\.b32")
def allocate(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    x.emit("T5_ALLOC", [base, x.source(operands[1], 4)], immediate=offset)


@opcode(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32")
def deallocate(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.emit("T5_DEALLOC", [x.source(operands[0], 4), x.source(operands[1], 4)])


@opcode(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned")
def relinquish(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("T5_RELINQUISH", [])


@opcode(r"tcgen05\.ld\.sync\.aligned\.(?P<shape>\w+)\.x(?P<count>\d+)\.b32")
def load(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    shape, count = _shape(match)
    base, offset = x.address(operands[1])
    results = [x.result(name, 4) for name in x.vector(operands[0])]
    _check_count(results, SHAPES[match["shape"]][1] * count)
    x.emit("T5_LD", [base, *results], shape, count, _split(match, operands[2:]), offset)


@opcode(r"tcgen05\.st\.sync\.aligned\.(?P<shape>\w+)\.x(?P<count>\d+)\.b32")
def store(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    shape, count = _shape(match)
    base, offset = x.address(operands[0])
    sources = [x.source(name, 4) for name in x.vector(operands[-1])]
    _check_count(sources, SHAPES[match["shape"]][1] * count)
    x.emit("T5_ST", [base, *sources], shape, count, _split(match, operands[1:-1]), offset)


def _shape(match: re.Match[str]) -> tuple[int, int]:
    count = int(match["count"])
    if match["shape"] not in SHAPES or count not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise LoweringError(f"opcode or modifier not known: {match.group()}")
    return SHAPES[match["shape"]][0], count


def _split(match: re.Match[str], rest: list[str]) -> int:
    """Columns between the halves of 16x32bx2; the other shapes have no such operand."""
    if len(rest) != int(match["shape"] == "16x32bx2"):
        raise LoweringError("an offset between halves belongs to 16x32bx2, and to no other shape")
    return int(rest[0], 0) if rest else 0


def _check_count(registers: list[Operand], expected: int) -> None:
    if len(registers) != expected:
        raise LoweringError(f"{len(registers)} registers, {expected} expected")


@opcode(r"tcgen05\.wait::(?P<what>ld|st)\.sync\.aligned")
def wait(x: Lowering, match: re.Match[str], _operands: list[str]) -> None:
    x.emit("T5_WAIT", [], int(match["what"] == "st"))


@opcode(r"tcgen05\.fence::(before|after)_thread_sync")
def fence(x: Lowering, match: re.Match[str], _operands: list[str]) -> None:
    x.emit("T5_FENCE", [], int(match.group(1) == "after"))


@opcode(r"tcgen05\.mma\.cta_group::1\.kind::(?P<kind>f16|tf32)")
def multiply(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    target, offset = x.address(operands[0])
    from_tmem = operands[1].startswith("[")
    first, first_offset = x.address(operands[1]) if from_tmem else (x.source(operands[1], 8), 0)
    rest = operands[4:]
    masks = [x.source(name, 4) for name in x.vector(rest[0])] if rest[0].startswith("{") else []
    enable = _enable(x, rest[1] if masks else rest[0])
    if len(rest) > (2 if masks else 1):
        raise LoweringError("scale-input-d is not modelled")
    sources = [target, first, x.source(operands[2], 8), x.source(operands[3], 4), enable, *masks]
    x.emit("T5_MMA", sources, int(from_tmem), first_offset, int(match["kind"] == "tf32"), offset)


def _enable(x: Lowering, text: str) -> Operand:
    if text in ("0", "1"):
        return Operand(ALWAYS_TRUE if text == "1" else ALWAYS_FALSE, "none")
    return x.predicate(text)


@opcode(
    r"tcgen05\.cp\.cta_group::1\.(?P<shape>128x256b|128x128b|64x128b\.warpx2::(?:02_13|01_23)|32x128b\.warpx4)",
)
def copy(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    target, offset = x.address(operands[0])
    x.emit("T5_CP", [target, x.source(operands[1], 8)], CP_SHAPES.index(match["shape"]), immediate=offset)


@opcode(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(\.shared::cluster)?\.b64")
def commit(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    x.emit("T5_COMMIT", [base], immediate=offset)


@opcode(r"setmaxnreg\.(?P<what>inc|dec)\.sync\.aligned\.u32")
def set_registers(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    count = int(operands[0], 0)
    if count % 8 or not 24 <= count <= 256:
        raise LoweringError(f"{count} registers: a multiple of 8 from 24 to 256 expected")
    x.emit("SETMAXNREG", [], int(match["what"] == "inc"), immediate=count)


@opcode(r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16")
def load_matrix(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[1])
    results = [x.result(name, 4) for name in x.vector(operands[0])]
    _check_count(results, int(match["count"]))
    x.emit("LDMATRIX", [base, *results], len(results), int(bool(match["trans"])), immediate=offset)


@opcode(r"stmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16")
def store_matrix(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    sources = [x.source(name, 4) for name in x.vector(operands[1])]
    _check_count(sources, int(match["count"]))
    x.emit("STMATRIX", [base, *sources], len(sources), int(bool(match["trans"])), immediate=offset)


@opcode(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def transpose_matrix(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.emit("MOVMATRIX", [x.result(operands[0], 4), x.source(operands[1], 4)])


MMA_SHAPES = {("16", "bf16"): (4, 2), ("8", "bf16"): (2, 1), ("16", "f16"): (4, 2), ("8", "f16"): (2, 1)}
MMA_SHAPES |= {("8", "tf32"): (4, 2), ("4", "tf32"): (2, 1)}
ELEMENTS = ("bf16", "f16", "tf32")


@opcode(r"mma\.sync\.aligned\.m16n8k(?P<k>4|8|16)\.row\.col\.f32\.(?P<type>bf16|f16|tf32)\.(?P=type)\.f32")
def multiply_warp(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    counts = MMA_SHAPES.get((match["k"], match["type"]))
    if counts is None:
        raise LoweringError(f"opcode or modifier not known: {match.group()}")
    results = [x.result(name, 4) for name in x.vector(operands[0])]
    groups = [[x.source(name, 4) for name in x.vector(text)] for text in operands[1:4]]
    for group, expected in zip([results, *groups], (4, *counts, 4), strict=True):
        _check_count(group, expected)
    kind = ELEMENTS.index(match["type"])
    x.emit("MMA_SYNC", [*results, *groups[0], *groups[1], *groups[2]], kind, int(match["k"]))


@opcode(r"wgmma\.fence\.sync\.aligned")
def wgmma_fence(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("WGMMA_FENCE", [])


@opcode(r"wgmma\.commit_group\.sync\.aligned")
def wgmma_commit(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("WGMMA_COMMIT", [])


@opcode(r"wgmma\.wait_group\.sync\.aligned")
def wgmma_wait(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.emit("WGMMA_WAIT", [], int(operands[0]))


@opcode(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>8|16)\.f32\.(?P<type>bf16|f16|tf32)\.(?P=type)")
def wgmma(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    n, kind = int(match["n"]), ELEMENTS.index(match["type"])
    if n % 8 or not 8 <= n <= 256 or (match["k"] == "8") != (match["type"] == "tf32"):
        raise LoweringError(f"opcode or modifier not known: {match.group()}")
    # The accumulator is read only if scale-d says so, and written later: the interpreter keeps account of both.
    accumulators = [Operand(x.result(name, 4).slot, "none") for name in x.vector(operands[0])]
    _check_count(accumulators, n // 2)
    from_registers = operands[1].startswith("{")
    first = [x.source(name, 4) for name in x.vector(operands[1])] if from_registers else [x.source(operands[1], 8)]
    if from_registers:
        _check_count(first, 4)
    second = x.source(operands[2], 8)
    flags = [int(text) for text in operands[4:]]
    if any(flag not in (1, -1) for flag in flags[:2]):
        raise LoweringError(f"scales of {flags[:2]}: 1 or -1 expected")
    negated = 8 * (flags[0] < 0) | 16 * (flags[1] < 0)
    transposed = flags[2:] if len(flags) > 2 else [0, 0]
    if len(transposed) == 1:
        transposed = [0, *transposed]
    if any(transposed) and match["type"] == "tf32":
        raise LoweringError("an MN-major operand of wgmma: 16 bits an element expected, tf32 given")
    bits = int(from_registers) | transposed[0] << 1 | transposed[1] << 2 | negated
    enable = _enable(x, operands[3])
    x.emit("WGMMA", [*accumulators, second, enable, *first], kind, n, bits)
