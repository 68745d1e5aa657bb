"""MN-major tf32 operands in the PTX emulator, with the layouts and descriptors that CuTe DSL makes."""

from __future__ import annotations

from typing import Any

import pytest
from child_processes import run_module
from ptx_emulator import load_kernels
from ptx_emulator.program import UnsupportedPtxError
from ptx_emulator.snippets import module
from ptx_emulator.tf32_gemm import CASES

REFUSED = "another_swizzle"
"""The DSL compiles it, against its own documentation of the operation."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case, in one process that compiles for sm_100a."""
    lines = run_module("ptx_emulator.tf32_gemm", folder=tmp_path_factory.mktemp("tf32"), timeout_s=300)
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", [name for name in CASES if name != REFUSED])
def test_products_are_those_of_the_dsl(results: dict[str, dict[str, Any]], case: str) -> None:
    """A swizzle, or a meaning of the two offsets of a descriptor, that is not the DSL's."""
    assert results[case]["findings"] == []
    assert results[case]["right"]


def test_a_layout_that_is_not_documented_is_refused(results: dict[str, dict[str, Any]]) -> None:
    """A guess at what the hardware makes of it."""
    (finding,) = results[REFUSED]["findings"]
    assert "MN-major tf32 operand with matrix descriptor layout 2" in finding


@pytest.mark.parametrize("transposed", ["1, 0", "0, 1"])
def test_wgmma_takes_no_mn_major_tf32(transposed: str) -> None:
    """The SM90 instruction has no such form; it must not get the layout of SM100."""
    registers = "{%f0, %f1, %f2, %f3}"
    body = f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {registers}, %d1, %d2, 1, 1, 1, {transposed};"
    with pytest.raises(UnsupportedPtxError, match="MN-major operand of wgmma"):
        load_kernels(module(body, threads=128, target="sm_90a"))
