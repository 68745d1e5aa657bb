"""Training API: packed documents, block selection and sparse attention with gradients, on any device.

Importing this package imports no torch; the names below load their module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msa_vendored.training.attention import sparse_attention as sparse_attention
    from msa_vendored.training.backends import resolve_backend as resolve_backend
    from msa_vendored.training.errors import ArgumentTypeError as ArgumentTypeError
    from msa_vendored.training.errors import ArgumentValueError as ArgumentValueError
    from msa_vendored.training.errors import SelectionBufferError as SelectionBufferError
    from msa_vendored.training.errors import StalePlanError as StalePlanError
    from msa_vendored.training.microbatch import Microbatch as Microbatch
    from msa_vendored.training.selection import select_blocks as select_blocks

_HOME = {
    "ArgumentValueError": "errors",
    "ArgumentTypeError": "errors",
    "Microbatch": "microbatch",
    "SelectionBufferError": "errors",
    "StalePlanError": "errors",
    "resolve_backend": "backends",
    "select_blocks": "selection",
    "sparse_attention": "attention",
}

__all__ = [  # noqa: RUF022 -- in the order in which a layer uses them; the errors last
    "Microbatch",
    "select_blocks",
    "sparse_attention",
    "resolve_backend",
    "ArgumentValueError",
    "ArgumentTypeError",
    "SelectionBufferError",
    "StalePlanError",
]


def __getattr__(name: str) -> Any:
    """Import the module that defines ``name`` and return the attribute (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted(__all__)
