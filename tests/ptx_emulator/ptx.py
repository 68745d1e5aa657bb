"""Reading PTX text: entries, parameters, statements with their scope, labels and the source line of each.

The grammar is what NVVM and CuTe DSL emit: one statement ends at ``;``, inline assembly opens a scope of its own with
``{`` whose registers and labels hide outer ones, ``.loc`` gives the line of the Python or CUDA source.
"""

from __future__ import annotations

import re

from ptx_emulator.ptx_types import SIZES, Entry, Parameter, PtxError, Scope, Statement, align

__all__ = [
    "SIZES", "Entry", "Parameter", "PtxError", "Scope", "Statement", "align", "parse_entries", "split_operands",
]  # fmt: skip

_STRING_OR_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\S*\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?"
)
_VARIABLE = re.compile(r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_EXTERN = re.compile(r"\.extern\s+\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w+\s+([\w$]+)\s*\[\s*\]")
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')


def parse_entries(text: str) -> dict[str, Entry]:
    """Read every kernel of a PTX module.

    Raises:
        PtxError: there is none, or a declaration is of a kind that is not known; names the line.
    """
    files = {int(number): path for number, path in _FILE.findall(text)}
    text = _STRING_OR_COMMENT.sub(_blank, text)
    dynamic = frozenset(name for _, name in _EXTERN.findall(text))
    entries = {}
    for match in re.finditer(r"\.entry\s+([\w$]+)", text):
        entry = _parse_entry(text, match, files, dynamic)
        entries[entry.name] = entry
    if not entries:
        raise PtxError("no .entry in this PTX text")
    return entries


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _parse_entry(text: str, match: re.Match[str], files: dict[int, str], dynamic: frozenset[str]) -> Entry:
    opening = text.index("{", match.end())
    header = text[match.end() : opening]
    parameters, parameter_bytes = _parse_parameters(header)
    end = _closing_brace(text, opening)
    body = _Body(text[opening + 1 : end], text.count("\n", 0, opening + 1) + 1, files)
    # Module-level static shared variables come before the entry.
    for variable in _VARIABLE.finditer(re.sub(r"\.extern[^;]*;", "", text[: match.start()])):
        if variable.group(1) == "shared" and _depth(text, variable.start()) == 0:
            body.declare_variable(variable)
    body.read()
    threads = re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", header)
    registers = re.search(r"\.maxnreg\s+(\d+)", header)
    ctas = re.search(r"\.minnctapersm\s+(\d+)", header)
    cluster = re.search(r"\.reqnctapercluster\s+([\d, ]+)", header)
    return Entry(
        name=match.group(1),
        parameters=parameters,
        parameter_bytes=parameter_bytes,
        statements=body.statements,
        shared=body.variables["shared"],
        static_shared_bytes=body.sizes["shared"],
        dynamic_shared=dynamic,
        local=body.variables["local"],
        local_bytes=align(body.sizes["local"], 16),
        threads=_product(threads.group(1)) if threads else None,
        max_registers=int(registers.group(1)) if registers else None,
        min_ctas_per_sm=int(ctas.group(1)) if ctas else 1,
        ctas_per_cluster=_product(cluster.group(1)) if cluster else 1,
    )


def _depth(text: str, position: int) -> int:
    return text.count("{", 0, position) - text.count("}", 0, position)


def _product(text: str) -> int:
    product = 1
    for factor in text.split(","):
        if factor.strip():
            product *= int(factor)
    return product


def _parse_parameters(header: str) -> tuple[list[Parameter], int]:
    parameters = []
    offset = 0
    for match in _PARAMETER.finditer(header):
        alignment, kind, name, count = match.groups()
        size = SIZES[kind] * int(count or 1)
        offset = align(offset, int(alignment or SIZES[kind]))
        parameters.append(Parameter(name, size, offset))
        offset += size
    return parameters, offset


def _closing_brace(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError(f"line {text.count(chr(10), 0, opening) + 1}: this block is never closed")


_TOKEN = re.compile(r"[;{}:\n]")
_LABEL = re.compile(r"\s*([\w$]+)\s*")


class _Body:
    """The body of an entry, split into statements."""

    def __init__(self, text: str, line: int, files: dict[int, str]) -> None:
        self.text = text
        self.line = line
        self.files = files
        self.scope = Scope(None)
        self.statements: list[Statement] = []
        self.variables: dict[str, dict[str, tuple[int, int]]] = {"shared": {}, "local": {}}
        self.sizes = {"shared": 0, "local": 0}
        self.source: str | None = None

    def read(self) -> None:
        buffer = ""
        start = self.line
        position = 0
        for match in _TOKEN.finditer(self.text):
            piece = self.text[position : match.start()]
            if not buffer.strip() and piece.strip():
                start = self.line
            buffer += piece
            position = match.end()
            buffer = self._take(match.group(), buffer, start)
        if buffer.strip():
            raise PtxError(f"line {start}: statement without ';': {buffer.strip()[:80]}")

    def _take(self, mark: str, buffer: str, start: int) -> str:
        """Act on one separator; returns what is left of the text before it."""
        empty = not buffer.strip()
        if mark == "\n":
            self.line += 1
            if buffer.strip().startswith((".loc", ".file")):
                self._note_source(buffer)
                return ""
            return buffer + " "
        if mark == "{" and empty:
            self.scope = Scope(self.scope)
            return ""
        if mark == "}" and empty:
            if self.scope.parent is None:
                raise PtxError(f"line {self.line}: '}}' without a block")
            self.scope = self.scope.parent
            return ""
        label = _LABEL.fullmatch(buffer)
        if mark == ":" and label:
            self.scope.labels[label.group(1)] = len(self.statements)
            return ""
        if mark == ";":
            self._end_statement(" ".join(buffer.split()), start)
            return ""
        return buffer + mark

    def _note_source(self, text: str) -> None:
        match = _LOC.search(text)
        if match:
            path = self.files.get(int(match.group(1)), f"file {match.group(1)}")
            self.source = f"{path}:{match.group(2)}" if int(match.group(2)) else None

    def _end_statement(self, text: str, line: int) -> None:
        if not text:
            return
        if not text.startswith("."):
            self.statements.append(Statement(text, self.scope, line, self.source))
            return
        register = _REGISTER.fullmatch(text)
        variable = _VARIABLE.fullmatch(text)
        if register:
            self._declare_registers(register.group(1), register.group(2))
        elif variable:
            self.declare_variable(variable)
        elif not text.startswith((".pragma", ".branchtargets")):
            raise PtxError(f"line {line}: directive not known: {text[:80]}")

    def _declare_registers(self, kind: str, names: str) -> None:
        for item in names.split(","):
            name = item.strip()
            numbered = re.fullmatch(r"(.*)<(\d+)>", name)
            if numbered:
                for i in range(int(numbered.group(2))):
                    self.scope.registers[f"{numbered.group(1)}{i}"] = kind
            else:
                self.scope.registers[name] = kind

    def declare_variable(self, match: re.Match[str]) -> None:
        space, alignment, kind, name, count = match.groups()
        offset = align(self.sizes[space], int(alignment or SIZES[kind]))
        size = SIZES[kind] * int(count or 1)
        self.variables[space][name] = (offset, size)
        self.sizes[space] = offset + size


def split_operands(text: str) -> list[str]:
    """Split at the commas that stand outside braces and brackets."""
    parts = []
    depth = 0
    start = 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts
