"""Microbatch: coordinates of packed documents, their inverses, errors and the memo."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_vendored.errors import MSAVendoredError
from msa_vendored.training import ArgumentValueError, Microbatch, StalePlanError, layout
from msa_vendored.training.layout import TensorMemo
from msa_vendored.training.microbatch import FIELD_NAMES


def test_document_map_gives_the_coordinates_that_a_hand_count_gives() -> None:
    """Guards against off-by-one starts, a wrong document order, or padding counted as a token."""
    doc_ids = torch.tensor([[7, 7, 2, 2, 0, 5], [3, 3, 3, 0, 7, 7]])
    microbatch = Microbatch.from_document_map(doc_ids, (2, 1))
    expected = {
        "padding_mask": [[False] * 4 + [True, False], [False] * 3 + [True, False, False]],
        "token_rows": [0, 1, 2, 3, 5, 6, 7, 8, 10, 11],
        "workspace_positions": [0, 1, 128, 129, 256, 384, 385, 386, 512, 513],
        "document_positions": [0, 1, 0, 1, 0, 0, 1, 2, 0, 1],
        "document_workspace_starts": [0, 128, 256, 384, 512],
        "cu_seqlens": [0, 2, 4, 5, 8, 10],
        "key_cu_seqlens": [0, 2, 4, 5, 8, 10],
        "csr_rows": [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0]],
        "lengths": [2, 2, 1, 3, 2],
        "key_lengths": [2, 2, 1, 3, 2],
    }
    assert {name: getattr(microbatch, name).tolist() for name in expected} == expected
    assert (microbatch.workspace_size, microbatch.max_seqlen, microbatch.max_key_seqlen) == (640, 3, 3)
    assert (microbatch.num_tokens, microbatch.num_key_tokens, microbatch.num_documents) == (10, 10, 5)
    assert microbatch.query_rows is None
    assert microbatch.forced_blocks == (2, 1)


def test_field_dtypes_are_the_contract() -> None:
    """Guards the dtypes that the launchers and NeMo's layer index with."""
    microbatch = Microbatch.from_document_map(torch.ones(1, 200, dtype=torch.int32))
    dtypes = {
        name: getattr(microbatch, name).dtype for name in FIELD_NAMES if hasattr(getattr(microbatch, name), "dtype")
    }
    assert dtypes == {
        "padding_mask": torch.bool,
        "token_rows": torch.int64,
        "workspace_positions": torch.int64,
        "document_positions": torch.int64,
        "document_workspace_starts": torch.int32,
        "cu_seqlens": torch.int32,
        "key_cu_seqlens": torch.int32,
        "csr_rows": torch.int32,
        "lengths": torch.int32,
        "key_lengths": torch.int32,
    }


def test_no_field_name_is_a_prefix_of_another() -> None:
    """Guards torch.export, whose guards replace field names as text."""
    assert not [(a, b) for a, b in itertools.permutations(FIELD_NAMES, 2) if b.startswith(a)]


def test_csr_rows_go_level_by_level() -> None:
    """Guards the official row order: block 0 of every document, then block 1 of those that have one."""
    microbatch = Microbatch.from_cu_seqlens(torch.tensor([0, 129, 130, 430]))
    assert microbatch.csr_rows.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [2, 1], [2, 2]]


def test_prefix_places_queries_at_the_end_of_their_keys() -> None:
    """Guards bottom-right alignment where a document has more keys than queries."""
    microbatch = Microbatch.from_cu_seqlens(torch.tensor([0, 2, 5]), key_cu_seqlens=torch.tensor([0, 130, 133]))
    assert microbatch.document_positions.tolist() == [128, 129, 0, 1, 2]
    assert microbatch.query_rows is not None
    assert microbatch.query_rows.tolist() == [128, 129, 130, 131, 132]
    assert microbatch.workspace_positions.tolist() == [*range(130), 256, 257, 258]
    assert (microbatch.max_seqlen, microbatch.max_key_seqlen, microbatch.num_key_tokens) == (3, 130, 133)


