"""Carving of the backward's one allocation."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.backward.workspace import REGION_ALIGNMENT_BYTES, Region, plan_workspace

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.uint8])
SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
REGIONS = st.lists(st.tuples(DTYPES, SHAPES, st.booleans()), min_size=1, max_size=12).map(
    lambda parts: [Region(f"r{i}", *part) for i, part in enumerate(parts)]
)


@given(REGIONS)
def test_regions_are_aligned_disjoint_and_as_asked(regions: list[Region]) -> None:
    """Guards two tables that share bytes, a table that ends early, and 128-bit accesses that fault."""
    plan = plan_workspace(regions)
    tensors = plan.allocate(torch.device("cpu"))
    taken: list[tuple[int, int]] = []
    for region in regions:
        tensor = tensors[region.name]
        assert tensor.dtype == region.dtype
        assert tuple(tensor.shape) == region.shape
        assert tensor.is_contiguous()
        if tensor.numel():  # torch gives an empty tensor the address 0
            assert tensor.data_ptr() % REGION_ALIGNMENT_BYTES == 0
            taken.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
    assert all(one[1] <= other[0] for one, other in pairwise(sorted(taken)))
    storage = tensors["r0"].untyped_storage()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert storage.nbytes() == plan.total_bytes + REGION_ALIGNMENT_BYTES - 1
    assert all(end <= storage.data_ptr() + storage.nbytes() for _, end in taken)


@given(REGIONS)
def test_what_is_zeroed_is_exactly_what_was_asked(regions: list[Region]) -> None:
    """Guards a pool that starts with the last call's values, and bytes that are cleared for nothing."""
    plan = plan_workspace(regions)
    original = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: original(*a, **k).fill_(0xA5))
        tensors = plan.allocate(torch.device("cpu"))
    for region in regions:
        bytes_of_region = tensors[region.name].flatten().view(torch.uint8)
        assert bool((bytes_of_region == (0 if region.zeroed else 0xA5)).all())
    rounded = [-(-r.size_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES for r in regions]
    assert plan.zeroed_bytes == sum(size for size, region in zip(rounded, regions, strict=True) if region.zeroed)
    assert plan.total_bytes == sum(rounded)


def test_two_regions_of_one_name_are_refused() -> None:
    """Guards a table that silently replaces another."""
    with pytest.raises(ValueError, match="share a name"):
        plan_workspace([Region("delta", torch.float32, (1,)), Region("delta", torch.float32, (2,))])
