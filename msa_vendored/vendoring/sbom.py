"""Software bill of materials in CycloneDX 1.6, for ``<dist-info>/sboms`` (PEP 770).

It has no time stamp, and its serial number is derived from the digest of the tree, so that equal builds give
equal bytes. Patches stand as the pedigree of the MSA component.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msa_vendored.trees import Manifest
from msa_vendored.vendoring.lock import Pin
from msa_vendored.vendoring.series import Patch

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:msa_vendored:sbom")


def make_sbom(pin: Pin, patches: Sequence[Patch], listing: Manifest, package_version: str) -> dict[str, object]:
    """The bill of materials of a wheel: msa_vendored, the patched MSA in it, and the CUTLASS headers that MSA bundles.

    Args:
        pin: where the sources come from and their licences.
        patches: the series, each becoming one ``pedigree.patches`` entry with its diff.
        listing: every file of the built tree; its digest identifies the MSA component.
        package_version: the version of msa_vendored.
    """
    digest = listing.digest.removeprefix("sha256:")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'{package_version} {digest}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": "msa_vendored",
                "name": "msa_vendored",
                "version": package_version,
                "purl": f"pkg:pypi/msa-vendored@{package_version}",
                "licenses": [{"expression": pin.spdx}],
            }
        },
        "components": [_msa_component(pin, patches, digest), _cutlass_component(pin, listing)],
        "dependencies": [
            {"ref": "msa_vendored", "dependsOn": ["fmha_sm100"]},
            {"ref": "fmha_sm100", "dependsOn": ["cutlass"]},
        ],
    }


def _msa_component(pin: Pin, patches: Sequence[Patch], digest: str) -> dict[str, object]:
    return {
        "type": "library",
        "bom-ref": "fmha_sm100",
        "name": "fmha_sm100",
        "publisher": "MiniMax",
        "version": pin.id,
        "licenses": [{"expression": "MIT AND BSD-3-Clause AND Apache-2.0"}],
        "copyright": "Copyright (c) 2026 MiniMax",
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "externalReferences": [{"type": "vcs", "url": "https://github.com/MiniMax-AI/MSA"}],
        "pedigree": {
            "ancestors": [{"type": "library", "name": "fmha_sm100", "version": pin.id, "purl": source_purl(pin)}],
            "patches": [_patch_entry(patch) for patch in patches],
            "notes": "Imports of the package's own modules are made relative after the patches are applied.",
        },
    }


def _cutlass_component(pin: Pin, listing: Manifest) -> dict[str, object]:
    headers = Manifest(tuple(entry for entry in listing if entry.path.startswith("cutlass/")))
    return {
        "type": "library",
        "bom-ref": "cutlass",
        "name": "cutlass",
        "publisher": "NVIDIA",
        "version": f"as bundled by {pin.id}",
        "licenses": [{"license": {"id": "BSD-3-Clause"}}],
        "copyright": "Copyright (c) 2017 - 2025 NVIDIA CORPORATION & AFFILIATES",
        "hashes": [{"alg": "SHA-256", "content": headers.digest.removeprefix("sha256:")}],
        "externalReferences": [{"type": "vcs", "url": "https://github.com/NVIDIA/cutlass"}],
    }


def _patch_entry(patch: Patch) -> dict[str, object]:
    kind = "backport" if patch.header.origin.startswith("backport") else "unofficial"
    return {
        "type": kind,
        "diff": {"text": {"contentType": "text/x-diff", "content": patch.data.decode(errors="backslashreplace")}},
    }


def source_purl(pin: Pin) -> str:
    """Package URL of the archive or commit that the pin names."""
    source = pin.source.to_dict()
    if pin.kind == "wheel":
        return f"pkg:pypi/{source['project']}@{source['version']}?file_name={source['file_name']}"
    return f"pkg:generic/fmha_sm100@{source['commit']}?vcs_url=git%2B{source['url']}"
