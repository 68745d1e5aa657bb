"""Which backend a call gets, what it refuses, and how the SM100 path calls its launchers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msa_vendored import MSABackwardSchedule, kernels, probes
from msa_vendored.backward.accumulation import ARCH_ACCUMULATIONS, DQ_ACCUMULATIONS, DQ_DTYPES, DQAccumulation
from msa_vendored.errors import UnavailableError
from msa_vendored.reference import cases
from msa_vendored.training import (
    ArgumentValueError,
    Microbatch,
    backends,
    ops,
    resolve_backend,
    sparse_attention,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One random problem; q, k and v require gradients."""

    microbatch: Microbatch
    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    block_ids: Tensor


def make_case(lengths: list[int], *, model_shape: bool = False) -> Case:
    shape: dict[str, Any] = (
        {"topk": 16} if model_shape else {"index_heads": 2, "heads_per_index_head": 2, "head_dim": 8}
    )
    packed = cases.make_case(lengths, **shape, dtype=torch.bfloat16 if model_shape else torch.float32)
    q, k, v = (tensor.requires_grad_() for tensor in (packed.q, packed.k, packed.v))
    return Case(Microbatch.from_cu_seqlens(packed.cu_seqlens_q), (q, k, v), packed.grad_out, packed.q2k_indices)


def differentiate(case: Case, **options: Any) -> tuple[Tensor, ...]:
    out = sparse_attention(*case.inputs, case.block_ids, case.microbatch, **options)
    return out.detach(), *torch.autograd.grad(out, case.inputs, case.grad_out)


CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

RULE = [
    # device, capability, asked for, answer
    (CPU, None, None, "reference"),
    (CPU, None, "reference", "reference"),
    (CUDA, (10, 0), None, "sm100"),
    (CUDA, (10, 3), None, "sm100"),
    (CUDA, (10, 0), "sm100", "sm100"),
    (CUDA, (10, 0), "reference", "reference"),
    (CUDA, (9, 0), None, "sm90"),
    (CUDA, (9, 0), "sm90", "sm90"),
    (CUDA, (8, 0), "reference", "reference"),
    (torch.device("meta"), None, "reference", "reference"),
]

NOT_HERE = [
    (CPU, None, "sm100"),
    (CPU, None, "sm90"),
    (CUDA, (8, 0), None),
    (CUDA, (12, 0), None),
    (CUDA, (10, 1), None),
    (CUDA, (9, 0), "sm100"),
    (CUDA, (10, 0), "sm90"),
    (torch.device("meta"), None, None),
]


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")


@pytest.mark.parametrize(("device", "capability", "asked", "answer"), RULE)
def test_backend_rule(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    capability: tuple[int, int] | None,
    asked: str | None,
    answer: str,
) -> None:
    """Guards the documented rule, case by case."""
    pretend(monkeypatch, capability)
    assert resolve_backend(asked, device) == answer


@pytest.mark.parametrize(("device", "capability", "asked"), NOT_HERE)
def test_no_backend_is_ever_substituted(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, capability: tuple[int, int] | None, asked: str | None
) -> None:
    """Guards a GPU run that silently computes in PyTorch, or launches another architecture's kernels."""
    pretend(monkeypatch, capability)
    with pytest.raises(UnavailableError, match='next:     pass backend="reference"'):
        resolve_backend(asked, device)


def test_unknown_backend_is_refused() -> None:
    """Guards a typo that would mean the default."""
    with pytest.raises(ValueError, match="expected: None or one of 'sm100', 'sm90', 'reference'"):
        resolve_backend("SM100", CPU)


def test_hopper_without_its_launchers_points_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a dead end: the error must name the way on."""
    monkeypatch.setattr(probes, "HOPPER_TESTED_WITH", {"nvidia-cutlass-dsl": "0.0"})
    kernels.cache_clear()
    with pytest.raises(
        UnavailableError, match=r"""the sm90 launchers(.*\n)*.*\[sm90\]'; or pass backend="reference\""""
    ):
        backends.bind_kernels("sm90")


