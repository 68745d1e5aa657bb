"""Runs the SM90 index, score and selection kernels in the emulator: ``python -m hopper_kernels``.

Prints one JSON line for each case; an exception in one is its result. A process of its own, because the DSL reads its
target when it is imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ptx_emulator import cute_host
from torch import Tensor

POISON = -777_777


class Emulation:
    """Stands in for ``load_kernel``: compiles with the DSL, launches in the emulator. One schedule at a time."""

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}
        self.schedule: tuple[str, int] = ("eager", 0)

    def load(self, compile_stage: Callable[..., Any], *, arch: str, **options: Any) -> Callable[..., None]:
        """What a launcher calls to get its kernel."""
        from ptx_emulator import emulate

        key = f"{compile_stage.__qualname__} {options}"
        if key not in self.compiled:
            self.compiled[key] = compile_stage(arch=arch, **options)

        def launch(*arguments: Any) -> None:
            names = [f"argument {position}" for position, _ in enumerate(arguments)]
            schedule, seed = self.schedule
            emulate(self.compiled[key], *arguments, schedule=schedule, seed=seed, names=names).require_clean()

        return launch


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Tensors from ``new_empty`` and ``empty`` filled with NaN or :data:`POISON`: an unwritten element shows."""
    originals = Tensor.new_empty, torch.empty

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else POISON)

    Tensor.new_empty = lambda self, *a, **k: fill(originals[0](self, *a, **k))
    torch.empty = lambda *a, **k: fill(originals[1](*a, **k))
    try:
        yield
    finally:
        Tensor.new_empty, torch.empty = originals


