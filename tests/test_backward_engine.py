"""The launcher of the GPU backward without a GPU: what it refuses, in which order, and how device errors surface."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.backward import MSABackwardSchedule, engine, error_word, launch, stages
from msa_vendored.backward.arguments import require_operands, require_scale
from msa_vendored.backward.error_word import ErrorWord, ScheduleError
from msa_vendored.backward.plan import Sizes, plan_call
from msa_vendored.backward.stages import (
    REPEATABLE_WALKS,
    MainArguments,
    Pass,
    Stages,
    Structure,
    Walk,
    find_arch,
    load_stages,
    require_arch,
)
from msa_vendored.backward.tasks import BAD_QUERY, BAD_ROW, INCONSISTENT, OVERFLOW
from msa_vendored.errors import UnavailableError
from msa_vendored.reference import BackwardSchedule

CPU = torch.device("cpu")
Call = dict[str, Any]


def make_call(
    *, tokens: int = 3, workspace_rows: int = 128, query_heads: int = 64, key_heads: int = 4, device: str = "cpu"
) -> Call:
    """Arguments of the right shapes with nothing in them."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=torch.int32)

    q = tensor(tokens, query_heads, 128)
    k = tensor(workspace_rows, key_heads, 128)
    rows = workspace_rows // 128
    kind = MSABackwardSchedule if key_heads == 4 else BackwardSchedule
    schedule = kind(
        ints(key_heads, rows + 1), ints(key_heads, tokens), ints(key_heads * rows, 6), ints(1), ints(2), ints(1)
    )
    lse = tensor(tokens, query_heads, dtype=torch.float32)
    return {"q": q, "k_aligned": k, "v_aligned": k, "grad_out": q, "lse": lse, "out": q, "schedule": schedule}


def check(call: Call, **options: Any) -> Sizes:
    operands = {name: value for name, value in call.items() if name != "schedule"}
    return require_operands(call["schedule"], options.get("dq_accumulation", "bf16"), operands)


def replaced(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Call], Call]:
    return lambda call: {**call, name: change(call[name])}


REFUSED: dict[str, tuple[Callable[[Call], Call], type[Exception], str]] = {
    "q is no tensor": (replaced("q", lambda q: q.tolist()), TypeError, "q must be a tensor"),
    "q in float32": (replaced("q", torch.Tensor.float), TypeError, "q has the wrong dtype"),
    "lse in bfloat16": (replaced("lse", torch.Tensor.bfloat16), TypeError, "lse has the wrong dtype"),
    "head dim 64": (replaced("q", lambda q: q[..., :64]), ValueError, "q has the wrong shape"),
    "k of rank 2": (replaced("k_aligned", lambda k: k[0]), ValueError, "k_aligned has the wrong shape"),
    "127 rows": (replaced("k_aligned", lambda k: k[:127]), ValueError, "k_aligned has the wrong number of rows"),
    "no rows": (replaced("k_aligned", lambda k: k[:0]), ValueError, "k_aligned has the wrong number of rows"),
    "v unlike k": (replaced("v_aligned", lambda v: v[:, :2]), ValueError, "v_aligned has the wrong shape"),
    "grad_out unlike q": (replaced("grad_out", lambda g: g[:1]), ValueError, "grad_out has the wrong shape"),
    "out unlike q": (replaced("out", lambda o: o[:, :4]), ValueError, "out has the wrong shape"),
    "lse unlike q": (replaced("lse", lambda lse: lse.T.contiguous()), ValueError, "lse has the wrong shape"),
    "another device": (replaced("out", lambda o: o.to("meta")), ValueError, "out is on another device than q"),
    "no schedule": (replaced("schedule", lambda s: None), TypeError, "schedule must be a backward schedule"),
    "a schedule elsewhere": (
        lambda call: {**call, "schedule": make_call(device="meta")["schedule"]},
        ValueError,
        "schedule.row_ptr is on another device than q",
    ),
    "a schedule of other heads": (
        lambda call: {**call, "schedule": make_call(query_heads=2, key_heads=2)["schedule"]},
        ValueError,
        "schedule.row_ptr has the wrong shape",
    ),
    "no tokens": (lambda call: make_call(tokens=0), ValueError, "there is nothing to differentiate"),
    "ratio 3": (lambda call: make_call(query_heads=12), NotImplementedError, "do not fold this number"),
    "ratio 32": (lambda call: make_call(query_heads=128), NotImplementedError, "do not fold this number"),
    "heads that do not divide": (lambda call: make_call(query_heads=6), NotImplementedError, "do not fold this number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_kernels_would_misread_are_refused(what: str) -> None:
    """Guards out-of-bounds reads on the device; each check is the only one that sees its case."""
    change, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        check(change(make_call()))


@pytest.mark.parametrize("key_heads", [1, 3, 4])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16])
def test_every_documented_geometry_is_accepted(ratio: int, key_heads: int) -> None:
    """Guards the wider contract: ratios up to 16, any number of key heads."""
    sizes = check(make_call(query_heads=ratio * key_heads, key_heads=key_heads))
    assert (sizes.ratio, sizes.key_heads, sizes.tokens, sizes.workspace_rows) == (ratio, key_heads, 3, 128)


