r"""What a patch does to one file, as values, and how it is applied, reversed and computed. Bytes in, bytes out.

Only ``\n`` separates lines; a CR before it is content. There is no fuzz and no offset: a hunk's old lines are at
their exact place, byte for byte, or nothing is changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from msa_vendored.vendoring.errors import PatchError

Kind = Literal[" ", "-", "+"]

CONTEXT_LINES = 1
"""Unchanged lines that a hunk quotes at either side: as little of upstream as a diff can quote and still be placed.
With none, tools that trust line numbers insert a line too early (bazelbuild/bazel#18610)."""


@dataclass(frozen=True, slots=True)
class DiffLine:
    r"""One line of a hunk: context, removed or added; ``data`` ends in ``\n`` unless it ends a file without one."""

    kind: Kind
    data: bytes


@dataclass(frozen=True, slots=True)
class Hunk:
    """Consecutive lines of the old file and what they become; starts count from 1, or are 0 for an empty side."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[DiffLine, ...]

    @property
    def old_index(self) -> int:
        """Number of lines of the old file before the hunk."""
        return self.old_start - 1 if self.old_count else self.old_start

    @property
    def new_index(self) -> int:
        """Number of lines of the new file before the hunk."""
        return self.new_start - 1 if self.new_count else self.new_start

    @property
    def old_lines(self) -> list[bytes]:
        """What must be in the old file."""
        return [line.data for line in self.lines if line.kind != "+"]

    @property
    def new_lines(self) -> list[bytes]:
        """What takes its place."""
        return [line.data for line in self.lines if line.kind != "-"]

    @property
    def context(self) -> tuple[int, int, int]:
        """Numbers of unchanged lines: before the first change, at most between two changes, after the last."""
        runs = [(kept, len(list(group))) for kept, group in groupby(line.kind == " " for line in self.lines)]
        before = runs[0][1] if runs[0][0] else 0
        after = runs[-1][1] if runs[-1][0] else 0
        return before, max((length for kept, length in runs[1:-1] if kept), default=0), after


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a diff does to one file.

    Attributes:
        old_path: POSIX path below the root of the tree; None (``/dev/null``) if the file is added.
        new_path: the same; None if the file is deleted.
        hunks: in the order of the file; empty for an empty file or a change of mode only.
        old_mode: git mode before, if the diff states a change of mode or the mode of a deleted file.
        new_mode: git mode after, if the diff states a change; always set for an added file, to 100644 where a plain
            diff cannot state it.
    """

    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...]
    old_mode: str | None = None
    new_mode: str | None = None

    @property
    def path(self) -> str:
        """The file's path, whichever side has it."""
        return self.new_path or self.old_path or ""

    @property
    def is_new(self) -> bool:
        """The file is added."""
        return self.old_path is None

    @property
    def is_deleted(self) -> bool:
        """The file is deleted."""
        return self.new_path is None


def split_lines(data: bytes) -> list[bytes]:
    r"""Lines with their ``\n``; unlike with ``bytes.splitlines``, CR does not end a line."""
    *lines, last = data.split(b"\n")
    return [line + b"\n" for line in lines] + ([last] if last else [])


def quote_bytes(data: bytes, limit: int = 160) -> str:
    """Bytes as they are shown in errors; the end of a very long line is left out."""
    return repr(data) if len(data) <= limit else f"{data[:limit]!r} and {len(data) - limit} more bytes"