LIMITS: dict[str, dict[str, Any]] = {"q.dtype": {"dtype": torch.float32}, "head dimension": {"dim": 64}}


@pytest.mark.parametrize("backend", ["sm90", "sm100"])
@pytest.mark.parametrize("name", [None, *LIMITS])
def test_kernels_name_what_they_are_not_built_for(name: str | None, backend: str) -> None:
    """Guards a dtype whose bytes the kernels would misread, and a shape that they would read out of bounds."""
    shape = {"dtype": torch.bfloat16, "dim": 128, **(LIMITS[name] if name else {})}
    q = torch.zeros(1, 6, shape["dim"], dtype=shape["dtype"])
    if name is None:
        return backends.require_supported(backend, q=q, softmax_scale=0.3)
    with pytest.raises(ArgumentValueError, match=f"the {backend} backend does not support this {name}"):
        backends.require_supported(backend, q=q, softmax_scale=0.3)
    return None


@pytest.mark.parametrize("backend", ["sm90", "sm100", "reference"])
def test_a_scale_that_is_not_finite_is_refused(backend: str) -> None:
    """Guards NaN gradients that come from the caller's arithmetic."""
    with pytest.raises(ArgumentValueError, match="softmax_scale must be finite"):
        backends.require_supported(backend, q=torch.zeros(1, 1, 128, dtype=torch.bfloat16), softmax_scale=math.nan)


OPTIONS_OF_KERNELS = {"deterministic", "dq_accumulation"}
"""Keywords of ``run_backward`` that the reference does not have."""