def document_maps() -> st.SearchStrategy[torch.Tensor]:
    """Maps of 1 to 3 rows of documents and padding, with at least one document; ids may recur in another row."""
    row = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 2, 127, 128, 129, 300])), min_size=1, max_size=4)
    return (
        st.lists(row, min_size=1, max_size=3).filter(lambda rows: any(real for r in rows for real, _ in r)).map(_fill)
    )


def _fill(rows: list[list[tuple[int, int]]]) -> torch.Tensor:
    width = max(sum(length for _, length in row) for row in rows)
    doc_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        column = 0
        for ordinal, (real, length) in enumerate(row):
            doc_ids[index, column : column + length] = real * (ordinal + 1)
            column += length
    return doc_ids


@settings(max_examples=60, deadline=None)
@given(document_maps())
def test_pack_and_unpack_and_workspace_are_inverses(doc_ids: torch.Tensor) -> None:
    """Guards tokens lost, moved to another place, or written into padding or a document's tail rows."""
    microbatch = Microbatch.from_document_map(doc_ids)
    batch = torch.randn(*doc_ids.shape, 3, dtype=torch.float64)
    compact = microbatch.pack(batch)
    assert torch.equal(microbatch.unpack(compact), batch * (doc_ids > 0)[..., None])
    workspace = microbatch.to_workspace(compact)
    assert torch.equal(microbatch.from_workspace(workspace), compact)
    used = torch.zeros(microbatch.workspace_size, dtype=torch.bool)
    used[microbatch.workspace_positions] = True
    assert not workspace[~used].any()
    assert int(used.sum()) == microbatch.num_tokens


