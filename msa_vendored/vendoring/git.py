"""Read one commit of a git repository, byte for byte, whatever the user's environment and configuration say.

Nothing is checked out: file names come from ``git ls-tree`` and bytes from ``git cat-file``, so that neither
line-ending conversion nor filters, hooks or symbolic links have a part in it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msa_vendored.vendoring.errors import BadHashError, OfflineError

_FORCED = (
    "core.autocrlf=false",
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.ext.allow=never",
    # A server that sends less than 1,000 bytes/s for a minute has stalled; git itself would wait for ever.
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
)

# With these the user reaches the network: GIT_CONFIG_GLOBAL, usually absent, points at proxies and credential helpers.
_NETWORK_VARIABLES = frozenset(
    {"GIT_ASKPASS", "GIT_CONFIG_GLOBAL", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH"}
)

# Said outright, so that git looks for no repository and safe.bareRepository=explicit does not matter.
_HERE = "--git-dir=."


class GitFailedError(OfflineError):
    """git returned a non-zero status; ``got`` is its first line of error."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A line of ``git ls-tree``: POSIX path, git mode, object type and id, size in bytes (0 unless a blob)."""

    path: str
    mode: str
    kind: str
    oid: str
    size_bytes: int


def isolate_environment(*, network: bool, folder: Path) -> dict[str, str]:
    """The environment for git: no GIT_* variable of the caller, no configuration but the repository's.

    A hook that runs this build sets GIT_DIR, which would send every command into the caller's own repository.
    With ``network`` the user's global configuration and credential variables stay.
    """
    kept = _NETWORK_VARIABLES if network else frozenset()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in kept}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    if not network:
        environment["GIT_CONFIG_GLOBAL"] = os.devnull
    return environment


def run_git(args: Sequence[str], cwd: Path, *, network: bool = False, stdin: bytes = b"") -> bytes:
    """Run git in ``cwd`` and return what it wrote to standard output.

    Args:
        args: the arguments after ``git``.
        cwd: the folder to run in; repositories above it are not looked for.
        network: keep the user's global configuration and credential variables, for a fetch.
        stdin: what git reads.

    Raises:
        GitFailedError: git is not installed, or returned a non-zero status.
    """
    options = [part for setting in _FORCED for part in ("-c", setting)]
    environment = isolate_environment(network=network, folder=cwd.resolve())
    try:
        done = subprocess.run(
            ["git", *options, *args],
            cwd=cwd,
            env=environment,
            input=stdin,
            capture_output=True,
            check=False,
            umask=0o077,
        )
    except FileNotFoundError as error:
        raise GitFailedError("git is not installed", next_command="install git, or pass --from FOLDER") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        said = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines
        command = next(arg for arg in args if not arg.startswith("-"))
        raise GitFailedError(f"git {command} failed", where=str(cwd), got=said[0])
    return done.stdout


def fetch_commit(repository: Path, url: str, commit: str, *, otherwise: str) -> None:
    """Make ``repository`` a bare repository that holds ``commit`` of ``url``.

    That commit alone is fetched; from servers that give out branches and tags only, these are fetched.
    ``otherwise`` is the next command for the errors.

    Raises:
        OfflineError: ``url`` cannot be reached.
        BadHashError: ``url`` was reached and does not have the commit.
    """
    repository.mkdir()
    repository.chmod(0o700)
    # sha1 said outright: git 3 makes SHA-256 repositories unless told otherwise.
    run_git(["init", "--quiet", "--bare", "--template=", "--object-format=sha1", "."], repository)
    fetch = [_HERE, "fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head"]
    try:
        run_git([*fetch, "--depth=1", "--", url, commit], repository, network=True)
    except GitFailedError:
        try:
            run_git([*fetch, "--", url, "+refs/*:refs/fetched/*"], repository, network=True)
        except GitFailedError as error:
            raise OfflineError(
                f"git could not fetch from {url}",
                expected=f"commit {commit}",
                got=error.got,
                next_command=otherwise,
            ) from error
    if not has_commit(repository, commit):
        raise BadHashError(
            "the repository does not have the pinned commit",
            where=url,
            expected=f"commit {commit}",
            next_command=otherwise,
        )


def has_commit(repository: Path, commit: str) -> bool:
    """Whether the repository has the commit, and can read it."""
    try:
        run_git([_HERE, "cat-file", "-e", f"{commit}^{{commit}}"], repository)
    except GitFailedError:
        return False
    return True


def is_repository(folder: Path) -> bool:
    """Whether ``folder`` itself (not one above it) is a working tree's root or a bare repository."""
    return (folder / ".git").exists() or all((folder / name).exists() for name in ("HEAD", "objects", "refs"))


def list_tree(repository: Path, commit: str, folder: str) -> dict[str, TreeEntry]:
    """Everything below ``folder`` of a commit, by path relative to the commit's root; submodules are entries."""
    listing = run_git([_HERE, "ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--", f"{folder}/"], repository)
    entries = {}
    for record in listing.split(b"\0")[:-1]:
        fields, _, path = record.partition(b"\t")
        mode, kind, oid, size = fields.decode("ascii").split()
        name = path.decode("utf-8", "surrogateescape")
        entries[name] = TreeEntry(name, mode, kind, oid, 0 if size == "-" else int(size))
    return entries


def read_blobs(repository: Path, oids: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield id and bytes of each blob, in the order of ``oids``."""
    request = "".join(f"{oid}\n" for oid in oids).encode("ascii")
    stream = memoryview(run_git([_HERE, "cat-file", "--batch"], repository, stdin=request))
    position = 0
    for oid in oids:
        header = re.match(rb"([0-9a-f]{40}) blob (\d+)\n", stream[position : position + 80])
        if header is None or header[1].decode() != oid:
            raise GitFailedError("git cat-file gave no blob", where=str(repository), expected=oid)
        start = position + header.end()
        position = start + int(header[2]) + 1
        yield oid, bytes(stream[start : position - 1])