def test_an_unknown_accumulation_is_refused() -> None:
    """Guards a typing error that would pick a default."""
    with pytest.raises(ValueError, match="expected: 'bf16' or 'fp16' or 'fp32'"):
        check(make_call(), dq_accumulation="fp8")


@pytest.mark.parametrize(
    ("scale", "error"), [(float("nan"), ValueError), (float("inf"), ValueError), ("1", TypeError), (True, TypeError)]
)
def test_a_scale_that_is_no_finite_number_is_refused(scale: Any, error: type[Exception]) -> None:
    """Guards NaN gradients that come from the caller's arithmetic."""
    with pytest.raises(error, match="softmax_scale must be"):
        require_scale(scale)


def test_scales_are_taken_as_they_are() -> None:
    """Guards the default of the contract, and scales other than it: 0 and negative ones are legal."""
    assert [require_scale(scale) for scale in (None, 0, -2.5)] == [128**-0.5, 0.0, -2.5]


@pytest.fixture(autouse=True)
def no_device_remembered() -> Iterator[None]:
    find_arch.cache_clear()
    yield
    find_arch.cache_clear()


WRONG_DEVICES = [((8, 0), "A100", "A100, compute capability 8.0"), ((12, 0), "B40", "B40, compute capability 12.0")]


@pytest.mark.parametrize(("capability", "name", "got"), WRONG_DEVICES)
def test_a_gpu_without_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, got: str
) -> None:
    """Guards a launch of code for another architecture, whose error names no device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    with pytest.raises(UnavailableError) as caught:
        require_arch(torch.device("cuda", 0))
    assert caught.value.got == got
    assert caught.value.expected == "an NVIDIA GPU of compute capability 9.0, 10.0 or 10.3"


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_each_gpu_gets_its_own_code(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    """Guards against sm_100a code on an SM103, which does not run it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert require_arch(torch.device("cuda", 0)) == arch


def test_the_device_is_refused_before_anything_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards "nothing was compiled": neither the DSL nor a cache is touched for a tensor on the CPU."""
    monkeypatch.setattr(engine, "get_stages", lambda structure: pytest.fail("kernels were loaded"))
    call = make_call(query_heads=12)  # wrong as well, but the device comes first
    with pytest.raises(UnavailableError, match="run_backward has no kernels for this device") as caught:
        engine.run_backward(**call)
    assert caught.value.got == "device cpu"


LAUNCHED_ELSEWHERE = [
    (None, "device cpu"),
    ((9, 0), "a card, compute capability 9.0"),
    ((12, 0), "a card, compute capability 12.0"),
]


@pytest.mark.parametrize(("capability", "got"), LAUNCHED_ELSEWHERE)
def test_the_sm100_launcher_names_a_gpu_that_it_does_not_run_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, got: str
) -> None:
    """Guards the bundle: on Hopper it must not compile for Hopper, and on the CPU not compute in PyTorch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(engine, "run_backward", lambda **arguments: pytest.fail("the engine was called"))
    q: Any = make_call()["q"]
    if capability is not None:
        monkeypatch.setattr(launch, "require_tensor", lambda name, value: None)
        q = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(UnavailableError) as caught:
        launch.run_backward(**{**make_call(), "q": q})
    assert str(caught.value) == (
        "the sm100 launcher run_backward cannot run on this device\n"
        f"  where:    tensors on {q.device}\n"
        "  expected: an NVIDIA GPU of compute capability 10.0 or 10.3 (B200, B300)\n"
        f"  got:      {got}\n"
        '  next:     use kernels(backend="sm90") on a Hopper GPU, kernels(backend="reference") on any device'
    )


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_the_sm100_launcher_passes_everything_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Guards an option that the outer function drops."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launch, "require_tensor", lambda name, value: None)
    monkeypatch.setattr(engine, "run_backward", lambda **arguments: arguments)
    call = make_call() | {"q": SimpleNamespace(device=torch.device("cuda", 0))}
    call |= {"softmax_scale": 0.5, "dq_accumulation": "fp32", "deterministic": True, "check": True}
    assert launch.run_backward(**call) == call  # type: ignore[comparison-overlap]  # what the stand-in returns


