"""Operands of PTX statements to slots of the register and predicate files, constants and addresses."""

from __future__ import annotations

import re

from ptx_emulator.program import LOCAL_BASE, NONE, SHARED_BASE, SPECIALS, LoweringError, Operand, Program
from ptx_emulator.ptx import SIZES, Entry, Scope, align


class OperandReader:
    """Gives every register, special register and constant of an entry its slot when it is first named.

    Args:
        entry: the kernel.
        parameter_base: where its parameters lie in host memory.
    """

    def __init__(self, entry: Entry, parameter_base: int) -> None:
        self.program = Program(entry)
        self.entry = entry
        self.parameter_base = parameter_base
        self.slots: dict[tuple[object, ...], int] = {}
        self.scope: Scope = Scope(None)

    def source(self, text: str, width: int) -> Operand:
        """A register, special register, symbol or immediate as a 4- or 8-byte source."""
        if text == "_":
            raise LoweringError("'_' cannot be read")
        known = self.width(text)
        if known is not None and known != width:
            raise LoweringError(f"{text} is {8 * known} bits wide, {8 * width} expected")
        return Operand(self._slot(text, width), "use")

    def result(self, text: str, width: int) -> Operand:
        """A register that the instruction writes; nothing for ``_``."""
        if text == "_":
            return NONE
        known = self.width(text)
        if known != width:
            raise LoweringError(f"{text} is {8 * known if known else '?'} bits wide, {8 * width} expected")
        return Operand(self._slot(text, width), "define")

    def any_result(self, text: str) -> tuple[Operand, int]:
        """A written register of whatever width, and that width; (nothing, 0) for ``_``."""
        if text == "_":
            return NONE, 0
        known = self.width(text)
        if known is None:
            raise LoweringError(f"{text} is not a register")
        return Operand(self._slot(text, known), "define"), known

    def predicate(self, text: str) -> Operand:
        """A predicate that is read."""
        return Operand(self._predicate_slot(text), "use_predicate")

    def predicate_result(self, text: str) -> Operand:
        """A predicate that is written; nothing for ``_``."""
        return NONE if text == "_" else Operand(self._predicate_slot(text), "define_predicate")

    def address(self, text: str) -> tuple[Operand, int]:
        """``[base+offset]`` as a base operand and an offset in bytes; a 64-bit base has bit 0 of its slot set."""
        if not text.startswith("["):
            raise LoweringError(f"{text} is not an address")
        inner = text[1:-1].strip()
        match = re.fullmatch(r"([^+]+?)\s*(?:\+\s*(-?\w+))?", inner)
        if match is None:
            raise LoweringError(f"{text} is not an address")
        base, offset = match.group(1), int(match.group(2) or "0", 0)
        symbol = self._symbol(base)
        if symbol is not None:
            return NONE, symbol + offset
        if re.fullmatch(r"-?(0[xX])?[0-9a-fA-F]+", base):
            return NONE, int(base, 0) + offset
        width = self.width(base)
        if width is None:
            raise LoweringError(f"{base} is neither register nor variable")
        return Operand(self._slot(base, width) | (width == 8), "use"), offset

    def vector(self, text: str) -> list[str]:
        """The elements of ``{a, b}``, or the one operand."""
        if text.startswith("{"):
            return [element.strip() for element in text[1:-1].split(",")]
        return [text]

    def constant(self, value: int, width: int) -> Operand:
        """A slot that holds a number in every lane."""
        if width not in (4, 8):
            raise LoweringError(f"{value}: registers have 4 or 8 bytes, not {width}")
        value &= (1 << (8 * width)) - 1
        key = ("constant", value, width)
        if key not in self.slots:
            self.slots[key] = self._allocate(width)
            self.program.constants.append((self.slots[key], width, value))
        return Operand(self.slots[key], "use")

    def temporary_predicate(self) -> int:
        """A fresh predicate."""
        self.program.predicates += 1
        return self.program.predicates - 1

    def _allocate(self, width: int) -> int:
        offset = self.program.register_bytes
        self.program.register_bytes += 32 * width
        return offset

    def _symbol(self, name: str) -> int | None:
        for parameter in self.entry.parameters:
            if parameter.name == name:
                return self.parameter_base + parameter.offset_bytes
        if name in self.entry.shared:
            return SHARED_BASE + self.entry.shared[name][0]
        if name in self.entry.dynamic_shared:
            return SHARED_BASE + align(self.entry.static_shared_bytes, 16)
        if name in self.entry.local:
            return LOCAL_BASE + self.entry.local[name][0]
        return None

    def width(self, text: str) -> int | None:
        """Bytes of a register; None for immediates and symbols, which take the width that is asked for."""
        if text in SPECIALS:
            return 4
        if text in ("%clock64", "%globaltimer"):
            return 8
        found = self.scope.register_type(text)
        if found is None:
            return None
        if found[1] == "pred":
            raise LoweringError(f"{text} is a predicate")
        return 8 if SIZES[found[1]] == 8 else 4

    def _slot(self, text: str, width: int) -> int:
        if text in SPECIALS:
            if ("special", text) not in self.slots:
                self.slots["special", text] = self._allocate(4)
                self.program.specials[SPECIALS.index(text)] = self.slots["special", text]
            return self.slots["special", text]
        if text in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            return self.constant(0, width).slot
        found = self.scope.register_type(text)
        if found is not None:
            key = ("register", text, id(found[0]))
            if key not in self.slots:
                self.slots[key] = self._allocate(8 if SIZES[found[1]] == 8 else 4)
            return self.slots[key]
        return self.constant(self._immediate(text), width).slot

    def _immediate(self, text: str) -> int:
        symbol, _, offset = text.partition("+")
        value = self._symbol(symbol.strip())
        if value is not None:
            return value + int(offset or "0", 0)
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            return int(text[2:], 16)
        try:
            return int(text.rstrip("U"), 0)
        except ValueError as error:
            raise LoweringError(f"{text} is neither register, variable nor number") from error

    def _predicate_slot(self, text: str) -> int:
        found = self.scope.register_type(text)
        if found is None or found[1] != "pred":
            raise LoweringError(f"{text} is not a predicate")
        key = ("predicate", text, id(found[0]))
        if key not in self.slots:
            self.slots[key] = self.temporary_predicate()
        return self.slots[key]
