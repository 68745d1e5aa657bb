"""The shape of an implementation under test, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any, Protocol

from msa_vendored.bench.check import Results
from msa_vendored.bench.errors import PeerMissingError
from msa_vendored.bench.workload import Case, Operands

OURS = "msa_vendored"
"""Name of our launchers."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An implementation bound to one set of operands, compiled and ready.

    Attributes:
        parts: name of a part ("forward", "backward", "index", ...) -> a call that runs it once.
        results: runs it and returns what it gives, for the check.
        note: what the time includes, or another thing to know.
    """

    parts: dict[str, Callable[[], Any]]
    results: Callable[[], Results]
    note: str = ""


class Implementation(Protocol):
    """One implementation."""

    @property
    def name(self) -> str:
        """Label in tables."""

    @property
    def dense(self) -> bool:
        """Whether it attends to every earlier key; its FLOPs are counted so."""

    def find_version(self) -> str:
        """Version in words.

        Raises:
            PeerMissingError: not installed, or not for this card.
        """

    def refuse(self, case: Case) -> str | None:
        """Why it cannot run a case; None if it can."""

    def prepare(self, operands: Operands) -> Prepared:
        """Bind to operands; compiles at need."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An implementation made of functions.

    Attributes:
        name: label in tables.
        dense: see :class:`Implementation`.
        distribution: whose version is shown; must be installed.
        make: what :meth:`Implementation.prepare` does.
        module: imported to see whether it works at all.
        single_document: cannot do packed documents.
        most_tokens: what it can do in reasonable time and memory.
        multiple: tokens must be a multiple of it.
        extra_versions: other distributions that matter.
    """

    name: str
    dense: bool
    distribution: str
    make: Callable[[Operands], Prepared]
    module: str = ""
    single_document: bool = False
    most_tokens: int = 1 << 30
    multiple: int = 1
    extra_versions: tuple[str, ...] = field(default=())

    def find_version(self) -> str:
        """See :class:`Implementation`."""
        try:
            versions = [f"{name} {metadata.version(name)}" for name in (self.distribution, *self.extra_versions)]
        except metadata.PackageNotFoundError as error:
            raise PeerMissingError(f"not installed: {error.name}", where=self.name) from error
        if self.module:
            try:
                import_module(self.module)
            except ImportError as error:
                raise PeerMissingError(f"cannot be imported: {error}", where=self.name) from error
        return ", ".join(versions)

    def refuse(self, case: Case) -> str | None:
        """See :class:`Implementation`."""
        if self.single_document and len(case.lengths) > 1:
            return "no packed documents"
        if case.tokens > self.most_tokens:
            return f"only up to {self.most_tokens:,} tokens"
        if case.tokens % self.multiple:
            return f"only multiples of {self.multiple} tokens"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        """See :class:`Implementation`."""
        return self.make(operands)


def list_implementations() -> tuple[Implementation, ...]:
    """Ours first, then the reference, then peers: dense, sparse."""
    from msa_vendored.bench import ours, peers

    return (*ours.IMPLEMENTATIONS, *peers.IMPLEMENTATIONS)
