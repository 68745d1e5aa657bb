"""The lane-wise instructions as one table, and the C++ that the table becomes.

An entry maps the opcode with all its modifiers to the type of the result, the types of the sources and a C
expression in ``a, b, c, d``. Registers of 8 and 16 bits live in 32-bit slots whose upper bits are zero; the types
``h`` (16 bits, zero-extended) and ``hs`` (sign-extended on reading) keep them so. Whatever is not in the table and
has no handler in ``lower.py`` is refused by name.
"""

from __future__ import annotations

from ptx_emulator.alu_float import add_float_ops
from ptx_emulator.alu_integer import add_integer_ops
from ptx_emulator.lane_table import CPP_TYPES, LANE_OPS, WIDE, LaneOp

__all__ = ["FIRST_LANE_OP", "LANE_OPS", "LANE_OP_NUMBERS", "WIDE", "LaneOp", "generate_functions"]

add_integer_ops()
add_float_ops()

FIRST_LANE_OP = 200
LANE_OP_NUMBERS = {name: FIRST_LANE_OP + i for i, name in enumerate(LANE_OPS)}


def generate_functions() -> str:
    """C++ functions, one for each meaning, and the table from opcode number to function."""
    functions: dict[LaneOp, str] = {}
    for name, op in LANE_OPS.items():
        functions.setdefault(op, f"lane_op_{LANE_OP_NUMBERS[name]}")
    bodies = [
        f"static void {name}(u8* R, u32* P, const s32* o, u32 m) {{ {_body(op)} }}" for op, name in functions.items()
    ]
    entries = ", ".join(functions[op] for op in LANE_OPS.values())
    return "\n".join([*bodies, f"const LaneFunction LANE_FUNCTIONS[] = {{{entries}}};\n"])


def _body(op: LaneOp) -> str:
    """All 32 lanes, active or not, without a branch, so that it becomes vector code; what is inactive is not kept."""
    names = "abcd"[: len(op.sources)]
    pointers = "".join(
        f"auto p{name} = (const {CPP_TYPES[kind]}*)(R + o[{i + 1}]); "
        for i, (kind, name) in enumerate(zip(op.sources, names, strict=True))
    )
    loads = "".join(
        f"{CPP_TYPES[kind]} {name} = {f'(u32)(s32)(int16_t)p{name}[l]' if kind == 'hs' else f'p{name}[l]'}; "
        for kind, name in zip(op.sources, names, strict=True)
    )
    if op.is_compare:
        loop = f"for (u32 l = 0; l < 32; l++) {{ {loads}r |= (u32)({op.expression}) << l; }}"
        return f"{pointers}u32 r = 0; {loop} P[o[0]] = (P[o[0]] & ~m) | (r & m);"
    result = CPP_TYPES[op.result]
    value = f"({op.expression}) & 0xffffu" if op.result == "h" else op.expression
    loop = f"for (u32 l = 0; l < 32; l++) {{ {loads}to[l] = ({result})({value}); }}"
    return f"{pointers}{result} to[32]; {loop} keep_lanes(({result}*)(R + o[0]), to, m);"
