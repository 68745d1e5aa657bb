"""Hatchling metadata hook: the extras; ``sm100`` names the versions that the wheel's own pin was tested with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ALSO_IMPORTED = ("cuda-bindings>=13.0", "jinja2>=3.1", "ninja>=1.11")
"""What the official launchers import or run besides; tried with 13.4.4, 3.1.6 and 1.13.2, the bounds are a guess."""


class PinMetadataHook(MetadataHookInterface):
    """Sets ``optional-dependencies`` from the lock; the pin is that of ``MSA_VENDORED_PIN``, or the default one."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the ``project`` table, which lists the field as dynamic."""
        sys.path.insert(0, self.root)
        from msa_vendored.probes import HOPPER_TESTED_WITH
        from msa_vendored.vendoring.lock import read_lock

        lock = read_lock(Path(self.root) / "third_party" / "msa.lock.toml")
        tested_with = lock.pin(os.environ.get("MSA_VENDORED_PIN") or None).tested_with
        tested = [f"{name}=={version}" for name, version in tested_with.items()]
        metadata["optional-dependencies"] = {
            "sm100": [*tested, *ALSO_IMPORTED],
            "sm90": [f"{name}=={version}" for name, version in HOPPER_TESTED_WITH.items()],
            "bench": ["matplotlib>=3.8"],
        }