def test_the_contract_takes_the_engines_options() -> None:
    """Guards two signatures of one call."""
    outer, inner = (inspect.signature(function).parameters for function in (launch.run_backward, engine.run_backward))
    assert outer == inner
    assert {p.kind for p in outer.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert [name for name, p in outer.items() if p.default is p.empty] == [
        "q", "k_aligned", "v_aligned", "grad_out", "lse", "out", "schedule",
    ]  # fmt: skip


@pytest.mark.parametrize(("deterministic", "walks"), [(False, ["even"]), (True, ["blocks", "windows"])])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_determinism_takes_passes_that_own_what_they_add_to(arch: str, deterministic: bool, walks: list[str]) -> None:
    """Guards a run believed to be repeatable whose CTAs add to one another's sums."""
    pytest.importorskip("cutlass")
    loaded: list[dict[str, Any]] = []

    def load(compile_stage: Any, **options: Any) -> Callable[..., None]:
        loaded.append(options)
        return lambda *arguments: None

    passes = load_stages(Structure(arch, 16, "bf16", deterministic), load=load).passes
    assert [run.walk for run in passes] == walks
    assert [options["walk"] for options in loaded if "walk" in options] == walks
    gradients = [options["gradients"] for options in loaded if "gradients" in options]
    assert gradients == (["dkv", "dq"] if deterministic else ["all"])


@pytest.fixture
def word() -> ErrorWord:
    return ErrorWord(CPU)


def test_an_error_waits_for_the_next_call_and_is_raised_once(word: ErrorWord) -> None:
    """Guards the only way in which an inconsistent schedule is reported without a wait."""
    word.raise_seen()
    word.word |= BAD_ROW | INCONSISTENT
    word.raise_seen()  # not copied yet
    word.enqueue_copy()
    with pytest.raises(ScheduleError) as caught:
        word.raise_seen()
    assert caught.value.bits == BAD_ROW | INCONSISTENT
    assert caught.value.where == "an earlier call of run_backward on this device"
    assert caught.value.got == "the work items of a row overlap, leave edges out, or disagree on its key block"
    word.raise_seen()
    word.enqueue_copy()
    word.raise_seen()


def test_an_error_is_not_lost_when_the_next_call_overlaps(word: ErrorWord) -> None:
    """Guards a second call, launched before the first has run, against overwriting what the first will report."""
    word.word |= BAD_QUERY
    word.enqueue_copy()
    word.word |= 0  # the second call finds nothing wrong
    word.enqueue_copy()
    with pytest.raises(ScheduleError, match="do not ascend"):
        word.raise_seen()


def test_check_raises_now_and_the_next_call_does_not_raise_it_again(word: ErrorWord) -> None:
    """Guards check=True, also against an error word that was already copied."""
    word.word |= OVERFLOW | INCONSISTENT
    word.enqueue_copy()
    with pytest.raises(ScheduleError, match="more tasks than its tensors can hold") as caught:
        word.raise_now()
    assert caught.value.where == "argument schedule"
    word.raise_now()
    word.raise_seen()


def test_there_is_one_error_word_a_device() -> None:
    """Guards captured graphs, which keep its address."""
    assert error_word.get_error_word(CPU) is error_word.get_error_word(CPU) is error_word.find_error_word(CPU)
    assert error_word.find_error_word(torch.device("cuda", 77)) is None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The engine on a pretended SM100 whose stages only record their calls; tensors stay on the CPU."""
    calls: list[tuple[str, Any]] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *arguments: calls.append((name, arguments))

    monkeypatch.setattr(engine, "require_arch", lambda device: "sm_100a")

    def load(structure: Structure) -> Stages:
        calls.append(("load", structure))
        passes = tuple(
            Pass(walk, record("build_tasks")) for walk in (REPEATABLE_WALKS if structure.deterministic else ("even",))
        )
        return Stages(record("delta"), passes, record("main"), record("postprocess"), Walk(512, 64))

    monkeypatch.setattr(engine, "get_stages", load)
    monkeypatch.setattr(engine, "_ready", set())
    monkeypatch.setattr(error_word, "_words", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(engine, "count_multiprocessors", lambda device: 148)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return calls


def test_stages_run_in_order_on_one_allocation(recorded: list[tuple[str, Any]]) -> None:
    """Guards the order of launches, and a stage that is given another tensor than its producer wrote."""
    call = make_call()
    dq, dk, dv = engine.run_backward(**call)
    assert [name for name, _ in recorded] == ["load", "delta", "build_tasks", "main", "postprocess"]
    _, (_, delta), (_, build), (_, (main,)), (_, post) = recorded
    assert isinstance(main, MainArguments)
    assert [t.data_ptr() for t in delta[:2]] == [call[name].data_ptr() for name in ("out", "grad_out")]
    assert [t.data_ptr() for t in (delta[2], *build[7:11])] == [
        t.data_ptr() for t in (main.delta, main.task_meta, main.task_qrows, main.task_qpos, main.descriptor)
    ]
    assert build[11].data_ptr() == post[4].data_ptr()
    assert build[11].tolist() == [0]
    assert post[5] is error_word.get_error_word(CPU).word
    assert post[0].data_ptr() == main.dq_sum.data_ptr()
    assert post[2].data_ptr() == main.dkv_sum.data_ptr()
    assert (dq.shape, dk.shape, dv.shape) == (call["q"].shape, call["k_aligned"].shape, call["v_aligned"].shape)
    assert post[1].data_ptr() == dq.data_ptr()
    assert post[3].data_ptr() == dk.data_ptr()
    assert dv.data_ptr() - dk.data_ptr() == dk.numel() * 2
    assert main.grid == min(148, plan_call(check(call), 512, ("even",), 148).passes[0].capacity)
    workspace = {t.untyped_storage().data_ptr() for t in (main.delta, main.task_meta, main.dq_sum, main.dkv_sum)}
    assert len(workspace) == 1
    assert not main.dq_sum.any()
    assert not main.dkv_sum.any()


def test_deterministic_passes_keep_what_they_own(recorded: list[tuple[str, Any]]) -> None:
    """Guards a result taken from a pass in which several CTAs add to it."""
    call = make_call(tokens=300, workspace_rows=384)
    engine.run_backward(**call, deterministic=True)
    names = ["load", "delta", "build_tasks", "main", "build_tasks", "main", "postprocess"]
    assert [name for name, _ in recorded] == names
    (_, by_blocks), (_, (first,)), (_, by_windows), (_, (second,)), (_, post) = recorded[2:]
    assert [main.gradients for main in (first, second)] == ["dkv", "dq"]
    assert post[2].data_ptr() == first.dkv_sum.data_ptr() == second.dkv_sum.data_ptr()
    assert post[0].data_ptr() == first.dq_sum.data_ptr() == second.dq_sum.data_ptr()
    assert [build[14] for build in (by_blocks, by_windows)] == [300, 32]
    assert [main.grid for main in (first, second)] == [4 * 3, 4 * 10]
    assert [build[15] for build in (by_blocks, by_windows)] == [12, 40]


def test_a_main_kernel_that_adds_to_dq_itself_gets_it_zeroed(
    recorded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the SM90 kernel's bf16 sums: they are the result, and nothing else may be allocated for them."""
    in_place = replace(engine.get_stages(Structure("sm_90a", 16, "bf16", deterministic=False)), dq_in_place=True)
    monkeypatch.setattr(engine, "get_stages", lambda structure: in_place)
    call = make_call()
    dq, _, _ = engine.run_backward(**call)
    (main,) = dict(recorded)["main"]
    assert main.dq_sum.data_ptr() == dq.data_ptr() == dict(recorded)["postprocess"][0].data_ptr()
    assert main.dq_sum.shape == (dq.numel(),)
    assert dict(recorded)["delta"][3] is dq  # which that zeroes
    plan = plan_call(check(call), 512, ("even",), 148, dq_in_place=True)
    assert plan.workspace.zeroed_bytes < plan_call(check(call), 512, ("even",), 148).workspace.zeroed_bytes


def test_operands_reach_the_kernels_aligned_and_contiguous(recorded: list[tuple[str, Any]]) -> None:
    """Guards 128-bit loads at odd storage offsets, which fault, and strides that the kernels do not know."""
    call = make_call()
    storage = torch.zeros(call["q"].numel() + 1, dtype=torch.bfloat16)
    call["grad_out"] = storage[1:].view_as(call["q"])
    call["k_aligned"] = torch.zeros(4, 128, 128, dtype=torch.bfloat16).transpose(0, 1)
    engine.run_backward(**call)
    (main,) = dict(recorded)["main"]
    for tensor in (main.q, main.k, main.v, main.grad_out, main.lse):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        assert not tensor.requires_grad


def test_what_a_call_reports_is_raised_by_the_next(recorded: list[tuple[str, Any]]) -> None:
    """Guards silent zeros: the engine has to copy the word after each call and look at it before the next."""
    call = make_call()
    engine.run_backward(**call)
    error_word.get_error_word(CPU).word |= BAD_ROW
    engine.run_backward(**call)
    recorded.clear()
    with pytest.raises(ScheduleError):
        engine.run_backward(**call)
    assert recorded == []
    engine.run_backward(**call)


def test_check_raises_in_the_call(recorded: list[tuple[str, Any]]) -> None:
    """Guards the debugging option."""
    engine.run_backward(**make_call(), check=True)
    error_word.get_error_word(CPU).word |= BAD_ROW
    with pytest.raises(ScheduleError, match="argument schedule"):
        engine.run_backward(**make_call(), check=True)


def test_a_capture_needs_a_call_before_it(recorded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captures that fail inside the driver, or record the address of memory that is freed."""
    call = make_call()
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with pytest.raises(engine.CaptureError, match="call run_backward once, then capture"):
        engine.run_backward(**call)
    assert recorded == []
    capturing[0] = False
    engine.run_backward(**call)
    capturing[0] = True
    engine.run_backward(**call)
    with pytest.raises(engine.CaptureError, match="call run_backward once, then capture"):
        engine.run_backward(**call, dq_accumulation="fp32")
    with pytest.raises(engine.CaptureError, match="check=True waits for the device"):
        engine.run_backward(**call, check=True)


def test_options_select_the_kernels(recorded: list[tuple[str, Any]]) -> None:
    """Guards options that are accepted and then ignored."""
    engine.run_backward(**make_call(query_heads=8), dq_accumulation="fp32", softmax_scale=0.25)
    assert dict(recorded)["load"] == Structure("sm_100a", 2, "fp32", deterministic=False)
    (main,) = dict(recorded)["main"]
    assert main.softmax_scale == 0.25
    assert main.dq_sum.dtype == torch.float32


SIZES = st.builds(
    Sizes,
    tokens=st.integers(1, 1 << 20),
    workspace_rows=st.integers(1, 1 << 13).map(lambda blocks: 128 * blocks),
    query_heads=st.just(16),
    key_heads=st.sampled_from([1, 2, 4, 8, 16]),
    rows=st.integers(1, 1 << 12),
    edge_capacity=st.integers(0, 1 << 20),
    work_capacity=st.integers(0, 1 << 12),
    dq_accumulation=st.sampled_from(["bf16", "fp16", "fp32"]),
)


@given(SIZES, st.sampled_from([("even",), REPEATABLE_WALKS]))
def test_the_plan_has_the_documented_size(sizes: Sizes, walks: tuple[str, ...]) -> None:
    """Guards the memory that the docstring promises, and tables that are smaller than the capacity."""
    plan = plan_call(sizes, 512, walks, 132)
    shapes = {region.name: region.shape for region in plan.workspace.regions}
    slots, capacity = 128 // sizes.ratio, max(p.capacity for p in plan.passes)
    assert shapes["task_meta"] == (capacity, 4)
    assert shapes["task_qrows"] == shapes["task_qpos"] == (capacity, slots)
    assert shapes["descriptor"] == (max(p.descriptor_words for p in plan.passes),)
    assert shapes["scratch"] == (max(p.scratch_words for p in plan.passes),)
    assert shapes["scratch"][0] % 4 == 0
    sums = sizes.tokens * sizes.query_heads * 128 * (4 if sizes.dq_accumulation == "fp32" else 2)
    sums += 2 * sizes.workspace_rows * sizes.key_heads * 128 * 4
    scaled = sizes.dq_accumulation == "fp16"
    sums += 8 * sizes.key_heads * scaled
    assert sums + 4 <= plan.workspace.zeroed_bytes < sums + 4 * 256
    tables = 4 * (capacity * (4 + 2 * slots) + shapes["scratch"][0] + shapes["descriptor"][0])
    rest = plan.workspace.total_bytes - plan.workspace.zeroed_bytes
    statistics = sizes.tokens * sizes.query_heads * 4 * (1 + scaled)
    assert tables + statistics <= rest < tables + statistics + 8 * 256


def test_stages_module_names_the_dsl_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a bare ModuleNotFoundError on a GPU host without the extra."""
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(UnavailableError, match="CuTe DSL, which cannot be imported") as caught:
        stages.load_stages(Structure("sm_100a", 16, "bf16", deterministic=False))
    assert caught.value.next_command == "pip install 'msa_vendored[sm100]'"