@settings(max_examples=60, deadline=None)
@given(document_maps())
def test_every_document_is_aligned_and_contiguous_in_the_workspace(doc_ids: torch.Tensor) -> None:
    """Guards overlapping documents and starts that are not multiples of 128."""
    microbatch = Microbatch.from_document_map(doc_ids)
    starts = microbatch.document_workspace_starts.tolist()
    bounds = microbatch.cu_seqlens.tolist()
    end = 0
    for start, (first, last) in zip(starts, itertools.pairwise(bounds), strict=True):
        assert start == end
        positions = microbatch.workspace_positions[first:last].tolist()
        assert positions == list(range(start, start + last - first))
        end = start + -(-(last - first) // 128) * 128
    assert microbatch.workspace_size == end


def test_cu_seqlens_and_document_map_agree() -> None:
    """Guards the two constructors drifting apart."""
    lengths = [1, 127, 128, 129, 300]
    doc_ids = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    by_map, by_bounds = Microbatch.from_document_map(doc_ids), Microbatch.from_cu_seqlens(cu_seqlens)
    for name in FIELD_NAMES:
        left, right = getattr(by_map, name), getattr(by_bounds, name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, name


@pytest.mark.parametrize("method", ["pack", "unpack", "to_workspace", "from_workspace"])
def test_packing_is_differentiable(method: str) -> None:
    """Guards gradients that a scatter or gather would drop."""
    microbatch = Microbatch.from_document_map(torch.tensor([[1, 1, 0, 2]]))
    sizes = {"pack": (1, 4), "unpack": (3,), "to_workspace": (3,), "from_workspace": (256,)}
    value = torch.randn(*sizes[method], 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(microbatch, method), (value,))


MAP_ERRORS = {
    "one axis": (torch.ones(4, dtype=torch.int64), r"expected: a \[batch, sequence\] tensor"),
    "floats": (torch.ones(1, 4), "doc_ids must be an integer tensor"),
    "booleans": (torch.ones(1, 4, dtype=torch.bool), "doc_ids must be an integer tensor"),
    "negative": (torch.tensor([[1, 1], [2, -3]]), r"where:    doc_ids\[1, 1\]"),
    "only padding": (torch.zeros(2, 3, dtype=torch.int64), "doc_ids holds no real token"),
    "no tokens at all": (torch.zeros(2, 0, dtype=torch.int64), "doc_ids holds no real token"),
    "interrupted by a document": (torch.tensor([[1, 2, 1]]), r"runs starting at columns \[0, 2\]"),
    "interrupted by padding": (torch.tensor([[3, 4], [5, 0]]).repeat(1, 2), "doc_ids interrupts document"),
}


@pytest.mark.parametrize(("doc_ids", "message"), MAP_ERRORS.values(), ids=MAP_ERRORS.keys())
def test_unusable_document_maps_are_refused(doc_ids: torch.Tensor, message: str) -> None:
    """Guards each ValueError of the contract: a bad map must not become wrong coordinates."""
    with pytest.raises(ValueError, match=message) as caught:
        Microbatch.from_document_map(doc_ids)
    assert isinstance(caught.value, MSAVendoredError)


BOUNDS_ERRORS = {
    "two axes": (torch.tensor([[0, 1]]), None, r"a \[documents \+ 1\] tensor"),
    "floats": (torch.tensor([0.0, 1.0]), None, "cu_seqlens must be an integer tensor"),
    "no document": (torch.tensor([0]), None, "cu_seqlens holds no document"),
    "first boundary": (torch.tensor([1, 2]), None, "cu_seqlens must start at 0"),
    "empty document": (torch.tensor([0, 5, 5, 6]), None, r"where:    cu_seqlens\[1:3\]"),
    "decreasing": (torch.tensor([0, 5, 4]), None, "cu_seqlens has an empty document"),
    "other documents": (torch.tensor([0, 5]), torch.tensor([0, 5, 6]), "another number of documents"),
    "fewer keys": (torch.tensor([0, 5]), torch.tensor([0, 4]), "document 0 has more queries than keys"),
    "empty keys": (torch.tensor([0, 5, 6]), torch.tensor([0, 6, 6]), "key_cu_seqlens has an empty document"),
}


@pytest.mark.parametrize(("bounds", "bounds_k", "message"), BOUNDS_ERRORS.values(), ids=BOUNDS_ERRORS.keys())
def test_unusable_boundaries_are_refused(bounds: torch.Tensor, bounds_k: torch.Tensor | None, message: str) -> None:
    """Guards against empty documents and int32 wrap-around reaching a launcher."""
    with pytest.raises(ValueError, match=message):
        Microbatch.from_cu_seqlens(bounds, key_cu_seqlens=bounds_k)


def test_coordinates_beyond_int32_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards int32 wrap-around: in the map, in the tokens, and in the workspace of tokens that still fit.

    With the bound lowered to 1000, since a map or layout of 2**31 tokens would take 16 GiB and more without the guard.
    """
    assert torch.iinfo(torch.int32).max == layout.INT32_MAX
    monkeypatch.setattr(layout, "INT32_MAX", 1000)
    with pytest.raises(ValueError, match="doc_ids needs coordinates beyond int32"):
        Microbatch.from_document_map(torch.ones(7, 143, dtype=torch.int64))
    with pytest.raises(ValueError, match="cu_seqlens needs coordinates beyond int32"):
        Microbatch.from_cu_seqlens(torch.tensor([0, 1001]))
    with pytest.raises(ValueError, match=r"the 128-aligned workspace needs coordinates beyond int32"):
        Microbatch.from_cu_seqlens(torch.tensor([0, 1000]))
    assert Microbatch.from_cu_seqlens(torch.tensor([0, 896])).workspace_size == 896


@pytest.mark.parametrize("forced", [(1,), (1, -1), (True, 1), (1.0, 1), (1, 1, 1)], ids=repr)
def test_unusable_forced_blocks_are_refused(forced: tuple[int, int]) -> None:
    """Guards a typo in the model's configuration."""
    with pytest.raises(ArgumentValueError, match="forced_blocks must be two counts of blocks"):
        Microbatch.from_document_map(torch.ones(1, 4, dtype=torch.int64), forced)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("pack", (1, 5, 2)),
        ("pack", (2, 4, 2)),
        ("pack", (4,)),
        ("unpack", (4, 2)),
        ("to_workspace", (4, 2)),
        ("from_workspace", (128, 2)),
    ],
)
def test_tensors_of_another_micro_batch_are_refused(method: str, shape: tuple[int, ...]) -> None:
    """Guards a micro-batch kept from an earlier step."""
    microbatch = Microbatch.from_document_map(torch.tensor([[1, 1, 0, 2]]))
    with pytest.raises(StalePlanError, match="does not belong to this micro-batch"):
        getattr(microbatch, method)(torch.zeros(*shape))


