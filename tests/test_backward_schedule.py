"""The backward schedule: contract, validation messages, and the checks on its content."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from msa_vendored.backward import MSABackwardSchedule
from msa_vendored.backward.checks import ArgumentTypeError, ArgumentValueError
from msa_vendored.backward.documents import workspace_documents
from msa_vendored.backward.worklist import schedule_worklist
from msa_vendored.errors import MSAVendoredError
from msa_vendored.reference import BackwardSchedule

NAMES = ("row_ptr", "q_indices", "scheduler_metadata", "work_count", "cu_seqlens", "document_workspace_starts")


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors() -> dict[str, torch.Tensor]:
    """Two documents of 3 and 130 tokens: rows (0, 0), (1, 0), (1, 1); only index head 0 selects anything."""
    row_ptr = torch.zeros((4, 4), dtype=torch.int32)
    row_ptr[0] = ints(0, 2, 3, 4)
    q_indices = torch.full((4, 6), -1, dtype=torch.int32)
    q_indices[0, :4] = ints(0, 2, 7, 129)
    items = ([0, 0, 0, 2, 0, 0], [0, 1, 0, 1, 1, 0], [0, 2, 0, 1, 1, 1], [99, -5, 77, 1 << 30, -1, 9])
    return {
        "row_ptr": row_ptr,
        "q_indices": q_indices,
        "scheduler_metadata": ints(*items),
        "work_count": ints(3),
        "cu_seqlens": ints(0, 3, 133),
        "document_workspace_starts": ints(0, 128),
    }


def read(schedule: MSABackwardSchedule, tokens: int = 133, workspace_rows: int = 384) -> None:
    documents = workspace_documents(schedule, tokens=tokens, workspace_rows=workspace_rows)
    schedule_worklist(schedule, documents, 128)


def test_fields_are_the_contract() -> None:
    """Guards against a renamed or reordered field: callers construct the schedule by position and by name."""
    assert tuple(field.name for field in fields(MSABackwardSchedule)) == NAMES
    assert MSABackwardSchedule.__slots__ == NAMES
    schedule = MSABackwardSchedule(*tensors().values())
    with pytest.raises(FrozenInstanceError):
        schedule.row_ptr = ints(1)  # type: ignore[misc]  # the assignment is what must fail


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_are_type_errors(name: str) -> None:
    """Guards against int64 metadata, which a kernel would read as pairs of int32."""
    values = tensors()
    values[name] = values[name].long()
    with pytest.raises(TypeError) as caught:
        MSABackwardSchedule(**values)
    assert isinstance(caught.value, MSAVendoredError)
    assert str(caught.value) == (
        f"{name} has the wrong dtype\n  where:    argument {name}\n  expected: torch.int32\n  got:      torch.int64"
    )


def test_lists_are_type_errors() -> None:
    """Guards against a list that would only fail inside the engine."""
    values: dict[str, Any] = tensors()
    values["cu_seqlens"] = [0, 3, 133]
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor"):
        MSABackwardSchedule(**values)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("row_ptr", torch.zeros((4,), dtype=torch.int32), "[4, rows + 1]"),
        ("row_ptr", torch.zeros((2, 4), dtype=torch.int32), "[4, rows + 1]"),
        ("row_ptr", torch.zeros((4, 1), dtype=torch.int32), "at least 2"),
        ("q_indices", torch.zeros((3, 6), dtype=torch.int32), "[4, edge_capacity]"),
        ("q_indices", torch.zeros((4, 6, 1), dtype=torch.int32), "[4, edge_capacity]"),
        ("scheduler_metadata", torch.zeros((4, 5), dtype=torch.int32), "[work_capacity, 6]"),
        ("work_count", torch.zeros((), dtype=torch.int32), "[1]"),
        ("work_count", torch.zeros((2,), dtype=torch.int32), "[1]"),
        ("cu_seqlens", torch.zeros((3, 1), dtype=torch.int32), "[documents + 1]"),
        ("cu_seqlens", torch.zeros((1,), dtype=torch.int32), "at least 2"),
        ("document_workspace_starts", torch.zeros((3,), dtype=torch.int32), "[2]"),
    ],
)
def test_other_shapes_are_value_errors(name: str, value: torch.Tensor, expected: str) -> None:
    """Guards against shapes that would be read out of bounds."""
    with pytest.raises(ValueError, match=f"{name} has the wrong shape") as caught:
        MSABackwardSchedule(**{**tensors(), name: value})
    assert isinstance(caught.value, ArgumentValueError)
    assert caught.value.expected == expected
    assert str(caught.value.where).startswith(f"argument {name}")


def test_the_reference_schedule_takes_any_number_of_index_heads() -> None:
    """Guards the generality of the reference, and that it does not loosen the SM100 schedule."""
    values = tensors()
    two = {**values, "row_ptr": values["row_ptr"][:2].contiguous(), "q_indices": values["q_indices"][:2].contiguous()}
    read(BackwardSchedule(**two))
    with pytest.raises(ValueError, match="row_ptr has the wrong shape"):
        MSABackwardSchedule(**two)


def test_rows_above_work_count_are_not_read() -> None:
    """Guards the capacity convention: the fourth item of the example is garbage."""
    read(MSABackwardSchedule(**tensors()))
    with pytest.raises(ValueError, match="index_head out of range"):
        read(MSABackwardSchedule(**{**tensors(), "work_count": ints(4)}))


@pytest.mark.parametrize(
    ("item", "column", "value", "message"),
    [
        (0, 0, 4, "a work item has index_head out of range"),
        (0, 0, -1, "a work item has index_head out of range"),
        (1, 1, 3, "a work item has row_linear out of range"),
        (1, 4, 2, "a work item has document_ordinal out of range"),
        (2, 5, 2, "a work item has document_local_kblock out of range"),
        (2, 5, -1, "a work item has document_local_kblock out of range"),
        (0, 2, -1, "a work item has q_begin + q_count out of range"),
        (0, 3, 3, "a work item has q_begin + q_count out of range"),
        (0, 3, -1, "a work item has q_begin + q_count out of range"),
    ],
)
def test_items_that_point_outside_are_refused(item: int, column: int, value: int, message: str) -> None:
    """Guards against gathering rows of another head, document or block."""
    values = tensors()
    values["scheduler_metadata"][item, column] = value
    with pytest.raises(ArgumentValueError) as caught:
        read(MSABackwardSchedule(**values))
    assert caught.value.what == message
    assert str(caught.value.where).startswith("argument schedule.scheduler_metadata")


@pytest.mark.parametrize("count", [-1, 5])
def test_a_work_count_outside_the_capacity_is_refused(count: int) -> None:
    """Guards against a truncated schedule, whose gradients would lack the items that did not fit."""
    with pytest.raises(ArgumentValueError) as caught:
        read(MSABackwardSchedule(**{**tensors(), "work_count": ints(count)}))
    assert str(caught.value) == (
        "work_count is outside the capacity of scheduler_metadata\n  where:    argument schedule.work_count\n"
        f"  expected: 0 to 4\n  got:      {count}"
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row_ptr", ints(0, 2, 1, 4), "row_ptr is not monotone within the edges"),
        ("row_ptr", ints(0, 2, 3, 7), "row_ptr is not monotone within the edges"),
        ("row_ptr", ints(-1, 2, 3, 4), "row_ptr is not monotone within the edges"),
        ("q_indices", ints(0, 3, 7, 129, -1, -1), "a query lies outside its document"),
        ("q_indices", ints(0, 2, -1, 129, -1, -1), "a query lies outside its document"),
    ],
)
def test_a_broken_csr_is_refused(name: str, value: torch.Tensor, message: str) -> None:
    """Guards against edges of another document: query 3 of a 3-token document is the next document's first."""
    values = tensors()
    values[name][0] = value
    with pytest.raises(ArgumentValueError) as caught:
        read(MSABackwardSchedule(**values))
    assert caught.value.what == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens", ints(1, 3, 133), "schedule.cu_seqlens does not start at 0"),
        ("cu_seqlens", ints(0, 0, 133), "schedule.cu_seqlens has an empty document"),
        ("cu_seqlens", ints(0, 134, 133), "schedule.cu_seqlens has an empty document"),
        ("cu_seqlens", ints(0, 3, 132), "schedule.cu_seqlens does not end at the number of tokens"),
        ("document_workspace_starts", ints(0, 64), "a document does not lie in the workspace"),
        ("document_workspace_starts", ints(-128, 128), "a document does not lie in the workspace"),
        ("document_workspace_starts", ints(0, 256), "a document does not lie in the workspace"),
        ("document_workspace_starts", ints(128, 0), "two documents share workspace rows"),
    ],
)
def test_documents_that_do_not_fit_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    """Guards against the stale plan of another micro-batch, and keys outside the workspace."""
    with pytest.raises(ArgumentValueError) as caught:
        read(MSABackwardSchedule(**{**tensors(), name: value}))
    assert caught.value.what == message


def test_errors_can_be_caught_as_the_builtin_and_as_ours() -> None:
    """Guards the two ways callers branch: NeMo's tests on TypeError and ValueError, ours on attributes."""
    for kind, builtin in ((ArgumentTypeError, TypeError), (ArgumentValueError, ValueError)):
        assert issubclass(kind, MSAVendoredError)
        assert issubclass(kind, builtin)


def test_importing_the_package_leaves_torch_alone() -> None:
    """Guards the start-up time of build-time tools: names are resolved on first use."""
    code = (
        "import sys, msa_vendored.backward as b; assert 'torch' not in sys.modules; b.MSABackwardSchedule;"
        "assert 'torch' in sys.modules; assert b.run_backward and set(b.__all__) <= set(dir(b))\n"
        "try: b.nothing\nexcept AttributeError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "module 'msa_vendored.backward' has no attribute 'nothing'"


def test_replace_validates_again() -> None:
    """Guards that a derived schedule is checked like a new one."""
    with pytest.raises(ValueError, match="work_count has the wrong shape"):
        replace(MSABackwardSchedule(**tensors()), work_count=ints(1, 2))
