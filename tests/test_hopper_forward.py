"""``sparse_atten_func`` on SM90: its kernels in the emulator, and on a Hopper GPU (marked ``gpu``).

Tolerances: O is rounded to bf16 (relative error 2^-9 = 2.0e-3 at most, 1.1e-3 on average) after bf16 P and bf16 partial
outputs, measured 1.7e-3 to 2.5e-3 against float32, so 3e-3. The LSE is float32 through ex2 and lg2, measured at most
2e-6, so 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from child_processes import run_module
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.hopper.forward import ForwardPlan, plan_forward, sparse_atten_func
from msa_vendored.reference import build_k2q_csr
from msa_vendored.reference import sparse_atten_func as reference_forward
from msa_vendored.reference.cases import PackedCase, invert_selection, make_case

OUT_TOLERANCE, LSE_TOLERANCE = 3e-3, 1e-4

# No lazy schedule: warps poll counters, and lazy runs asynchronous work only when no warp can go on.
SCHEDULES = [("eager", 0, True), ("random", 1, True), ("random", 2, True)]
EMULATED: dict[str, dict[str, Any]] = {
    "training_ratio16_two_chunks_one_cta": {
        "query_lengths": [140, 7],
        "index_heads": 1,
        "ctas": 1,
        "schedules": SCHEDULES,
    },
    "one_cta_computes_one_merges": {
        "query_lengths": [60, 37],
        "window_tokens": 32,
        "suppress": True,
        "schedules": SCHEDULES,
    },
    "two_compute_one_merges": {
        "query_lengths": [60, 37],
        "index_heads": 1,
        "window_tokens": 16,
        "windows_per_chunk": 4,
        "ctas": 3,
        "suppress": True,
        "schedules": [("random", 3, True)],
    },
    "neighbours_are_nan": {"query_lengths": [60, 30, 90], "index_heads": 1, "ctas": 1, "poison": True},
    "prefix_offsets_free_selection": {"query_lengths": [20, 5], "key_lengths": [300, 5], "own_block": False, "ctas": 1},
    "one_token_documents_one_window": {"query_lengths": [1, 1, 3], "index_heads": 1, "suppress": True},
    "ratio3_topk8_not_causal_scaled": {
        "query_lengths": [50],
        "key_lengths": [150],
        "ratio": 3,
        "topk": 8,
        "causal": False,
        "own_block": False,
        "softmax_scale": -0.3,
        "output_scale": 2.5,
        "ctas": 1,
        "schedules": [("random", 3, True)],
    },
    "ratio2_topk32": {
        "query_lengths": [10],
        "key_lengths": [4200],
        "ratio": 2,
        "topk": 32,
        "index_heads": 1,
        "own_block": False,
        "ctas": 1,
        "segment_queries": 4,
    },
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every case under its schedules; one process compiles each kernel once."""
    folder = tmp_path_factory.mktemp("hopper_forward")
    lines = iter(run_module("ptx_emulator.hopper_forward", requests=EMULATED.values(), folder=folder))
    return {name: [next(lines) for _ in case.get("schedules", [None])] for name, case in EMULATED.items()}


