"""Put a pin's pristine tree into ``third_party/msa/<pin>/``: whole and verified, or not at all.

Everything is made in hidden siblings whose names end in ``.partial`` and renamed into place. A process holds a lock
on the pin while it works and on each sibling while it fills it, so two runs at once end with one tree, and what a
killed run left behind is known for what it is: the kernel released its lock.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msa_vendored.trees import EXECUTABLE, FileEntry, Manifest, TreeError, compare_manifests, scan_tree
from msa_vendored.vendoring.errors import BadHashError, DriftError, LockError
from msa_vendored.vendoring.fetch import open_source
from msa_vendored.vendoring.lock import GitSource, Pin, check_manifest
from msa_vendored.vendoring.locks import hold_lock
from msa_vendored.vendoring.partials import hold_partial, name_partial, remove_leftovers, remove_tree
from msa_vendored.vendoring.safe_paths import find_collision, find_path_problem
from msa_vendored.vendoring.sources import FolderTree, Source

DEFAULT_TIMEOUT_S = 900.0
"""How long to wait for another run; the default pin's 279 MB take that long at 0.3 MB/s."""


@dataclass(frozen=True, slots=True)
class VendorResult:
    """A vendored tree: its folder, whether it was there before, and where it was read from (None if it was)."""

    path: Path
    reused: bool
    fetched_from: str | None


def _say_nothing(_line: str) -> None:
    pass


def vendor_pin(
    pin: Pin,
    manifest: Manifest,
    third_party: Path,
    *,
    source: str | None = None,
    offline: bool = False,
    replace: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[[str], None] = _say_nothing,
) -> VendorResult:
    """Put the pristine, verified, read-only tree of ``pin`` into ``third_party/msa/<pin id>/``.

    A tree that is there is verified, every file, and used again; ``source`` is not looked at then.

    Args:
        pin: the pin.
        manifest: its files; the digest must be the pin's.
        third_party: the folder that holds the lock file.
        source: folder, archive or git URL to read from; None for the pin's own place on the network.
        offline: refuse to touch the network.
        replace: put a fresh tree in the place of one that differs from the manifest.
        timeout_s: how long to wait for another run on the same pin, in seconds.
        report: told in one line what is being fetched.

    Raises:
        DriftError: the tree that is there differs from the manifest and ``replace`` is not set; or ``source`` has
            missing or extra files. Every difference is listed.
        BadHashError: what was fetched, or files of ``source``, have other bytes than the pin's.
        BusyError: another run on the pin did not end within ``timeout_s``.
        LockError: the manifest is not the pin's, or holds a path that cannot be written safely.
        UsageError, OfflineError, ArchiveError: see ``open_source``.
    """
    _check_writable(pin, manifest, third_party)
    home = third_party / "msa"
    if not home.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o755)  # whatever the umask, as for the trees in it
    target = home / pin.id
    with hold_lock(home / f".{pin.id}.lock", timeout_s=timeout_s, purpose=f"vendoring {pin.id}"):
        remove_leftovers(home, rf"\.{re.escape(pin.id)}\.(download|tree|old)\.", r"\.partial")
        if os.path.lexists(target):
            if not (drift := list_drift(target, manifest)):
                return VendorResult(target, reused=True, fetched_from=None)
            if not replace:
                raise _refuse_drift(pin, target, drift)
        download, made = (hold_partial(home, f".{pin.id}.{role}.", ".partial") for role in ("download", "tree"))
        with download as work, made as tree:
            with open_source(pin, manifest, source, offline=offline, work=work, report=report) as opened:
                _fill_tree(tree, opened, pin, manifest)
                name = _describe_place(pin) if source is None else opened.name
            _publish(tree, target, home / name_partial(f".{pin.id}.old.", ".partial"))
    return VendorResult(target, reused=False, fetched_from=name)


def list_drift(tree: Path, manifest: Manifest) -> list[str]:
    """Every difference between ``tree`` and ``manifest`` as ``kind: path``; a link or special file hides the rest."""
    try:
        return compare_manifests(manifest, scan_tree(tree)).to_lines()
    except TreeError as error:
        return [f"{error.what}: {error.where}"]


def _describe_place(pin: Pin) -> str:
    if isinstance(pin.source, GitSource):
        return f"{pin.source.url} at {pin.source.commit}"
    return f"{pin.source.project}=={pin.source.version} on the package index"


def _check_writable(pin: Pin, manifest: Manifest, third_party: Path) -> None:
    where = str(third_party / pin.manifest)
    check_manifest(pin, manifest, where)
    for path in manifest.by_path:
        if problem := find_path_problem(path):
            raise LockError(f"a path in the manifest {problem}", where=where, got=repr(path))
    if collision := find_collision(manifest.by_path):
        raise LockError("two paths in the manifest are one file on some file systems", where=where, got=str(collision))


