"""What to move to: ``--to`` as a pin without patches, and the files of its tree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msa_vendored.vendoring.errors import LockError, UsageError
from msa_vendored.vendoring.git import fetch_commit, list_tree
from msa_vendored.vendoring.lock import (
    TESTED_WITH,
    GitSource,
    Lock,
    Pin,
    Submodule,
    WheelSource,
    parse_lock,
    read_manifest,
)
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.rebase.content import Content, check_paths, read_content
from msa_vendored.vendoring.rebase.wheels import Wanted, describe_wheel, find_wheel, parse_requirements, read_wheel
from msa_vendored.vendoring.sources import fetch_git_tree, find_local_submodules
from msa_vendored.vendoring.vendor import vendor_pin

_RELEASE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][0-9A-Za-z.!+_-]*)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a rebase goes.

    Attributes:
        pin: the new pin; without patches unless it is in the lock already.
        content: the files of its tree.
        extras: extras of distributions in ``tested_with`` that the new pin asks for, such as ``cu13`` of the DSL.
        notes: where each tested version comes from, a line each.
    """

    pin: Pin
    content: Content
    extras: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """The arguments that say where to go; see the command line."""

    to: str
    source: str | None = None
    sha256: str | None = None
    tested_with: Mapping[str, str] | None = None
    offline: bool = False


def resolve_target(
    lock: Lock, old: Pin, wish: Wish, *, third_party: Path, work: Path, report: Callable[[str], None]
) -> Target:
    """Fetch what ``wish`` names.

    Args:
        lock: the lock, whose pins are templates for what a new pin cannot know: folder, licences, platform.
        old: the pin to move from.
        wish: what to move to.
        third_party: folder of the lock.
        work: an existing folder for downloads, which the caller removes.
        report: told in one line what is being fetched.

    Raises:
        UsageError: ``wish.to`` is no pin id, ``PROJECT==VERSION`` or commit, or names the old pin.
        OfflineError, BadHashError, ArchiveError, DriftError: the files could not be had, or are not acceptable.
    """
    unknown = sorted(set(wish.tested_with or ()) - set(TESTED_WITH))
    if unknown:
        raise UsageError("unknown distribution in --tested-with", expected=", ".join(TESTED_WITH), got=unknown[0])
    known = {pin.id: pin for pin in lock.pins}
    pin = known.get(wish.to) or _find_release(lock, wish.to)
    if pin is not None:
        target = _resolve_known(pin, wish, third_party, work, report)
    elif match := _RELEASE.fullmatch(wish.to):
        target = _resolve_release(lock, old, match[1], match[2], wish, work, report)
    elif _COMMIT.fullmatch(wish.to):
        target = _resolve_commit(lock, old, wish, work, report)
    else:
        raise UsageError(
            "--to names nothing to move to",
            where=wish.to,
            expected=f"a pin id ({', '.join(known)}), PROJECT==VERSION such as vllm==0.33.0, or a full git commit",
        )
    if target.pin.id == old.id:
        raise UsageError("--to names the pin that the patches are on", where=old.id, next_command="pass another --to")
    check_paths(target.content, target.pin.id)
    return _override(target, wish)


def _find_release(lock: Lock, to: str) -> Pin | None:
    """The pin of a release or commit that the lock knows already: its digests count, not what an index delivers."""
    for pin in lock.pins:
        source = pin.source
        name = f"{source.project}=={source.version}" if isinstance(source, WheelSource) else source.commit
        if name == to:
            return pin
    return None


def _resolve_known(pin: Pin, wish: Wish, third_party: Path, work: Path, report: Callable[[str], None]) -> Target:
    manifest = read_manifest(pin, third_party)
    folder = third_party / "msa" / pin.id
    if wish.source is not None or not folder.is_dir():
        staging = work / "third_party"
        staging.mkdir()
        result = vendor_pin(pin, manifest, staging, source=wish.source, offline=wish.offline, report=report)
        folder = result.path
    notes = tuple(f"{name} {version}: from the lock" for name, version in pin.tested_with.items())
    return Target(pin, read_content(folder, manifest), {}, notes)


def _resolve_release(
    lock: Lock, old: Pin, project: str, version: str, wish: Wish, work: Path, report: Callable[[str], None]
) -> Target:
    template = _choose_template(lock, old, lambda p: isinstance(p.source, WheelSource) and p.source.project == project)
    source = template.source if template else None
    if template is None or not isinstance(source, WheelSource):
        raise UsageError("no pin is a wheel of that project", where=project, expected="a project that the lock names")
    wheel = find_wheel(source, version, wish.source, sha256=wish.sha256, offline=wish.offline, work=work, report=report)
    content, metadata = read_wheel(wheel, source.folder)
    wanted = {item.name: item for item in parse_requirements(metadata)}
    tested, notes = _choose_versions(template, wanted)
    pin = replace(
        template,
        id=f"{project}-{version}".lower().replace("+", "-").replace("!", "-"),
        source=describe_wheel(wheel, source, version),
        tested_with=tested,
    )
    extras = {name: wanted[name].extras for name in TESTED_WITH if name in wanted and wanted[name].extras}
    return Target(_complete(pin, content), content, extras, notes)


