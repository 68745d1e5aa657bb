"""Lowering of mbarriers, fences, cp.async, bulk copies and tensor copies (TMA)."""

from __future__ import annotations

import re

from ptx_emulator.lower import Lowering, opcode
from ptx_emulator.program import NONE, LoweringError
from ptx_emulator.ptx import split_operands

SHARED = r"\.shared(?:::cta|::cluster)?"
ORDER = r"(?:\.(?:relaxed|acquire|release|cta|cluster))*"
HINT = r"(?P<hint>\.L2::cache_hint)?"
PROXY_SHARED, PROXY_GLOBAL = 1, 2
REDUCTIONS = ("none", "add", "min", "max", "inc", "dec", "and", "or", "xor")
BULK_TYPES = ("none", "f32", "f16", "bf16", "u32", "s32", "u64", "f64", "b32")


@opcode(rf"mbarrier\.init{SHARED}\.b64")
def initialise(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    x.emit("MB_INIT", [base, x.source(operands[1], 4)], immediate=offset)


@opcode(rf"mbarrier\.inval{SHARED}\.b64")
def invalidate(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    x.emit("MB_INVAL", [base], immediate=offset)


@opcode(rf"mbarrier\.arrive{ORDER}{SHARED}\.b64")
def arrive(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    if operands[0].startswith("["):
        operands = ["_", *operands]
    base, offset = x.address(operands[1])
    count = x.source(operands[2], 4) if len(operands) > 2 else x.constant(1, 4)
    x.emit("MB_ARRIVE", [base, x.result(operands[0], 8), count], immediate=offset)


@opcode(rf"mbarrier\.arrive\.expect_tx{ORDER}{SHARED}\.b64")
def arrive_expecting(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[1])
    x.emit("MB_ARRIVE_TX", [base, x.result(operands[0], 8), x.source(operands[2], 4)], immediate=offset)


@opcode(rf"mbarrier\.expect_tx{ORDER}{SHARED}\.b64")
def expect(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    x.emit("MB_EXPECT_TX", [base, x.source(operands[1], 4)], immediate=offset)


@opcode(rf"mbarrier\.(?:try|test)_wait(?P<parity>\.parity)?{ORDER}{SHARED}\.b64")
def wait(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[1])
    token = x.source(operands[2], 4 if match["parity"] else 8)
    x.emit("MB_WAIT", [base, x.predicate_result(operands[0]), token], int(bool(match["parity"])), immediate=offset)


@opcode(r"fence\.proxy\.async(?P<space>\.shared::cta|\.shared::cluster|\.global)?")
def fence_proxy(x: Lowering, match: re.Match[str], _operands: list[str]) -> None:
    spaces = PROXY_SHARED | PROXY_GLOBAL
    if match["space"]:
        spaces = PROXY_GLOBAL if match["space"] == ".global" else PROXY_SHARED
    x.emit("FENCE_PROXY", [], spaces)


@opcode(r"fence\.mbarrier_init\.release\.cluster")
def fence_initialisation(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("FENCE_MBAR_INIT", [])


@opcode(r"fence\.proxy\.tensormap::generic\.(acquire|release)\.(gpu|cta|sys|cluster)", r"fence\.proxy\.alias")
def fence_tensor_map(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("NOP", [])


@opcode(r"cp\.async\.(?:ca|cg)\.shared(?:::cta)?\.global(?P<hint>\.L2::cache_hint)?(?:\.L2::\w+)?")
def copy(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    target, offset = x.address(operands[0])
    source, source_offset = x.address(operands[1])
    rest = operands[3:-1] if match["hint"] else operands[3:]
    bytes_read = x.source(rest[0], 4) if rest else NONE
    x.emit("CP_ASYNC", [target, source, bytes_read], int(operands[2]), source_offset, immediate=offset)


@opcode(rf"cp\.async\.mbarrier\.arrive(?P<noinc>\.noinc)?{SHARED}\.b64")
def copy_arrive(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    base, offset = x.address(operands[0])
    x.emit("CP_ARRIVE", [base], int(bool(match["noinc"])), immediate=offset)


@opcode(r"cp\.async\.commit_group")
def copy_commit(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("CP_COMMIT", [])


@opcode(r"cp\.async\.wait_(?P<what>group|all)")
def copy_wait(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    everything = match["what"] == "all"
    x.emit("CP_WAIT", [], 0 if everything else int(operands[0]), int(everything))


TARGET = r"\.shared::(?:cluster|cta)\.global"


@opcode(
    rf"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d{TARGET}(?:\.tile)?\.mbarrier::complete_tx::bytes(?:\.cta_group::1)?{HINT}"
)
def tensor_load(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    target, offset = x.address(operands[0])
    tensor_map, coordinates = _split_tensor(x, operands[1], int(match["rank"]))
    barrier, barrier_offset = x.address(operands[2])
    sources = [x.source(text, 4) for text in coordinates]
    x.emit(
        "TMA_LOAD",
        [target, barrier, x.source(tensor_map, 8), *sources],
        len(sources),
        barrier_offset,
        immediate=offset,
    )


@opcode(rf"cp\.async\.bulk\.tensor\.2d{TARGET}\.tile::gather4\.mbarrier::complete_tx::bytes(?:\.cta_group::1)?{HINT}")
def tensor_gather(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    target, offset = x.address(operands[0])
    tensor_map, coordinates = _split_tensor(x, operands[1], 5)
    barrier, barrier_offset = x.address(operands[2])
    sources = [x.source(text, 4) for text in coordinates]
    x.emit("TMA_LOAD", [target, barrier, x.source(tensor_map, 8), *sources], 5, barrier_offset, 1, offset)


SOURCE = r"\.global\.shared::cta"


@opcode(rf"cp\.async\.bulk\.tensor\.2d{SOURCE}\.tile::scatter4\.bulk_group{HINT}")
def tensor_scatter(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    tensor_map, coordinates = _split_tensor(x, operands[0], 5)
    source, offset = x.address(operands[1])
    values = [x.source(text, 4) for text in coordinates]
    x.emit("TMA_STORE", [source, x.source(tensor_map, 8), *values], 5, 0, 1, offset)


@opcode(
    rf"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d{SOURCE}(?:\.tile)?\.bulk_group{HINT}",
    rf"cp\.reduce\.async\.bulk\.tensor\.(?P<rank>[1-5])d{SOURCE}\.(?P<op>add|min|max)(?:\.tile)?\.bulk_group{HINT}",
)
def tensor_store(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    tensor_map, coordinates = _split_tensor(x, operands[0], int(match["rank"]))
    source, offset = x.address(operands[1])
    values = [x.source(text, 4) for text in coordinates]
    reduction = REDUCTIONS.index(match.groupdict().get("op") or "none")
    x.emit("TMA_STORE", [source, x.source(tensor_map, 8), *values], len(values), reduction, immediate=offset)


def _split_tensor(x: Lowering, text: str, count: int) -> tuple[str, list[str]]:
    tensor_map, coordinates = split_operands(text[1:-1])
    names = x.vector(coordinates)
    if len(names) != count:
        raise LoweringError(f"{len(names)} coordinates, {count} expected")
    return tensor_map, names


@opcode(rf"cp\.async\.bulk{TARGET}\.mbarrier::complete_tx::bytes{HINT}")
def bulk_load(x: Lowering, _match: re.Match[str], operands: list[str]) -> None:
    target, offset = x.address(operands[0])
    source, source_offset = x.address(operands[1])
    barrier, barrier_offset = x.address(operands[3])
    sources = [target, barrier, source, x.source(operands[2], 4)]
    x.emit("BULK_LOAD", sources, 0, barrier_offset, source_offset, offset)


@opcode(
    rf"cp\.async\.bulk{SOURCE}\.bulk_group{HINT}",
    rf"cp\.reduce\.async\.bulk{SOURCE}\.bulk_group{HINT}\.(?P<op>add|min|max)(?:\.noftz)?\.(?P<type>f32|f16|bf16|u32|s32|u64)",
)
def bulk_store(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    target, target_offset = x.address(operands[0])
    source, offset = x.address(operands[1])
    fields = match.groupdict()
    reduction = REDUCTIONS.index(fields.get("op") or "none")
    kind = BULK_TYPES.index(fields.get("type") or "none")
    x.emit("BULK_STORE", [source, target, x.source(operands[2], 4)], reduction, kind, target_offset, offset)


@opcode(r"cp\.async\.bulk\.commit_group")
def bulk_commit(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("BULK_COMMIT", [])


@opcode(r"cp\.async\.bulk\.wait_group(?P<read>\.read)?")
def bulk_wait(x: Lowering, match: re.Match[str], operands: list[str]) -> None:
    x.emit("BULK_WAIT", [], int(operands[0], 0), int(bool(match["read"])))


@opcode(r"cp\.async\.bulk\.prefetch\.L2\.global.*", r"cp\.async\.bulk\.prefetch\.tensor\.[1-5]d\.L2\.global(\.tile)?.*")
def bulk_prefetch(x: Lowering, _match: re.Match[str], _operands: list[str]) -> None:
    x.emit("NOP", [])
