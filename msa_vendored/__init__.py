"""MiniMax Sparse Attention, vendored with its patches as source diffs, and a backward to train with.

Names are resolved on first use: importing this package imports neither torch nor CuTe DSL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_vendored.backward import MSABackwardSchedule, run_backward
    from msa_vendored.bundle import MSAKernels, kernels
    from msa_vendored.errors import MSAVendoredError, UnavailableError
    from msa_vendored.installed import Provenance, provenance
    from msa_vendored.training import Microbatch, select_blocks, sparse_attention

__version__ = "0.1.0"

_HOMES = {
    "MSABackwardSchedule": "backward",
    "MSAKernels": "bundle",
    "MSAVendoredError": "errors",
    "Microbatch": "training",
    "Provenance": "installed",
    "UnavailableError": "errors",
    "kernels": "bundle",
    "provenance": "installed",
    "run_backward": "backward",
    "select_blocks": "training",
    "sparse_attention": "training",
}

__all__ = [
    "MSABackwardSchedule",
    "MSAKernels",
    "MSAVendoredError",
    "Microbatch",
    "Provenance",
    "UnavailableError",
    "__version__",
    "kernels",
    "provenance",
    "run_backward",
    "select_blocks",
    "sparse_attention",
]


def __getattr__(name: str) -> object:
    """Resolves the public names on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