def _choose_versions(template: Pin, wanted: Mapping[str, Wanted]) -> tuple[dict[str, str], tuple[str, ...]]:
    tested, notes = {}, []
    for name in TESTED_WITH:
        item = wanted.get(name)
        tested[name] = (item.version if item else None) or template.tested_with[name]
        if item and item.version:
            notes.append(f"{name} {tested[name]}: the wheel requires {item}")
        else:
            says = f"the wheel requires {item}" if item else "the wheel does not require it"
            notes.append(f"{name} {tested[name]}: as {template.id}; {says}")
    return tested, tuple(notes)


def _resolve_commit(lock: Lock, old: Pin, wish: Wish, work: Path, report: Callable[[str], None]) -> Target:
    template = _choose_template(lock, old, lambda p: isinstance(p.source, GitSource))
    if template is None or not isinstance(template.source, GitSource):
        raise UsageError("no pin is a git repository that could have this commit", where=wish.to)
    url = (wish.source or template.source.url).removeprefix("git+")
    local = Path(url).resolve() if Path(url).is_dir() else None
    if wish.offline and local is None and not url.startswith("file://"):
        raise UsageError("--offline needs a repository on this machine", where=url, next_command="pass --from-source")
    report(f"fetching commit {wish.to} of {url} with git")
    source = _read_submodules(template.source, wish.to, str(local or url), work)
    pin = replace(template, id=f"{template.id.rpartition('-')[0] or template.id}-{wish.to[:8]}", source=source)
    (work / "trees").mkdir()
    found = fetch_git_tree(
        str(local or url), pin, work / "trees", find_local_submodules(local, source) if local else {}
    )
    files = dict(sorted(found.read(found.list_files())))
    if not files:
        raise UsageError("the commit does not hold the package", where=wish.to, expected=f"files below {pin.folder}/")
    content = Content(files, {path: found.files[path][1].mode for path in files})
    notes = tuple(f"{name} {version}: as {template.id}" for name, version in pin.tested_with.items())
    return Target(_complete(pin, content), content, {}, notes)


def _read_submodules(template: GitSource, commit: str, url: str, work: Path) -> GitSource:
    """The source at ``commit``: each submodule at the commit that its entry names."""
    fetch_commit(work / "look", url, commit, otherwise="pass a repository that has it with --from-source")
    entries = list_tree(work / "look", commit, template.folder)
    links = {path.removeprefix(f"{template.folder}/"): e.oid for path, e in entries.items() if e.kind == "commit"}
    known = {module.path: module for module in template.submodules}
    if unknown := sorted(set(links) - set(known)):
        raise UsageError(
            "the commit has a submodule that no pin describes",
            where=f"{url}: {unknown[0]}",
            expected="a [[pins.source.submodules]] table with its url and the folders to include",
            next_command=f"add it to a pin of {template.url} in third_party/msa.lock.toml by hand",
        )
    modules = [Submodule(path, known[path].url, oid, known[path].include) for path, oid in sorted(links.items())]
    return replace(template, commit=commit, submodules=tuple(modules))


def _choose_template(lock: Lock, old: Pin, fits: Callable[[Pin], bool]) -> Pin | None:
    return next((pin for pin in (old, *lock.pins) if fits(pin)), None)


def _complete(pin: Pin, content: Content) -> Pin:
    """The pin with the manifest's name and digest, and without patches."""
    return replace(pin, manifest=f"{pin.id}.manifest.tsv", tree_digest=content.manifest.digest, patches=())


def _override(target: Target, wish: Wish) -> Target:
    """Versions that the maintainer gave, and a check that the lock can hold the pin."""
    given = dict(wish.tested_with or {})
    pin = replace(target.pin, tested_with={**target.pin.tested_with, **given})
    notes = [note for note in target.notes if note.split()[0] not in given]
    notes += [f"{name} {version}: given with --tested-with" for name, version in given.items()]
    return Target(parse_pin(format_pin(pin)), target.content, target.extras, tuple(notes))


def format_pin(pin: Pin) -> str:
    """One pin as the text of a lock file."""
    return dump_lock(Lock(pin.id, (pin,)))


def parse_pin(text: str) -> Pin:
    """The pin of :func:`format_pin`.

    Raises:
        UsageError: a value, such as a version given by the user, has a form that the lock does not accept.
    """
    try:
        return parse_lock(tomllib.loads(text), "the new pin").pin()
    except LockError as error:
        raise UsageError("the lock cannot hold the new pin", where=error.where, expected=error.expected,
                         got=error.got) from error  # fmt: skip
