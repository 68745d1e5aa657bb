"""``fmha_sm100_plan`` and ``fmha_sm100`` of the reference: raw block scores, dense output, sentinels, refusals."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_vendored.backward.checks import UnsupportedArgumentError
from msa_vendored.reference import fmha_sm100, fmha_sm100_plan
from msa_vendored.reference.cases import PackedCase, make_case
from msa_vendored.reference.score import score_tiles
from msa_vendored.reference.score_engine import ScoreDocument, run_document

QUERIES, KEYS = st.sampled_from([1, 2, 127, 128, 129, 260]), st.sampled_from([1, 128, 129, 400])
FLOAT64_TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def launch(*arguments: Any, **options: Any) -> Any:
    return fmha_sm100(*arguments, **options)


def lengths(case: PackedCase) -> tuple[torch.Tensor, torch.Tensor]:
    return case.cu_seqlens_q.diff(), case.cu_seqlens_k.diff()


def dense(case: PackedCase, offsets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and scores from full matrices: query i of a document sees key j if j <= i + offset."""
    q, k, v = case.q.double(), case.k.double(), case.v.double()
    heads, ratio = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    scores = torch.full((heads, score_tiles(case.max_seqlen_k), q.shape[0]), -torch.inf, dtype=torch.float64)
    documents = zip(pairwise(case.cu_seqlens_q.tolist()), pairwise(case.cu_seqlens_k.tolist()), offsets, strict=True)
    for (q0, q1), (k0, k1), offset in documents:
        visible = torch.arange(k1 - k0) <= torch.arange(q1 - q0)[:, None] + offset
        for head in range(heads):
            raw = q[q0:q1, head] @ k[k0:k1, head // ratio].T
            raw = raw.masked_fill(~visible, -torch.inf)
            p = (raw * q.shape[2] ** -0.5).softmax(1).nan_to_num(0)
            out[q0:q1, head] = p @ v[k0:k1, head // ratio]
            for tile in range(-(-(k1 - k0) // 128)):
                scores[head, tile, q0:q1] = raw[:, tile * 128 : (tile + 1) * 128].amax(1)
    return out, scores


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(QUERIES, KEYS), min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(1, 16),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_scores_and_output_match_full_matrices(
    documents: list[tuple[int, int]], key_heads: int, ratio: int, causal: bool, seed: int
) -> None:
    """Guards alignment, masks, head groups and the score layout, for prefixes and for queries before all keys."""
    lengths_q, lengths_k = zip(*documents, strict=True)
    case = make_case(
        lengths_q,
        lengths_k,
        index_heads=key_heads,
        heads_per_index_head=ratio,
        head_dim=5,
        dtype=torch.float64,
        seed=seed,
    )
    offsets = [k - q if causal else 400 for q, k in documents]
    plan = fmha_sm100_plan(*lengths(case), key_heads * ratio, key_heads, causal=causal, output_maxscore=True)
    out, scores = fmha_sm100(case.q, case.k, case.v, plan)
    expected, expected_scores = dense(case, offsets)
    torch.testing.assert_close(out, expected, **FLOAT64_TOLERANCE)
    torch.testing.assert_close(scores, expected_scores, **FLOAT64_TOLERANCE)


@pytest.mark.parametrize(
    ("longest", "tiles"), [(1, 128), (128, 128), (16384, 128), (16385, 256), (32768, 256), (196608, 1536)]
)
def test_tiles_are_rounded_up_to_128(longest: int, tiles: int) -> None:
    """Guards the official shape, ceil(ceil(keys / 128) / 128) x 128, on which callers size their buffers."""
    assert score_tiles(longest) == tiles
    plan = fmha_sm100_plan(torch.tensor([1]), torch.tensor([longest]), 4, output_maxscore=True)
    assert plan[3]["max_k_tiles"] == tiles


def score_case(**options: Any) -> PackedCase:
    defaults: dict[str, Any] = {"index_heads": 1, "heads_per_index_head": 4, "head_dim": 16, "dtype": torch.float32}
    return make_case((200, 3), **{**defaults, **options})


def test_the_call_of_a_training_layer() -> None:
    """Guards the exact call pattern of NeMo Automodel: one index key head, scores only, a scratch buffer."""
    case = score_case(dtype=torch.bfloat16)
    segment = case.cu_seqlens_q.diff()
    plan = fmha_sm100_plan(
        segment, segment, 4, num_kv_heads=1, causal=True, output_maxscore=True, num_kv_splits=1,
        split_prefill_decode=False,
    )  # fmt: skip
    assert plan[:3] == (False, 0, 2)
    assert plan[4] is None
    scratch = torch.full((4, plan[3]["max_k_tiles"], 203), -torch.inf)
    out, scores = fmha_sm100(case.q, case.k, case.k, plan, max_score=scratch, output_o=False, output_maxscore=True)
    assert out is None
    assert scores is scratch
    # bf16 products summed in float32: 16 terms of order 1.
    torch.testing.assert_close(scores.double(), dense(case, [0, 0])[1], rtol=1e-5, atol=1e-5)


def test_scores_are_raw_products() -> None:
    """Guards the unit: no softmax scale, whatever sm_scale says."""
    case = score_case()
    plan = fmha_sm100_plan(*lengths(case), 4, output_maxscore=True)
    cold, hot = (launch(case.q, case.k, case.v, plan, sm_scale=scale) for scale in (0.1, 10.0))
    assert torch.equal(cold[1], hot[1])
    assert not torch.equal(cold[0], hot[0])
    first = (case.q[0] * case.k[0]).sum(-1)
    torch.testing.assert_close(cold[1][:, 0, 0], first, rtol=1e-5, atol=1e-6)


def test_a_callers_buffer_is_written_only_where_a_key_is_visible() -> None:
    """Guards against code that relies on the launcher to clear its buffer: the official one does not."""
    case = score_case()
    plan = fmha_sm100_plan(*lengths(case), 4, output_maxscore=True)
    buffer = torch.full((4, 128, 203), 7.0)
    fmha_sm100(case.q, case.k, case.v, plan, max_score=buffer, output_o=False)
    _, fresh = launch(case.q, case.k, case.v, plan, output_o=False)
    assert torch.equal(buffer, fresh.masked_fill(torch.isneginf(fresh), 7.0))
    assert torch.isneginf(fresh[:, 1, :128]).all()


@pytest.mark.parametrize("offset", [0, 5, -1, torch.tensor([0, -3])])
def test_offsets_move_the_causal_diagonal(offset: Any) -> None:
    """Guards qo_offset and its override, rows before all keys among them."""
    case = score_case(dtype=torch.float64)
    offsets = offset.tolist() if isinstance(offset, torch.Tensor) else [offset, offset]
    expected, expected_scores = dense(case, offsets)
    planned = fmha_sm100_plan(*lengths(case), 4, qo_offset=offset, output_maxscore=True)
    default = fmha_sm100_plan(*lengths(case), 4, output_maxscore=True)
    for plan, override in ((planned, None), (default, offset)):
        out, scores = fmha_sm100(case.q, case.k, case.v, plan, q_offset_override=override)
        torch.testing.assert_close(out, expected, **FLOAT64_TOLERANCE)
        torch.testing.assert_close(scores, expected_scores, **FLOAT64_TOLERANCE)


def test_results_go_where_the_caller_says() -> None:
    """Guards out=, and None for what plan or call did not ask for."""
    case = score_case()
    buffer = torch.full_like(case.q, torch.nan)
    plan = fmha_sm100_plan(*lengths(case), 4)
    out, scores = fmha_sm100(case.q, case.k, case.v, plan, out=buffer)
    assert out is buffer
    assert scores is None
    torch.testing.assert_close(out.double(), dense(case, [0, 0])[0], rtol=1e-5, atol=1e-5)
    scored = fmha_sm100_plan(*lengths(case), 4, output_maxscore=True)
    assert fmha_sm100(case.q, case.k, case.v, scored, output_maxscore=False)[1] is None


def test_one_chunk_and_many_chunks_agree() -> None:
    """Guards the loop over queries: one query at a time gives what one chunk gives."""
    case = score_case(dtype=torch.float64)
    results = []
    for budget in (1, 1 << 23):
        out, scores = torch.zeros_like(case.q), torch.full((4, 128, 203), -torch.inf, dtype=torch.float64)
        for start, stop in ((0, 200), (200, 203)):
            document = ScoreDocument(slice(start, stop), slice(start, stop), 0)
            run_document(case.q, case.k, case.v, document, scale=0.25, out=out, max_score=scores, element_budget=budget)
        results.append((out, scores))
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, **FLOAT64_TOLERANCE)


def test_scores_of_more_than_2_31_elements_are_refused() -> None:
    """Guards a silent switch: the official launcher prints a message and computes attention instead of scores."""
    tokens = 1 << 20
    segment = torch.tensor([tokens])
    plan = fmha_sm100_plan(segment, segment, 4, output_maxscore=True)
    assert plan[3]["max_k_tiles"] == -1
    q, k = (torch.empty((tokens, heads, 1), device="meta") for heads in (4, 1))
    with pytest.raises(ValueError, match=r"the scores exceed 2\*\*31 elements") as caught:
        fmha_sm100(q, k, k, plan, output_o=False)
    assert "longest document 1048576" in str(caught.value)


PLAN_UNSUPPORTED: list[tuple[str, Any]] = [
    ("page_size", 128),
    ("kv_block_num", 16),
    ("usable_SM_count", 4),
    ("sparse_kernel_mode", "prefill"),
    ("use_fp8_kvcache", True),
    ("stream", 1),
]
RUN_UNSUPPORTED: list[tuple[str, Any]] = [
    ("kv_indices", torch.zeros(2, dtype=torch.int32)),
    ("kv_block_indexes", torch.zeros((203, 1, 4), dtype=torch.int32)),
    ("q_scale", 0.5),
    ("k_scale", 0.5),
    ("v_scale", 0.5),
    ("o_scale", 0.5),
]


@pytest.mark.parametrize(("name", "value"), PLAN_UNSUPPORTED + RUN_UNSUPPORTED)
def test_arguments_of_the_kernels_alone_are_refused_by_name(name: str, value: Any) -> None:
    """Guards against an argument that is taken and silently ignored."""
    case = score_case()
    arguments: tuple[Any, ...] = (case.q, case.k, case.v, fmha_sm100_plan(*lengths(case), 4))
    launcher: Any = fmha_sm100
    if name in dict(PLAN_UNSUPPORTED):
        launcher, arguments = fmha_sm100_plan, (*lengths(case), 4)
    with pytest.raises(NotImplementedError, match=f"do not support {name}") as caught:
        launcher(*arguments, **{name: value})
    assert isinstance(caught.value, UnsupportedArgumentError)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.tensor([1.0]), torch.tensor([1]), 4), {}, TypeError, "qo_segment_lens has the wrong dtype"),
        ((torch.tensor([[1]]), torch.tensor([1]), 4), {}, ValueError, "qo_segment_lens has the wrong shape"),
        ((torch.tensor([1]), torch.tensor([1, 2]), 4), {}, ValueError, "kv_segment_lens has the wrong shape"),
        ((torch.tensor([1, 0]), torch.tensor([1, 2]), 4), {}, ValueError, "qo_segment_lens has an empty document"),
        ((torch.tensor([1]), torch.tensor([0]), 4), {}, ValueError, "kv_segment_lens has an empty document"),
        ((torch.tensor([1]), torch.tensor([1]), 0), {}, ValueError, "not a multiple of key heads"),
        ((torch.tensor([1]), torch.tensor([1]), 4, 3), {}, ValueError, "not a multiple of key heads"),
        ((torch.tensor([1]), torch.tensor([1]), 4), {"qo_offset": torch.zeros(1)}, TypeError, "qo_offset"),
        ((torch.tensor([1]), torch.tensor([1]), 4), {"qo_offset": torch.tensor([1, 2])}, ValueError, "qo_offset"),
    ],
)
def test_bad_plans_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Guards the checks of the planner."""
    with pytest.raises(error, match=message):
        fmha_sm100_plan(*arguments, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"plan_info": ()}, TypeError, "plan_info is not a plan"),
        ({"q": torch.zeros((202, 4, 16))}, ValueError, "q has the wrong shape"),
        ({"q": torch.zeros((203, 2, 16))}, ValueError, "q has the wrong shape"),
        ({"k": torch.zeros((203, 2, 16)), "v": torch.zeros((203, 2, 16))}, ValueError, "k has the wrong shape"),
        ({"k": torch.zeros((202, 1, 16)), "v": torch.zeros((202, 1, 16))}, ValueError, "k has the wrong shape"),
        ({"v": torch.zeros((203, 1, 8))}, ValueError, "v has the wrong shape"),
        ({"v": None}, TypeError, "v must be a tensor"),
        ({"max_score": torch.zeros((4, 2, 203))}, ValueError, "max_score has the wrong shape"),
        ({"max_score": torch.zeros((4, 128, 203)).half()}, TypeError, "max_score has the wrong dtype"),
        ({"out": torch.zeros((203, 4, 16)).half()}, TypeError, "out has the wrong dtype"),
        ({"out": torch.zeros((203, 4, 8))}, ValueError, "out has the wrong shape"),
        ({"output_o": False, "output_maxscore": False}, ValueError, "there is nothing to compute"),
        ({"sm_scale": "1"}, TypeError, "sm_scale must be a number"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """Guards the checks of the launcher, a plan of other operands among them."""
    case = score_case()
    plan = fmha_sm100_plan(*lengths(case), 4, 1, output_maxscore=True)
    arguments: dict[str, Any] = {"q": case.q, "k": case.k, "v": case.v, "plan_info": plan, **changes}
    with pytest.raises(error, match=message):
        fmha_sm100(**arguments)


def test_an_override_needs_a_causal_plan() -> None:
    """Guards against an offset without a meaning."""
    case = score_case()
    plan = fmha_sm100_plan(*lengths(case), 4, causal=False)
    with pytest.raises(ValueError, match="q_offset_override needs a causal plan"):
        fmha_sm100(case.q, case.k, case.v, plan, q_offset_override=1)


def test_the_signatures_accept_the_official_calls() -> None:
    """Guards drop-in use: names, order and defaults."""
    plan = inspect.signature(fmha_sm100_plan).parameters
    assert list(plan)[:4] == ["qo_segment_lens", "kv_segment_lens", "num_qo_heads", "num_kv_heads"]
    assert {p.name: p.default for p in plan.values() if p.default is not p.empty} == {
        "num_kv_heads": -1,
        "qo_offset": None,
        "split_prefill_decode": True,
        "num_kv_splits": -1,
        "page_size": -1,
        "output_maxscore": False,
        "kv_block_num": -1,
        "usable_SM_count": -1,
        "causal": True,
        "sparse_kernel_mode": "auto",
        "use_fp8_kvcache": False,
        "device": None,
        "stream": None,
    }
    run = inspect.signature(fmha_sm100).parameters
    assert [p.name for p in run.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "q", "k", "v", "plan_info", "kv_indices", "kv_block_indexes", "q_offset_override", "out", "max_score",
    ]  # fmt: skip
    assert {p.name: p.default for p in run.values() if p.kind is p.KEYWORD_ONLY} == {
        **dict.fromkeys(("sm_scale", "q_scale", "k_scale", "v_scale", "o_scale")),
        "output_maxscore": True,
        "output_o": True,
        "check_input_valid": False,
    }
