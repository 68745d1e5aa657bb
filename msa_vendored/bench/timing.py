"""Median times by CUDA events over rotating operands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARMUP_CALLS = 3
ITERATIONS = 20
BUDGET_S = 30.0
"""Seconds after which a measurement stops, though not before :data:`MIN_ITERATIONS`."""
MIN_ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: median, least and most of ``calls``."""

    median_ms: float
    min_ms: float
    max_ms: float
    calls: int


def time_calls(
    calls: Sequence[Callable[[], Any]], *, iterations: int = ITERATIONS, warmup: int = WARMUP_CALLS
) -> Timing:
    """Time equal calls on different operands in turn, on the current stream.

    Every iteration takes the next operands, so that no call finds the last one's in the L2 cache.

    Args:
        calls: one for each set of operands.
        iterations: timed calls.
        warmup: calls before, at least one for each set of operands.
    """
    for index in range(max(warmup, len(calls))):
        calls[index % len(calls)]()
    torch.cuda.synchronize()
    began, events = time.monotonic(), []
    for index in range(iterations):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[index % len(calls)]()
        stop.record()
        events.append((start, stop))
        if index + 1 >= min(MIN_ITERATIONS, iterations) and time.monotonic() - began > BUDGET_S:
            break
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in events]
    return Timing(statistics.median(times), min(times), max(times), len(times))


def measure_peak_tflops(size: int = 8192) -> float:
    """What cuBLAS reaches on a bf16 GEMM of ``size`` cubed, in the same run: the roof of the plot."""
    a, b = (torch.randn((size, size), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_calls([lambda: a @ b]).median_ms / 1e9


def measure_copy_tb_per_s(size_bytes: int = 1 << 31) -> float:
    """Bandwidth of a device-to-device copy, read and write counted: the slope of the plot."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size_bytes / time_calls([lambda: target.copy_(source)]).median_ms / 1e9
