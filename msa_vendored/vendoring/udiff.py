"""Unified diffs as text: read git's and the plain format, write git's. Bytes in, bytes out, no git.

The reader accepts what this package's patches need and refuses the rest by name. Each hunk has one line of context
at either side, none only at the file's start or end, and at most two unchanged lines between two of its changes
(more would be two hunks): a patch quotes as little of upstream as possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from msa_vendored.trees import REGULAR
from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.filepatch import DiffLine, FilePatch, Hunk, apply_file_patch, compute_hunks, reverse
from msa_vendored.vendoring.udiff_parser import NO_NEWLINE, DiffParser, find_path_fault, refusal

__all__ = [
    "DiffLine",
    "FilePatch",
    "Hunk",
    "UnifiedDiff",
    "apply_file_patch",
    "format_file_patch",
    "make_udiff",
    "parse_udiff",
    "reverse",
]


@dataclass(frozen=True, slots=True)
class UnifiedDiff:
    """A parsed diff: the text before its first file, and its files in order."""

    header: bytes
    files: tuple[FilePatch, ...]


def parse_udiff(data: bytes, where: str) -> UnifiedDiff:
    """Read a unified diff; ``where`` names the patch file in errors.

    Raises:
        PatchError: anything but changes of text files by exact hunks: renames, copies, binary patches, quoted or
            escaping paths, wrong counts, overlapping hunks, too much or too little context, text between files, a
            diff whose own lines end in CR. The error points at the line.
    """
    parser = DiffParser(data, where)
    header = parser.read_header()
    files: dict[str, FilePatch] = {}
    while not parser.at_end:
        line = parser.index + 1
        patch = parser.read_file()
        if patch.path in files:
            raise refusal(
                "the same file twice in one patch", f"{where}:{line}", "one section for each file", patch.path
            )
        files[patch.path] = patch
    return UnifiedDiff(header, tuple(files.values()))


def make_udiff(path: str, old: bytes | None, new: bytes | None, *, mode: str = REGULAR) -> bytes:
    """The diff from ``old`` to ``new`` as :func:`parse_udiff` reads it; empty if they are equal.

    Args:
        path: POSIX path below the root of the tree.
        old: bytes before; None if the file is added.
        new: bytes after; None if the file is deleted.
        mode: git mode of a file that is added or deleted.

    Raises:
        PatchError: :func:`parse_udiff` would refuse the path.
    """
    if old == new:
        return b""
    if fault := find_path_fault(path.encode()):
        what = f"the path {fault}"
        raise PatchError(what, where=path, expected="a plain relative path", next_command="rename the file")
    return format_file_patch(
        FilePatch(
            old_path=None if old is None else path,
            new_path=None if new is None else path,
            hunks=compute_hunks(old or b"", new or b""),
            old_mode=mode if new is None else None,
            new_mode=mode if old is None else None,
        )
    )


def format_file_patch(patch: FilePatch) -> bytes:
    """The diff of one file in git's format, without an ``index`` line."""
    name = patch.path.encode()
    out = [b"diff --git a/%b b/%b\n" % (name, name)]
    if patch.is_new or patch.is_deleted:
        word, mode = (b"new", patch.new_mode) if patch.is_new else (b"deleted", patch.old_mode)
        out.append(b"%b file mode %b\n" % (word, (mode or REGULAR).encode()))
    elif patch.old_mode and patch.new_mode:
        out.append(b"old mode %b\nnew mode %b\n" % (patch.old_mode.encode(), patch.new_mode.encode()))
    if patch.hunks:
        end = b"\t\n" if b" " in name else b"\n"  # as git writes it: the tab tells where such a name ends
        out.append(b"--- /dev/null\n" if patch.is_new else b"--- a/%b%b" % (name, end))
        out.append(b"+++ /dev/null\n" if patch.is_deleted else b"+++ b/%b%b" % (name, end))
    for hunk in patch.hunks:
        old, new = _format_range(hunk.old_start, hunk.old_count), _format_range(hunk.new_start, hunk.new_count)
        out.append(b"@@ -%b +%b @@\n" % (old, new))
        for line in hunk.lines:
            out.append(line.kind.encode() + line.data)
            if not line.data.endswith(b"\n"):
                out.append(b"\n%b\n" % NO_NEWLINE)
    return b"".join(out)


def _format_range(start: int, count: int) -> bytes:
    return b"%d" % start if count == 1 else b"%d,%d" % (start, count)