def run_index(
    emulation: Emulation, lengths: Sequence[int], keys: Sequence[int], topk: int, heads: int, ratio: int, spare: int
) -> None:
    """CSR and schedule against the reference, bit for bit."""
    from msa_vendored.hopper import csr
    from msa_vendored.reference import build_k2q_csr, cases

    case = cases.make_case(
        list(lengths), list(keys), topk=topk, index_heads=heads, heads_per_index_head=ratio, head_dim=8,
        own_block=lengths == keys,
    )  # fmt: skip
    rows = sum(-(-count // 128) for count in keys) + spare
    operands = case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k
    sizes = {"total_k": sum(keys), "max_seqlen_k": max(keys), "max_seqlen_q": max(lengths), "total_rows": rows}
    want = build_k2q_csr(*operands, 128, **sizes, qhead_per_kv=ratio, return_schedule=True)
    with poisoned_empty():
        got = csr.build_with_kernels(*operands, rows, ratio, emulation.load)
    assert torch.equal(got[0], want[0]), "row_ptr"
    assert torch.equal(got[1], want[1]), "q_indices"
    for name in ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts"):
        mine, theirs = getattr(got[2], name), getattr(want[-1], name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    assert got[2].target_q_per_cta == want[-1].target_q_per_cta


def run_too_few_rows(emulation: Emulation) -> None:
    """The exact-rows trap: two documents of 64 keys are two rows, not 128 // 128."""
    from msa_vendored.hopper import csr
    from msa_vendored.reference import cases

    case = cases.make_case([64, 64], topk=4, index_heads=1, heads_per_index_head=1, head_dim=8)
    operands = case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k
    csr.build_with_kernels(*operands, 2, 1, emulation.load)
    with pytest.raises(RuntimeError, match="total_rows is smaller"):
        csr.build_with_kernels(*operands, 1, 1, emulation.load)


def run_unusable_selections(emulation: Emulation) -> None:
    """The device-side assertion of the index fires for what the training API calls unusable, and for nothing else."""
    from msa_vendored.hopper import csr
    from msa_vendored.training.checks import usable_queries

    bounds = torch.tensor([0, 300, 400], dtype=torch.int32)
    for edit in ([0, 1, 2, -1], [2, 0, 1, -1], [0, 0, -1, -1], [3, -1, -1, -1], [0, -1, 1, -1], [-2, -1, -1, -1]):
        ids = torch.tensor([0, -1, -1, -1], dtype=torch.int32).repeat(2, 400, 1)
        ids[1, 290] = torch.tensor(edit, dtype=torch.int32)

        def build(ids: Tensor = ids) -> Any:
            return csr.build_with_kernels(ids, bounds, bounds, 4, 1, emulation.load, check_selection=True)

        if bool(usable_queries(ids, bounds).all()):
            build()
            continue
        with pytest.raises(RuntimeError, match="repeat a block"):
            build()


def score_both(
    emulation: Emulation,
    lengths: Sequence[int],
    keys: Sequence[int],
    heads: int,
    key_heads: int,
    ctas: int,
    **plan: Any,
) -> tuple[Tensor, Tensor]:
    """Scores of the kernel and of the reference; integers, so that both are exact."""
    from msa_vendored.hopper import score, score_tables
    from msa_vendored.reference import fmha_sm100, fmha_sm100_plan

    torch.manual_seed(sum(lengths))
    q = torch.randint(-4, 5, (sum(lengths), heads, 128)).bfloat16()
    k = torch.randint(-4, 5, (sum(keys), key_heads, 128)).bfloat16()
    options: dict[str, Any] = {"output_maxscore": True, "num_kv_heads": key_heads, **plan}
    planned = fmha_sm100_plan(torch.tensor(lengths), torch.tensor(keys), heads, **options)
    _, want = fmha_sm100(q, k, k, planned, output_o=False)
    got = torch.full_like(want, -torch.inf)
    offsets = planned[3]["qo_offset"] if plan.get("causal", True) else [score_tables.NO_LIMIT] * len(keys)
    segments = score_tables.make_segments(lengths, keys, offsets)
    tables = score_tables.ScoreTables(segments, score_tables.cut_segments(segments, ctas))
    score.launch_scores(q, k, tables, got, emulation.load)
    return got, want


def run_scores(emulation: Emulation, *arguments: Any, **plan: Any) -> None:
    """Scores equal to the reference's, and -inf in the same places."""
    got, want = score_both(emulation, *arguments, **plan)
    assert torch.equal(got, want), f"{int((got != want).sum())} of {want.numel()} differ"


def run_selection(emulation: Emulation, lengths: Sequence[int], topk: int, init: int, local: int, budget: int) -> None:
    """Scores and ranking in chunks, against the reference's ranking; integers make ties."""
    from msa_vendored.hopper import score, select
    from msa_vendored.training import Microbatch, select_blocks

    torch.manual_seed(topk)
    tokens = sum(lengths)
    index_q, index_k = (torch.randint(-1, 2, (tokens, heads, 128)).bfloat16() for heads in (4, 1))
    batch = Microbatch.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), (init, local))
    plan = score.fmha_sm100_plan(batch.lengths, batch.key_lengths, 4, num_kv_heads=1, output_maxscore=True)[3]
    assert isinstance(plan, score.ScorePlan)
    want = select_blocks(index_q, index_k, batch, topk=topk)
    chunks = tuple(select.make_chunks(plan, torch.device("cpu"), ctas=2, budget=budget))
    with poisoned_empty():
        got = select.select_in_chunks(
            index_q, index_k, chunks, batch.document_positions, init=init, local=local, topk=topk, load=emulation.load
        )
    assert torch.equal(got, want), f"{int((got != want).any(2).sum())} of {want.shape[1]} queries differ"


def run_fused_selection(
    emulation: Emulation, lengths: Sequence[int], keys: Sequence[int], heads: int, topk: int, init: int, local: int
) -> None:
    """Scores and ranking in one kernel, against the reference's ranking; integers make ties."""
    from msa_vendored.hopper import score, select
    from msa_vendored.training import Microbatch, select_blocks

    torch.manual_seed(topk + heads)
    index_q = torch.randint(-1, 2, (sum(lengths), heads, 128)).bfloat16()
    index_k = torch.randint(-1, 2, (sum(keys), 1, 128)).bfloat16()
    bounds, key_bounds = (torch.tensor([0, *counts]).cumsum(0) for counts in (lengths, keys))
    batch = Microbatch.from_cu_seqlens(bounds, (init, local), key_cu_seqlens=key_bounds)
    plan = score.fmha_sm100_plan(batch.lengths, batch.key_lengths, heads, num_kv_heads=1, output_maxscore=True)[3]
    assert isinstance(plan, score.ScorePlan)
    want = select_blocks(index_q, index_k, batch, topk=topk)
    work = select.share_segments(plan, torch.device("cpu"), ctas=2)
    with poisoned_empty():
        got = select.select_fused(
            index_q, index_k, work, init=init, local=local, topk=topk, load=emulation.load
        )  # fmt: skip
    assert torch.equal(got, want), f"{int((got != want).any(2).sum())} of {want.shape[1]} queries differ"


def run_ranking(emulation: Emulation, topk: int) -> None:
    """NaN, infinities, zeros of both signs and ties, ranked as the reference ranks them."""
    from msa_vendored.hopper.select_kernel import compile_select
    from msa_vendored.training.selection import rank_blocks

    torch.manual_seed(topk)
    positions = torch.cat([torch.arange(0, 4700, 59), torch.arange(77)])
    scores = torch.randint(-3, 4, (2, 40, positions.shape[0])).float()
    for value in (torch.nan, torch.inf, -torch.inf, -0.0):
        scores[torch.rand_like(scores) < 0.05] = value
    rank = emulation.load(compile_select, arch="sm_90a", topk=topk)
    for init, local in ((1, 1), (0, 0), (3, 1)):
        ids = torch.full((2, positions.shape[0], topk), POISON, dtype=torch.int32)
        rank(scores, positions, ids, init, local)
        assert torch.equal(ids, rank_blocks(scores, positions, init=init, local=local, topk=topk)), (init, local)


ODD, PREFIX = [300, 129, 1, 2], [420, 129, 128, 300]
CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = {
    "index of odd lengths": (run_index, (ODD, ODD, 4, 4, 16, 0), {}),
    "index with a prefix and spare rows": (run_index, (ODD, PREFIX, 4, 2, 1, 3), {}),
    "index of one document": (run_index, ([641], [641], 4, 1, 2, 0), {}),
    "index with too few rows": (run_too_few_rows, (), {}),
    "index of unusable selections": (run_unusable_selections, (), {}),
    "scores of odd lengths": (run_scores, (ODD, ODD, 4, 1, 2), {}),
    "scores with a prefix, six heads of two": (run_scores, ([130, 37], [700, 37], 6, 2, 1), {}),
    "scores with an offset that hides keys": (run_scores, ([140], [300], 1, 1, 1), {"qo_offset": -70}),
    "scores of all keys": (run_scores, ([70], [260], 4, 1, 2), {"causal": False}),
    "selection in one chunk": (run_selection, ([700, 5, 1], 4, 1, 1, 1 << 20), {}),
    "selection in three chunks": (run_selection, ([700, 5, 1], 4, 0, 0, 4 * 6 * 256), {}),
    "selection in one kernel": (run_fused_selection, ([700, 5, 1], [700, 5, 1], 4, 4, 1, 1), {}),
    "selection in one kernel with a prefix, three heads": (
        run_fused_selection,
        ([60, 130], [700, 200], 3, 4, 0, 0),
        {},
    ),
    "ranking of 16": (run_ranking, (16,), {}),
    "ranking of 32": (run_ranking, (32,), {}),
}
SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))


def main() -> int:
    """Run every case, or those whose names contain the argument, under every schedule."""
    cute_host.prepare("sm_90a")
    emulation = Emulation()
    for name, (run, arguments, options) in CASES.items():
        if sys.argv[1:] and sys.argv[1] not in name:
            continue
        for emulation.schedule in SCHEDULES:
            try:
                run(emulation, *arguments, **options)
                error = ""
            except Exception:  # noqa: BLE001 -- the test that started this reports it
                error = traceback.format_exc()[-3000:]
            print(json.dumps({"case": name, "schedule": emulation.schedule, "error": error}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
