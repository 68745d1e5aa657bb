"""Where a change sits: the enclosing function of each hunk, and whether a rebase has moved it into another one.

For Python the syntax tree decides. For C++ and CUDA it is git's hunk function, the nearest line above that looks like
the head of a function or class, reduced to its name: a changed list of parameters is not another function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msa_vendored.vendoring.filepatch import Hunk, compute_hunks
from msa_vendored.vendoring.rebase.scratch import CPP_SUFFIXES, Scratch
from msa_vendored.vendoring.rebase.syntax import MODULE, name_lines

_HUNK = re.compile(rb"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@ ?(.*)")
_ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__align__|__attribute__|alignas|decltype)\s*\((?:[^()]|\([^()]*\))*\)")
_CALLABLE = re.compile(r"([~\w:]+)\s*\(")
_TYPE = re.compile(r"\b(?:struct|class|union|enum|namespace)\s+(?:\w+\s+)*?([\w:]+)\s*[;:{<]?")


@dataclass(frozen=True, slots=True, order=True)
class Anchor:
    """Where one change sits.

    Attributes:
        path: the file.
        function: qualified name of the function around it, ``<module>`` outside of any; empty for other text.
        change: the removed and added lines, joined: what identifies the change on both sides of a rebase.
        line: where it starts in the file that the change leaves, counted from 1.
    """

    path: str
    function: str
    change: bytes
    line: int


@dataclass(frozen=True, slots=True)
class Misplacement:
    """A change that was made for one function and ended up in another."""

    path: str
    line: int
    expected: str
    got: str

    def to_line(self) -> str:
        """One line for people."""
        return f"{self.path}:{self.line}: made for {self.expected}, ended up in {self.got}"


def find_anchors(scratch: Scratch, old: str, new: str, paths: Iterable[str]) -> list[Anchor]:
    """The anchors of what changes in ``paths`` between two commits."""
    anchors: list[Anchor] = []
    for path in paths:
        before, after = scratch.read_file(old, path), scratch.read_file(new, path)
        if before is None or after is None:
            continue  # a whole file has no function around it
        names = (name_lines(before), name_lines(after)) if path.endswith(".py") else (None, None)
        if names[0] is not None and names[1] is not None:
            anchors += [_python_anchor(path, hunk, names[0], names[1]) for hunk in compute_hunks(before, after)]
        else:
            anchors += _git_anchors(scratch, old, new, path)
    return anchors


def find_misplaced(made: Sequence[Anchor], found: Sequence[Anchor], renames: dict[str, str]) -> list[Misplacement]:
    """The changes of ``found`` that sit in another function than those of ``made``.

    A change is recognised by its lines. One whose lines a merge has altered must sit in one of the functions that
    the patch was made for in that file.

    Args:
        made: anchors of the patch as it was made.
        found: its anchors after the rebase.
        renames: old path -> new path of files that upstream has renamed.
    """
    places: dict[tuple[str, bytes], list[str]] = {}
    functions: dict[str, list[str]] = {}
    for anchor in made:
        path = renames.get(anchor.path, anchor.path)
        places.setdefault((path, anchor.change), []).append(anchor.function)
        functions.setdefault(path, []).append(anchor.function)
    wrong = []
    left = {key: Counter(names) for key, names in places.items()}
    for anchor in found:
        known = left.get((anchor.path, anchor.change))
        if known is None:
            accepted, is_right = functions.get(anchor.path, []), anchor.function in functions.get(anchor.path, [])
        else:
            accepted, is_right = list(places[anchor.path, anchor.change]), known[anchor.function] > 0
            known[anchor.function] -= 1
        if not is_right:
            expected = " or ".join(dict.fromkeys(accepted)) or "no place in this file"
            wrong.append(Misplacement(anchor.path, anchor.line, expected, anchor.function))
    return wrong


def _python_anchor(path: str, hunk: Hunk, before: Sequence[str], after: Sequence[str]) -> Anchor:
    names, old_line, new_line = [], hunk.old_index, hunk.new_index
    for line in hunk.lines:
        if line.kind != " " and line.data.strip():
            names.append(before[old_line] if line.kind == "-" else after[new_line])
        old_line += line.kind != "+"
        new_line += line.kind != "-"
    change = b"".join(line.kind.encode() + line.data for line in hunk.lines if line.kind != " ")
    return Anchor(path, ", ".join(dict.fromkeys(names)), change, hunk.new_start)


def _git_anchors(scratch: Scratch, old: str, new: str, path: str) -> list[Anchor]:
    """From ``git diff -U0``, whose hunk headers name the function above; a changed head names its own."""
    options = ["--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "-U0"]
    text = scratch.git("diff", *options, old, new, "--", path)
    anchors: list[Anchor] = []
    head, lines, start = "", list[bytes](), 0
    for line in [*text.split(b"\n"), b"@@ -0 +0 @@"]:
        if match := _HUNK.match(line):
            if lines:
                anchors.append(Anchor(path, _own_name(path, lines) or head, b"\n".join(lines), start))
            head = _name_of(match[1].decode(errors="replace")) if path.endswith((*CPP_SUFFIXES, ".py")) else ""
            start, lines = int(line.split(b"+")[1].split(b" ")[0].split(b",")[0]), []
        elif start and line[:1] in (b"+", b"-"):
            lines.append(line)
    return anchors


def _own_name(path: str, lines: Sequence[bytes]) -> str:
    """The function's name if the first changed line is the head of a function; empty otherwise."""
    first = lines[0][1:].decode(errors="replace").rstrip()
    if not path.endswith(CPP_SUFFIXES) or not first[:1].isalpha() or first.endswith((";", ":")):
        return ""
    match = _CALLABLE.search(_ATTRIBUTE.sub(" ", first))
    return match[1] if match else ""


def _name_of(head: str) -> str:
    """The function's or type's name in git's hunk header; the whole line if neither is seen in it."""
    head = _ATTRIBUTE.sub(" ", head)
    match = _CALLABLE.search(head) or _TYPE.search(head)
    return match[1] if match else head.strip() or MODULE
