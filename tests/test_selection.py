"""select_blocks: forced blocks, causality, ties, -1 tails, and how it drives the score launcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_vendored import kernels
from msa_vendored.bundle import MSAKernels
from msa_vendored.errors import UnavailableError
from msa_vendored.training import (
    ArgumentValueError,
    Microbatch,
    SelectionBufferError,
    StalePlanError,
    select_blocks,
    selection,
)

LENGTHS = st.lists(st.sampled_from([1, 2, 127, 128, 129, 300, 700]), min_size=1, max_size=3)


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def choose_by_hand(
    index_q: torch.Tensor, index_k: torch.Tensor, microbatch: Microbatch, topk: int
) -> list[list[list[int]]]:
    """The rule of the docstring, one query and one block at a time."""
    init, local = microbatch.forced_blocks
    positions = microbatch.document_positions.tolist()
    chosen: list[list[list[int]]] = [[[] for _ in positions] for _ in range(index_q.shape[1])]
    for document in range(microbatch.num_documents):
        keys = index_k[int(microbatch.key_cu_seqlens[document]) : int(microbatch.key_cu_seqlens[document + 1]), 0]
        for token in range(int(microbatch.cu_seqlens[document]), int(microbatch.cu_seqlens[document + 1])):
            own = positions[token] // 128
            visible = [keys[block * 128 : min((block + 1) * 128, positions[token] + 1)] for block in range(own + 1)]
            for head in range(index_q.shape[1]):
                best = [float((block @ index_q[token, head]).max()) for block in visible]
                forced = {block for block in range(own + 1) if block < init or (local > 0 and block == own)}
                order = sorted(range(own + 1), key=lambda block: (block not in forced, -best[block], block))
                ids = sorted(order[:topk])
                chosen[head][token] = ids + [-1] * (topk - len(ids))
    return chosen


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1), (2, 3)]), st.integers(0, 2**31), st.booleans())
def test_selection_is_the_documented_rule(lengths: list[int], forced: tuple[int, int], seed: int, prefix: bool) -> None:
    """Guards order, ties, causality and forced blocks; scores of -2 to 2 make ties the rule, not the exception."""
    generator = torch.Generator().manual_seed(seed)
    lengths_q = [int(torch.randint(1, n + 1, (), generator=generator)) for n in lengths] if prefix else lengths
    microbatch = Microbatch.from_cu_seqlens(bounds(lengths_q), forced, key_cu_seqlens=bounds(lengths))
    index_q = torch.randint(-1, 2, (sum(lengths_q), 2, 2), generator=generator).float()
    index_k = torch.randint(-1, 2, (sum(lengths), 1, 2), generator=generator).float()
    ids = select_blocks(index_q, index_k, microbatch, topk=4)
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert ids.tolist() == choose_by_hand(index_q, index_k, microbatch, 4)


RANKINGS = {
    # scores of four blocks, own block, init, local, topk -> ids
    "highest first": ([1.0, 5.0, 3.0, 2.0], 3, 0, 0, 2, [1, 2]),
    "tie goes to the lower id": ([1.0, 5.0, 5.0, 5.0], 3, 0, 0, 2, [1, 2]),
    "minus zero is zero": ([-0.0, 0.0, -0.0, 0.0], 3, 0, 0, 2, [0, 1]),
    "negative scores keep their order": ([-3.0, -1.0, -2.0, -1e-30], 3, 0, 0, 2, [1, 3]),
    "future blocks are no candidates": ([1.0, 2.0, 9.0, 9.0], 1, 0, 0, 4, [0, 1, -1, -1]),
    "own block is forced": ([9.0, 8.0, 7.0, -5.0], 3, 0, 1, 2, [0, 3]),
    "init and own block are forced": ([-9.0, 8.0, 7.0, -5.0], 3, 1, 1, 2, [0, 3]),
    "a forced block of no score stays": ([-torch.inf, 8.0, 7.0, -torch.inf], 3, 1, 1, 2, [0, 3]),
    "init beyond the document": ([1.0, 2.0, 3.0, 4.0], 1, 4, 0, 4, [0, 1, -1, -1]),
    "minus infinity is no candidate": ([1.0, -torch.inf, 3.0, 2.0], 3, 0, 0, 4, [0, 2, 3, -1]),
    "a NaN does not push out a forced block": ([torch.nan, torch.nan, 3.0, 2.0], 3, 0, 1, 2, [0, 3]),
    "a negative NaN ranks like a NaN": ([1.0, -torch.nan, 3.0, 2.0], 3, 0, 0, 1, [1]),
    "infinity does not push out a forced block": ([torch.inf, torch.inf, 3.0, 2.0], 3, 0, 1, 2, [0, 3]),
    "fewer blocks than topk": ([1.0, 2.0, 3.0, 4.0], 3, 0, 0, 6, [0, 1, 2, 3, -1, -1]),
}


@pytest.mark.parametrize(("scores", "own", "init", "local", "topk", "expected"), RANKINGS.values(), ids=RANKINGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranking(
    scores: list[float], own: int, init: int, local: int, topk: int, expected: list[int], dtype: torch.dtype
) -> None:
    """Guards each clause of the rule on its own, where the score pass cannot produce the case."""
    positions = torch.tensor([own * 128 + 5])
    ids = selection.rank_blocks(
        torch.tensor(scores, dtype=dtype)[None, :, None], positions, init=init, local=local, topk=topk
    )
    assert ids.tolist() == [[expected]]


def test_ranking_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards chunk boundaries: a long pack is ranked piece by piece."""
    scores, positions = torch.randn(4, 9, 100), torch.randint(0, 9 * 128, (100,))
    whole = selection.rank_blocks(scores, positions, init=1, local=1, topk=4)
    monkeypatch.setattr(selection, "_RANK_CHUNK", 9 * 4 * 7)
    assert torch.equal(selection.rank_blocks(scores, positions, init=1, local=1, topk=4), whole)


