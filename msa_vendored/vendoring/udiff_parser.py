"""The reader of unified diffs, line by line; :func:`msa_vendored.vendoring.udiff.parse_udiff` is its front."""

from __future__ import annotations

import re
from typing import NoReturn

from msa_vendored.trees import EXECUTABLE, REGULAR
from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.filepatch import CONTEXT_LINES, DiffLine, FilePatch, Hunk, Kind, quote_bytes
from msa_vendored.vendoring.safe_paths import find_path_problem

NO_NEWLINE = rb"\ No newline at end of file"

_FILE_STARTS = (b"diff --git ", b"--- ")
_RENAMES = (b"similarity ", b"dissimilarity ", b"rename ", b"copy ")
_BINARIES = (b"GIT binary patch", b"Binary files ")
_MODE_LINE = re.compile(rb"(old mode|new mode|new file mode|deleted file mode) ([0-9]+)")
_MODE_SETS = ((), ("old mode", "new mode"), ("new file mode",), ("deleted file mode",))
_INDEX_LINE = re.compile(rb"index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: (?:100644|100755))?")
_HUNK_HEADER = re.compile(rb"@@ -([0-9]{1,9})(?:,([0-9]{1,9}))? \+([0-9]{1,9})(?:,([0-9]{1,9}))? @@(?: .*)?")
_KINDS: dict[bytes, Kind] = {b" ": " ", b"-": "-", b"+": "+"}


def find_path_fault(path: bytes) -> str | None:
    """Why a path cannot stand in a diff, in words that follow "the path"; None if it can."""
    if path.startswith(b'"'):
        return "is quoted"
    try:
        return find_path_problem(path.decode())
    except UnicodeDecodeError:
        return "is not UTF-8"


def refusal(what: str, where: str, expected: str | None = None, got: str | None = None) -> PatchError:
    """An error about the text of a patch; ``where`` is FILE or FILE:LINE."""
    command = (
        f"correct {where.partition(':')[0]}, or write its diff anew: git diff --no-index --no-prefix -U1 a/PATH b/PATH"
    )
    return PatchError(what, where=where, expected=expected, got=got, next_command=command)


def _explain_stray(line: bytes) -> str:
    if line == b"-- ":
        return "a mail signature after the diff; git format-patch --no-signature leaves it out"
    if line[:1] in _KINDS:
        return "the hunk above has more lines than its header counts"
    return "text that belongs to no hunk"


def _check_hunk(hunk: Hunk, where: str) -> None:
    """Refuse a hunk that is inconsistent in itself, or quotes more or less than it should."""
    if hunk.old_lines == hunk.new_lines:
        raise refusal("a hunk that changes nothing", where, "an added or a removed line", f"{len(hunk.lines)} lines")
    if any(not line.endswith(b"\n") for side in (hunk.old_lines, hunk.new_lines) for line in side[:-1]):
        expected = f"{quote_bytes(NO_NEWLINE)} after the last line only"
        raise refusal("a line without newline is not the last of its file", where, expected)
    before, between, after = hunk.context
    is_short = before < CONTEXT_LINES and hunk.old_index > 0
    if is_short or max(before, after) > CONTEXT_LINES or between > 2 * CONTEXT_LINES:
        raise refusal(
            "a hunk with too little context" if is_short else "a hunk with too much context",
            where,
            f"{CONTEXT_LINES} line at either side (none at the file's start or end), "
            f"at most {2 * CONTEXT_LINES} between changes: diff -U{CONTEXT_LINES}",
            f"{before} before, {after} after, {between} between",
        )


def _check_order(hunks: list[Hunk], hunk: Hunk, where: str) -> None:
    """Refuse a hunk that does not follow ``hunks``, the earlier ones of its file."""
    previous = hunks[-1] if hunks else None
    end = previous.old_index + previous.old_count if previous else 0
    if hunk.old_index < end:
        what = "hunks that overlap or are not in the file's order"
        raise refusal(what, where, f"a start after line {end} of the old file", f"-{hunk.old_start}")
    if previous and (previous.context[-1] < CONTEXT_LINES or not previous.lines[-1].data.endswith(b"\n")):
        what = "a hunk with too little context: nothing follows its last change, yet it is not the file's last hunk"
        raise refusal(what, where, f"{CONTEXT_LINES} line of context before the next hunk", f"-{hunk.old_start}")
    shift = sum(earlier.new_count - earlier.old_count for earlier in hunks)
    if hunk.new_index != hunk.old_index + shift:
        start = hunk.old_index + shift + bool(hunk.new_count)
        raise refusal("the hunk's new start does not follow from its counts", where, f"+{start}", f"+{hunk.new_start}")


