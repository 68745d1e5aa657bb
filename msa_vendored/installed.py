"""What is installed: the provenance of the private package, and the check of its files against it.

The module is not called ``provenance``: importing a submodule binds it under its name on the package, and
``msa_vendored.provenance`` is the function.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from msa_vendored.errors import MSAVendoredError, UnavailableError
from msa_vendored.trees import Drift, TreeError, compare_manifests, parse_manifest, scan_tree

SCHEMA = 1
PACKAGE_DIR = Path(__file__).resolve().parent
BUILD_COMMAND = "nox -s build && pip install '.[sm100]'"

_PACKAGE = re.compile(r"msa_vendored\.(_msa_[0-9a-f]{12})")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX64 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class ProvenanceError(UnavailableError):
    """``_provenance.json`` is there, but is not a provenance of the schema that this version reads."""


class InstalledDriftError(MSAVendoredError):
    """The installed private package differs from the tree that was built."""

    exit_code = 10


@dataclass(frozen=True, slots=True)
class PinRecord:
    """The upstream source: lock id, kind (``wheel`` or ``git``), where it came from, digest of its tree."""

    id: str
    kind: str
    source: Mapping[str, Any]
    tree_digest: str


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """One patch of the series; ``kind`` is ``numerical`` or ``build``."""

    file: str
    kind: str
    sha256: str
    subject: str
    drop_when: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the private package was made from. No host, no time: equal sources give an equal record.

    Attributes:
        version: of msa_vendored, at build time.
        package: full module name of the private package, ``msa_vendored._msa_<12 hex>``.
        pin: the upstream source.
        tested_with: distribution name -> the one version that the pin is known to work with.
        patches: the series, in order.
        built_tree_digest: ``sha256:<hex>`` of the manifest of the private package.
        touched: path below the private package -> SHA-256, of every file that a patch or the import rewrite changed.
        manifest: file name of the manifest, beside the private package.
    """

    version: str
    package: str
    pin: PinRecord
    tested_with: Mapping[str, str]
    patches: tuple[PatchRecord, ...]
    built_tree_digest: str
    touched: Mapping[str, str]
    manifest: str
    _document: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def tree12(self) -> str:
        """First 12 hex digits of the digest of the built tree: the part of each cache key that names the sources."""
        return self.built_tree_digest.removeprefix("sha256:")[:12]

    @property
    def folder(self) -> str:
        """Folder name of the private package, ``_msa_<12 hex>``."""
        return self.package.rpartition(".")[2]

    def to_dict(self) -> dict[str, Any]:
        """The whole record as it stands in ``_provenance.json``; a copy."""
        return copy.deepcopy(dict(self._document))


@lru_cache(maxsize=1)
def provenance() -> Provenance:
    """The provenance of this installation, read once in a process; a failure is not remembered.

    Raises:
        UnavailableError: nothing is built here (a source checkout), or the record cannot be read.
    """
    return read_provenance(PACKAGE_DIR)


def read_provenance(package_dir: Path) -> Provenance:
    """Read ``_provenance.json`` of a folder that holds an installed ``msa_vendored``.

    Raises:
        UnavailableError: the file is not there.
        ProvenanceError: it is not JSON, of another schema, or lacks a key; names the key.
    """
    path = package_dir / "_provenance.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        is_checkout = (package_dir.parent / "pyproject.toml").is_file()
        raise UnavailableError(
            "the patched MSA is not built here",
            where=str(package_dir),
            expected="_provenance.json and the package that it names, which only an installed wheel has",
            got="a source checkout" if is_checkout else "an incomplete installation",
            next_command=BUILD_COMMAND,
        ) from error
    return parse_provenance(text, str(path))


def parse_provenance(text: str, where: str) -> Provenance:
    """Read the text of a ``_provenance.json``; ``where`` names the file in errors. Unknown keys are kept and ignored.

    Raises:
        ProvenanceError: it is not JSON, of another schema, or a key is missing or of the wrong form.
    """
    document = _read_document(text, where)
    return Provenance(
        version=_take(document, "version", str, where),
        package=_take_match(document, "package", _PACKAGE, where),
        pin=_parse_pin(_take(document, "pin", dict, where), where),
        tested_with=MappingProxyType(_take_strings(document, "tested_with", where)),
        patches=tuple(
            PatchRecord(*(_take(entry, key, str, where, f"patches[{i}].") for key in PatchRecord.__slots__))
            for i, entry in enumerate(_take(document, "patches", list, where))
        ),
        built_tree_digest=_take_match(document, "built_tree_digest", _DIGEST, where),
        touched=MappingProxyType(dict(_parse_touched(_take(document, "touched", list, where), where))),
        manifest=_take_match(document, "manifest", re.compile(r"_msa_[0-9a-f]{12}\.manifest\.tsv"), where),
        _document=MappingProxyType(document),
    )