@pytest.mark.parametrize(
    ("topk", "dtype"), [(4, torch.bfloat16), (8, torch.float16), (16, torch.float32), (32, torch.float64)]
)
def test_widths_and_dtypes(topk: int, dtype: torch.dtype) -> None:
    """Guards the widths that the CSR builder takes and the dtypes that the reference scores."""
    microbatch = Microbatch.from_cu_seqlens(bounds([700, 129]))
    ids = select_blocks(
        torch.randn(829, 4, 16, dtype=dtype), torch.randn(829, 1, 16, dtype=dtype), microbatch, topk=topk
    )
    assert ids.shape == (4, 829, topk)
    last = ids[:, 699]
    assert ((last >= 0).sum(-1) == min(topk, 6)).all()


def recording_bundle(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], **replaced: Any) -> MSAKernels:
    """The reference bundle whose score launchers write down how they are called."""
    bundle = kernels(backend="reference")

    def wrap(name: str) -> Any:
        launcher = replaced.get(name, getattr(bundle, name))

        def call(*args: Any, **keywords: Any) -> Any:
            calls.append((name, args, keywords))
            return launcher(*args, **keywords)

        return call

    return MSAKernels(
        build_k2q_csr=bundle.build_k2q_csr,
        sparse_atten_func=bundle.sparse_atten_func,
        fmha_sm100=wrap("fmha_sm100"),
        fmha_sm100_plan=wrap("fmha_sm100_plan"),
        run_backward=bundle.run_backward,
    )


def test_score_launcher_is_called_as_the_contract_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the exact arguments: causal, unsplit, maxima only, and a scratch that is -inf where untouched."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    seen: list[bool] = []

    def score(*args: Any, **keywords: Any) -> Any:
        seen.append(bool((keywords["max_score"] == -torch.inf).all()))
        return kernels(backend="reference").fmha_sm100(*args, **keywords)

    bundle = recording_bundle(calls, fmha_sm100=score)
    monkeypatch.setattr(selection, "bind_kernels", lambda backend: bundle)
    microbatch = Microbatch.from_cu_seqlens(bounds([3, 130]))
    index_q, index_k = torch.randn(133, 4, 8), torch.randn(133, 1, 8)
    select_blocks(index_q, index_k, microbatch)
    (_, plan_args, plan_keywords), (_, run_args, run_keywords) = calls
    assert [argument.tolist() if isinstance(argument, torch.Tensor) else argument for argument in plan_args] == [
        [3, 130],
        [3, 130],
        4,
    ]
    assert plan_keywords == {
        "num_kv_heads": 1,
        "causal": True,
        "output_maxscore": True,
        "num_kv_splits": 1,
        "split_prefill_decode": False,
    }
    assert torch.equal(run_args[0], index_q)
    assert torch.equal(run_args[1], index_k)
    assert run_args[2] is run_args[1]
    assert run_keywords.pop("max_score").shape == (4, 128, 133)
    assert run_keywords == {"output_o": False, "output_maxscore": True}
    assert seen == [True]


def test_plan_is_made_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a host synchronisation per layer, and a plan of another micro-batch."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    bundle = recording_bundle(calls)
    monkeypatch.setattr(selection, "bind_kernels", lambda backend: bundle)
    first, second = (Microbatch.from_cu_seqlens(bounds(lengths)) for lengths in ([5, 7], [7, 5]))
    index_q, index_k = torch.randn(12, 2, 8), torch.randn(12, 1, 8)
    for microbatch in (first, first, second, first):
        select_blocks(index_q, index_k, microbatch)
    select_blocks(index_q[:, :1], index_k, first)
    plans = [(args[0].tolist(), args[2]) for name, args, _ in calls if name == "fmha_sm100_plan"]
    assert plans == [([5, 7], 2), ([7, 5], 2), ([5, 7], 1)]


