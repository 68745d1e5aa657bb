"""Small PTX modules for tests: a body, its parameters and registers, wrapped into an entry."""

from __future__ import annotations

from collections.abc import Sequence

from ptx_emulator.alu import LANE_OPS

WIDTHS = {"u32": 4, "s32": 4, "f32": 4, "u64": 8, "s64": 8, "f64": 8, "h": 2, "hs": 2}
"""Operand type of a lane-wise instruction to its size in memory, in bytes."""
PREFIXES = {2: "%h", 4: "%r", 8: "%d"}
REGISTERS = {"%p": "pred", "%h": "b16", "%r": "b32", "%f": "f32", "%d": "b64"}
"""Prefix to type; every module declares 64 of each."""


def module(
    body: str, parameters: Sequence[str] = (), *, threads: int = 32, shared_bytes: int = 0, target: str = "sm_100a"
) -> str:
    """A PTX module with one entry ``test``.

    Args:
        body: statements; they may use %p0..63, %h (16 bits), %r (32), %f (f32) and %d (64), the parameters by name
            and shared memory as ``smem``.
        parameters: ``.u64 a`` and the like.
        threads: of the CTA.
        shared_bytes: static shared memory, aligned to 1024.
        target: architecture.
    """
    declared = "\n".join(f".reg .{kind} {prefix}<64>;" for prefix, kind in REGISTERS.items())
    shared = f".shared .align 1024 .b8 smem[{shared_bytes}];" if shared_bytes else ""
    listing = ", ".join(f".param {parameter}" for parameter in parameters)
    return f""".version 8.8
.target {target}
.address_size 64
.visible .entry test({listing})
.reqntid {threads}, 1, 1
{{
{declared}
{shared}
{body}
ret;
}}
"""


def lane_address(target: str, parameter: str, size_bytes: int) -> str:
    """``target`` = parameter + thread * size, in bytes."""
    load = f"ld.param.u64 {target}, [{parameter}]; mov.u32 %r63, %tid.x;"
    return f"{load} mad.wide.u32 {target}, %r63, {size_bytes}, {target};"


def lane_op_module(opcode: str, target: str = "sm_100a") -> str:
    """A module that applies one lane-wise instruction: arrays ``a``, ``b``, ... of 32 sources, array ``out``.

    A predicate comes out as 0 or 1 in 32 bits.
    """
    op = LANE_OPS[opcode]
    names = "abcd"[: len(op.sources)]
    body = []
    sources = []
    for i, (name, kind) in enumerate(zip(names, op.sources, strict=True)):
        width = WIDTHS[kind]
        sources.append(f"{PREFIXES[width]}{i}")
        body += [lane_address(f"%d{40 + i}", name, width), f"ld.global.b{8 * width} {sources[-1]}, [%d{40 + i}];"]
    width = 4 if op.is_compare else WIDTHS[op.result]
    result = f"{PREFIXES[width]}10"
    # min3 and max3 are this table's names; PTX tells the forms by the number of operands.
    spelling = opcode.replace("max3", "max").replace("min3", "min")
    if op.is_compare:
        body += [f"{opcode} %p0, {', '.join(sources)};", f"selp.b32 {result}, 1, 0, %p0;"]
    else:
        body.append(f"{spelling} {result}, {', '.join(sources)};")
    body += [lane_address("%d50", "out", width), f"st.global.b{8 * width} [%d50], {result};"]
    return module("\n".join(body), [f".u64 {name}" for name in (*names, "out")], target=target)