def _read_document(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _bad(where, "", "JSON", str(error)) from error
    if not isinstance(document, dict):
        raise _bad(where, "", "an object", type(document).__name__)
    if document.get("schema") != SCHEMA:
        raise _bad(where, "schema", str(SCHEMA), repr(document.get("schema")))
    return document


def _parse_pin(pin: dict[str, Any], where: str) -> PinRecord:
    return PinRecord(
        id=_take(pin, "id", str, where, "pin."),
        kind=_take(pin, "kind", str, where, "pin."),
        source=MappingProxyType(_take(pin, "source", dict, where, "pin.")),
        tree_digest=_take_match(pin, "tree_digest", _DIGEST, where, "pin."),
    )


def _parse_touched(entries: list[Any], where: str) -> Iterator[tuple[str, str]]:
    for i, entry in enumerate(entries):
        place = f"touched[{i}]."
        yield _take(entry, "path", str, where, place), _take_match(entry, "sha256", _HEX64, where, place)


def find_touched_drift(record: Provenance, package_dir: Path | None = None) -> tuple[str, ...]:
    """Paths, below the private package, of files that patches or the rewrite changed and that are not as built.

    Reads about 30 files, a few milliseconds; unlike :func:`verify_installed` it does not read the CUTLASS headers.
    """
    root = (package_dir or PACKAGE_DIR) / record.folder
    return tuple(path for path, sha256 in record.touched.items() if _digest_file(root / path) != sha256)


def verify_touched(record: Provenance, package_dir: Path | None = None) -> None:
    """Refuse a private package whose patched or rewritten files are not the built ones.

    Raises:
        UnavailableError: at least one differs or is missing; lists all of them.
    """
    drift = find_touched_drift(record, package_dir)
    if drift:
        raise UnavailableError(
            "the installed MSA is not the patched tree that its provenance names",
            where=str((package_dir or PACKAGE_DIR) / record.folder),
            expected=f"{len(record.touched)} patched or rewritten files as built ({record.built_tree_digest})",
            got=f"changed or missing: {', '.join(drift)}",
            next_command=reinstall_command(),
        )


def verify_installed(package_dir: Path | None = None) -> Drift:
    """Compare every file of the private package with its manifest. Byte code that Python wrote does not count.

    Returns:
        All differences; false if there are none.

    Raises:
        UnavailableError: nothing is built here.
        InstalledDriftError: the manifest itself is missing, or is not the one that the provenance names.
    """
    package_dir = package_dir or PACKAGE_DIR
    record = read_provenance(package_dir)
    path = package_dir / record.manifest
    try:
        manifest = parse_manifest(path.read_text(encoding="utf-8"), str(path))
        got = manifest.digest
    except (FileNotFoundError, TreeError) as error:
        raise _bad_manifest(path, record, str(error)) from error
    if got != record.built_tree_digest:
        raise _bad_manifest(path, record, got)
    return compare_manifests(manifest, scan_tree(package_dir / record.folder, ignore_suffixes=(".pyc",)))


def reinstall_command() -> str:
    """The pip command that puts the built files back, from where this distribution was installed if pip recorded it."""
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    source = "msa_vendored"
    try:
        recorded = metadata.distribution("msa_vendored").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return BUILD_COMMAND
    if recorded:
        url = urlsplit(json.loads(recorded)["url"])
        source = unquote(url.path) if url.scheme == "file" else url.geturl()
    return f"pip install --force-reinstall --no-deps '{source}'"


def _bad_manifest(path: Path, record: Provenance, got: str) -> InstalledDriftError:
    return InstalledDriftError(
        "the manifest of the installed MSA is not the one that its provenance names",
        where=str(path),
        expected=record.built_tree_digest,
        got=got,
        next_command=reinstall_command(),
    )


def _digest_file(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _bad(where: str, key: str, expected: str, got: str) -> ProvenanceError:
    return ProvenanceError(
        "the provenance of the patched MSA cannot be read",
        where=f"{where}: {key}" if key else where,
        expected=expected,
        got=got,
        next_command=reinstall_command(),
    )


def _take(table: Any, key: str, kind: type[T], where: str, prefix: str = "") -> T:
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, kind):
        raise _bad(where, prefix + key, kind.__name__, type(value).__name__)
    return value


def _take_match(table: Any, key: str, pattern: re.Pattern[str], where: str, prefix: str = "") -> str:
    value = _take(table, key, str, where, prefix)
    if not pattern.fullmatch(value):
        raise _bad(where, prefix + key, pattern.pattern, repr(value))
    return value


def _take_strings(table: Any, key: str, where: str) -> dict[str, str]:
    mapping = _take(table, key, dict, where)
    return {name: _take(mapping, name, str, where, f"{key}.") for name in mapping}
