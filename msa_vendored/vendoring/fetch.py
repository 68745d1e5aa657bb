"""Get hold of a pin's files: from its own place on the network, or from what ``--from`` names.

Wheels come through pip, so that the user's proxies, mirrors and credentials apply as they do everywhere else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from msa_vendored.trees import Manifest
from msa_vendored.vendoring.archives import ARCHIVE_SUFFIXES, open_archive
from msa_vendored.vendoring.errors import BadHashError, OfflineError, UsageError
from msa_vendored.vendoring.git import is_repository
from msa_vendored.vendoring.lock import GitSource, Pin, WheelSource
from msa_vendored.vendoring.sources import (
    Source,
    fetch_git_tree,
    find_local_submodules,
    open_archive_tree,
    open_folder_tree,
)

# Said outright, so that every host, whatever its architecture and Python, asks for the same file.
_WHEEL_TARGET = ("--python-version", "3.11", "--implementation", "cp")

_GIT_URL = re.compile(r"(git\+)?(https|ssh|file)://\S+|[A-Za-z0-9_][\w.-]*@[\w.-]+:[^\s:]+")

_ACCEPTED = (
    "a folder with the package, "
    f"an archive ({', '.join(ARCHIVE_SUFFIXES)}), or a git repository (a path, https://….git, git+https://, ssh://, "
    "file://, user@host:path)"
)


@contextmanager
def open_source(
    pin: Pin, manifest: Manifest, what: str | None, *, offline: bool, work: Path, report: Callable[[str], None]
) -> Iterator[Source]:
    """Open the place that the files of ``pin`` come from, fetching it first where need be.

    Args:
        pin: the pin.
        manifest: its files, to find the package's folder in what ``--from`` names.
        what: the argument of ``--from``; None for the pin's own place.
        offline: refuse to touch the network.
        work: an existing folder for downloads, which the caller removes.
        report: told in one line what is being fetched.

    Raises:
        UsageError: ``what`` is no such thing, or holds no file of the pin.
        OfflineError: the network is needed, and not allowed or not there.
        BadHashError: what was fetched is not what the pin names.
        ArchiveError: an archive, folder or repository has something that is refused.
    """
    if what is None:
        if offline:
            raise _refuse_network(pin, f"the sources of pin {pin.id} are not vendored yet")
        if isinstance(pin.source, WheelSource):
            what = str(fetch_wheel(pin.source, work, report))
    kind: _Kind = "git" if what is None else classify_source(what, pin)
    if kind == "archive":
        with open_archive(Path(str(what))) as archive:
            yield open_archive_tree(archive, pin, manifest)
    elif kind == "folder":
        yield open_folder_tree(Path(str(what)), pin, manifest)
    else:
        yield _open_git(pin, what, offline=offline, work=work, report=report)


_Kind = Literal["archive", "folder", "git"]


def classify_source(what: str, pin: Pin) -> _Kind:
    """What the argument of ``--from`` is, for this pin.

    A repository counts as one only for a pin of kind ``git``: its commit is read, not its working tree. For the
    working tree pass the package's folder inside it.

    Raises:
        UsageError: it is none of these, or a git URL for a pin that is not in a git repository.
    """
    path = Path(what)
    if what and path.is_dir():  # Path("") is the current folder
        return "git" if pin.kind == "git" and is_repository(path) else "folder"
    if path.is_file() and path.name.endswith(ARCHIVE_SUFFIXES):
        return "archive"
    if not _GIT_URL.fullmatch(what):
        raise UsageError("--from names nothing that can be read", where=what, expected=_ACCEPTED)
    if pin.kind != "git":
        raise UsageError(
            f"pin {pin.id} is not in a git repository",
            where=what,
            expected="a folder or an archive",
            next_command="choose a pin of kind git with --pin",
        )
    return "git"


def fetch_wheel(source: WheelSource, work: Path, report: Callable[[str], None]) -> Path:
    """Download the wheel into ``work`` with pip and check its size and SHA-256.

    Raises:
        OfflineError: pip is missing, or could not fetch the file.
        BadHashError: pip refused the file, or the file is another one; it is deleted.
    """
    if importlib.util.find_spec("pip") is None:
        raise OfflineError(
            "this Python has no pip to fetch the wheel with",
            where=sys.executable,
            next_command=f"{sys.executable} -m ensurepip --upgrade",
        )
    folder = work / "wheel"
    folder.mkdir()
    folder.chmod(0o700)
    requirement = work / "requirement.txt"
    requirement.write_text(f"{source.project}=={source.version} --hash=sha256:{source.sha256}\n")
    requirement.chmod(0o600)
    report(f"fetching {source.file_name} ({source.size_bytes / 1e6:,.0f} MB) with pip")
    options = ["--no-deps", "--only-binary", ":all:", "--platform", source.platform, *_WHEEL_TARGET]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    # In the empty folder: -m looks for a module of the name pip in the current folder first.
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *quiet, *options, "--dest", folder, "--requirement", requirement],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        umask=0o077,
    )
    if done.returncode:
        raise _explain_pip(source, done.stderr)
    return _check_wheel(source, folder)


def _explain_pip(source: WheelSource, stderr: str) -> OfflineError | BadHashError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no message"]
    if "DO NOT MATCH THE HASHES" in stderr:
        got = next((line.split()[-1] for line in lines if line.startswith("Got ")), "another digest")
        return _refuse_wheel(source, got)
    errors = [line for line in lines if line.startswith("ERROR:")]
    return OfflineError(
        f"pip could not fetch {source.project}=={source.version}",
        expected=source.file_name,
        got=(errors or lines)[-1],
        next_command=f"on a machine that can, fetch that file; then: nox -s vendor -- --from {source.file_name}",
    )


def _check_wheel(source: WheelSource, folder: Path) -> Path:
    """The one file in ``folder``, if it is the pin's; it is deleted if not."""
    files = sorted(folder.iterdir())
    if len(files) != 1 or files[0].stat().st_size != source.size_bytes:
        got = ", ".join(f"{file.name} of {file.stat().st_size:,} bytes" for file in files) or "no file"
    else:
        with files[0].open("rb") as wheel:
            got = hashlib.file_digest(wheel, "sha256").hexdigest()
        if got == source.sha256:
            return files[0]
    for file in files:
        file.unlink()
    raise _refuse_wheel(source, got)


