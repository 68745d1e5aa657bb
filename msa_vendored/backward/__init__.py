"""The training backward: ``run_backward`` and the schedule it walks.

Nothing here imports torch until a name is used, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_vendored.backward.launch import run_backward
    from msa_vendored.backward.schedule import MSABackwardSchedule

__all__ = ["MSABackwardSchedule", "run_backward"]

_HOMES = {"MSABackwardSchedule": "msa_vendored.backward.schedule", "run_backward": "msa_vendored.backward.launch"}


def __getattr__(name: str) -> object:
    """Resolves the public names on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
