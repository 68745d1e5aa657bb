"""Delta, task build and postprocess on a card: exact at real sizes, in graphs, and equal to the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from child_processes import run_module
from stage_runs import POOLS, DeviceTables, delta_model, parity_inputs, postprocess_arguments, random_bf16
from task_cases import TaskCase, corruptions, make_large_case, make_task_case

from msa_vendored.backward.tasks import WALKS

pytestmark = pytest.mark.gpu

CUDA = "cuda"
ARCH = "sm_90a"


def compiled(stage: str, **options: Any) -> Any:
    """The kernel of a stage, from disk if it is there."""
    from msa_vendored.backward.delta import compile_delta
    from msa_vendored.backward.postprocess import compile_postprocess
    from msa_vendored.backward.task_build import compile_task_build
    from msa_vendored.compiling import load_kernel

    stages: dict[str, Any] = {"delta": compile_delta, "tasks": compile_task_build, "postprocess": compile_postprocess}
    return load_kernel(stages[stage], arch=ARCH, **options)


def postprocess(pools: str) -> Any:
    dtype, dq_order, dkv_order = POOLS[pools]
    return compiled("postprocess", dq_dtype=dtype, dq_order=dq_order, dkv_order=dkv_order)


def build(case: TaskCase, **options: Any) -> DeviceTables:
    tables = DeviceTables.allocate(case, device=CUDA, **options)
    compiled("tasks", ratio=tables.geometry.ratio, walk=tables.geometry.walk)(*tables.arguments(case))
    return tables


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Results of the emulator for the same inputs, from a process of its own."""
    folder = tmp_path_factory.mktemp("parity")
    run_module("stage_runs", ARCH, str(folder), timeout_s=300)
    saved: dict[str, torch.Tensor] = torch.load(folder / "emulated.pt")
    return saved


def test_emulator_and_card_agree_bit_for_bit(emulated: dict[str, torch.Tensor]) -> None:
    """An emulator that models another machine: FTZ, order of operations, rounding, integer division."""
    case, (out, grad) = parity_inputs()
    got = {"delta": torch.full(out.shape[:2], torch.nan, device=CUDA)}
    compiled("delta")(out.to(CUDA), grad.to(CUDA), got["delta"])
    tables = build(case.to(CUDA))
    got |= {"meta": tables.meta, "query_rows": tables.query_rows, "scratch": tables.scratch}
    for pools in POOLS:
        arguments = [tensor.to(CUDA) for tensor in postprocess_arguments(pools, 9, 2, 128)[0]]
        postprocess(pools)(*arguments)
        got |= {f"{pools} dq": arguments[1], f"{pools} dkv": arguments[3]}
    assert got.keys() == emulated.keys()
    for name, tensor in got.items():
        bits = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
        assert torch.equal(tensor.cpu().view(bits), emulated[name].view(bits)), name


@pytest.mark.parametrize("tokens", [1, 4099, 196_608, 262_400])
def test_delta_is_exact(tokens: int) -> None:
    """Rows skipped at the end; element offsets beyond int32 (262,144 tokens of 64 heads)."""
    heads = 64 if tokens > 1 else 3
    out, grad = (random_bf16(tokens, heads, 128, seed=seed, device=CUDA) for seed in (1, 2))
    delta = torch.full((tokens, heads), torch.nan, device=CUDA)
    compiled("delta")(out, grad, delta)
    for start in range(0, tokens, 16_384):
        part = slice(start, start + 16_384)
        assert torch.equal(delta[part], delta_model(out[part], grad[part]))


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("tokens", [5, 2048])
def test_postprocess_is_exact(pools: str, tokens: int) -> None:
    """A permutation that differs from the main kernel's; granules skipped at the end."""
    arguments, expected = postprocess_arguments(pools, tokens, 4, max(128, tokens), device=CUDA)
    postprocess(pools)(*arguments)
    assert torch.equal(arguments[1], expected[0])
    assert torch.equal(arguments[3], expected[1])


def test_postprocess_beyond_int32() -> None:
    """Element offsets of 32 bits: 262,400 tokens of 64 heads."""
    tokens, heads = 262_400, 64
    pool = torch.arange(tokens * heads, dtype=torch.int32, device=CUDA).remainder_(251).float()
    pool = pool[:, None].expand(-1, 128).contiguous().flatten()
    dq = torch.full((tokens, heads, 128), torch.nan, dtype=torch.bfloat16, device=CUDA)
    dkv_pool = torch.zeros(2 * 128 * 128, device=CUDA)
    postprocess("sm90 fp32")(pool, dq, dkv_pool, torch.empty((2, 128, 1, 128), dtype=torch.bfloat16, device=CUDA))
    expected = torch.arange(tokens * heads, dtype=torch.int32, device=CUDA).remainder_(251).to(torch.bfloat16)
    assert torch.equal(dq.view(-1, 128).amin(1), expected)
    assert torch.equal(dq.view(-1, 128).amax(1), expected)


@pytest.mark.parametrize(("tokens", "window"), [(4096, 512), (32_768, 512), (32_768, 2048), (196_608, 512)])
def test_task_tables_equal_the_mirror(tokens: int, window: int) -> None:
    """Atomics in another order, or blocks in another order, must not change a word."""
    case = make_large_case(tokens, 16, device=CUDA)
    for _ in range(2):
        build(case, window=window, multiprocessors=132).require_equal(case)


@pytest.mark.parametrize(("walk", "window"), [("windows", 993), ("blocks", 32_768)])
def test_walks_by_owners_equal_the_mirror(walk: str, window: int) -> None:
    """A chunk listed twice or not at all: gradients that are not repeatable, or missing."""
    case = make_large_case(32_768, 16, device=CUDA)
    build(case, walk=walk, window=window, multiprocessors=132).require_equal(case)


@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("walk", WALKS)
def test_ratios_and_documents(ratio: int, walk: str) -> None:
    """Packed documents of every kind, gaps in the workspace, ragged and shuffled items."""
    case = make_task_case([127, 129, 1, 2, 3, 5, 128, 2177], heads=8, seed=ratio, gap_blocks=1, hot_block=True)
    build(case.to(CUDA), ratio=ratio, walk=walk).require_equal(case)


def test_inconsistent_schedules_are_reported() -> None:
    """A fault of the device, or silence."""
    case = make_task_case([300, 129, 5])
    for name, bit, change in corruptions(case):
        bad = change(case)
        tables = build(bad.to(CUDA))
        tables.require_equal(bad)
        assert int(tables.error_word) & bit, name


def test_a_captured_build_follows_the_selection() -> None:
    """A host sync or a size read on the host: both break capture or leave yesterday's tables. Another stream, too."""
    first, second = (make_large_case(4096, 16, device=CUDA, seed=seed) for seed in (1, 2))
    launch = compiled("tasks", ratio=16, walk="even")
    tables = DeviceTables.allocate(first, device=CUDA, window=512, multiprocessors=132)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        launch(*tables.arguments(first))
    for name in ("row_ptr", "q_indices", "scheduler_metadata", "work_count"):
        getattr(first, name).copy_(getattr(second, name))
    graph.replay()
    torch.cuda.synchronize()
    tables.require_equal(second)
