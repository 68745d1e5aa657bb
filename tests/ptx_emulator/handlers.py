"""Lowering of moves, memory, control flow, votes, shuffles, atomics and named barriers."""

from __future__ import annotations

import re

from ptx_emulator.lower import Lowering, opcode
from ptx_emulator.program import NONE, LoweringError, Operand
from ptx_emulator.ptx import SIZES

SPACES = {"param": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 1, "global": 2, "const": 2, "local": 4, None: 3}
TYPE = r"(?P<type>[busf](?:8|16|32|64))"
SPACE = r"(?:\.(?P<space>param|shared(?:::cta|::cluster)?|global|const|local))?"
CACHE = r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt|nc|L1::\w+|L2::\w+|relaxed|weak|volatile|acquire|release|gpu|cta|cluster|sys))*"
WIDE_REGISTER, SIGN_EXTEND = 1, 2


@opcode(rf"ld{CACHE}{SPACE}{CACHE}(?:\.v(?P<count>[248]))?\.{TYPE}")
def load(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[1])
    kind = match["type"]
    results = [x.any_result(name) for name in x.vector(operands[0])]
    flags = _memory_flags(kind, [width for _, width in results if width], int(match["count"] or 1), len(results))
    x.emit("LD", [base, *(r for r, _ in results)], SPACES[match["space"]], SIZES[kind], flags, offset)


