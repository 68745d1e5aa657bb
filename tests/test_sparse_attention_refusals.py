"""What ``sparse_attention`` refuses: selections, shapes, dtypes, devices, scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_attention_cases import bounds, make_case

from msa_vendored.training import (
    ArgumentValueError,
    Microbatch,
    StalePlanError,
    checks,
    sparse_attention,
)

FAULTS = {
    "twice": ([1, 0, 1, -1], "names a block twice"),
    "beyond the document": ([2, -1, -1, -1], "names a block beyond its document"),
    "after the end": ([0, -1, 1, -1], "has -1 before its end"),
    "below -1": ([0, -2, -1, -1], "negative block other than -1"),
}


@pytest.mark.parametrize(("ids", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_unusable_selections_are_refused(ids: list[int], message: str) -> None:
    """Guards keys that would be counted twice, or read from another document."""
    case = make_case([200, 300])
    case.block_ids[1, 150] = torch.tensor(ids, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        sparse_attention(*case.inputs, case.block_ids, case.microbatch)
    usable = checks.usable_queries(case.block_ids, case.microbatch.cu_seqlens)
    assert (~usable).nonzero().tolist() == [[1, 150]]
    with pytest.raises(RuntimeError, match="block_ids repeat a block, leave the query's document"):
        checks.assert_selection(case.block_ids, case.microbatch.cu_seqlens)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([1, 128, 129, 400]), min_size=1, max_size=3), st.integers(0, 2**31))
def test_usable_selections_pass_the_device_side_check(lengths: list[int], seed: int) -> None:
    """Guards a device-side assertion that kills a run over a legal selection."""
    case = make_case(lengths, heads=(2, 2), seed=seed)
    checks.assert_selection(case.block_ids, case.microbatch.cu_seqlens)


def wrong(**replaced: Any) -> dict[str, Any]:
    case = make_case([5, 6])
    arguments = {"q": case.q, "k": case.k, "v": case.v, "block_ids": case.block_ids, "microbatch": case.microbatch}
    return {**arguments, **{name: change(arguments[name]) for name, change in replaced.items()}}


REFUSALS: dict[str, tuple[dict[str, Any], type[ValueError], str]] = {
    "axes": ({"q": lambda q: q[0]}, ArgumentValueError, "q, k and v have the wrong shape"),
    "k and v": ({"v": lambda v: v[:, :1]}, ArgumentValueError, "q, k and v have the wrong shape"),
    "head dimension": ({"q": lambda q: q[..., :4]}, ArgumentValueError, "q, k and v have the wrong shape"),
    "head ratio": ({"q": lambda q: q[:, :3]}, ArgumentValueError, "power of two up to 16"),
    "fewer query heads": ({"q": lambda q: q[:, :1]}, ArgumentValueError, "power of two up to 16"),
    "dtype": ({"k": lambda k: k.float()}, ArgumentValueError, "one floating-point dtype"),
    "integers": (
        {"q": lambda q: q.int(), "k": lambda k: k.int(), "v": lambda v: v.int()},
        ArgumentValueError,
        "one floating-point dtype",
    ),
    "ids dtype": ({"block_ids": lambda ids: ids.long()}, ArgumentValueError, "block_ids must be int32"),
    "device": ({"k": lambda k: k.to("meta")}, ArgumentValueError, "must be on one device"),
    "tokens": ({"microbatch": lambda _: Microbatch.from_cu_seqlens(bounds([5, 7]))}, StalePlanError, "q and k do not"),
    "ids tokens": ({"block_ids": lambda ids: ids[:, 1:]}, StalePlanError, "block_ids do not belong"),
    "ids heads": ({"block_ids": lambda ids: ids[:1]}, StalePlanError, "block_ids do not belong"),
    "ids axes": ({"block_ids": lambda ids: ids[0]}, StalePlanError, "block_ids do not belong"),
    "width": ({"block_ids": lambda ids: ids[..., :3]}, ArgumentValueError, "another number of blocks"),
    "micro-batch elsewhere": (
        {"microbatch": lambda m: Microbatch.from_cu_seqlens(m.cu_seqlens.clone(), device="meta")},
        ArgumentValueError,
        "the micro-batch is on another device",
    ),
}


@pytest.mark.parametrize(("replaced", "error", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_unusable_arguments_are_refused(replaced: dict[str, Any], error: type[ValueError], message: str) -> None:
    """Guards each check before a launch: after it, the error would be an illegal address."""
    with pytest.raises(error, match=message):
        sparse_attention(**wrong(**replaced))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale_must_be_finite(scale: float) -> None:
    """Guards a NaN that would reach every weight."""
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        sparse_attention(**wrong(), softmax_scale=scale)
