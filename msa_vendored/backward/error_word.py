"""Errors that only the device sees, reported without waiting for it.

The task build ORs error bits into a word of the call's workspace. If it is not zero in the end, the postprocess makes
the gradients of the call NaN and ORs the bits into a word of the device, which lives as long as the process: captured
graphs keep its address. After each call the host enqueues a copy of the device's word into page-locked memory; the next
call looks there, without synchronising, and raises. A bit stays set until it is raised, so that nothing is lost between
two calls that overlap.
"""

from __future__ import annotations

import threading

import torch

from msa_vendored.backward.checks import ArgumentValueError
from msa_vendored.backward.tasks import BAD_ITEM, BAD_QUERY, BAD_ROW, BAD_WORK_COUNT, OVERFLOW

_MEANINGS = {
    OVERFLOW: "it has more tasks than its tensors can hold if it is valid",
    BAD_WORK_COUNT: "work_count is negative or exceeds the rows of scheduler_metadata",
    BAD_ITEM: "a work item names no row, document or key block, or edges outside its row",
    BAD_ROW: "the work items of a row overlap, leave edges out, or disagree on its key block",
    BAD_QUERY: "the query positions of a row do not ascend, or lie outside its document",
}


class ScheduleError(ArgumentValueError):
    """The device found a schedule inconsistent; gradients of the call that used it are NaN.

    Attributes:
        bits: the error word, see :mod:`msa_vendored.backward.tasks`.
    """

    def __init__(self, bits: int, *, where: str) -> None:
        known = [text for bit, text in _MEANINGS.items() if bits & bit]
        super().__init__(
            "the backward schedule is inconsistent: parts of it were left out, and the gradients were set to NaN",
            where=where,
            expected="the CSR and schedule that build_k2q_csr made for this selection",
            got="; ".join(known) or f"error word {bits:#x}",
            next_command='pass check=True to raise in the call itself; kernels(backend="reference") says where',
        )
        self.bits = bits


class ErrorWord:
    """The error word of one device and its copy on the host.

    Args:
        device: where the word lives. On the CPU, for emulated kernels, the copy is as good as immediate.
    """

    def __init__(self, device: torch.device) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._lock = threading.Lock()

    def enqueue_copy(self) -> None:
        """Copy the word to the host behind everything on the current stream. Does not wait; can be captured."""
        self._seen.copy_(self.word, non_blocking=True)

    def raise_seen(self) -> None:
        """Raise what copies brought so far. Does not wait.

        Raises:
            ScheduleError: an earlier call on this device had an inconsistent schedule. It is forgotten then.
        """
        bits = int(self._seen)
        if bits:
            self._forget()
            raise ScheduleError(bits, where="an earlier call of run_backward on this device")

    def raise_now(self) -> None:
        """Wait for the current stream and raise what is in the word.

        Raises:
            ScheduleError: this call or an earlier one that was not yet reported. It is forgotten then.
        """
        bits = int(self.word)
        if bits:
            self._forget()
            raise ScheduleError(bits, where="argument schedule")

    def _forget(self) -> None:
        with self._lock:
            self.word.zero_()
            self._seen.zero_()


_words: dict[torch.device, ErrorWord] = {}
_words_lock = threading.Lock()


def find_error_word(device: torch.device) -> ErrorWord | None:
    """The word of a device, None before the first call there. ``device`` has an index."""
    return _words.get(device)


def get_error_word(device: torch.device) -> ErrorWord:
    """The word of a device, made at the first call. ``device`` has an index."""
    with _words_lock:
        if device not in _words:
            _words[device] = ErrorWord(device)
        return _words[device]