@pytest.fixture
def sm100_in_name(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The SM100 path of the operators with the reference launchers behind it; returns run_backward's keywords."""
    reference = kernels(backend="reference")
    calls: list[dict[str, Any]] = []

    def run_backward(**keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(dict(keywords))
        for option in OPTIONS_OF_KERNELS & set(keywords):
            del keywords[option]
        return reference.run_backward(**keywords)

    monkeypatch.setattr(ops, "resolve_backend", lambda backend, device: "sm100")
    monkeypatch.setattr(ops, "bind_kernels", lambda name: replace(reference, run_backward=run_backward))
    return calls


def test_sm100_path_makes_the_calls_of_the_contract(sm100_in_name: list[dict[str, Any]]) -> None:
    """Guards run_backward's arguments: those of the contract, and the scale that the forward used."""
    case = make_case([130, 3], model_shape=True)
    expected = differentiate(case)
    (call,) = sm100_in_name
    assert set(call) == {"q", "k_aligned", "v_aligned", "grad_out", "lse", "out", "schedule", "softmax_scale"}
    assert isinstance(call["schedule"], MSABackwardSchedule)
    assert call["softmax_scale"] == 128**-0.5
    assert call["k_aligned"].shape == (384, 4, 128)
    assert not call["v_aligned"][130:256].any()
    assert all(torch.isfinite(tensor).all() for tensor in expected)


def test_sm100_path_refuses_before_it_launches(sm100_in_name: list[dict[str, Any]]) -> None:
    """Guards the operator against losing one of its two checks."""
    with pytest.raises(ArgumentValueError, match=r"the sm100 backend does not support this q\.dtype"):
        differentiate(make_case([5]))
    case = make_case([130, 3], model_shape=True)
    case.block_ids[0, 0, :2] = 0
    with pytest.raises(RuntimeError, match="block_ids repeat a block"):
        sparse_attention(*case.inputs, case.block_ids, case.microbatch)
    assert sm100_in_name == []


@pytest.fixture
def deterministic() -> Iterator[Any]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_reference_repeats_bitwise_under_deterministic_algorithms(deterministic: Any) -> None:
    """Guards an operator that PyTorch has no deterministic version of."""
    deterministic(True)
    case = make_case([129, 40])
    for first, second in zip(differentiate(case), differentiate(case), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_deterministic_algorithms_are_asked_of_the_kernels(deterministic: Any, backend: str, warn_only: bool) -> None:
    """Guards a run believed to be repeatable while the gradients are summed by atomics, and the cost without need."""
    assert backends.backward_options(backend, "") == {}
    deterministic(True, warn_only=warn_only)
    assert backends.backward_options(backend, "") == {"deterministic": True}
    assert backends.backward_options("reference", "fp32") == {}


WAYS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "eager": lambda attend: attend,
    "checkpointed": lambda attend: lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False),
    "compiled": lambda attend: torch.compile(attend, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_backward_gets_the_options_of_the_call(
    sm100_in_name: list[dict[str, Any]], deterministic: Any, way: str
) -> None:
    """Guards an option that is accepted and lost on its way through the operators, a recomputation or a graph."""
    case = make_case([9], model_shape=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, case.block_ids, case.microbatch, dq_accumulation="fp32")

    # PyTorch refuses a compiled backward under another flag than its forward's. Else the flag of the backward counts.
    deterministic(way == "compiled")
    out = WAYS[way](attend)(*case.inputs)
    deterministic(True)
    torch.autograd.grad(out, case.inputs, case.grad_out)
    (call,) = sm100_in_name
    assert {name: call[name] for name in OPTIONS_OF_KERNELS} == {"dq_accumulation": "fp32", "deterministic": True}


@pytest.mark.parametrize("name", ["", "bfloat16", torch.float32])
def test_an_unknown_accumulation_is_refused(name: Any) -> None:
    """Guards a misspelt option that would mean the default, or fail hours later in the first backward."""
    case = make_case([5])
    with pytest.raises(ArgumentValueError) as caught:
        differentiate(case, dq_accumulation=name)
    assert str(caught.value) == "\n".join(
        [
            "unknown accumulation of dq",
            "  where:    argument dq_accumulation",
            f"  expected: {' or '.join(map(repr, DQ_ACCUMULATIONS))}",
            f"  got:      {name!r}",
        ]
    )


def test_an_accumulation_that_the_kernels_lack_is_refused_before_the_forward(
    sm100_in_name: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an hour of forwards before the first backward says that it cannot; autograd is off here."""
    case = make_case([9], model_shape=True)
    monkeypatch.setattr(ops, "bind_kernels", None)
    with torch.no_grad(), pytest.raises(NotImplementedError) as caught:
        sparse_attention(*case.inputs, case.block_ids, case.microbatch, dq_accumulation="fp16")
    assert str(caught.value) == "\n".join(
        [
            "the kernels for sm_100a do not sum dq like this",
            "  where:    argument dq_accumulation",
            "  expected: 'bf16' or 'fp32'",
            "  got:      'fp16'",
        ]
    )
    backends.require_accumulation("sm90", "fp16")
    assert sm100_in_name == []


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_one_architecture_may_speak_for_its_backend(arch: str) -> None:
    """Guards a kernel that only one of the two GPUs of a backend has."""
    assert ARCH_ACCUMULATIONS[arch] == ARCH_ACCUMULATIONS[backends._ARCH_OF["sm100"]]


@pytest.mark.parametrize("name", DQ_ACCUMULATIONS)
def test_the_reference_sums_as_precisely_whatever_is_allowed(name: DQAccumulation) -> None:
    """Guards a layer that trains on a GPU and cannot be tested on a CPU with the same arguments."""
    case = make_case([129, 40])
    for got, expected in zip(differentiate(case, dq_accumulation=name), differentiate(case), strict=True):
        assert torch.equal(got, expected)


def test_every_accumulation_has_a_type() -> None:
    """Guards a name that is offered and means nothing."""
    assert tuple(DQ_DTYPES) == DQ_ACCUMULATIONS
