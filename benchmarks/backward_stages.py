"""Times the stages around the backward's main kernel against a device copy of as many bytes, on one GPU.

``PYTHONPATH=.:tests python benchmarks/backward_stages.py [TOKENS ...]``: 64 heads on 4, top-16, d = 128.
Medians of 21 runs by CUDA events. The copy reads and writes half of the bytes each. The L2 is not flushed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from stage_runs import POOLS, DeviceTables, random_bf16
from task_cases import make_large_case

from msa_vendored.backward.delta import compile_delta
from msa_vendored.backward.postprocess import compile_postprocess
from msa_vendored.backward.task_build import compile_task_build
from msa_vendored.backward.tasks import choose_owned_window

HEADS, KV_HEADS, HEAD_DIM, TOPK = 64, 4, 128, 16
CUDA = "cuda"
ARCH = "sm_90a"


def time_ms(launch: Callable[[], Any], runs: int = 21) -> float:
    """Median milliseconds of a launch on the current stream."""
    launch()
    times = []
    for _ in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return float(median(times))


def time_graph_ms(launch: Callable[[], Any], repeats: int = 10) -> float:
    """Milliseconds of one launch among ``repeats`` in a CUDA graph: without the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            launch()
    return time_ms(graph.replay) / repeats


def report(name: str, milliseconds: float, size_bytes: int) -> None:
    """One line: time, bandwidth, and the time of a copy that moves as many bytes."""
    source = torch.empty(size_bytes // 2, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source))
    rate = size_bytes / milliseconds / 1e9
    print(
        f"{name:34} {milliseconds:8.4f} ms {rate:6.2f} TB/s  copy {copy:8.4f} ms  {milliseconds / copy:5.2f}x",
        flush=True,
    )


def time_delta(tokens: int) -> None:
    """The delta stage."""
    out, grad = (random_bf16(tokens, HEADS, HEAD_DIM, seed=seed, device=CUDA) for seed in (1, 2))
    delta = torch.empty((tokens, HEADS), device=CUDA)
    launch = compile_delta(arch=ARCH)
    report("delta", time_ms(lambda: launch(out, grad, delta)), tokens * HEADS * (4 * HEAD_DIM + 4))


def time_task_build(tokens: int, window: int, walk: str = "even") -> None:
    """The task build, launched by the host and in a graph."""
    case = make_large_case(tokens, TOPK, device=CUDA)
    tables = DeviceTables.allocate(case, window=window, walk=walk, multiprocessors=132, device=CUDA)
    launch, arguments = compile_task_build(arch=ARCH, ratio=HEADS // KV_HEADS, walk=walk), tables.arguments(case)
    edges = int(case.row_ptr[:, -1].sum())
    eager = time_ms(lambda: launch(*arguments))
    tasks = int(tables.descriptor[6])
    size = edges * 4 + tasks * (4 + 2 * 8) * 4
    report(f"tasks, {walk}, {window}", eager, size)
    report(f"tasks, {walk}, {window}, in a graph", time_graph_ms(lambda: launch(*arguments)), size)
    print(f"  {tasks} tasks, {edges} edges, {tables.scratch.numel() * 4 / 1e6:.1f} MB scratch", flush=True)


def time_postprocess(tokens: int, pools: str) -> None:
    """The conversion of one kind of pools; their contents do not matter."""
    dtype, dq_order, dkv_order = POOLS[pools]
    launch = compile_postprocess(arch=ARCH, dq_dtype=dtype, dq_order=dq_order, dkv_order=dkv_order)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    dq_pool = torch.zeros(tokens * HEADS * HEAD_DIM, dtype=kind, device=CUDA)
    dkv_pool = torch.zeros(2 * tokens * KV_HEADS * HEAD_DIM, device=CUDA)
    dq = torch.empty((tokens, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=CUDA)
    dkv = torch.empty((2, tokens, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=CUDA)
    size = sum(t.numel() * t.element_size() for t in (dq_pool, dkv_pool, dq, dkv))
    report(f"postprocess {pools}", time_ms(lambda: launch(dq_pool, dq, dkv_pool, dkv)), size)
    zeroed = dq_pool.numel() * dq_pool.element_size() + dkv_pool.numel() * 4
    fill = time_ms(lambda: (dq_pool.view(torch.int64).zero_(), dkv_pool.view(torch.int64).zero_()))
    print(
        f"  pools of {zeroed / 1e6:.0f} MB zeroed by torch in {fill:.4f} ms: {zeroed / fill / 1e9:.2f} TB/s", flush=True
    )


def main() -> None:
    """Every stage at every number of tokens given."""
    for tokens in [int(argument) for argument in sys.argv[1:]] or [4096, 32_768]:
        print(f"{tokens} tokens, {torch.cuda.get_device_name()}")
        time_delta(tokens)
        for window in (512, 2048):
            time_task_build(tokens, window)
        time_task_build(tokens, choose_owned_window(tokens, tokens, KV_HEADS, 132), "windows")
        time_task_build(tokens, tokens, "blocks")
        for pools in POOLS:
            time_postprocess(tokens, pools)


if __name__ == "__main__":
    main()