def apply_file_patch(patch: FilePatch, old: bytes | None, where: str) -> bytes | None:
    """The bytes of the patched file; None if the patch deletes it.

    Args:
        patch: as :func:`msa_vendored.vendoring.udiff.parse_udiff` returns it.
        old: bytes of the file; None if there is no such file.
        where: names the patch in errors.

    Raises:
        PatchError: a file to add exists, a file to change or delete does not, or a hunk's lines are not exactly at
            their place.
    """
    where = f"{where}: {patch.path}"
    if patch.is_new != (old is None):
        what = "the file to add exists already" if patch.is_new else "the file to patch does not exist"
        raise PatchError(what, where=where, next_command="nox -s rebase")
    lines = split_lines(old or b"")
    parts: list[bytes] = []
    position = 0
    for number, hunk in enumerate(patch.hunks, 1):
        _check_hunk_place(hunk, lines, f"{where}, hunk {number}")
        parts += lines[position : hunk.old_index]
        parts += hunk.new_lines
        position = hunk.old_index + hunk.old_count
    new = b"".join(parts + lines[position:])
    if patch.is_deleted and new:
        what = "the file to delete has more lines than the patch removes"
        raise PatchError(what, where=where, got=quote_bytes(split_lines(new)[0]), next_command="nox -s rebase")
    return None if patch.is_deleted else new


def _check_hunk_place(hunk: Hunk, lines: Sequence[bytes], where: str) -> None:
    """Refuse unless the hunk's old lines are in ``lines`` at the hunk's own place, and its edges are the file's."""
    end = hunk.old_index + hunk.old_count
    found = lines[hunk.old_index : end]
    for offset, expected in enumerate(hunk.old_lines):
        got = found[offset] if offset < len(found) else None
        if got != expected:
            raise PatchError(
                f"the hunk does not match: {_explain_mismatch(expected, got)}",
                where=f"{where}, line {hunk.old_index + offset + 1}",
                expected=quote_bytes(expected),
                got="end of file" if got is None else quote_bytes(got),
                next_command="nox -s rebase",
            )
    if end < len(lines) and hunk.context[-1] < CONTEXT_LINES:
        raise PatchError(
            "the hunk does not match: no context follows its last change, but the file goes on",
            where=f"{where}, line {end + 1}",
            expected="end of file",
            got=quote_bytes(lines[end]),
            next_command="nox -s rebase",
        )


def _explain_mismatch(expected: bytes, got: bytes | None) -> str:
    if got is None:
        return "the file ends before the hunk does"
    if got.rstrip(b"\n") == expected.rstrip(b"\n"):
        return "only the newline at the end of the file differs"
    if got.rstrip(b"\r\n") == expected.rstrip(b"\r\n"):
        return "only CR at the line's end differs, so the file or the patch was converted"
    return "the line has other bytes"


def reverse(patch: FilePatch) -> FilePatch:
    """The patch that undoes ``patch``."""
    swapped: dict[Kind, Kind] = {" ": " ", "-": "+", "+": "-"}
    hunks = tuple(
        Hunk(
            old_start=hunk.new_start,
            old_count=hunk.new_count,
            new_start=hunk.old_start,
            new_count=hunk.old_count,
            lines=tuple(DiffLine(swapped[line.kind], line.data) for line in hunk.lines),
        )
        for hunk in patch.hunks
    )
    return FilePatch(patch.new_path, patch.old_path, hunks, patch.new_mode, patch.old_mode)


def compute_hunks(old: bytes, new: bytes) -> tuple[Hunk, ...]:
    """The hunks that lead from ``old`` to ``new``; not always the fewest lines, but the same on every run."""
    old_lines, new_lines = split_lines(old), split_lines(new)
    matcher = difflib.SequenceMatcher(None, old_lines, new_lines, autojunk=False)
    hunks = []
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES) if old != new else ():
        lines: list[DiffLine] = []
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                lines += [DiffLine(" ", line) for line in old_lines[old_from:old_to]]
            else:
                lines += [DiffLine("-", line) for line in old_lines[old_from:old_to]]
                lines += [DiffLine("+", line) for line in new_lines[new_from:new_to]]
        (_, old_first, _, new_first, _), (_, _, old_end, _, new_end) = group[0], group[-1]
        old_count, new_count = old_end - old_first, new_end - new_first
        hunks.append(
            Hunk(
                old_start=old_first + 1 if old_count else old_first,
                old_count=old_count,
                new_start=new_first + 1 if new_count else new_first,
                new_count=new_count,
                lines=tuple(lines),
            )
        )
    return tuple(hunks)
