"""PTX statements to the micro-operations of the interpreter.

Lane-wise instructions come from the table in ``alu.py``; everything else is matched in full, modifiers included, by
the patterns in ``handlers*.py``. What no pattern matches is an error that names the opcode, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx_emulator.alu import LANE_OP_NUMBERS, LANE_OPS, WIDE
from ptx_emulator.program import (
    ABSENT,
    KIND_NUMBERS,
    LOCAL_BASE,
    NONE,
    ROLES,
    SHARED_BASE,
    SPECIALS,
    LoweringError,
    Operand,
    Program,
    UnsupportedPtxError,
)
from ptx_emulator.ptx import SIZES, Entry, Scope, Statement, align, split_operands

Handler = Callable[["Lowering", "re.Match[str]", list[str]], None]
HANDLERS: dict[str, list[tuple[re.Pattern[str], Handler]]] = {}
"""First word of the opcode to its patterns."""


def opcode(*patterns: str) -> Callable[[Handler], Handler]:
    """Register a handler for the opcodes that a regular expression matches in full."""

    def register(handler: Handler) -> Handler:
        for pattern in patterns:
            mnemonic = re.match(r"\w+", pattern)
            if mnemonic is None:
                raise ValueError(pattern)
            HANDLERS.setdefault(mnemonic.group(), []).append((re.compile(pattern), handler))
        return handler

    return register


class Lowering:
    """Lowers one entry. Handlers call ``emit`` with operands that the other methods make."""

    def __init__(self, entry: Entry, parameter_base: int) -> None:
        self.program = Program(entry)
        self.entry = entry
        self.parameter_base = parameter_base
        self.slots: dict[tuple[object, ...], int] = {}
        self.targets: list[tuple[int, int]] = []
        self.first_instruction: list[int] = []
        self.scope: Scope = Scope(None)
        self.guard: tuple[Operand, bool] | None = None
        self.index = 0

    def run(self) -> Program:
        """Lower all statements.

        Raises:
            UnsupportedPtxError: lists every instruction that is not modelled.
        """
        refused = []
        if self.entry.ctas_per_cluster > 1:
            refused.append(f".reqnctapercluster: clusters of {self.entry.ctas_per_cluster} CTAs; one is modelled")
        for index, statement in enumerate(self.entry.statements):
            self.index = index
            self.first_instruction.append(len(self.program.instructions))
            try:
                self._lower(statement)
            except (LoweringError, ValueError, IndexError, KeyError) as error:
                reason = f" ({error})" if isinstance(error, LoweringError) else f" ({type(error).__name__}: {error})"
                refused.append(f"line {statement.line}: {statement.text[:120]}{reason}")
        if refused:
            more = f"\n  and {len(refused) - 20} more" if len(refused) > 20 else ""
            listing = "\n  ".join(refused[:20])
            raise UnsupportedPtxError(f"{self.entry.name[:60]}: instructions not modelled:\n  {listing}{more}")
        self.first_instruction.append(len(self.program.instructions))
        self.emit("RET", [])
        self.program.statement_of[-1] = max(0, len(self.entry.statements) - 1)
        self._resolve_targets()
        return self.program

    def _lower(self, statement: Statement) -> None:
        self.scope = statement.scope
        text = statement.text
        self.guard = None
        match = re.match(r"@(!?)\s*([\w%$]+)\s+(.*)", text)
        if match:
            self.guard = (self.predicate(match.group(2)), bool(match.group(1)))
            text = match.group(3)
        match = re.match(r"([\w.:]+)\s*(.*)", text)
        if match is None:
            raise LoweringError("not an instruction")
        name, operands = match.group(1), split_operands(match.group(2))
        if name in LANE_OPS and not any(operand.startswith("{") for operand in operands):
            self._lower_lane_op(name, operands)
            return
        for pattern, handler in HANDLERS.get(name.split(".", maxsplit=1)[0], []):
            found = pattern.fullmatch(name)
            if found:
                handler(self, found, operands)
                return
        raise LoweringError(f"opcode or modifier not known: {name}")

    def _lower_lane_op(self, name: str, operands: list[str]) -> None:
        if name.split(".")[0] in ("min", "max") and len(operands) == 4:
            head, _, tail = name.partition(".")
            name = f"{head}3.{tail}"
        op = LANE_OPS[name]
        if operands[0] == "_":
            raise LoweringError("the result goes nowhere")
        if len(operands) != 1 + len(op.sources):
            raise LoweringError(f"{name} takes {1 + len(op.sources)} operands")
        sources = [
            self.source(text, 8 if kind in WIDE else 4) for text, kind in zip(operands[1:], op.sources, strict=True)
        ]
        if not op.is_compare:
            self.emit(LANE_OP_NUMBERS[name], [self.result(operands[0], 8 if op.result in WIDE else 4), *sources])
            return
        first, _, second = operands[0].partition("|")
        self.emit(LANE_OP_NUMBERS[name], [self.predicate_result(first), *sources])
        if second:
            self.emit("PRED_NOT", [self.predicate_result(second), self.predicate(first)])

    def _resolve_targets(self) -> None:
        for instruction, statement in self.targets:
            fields = list(self.program.instructions[instruction])
            fields[-1] = self.first_instruction[statement]
            self.program.instructions[instruction] = tuple(fields)
        self.program.register_bytes = align(self.program.register_bytes, 128)

    # What handlers use.

    def emit(
        self, kind: str | int, operands: list[Operand], a: int = 0, b: int = 0, c: int = 0, immediate: int = 0
    ) -> None:
        """Append one micro-operation under the guard of the statement."""
        number = KIND_NUMBERS[kind] if isinstance(kind, str) else kind
        guard, negated = (self.guard[0].slot, int(self.guard[1])) if self.guard else (ABSENT, 0)
        fields = (number, guard, negated, a, b, c, len(operands), len(self.program.operands), immediate)
        self.program.instructions.append(fields)
        self.program.operands += [operand.slot for operand in operands]
        self.program.roles += [ROLES[operand.role] if operand.slot >= 0 else 0 for operand in operands]
        self.program.statement_of.append(self.index)

    def branch_to(self, label: str) -> None:
        """Emit a branch to a label, resolved when all statements are lowered."""
        target = self.scope.label_target(label)
        if target is None:
            raise LoweringError(f"label {label} not found")
        self.targets.append((len(self.program.instructions), target))
        self.emit("BRA", [])

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


def lower(entry: Entry, parameter_base: int) -> Program:
    """Lower one kernel whose parameters lie at ``parameter_base`` in host memory.

    Raises:
        UnsupportedPtxError: an opcode, modifier or operand is not modelled; all of them are listed.
    """
    # The handlers register themselves when imported; they import this module, hence not at the top.
    from ptx_emulator import handlers, handlers_async, handlers_tensor  # noqa: F401

    return Lowering(entry, parameter_base).run()
