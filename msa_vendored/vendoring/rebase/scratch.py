"""The scratch repository: a git repository of our own outside the checkout, which nothing of the user's can change.

Every GIT_* variable is dropped, no configuration but the repository's own counts, hooks, signing and rerere are off,
and no attribute of upstream's files converts a byte. What the user's own git needs to behave the same, when a
conflict is resolved by hand, stands in the repository's configuration.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msa_vendored.vendoring.errors import RebaseError
from msa_vendored.vendoring.git import isolate_environment
from msa_vendored.vendoring.rebase.content import Content

_CONFIG = {
    "user.name": "msa_vendored",
    "user.email": "msa_vendored@localhost",
    "core.autocrlf": "false",
    "core.compression": "0",
    "core.safecrlf": "false",
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.quotePath": "false",
    "core.whitespace": "-trailing-space,-space-before-tab,-blank-at-eof",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "commit.gpgSign": "false",
    "commit.cleanup": "strip",
    "diff.algorithm": "histogram",
    "diff.noprefix": "false",
    "diff.renames": "true",
    "merge.conflictStyle": "diff3",
    "merge.directoryRenames": "false",
    "merge.renames": "true",
    "rebase.autoStash": "false",
    "rebase.autoSquash": "false",
    "rebase.updateRefs": "false",
    "rerere.enabled": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
}

# No conversion, no filter, no merge driver, whatever .gitattributes upstream ships: this file outranks those.
_ATTRIBUTES = "* -text !eol -ident !filter !working-tree-encoding !merge !diff\n"
CPP_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".jinja")
"""Files whose functions git finds by its rules for C++."""

_RAW = re.compile(r":(\d+) (\d+) ([0-9a-f]+) ([0-9a-f]+) ([A-Z])\d*")
_NO_MODE = "000000"


@dataclass(frozen=True, slots=True)
class Stage:
    """One patch as a commit: its file name, its commit, and the commit before it."""

    name: str
    commit: str
    parent: str


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does to one path; a mode of None says that there is no file on that side."""

    path: str
    old_mode: str | None
    new_mode: str | None
    old_oid: str
    new_oid: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The commits of a fresh scratch repository: old pristine tree, one stage a patch, new pristine tree."""

    base: str
    stages: tuple[Stage, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Step:
    """A commit to be made: message, author name, and the bytes (None: no file) and mode of what it changes."""

    message: bytes
    author: str
    changes: Mapping[str, tuple[bytes | None, str]]


class Scratch:
    """A scratch repository in the folder ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[tuple[str, str], bytes | None] = {}

    @property
    def git_dir(self) -> Path:
        """The repository's .git folder."""
        return self.root / ".git"

    @property
    def is_rebasing(self) -> bool:
        """Whether a rebase has stopped in it."""
        return (self.git_dir / "rebase-merge").is_dir()

    def create(self) -> None:
        """Make an empty repository; the folder must exist."""
        self.git("init", "--quiet", "--template=", "--object-format=sha1", ".")
        with (self.git_dir / "config").open("a") as config:
            for section, _, name in (key.partition(".") for key in _CONFIG):
                config.write(f'[{section}]\n\t{name} = "{_CONFIG[f"{section}.{name}"]}"\n')
        info = self.git_dir / "info"
        info.mkdir(exist_ok=True)
        rules = [*(f"*{suffix} diff=cpp\n" for suffix in CPP_SUFFIXES), "*.py diff=python\n"]
        info.joinpath("attributes").write_text(_ATTRIBUTES + "".join(rules))

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Run git in the repository; returns its standard output.

        Raises:
            RebaseError: git is missing or returned a non-zero status.
        """
        done = self.try_git(*arguments, stdin=stdin)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise RebaseError(
                f"git {next(a for a in arguments if not a.startswith('-'))} failed in the scratch repository",
                where=str(self.root),
                got="; ".join(lines[-3:]) or f"exit status {done.returncode}",
                next_command="nox -s rebase -- --abort",
            )
        return done.stdout

    def try_git(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run git in the repository, whatever status it returns."""
        environment = isolate_environment(network=False, folder=self.root.resolve())
        environment |= {"GIT_ATTR_NOSYSTEM": "1", "GIT_EDITOR": "true", "GIT_MERGE_AUTOEDIT": "no"}
        environment |= {f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        options = [part for key, value in _CONFIG.items() for part in ("-c", f"{key}={value}")]
        command = ["git", *options, *arguments]
        try:
            return subprocess.run(
                command, cwd=self.root, env=environment, input=stdin, capture_output=True, check=False
            )
        except FileNotFoundError as error:
            raise RebaseError("git is not installed", next_command="install git 2.26 or later") from error

    def import_commits(self, base: Content, steps: Sequence[Step], target: Content | None) -> Layout:
        """Make the commit of ``base``, one commit a step on top, and beside them the commit of ``target``.

        Args:
            base: the old pristine tree.
            steps: one a patch, in the order of the series.
            target: the new pristine tree; None if there is none.
        """
        stream = [*_commit_lines(1, None, Step(b"the old pristine tree\n", "pristine", _all_of(base)), "base")]
        for number, step in enumerate(steps, 2):
            stream += _commit_lines(number, number - 1, step, "series")
        if target is not None:
            step = Step(b"the new pristine tree\n", "pristine", _all_of(target))
            stream += [*_commit_lines(len(steps) + 2, 1, step, "target", whole=True)]
        marks = self.git_dir / "msa-marks"
        self.git("fast-import", "--quiet", f"--export-marks={marks}", stdin=b"".join(stream))
        oids = dict(line.split() for line in marks.read_text().splitlines())
        stages = [Stage(s.author, oids[f":{n}"], oids[f":{n - 1}"]) for n, s in enumerate(steps, 2)]
        return Layout(oids[":1"], tuple(stages), oids.get(f":{len(steps) + 2}", oids[":1"]))

    def check_out(self, commit: str) -> None:
        """Put the work tree, whatever state it is in, at ``commit``; a rebase that has stopped is given up."""
        if self.is_rebasing:
            self.try_git("rebase", "--quit")
        self.git_dir.joinpath("index.lock").unlink(missing_ok=True)
        self.git("checkout", "--quiet", "--force", "--detach", commit)
        self.git("reset", "--quiet", "--hard", commit)
        self.git("clean", "--quiet", "-ffdx")

    def head(self) -> str:
        """The commit that HEAD names."""
        return self.git("rev-parse", "--verify", "HEAD").decode().strip()

    def rebase(self, stage: Stage, onto: str) -> str | None:
        """Rebase the one commit of ``stage`` onto the commit that is checked out.

        Returns:
            The new commit, maybe an empty one; None if there is a conflict, in which git has stopped.
        """
        options = ["--merge", "--empty=keep", "--keep-empty", "--reapply-cherry-picks", "--no-autosquash"]
        done = self.try_git("rebase", "--quiet", *options, "--onto", onto, stage.parent, stage.commit)
        if not done.returncode:
            return self.head()
        if self.is_rebasing and self.list_unmerged():
            return None
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RebaseError("git rebase failed", where=str(self.root), got="; ".join(lines[-3:]))

    def list_unmerged(self) -> dict[str, set[str]]:
        """Paths with a conflict, and for each the sides that have the file: 1 base, 2 upstream, 3 patch."""
        sides: dict[str, set[str]] = {}
        for record in self.git("ls-files", "--unmerged", "-z").split(b"\0")[:-1]:
            fields, _, path = record.partition(b"\t")
            sides.setdefault(os.fsdecode(path), set()).add(fields.decode().split()[2])
        return sides

    def list_changes(self, old: str, new: str) -> list[Change]:
        """Every path that differs between two commits; a rename is a deletion and an addition."""
        return [change for change, _ in self._diff_tree(old, new, "--no-renames")]

    def list_renames(self, old: str, new: str) -> dict[str, str]:
        """Old path -> new path of each file that git takes for renamed, by its default similarity of 50 %."""
        return {c.path: target for c, target in self._diff_tree(old, new, "-M50%", "--diff-filter=R") if target}

    def _diff_tree(self, old: str, new: str, *options: str) -> list[tuple[Change, str | None]]:
        fields = self.git("diff-tree", "-r", "-z", "--raw", "--no-abbrev", *options, old, new).split(b"\0")[:-1]
        changes, position = [], 0
        while position < len(fields):
            match = _RAW.fullmatch(fields[position].decode())
            assert match is not None  # noqa: S101 - git's documented format
            old_mode, new_mode = (None if mode == _NO_MODE else mode for mode in match.group(1, 2))
            path = os.fsdecode(fields[position + 1])
            is_pair = match[5] in "RC"
            target = os.fsdecode(fields[position + 2]) if is_pair else None
            changes.append((Change(path, old_mode, new_mode, match[3], match[4]), target))
            position += 3 if is_pair else 2
        return changes

    def read_file(self, commit: str, path: str) -> bytes | None:
        """The bytes of a file at a commit; None if there is no such file."""
        if (commit, path) not in self._files:
            done = self.try_git("cat-file", "blob", f"{commit}:{path}")
            self._files[commit, path] = None if done.returncode else done.stdout
        return self._files[commit, path]

    def read_message(self, commit: str) -> bytes:
        """The commit's message."""
        return self.git("cat-file", "commit", commit).partition(b"\n\n")[2]

    def read_tree(self, commit: str) -> Content:
        """Every file of a commit."""
        listing = self.git("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]
        entries = [(record.partition(b"\t")[0].split(), os.fsdecode(record.partition(b"\t")[2])) for record in listing]
        request = b"".join(fields[2] + b"\n" for fields, _ in entries)
        stream, position, files = self.git("cat-file", "--batch", stdin=request), 0, {}
        for _, path in entries:
            end = stream.index(b"\n", position)
            size = int(stream[position:end].split()[2])
            files[path] = stream[end + 1 : end + 1 + size]
            position = end + size + 2
        return Content(files, {path: fields[0].decode() for fields, path in entries})

    def merge_file(self, current: bytes, base: bytes, other: bytes) -> tuple[bytes, bool]:
        """Three-way merge of one file: the bytes, and whether there is a conflict in them."""
        paths = [self.git_dir / f"msa-merge-{side}" for side in ("current", "base", "other")]
        for path, data in zip(paths, (current, base, other), strict=True):
            path.write_bytes(data)
        done = self.try_git("merge-file", "-p", "--quiet", "--diff3", *map(str, paths))
        if done.returncode < 0 or done.returncode >= 128:
            return current, True  # a binary file: git merges none
        return done.stdout, done.returncode > 0


def _all_of(content: Content) -> dict[str, tuple[bytes | None, str]]:
    return {path: (data, content.modes[path]) for path, data in content.files.items()}


def _commit_lines(mark: int, parent: int | None, step: Step, branch: str, *, whole: bool = False) -> list[bytes]:
    """One commit in the language of git fast-import; with ``whole`` nothing of the parent's tree stays."""
    who = b"%b <patch@msa_vendored> 946684800 +0000" % step.author.encode()
    lines = [b"commit refs/heads/%b\nmark :%d\nauthor %b\ncommitter %b\n" % (branch.encode(), mark, who, who)]
    lines.append(b"data %d\n%b\n" % (len(step.message), step.message))
    if parent is not None:
        lines.append(b"from :%d\n" % parent)
    if whole:
        lines.append(b"deleteall\n")
    for path, (data, mode) in step.changes.items():
        name = b'"%b"' % path.encode().replace(b'"', b'\\"')  # no path has a backslash: safe_paths.py refuses it
        if data is None:
            lines.append(b"D %b\n" % name)
        else:
            lines.append(b"M %b inline %b\ndata %d\n%b\n" % (mode.encode(), name, len(data), data))
    return lines
