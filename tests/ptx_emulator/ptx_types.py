"""What the reader makes of PTX text: entries, parameters, statements, scopes."""

from __future__ import annotations

from dataclasses import dataclass, field

SIZES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16x2": 4, "bf16x2": 4, "b128": 16, "pred": 0,
}  # fmt: skip
"""PTX type to size in bytes."""


class PtxError(Exception):
    """The text is not PTX that this reader knows; the message names the line."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: its place in the parameter block."""

    name: str
    size_bytes: int
    offset_bytes: int


@dataclass(slots=True)
class Scope:
    """A block ``{ }``: its registers (name to type) and labels (name to index of the next statement)."""

    parent: Scope | None
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def register_type(self, name: str) -> tuple[Scope, str] | None:
        """The scope that declares a register, and its type; None if no scope does."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope, scope.registers[name]
            scope = scope.parent
        return None

    def label_target(self, name: str) -> int | None:
        """Index of the statement after a label; None if no scope has it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction: its text, scope, line of the PTX file and, if a ``.loc`` stood above, of its source."""

    text: str
    scope: Scope
    line: int
    source: str | None


@dataclass(slots=True)
class Entry:
    """One ``.entry``: what is needed to lower it."""

    name: str
    parameters: list[Parameter]
    parameter_bytes: int
    statements: list[Statement]
    shared: dict[str, tuple[int, int]]
    """Static shared variables: name to (offset, size), in bytes from the start of shared memory."""
    static_shared_bytes: int
    dynamic_shared: frozenset[str]
    """Names of ``.extern .shared`` arrays: all start after the static variables."""
    local: dict[str, tuple[int, int]]
    local_bytes: int
    threads: int | None
    """From ``.reqntid``; None if the kernel does not say."""
    max_registers: int | None
    """From ``.maxnreg``."""
    min_ctas_per_sm: int
    ctas_per_cluster: int
    """From ``.reqnctapercluster``."""


def align(offset: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-offset // alignment) * alignment
