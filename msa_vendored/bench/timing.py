"""Median times by CUDA events over rotating operands."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from msa_vendored.bench.errors import TimeLimitError

WARMUP_CALLS = 3
ITERATIONS = 20
BUDGET_S = 30.0
"""Seconds after which a measurement stops, though not before :data:`LEAST_CALLS`."""
LIMIT_S = 300.0
"""Seconds for one implementation in one case, compilation included."""
LEAST_CALLS = 3
QUOTABLE_CALLS = 20
"""Timed calls from which on a median is quoted without their number."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: median, least and most of ``calls``."""

    median_ms: float
    min_ms: float
    max_ms: float
    calls: int


def time_calls(
    calls: Sequence[Callable[[], Any]],
    *,
    iterations: int = ITERATIONS,
    warmup: int = WARMUP_CALLS,
    budget_s: float = BUDGET_S,
) -> Timing:
    """Time equal calls on different operands in turn, on the current stream.

    Every iteration takes the next operands, so that no call finds the last one's in the L2 cache.

    Args:
        calls: one for each set of operands.
        iterations: timed calls.
        warmup: calls before, at least one for each set of operands.
        budget_s: seconds of timed calls after which no further one is made, if there are :data:`LEAST_CALLS`. As much
            again may go into warming up.
    """
    call_s = warm_up(calls, warmup, budget_s)
    iterations = min(iterations, max(LEAST_CALLS, int(budget_s / call_s)))
    events = []
    for index in range(iterations):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[index % len(calls)]()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in events]
    return Timing(statistics.median(times), min(times), max(times), len(times))


def warm_up(calls: Sequence[Callable[[], Any]], count: int, budget_s: float) -> float:
    """Make ``count`` calls, or one for each set of operands where that takes long; seconds of the last."""
    began = last_s = time.monotonic()
    for index in range(max(count, len(calls))):
        if index >= len(calls) and time.monotonic() - began > budget_s:
            break
        start = time.monotonic()
        calls[index % len(calls)]()
        torch.cuda.synchronize()
        last_s = time.monotonic() - start
    return max(last_s, 1e-6)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after so long; a call that never comes back to Python, such as a wait for the GPU, goes on.

    Only in the main thread, which alone gets signals.

    Raises:
        TimeLimitError: the block takes longer.
    """

    def stop(*unused: object) -> None:
        raise TimeLimitError("it takes too long", where="--limit", expected=f"at most {seconds:g} s", got="more")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_peak_tflops(size: int = 8192) -> float:
    """What cuBLAS reaches on a bf16 GEMM of ``size`` cubed, in the same run: the roof of the plot."""
    a, b = (torch.randn((size, size), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_calls([lambda: a @ b]).median_ms / 1e9


def measure_copy_tb_per_s(size_bytes: int = 1 << 31) -> float:
    """Bandwidth of a device-to-device copy, read and write counted: the slope of the plot."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size_bytes / time_calls([lambda: target.copy_(source)]).median_ms / 1e9
