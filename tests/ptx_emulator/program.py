"""What lowering makes and the interpreter runs: kinds of micro-operations, operands, a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from ptx_emulator.ptx import Entry, Statement

SHARED_BASE = 1024
"""Shared addresses start here: address 0 of a CTA is never valid, so that a null pointer faults."""
LOCAL_BASE = 1 << 24
"""Local addresses of every lane start here, above any shared address and below any host address."""

KINDS = (
    "NOP", "BRA", "RET", "TRAP", "YIELD", "LD", "ST", "PACK", "UNPACK", "SELP", "PRED_MOV", "PRED_AND", "PRED_OR",
    "PRED_XOR", "PRED_NOT", "SHFL", "VOTE", "MATCH", "REDUX", "ACTIVEMASK", "ELECT", "BAR", "SYNCWARP", "MEMBAR",
    "FENCE_PROXY",
    "FENCE_MBAR_INIT", "MB_INIT", "MB_INVAL", "MB_ARRIVE", "MB_ARRIVE_TX", "MB_EXPECT_TX", "MB_WAIT", "CP_ASYNC",
    "CP_ARRIVE", "CP_COMMIT", "CP_WAIT", "TMA_LOAD", "TMA_STORE", "BULK_LOAD", "BULK_STORE", "BULK_COMMIT",
    "BULK_WAIT", "T5_ALLOC", "T5_DEALLOC", "T5_RELINQUISH", "T5_LD", "T5_ST", "T5_WAIT", "T5_MMA", "T5_CP",
    "T5_COMMIT", "SETMAXNREG", "ATOM", "MAPA", "LDMATRIX", "STMATRIX", "MMA_SYNC", "WGMMA_FENCE", "WGMMA_COMMIT",
    "WGMMA_WAIT", "WGMMA", "ADD_CARRY", "MOVMATRIX", "BRX", "T5_FENCE",
)  # fmt: skip
KIND_NUMBERS = {name: number for number, name in enumerate(KINDS)}

SPECIALS = (
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x",
    "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%smid", "%clusterid.x", "%clusterid.y",
    "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z", "%cluster_ctarank", "%cluster_nctarank",
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y",
    "%cluster_nctaid.z", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge",
    "%dynamic_smem_size", "%total_smem_size", "%gridid",
)  # fmt: skip

ROLES = {"none": 0, "use": 1, "define": 2, "use_predicate": 3, "define_predicate": 4}
"""What an operand is to an instruction: the interpreter's uninitialised-register check goes by it."""
ABSENT = -1
ALWAYS_FALSE, ALWAYS_TRUE = -2, -3


class UnsupportedPtxError(Exception):
    """An instruction that the emulator does not model; names opcode, line and reason."""


class LoweringError(Exception):
    """An operand that the handler of an opcode cannot use. Caught, and reported with opcode and line."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A slot in the register or predicate file, and its role."""

    slot: int
    role: str


NONE = Operand(ABSENT, "none")


@dataclass(slots=True)
class Program:
    """What the interpreter runs."""

    entry: Entry
    instructions: list[tuple[int, ...]] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    constants: list[tuple[int, int, int]] = field(default_factory=list)
    specials: dict[int, int] = field(default_factory=dict)
    register_bytes: int = 0
    predicates: int = 0
    statement_of: list[int] = field(default_factory=list)
    """Instruction to statement, for messages."""

    def statement(self, pc: int) -> Statement:
        """The statement that an instruction came from."""
        return self.entry.statements[self.statement_of[pc]]

    def kind(self, pc: int) -> str:
        """Kind of an instruction; ``LANE`` for the table's."""
        number = self.instructions[pc][0]
        return KINDS[number] if number < len(KINDS) else "LANE"