class DiffParser:
    """Reads one diff from its first line to its last; ``index`` is the 1-based number of the line just taken."""

    def __init__(self, data: bytes, where: str) -> None:
        *self.lines, rest = data.split(b"\n")
        self.where = where
        self.index = 0
        if rest:
            self.index = len(self.lines) + 1
            self.refuse("the patch is cut off: its last line has no newline", got=quote_bytes(rest))

    @property
    def at_end(self) -> bool:
        """All lines are taken."""
        return self.index >= len(self.lines)

    @property
    def next_line(self) -> bytes:
        """The line to come, not taken; empty at the end."""
        return b"" if self.at_end else self.lines[self.index]

    def take(self) -> bytes:
        """The next line as it is; a hunk's lines may end in CR."""
        line = self.next_line
        self.index += 1
        return line

    def take_syntax(self) -> bytes:
        """The next line of the format itself, where CR cannot be content but shows that the patch was converted."""
        line = self.take()
        if line.endswith(b"\r"):
            raise PatchError(
                "the patch itself was converted to CRLF: CR ends a line of the diff syntax",
                where=f"{self.where}:{self.index}",
                expected=quote_bytes(line[:-1]),
                got=quote_bytes(line),
                next_command=f"rm {self.where} && git -c core.autocrlf=false checkout -- {self.where}",
            )
        return line

    def refuse(self, what: str, expected: str | None = None, got: str | None = None) -> NoReturn:
        """Raise, pointing at the line just taken."""
        raise refusal(what, f"{self.where}:{self.index}", expected, got)

    def check_path(self, path: bytes) -> str:
        """The path as text; refused if it could leave the tree or mean another file elsewhere."""
        if fault := find_path_fault(path):
            self.refuse(f"the path {fault}", "a plain relative path", quote_bytes(path))
        return path.decode()

    def read_header(self) -> bytes:
        """Everything before the first file."""
        while not self.at_end and not self.next_line.startswith(_FILE_STARTS):
            if self.take().startswith(b"@@ -"):
                self.refuse("a hunk before the first file name", "'--- ' and '+++ ' above it")
        if self.at_end:
            self.refuse("no diff in the patch", "a line that starts with 'diff --git ' or '--- '", "end of the patch")
        return b"".join(line + b"\n" for line in self.lines[: self.index])

    def read_file(self) -> FilePatch:
        """One file's section, in either format."""
        if self.next_line.startswith(b"diff --git "):
            return self.read_git_file()
        if not self.next_line.startswith(b"--- "):
            line = self.take_syntax()
            self.refuse(_explain_stray(line), "'@@ ', 'diff --git ', '--- ' or the end of the patch", quote_bytes(line))
        old_path, new_path = self.read_names()
        hunks = self.read_hunks(old_path, new_path)
        return FilePatch(old_path, new_path, hunks, new_mode=None if old_path else REGULAR)

    def read_git_file(self) -> FilePatch:
        """A section that starts with ``diff --git``: modes, then names and hunks if the content changes."""
        path = self.read_git_path()
        modes = self.read_modes()
        names = (None if "new file mode" in modes else path, None if "deleted file mode" in modes else path)
        hunks: tuple[Hunk, ...] = ()
        if self.next_line.startswith(b"--- "):
            if self.read_names() != names:
                old, new = (f"{side}/{name}" if name else "/dev/null" for side, name in zip("ab", names, strict=True))
                got = ", ".join(quote_bytes(line) for line in self.lines[self.index - 2 : self.index])
                self.refuse("the file names contradict the lines above them", f"--- {old}, +++ {new}", got)
            hunks = self.read_hunks(*names)
        elif not modes:
            self.refuse("the patch names a file and does nothing to it", "'--- ' or a mode line", path)
        old_mode = modes.get("deleted file mode") or modes.get("old mode")
        return FilePatch(*names, hunks, old_mode, modes.get("new file mode") or modes.get("new mode"))

    def read_git_path(self) -> str:
        """The one path that both names of a ``diff --git`` line must have."""
        names = self.take_syntax().removeprefix(b"diff --git ")
        path = names[len(b"a/") : (len(names) - len(b" ")) // 2]
        if names != b"a/%b b/%b" % (path, path):
            what = "a quoted path" if names.startswith(b'"') else "two names: a rename, a copy or other prefixes"
            self.refuse(what, "diff --git a/PATH b/PATH, with the same PATH", quote_bytes(names))
        return self.check_path(path)

    def read_modes(self) -> dict[str, str]:
        """The lines between ``diff --git`` and ``---``; mode lines by name."""
        modes: dict[str, str] = {}
        while not self.at_end and not self.next_line.startswith(_FILE_STARTS):
            line = self.take_syntax()
            if line.startswith(_RENAMES):
                self.refuse("renames and copies are not supported", "a deletion and an addition", quote_bytes(line))
            if line.startswith(_BINARIES):
                self.refuse("binary patches are not supported", "git diff --text", quote_bytes(line))
            match = _MODE_LINE.fullmatch(line)
            if match and match[1].decode() not in modes:
                modes[match[1].decode()] = match[2].decode()
            elif not _INDEX_LINE.fullmatch(line):
                self.refuse("a line that git does not write here", "a mode, 'index ' or '--- '", quote_bytes(line))
        if tuple(modes) not in _MODE_SETS or not {REGULAR, EXECUTABLE}.issuperset(modes.values()):
            got = ", ".join(f"{key} {mode}" for key, mode in modes.items())
            self.refuse("modes that cannot be applied", f"{REGULAR} or {EXECUTABLE}, of one kind of change", got)
        return modes

    def read_names(self) -> tuple[str | None, str | None]:
        """The paths of a ``---`` and ``+++`` pair; None is ``/dev/null``."""
        names = self.read_name(b"--- ", b"a/"), self.read_name(b"+++ ", b"b/")
        if names == (None, None):
            self.refuse("both names are /dev/null", "a path on one side")
        if None not in names and names[0] != names[1]:
            self.refuse("renames and copies are not supported", f"+++ b/{names[0]}", f"+++ b/{names[1]}")
        return names

    def read_name(self, marker: bytes, prefix: bytes) -> str | None:
        """One of the two."""
        line = self.take_syntax()
        name = line.removeprefix(marker).partition(b"\t")[0]  # a tab ends the name; GNU diff's time stamp follows
        if line.startswith(marker):
            if name == b"/dev/null":
                return None
            if name.startswith((prefix, b'"', b"/")):
                return self.check_path(name.removeprefix(prefix))
        what = "a line with a file name is missing"
        expected = f"'{(marker + prefix).decode()}PATH' or '{marker.decode()}/dev/null'"
        raise refusal(what, f"{self.where}:{self.index}", expected, quote_bytes(line))

    def read_hunks(self, old_path: str | None, new_path: str | None) -> tuple[Hunk, ...]:
        """All hunks of a file, checked alone and in their order."""
        hunks: list[Hunk] = []
        while self.next_line.startswith(b"@@"):
            where = f"{self.where}:{self.index + 1}"
            hunk = self.read_hunk()
            if (old_path is None and hunk.old_count) or (new_path is None and hunk.new_count):
                raise refusal("a hunk with lines on the side that is /dev/null", where)
            _check_hunk(hunk, where)
            _check_order(hunks, hunk, where)
            hunks.append(hunk)
        if not hunks:
            self.refuse("a file without hunks", "'@@ '", quote_bytes(self.take_syntax()))
        return tuple(hunks)

    def read_hunk(self) -> Hunk:
        """A hunk's header and exactly as many lines as it counts."""
        header = self.take_syntax()
        match = _HUNK_HEADER.fullmatch(header)
        if not match:
            self.refuse("unreadable hunk header", "@@ -START,COUNT +START,COUNT @@", quote_bytes(header))
        old_start, old_count, new_start, new_count = (1 if group is None else int(group) for group in match.groups())
        if (old_count and not old_start) or (new_count and not new_start):
            self.refuse("a hunk that starts at line 0", "a start from 1 on, 0 for an empty side", quote_bytes(header))
        lines: list[DiffLine] = []
        old_left, new_left = old_count, new_count
        while old_left or new_left:
            line = self.read_line(header)
            old_left -= line.kind != "+"
            new_left -= line.kind != "-"
            if min(old_left, new_left) < 0:
                got = f"one '{line.kind}' too many"
                self.refuse("the hunk's lines do not fit its counts", quote_bytes(header), got)
            lines.append(line)
        return Hunk(old_start, old_count, new_start, new_count, tuple(lines))

    def read_line(self, header: bytes) -> DiffLine:
        """One line of a hunk, with the no-newline marker that may follow it."""
        is_end, line = self.at_end, self.take()
        kind = _KINDS.get(line[:1])
        if kind is None:
            got = "end of the patch" if is_end else quote_bytes(line)
            hint = " (an empty line of the file is ' ' in a diff)" if line in (b"", b"\r") and not is_end else ""
            what = f"the hunk has fewer lines than its header counts{hint}"
            self.refuse(what, f"' ', '-' or '+', as {quote_bytes(header)} counts", got)
        if not self.next_line.startswith(b"\\"):
            return DiffLine(kind, line[1:] + b"\n")
        marker = self.take_syntax()
        if marker != NO_NEWLINE or len(line) == 1:
            expected = f"{quote_bytes(NO_NEWLINE)} after a line that is not empty"
            self.refuse("a marker that ends no line", expected, quote_bytes(marker))
        return DiffLine(kind, line[1:])
