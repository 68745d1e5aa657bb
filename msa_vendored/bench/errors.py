"""Errors of the benchmark."""

from __future__ import annotations

from msa_vendored.errors import MSAVendoredError


class BenchArgumentError(MSAVendoredError, ValueError):
    """An argument of the benchmark is not usable."""


class PeerMissingError(MSAVendoredError):
    """An implementation is not installed, or cannot run on this card; listed in the table and no failure."""


class TimeLimitError(MSAVendoredError, TimeoutError):
    """An implementation takes longer than the run allows; listed as failed, and the rest goes on."""