def test_memo_returns_the_same_value_until_the_map_is_written() -> None:
    """Guards both a plan rebuilt per layer and a stale one after an in-place update."""
    doc_ids = torch.tensor([[1, 1, 2]])
    first = Microbatch.from_document_map(doc_ids, (1, 1))
    assert Microbatch.from_document_map(doc_ids, (1, 1)) is first
    assert Microbatch.from_document_map(doc_ids, (0, 1)) is not first
    assert Microbatch.from_document_map(doc_ids.clone(), (1, 1)) is not first
    doc_ids[0, 2] = 1
    second = Microbatch.from_document_map(doc_ids, (1, 1))
    assert second.cu_seqlens.tolist() == [0, 3]
    assert Microbatch.from_document_map(doc_ids, (1, 1)) is second


def test_memo_does_not_keep_a_micro_batch_alive() -> None:
    """Guards a leak of one micro-batch per step."""
    doc_ids = torch.tensor([[1, 1, 2]])
    alive = weakref.ref(Microbatch.from_document_map(doc_ids))
    assert alive() is not None
    del doc_ids
    gc.collect()
    assert alive() is None


def test_memo_drops_values_of_older_versions() -> None:
    """Guards growth with every in-place write of a reused input buffer."""
    memo: TensorMemo[object] = TensorMemo()
    buffer = torch.zeros(2)

    class Value:
        pass

    alive = weakref.ref(memo.get(buffer, "a", Value))
    buffer += 1
    memo.get(buffer, "b", Value)
    gc.collect()
    assert alive() is None


def test_inference_tensors_have_no_version_and_are_not_memoised() -> None:
    """Guards torch's RuntimeError on ``_version``, and a value that in-place writes could not invalidate."""
    with torch.inference_mode():
        doc_ids = torch.tensor([[1, 1, 2]])
    first = Microbatch.from_document_map(doc_ids)
    with torch.inference_mode():
        doc_ids[0, 2] = 1
    assert Microbatch.from_document_map(doc_ids).cu_seqlens.tolist() == [0, 3]
    assert first.cu_seqlens.tolist() == [0, 2, 3]


def test_value_is_frozen_and_says_what_it_is() -> None:
    """Guards fields assigned by mistake, and a repr that prints whole tensors."""
    microbatch = Microbatch.from_document_map(torch.tensor([[1, 1, 0, 2]]))
    with pytest.raises(AttributeError):
        microbatch.max_seqlen = 5  # type: ignore[misc]  # the assignment under test
    assert repr(microbatch) == (
        "Microbatch(batch=[1, 4], tokens=3, key_tokens=3, documents=2, workspace_size=256, "
        "forced_blocks=(1, 1), device=cpu)"
    )


def test_package_imports_no_torch_until_a_name_is_used() -> None:
    """Guards the start-up time of tools that only look at the package."""
    code = "import sys, msa_vendored.training as t; assert 'torch' not in sys.modules; assert t.Microbatch"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    import msa_vendored.training

    with pytest.raises(AttributeError, match="has no attribute 'microbatches'"):
        _ = msa_vendored.training.microbatches
