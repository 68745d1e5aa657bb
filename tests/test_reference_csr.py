"""``build_k2q_csr`` of the reference: CSR and schedule invariants, the row trap, and refusals."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_vendored.backward.checks import ArgumentValueError
from msa_vendored.reference import SparseAttentionSchedule, build_k2q_csr
from msa_vendored.reference.cases import make_case
from msa_vendored.reference.schedule import map_rows, schedule_from_csr

LENGTHS = st.lists(st.sampled_from([1, 2, 127, 128, 129, 257, 300]), min_size=1, max_size=4)

LONGEST = ("max_seqlen_k", "max_seqlen_q")

Edge = tuple[int, int, int, int]


@st.composite
def selections(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A selection with its prefix sums; key lengths may differ from query lengths."""
    lengths_q = draw(LENGTHS)
    lengths_k = draw(
        st.one_of(st.just(lengths_q), st.tuples(*(st.sampled_from([1, 128, 129, 400]) for _ in lengths_q)))
    )
    case = make_case(
        lengths_q, lengths_k, topk=draw(st.sampled_from([4, 8])), index_heads=draw(st.integers(1, 3)),
        heads_per_index_head=1, head_dim=1, own_block=draw(st.booleans()), seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip
    return case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k


def build(
    q2k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor, SparseAttentionSchedule]:
    arguments: dict[str, Any] = {
        "total_k": int(cu_k[-1]),
        "max_seqlen_k": int(cu_k.diff().max()),
        "max_seqlen_q": int(cu_q.diff().max()),
        "qhead_per_kv": 16,
        "return_schedule": True,
        **changes,
    }
    result: Any = build_k2q_csr(q2k, cu_q, cu_k, 128, **arguments)
    row_ptr, q_indices, schedule = result
    return row_ptr, q_indices, schedule


def selected_edges(q2k: torch.Tensor, cu_q: torch.Tensor) -> list[Edge]:
    """Every (head, document, block, query) of a selection, sorted."""
    edges = []
    for document, (start, stop) in enumerate(pairwise(cu_q.tolist())):
        for head, query, slot in (q2k[:, start:stop] >= 0).nonzero().tolist():
            edges.append((head, document, int(q2k[head, start + query, slot]), query))
    return sorted(edges)


def scheduled_edges(row_ptr: torch.Tensor, q_indices: torch.Tensor, schedule: SparseAttentionSchedule) -> list[Edge]:
    """The same, read through the work items."""
    edges = []
    for head, row, begin, count, document, block in schedule.scheduler_metadata[: int(schedule.work_count)].tolist():
        start = int(row_ptr[head, row]) + begin
        edges += [(head, document, block, query) for query in q_indices[head, start : start + count].tolist()]
    return sorted(edges)


@settings(max_examples=40, deadline=None)
@given(selections())
def test_every_edge_appears_exactly_once(selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Guards the inversion: no edge lost, doubled, or given to another document or block."""
    q2k, cu_q, cu_k = selection
    assert scheduled_edges(*build(q2k, cu_q, cu_k)) == selected_edges(q2k, cu_q)


@settings(max_examples=40, deadline=None)
@given(selections())
def test_csr_invariants(selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Guards what kernels rely on: row_ptr rises from 0 to the edge count, queries ascend in a row, the tail is -1."""
    q2k, cu_q, cu_k = selection
    row_ptr, q_indices, schedule = build(q2k, cu_q, cu_k)
    assert row_ptr.dtype == q_indices.dtype == torch.int32
    assert row_ptr.shape == (q2k.shape[0], sum(-(-n // 128) for n in cu_k.diff().tolist()) + 1)
    assert q_indices.shape == (q2k.shape[0], q2k.shape[1] * q2k.shape[2])
    assert not row_ptr[:, 0].any()
    assert (row_ptr.diff(dim=1) >= 0).all()
    assert torch.equal(row_ptr[:, -1].long(), (q2k >= 0).sum(dim=(1, 2)))
    for head in range(q2k.shape[0]):
        bounds = row_ptr[head].tolist()
        assert (q_indices[head, bounds[-1] :] == -1).all()
        assert (schedule.qsplit_indices[head, bounds[-1] :] == -1).all()
        for start, stop in pairwise(bounds):
            assert (q_indices[head, start:stop].diff() > 0).all()


def assert_schedule(
    q2k: torch.Tensor,
    cu_q: torch.Tensor,
    row_ptr: torch.Tensor,
    q_indices: torch.Tensor,
    schedule: SparseAttentionSchedule,
) -> None:
    count, metadata = int(schedule.work_count), schedule.scheduler_metadata
    assert schedule.enabled
    assert metadata.shape == (schedule.work_capacity, 6)
    assert 0 <= count <= schedule.work_capacity
    assert not metadata[count:].any()
    assert (metadata[:count, 3] > 0).all()
    assert (metadata[:count, 3] <= schedule.target_q_per_cta).all()
    assert torch.equal(schedule.split_counts, (q2k >= 0).sum(2).T.int())
    live = q_indices >= 0
    assert torch.equal(schedule.qsplit_indices[live] & 0xFFFFFF, q_indices[live])
    # The slots of a query's blocks are 0, 1, 2, ... in some order.
    tokens, slots = [], []
    for head, row, begin, items, document, _ in metadata[:count].tolist():
        edges = slice(int(row_ptr[head, row]) + begin, int(row_ptr[head, row]) + begin + items)
        tokens.append(head * q2k.shape[1] + cu_q[document] + q_indices[head, edges])
        slots.append(schedule.qsplit_indices[head, edges] >> 24)
    if tokens:
        token, slot = torch.cat(tokens).long(), torch.cat(slots).long()
        used = torch.zeros((q2k.shape[0] * q2k.shape[1], q2k.shape[2]), dtype=torch.long)
        used.index_put_((token, slot), torch.ones_like(token), accumulate=True)
        assert torch.equal(used, (q2k >= 0).sort(dim=2, descending=True).values.flatten(0, 1).long())


@settings(max_examples=25, deadline=None)
@given(selections())
def test_schedule_invariants(selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Guards the schedule, built with the CSR or from it: capacity, zero tail, one slot per block of a query."""
    q2k, cu_q, cu_k = selection
    row_ptr, q_indices, schedule = build(q2k, cu_q, cu_k)
    assert_schedule(q2k, cu_q, row_ptr, q_indices, schedule)
    rebuilt = schedule_from_csr(row_ptr, q_indices, cu_q, cu_k, topk=q2k.shape[2], heads_per_index_head=16)
    assert_schedule(q2k, cu_q, row_ptr, q_indices, rebuilt)
    assert torch.equal(rebuilt.scheduler_metadata, schedule.scheduler_metadata)


@settings(max_examples=15, deadline=None)
@given(selections(), st.integers(0, 2**31))
def test_the_order_of_a_selection_does_not_matter(
    selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor], seed: int
) -> None:
    """Guards against results that depend on how top-k happened to sort."""
    q2k, cu_q, cu_k = selection
    noise = torch.rand(q2k.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(q2k < 0, 2)
    shuffled = q2k.gather(2, noise.argsort(dim=2)).contiguous()
    for got, want in zip(build(shuffled, cu_q, cu_k)[:2], build(q2k, cu_q, cu_k)[:2], strict=True):
        assert torch.equal(got, want)


def test_rows_are_numbered_block_major() -> None:
    """Guards the official numbering: block 0 of every document first, then block 1 of those that have one."""
    rows = map_rows(torch.tensor([0, 300, 305, 505], dtype=torch.int32))
    assert rows.document.tolist() == [0, 1, 2, 0, 2, 0]
    assert rows.block.tolist() == [0, 0, 0, 1, 1, 2]
    assert [int(rows.row_of_block[rows.first_block[0] + block]) for block in range(3)] == [0, 3, 5]


def test_a_long_row_is_cut_into_work_items() -> None:
    """Guards the cut: one document, every query selects block 0, so row 0 has 2,000 queries per head."""
    q2k = torch.full((4, 2000, 4), -1, dtype=torch.int32)
    q2k[:, :, 0] = 0
    cu = torch.tensor([0, 2000], dtype=torch.int32)
    row_ptr, q_indices, schedule = build(q2k, cu, cu)
    # 32,000 references in groups of 8 queries over 2 x 148 items: 14 groups of 8.
    assert schedule.target_q_per_cta == 112
    assert int(schedule.work_count) == 4 * -(-2000 // 112)
    assert schedule.work_capacity == 4 * 16 + -(-32000 // 112)
    assert scheduled_edges(row_ptr, q_indices, schedule) == selected_edges(q2k, cu)


@pytest.mark.parametrize(("total_rows", "rows"), [(None, 2), (2, 2), (5, 5)])
def test_rows_are_exact_where_the_official_builder_drops_edges(total_rows: int | None, rows: int) -> None:
    """Guards the trap: two documents of 64 keys have 2 rows, though 128 keys divide into one block of 128."""
    q2k = torch.full((1, 128, 4), -1, dtype=torch.int32)
    q2k[:, :, 0] = 0
    cu = torch.tensor([0, 64, 128], dtype=torch.int32)
    row_ptr, q_indices, schedule = build(q2k, cu, cu, total_rows=total_rows)
    assert row_ptr.tolist() == [[0, 64, *[128] * (rows - 1)]]
    assert q_indices[0, :128].tolist() == [*range(64), *range(64)]
    assert schedule.scheduler_metadata[: int(schedule.work_count), 1].max() == 1


def test_too_few_rows_are_refused() -> None:
    """Guards the same trap when the caller passes the official guess."""
    q2k = torch.zeros((1, 128, 4), dtype=torch.int32)
    cu = torch.tensor([0, 64, 128], dtype=torch.int32)
    with pytest.raises(ValueError) as caught:
        build(q2k, cu, cu, total_rows=1)
    assert str(caught.value) == (
        "total_rows is smaller than the number of key blocks, and their queries would be dropped\n"
        "  where:    argument total_rows\n"
        "  expected: at least 2, the sum over documents of ceil(keys / 128)\n"
        "  got:      1"
    )


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = make_case((200, 3), index_heads=2, heads_per_index_head=1, head_dim=1)
    return case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k


@pytest.mark.parametrize(
    ("query", "blocks", "message"),
    [
        (150, [0, 0, -1, -1], "a selection names a block twice, which would count its keys twice"),
        (150, [1, 0, 1, -1], "a selection names a block twice, which would count its keys twice"),
        (150, [-1, 0, 1, -1], "a selection has -1 before its end"),
        (150, [0, -1, 1, -1], "a selection has -1 before its end"),
        (150, [2, -1, -1, -1], "a selection names a block beyond its document"),
        (201, [1, -1, -1, -1], "a selection names a block beyond its document"),
        (150, [-2, -1, -1, -1], "a selection has a negative block other than -1"),
    ],
)
def test_bad_selections_are_refused(query: int, blocks: list[int], message: str) -> None:
    """Guards what the GPU builder leaves undefined: it drops blocks out of range and counts duplicates twice."""
    q2k, cu_q, cu_k = example()
    q2k[1, query] = torch.tensor(blocks, dtype=torch.int32)
    with pytest.raises(ArgumentValueError) as caught:
        build(q2k, cu_q, cu_k)
    assert caught.value.what == message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q2k": lambda t: t.long()}, TypeError, "q2k_indices has the wrong dtype"),
        ({"q2k": lambda t: t[0]}, ValueError, "q2k_indices has the wrong shape"),
        ({"q2k": lambda t: t[:, :, :3]}, ValueError, "topK is not supported"),
        ({"q2k": lambda t: t.flip(0).transpose(0, 2).contiguous().transpose(0, 2)}, ValueError, "16-byte loads"),
        ({"q2k": lambda t: t[:, :-1]}, ValueError, "cu_seqlens_q does not end at the number of tokens"),
        ({"cu_q": lambda t: t.long()}, TypeError, "cu_seqlens_q has the wrong dtype"),
        ({"cu_q": lambda t: t[:1]}, ValueError, "cu_seqlens_q has the wrong shape"),
        ({"cu_q": lambda t: t.repeat_interleave(2)[::2]}, ValueError, "cu_seqlens_q must be contiguous"),
        ({"cu_k": lambda t: t[[0, 2]]}, ValueError, "cu_seqlens_k has the wrong shape"),
        ({"cu_q": lambda t: t * torch.tensor([1, 0, 1]).int()}, ValueError, "cu_seqlens_q has an empty document"),
        ({"cu_k": lambda t: t + 1}, ValueError, "cu_seqlens_k does not start at 0"),
        ({"total_k": None}, ValueError, r"total_k is required \(k.shape\[0\]\)"),
        ({"total_k": 202}, ValueError, "cu_seqlens_k does not end at the number of tokens"),
        ({"max_seqlen_k": None}, ValueError, "max_seqlen_k is required with return_schedule=True"),
        ({"max_seqlen_q": None}, ValueError, "max_seqlen_q is required with return_schedule=True"),
        ({"max_seqlen_q": 199}, ValueError, "max_seqlen_q is shorter than the longest document"),
        ({"max_seqlen_k": 199}, ValueError, "max_seqlen_k is shorter than the longest document"),
        ({"max_seqlen_q": 1 << 24}, ValueError, "a document is too long for packed split indices"),
        ({"qhead_per_kv": 0}, ValueError, "qhead_per_kv is not supported"),
        ({"qhead_per_kv": 17}, ValueError, "qhead_per_kv is not supported"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """Guards the official builder's checks, and those that it leaves to luck."""
    q2k, cu_q, cu_k = example()
    q2k, cu_q, cu_k = (changes.pop(n, lambda t: t)(t) for n, t in (("q2k", q2k), ("cu_q", cu_q), ("cu_k", cu_k)))
    with pytest.raises(error, match=message):
        build_k2q_csr(
            q2k, cu_q, cu_k, 128, return_schedule=True, **{"total_k": 203, **dict.fromkeys(LONGEST, 200), **changes}
        )


def test_other_block_sizes_are_refused() -> None:
    """Guards against a page size that kernels would accept and compute nonsense with."""
    with pytest.raises(ValueError, match="kv_block_size is not supported"):
        build_k2q_csr(*example(), 64, total_k=203)


def test_strided_selections_are_accepted_where_the_official_builder_does() -> None:
    """Guards the transposed view [total_q, Hkv, topK] that top-k kernels produce."""
    q2k, cu_q, cu_k = example()
    view = q2k.transpose(0, 1).contiguous().transpose(0, 1)
    assert not view.is_contiguous()
    for got, want in zip(build(view, cu_q, cu_k)[:2], build(q2k, cu_q, cu_k)[:2], strict=True):
        assert torch.equal(got, want)


def test_the_signature_is_the_official_one() -> None:
    """Guards drop-in use: names, order, kinds and defaults of the official launcher."""
    parameters = inspect.signature(build_k2q_csr).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "q2k_indices", "cu_seqlens_q", "cu_seqlens_k", "kv_block_size",
    ]  # fmt: skip
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "total_k": None,
        "max_seqlen_k": None,
        "max_seqlen_q": None,
        "total_rows": None,
        "qhead_per_kv": 1,
        "return_schedule": False,
    }
