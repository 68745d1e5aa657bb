"""Runs the backward stages that are not the main kernel, on the emulator or on a card, and says what is right.

``python -m stage_runs ARCH [FOLDER]`` emulates the checks of this module for an architecture and prints a JSON line for
each; with a folder, results of :func:`parity_inputs` go there instead, for a comparison with a card bit for bit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dq_scale_cases import SCALE_CHECKS
from task_cases import TaskCase, corruptions, make_task_case

from msa_vendored.backward.pool_order import (
    ROW_ORDER,
    SM90_DKV_ORDER,
    SM100_DKV_ORDER,
    element_index,
    head_group_order,
    parse_order,
)
from msa_vendored.backward.task_mirror import Geometry, build_tasks
from msa_vendored.backward.tasks import (
    descriptor_words,
    grid_bound,
    plan_scratch,
    queries_per_task,
    task_capacity,
)

POISON = -(1 << 30)
Launch = Callable[..., None]

POOLS = {
    "sm90 fp32": ("fp32", ROW_ORDER, SM90_DKV_ORDER),
    "sm100 fp32": ("fp32", head_group_order(4), SM100_DKV_ORDER),
    "sm100 bf16": ("bf16", head_group_order(8), SM100_DKV_ORDER),
}
"""dtype and order of dQ, order of dK and dV, as :func:`compile_postprocess` takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTables:
    """Outputs of the task build, poisoned before the launch, and its geometry."""

    geometry: Geometry
    scratch: torch.Tensor
    meta: torch.Tensor
    query_rows: torch.Tensor
    query_positions: torch.Tensor
    descriptor: torch.Tensor
    error_word: torch.Tensor

    @classmethod
    def allocate(
        cls,
        case: TaskCase,
        *,
        ratio: int = 16,
        window: int = 64,
        capacity: int | None = None,
        multiprocessors: int = 8,
        walk: str = "even",
        device: str = "cpu",
    ) -> DeviceTables:
        heads, rows = case.row_ptr.shape[0], case.row_ptr.shape[1] - 1
        edges, items = case.q_indices.shape[1], case.scheduler_metadata.shape[0]
        window = case.tokens if walk == "blocks" else window
        windows = -(-case.tokens // window) if walk == "windows" else 1
        if capacity is None:
            capacity = task_capacity(edges, items, heads, ratio, rows=rows, windows=windows)
        grid = grid_bound(capacity, multiprocessors)
        geometry = Geometry(case.tokens, case.workspace_rows, ratio, window, capacity, grid, walk=walk)
        words = plan_scratch(heads, rows, case.tokens, case.workspace_rows, window, walk=walk).words
        width = queries_per_task(ratio)

        def poisoned(*shape: int) -> torch.Tensor:
            return torch.full(shape, POISON, dtype=torch.int32, device=device)

        tables = (poisoned(capacity, 4), poisoned(capacity, width), poisoned(capacity, width))
        descriptor = poisoned(descriptor_words(heads, case.tokens, case.workspace_rows, window, walk))
        return cls(geometry, poisoned(words), *tables, descriptor, torch.zeros(1, dtype=torch.int32, device=device))

    def arguments(self, case: TaskCase) -> tuple[Any, ...]:
        """What the compiled build takes."""
        g = self.geometry
        schedule = (case.row_ptr, case.q_indices, case.scheduler_metadata, case.work_count, case.cu_seqlens)
        tables = (self.scratch, self.meta, self.query_rows, self.query_positions, self.descriptor, self.error_word)
        sizes = (g.tokens, g.workspace_rows, g.window, g.grid, g.rows_per_chunk)
        return (*schedule, case.document_workspace_starts, *tables, *sizes)

    def require_equal(self, case: TaskCase) -> None:
        """The mirror's tables, bit for bit, and not a word beyond them."""
        expected = build_tasks(case.to("cpu"), self.geometry)
        words = expected.descriptor.shape[0]
        assert self.descriptor[:words].tolist() == expected.descriptor.tolist()
        assert bool((self.descriptor[words:] == POISON).all())
        assert int(self.error_word) == expected.error_word
        tasks = expected.meta.shape[0]
        for name in ("meta", "query_rows", "query_positions"):
            got = getattr(self, name)
            assert torch.equal(got[:tasks].cpu(), torch.from_numpy(getattr(expected, name))), name
            assert bool((got[tasks:] == POISON).all()), f"{name} beyond the last task"


def delta_model(out: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """The delta stage in its own order of additions; a product of two bf16 and its sum with an fp32 fit a double."""
    a, b = (t.double().view(*t.shape[:2], 16, 8) for t in (out, grad_out))
    total = (a[..., 0] * b[..., 0]).float()
    for k in range(1, 8):
        total = (a[..., k] * b[..., k] + total.double()).float()
    lanes = torch.arange(16, device=out.device)
    for step in (8, 4, 2, 1):
        total = total + total[..., lanes ^ step]
    return total[..., 0].contiguous()


def to_pool(rows: torch.Tensor, order: str, inner: int = 1) -> torch.Tensor:
    """``[rows, 128]`` as the flat pool of an order: from (outer, row of tile, inner) to tiles by (outer, inner)."""
    tile_rows = 1 << (len(parse_order(order)) - 7)
    index = torch.tensor([element_index(order, row, d) for row in range(tile_rows) for d in range(128)])
    tiles = rows.view(-1, tile_rows, inner, 128).transpose(1, 2).reshape(-1, tile_rows * 128)
    pool = torch.empty_like(tiles)
    pool[:, index.to(rows.device)] = tiles
    return pool.flatten()


def random_bf16(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)


def postprocess_arguments(
    pools: str, tokens: int, kv_heads: int, workspace_rows: int, seed: int = 0, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Arguments of the compiled stage at 8 query heads for each kv head, and what they must become."""
    dtype, dq_order, dkv_order = POOLS[pools]
    generator = torch.Generator(device).manual_seed(seed)
    dq_rows = torch.randn((tokens * kv_heads * 8, 128), generator=generator, device=device)
    dkv_rows = torch.randn((2 * workspace_rows * kv_heads, 128), generator=generator, device=device)
    dq_rows = dq_rows.to(torch.bfloat16) if dtype == "bf16" else dq_rows
    shapes = (tokens, kv_heads * 8, 128), (2, workspace_rows, kv_heads, 128)
    targets = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device) for shape in shapes]
    expected = [
        source.to(torch.bfloat16).view(shape) for source, shape in zip((dq_rows, dkv_rows), shapes, strict=True)
    ]
    pool_pair = to_pool(dq_rows, dq_order), to_pool(dkv_rows, dkv_order, kv_heads)
    return [pool_pair[0], targets[0], pool_pair[1], targets[1]], expected


def parity_inputs() -> tuple[TaskCase, list[torch.Tensor]]:
    """Inputs of the comparison between emulator and card: a schedule; out and dO with tiny, huge and equal values."""
    out, grad = random_bf16(53, 12, 128, seed=1), random_bf16(53, 12, 128, seed=2)
    out[3] *= 2.0**-126
    grad[4] *= 2.0**120
    out[5], grad[5] = 1.0, -1.0
    return make_task_case([300, 129, 5, 1], seed=5, hot_block=True), [out, grad]


class Emulated:
    """Compiled stages, launched in the emulator; every launch must be free of findings."""

    def __init__(self, arch: str) -> None:
        from ptx_emulator import cute_host, emulate

        cute_host.prepare(arch)
        from msa_vendored.backward.delta import compile_delta
        from msa_vendored.backward.dq_scale import compile_key_maxima
        from msa_vendored.backward.postprocess import compile_postprocess
        from msa_vendored.backward.task_build import compile_task_build

        self.arch, self.instructions = arch, 0
        self._emulate, self._load = emulate, cute_host.CompiledFunction
        self._compile: dict[str, Any] = {
            "delta": compile_delta,
            "tasks": compile_task_build,
            "postprocess": compile_postprocess,
            "key_maxima": compile_key_maxima,
        }
        self._functions: dict[tuple[Any, ...], Any] = {}

    def launch(self, stage: str, *arguments: Any, schedule: str = "eager", seed: int = 0, **options: Any) -> None:
        key = (stage, *options.items())
        if key not in self._functions:
            self._functions[key] = self._load(self._compile[stage](arch=self.arch, **options))
        report = self._emulate(self._functions[key], *arguments, schedule=schedule, seed=seed)
        report.require_clean()
        self.instructions += sum(launch.instructions for launch in report.launches)

    def build(self, case: TaskCase, *, schedule: str = "eager", seed: int = 0, **options: Any) -> DeviceTables:
        tables = DeviceTables.allocate(case, **options)
        options_compiled = {"ratio": tables.geometry.ratio, "walk": tables.geometry.walk}
        self.launch("tasks", *tables.arguments(case), schedule=schedule, seed=seed, **options_compiled)
        tables.require_equal(case)
        return tables


def check_delta(run: Emulated) -> None:
    for tokens, heads in ((7, 4), (1, 1), (33, 64), (5, 3)):
        out, grad = random_bf16(tokens, heads, 128, seed=1), random_bf16(tokens, heads, 128, seed=2)
        delta = torch.full((tokens, heads), torch.nan)
        run.launch("delta", out, grad, delta, schedule="random", seed=tokens)
        assert torch.equal(delta, delta_model(out, grad))
        assert torch.allclose(delta.double(), (out.double() * grad.double()).sum(-1), atol=1e-5)


def check_postprocess(run: Emulated, pools: str) -> None:
    dtype, dq_order, dkv_order = POOLS[pools]
    options: dict[str, Any] = {"dq_dtype": dtype, "dq_order": dq_order, "dkv_order": dkv_order}
    for tokens, kv_heads, workspace_rows in ((7, 4, 128), (1, 1, 256), (33, 2, 256)):
        arguments, expected = postprocess_arguments(pools, tokens, kv_heads, workspace_rows, seed=tokens)
        run.launch("postprocess", *arguments, **options)
        assert torch.equal(arguments[1], expected[0]), "dq"
        assert torch.equal(arguments[3], expected[1]), "dk, dv"


def check_schedules(run: Emulated) -> None:
    case = make_task_case([127, 129, 1, 2, 3, 5, 128], gap_blocks=1)
    for schedule, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        run.build(case, schedule=schedule, seed=seed)


def check_ratios(run: Emulated, ratio: int) -> None:
    for seed, documents in enumerate(([300, 7], [128], [1], [520, 129, 2])):
        case = make_task_case(documents, heads=1 + seed, topk=3, seed=seed, hot_block=seed == 3)
        run.build(case, ratio=ratio, window=(1, 16, 128, 512)[seed], multiprocessors=(1, 8, 148, 3)[seed])


def check_corruptions(run: Emulated) -> None:
    case = make_task_case([300, 129, 5], heads=2)
    for name, bit, change in corruptions(case):
        for walk in ("even", "windows"):
            tables = run.build(change(case), walk=walk)
            assert int(tables.error_word) & bit, name


def check_owned(run: Emulated, walk: str, ratio: int) -> None:
    """Walks in which one CTA owns what it adds to; the last case has more windows, or blocks, than threads."""
    for seed, documents in enumerate(([300, 7], [1], [520, 129, 2])):
        case = make_task_case(documents, heads=1 + seed, topk=3, seed=seed, hot_block=seed == 2)
        for window, capacity in ((16, None), (100, None), (100, 7)):
            run.build(case, walk=walk, ratio=ratio, window=window, capacity=capacity)
    run.build(make_task_case([1] * 280 + [30], heads=1, topk=1), walk=walk, ratio=ratio, window=1)


def check_overflow(run: Emulated) -> None:
    case = make_task_case([300, 200])
    for capacity in (1, 11, 400):
        assert int(run.build(case, capacity=capacity).error_word) == (capacity < 100)


def check_many_blocks(run: Emulated) -> None:
    """More key blocks than threads, more windows than threads, more items than one CTA reads."""
    run.build(make_task_case([1] * 300 + [70], heads=1, gap_blocks=1, topk=1), window=1)
    run.build(make_task_case([1200], heads=2, edges_per_item=4), window=4)


CHECKS: dict[str, Callable[[Emulated], None]] = {
    "delta": check_delta,
    **{f"postprocess {name}": lambda run, name=name: check_postprocess(run, name) for name in POOLS},  # type: ignore[misc]
    "tasks, four schedules": check_schedules,
    **{f"tasks, ratio {r}": lambda run, r=r: check_ratios(run, r) for r in (1, 4, 16)},  # type: ignore[misc]
    **{
        f"tasks, walk by {walk}, ratio {ratio}": lambda run, walk=walk, ratio=ratio: check_owned(run, walk, ratio)  # type: ignore[misc]
        for walk, ratio in (("windows", 16), ("windows", 1), ("blocks", 16))
    },
    "tasks, inconsistent schedules": check_corruptions,
    "tasks, overflow": check_overflow,
    "tasks, many blocks, windows and items": check_many_blocks,
    **SCALE_CHECKS,
}
SM100_CHECKS = ("delta", "postprocess sm100 bf16", "tasks, four schedules")
"""What CI emulates for SM100: the same sources, other instructions."""


def save_parity(run: Emulated, folder: Path) -> None:
    case, (out, grad) = parity_inputs()
    delta = torch.full(out.shape[:2], torch.nan)
    run.launch("delta", out, grad, delta)
    tables = run.build(case)
    saved = {"delta": delta, "meta": tables.meta, "query_rows": tables.query_rows, "scratch": tables.scratch}
    for pools, (dtype, dq_order, dkv_order) in POOLS.items():
        arguments, _ = postprocess_arguments(pools, 9, 2, 128)
        run.launch("postprocess", *arguments, dq_dtype=dtype, dq_order=dq_order, dkv_order=dkv_order)
        saved |= {f"{pools} dq": arguments[1], f"{pools} dkv": arguments[3]}
    torch.save(saved, folder / "emulated.pt")


def run_checks(arch: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    run = Emulated(arch)
    for name in names:
        started, before, error = time.perf_counter(), run.instructions, ""
        try:
            CHECKS[name](run)
        except Exception as caught:  # noqa: BLE001 - the parent reports it
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.perf_counter() - started
        yield {"name": name, "error": error, "seconds": seconds, "instructions": run.instructions - before}


def main() -> int:
    """Emulate the checks, or save the parity results."""
    arch = sys.argv[1]
    if len(sys.argv) > 2:
        save_parity(Emulated(arch), Path(sys.argv[2]))
        return 0
    for result in run_checks(arch, tuple(CHECKS) if arch == "sm_90a" else SM100_CHECKS):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
