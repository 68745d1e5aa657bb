"""Apply a series with one patch left out, for the red half of the red/green check. Never used for a wheel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.filepatch import FilePatch, apply_file_patch
from msa_vendored.vendoring.series import Patch


def apply_without(files: Mapping[str, bytes], patches: Sequence[Patch], omitted: str) -> dict[str, bytes | None]:
    """Apply a series with one patch left out.

    The digests of the lock cannot hold then. Later hunks in the same file move by the lines that the omitted patch
    adds above them, so each file patch is tried at its own lines and at those; exactly one of the two must match.

    Raises:
        PatchError: a later patch depends on the omitted one.
    """
    result: dict[str, bytes | None] = {}
    gone: dict[str, FilePatch] = {}
    for patch in patches:
        if patch.name == omitted:
            gone = {file.path: file for file in patch.files}
            continue
        for file in patch.files:
            old = result.get(file.path, files.get(file.path))
            candidates = [file] if file.path not in gone else [file, _shift(file, gone[file.path])]
            result[file.path] = _apply_first(candidates, old, f"{patch.name} without {omitted}")
    return result


def _shift(file: FilePatch, omitted: FilePatch) -> FilePatch:
    """The same file patch at the lines it has when ``omitted`` was never applied."""
    hunks = []
    for hunk in file.hunks:
        added = sum(h.new_count - h.old_count for h in omitted.hunks if h.new_start < hunk.old_start)
        hunks.append(replace(hunk, old_start=hunk.old_start - added, new_start=hunk.new_start - added))
    return replace(file, hunks=tuple(hunks))


def _apply_first(candidates: Sequence[FilePatch], old: bytes | None, where: str) -> bytes | None:
    errors = []
    for candidate in candidates:
        try:
            return apply_file_patch(candidate, old, where)
        except PatchError as error:
            errors.append(error)
    raise errors[0]