def _refuse_wheel(source: WheelSource, got: str) -> BadHashError:
    return BadHashError(
        "the package index delivers another file than the pinned one; it was deleted",
        where=source.file_name,
        expected=f"sha256 {source.sha256}, {source.size_bytes:,} bytes",
        got=got,
        next_command="check the index that pip is configured to use (pip config list), then run the same command again",
    )


def _open_git(pin: Pin, what: str | None, *, offline: bool, work: Path, report: Callable[[str], None]) -> Source:
    source = pin.source
    assert isinstance(source, GitSource)  # noqa: S101 - classify_source returns "git" for no other
    url = source.url if what is None else what.removeprefix("git+")
    local = Path(url).resolve() if Path(url).is_dir() else None
    submodule_urls = find_local_submodules(local, source) if local else {}
    urls = {module.path: submodule_urls.get(module.path, module.url) for module in source.submodules}
    if offline:
        for needed in (url, *urls.values()):
            if not (needed.startswith("file://") or Path(needed).is_dir()):
                raise _refuse_network(pin, f"{needed} is not on this machine")
    report(f"fetching commit {source.commit} of {url} with git")
    return fetch_git_tree(str(local or url), pin, work, urls)


def _refuse_network(pin: Pin, what: str) -> OfflineError:
    return OfflineError(
        f"{what}, and --offline forbids to fetch",
        expected=f"third_party/msa/{pin.id}/, or --from with something on this machine",
        next_command=f"nox -s vendor -- --pin {pin.id}",
    )
