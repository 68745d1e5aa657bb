"""The lock file ``third_party/msa.lock.toml``: which upstream sources, by which digests, with which patches.

Reading is strict: what is not understood is an error that names its key path. Writing is in
:mod:`msa_vendored.vendoring.lock_text`.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from msa_vendored.trees import Manifest, parse_manifest
from msa_vendored.vendoring.errors import LockError
from msa_vendored.vendoring.series import PatchLock, Touch
from msa_vendored.vendoring.toml_tables import PATH, Table, pattern

SCHEMA = 1
TESTED_WITH = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
"""The distributions whose versions decide whether the source compiles."""

_ID = pattern("lower-case letters and digits, joined by single '.', '_' or '-'", r"[a-z0-9]+([._-][a-z0-9]+)*")
_NAME = pattern("a distribution name", r"[A-Za-z0-9]+([._-]+[A-Za-z0-9]+)*")
_VERSION = pattern("a version such as 0.24.0", r"[0-9][0-9A-Za-z.!+_-]*")
_TAG = pattern("a platform tag such as manylinux_2_28_x86_64", r"[a-z][a-z0-9_]*")
_WHEEL = pattern("the name of a wheel file", r"[A-Za-z0-9_.+!]+(-[A-Za-z0-9_.+!]+){4,5}\.whl")
_URL = pattern("an https:// URL", r"https://[A-Za-z0-9._~:/?#@!$&()*+,;=%-]+")
_COMMIT = pattern("a commit: 40 lower-case hex digits", r"[0-9a-f]{40}")
_SHA256 = pattern("64 lower-case hex digits", r"[0-9a-f]{64}")
_DIGEST = pattern("sha256: and 64 lower-case hex digits", r"sha256:[0-9a-f]{64}")
_SPDX = pattern("an SPDX licence expression", r"[A-Za-z0-9(][A-Za-z0-9.+() -]*")
_KIND = pattern("wheel or git", r"wheel|git")


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A wheel on the Python package index, and the folder of the sources inside it."""

    project: str
    version: str
    file_name: str
    sha256: str
    size_bytes: int
    platform: str
    folder: str

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON can hold them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Submodule:
    """A git submodule: ``path`` relative to the source's folder, and the sub-folders of it that belong to the pin."""

    path: str
    url: str
    commit: str
    include: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GitSource:
    """A commit of a git repository, the folder of the sources inside it, and submodules below that folder."""

    url: str
    commit: str
    folder: str
    submodules: tuple[Submodule, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON can hold them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned upstream source.

    Attributes:
        id: name of the pin and of its folder below ``third_party/msa/``.
        source: where the files come from.
        spdx: SPDX licence expression of the files.
        license_files: licence texts, relative to ``third_party/``.
        tested_with: version of each distribution in ``TESTED_WITH``.
        manifest: file name of the manifest in ``third_party/``.
        tree_digest: ``Manifest.digest`` of that manifest.
        series: folder of the patch series, relative to the repository.
        source_date_epoch: time stamp for archives made from this pin, in seconds; None leaves it to the tool.
        patches: digests of the patches and of the files they touch, in the order of the series.
    """

    id: str
    source: WheelSource | GitSource
    spdx: str
    license_files: tuple[str, ...]
    tested_with: dict[str, str]
    manifest: str
    tree_digest: str
    series: str = "patches"
    source_date_epoch: int | None = None
    patches: tuple[PatchLock, ...] = ()

    @property
    def kind(self) -> str:
        """``wheel`` or ``git``."""
        return "wheel" if isinstance(self.source, WheelSource) else "git"

    @property
    def folder(self) -> str:
        """Where the package is inside the wheel or repository."""
        return self.source.folder


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock file's content; ``default_pin`` is the id of one of ``pins``."""

    default_pin: str
    pins: tuple[Pin, ...]
    schema: int = SCHEMA

    def pin(self, pin_id: str | None = None) -> Pin:
        """The pin of that id; the default one for None.

        Raises:
            LockError: there is no such pin.
        """
        wanted = self.default_pin if pin_id is None else pin_id
        for pin in self.pins:
            if pin.id == wanted:
                return pin
        raise LockError(
            "no such pin",
            expected=f"one of: {', '.join(pin.id for pin in self.pins)}",
            got=wanted,
            next_command="pass one of these ids with --pin",
        )


def read_lock(path: Path) -> Lock:
    """Read and check a lock file.

    Raises:
        LockError: the file is missing or not TOML, or it has an unknown schema, kind or key, a missing key, a value
            of the wrong type or form, a pin or patch twice, or a default pin that is not there.
    """
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LockError("the lock file cannot be read", where=str(path), expected="TOML", got=str(error)) from error
    return parse_lock(data, str(path))


def parse_lock(data: dict[str, object], file: str) -> Lock:
    """Check parsed TOML; ``file`` names it in errors. Raises what ``read_lock`` raises."""
    root = Table(data, file)
    if "schema" in data and data["schema"] != SCHEMA:
        raise root.refuse("schema", "unknown schema of the lock file", str(SCHEMA), repr(data["schema"]))
    root.require(("schema", "default_pin", "pins"))
    tables = root.tables("pins")
    lock = Lock(root.text("default_pin", _ID), tuple(_parse_pin(table) for table in tables), root.integer("schema"))
    _refuse_repeats(tables, "id", [pin.id for pin in lock.pins])
    if lock.default_pin not in (known := [pin.id for pin in lock.pins]):
        expected = f"one of: {', '.join(known)}"
        raise root.refuse("default_pin", "the default pin is not in the lock file", expected, repr(lock.default_pin))
    return lock


def read_manifest(pin: Pin, third_party: Path) -> Manifest:
    """Read a pin's manifest from its file.

    Raises:
        LockError: the file is missing, or its digest is not the pin's ``tree_digest``.
        TreeError: a line cannot be read.
    """
    path = third_party / pin.manifest
    try:
        manifest = parse_manifest(path.read_bytes().decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LockError("a manifest cannot be read", where=str(path), got=str(error)) from error
    check_manifest(pin, manifest, str(path))
    return manifest


def check_manifest(pin: Pin, manifest: Manifest, where: str) -> None:
    """Raise LockError unless ``manifest`` is the one that the pin names by its digest."""
    if manifest.digest != pin.tree_digest:
        raise LockError(
            f"the manifest is not the one that pin {pin.id} names by tree_digest",
            where=where,
            expected=pin.tree_digest,
            got=manifest.digest,
            next_command=f"git checkout -- third_party/{pin.manifest} third_party/msa.lock.toml",
        )


def _parse_pin(table: Table) -> Pin:
    keys = ("id", "kind", "source", "spdx", "license_files", "tested_with", "manifest", "tree_digest")
    table.require(keys, ("series", "source_date_epoch", "patches"))
    parse_source = _parse_wheel if table.text("kind", _KIND) == "wheel" else _parse_git
    tested_with = table.table("tested_with").require(TESTED_WITH)
    patches = table.tables("patches")
    pin = Pin(
        id=table.text("id", _ID),
        source=parse_source(table.table("source")),
        spdx=table.text("spdx", _SPDX),
        license_files=table.texts("license_files", PATH),
        tested_with={name: tested_with.text(name, _VERSION) for name in TESTED_WITH},
        manifest=table.text("manifest", PATH),
        tree_digest=table.text("tree_digest", _DIGEST),
        series=table.text("series", PATH) if "series" in table.data else "patches",
        source_date_epoch=table.integer("source_date_epoch") if "source_date_epoch" in table.data else None,
        patches=tuple(_parse_patch(patch) for patch in patches),
    )
    _refuse_repeats(patches, "file", [patch.file for patch in pin.patches])
    return pin


def _parse_wheel(table: Table) -> WheelSource:
    table.require(("project", "version", "file_name", "sha256", "size_bytes", "platform", "folder"))
    source = WheelSource(
        project=table.text("project", _NAME),
        version=table.text("version", _VERSION),
        file_name=table.text("file_name", _WHEEL),
        sha256=table.text("sha256", _SHA256),
        size_bytes=table.integer("size_bytes"),
        platform=table.text("platform", _TAG),
        folder=table.text("folder", PATH),
    )
    stem = f"{source.project}-{source.version}-"
    if not source.file_name.startswith(stem):
        raise table.refuse("file_name", "wrong value in the lock file", f"a name starting {stem}", source.file_name)
    return source


def _parse_git(table: Table) -> GitSource:
    table.require(("url", "commit", "folder"), ("submodules",))
    submodules = table.tables("submodules")
    source = GitSource(
        url=table.text("url", _URL),
        commit=table.text("commit", _COMMIT),
        folder=table.text("folder", PATH),
        submodules=tuple(_parse_submodule(submodule) for submodule in submodules),
    )
    _refuse_repeats(submodules, "path", [submodule.path for submodule in source.submodules])
    return source


def _parse_submodule(table: Table) -> Submodule:
    table.require(("path", "url", "commit", "include"))
    return Submodule(
        path=table.text("path", PATH),
        url=table.text("url", _URL),
        commit=table.text("commit", _COMMIT),
        include=table.texts("include", PATH),
    )


def _parse_patch(table: Table) -> PatchLock:
    table.require(("file", "sha256", "touches"))
    touches = table.tables("touches")
    patch = PatchLock(
        file=table.text("file", PATH),
        sha256=table.text("sha256", _SHA256),
        touches=tuple(_parse_touch(touch) for touch in touches),
    )
    _refuse_repeats(touches, "path", [touch.path for touch in patch.touches])
    return patch


def _parse_touch(table: Table) -> Touch:
    table.require(("path",), ("pre", "post"))
    pre, post = (table.text(key, _SHA256) if key in table.data else None for key in ("pre", "post"))
    if pre is None and post is None:
        raise table.refuse("pre", "missing key in the lock file", "pre, post or both")
    return Touch(table.text("path", PATH), pre, post)


def _refuse_repeats(tables: tuple[Table, ...], key: str, values: list[str]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise tables[index].refuse(key, "a name appears twice in the lock file", "each once", repr(value))
