"""Hatchling build hook: every wheel gets the patched MSA, whoever builds it (nox, ``pip install .``, an sdist)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class VendorHook(BuildHookInterface[Any]):
    """Vendors the pin, applies the series and adds the built tree and its bill of materials to the wheel.

    Environment:
        MSA_VENDORED_PIN: id of the pin; default is the lock's.
        MSA_VENDORED_SOURCE: folder, archive or git URL to take the sources from instead of the pin's own place.
        MSA_VENDORED_OFFLINE: ``1`` refuses to fetch anything.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files; ``version`` is ``standard`` or ``editable``."""
        if self.target_name != "wheel":
            return
        sys.path.insert(0, self.root)
        from msa_vendored.vendoring.errors import UsageError
        from msa_vendored.vendoring.pipeline import prepare_built_tree

        if version == "editable":
            raise UsageError(
                "an editable install cannot hold the patched MSA",
                expected="a wheel: the patched package exists only there, never in the checkout",
                next_command="nox -s build && pip install dist/msa_vendored-*.whl",
            )
        built = prepare_built_tree(
            Path(self.root),
            pin_id=os.environ.get("MSA_VENDORED_PIN") or None,
            source=os.environ.get("MSA_VENDORED_SOURCE") or None,
            offline=os.environ.get("MSA_VENDORED_OFFLINE") == "1",
        )
        build_data["force_include"].update(built.wheel_files)
        build_data["sbom_files"].append(str(built.sbom))