@opcode(rf"st{CACHE}{SPACE}{CACHE}(?:\.v(?P<count>[248]))?\.{TYPE}")
def store(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    kind = match["type"]
    names = x.vector(operands[1])
    widths = {width for width in map(x.width, names) if width}
    width = widths.pop() if widths else max(4, SIZES[kind])
    values = [x.source(name, width) for name in names]
    flags = _memory_flags(kind, [width], int(match["count"] or 1), len(values))
    x.emit("ST", [base, *values], SPACES[match["space"]], SIZES[kind], flags, offset)


def _memory_flags(kind: str, widths: list[int], count: int, given: int) -> int:
    if count != given:
        raise LoweringError(f"{given} registers for a vector of {count}")
    if len(set(widths)) > 1:
        raise LoweringError("registers of mixed width")
    wide = bool(widths) and widths[0] == 8
    if SIZES[kind] == 8 and widths and not wide:
        raise LoweringError("64-bit type in a 32-bit register")
    return count | (WIDE_REGISTER * wide | SIGN_EXTEND * (kind[0] == "s")) << 8


@opcode(r"mov\.b(?P<bits>16|32|64)")
def move_vector(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    total = int(match["bits"]) // 8
    register = 8 if total == 8 else 4
    if operands[0].startswith("{"):
        parts = x.vector(operands[0])
        part = total // len(parts)
        results = [x.result(name, 8 if part == 8 else 4) for name in parts]
        x.emit("UNPACK", [x.source(operands[1], register), *results], part, register)
    else:
        parts = x.vector(operands[1])
        part = total // len(parts)
        sources = [x.source(name, 8 if part == 8 else 4) for name in parts]
        x.emit("PACK", [x.result(operands[0], register), *sources], part, register)


@opcode(rf"selp\.{TYPE}")
def select(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    width = 8 if SIZES[match["type"]] == 8 else 4
    values = [x.source(operands[1], width), x.source(operands[2], width)]
    x.emit("SELP", [x.result(operands[0], width), *values, x.predicate(operands[3])], width)


@opcode(r"mov\.pred")
def move_predicate(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    if re.fullmatch(r"-?\d+", operands[1]):
        x.emit("PRED_MOV", [x.predicate_result(operands[0]), NONE], immediate=int(int(operands[1]) != 0))
    else:
        x.emit("PRED_MOV", [x.predicate_result(operands[0]), x.predicate(operands[1])])


@opcode(r"and\.pred", r"or\.pred", r"xor\.pred")
def combine_predicates(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    kind = {"a": "PRED_AND", "o": "PRED_OR", "x": "PRED_XOR"}[match.group()[0]]
    x.emit(kind, [x.predicate_result(operands[0]), x.predicate(operands[1]), x.predicate(operands[2])])


@opcode(r"not\.pred")
def negate_predicate(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.emit("PRED_NOT", [x.predicate_result(operands[0]), x.predicate(operands[1])])


@opcode(r"setp\.(?P<compare>\w+)\.(?P<combine>and|or|xor)(?P<type>(?:\.ftz)?\.\w+)")
def compare_and_combine(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    from ptx_emulator.alu import LANE_OP_NUMBERS, LANE_OPS, WIDE

    name = f"setp.{match['compare']}{match['type']}"
    if name not in LANE_OPS or "|" in operands[0]:
        raise LoweringError(f"opcode or modifier not known: {match.group()}")
    width = 8 if LANE_OPS[name].sources[0] in WIDE else 4
    temporary = x.temporary_predicate()
    compared = Operand(temporary, "define_predicate")
    x.emit(LANE_OP_NUMBERS[name], [compared, x.source(operands[1], width), x.source(operands[2], width)])
    other = operands[3]
    second = x.predicate(other.lstrip("!"))
    if other.startswith("!"):
        negated = x.temporary_predicate()
        x.emit("PRED_NOT", [Operand(negated, "define_predicate"), second])
        second = Operand(negated, "use_predicate")
    kind = f"PRED_{match['combine'].upper()}"
    x.emit(kind, [x.predicate_result(operands[0]), Operand(temporary, "use_predicate"), second])


@opcode(r"bra(\.uni)?")
def branch(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.branch_to(operands[0])


@opcode(r"ret(\.uni)?", r"exit")
def leave(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("RET", [])


@opcode(r"trap", r"brkpt")
def trap(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("TRAP", [])


@opcode(r"nanosleep\.u32")
def sleep(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("YIELD", [])


@opcode(
    r"nop",
    r"prefetch\.tensormap",
    r"prefetch\.global\.L[12](::\w+)?",
    r"griddepcontrol\.(wait|launch_dependents)",
    r"createpolicy\.range.*",
)
def ignore(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    # griddepcontrol: launches run one after another here, so that what came before is complete.
    x.emit("NOP", [])


@opcode(r"createpolicy\.fractional\.L2::\w+(\.L2::\w+)?\.b64")
def create_policy(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    from ptx_emulator.alu import LANE_OP_NUMBERS

    x.emit(LANE_OP_NUMBERS["mov.b64"], [x.result(operands[0], 8), x.constant(0, 8)])


@opcode(r"shfl\.sync\.(?P<mode>idx|bfly|up|down)\.b32")
def shuffle(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    value, _, valid = operands[0].partition("|")
    mode = ("idx", "bfly", "up", "down").index(match["mode"])
    sources = [x.source(text, 4) for text in operands[1:5]]
    x.emit("SHFL", [x.result(value, 4), x.predicate_result(valid or "_"), *sources], mode)


@opcode(r"vote\.sync\.(?P<mode>all|any|uni|ballot)\.(?:pred|b32)")
def vote(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    mode = ("all", "any", "uni", "ballot").index(match["mode"])
    target = x.result(operands[0], 4) if mode == 3 else x.predicate_result(operands[0])
    source = x.predicate(operands[1].lstrip("!"))
    x.emit("VOTE", [target, source, x.source(operands[2], 4)], mode, int(operands[1].startswith("!")))


@opcode(r"match\.any\.sync\.b(?P<bits>32|64)")
def match_any(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    width = int(match["bits"]) // 8
    x.emit("MATCH", [x.result(operands[0], 4), x.source(operands[1], width), x.source(operands[2], 4)], width)


@opcode(r"redux\.sync\.(?P<op>add|min|max|and|or|xor)\.(?P<type>[sub]32)")
def reduce_warp(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    sources = [x.source(operands[1], 4), x.source(operands[2], 4)]
    code = ATOMIC_OPS.index(match["op"])
    x.emit("REDUX", [x.result(operands[0], 4), *sources], code, int(match["type"] == "s32"))


@opcode(r"activemask\.b32")
def active_mask(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.emit("ACTIVEMASK", [x.result(operands[0], 4)])


@opcode(r"elect\.sync")
def elect(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    leader, _, chosen = operands[0].partition("|")
    x.emit("ELECT", [x.result(leader, 4), x.predicate_result(chosen), x.source(operands[1], 4)])


@opcode(
    r"bar(?:\.cta)?\.(?P<mode>sync|arrive)",
    r"barrier(?:\.cta)?\.(?P<mode>sync|arrive)(?P<aligned>\.aligned)?",
    r"bar(?:\.cta)?\.(?P<mode>red)\.(?P<op>popc|and|or)\.(?:u32|pred)",
)
def barrier(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    mode = ("sync", "arrive", "red").index(match["mode"])
    if mode != 2:
        counts = [x.source(operands[0], 4), x.source(operands[1], 4) if len(operands) > 1 else NONE]
        x.emit("BAR", [*counts, NONE, NONE], mode)
        return
    op = ("popc", "and", "or").index(match["op"])
    target = x.result(operands[0], 4) if op == 0 else x.predicate_result(operands[0])
    count = x.source(operands[2], 4) if len(operands) > 3 else NONE
    source = operands[-1]
    counts = [x.source(operands[1], 4), count]
    x.emit("BAR", [*counts, x.predicate(source.lstrip("!")), target], mode, op, int(source.startswith("!")))


@opcode(r"bar\.warp\.sync")
def sync_warp(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    x.emit("SYNCWARP", [x.source(operands[0], 4)])


@opcode(r"membar\.(cta|gl|sys)", r"fence(\.(sc|acq_rel|acquire|release))?\.(cta|cluster|gpu|sys)")
def fence(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("MEMBAR", [])


@opcode(r"barrier\.cluster\.(arrive|wait)(\.(release|acquire|relaxed))?(\.aligned)?")
def cluster_barrier(x: Lowering, match: re.Match[str], _operands: list[str]) -> None:
    # Clusters of one CTA: both halves together are the CTA's barrier 0 over all threads, here at the wait.
    if match.group(1) == "arrive":
        x.emit("NOP", [])
    else:
        x.emit("BAR", [x.constant(16, 4), NONE, NONE, NONE], 0)


@opcode(r"mapa(\.shared::cluster)?\.u(?P<bits>32|64)")
def map_address(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    width = int(match["bits"]) // 8
    x.emit("MAPA", [x.result(operands[0], width), x.source(operands[1], width), x.source(operands[2], 4)], width)


ATOMIC_OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
ATOMIC_TYPES = ("u32", "s32", "f32", "u64", "s64", "b32", "b64", "bf16x2", "f16x2", "f64", "bf16", "f16")
ORDER = r"(?:\.(?:relaxed|acquire|release|acq_rel|gpu|cta|cluster|sys))*"
ATOMIC = (
    rf"{ORDER}{SPACE}{ORDER}\.(?P<op>add|min|max|and|or|xor|exch|cas|inc|dec)(?:\.noftz)?(?:\.L2::cache_hint)?"
    r"(?:\.v(?P<count>[248]))?\.(?P<type>[usb](?:32|64)|f32|f64|b?f16x2|b?f16)"
)


@opcode(rf"red{ATOMIC}")
def reduce_memory(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    _emit_atomic(x, match, base, offset, [], operands[1:])


@opcode(rf"atom{ATOMIC}")
def atomic(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[1])
    _emit_atomic(x, match, base, offset, x.vector(operands[0]), operands[2:])


def _emit_atomic(
    x: Lowering, match: re.Match[str], base: Operand, offset: int, results: list[str], values: list[str]
) -> None:
    kind = match["type"]
    width = 8 if SIZES.get(kind) == 8 else 4
    count = int(match["count"] or 1)
    sources = [x.source(name, width) for name in x.vector(values[0])]
    if len(sources) != count or (results and len(results) != count):
        raise LoweringError(f"{len(sources)} registers for a vector of {count}")
    old = [x.result(name, width) for name in results] or [NONE] * count
    if match["op"] == "cas":
        sources.append(x.source(values[1], width))
    acquires = any(word in match.group() for word in (".acq", ".acquire")) * 256
    releases = any(word in match.group() for word in (".acq_rel", ".release")) * 512
    code = ATOMIC_OPS.index(match["op"]) | acquires | releases
    x.emit("ATOM", [base, *old, *sources], SPACES[match["space"]], code, ATOMIC_TYPES.index(kind) | count << 8, offset)


@opcode(r"add(?P<cc>\.cc)\.[us](?P<bits>32|64)")
@opcode(r"addc(?P<cc>\.cc)?\.[us](?P<bits>32|64)")
def add_with_carry(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    width = int(match["bits"]) // 8
    sources = [x.source(text, width) for text in operands[1:3]]
    carry_in = match.group().startswith("addc")
    x.emit("ADD_CARRY", [x.result(operands[0], width), *sources], width, int(carry_in), int(bool(match["cc"])))
