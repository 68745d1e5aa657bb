"""The built tree: patched, its imports made relative, named by its own digest, ready to go into a wheel.

Layout below ``build/trees/<key>/``, which is generated and never committed::

    msa_vendored/_msa_<12 hex>/               the patched package
    msa_vendored/_msa_<12 hex>.manifest.tsv   every file of it
    msa_vendored/_provenance.json             what it was made from
    msa_vendored.cdx.json                     the bill of materials

The key contains everything that the result depends on. A tree is made beside its final place and renamed, so a
killed or concurrent build leaves either nothing or a whole tree; one that exists is verified and used again. The next
build removes what a killed one has left beside it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from msa_vendored import __version__
from msa_vendored.trees import EXECUTABLE, FileEntry, Manifest, compare_manifests, parse_manifest, scan_tree
from msa_vendored.vendoring.errors import DriftError
from msa_vendored.vendoring.lock import Pin
from msa_vendored.vendoring.omit import apply_without
from msa_vendored.vendoring.partials import hold_partial, remove_leftovers
from msa_vendored.vendoring.rewrite import rewrite_imports
from msa_vendored.vendoring.sbom import make_sbom
from msa_vendored.vendoring.series import Patch, apply_series

IMPORT_ROOTS = ("cute",)
"""Folders of the package that upstream puts on ``sys.path``: sparse.py and sparse_fmha_adapter.py, pristine."""

NOT_BUILT = (
    "*/README.md",
    "bench_utils.py",
    "cute/.gitignore",
    "cute/Makefile",
    "cute/example.py",
    "cute/pytest.ini",
    "cute/requirements.txt",
    "cute/test_*.py",
)
"""Upstream files that no launcher imports or compiles: tests, examples, documents. They stay out of the wheel."""


@dataclass(frozen=True, slots=True)
class BuiltTree:
    """A published built tree."""

    root: Path
    package: str
    """Folder name of the private package, ``_msa_<12 hex>``."""
    manifest: Manifest
    provenance: dict[str, object]
    reused: bool

    @property
    def wheel_files(self) -> dict[str, str]:
        """Source -> place in the wheel, for hatchling's ``force_include``."""
        inner = self.root / "msa_vendored"
        return {str(path): f"msa_vendored/{path.name}" for path in sorted(inner.iterdir())}

    @property
    def sbom(self) -> Path:
        """The CycloneDX file."""
        return self.root / "msa_vendored.cdx.json"


def build_tree(
    pin: Pin, pristine: Path, manifest: Manifest, patches: Sequence[Patch], trees: Path, *, omit: str | None = None
) -> BuiltTree:
    """Make, or verify and reuse, the built tree of ``pin`` with ``patches`` below ``trees``.

    Args:
        pin: its locks say which bytes each patch must meet and leave.
        pristine: the verified tree that ``vendor_pin`` made; never written.
        manifest: every file of it.
        patches: the series.
        trees: folder of all built trees, on one file system.
        omit: name of a patch to leave out, for the red/green check alone; such a tree never goes into a wheel.

    Raises:
        DriftError: a pristine file, or a file of an existing built tree, is not what its manifest says.
        PatchError: a patch does not meet exactly the bytes it was made for.
    """
    final = trees / tree_key(pin, patches, omit)
    trees.mkdir(parents=True, exist_ok=True)
    remove_leftovers(trees, "[0-9a-f]{16}[.]partial-")
    if final.is_dir():
        return load_tree(final)
    with hold_partial(trees, f"{final.name}.partial-") as staging:
        staging.chmod(0o755)
        files = _read_files(pristine, manifest)
        if omit is None:
            changed = apply_series(files, patches, pin.patches, pin=pin.id)
        else:
            changed = apply_without(files, patches, omit)
            patches = [patch for patch in patches if patch.name != omit]
        _write_tree(staging, pin, files, changed, manifest, patches)
        try:
            staging.rename(final)
        except OSError:
            if not final.is_dir():
                raise
            return load_tree(final)  # another build of the same key was first
        _sync_folder(trees)
    return load_tree(final, reused=False)


