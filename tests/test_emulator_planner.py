"""The official planner kernel (CUDA C++), compiled by nvcc to PTX, in the emulator.

A plan of fixed splits is compared with the greedy assignment as ``plan.cuh`` describes it, one of adaptive splits with
what any plan must be: every tile of every head once, its key blocks in pieces that do not overlap.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from ptx_emulator import Kernel, Report, Suppression, emulate, load_kernels

import msa_vendored
from msa_vendored.installed import PACKAGE_DIR
from msa_vendored.toolchain import find_nvcc, nvcc_release

NVCC = find_nvcc()
pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(
        NVCC is None or nvcc_release(NVCC) < (12, 9), reason="the planner needs an nvcc of release 12.9 or later"
    ),
]
ITERATION, TILE, SM = 43, 110, 165
"""Cost of one key tile, of a query tile and of an SM: kPerIterOverhead and the like of plan.cuh."""
MIN_ITERATIONS_PER_SPLIT = 4
# Between warps, and between the lanes of warp 0.
RACES = tuple(
    Suppression(
        kind,
        "plan_kernel",
        "block_reduce_cost is called again while its result is still read: docs/findings/",
        source="plan.cuh",
    )
    for kind in ("shared-race", "lane-race")
)
SOURCE = '#include "plan.cuh"\n__device__ const int plan_state_bytes = sizeof(flashinfer::PlanSharedState);\n'


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan is made for: lengths of each document, heads, SMs, tile sizes, splits (negative: at most)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    sms: int
    splits: int
    causal: bool = True
    query_tile: int = 128
    key_tile: int = 256


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work: query tile, head, document, key tiles from begin to end, number of the split."""

    query_tile: int
    head: int
    document: int
    begin: int
    end: int
    split: int


