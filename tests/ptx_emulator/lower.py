"""PTX statements to the micro-operations of the interpreter.

Lane-wise instructions come from the table in ``alu.py``; everything else is matched in full, modifiers included, by
the patterns in ``handlers*.py``. What no pattern matches is an error that names the opcode, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx_emulator.alu import LANE_OP_NUMBERS, LANE_OPS, WIDE
from ptx_emulator.operands import OperandReader
from ptx_emulator.program import ABSENT, KIND_NUMBERS, ROLES, LoweringError, Operand, Program, UnsupportedPtxError
from ptx_emulator.ptx import Entry, Statement, align, split_operands

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


class Lowering(OperandReader):
    """Lowers one entry. Handlers call ``emit`` with operands that the reader's methods make."""

    def __init__(self, entry: Entry, parameter_base: int) -> None:
        super().__init__(entry, parameter_base)
        self.targets: list[tuple[int, int]] = []
        self.first_instruction: list[int] = []
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


def lower(entry: Entry, parameter_base: int) -> Program:
    """Lower one kernel whose parameters lie at ``parameter_base`` in host memory.

    Raises:
        UnsupportedPtxError: an opcode, modifier or operand is not modelled; all of them are listed.
    """
    # The handlers register themselves when imported; they import this module, hence not at the top.
    from ptx_emulator import handlers, handlers_async, handlers_tensor  # noqa: F401

    return Lowering(entry, parameter_base).run()
