"""Registers of ``tcgen05.ld`` that are read before ``tcgen05.wait::ld``: a rule of the PTX ISA, checked in the text.

The interpreter does not make an early use a finding: NVIDIA's compiler itself moves copies of the registers before the
wait, and a kernel without any wait (the official forward's load of S) works. A mutant that breaks the rule where the
whole kernel keeps it is caught all the same.
"""

from __future__ import annotations

from ptx_emulator.program import KIND_NUMBERS, ROLES, Program

WAITS_FOR_LOADS = 0


def find_early_uses(program: Program) -> set[tuple[int, int]]:
    """Pairs (load, use) of instructions, in the order of the text, as far as the next unconditional branch."""
    load, wait, branches = KIND_NUMBERS["T5_LD"], KIND_NUMBERS["T5_WAIT"], (KIND_NUMBERS["BRA"], KIND_NUMBERS["RET"])
    pending: dict[int, int] = {}
    uses: set[tuple[int, int]] = set()
    for pc, (kind, guard, _, a, _, _, count, at, _) in enumerate(program.instructions):
        if kind == wait and a == WAITS_FOR_LOADS:
            pending.clear()
        for k in range(at, at + count):
            slot = program.operands[k] & ~1
            if program.roles[k] == ROLES["use"] and slot in pending:
                uses.add((pending.pop(slot), pc))
            elif program.roles[k] == ROLES["define"]:
                pending.pop(slot, None)
                if kind == load:
                    pending[slot] = pc
        if kind in branches and guard < 0:
            pending.clear()
    return uses
