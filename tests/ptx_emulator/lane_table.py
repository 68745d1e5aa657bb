"""What an entry of the table of lane-wise instructions is, and the table."""

from __future__ import annotations

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
"""Opcode with all its modifiers to what it does; ``alu.py`` fills it."""


def add_op(names: str, result: str, sources: str, expression: str) -> None:
    """Enter opcodes of one meaning, separated by blanks."""
    for name in names.split():
        LANE_OPS[name] = LaneOp(result, tuple(sources.split()), expression)
