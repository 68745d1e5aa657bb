"""Errors of the build-time tools: one class per exit code of ``python -m msa_vendored.vendoring``.

nox flattens every non-zero exit to 1, so the code is also printed as a tag, ``MSAV12`` (``MSAVendoredError.tag``).
"""

from __future__ import annotations

from msa_vendored.errors import MSAVendoredError


class UsageError(MSAVendoredError):
    """An argument, or a combination of arguments, that the command does not accept."""

    exit_code = 2


class DriftError(MSAVendoredError):
    """A tree has missing, extra or changed files, or files of another mode, compared with its manifest."""

    exit_code = 10


class BadHashError(MSAVendoredError):
    """A downloaded or given archive has another digest than the pin's."""

    exit_code = 11


class PatchError(MSAVendoredError):
    """A patch or its header cannot be read, or a pre-image, hunk or post-image is not the expected one."""

    exit_code = 12


class ConflictError(MSAVendoredError):
    """A rebase stopped because upstream changed the lines that a patch replaces."""

    exit_code = 13


class UpstreamedError(MSAVendoredError):
    """A patch has become superfluous: the source already contains what it does."""

    exit_code = 14


class BusyError(MSAVendoredError):
    """Another process holds the lock of the folder to be written, and did not release it in time."""

    exit_code = 15


class OfflineError(MSAVendoredError):
    """Something must be fetched, but ``--offline`` was given or the network did not deliver it."""

    exit_code = 16


class ArchiveError(MSAVendoredError):
    """An archive has a member that is refused: a link, an escaping path, a case collision, too many or too large."""

    exit_code = 17


class LockError(MSAVendoredError):
    """The lock file cannot be read: an unknown schema or key, a missing key, or a value of the wrong form."""

    exit_code = 18


class MisplacedError(MSAVendoredError):
    """After a rebase a hunk sits in another function or class than before."""

    exit_code = 19


class ObsoleteError(MSAVendoredError):
    """A patch has no object any more: the file that it changes is gone from the new pin."""

    exit_code = 20


class RebaseError(MSAVendoredError):
    """git failed in the scratch repository, or the repository is not in the state that the rebase left it in."""

    exit_code = 21


class CheckError(MSAVendoredError):
    """The patches were carried to the new pin and written, but what the build then runs failed."""

    exit_code = 22