def tree_key(pin: Pin, patches: Sequence[Patch], omit: str | None = None) -> str:
    """Digest of everything that a built tree depends on: pin, patches, our own code that makes it, libcst."""
    sources = [Path(__file__), Path(__file__).with_name("rewrite.py"), Path(__file__).with_name("sbom.py")]
    parts = [
        repr(replace(pin, patches=())),  # its source, licences and tested versions stand in provenance or SBOM
        *(f"{patch.name}:{patch.sha256}" for patch in patches),
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in sources),
        version("libcst"),
        __version__,
        f"without {omit}" if omit else "complete",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def load_tree(root: Path, *, reused: bool = True) -> BuiltTree:
    """Read and verify a built tree.

    Raises:
        DriftError: any file is missing, extra, changed or of another mode; lists all of them.
    """
    provenance = json.loads((root / "msa_vendored" / "_provenance.json").read_text(encoding="utf-8"))
    package = str(provenance["package"]).rpartition(".")[2]
    listing = root / "msa_vendored" / f"{package}.manifest.tsv"
    manifest = parse_manifest(listing.read_text(encoding="utf-8"), str(listing))
    drift = compare_manifests(manifest, scan_tree(root / "msa_vendored" / package))
    if drift or manifest.digest != provenance["built_tree_digest"]:
        raise DriftError(
            "a built tree was changed after it was built",
            where=str(root),
            expected=str(provenance["built_tree_digest"]),
            got="; ".join(drift.to_lines()) or manifest.digest,
            next_command=f"rm -rf {root} && nox -s build",
        )
    return BuiltTree(root, package, manifest, provenance, reused)


def _read_files(pristine: Path, manifest: Manifest) -> dict[str, bytes]:
    files = {entry.path: (pristine / entry.path).read_bytes() for entry in manifest}
    wrong = [e.path for e in manifest if FileEntry.from_bytes(e.path, files[e.path], e.mode) != e]
    if wrong:
        raise DriftError(
            "the pristine tree is not the pinned one",
            where=str(pristine),
            got=", ".join(wrong),
            next_command="nox -s vendor -- --refresh",
        )
    return files


def _write_tree(
    root: Path,
    pin: Pin,
    pristine: Mapping[str, bytes],
    changed: Mapping[str, bytes | None],
    manifest: Manifest,
    patches: Sequence[Patch],
) -> None:
    patched = {**pristine, **changed}
    modes = {**{entry.path: entry.mode for entry in manifest}, **_modes_of_new_files(patches)}
    kept = {path: data for path, data in sorted(patched.items()) if data is not None and _is_built(path)}
    rewrite = rewrite_imports(kept, IMPORT_ROOTS)
    built = {**kept, **rewrite.files}
    entries = [FileEntry.from_bytes(path, data, modes[path]) for path, data in built.items()]
    listing = Manifest(tuple(entries))
    package = f"_msa_{listing.digest.removeprefix('sha256:')[:12]}"
    touched = [e for e in listing if built[e.path] != pristine.get(e.path)]
    provenance = {
        "schema": 1,
        "version": __version__,
        "package": f"msa_vendored.{package}",
        "manifest": f"{package}.manifest.tsv",
        "pin": describe_pin(pin),
        "tested_with": dict(sorted(pin.tested_with.items())),
        "patches": [describe_patch(patch, pin) for patch in patches],
        "rewrite": {
            "tool": "libcst",
            "version": version("libcst"),
            "files": len(rewrite.files),
            "statements": rewrite.statements,
        },
        "built_tree_digest": listing.digest,
        "touched": [{"path": entry.path, "sha256": entry.sha256} for entry in touched],
    }
    inner = root / "msa_vendored"
    for path, data in built.items():
        _write_file(inner / package / path, data, 0o755 if modes[path] == EXECUTABLE else 0o644)
    _write_file(inner / f"{package}.manifest.tsv", listing.to_text().encode())
    _write_file(inner / "_provenance.json", dump_json(provenance))
    _write_file(root / "msa_vendored.cdx.json", dump_json(make_sbom(pin, patches, listing, __version__)))


def _modes_of_new_files(patches: Sequence[Patch]) -> dict[str, str]:
    return {file.path: file.new_mode for patch in patches for file in patch.files if file.is_new and file.new_mode}


def _is_built(path: str) -> bool:
    return not any(fnmatch.fnmatchcase(path, pattern) for pattern in NOT_BUILT)


def describe_pin(pin: Pin) -> dict[str, object]:
    """The pin as provenance states it."""
    return {"id": pin.id, "kind": pin.kind, "source": pin.source.to_dict(), "tree_digest": pin.tree_digest}


def describe_patch(patch: Patch, pin: Pin) -> dict[str, object]:
    """A patch as provenance states it."""
    return {
        "file": patch.name,
        "subject": patch.header.subject,
        "kind": patch.header.kind,
        "sha256": patch.sha256,
        "drop_when": patch.header.drop_when,
        "touches": [
            {"path": touch.path, "pre": touch.pre, "post": touch.post}
            for lock in pin.patches
            if lock.file == patch.name
            for touch in lock.touches
        ],
    }


def dump_json(value: object) -> bytes:
    """Stable JSON: sorted keys, two spaces, a newline at the end."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; the file system orders the contents before it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
