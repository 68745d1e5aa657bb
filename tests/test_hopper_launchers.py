"""The SM90 launchers on a host without a Hopper GPU: what they refuse, before anything is compiled or launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msa_vendored import kernels
from msa_vendored.backward.checks import ArgumentValueError
from msa_vendored.errors import UnavailableError
from msa_vendored.hopper import csr, launchers

IDS = torch.zeros((4, 3, 4), dtype=torch.int32)
CU = torch.tensor([0, 1, 3], dtype=torch.int32)
TENSOR = torch.zeros(3, 4, 128)

CALLS: dict[str, Any] = {
    "build_k2q_csr": lambda bound: bound.build_k2q_csr(IDS, CU, CU, 128, total_k=3),
    "sparse_atten_func": lambda bound: bound.sparse_atten_func(TENSOR, TENSOR, TENSOR, IDS, IDS, 4),
    "fmha_sm100": lambda bound: bound.fmha_sm100(TENSOR, TENSOR, TENSOR, None),
    "run_backward": lambda bound: bound.run_backward(q=TENSOR),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_launcher_refuses_another_device_by_name(name: str) -> None:
    """Guards a kernel for sm_90a that is launched elsewhere, or compiled for minutes before it is refused."""
    with pytest.raises(UnavailableError, match=f"the sm90 launcher {name} cannot run on this device") as caught:
        CALLS[name](kernels(backend="sm90"))
    assert caught.value.got == "device cpu"
    assert caught.value.next_command is not None
    assert 'backend="reference"' in caught.value.next_command


@pytest.mark.parametrize(("capability", "got"), [((8, 0), "a card, compute capability 8.0"), ((9, 0), None)])
def test_only_compute_capability_9_0_is_taken(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], got: str | None
) -> None:
    """Guards against 10.0 and 9.x, for which sm_90a code does not load."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    assert launchers.describe_mismatch(torch.device("cuda", 0)) == got


ROWS = [
    # total_rows, total_k, documents, answer
    (None, 129, 1, 2),
    (2, 129, 1, 2),
    (7, 129, 3, 7),
]


@pytest.mark.parametrize(("total_rows", "total_k", "documents", "answer"), ROWS)
def test_rows_come_from_numbers_on_the_host(total_rows: int | None, total_k: int, documents: int, answer: int) -> None:
    """Guards the exact-rows trap for one document: 129 keys are two rows, and 128 // 128 = 1 would drop edges."""
    assert csr.require_rows(total_rows, total_k, documents) == answer


@pytest.mark.parametrize(("total_rows", "total_k", "documents"), [(None, 128, 2), (1, 129, 2)])
def test_rows_that_cannot_be_right_are_refused(total_rows: int | None, total_k: int, documents: int) -> None:
    """Guards the official guess total_k // 128, and a synchronisation to find the number out."""
    with pytest.raises(ArgumentValueError, match="total_rows") as caught:
        csr.require_rows(total_rows, total_k, documents)
    assert caught.value.next_command == "pass total_rows=microbatch.workspace_size // 128"
