"""``verify``: read-only, and reports every drift at once in lock, manifests, patches, pristine and built trees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msa_vendored.errors import MSAVendoredError
from msa_vendored.trees import compare_manifests, scan_tree
from msa_vendored.vendoring.built import load_tree
from msa_vendored.vendoring.pipeline import Checkout, read_checkout
from msa_vendored.vendoring.series import apply_series


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference: what was looked at, and what is wrong with it."""

    subject: str
    problem: str


def verify_checkout(root: Path, pin_id: str | None = None) -> tuple[list[str], list[Finding]]:
    """Check everything that is there; returns what was checked, and all findings.

    Trees that have not been fetched or built yet are named as absent, which is not a finding.
    """
    checked: list[str] = []
    findings: list[Finding] = []
    try:
        checkout = read_checkout(root, pin_id)
    except MSAVendoredError as error:
        return checked, [Finding("lock, manifest and series", str(error))]
    counts = f"{len(checkout.manifest)} files, {len(checkout.patches)} patches"
    checked.append(f"lock, manifest and series of {checkout.pin.id}: {counts}")
    findings += _verify_locked_patches(checkout)
    pristine = checkout.third_party / "msa" / checkout.pin.id
    if pristine.is_dir():
        checked.append(f"pristine tree {pristine.relative_to(root)}")
        findings += _verify_pristine(checkout, pristine)
    else:
        checked.append(f"pristine tree {pristine.relative_to(root)}: absent (nox -s vendor fetches it)")
    for tree in sorted((checkout.build / "trees").glob("*")) if (checkout.build / "trees").is_dir() else []:
        if ".partial" in tree.name:
            continue
        checked.append(f"built tree {tree.relative_to(root)}")
        try:
            load_tree(tree)
        except (MSAVendoredError, OSError, ValueError) as error:
            findings.append(Finding(f"built tree {tree.relative_to(root)}", str(error)))
    return checked, findings


def _verify_locked_patches(checkout: Checkout) -> list[Finding]:
    locked = {lock.file: lock.sha256 for lock in checkout.pin.patches}
    found = {patch.name: patch.sha256 for patch in checkout.patches}
    findings = [Finding(f"patches/{name}", "in the lock but not in the series") for name in locked if name not in found]
    findings += [
        Finding(f"patches/{name}", "in the series but not in the lock") for name in found if name not in locked
    ]
    changed = [name for name in found if name in locked and locked[name] != found[name]]
    findings += [
        Finding(f"patches/{name}", f"expected {locked[name]}, got {found[name]}; after review: nox -s lock")
        for name in changed
    ]
    return findings + [
        Finding(f"pin {checkout.pin.id}", f"{lock.file}: {touch.path} is not in the manifest")
        for lock in checkout.pin.patches
        for touch in lock.touches
        if touch.pre is not None and touch.path not in checkout.manifest.by_path
    ]


def _verify_pristine(checkout: Checkout, pristine: Path) -> list[Finding]:
    drift = compare_manifests(checkout.manifest, scan_tree(pristine))
    subject = f"pristine tree {checkout.pin.id}"
    if drift:
        return [Finding(subject, line) for line in drift.to_lines()]
    files = {entry.path: (pristine / entry.path).read_bytes() for entry in checkout.manifest}
    try:
        apply_series(files, checkout.patches, checkout.pin.patches, pin=checkout.pin.id)
    except MSAVendoredError as error:
        return [Finding("series", str(error))]
    return []