@pytest.mark.parametrize("case", EMULATED)
def test_the_kernels_agree_with_the_reference(emulated: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Guards results, races, fences and barriers, under eager and random schedules, on poisoned workspaces."""
    for run in emulated[case]:
        assert run["findings"] == []
        assert run["nans"] == 0
        assert run["out_error"] <= OUT_TOLERANCE
        assert run["lse_error"] <= LSE_TOLERANCE
        assert run["mma"] > 0


def test_a_chunk_is_one_launch(emulated: dict[str, list[dict[str, Any]]]) -> None:
    """Guards the overlap: a merge in a launch of its own would wait for all partial outputs of its chunk."""
    kernels = emulated["training_ratio16_two_chunks_one_cta"][0]["kernels"]
    assert kernels == ["BuildSegments", "ForwardMain", "ForwardMain"]


@given(
    total_q=st.integers(1, 1 << 20),
    max_seqlen_k=st.integers(1, 1 << 20),
    topk=st.sampled_from((4, 8, 16, 32)),
    index_heads=st.integers(1, 16),
    ratio=st.integers(1, 16),
    items=st.integers(1, 1 << 16),
    ctas=st.integers(1, 200),
    budget=st.integers(0, 1 << 36),
)
def test_a_plan_covers_all_tokens_within_its_budget(
    total_q: int, max_seqlen_k: int, topk: int, index_heads: int, ratio: int, items: int, ctas: int, budget: int
) -> None:
    """Guards tokens that no chunk would process, a table too small for segments of one query, and idle computing."""
    plan = plan_forward(
        total_q, max_seqlen_k, topk=topk, index_heads=index_heads, ratio=ratio, schedule_items=items, ctas=ctas,
        budget_bytes=budget,
    )  # fmt: skip
    assert (plan.windows - 1) * plan.window_tokens < total_q <= plan.windows * plan.window_tokens
    assert (plan.chunks - 1) * plan.chunk_tokens < total_q <= plan.chunks * plan.chunk_tokens
    chunk_bytes = plan.chunk_tokens * index_heads * ratio * topk * 256
    assert chunk_bytes <= budget or plan.windows_per_chunk == 1
    edges = min(total_q, plan.window_tokens) * topk * index_heads
    assert plan.segment_capacity >= min(edges, items) + edges // plan.segment_queries
    assert plan.merge_ctas < ctas
    assert plan.segment_queries * ratio <= 2048


def small_case(device: str = "cpu", **options: Any) -> PackedCase:
    case = make_case((140, 3), **{"index_heads": 2, "heads_per_index_head": 2, **options})
    return PackedCase(**{f.name: getattr(case, f.name).to(device) for f in fields(case)})


def arguments(case: PackedCase, **changes: Any) -> dict[str, Any]:
    row_ptr, q_indices, schedule = invert_selection(case)
    return {
        "q": case.q, "k": case.k, "v": case.v, "k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices,
        "topK": case.q2k_indices.shape[2], "cu_seqlens_q": case.cu_seqlens_q, "cu_seqlens_k": case.cu_seqlens_k,
        "max_seqlen_q": case.max_seqlen_q, "max_seqlen_k": case.max_seqlen_k, "causal": True,
        "return_softmax_lse": True, "schedule": schedule, **changes,
    }  # fmt: skip


UNSUPPORTED: list[tuple[str, Any]] = [
    ("page_table", torch.zeros((2, 1), dtype=torch.int32)),
    ("seqused_k", torch.zeros((2,), dtype=torch.int32)),
    ("usable_SM_count", 64),
    ("qk_dtype", torch.float8_e4m3fn),
    ("pv_dtype", torch.float16),
    ("partial_dtype", torch.float32),
    ("return_temperature_lse", True),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_what_the_kernels_do_not_do_is_refused_by_name(name: str, value: Any) -> None:
    """Guards against an argument that is taken and silently ignored."""
    with pytest.raises(NotImplementedError, match=f"does not support this {name}"):
        sparse_atten_func(**arguments(small_case(), **{name: value}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": lambda c: c.q.float(), "k": lambda c: c.k.float(), "v": lambda c: c.v.float()}, NotImplementedError,
         "does not support this q.dtype"),
        ({"q": lambda c: c.q[..., :64], "k": lambda c: c.k[..., :64], "v": lambda c: c.v[..., :64]},
         NotImplementedError, "does not support this head dim"),
        ({"v": lambda c: c.v[:-1]}, ValueError, "v has the wrong shape"),
        ({"q": lambda c: c.q[:, :3]}, ValueError, "query heads and key heads do not form a supported ratio"),
        ({"topK": lambda c: 3}, ValueError, "topK is not supported"),
        ({"blk_kv": lambda c: 64}, ValueError, "blk_kv is not supported"),
        ({"cu_seqlens_q": lambda c: c.cu_seqlens_q.long()}, TypeError, "cu_seqlens_q has the wrong dtype"),
        ({"out": lambda c: c.q[1:]}, ValueError, "out has the wrong shape"),
        ({"output_scale": lambda c: torch.ones(0)}, ValueError, "output_scale is empty"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_a_kernel_is_compiled(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Guards the checks of shapes and types; they need neither a GPU nor the DSL."""
    case = small_case()
    with pytest.raises(error, match=message):
        sparse_atten_func(**arguments(case, **{name: make(case) for name, make in changes.items()}))


def on_gpu(*lengths: Any, **options: Any) -> PackedCase:
    case = make_case(*lengths, **options)
    return PackedCase(**{f.name: getattr(case, f.name).cuda() for f in fields(case)})


def require_agreement(got: Any, call: dict[str, Any]) -> None:
    """Output and LSE against the reference in float32 on the same values."""
    wide = {name: call[name].float() for name in ("q", "k", "v")}
    dropped = ("out",)
    want: Any = reference_forward(**{**{n: v for n, v in call.items() if n not in dropped}, **wide})
    out, lse = got
    assert not out.isnan().any()
    assert float((out.float() - want[0]).norm()) <= OUT_TOLERANCE * float(want[0].norm())
    assert torch.equal(lse.isneginf(), want[1].isneginf())
    finite = ~want[1].isneginf()
    assert float((lse - want[1])[finite].abs().max()) <= LSE_TOLERANCE
    assert not out[want[1].isneginf()].any()


GPU_CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "one document of M3": (((1500,),), {"topk": 16}, {}),
    "odd lengths and one token": (((127, 129, 1, 2, 128, 700),), {"topk": 16}, {}),
    "one-token documents": (((1,) * 40,), {"topk": 4}, {}),
    "padded selections, prefix offsets": (((300, 200), (700, 333)), {"topk": 8, "own_block": False}, {}),
    "not causal": (((300, 5), (400, 900)), {"topk": 16, "own_block": False}, {"causal": False}),
    "topk 4": (((900,),), {"topk": 4}, {}),
    "topk 32": (((5000,),), {"topk": 32, "index_heads": 1}, {}),
    "ratio 1": (((333, 60),), {"topk": 8, "heads_per_index_head": 1}, {}),
    "ratio 2": (((333, 60),), {"topk": 8, "heads_per_index_head": 2}, {}),
    "ratio 3": (((333, 60),), {"topk": 4, "heads_per_index_head": 3}, {}),
    "ratio 4": (((333, 60),), {"topk": 4, "heads_per_index_head": 4}, {}),
    "ratio 7": (((333, 60),), {"topk": 4, "heads_per_index_head": 7}, {}),
    "ratio 8": (((333, 60),), {"topk": 16, "heads_per_index_head": 8}, {}),
    "scales": (((333, 60),), {"topk": 4}, {"softmax_scale": -0.2, "output_scale": "2"}),
    "scale zero": (((333, 60),), {"topk": 4}, {"softmax_scale": 0.0}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gpu_agrees_with_the_reference(name: str, seed: int) -> None:
    """Guards the kernels on the card, each case twice with fresh inputs."""
    lengths, options, changes = GPU_CASES[name]
    changes = {n: torch.tensor([2.0], device="cuda") if v == "2" else v for n, v in changes.items()}
    call = arguments(on_gpu(*lengths, seed=seed, **options), **changes)
    require_agreement(sparse_atten_func(**call), call)


@pytest.mark.gpu
def test_results_do_not_move() -> None:
    """Guards against races: the same call ten times, with other work in between, gives the same bits."""
    call = arguments(on_gpu((2000, 77), topk=16))
    first: Any = sparse_atten_func(**call)
    for _ in range(10):
        torch.randn(1 << 20, device="cuda").sum()
        again: Any = sparse_atten_func(**call)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.gpu
def test_every_element_of_a_poisoned_output_is_written() -> None:
    """Guards unwritten outputs, and that nothing else than ``out`` is returned."""
    case = on_gpu((300, 1, 140), topk=4, own_block=False)
    call = arguments(case)
    buffer = torch.full_like(case.q, math.nan)
    result: Any = sparse_atten_func(**{**call, "out": buffer})
    assert result[0] is buffer
    require_agreement(result, call)
    strided = torch.full((*case.q.shape[:2], 256), math.nan, dtype=torch.bfloat16, device="cuda")[..., ::2]
    result = sparse_atten_func(**{**call, "out": strided})
    assert result[0] is strided
    assert torch.equal(strided, buffer)


@pytest.mark.gpu
def test_keys_of_other_documents_may_be_anything() -> None:
    """Guards the last block of a document: its tail is the next document's, or lies past the end of the tensor."""
    case = on_gpu((200, 90, 300), topk=4)
    clean: Any = sparse_atten_func(**arguments(case))
    k, v = case.k.clone(), case.v.clone()
    k[200:290], v[200:290] = math.nan, math.inf
    got: Any = sparse_atten_func(**arguments(case, k=k, v=v))
    for part in (slice(0, 200), slice(290, 590)):
        assert torch.equal(got[0][part], clean[0][part])
        assert torch.equal(got[1][part], clean[1][part])


@pytest.mark.gpu
def test_views_at_odd_offsets_and_strides_are_accepted() -> None:
    """Guards operands that 16-byte copies cannot read in place."""
    case = on_gpu((300, 45), topk=4)
    call = arguments(case)
    expected: Any = sparse_atten_func(**call)
    for name in ("q", "k", "v"):
        tensor = call[name]
        odd = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view_as(tensor).copy_(tensor)
        strided = tensor.repeat_interleave(2, dim=2)[..., ::2]
        for operand in (odd, strided):
            got: Any = sparse_atten_func(**{**call, name: operand})
            assert torch.equal(got[0], expected[0])


@pytest.mark.gpu
def test_another_stream_is_followed() -> None:
    """Guards the stream: inputs that a slow kernel still writes on the caller's stream must be waited for."""
    case = on_gpu((1000,), topk=16)
    call = arguments(case)
    expected: Any = sparse_atten_func(**call)
    q = torch.zeros_like(case.q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(case.q)
        got: Any = sparse_atten_func(**{**call, "q": q})
    stream.synchronize()
    assert torch.equal(got[0], expected[0])


@pytest.mark.gpu
def test_a_graph_replays_with_another_selection() -> None:
    """Guards CUDA graphs: nothing of the selection may be read on the host when the graph is captured."""
    cases = [on_gpu((900, 333), topk=16, seed=seed) for seed in (0, 1)]
    calls = [arguments(case) for case in cases]
    static = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in calls[0].items()}
    names = ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts")
    schedule = calls[0]["schedule"]
    static["schedule"] = replace(schedule, **{name: getattr(schedule, name).clone() for name in names})
    for _ in range(2):
        sparse_atten_func(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result: Any = sparse_atten_func(**static)
    for call in (calls[1], calls[0]):
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        for name in names:
            getattr(static["schedule"], name).copy_(getattr(call["schedule"], name))
        graph.replay()
        torch.cuda.synchronize()
        require_agreement(result, call)


@pytest.mark.gpu
@pytest.mark.parametrize(("window_tokens", "windows_per_chunk"), [(16, 2), (64, 50), (1024, 1)])
@pytest.mark.parametrize("merge_ctas", [0, 1, 100])
def test_chunks_and_roles_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, window_tokens: int, windows_per_chunk: int, merge_ctas: int
) -> None:
    """Guards offsets into the partial outputs of a chunk, and the counters by which they are handed to merges."""
    from msa_vendored.hopper import forward

    call = arguments(on_gpu((1500, 200), topk=16))
    usual: Any = sparse_atten_func(**call)

    def plan(total_q: int, max_seqlen_k: int, **sizes: Any) -> ForwardPlan:
        windows = -(-total_q // window_tokens)
        per_chunk = min(windows, windows_per_chunk)
        chunks = -(-windows // per_chunk)
        usual = plan_forward(total_q, max_seqlen_k, **sizes)
        capacity, queries = usual.segment_capacity, usual.segment_queries
        return ForwardPlan(window_tokens, windows, per_chunk, chunks, capacity, queries, merge_ctas)

    monkeypatch.setattr(forward, "plan_forward", plan)
    for _ in range(3):
        other: Any = sparse_atten_func(**call)
        assert torch.equal(usual[0], other[0])
        assert torch.equal(usual[1], other[1])


@pytest.mark.gpu
def test_a_long_document_agrees_on_sampled_queries() -> None:
    """Guards int32 overflow of offsets: 40,000 tokens have 10.7e9 partial output elements at top-k 32."""
    tokens, topk = 40_000, 32
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn((tokens, heads, 128), generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (64, 4, 4)
    )
    own = torch.arange(tokens, device="cuda") // 128
    step = torch.arange(topk, device="cuda") * 7
    blocks = (own[None, :, None] - step - torch.arange(4, device="cuda")[:, None, None] * (step > 0)).clamp(min=-1)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    csr: Any = build_k2q_csr(
        blocks.int(), cu, cu, 128, total_k=tokens, max_seqlen_q=tokens, max_seqlen_k=tokens, qhead_per_kv=16,
        return_schedule=True,
    )  # fmt: skip
    out, lse = sparse_atten_func(
        q, k, v, csr[0], csr[1], topk, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=tokens, max_seqlen_k=tokens,
        causal=True, return_softmax_lse=True, schedule=csr[2],
    )  # fmt: skip
    for token in (0, 127, 128, 20_000, tokens - 1):
        for head in (0, 3):
            chosen = blocks[head, token]
            keys = torch.cat([torch.arange(b * 128, b * 128 + 128) for b in chosen[chosen >= 0].tolist()])
            keys = keys[keys <= token].cuda()
            logits = q[token, head * 16 : head * 16 + 16].float() @ k[keys, head].float().T * 128**-0.5
            want = logits.softmax(1) @ v[keys, head].float()
            got = out[token, head * 16 : head * 16 + 16].float()
            assert float((got - want).norm() / want.norm()) <= OUT_TOLERANCE
            assert float((lse[token, head * 16 : head * 16 + 16] - logits.logsumexp(1)).abs().max()) <= LSE_TOLERANCE
