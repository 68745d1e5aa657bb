"""Orders of the accumulators: what postprocess reads back, without a GPU and without the DSL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.backward.pool_order import (
    ROW_ORDER,
    SM90_DKV_ORDER,
    SM100_DKV_ORDER,
    element_index,
    head_group_order,
    plan_granules,
)

ORDERS = {
    "rows": (ROW_ORDER, 4),
    **{f"sm100 dq fp32, {g} heads": (head_group_order(g), 4) for g in (1, 2, 4)},
    **{f"sm100 dq bf16, {g} heads": (head_group_order(g), 2) for g in (1, 2, 4, 8)},
    "sm90 dq bf16": (ROW_ORDER, 2),
    "sm100 dk, dv": (SM100_DKV_ORDER, 4),
    "sm90 dk, dv": (SM90_DKV_ORDER, 4),
}


def require_plan(order: str, element_bytes: int) -> None:
    """Every element of a tile is read once, by the granule that writes it, in whole vectors and octets."""
    plan = plan_granules(order, element_bytes)
    read, written = set(), set()
    for granule in range(plan.granules_per_tile):
        bits = [stride for i, stride in enumerate(plan.strides) if granule >> i & 1]
        pool, first_row, first_d = (sum(getattr(s, name) for s in bits) for name in ("pool", "row", "d"))
        for row, d, sources in plan.octets:
            assert (first_d + d) % 8 == 0
            for k, (vector, element) in enumerate(sources):
                place = first_row + row, first_d + d + k
                index = pool + plan.vectors[vector] + element
                assert index == element_index(order, *place)
                read.add(index)
                written.add(place)
        assert all((pool + vector) * element_bytes % 16 == 0 for vector in plan.vectors)
        assert len(plan.vectors) * 16 // element_bytes == len(plan.octets) * 8  # nothing is read in vain
    assert read == set(range(plan.tile_rows * 128))
    assert written == {(row, d) for row in range(plan.tile_rows) for d in range(128)}


@pytest.mark.parametrize("name", ORDERS)
def test_granules_of_the_kernels_orders(name: str) -> None:
    """Gradients permuted, or read twice as many bytes as they have."""
    require_plan(*ORDERS[name])


@given(st.permutations([*(f"d{i}" for i in range(7)), "r0", "r1"]), st.sampled_from([2, 4]))
def test_granules_of_any_order(bits: list[str], element_bytes: int) -> None:
    """A plan that is right only for the orders in use: a kernel may change how it accumulates."""
    require_plan(" ".join(bits), element_bytes)


def test_orders_spell_the_documented_layouts() -> None:
    """An order that no longer says what the main kernels' documents say."""
    for row in range(128):
        for d in range(128):
            assert element_index(SM100_DKV_ORDER, row, d) == (d // 4 * 128 + row) * 4 + d % 4
            assert element_index(head_group_order(4), row % 4, d) == d * 4 + row % 4
    assert head_group_order(1) == ROW_ORDER


@pytest.mark.parametrize("order", ["", "d0 d1 d2 d3 d4 d5", "d0 d0 d1 d2 d3 d4 d5", "d0 d1 d2 d3 d4 d5 d6 r1"])
def test_what_is_no_order_is_refused(order: str) -> None:
    """A misspelt order that silently drops or doubles elements."""
    with pytest.raises(ValueError, match="not an order"):
        plan_granules(order, 4)