def _fill_tree(tree: Path, source: Source, pin: Pin, manifest: Manifest) -> None:
    """Write the manifest's files into the empty folder ``tree``, verified, read-only and flushed to disk."""
    _check_listing(source, pin, manifest)
    folders = sorted({str(parent) for path in manifest.by_path for parent in Path(path).parents} - {"."})
    for folder in folders:
        (tree / folder).mkdir()
        (tree / folder).chmod(0o700)
    bad = []
    for path, data in source.read(list(manifest.by_path)):
        entry = manifest.by_path[path]
        if problem := _find_difference(entry, data):
            bad.append(f"{path}: {problem}")
        else:
            _write_file(tree / path, data, 0o555 if entry.mode == EXECUTABLE else 0o444)
    if bad:
        raise _refuse_bytes(source, pin, bad)
    # In a second pass: by then most is on disk already.
    for path in manifest.by_path:
        _flush(tree / path)
    for folder in [*reversed(folders), "."]:
        _flush(tree / folder)
        (tree / folder).chmod(0o555)


def _check_listing(source: Source, pin: Pin, manifest: Manifest) -> None:
    found = source.list_files()
    missing = [path for path in manifest.by_path if path not in found]
    extra = sorted(found - manifest.by_path.keys())
    if not missing and not extra:
        return
    absent = _absent_submodule(pin, missing, found)
    what = f"the submodule {absent} is not in it" if absent else "it has not exactly the pin's files"
    raise DriftError(
        f"the source is not pin {pin.id}: {what}",
        where=source.name,
        expected=f"the {len(manifest):,} files of third_party/{pin.manifest}",
        got=_itemise([f"missing: {path}" for path in missing] + [f"extra: {path}" for path in extra]),
        next_command=_submodule_command(source, pin, absent) if absent else "pass another --from",
    )


def _absent_submodule(pin: Pin, missing: list[str], found: frozenset[str]) -> str | None:
    for submodule in pin.source.submodules if isinstance(pin.source, GitSource) else ():
        prefix = f"{submodule.path}/"
        if any(path.startswith(prefix) for path in missing) and not any(path.startswith(prefix) for path in found):
            return submodule.path
    return None


def _submodule_command(source: Source, pin: Pin, submodule: str) -> str:
    if isinstance(source, FolderTree):
        return f"git -C {source.root} submodule update --init {submodule}"
    # An archive that a git host makes never holds submodules.
    git = pin.source.to_dict()
    return (
        f"git clone --no-checkout {git['url']} msa && git -C msa checkout {git['commit']} && "
        f"git -C msa submodule update --init {pin.folder}/{submodule}; then pass --from msa"
    )


def _find_difference(entry: FileEntry, data: bytes) -> str | None:
    if hashlib.sha256(data).hexdigest() == entry.sha256:
        return None
    if hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest() == entry.sha256:
        return "its line endings were converted to CRLF"
    return f"sha256 {hashlib.sha256(data).hexdigest()} instead of {entry.sha256}"


def _refuse_bytes(source: Source, pin: Pin, bad: list[str]) -> BadHashError:
    return BadHashError(
        f"the source is not pin {pin.id}: files have other bytes",
        where=source.name,
        expected=f"the sha256 of each file in third_party/{pin.manifest}",
        got=_itemise(bad),
        next_command="pass another --from, such as a checkout made with git -c core.autocrlf=false clone",
    )


def _refuse_drift(pin: Pin, target: Path, drift: list[str]) -> DriftError:
    return DriftError(
        f"the vendored tree of {pin.id} is not the pristine one",
        where=str(target),
        expected=f"the files of third_party/{pin.manifest}",
        got=_itemise(drift),
        next_command=f"nox -s vendor -- --pin {pin.id} --refresh",
    )


def _itemise(lines: list[str]) -> str:
    return "".join([f"{len(lines):,} difference{'s' * (len(lines) != 1)}", *(f"\n    {line}" for line in lines)])


def _write_file(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
        # fchmod, because the mode given to open is cut by the umask.
        os.fchmod(file.fileno(), mode)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(tree: Path, target: Path, old: Path) -> None:
    """Rename ``tree`` to ``target``. A tree already there is renamed to ``old`` first, and then deleted.

    All three are siblings: moving a read-only folder into another parent needs write permission on the folder.
    """
    replaced = os.path.lexists(target)
    if replaced:
        target.rename(old)
    try:
        tree.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    _flush(target.parent)
    if replaced:
        remove_tree(old)