@dataclass(slots=True)
class Plan:
    """What the kernel wrote: tasks of each SM, splits of each row, the two costs."""

    tasks: list[list[Task]]
    row_splits: list[int]
    costs: list[float]
    report: Report


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kernel, int]:
    """The planner and the bytes of its shared memory."""
    folder = tmp_path_factory.mktemp("planner")
    (header,) = (PACKAGE_DIR / msa_vendored.provenance().folder).rglob("plan.cuh")
    source, target = folder / "plan.cu", folder / "plan.ptx"
    source.write_text(SOURCE, "utf-8")
    include = f"-I{header.parent}"
    command = [str(NVCC), "-ptx", "-std=c++17", "-arch=sm_90", "-lineinfo", include, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = target.read_text("utf-8")
    size = re.search(r"plan_state_bytes = (\d+)", text)
    assert size is not None
    (loaded,) = load_kernels(text).values()
    return loaded, int(size.group(1))


def run(
    kernel: tuple[Kernel, int],
    problem: Problem,
    schedule: str,
    seed: int = 0,
    suppress: tuple[Suppression, ...] = (),
) -> Plan:
    """One launch, as the host code of the planner makes it."""
    capacity = 4096
    offsets = [sum(problem.queries[:i]) for i in range(len(problem.queries) + 1)]
    inputs = [torch.tensor(t, dtype=torch.int32) for t in (offsets, problem.queries, problem.keys)]
    ranges = torch.full((problem.sms,), -1, dtype=torch.int64)
    info = torch.full((capacity,), -1, dtype=torch.int64)
    begin, end, split = (torch.full((capacity,), -1, dtype=torch.int32) for _ in range(3))
    costs, rows, lse = torch.zeros(2), torch.zeros(offsets[-1], dtype=torch.int32), torch.zeros(50)
    report = emulate(
        kernel[0], *inputs, ranges, info, problem.query_tile, problem.key_tile, len(problem.queries), problem.heads,
        problem.sms, int(problem.causal), 0, problem.splits, begin, end, split, 0, costs, rows, lse, 50, 1,
        block=(256, 1, 1), shared_bytes=kernel[1], schedule=schedule, seed=seed, suppress=suppress,
        names=("qo_offsets", "qo_lens", "kv_lens", "ranges", "info", "begin", "end", "split", "costs", "rows", "lse"),
    )  # fmt: skip
    if report.fatal is None:
        assert torch.isinf(lse).all()
        assert (lse < 0).all()
    words = list(zip(info.tolist(), begin.tolist(), end.tolist(), split.tolist(), strict=True))
    everything = [Task(word >> 32, word >> 16 & 0xFFFF, word & 0xFFFF, *rest) for word, *rest in words]
    tasks = [everything[word & 0xFFFFFFFF : word >> 32] for word in ranges.tolist()]
    return Plan(tasks, rows.tolist(), costs.tolist(), report)


def key_tiles(problem: Problem, document: int, query_tile: int) -> int:
    """Key tiles that a query tile reads."""
    keys = problem.keys[document]
    if problem.causal:
        keys = min(keys, (query_tile + 1) * problem.query_tile + keys - problem.queries[document])
    return -(-max(keys, 0) // problem.key_tile)


def query_tiles(problem: Problem) -> list[tuple[int, int, int]]:
    """(query tile, document, key tiles), last query tiles first, those without keys left out."""
    counts = [-(-n // problem.query_tile) for n in problem.queries]
    tiles = [(tile, d) for tile in reversed(range(max(counts))) for d, n in enumerate(counts) if tile < n]
    sizes = [(tile, d, key_tiles(problem, d, tile)) for tile, d in tiles]
    return [size for size in sizes if size[2] > 0]


def assign_greedily(problem: Problem) -> tuple[list[list[Task]], int]:
    """The tasks of each SM and the largest cost: as many heads at a time as there are SMs, the cheapest SM first."""
    tasks: list[list[Task]] = [[] for _ in range(problem.sms)]
    costs = [SM] * problem.sms
    for tile, document, iterations in query_tiles(problem):
        splits = min(problem.splits, max(1, iterations // MIN_ITERATIONS_PER_SPLIT)) if problem.splits > 1 else 1
        step = -(-iterations // splits)
        for split in range(splits):
            begin, end = split * step, min((split + 1) * step, iterations)
            for first in range(0, problem.heads, problem.sms):
                order = sorted(range(problem.sms), key=lambda sm: (costs[sm], sm))
                for head, sm in zip(range(first, problem.heads), order, strict=False):
                    tasks[sm].append(Task(tile, head, document, begin, end, split))
                    costs[sm] += ITERATION * (end - begin) + TILE
    return tasks, max(costs)


FIXED = {
    "one_document": Problem((700,), (700,), 8, 4, 1),
    "more_sms_than_heads": Problem((300, 129), (300, 1500), 3, 7, 1),
    "three_splits": Problem((256, 90), (5000, 4000), 4, 6, 3),
    "not_causal": Problem((128, 1, 257), (40, 900, 300), 2, 5, 2, causal=False),
    "queries_before_all_keys": Problem((600,), (200,), 2, 3, 1),
}


@pytest.mark.parametrize(("schedule", "seed"), [("eager", 0), ("random", 1)])
@pytest.mark.parametrize("name", FIXED)
def test_fixed_splits_are_the_greedy_assignment(
    kernel: tuple[Kernel, int], name: str, schedule: str, seed: int
) -> None:
    """Block reductions and ranks over 256 threads: any wrong order, barrier or shuffle changes the plan."""
    problem = FIXED[name]
    plan = run(kernel, problem, schedule, seed)
    plan.report.require_clean()
    tasks, cost = assign_greedily(problem)
    assert plan.tasks == tasks
    assert plan.costs == [cost, cost]


ADAPTIVE = {
    "long_keys": Problem((128,), (20_000,), 4, 16, -8),
    "two_documents": Problem((200, 90), (9_000, 3_000), 2, 12, -6),
}


@pytest.mark.parametrize(("schedule", "seed"), [("eager", 0), ("random", 1)])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_splits_cover_every_tile_once(kernel: tuple[Kernel, int], name: str, schedule: str, seed: int) -> None:
    """Pieces of a tile that overlap, are missing, or are counted wrongly for the combine."""
    problem = ADAPTIVE[name]
    plan = run(kernel, problem, schedule, seed, RACES)
    plan.report.require_clean()
    assert {suppression for _, suppression in plan.report.suppressed} == set(RACES)
    assert plan.costs[0] == 1  # split
    pieces: dict[tuple[int, int, int], list[Task]] = {}
    for task in (task for tasks in plan.tasks for task in tasks):
        pieces.setdefault((task.query_tile, task.head, task.document), []).append(task)
    wanted = {(tile, head, d): n for tile, d, n in query_tiles(problem) for head in range(problem.heads)}
    assert pieces.keys() == wanted.keys()
    for key, iterations in wanted.items():
        ordered = sorted(pieces[key], key=lambda task: task.begin)
        assert [t.begin for t in ordered] == [0, *(t.end for t in ordered[:-1])]
        assert ordered[-1].end == iterations
        assert sorted(t.split for t in ordered) == list(range(len(ordered)))
        assert len(ordered) <= -problem.splits
    assert plan.row_splits == expect_row_splits(problem, pieces)


def expect_row_splits(problem: Problem, pieces: dict[tuple[int, int, int], list[Task]]) -> Sequence[int]:
    """Splits of each query row: the most of its tile over the heads."""
    return [
        max(len(pieces.get((row // problem.query_tile, head, d), [0])) for head in range(problem.heads))
        for d, count in enumerate(problem.queries)
        for row in range(count)
    ]
