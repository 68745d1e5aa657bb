"""Errors of the training API; they are also ValueError, NotImplementedError or RuntimeError, as its callers expect.

NeMo Automodel's own bindings raise the plain built-ins in these places; deriving from both keeps
``except ValueError`` working and gives the attributes of :class:`~msa_vendored.errors.MSAVendoredError`.
"""

from __future__ import annotations

from msa_vendored.backward.checks import ArgumentTypeError, ArgumentValueError, UnsupportedArgumentError
from msa_vendored.errors import MSAVendoredError

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "SelectionBufferError",
    "StalePlanError",
    "UnsupportedArgumentError",
]


class StalePlanError(ArgumentValueError):
    """Tensors and micro-batch do not belong together, or backward was given another micro-batch than forward.

    The usual cause is a micro-batch kept in a module attribute that a pipeline schedule has replaced before
    activation checkpointing recomputed the layer.
    """


class SelectionBufferError(MSAVendoredError, RuntimeError):
    """The score pass cannot return block maxima for this many heads, key blocks and tokens."""
