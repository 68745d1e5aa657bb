"""A wheel that no pin names yet: get it from the package index or from disk, and read what a pin needs to know."""

from __future__ import annotations

import hashlib
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from msa_vendored.trees import EXECUTABLE, REGULAR
from msa_vendored.vendoring.archives import open_archive
from msa_vendored.vendoring.errors import BadHashError, OfflineError, UsageError
from msa_vendored.vendoring.lock import WheelSource
from msa_vendored.vendoring.rebase.content import Content
from msa_vendored.vendoring.sources import IGNORED_FOLDERS

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^;)]*)\)?\s*(?:;.*)?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A requirement of a wheel: distribution, its extras, and the specifier as the metadata has it."""

    name: str
    extras: tuple[str, ...]
    specifier: str

    @property
    def version(self) -> str | None:
        """The one version that the specifier accepts; None if it accepts several."""
        match = re.fullmatch(r"==\s*([0-9][0-9A-Za-z.!+_-]*)", self.specifier)
        return match[1] if match else None

    def __str__(self) -> str:
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.name}{extras}{self.specifier}"


def parse_requirements(metadata: str) -> tuple[Wanted, ...]:
    """The unconditional requirements in the text of a wheel's METADATA; those of extras and markers are left out."""
    found = []
    for line in Parser().parsestr(metadata, headersonly=True).get_all("Requires-Dist", []):
        match = _REQUIREMENT.fullmatch(line.strip())
        if match and ";" not in line:
            extras = tuple(part.strip() for part in (match[2] or "").split(",") if part.strip())
            found.append(Wanted(match[1].lower().replace("_", "-"), extras, match[3].strip()))
    return tuple(found)


def find_wheel(
    template: WheelSource,
    version: str,
    source: str | None,
    *,
    sha256: str | None,
    offline: bool,
    work: Path,
    report: Callable[[str], None],
) -> Path:
    """The wheel of ``template.project`` of that version: what ``source`` names, or from the package index.

    Args:
        template: the wheel of an existing pin, for project and platform.
        version: the wanted version.
        source: a wheel, or a folder that holds it; None for the package index.
        sha256: the digest that it must have, if the caller knows it.
        offline: refuse to touch the network.
        work: an existing folder for the download.
        report: told in one line what is being fetched.

    Raises:
        UsageError: ``source`` is neither, or holds another version.
        OfflineError: it must be fetched and ``offline`` is set, or pip could not fetch it.
        BadHashError: it has another digest than ``sha256``.
    """
    if source is None:
        wheel = _download(template, version, sha256, offline=offline, work=work, report=report)
    else:
        wheel = _find_local(template.project, version, Path(source))
    if sha256 is not None and (found := digest_file(wheel)) != sha256:
        raise BadHashError(
            "the wheel is not the expected one",
            where=str(wheel),
            expected=f"sha256 {sha256}",
            got=f"sha256 {found}",
            next_command="check where the wheel comes from; nothing was written",
        )
    return wheel


def digest_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_local(project: str, version: str, source: Path) -> Path:
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    wheels = [source] if source.is_file() else sorted(source.glob(pattern))
    if len(wheels) != 1 or not wheels[0].match(pattern):
        raise UsageError(
            f"--from-source has no wheel of {project} {version}",
            where=str(source),
            expected=f"{pattern}, or a folder with one such file; the lock records the wheel's digest",
            got=", ".join(wheel.name for wheel in wheels) or "no such file",
            next_command=f"leave --from-source out, or: pip download --no-deps {project}=={version}",
        )
    return wheels[0]


def _download(
    template: WheelSource,
    version: str,
    sha256: str | None,
    *,
    offline: bool,
    work: Path,
    report: Callable[[str], None],
) -> Path:
    what = f"{template.project}=={version}"
    otherwise = f"pip download --no-deps {what} where there is a network; then --from-source THE_WHEEL"
    if offline:
        raise OfflineError(f"{what} must be fetched, and --offline forbids it", next_command=otherwise)
    report(f"fetching {what} with pip")
    done = _run_pip(f"{what} --hash=sha256:{sha256}" if sha256 else what, template.platform, work)
    wheels = sorted((work / "wheel").iterdir())
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("ERROR:", "    Got "))]
        kind = BadHashError if "DO NOT MATCH THE HASHES" in done.stderr else OfflineError
        raise kind(
            f"pip could not fetch {what}",
            expected=f"one wheel for {template.platform}",
            got="; ".join(line.strip() for line in errors) or f"{len(wheels)} files",
            next_command=otherwise,
        )
    return wheels[0]


def _run_pip(requirement: str, platform: str, work: Path) -> subprocess.CompletedProcess[str]:
    """Download into ``work/wheel``: the same file on every host, whatever its own interpreter and platform."""
    folder = work / "wheel"
    folder.mkdir()
    (work / "requirement.txt").write_text(f"{requirement}\n")
    target = ["--platform", platform, "--python-version", "3.11", "--implementation", "cp"]
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, *target, "--dest", str(folder)]
    return subprocess.run(
        [*command, "--requirement", str(work / "requirement.txt")],
        cwd=folder,  # empty: -m looks for a module of the name pip in the current folder first
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def read_wheel(wheel: Path, folder: str) -> tuple[Content, str]:
    """The files below ``folder`` of a wheel, with their modes, and the text of its METADATA.

    Raises:
        ArchiveError: the wheel is damaged, or has a member that is refused.
        UsageError: there is no such folder in it.
    """
    prefix = f"{folder}/"
    with open_archive(wheel) as archive:
        members = [path for path in archive.sizes if path.startswith(prefix)]
        members = [path for path in members if IGNORED_FOLDERS.isdisjoint(path.split("/"))]
        if not members:
            raise UsageError(
                "the wheel does not hold the package",
                where=str(wheel),
                expected=f"files below {prefix}",
                next_command="choose a version that ships it",
            )
        metadata = [p for p in archive.sizes if p.count("/") == 1 and p.endswith(".dist-info/METADATA")]
        data = dict(archive.read([*members, *metadata]))
    modes = _read_modes(wheel)
    files = {path.removeprefix(prefix): data[path] for path in sorted(members)}
    text = data[metadata[0]].decode("utf-8", "replace") if metadata else ""
    return Content(files, {path: modes[prefix + path] for path in files}), text


def _read_modes(wheel: Path) -> Mapping[str, str]:
    """Git mode of each member; a wheel that was packed without Unix modes has regular files only."""
    with zipfile.ZipFile(wheel) as source:
        modes = {info.filename: info.external_attr >> 16 for info in source.infolist()}
    return {path: EXECUTABLE if mode & stat.S_IXUSR else REGULAR for path, mode in modes.items()}


def describe_wheel(wheel: Path, template: WheelSource, version: str) -> WheelSource:
    """The wheel as the lock describes it."""
    tags = wheel.name.removesuffix(".whl").rpartition("-")[2].split(".")
    platform = template.platform if template.platform in tags else tags[0]
    size_bytes, sha256 = wheel.stat().st_size, digest_file(wheel)
    return WheelSource(template.project, version, wheel.name, sha256, size_bytes, platform, template.folder)