def test_missing_maxima_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the official launcher's fallback: it prints a message and returns no scores."""
    bundle = recording_bundle([], fmha_sm100=lambda *args, **keywords: (None, None))
    monkeypatch.setattr(selection, "bind_kernels", lambda backend: bundle)
    microbatch = Microbatch.from_cu_seqlens(bounds([5]))
    with pytest.raises(RuntimeError, match="the score pass returned no block maxima"):
        select_blocks(torch.randn(5, 4, 8), torch.randn(5, 1, 8), microbatch)


def test_too_many_scores_are_refused_before_anything_is_allocated() -> None:
    """Guards the official planner's limit of 2**31 scores; 2**20 tokens in one document would be 2**35."""
    tokens = 2**20
    microbatch = Microbatch.from_cu_seqlens(torch.tensor([0, tokens]))
    with pytest.raises(SelectionBufferError, match=r"got: +4 \* 8192 \* 1048576 = 34359738368"):
        select_blocks(torch.zeros(1, 1, 8).expand(tokens, 4, 8), torch.zeros(1, 1, 8).expand(tokens, 1, 8), microbatch)


def test_the_indexer_gets_no_gradient() -> None:
    """Guards a graph that would keep the indexer's activations for nothing."""
    index_q = torch.randn(5, 4, 8, requires_grad=True)
    ids = select_blocks(index_q, torch.randn(5, 1, 8, requires_grad=True), Microbatch.from_cu_seqlens(bounds([5])))
    assert not ids.requires_grad


def test_strided_views_select_the_same() -> None:
    """Guards a launcher that reads a view of a fused projection as if it were contiguous."""
    fused = torch.randn(900, 5, 8)
    microbatch = Microbatch.from_cu_seqlens(bounds([900]))
    by_view = select_blocks(fused[:, :4], fused[:, 4:], microbatch, topk=4)
    assert torch.equal(by_view, select_blocks(fused[:, :4].clone(), fused[:, 4:].clone(), microbatch, topk=4))


SHAPE_ERRORS: dict[str, tuple[type[ValueError], tuple[int, ...], tuple[int, ...], dict[str, Any], str]] = {
    "two axes": (ArgumentValueError, (5, 8), (5, 1, 8), {}, "index_q and index_k have the wrong shape"),
    "many key heads": (ArgumentValueError, (5, 4, 8), (5, 4, 8), {}, "index_q and index_k have the wrong shape"),
    "other dimension": (ArgumentValueError, (5, 4, 8), (5, 1, 16), {}, "index_q and index_k have the wrong shape"),
    "other tokens": (StalePlanError, (6, 4, 8), (5, 1, 8), {}, "do not belong to this micro-batch"),
    "other keys": (StalePlanError, (5, 4, 8), (6, 1, 8), {}, "do not belong to this micro-batch"),
    "width": (ArgumentValueError, (5, 4, 8), (5, 1, 8), {"topk": 5}, "topk does not fit"),
}


@pytest.mark.parametrize(
    ("error", "shape_q", "shape_k", "keywords", "message"), SHAPE_ERRORS.values(), ids=SHAPE_ERRORS.keys()
)
def test_unusable_arguments_are_refused(
    error: type[ValueError],
    shape_q: tuple[int, ...],
    shape_k: tuple[int, ...],
    keywords: dict[str, Any],
    message: str,
) -> None:
    """Guards against scores of the wrong tokens."""
    with pytest.raises(error, match=message):
        select_blocks(torch.zeros(shape_q), torch.zeros(shape_k), Microbatch.from_cu_seqlens(bounds([5])), **keywords)


def test_more_forced_blocks_than_the_width_are_refused() -> None:
    """Guards forced blocks that silently do not fit."""
    microbatch = Microbatch.from_cu_seqlens(bounds([5]), (4, 1))
    with pytest.raises(ArgumentValueError, match="at least the 5 forced blocks"):
        select_blocks(torch.zeros(5, 4, 8), torch.zeros(5, 1, 8), microbatch, topk=4)


def test_mixed_dtypes_are_refused() -> None:
    """Guards a silent cast between indexer halves."""
    with pytest.raises(ArgumentValueError, match="differ in dtype or device"):
        select_blocks(torch.zeros(5, 4, 8), torch.zeros(5, 1, 8).double(), Microbatch.from_cu_seqlens(bounds([5])))


@pytest.mark.parametrize("backend", ["sm100", "sm90"])
def test_kernels_are_not_replaced_by_the_reference(backend: str) -> None:
    """Guards a quiet substitute on a host without the GPU."""
    with pytest.raises(UnavailableError, match=f"no {backend} backend for this device"):
        select_blocks(
            torch.zeros(5, 4, 8), torch.zeros(5, 1, 8), Microbatch.from_cu_seqlens(bounds([5])), backend=backend
        )
