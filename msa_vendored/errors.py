"""Errors: one base class whose attributes say what, where, expected, got and what to run next.

Every error of this package derives from :class:`MSAVendoredError`, so that callers can branch on attributes
instead of parsing text. Errors of build-time tools also carry the exit code that the command line returns.
"""

from __future__ import annotations

from typing import ClassVar


class MSAVendoredError(Exception):
    """Base of all errors raised by this package.

    Attributes:
        what: one sentence, no trailing full stop.
        where: file, hunk, argument or key path; None if there is no place to point at.
        expected: what would have been accepted.
        got: what was found.
        next_command: the exact command (or action) to go on with.
    """

    exit_code: ClassVar[int] = 1
    """Exit status of the command line; README "Exit codes" lists them all."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        next_command: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.next_command = next_command

    @property
    def tag(self) -> str:
        """Short code printed in front of the message, since nox flattens exit codes to 1: ``MSAV12``."""
        return f"MSAV{self.exit_code}"

    def __str__(self) -> str:
        rows = [
            ("where", self.where),
            ("expected", self.expected),
            ("got", self.got),
            ("next", self.next_command),
        ]
        return "\n".join([self.what, *(f"  {name + ':':<10}{value}" for name, value in rows if value is not None)])


class UnavailableError(MSAVendoredError):
    """The launchers cannot be bound here: something is not built, missing, or of the wrong version.

    Not an ImportError on purpose (the contract of NeMo Automodel): code that swallows ImportError to pick
    another implementation must not swallow this one.
    """
