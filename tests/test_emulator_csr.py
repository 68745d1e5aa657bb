"""The CUDA C++ kernels of the official CSR builder, compiled by nvcc to PTX, in the emulator.

Their host code needs torch's CUDA headers and a device; here the launches are made as it makes them, for one CTA of
four warps and two CTAs, and the result is compared with the reference builder.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from ptx_emulator import Kernel, emulate, load_kernels

import msa_vendored
from msa_vendored.installed import PACKAGE_DIR
from msa_vendored.reference import build_k2q_csr
from msa_vendored.reference.cases import make_case

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")]
TOPK, WARPS, BLOCK = 4, 4, 128
INSTANCES = f"""
template __global__ void csr::k2q_build_row_map_kernel<{BLOCK}>(int const*, int*, int*, int, int);
template __global__ void csr::k2q_hist_kernel<{TOPK}, {BLOCK}, {WARPS}>(
    int const*, int const*, int const*, int*, int*, int, int, int, int, int, int, int, int, int);
template __global__ void csr::k2q_row_prefix_kernel<1024>(int const*, int*, int const*, int*, int*, int, int, int);
template __global__ void csr::k2q_tile_prefix_smem_kernel<256, 8>(int*, int const*, int, int, int);
template __global__ void csr::k2q_scatter_kernel<{TOPK}, {BLOCK}, {WARPS}>(
    int const*, int const*, int const*, int const*, int*, int*, int*,
    int, int, int, int, int, int, int, int, int, int);
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """The five kernels by a part of their name."""
    folder = tmp_path_factory.mktemp("csr")
    built = PACKAGE_DIR / msa_vendored.provenance().folder
    (path,) = built.rglob("build_k2q_csr.cu")
    text = path.read_text(encoding="utf-8")
    # Device code stands in one anonymous namespace; its kernels would not be emitted from there.
    device = text[text.index("namespace {") + len("namespace {") : text.index("}  // anonymous namespace")]
    source = folder / "csr.cu"
    source.write_text(f"#include <algorithm>\n#include <cstdint>\nnamespace csr {{{device}}}\n{INSTANCES}", "utf-8")
    target = folder / "csr.ptx"
    command = ["nvcc", "-ptx", "-arch=sm_90", "-lineinfo", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = load_kernels(target.read_text("utf-8"))
    parts = ("build_row_map", "hist", "row_prefix", "tile_prefix", "scatter")
    return {part: next(kernel for name, kernel in loaded.items() if part in name) for part in parts}


@pytest.mark.parametrize(("schedule", "seed"), [("eager", 0), ("random", 1), ("random", 2)])
def test_csr_kernels_agree_with_the_reference(kernels: dict[str, Kernel], schedule: str, seed: int) -> None:
    """Plain PTX of nvcc: static and dynamic shared memory, packed shared atomics, ballots, several launches."""
    case = make_case((133, 61), (300, 129), topk=TOPK, own_block=False, seed=3)
    cu_q, cu_k = case.cu_seqlens_q, case.cu_seqlens_k
    expected_ptr, expected_q = build_k2q_csr(case.q2k_indices, cu_q, cu_k, BLOCK, total_k=case.k.shape[0])[:2]
    heads, total_q = case.q2k_indices.shape[:2]
    rows, documents, levels, ctas = expected_ptr.shape[1] - 1, 2, 3, 2
    per_cta = -(-total_q // ctas)
    per_warp, tiles = -(-per_cta // WARPS), ctas * WARPS

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    row_map, counts, tile_counts = integers(documents, levels), integers(heads, rows), integers(tiles, heads, rows)
    row_ptr, q_idx = integers(heads, rows + 1), integers(heads, total_q * TOPK)
    split, split_counts = integers(heads, total_q * TOPK), integers(total_q, heads)
    strides = (total_q * TOPK, TOPK)
    sizes = (heads, documents, total_q, rows, levels, per_cta, per_warp)
    words = WARPS * (-(-rows // 2)) * 4

    def run(name: str, grid: int, block: int, shared_bytes: int, *arguments: object) -> None:
        options = {"grid": (grid,), "block": (block, 1, 1), "shared_bytes": shared_bytes}
        report = emulate(kernels[name], *arguments, schedule=schedule, seed=seed, **options)  # type: ignore[arg-type]
        report.require_clean()

    q2k = case.q2k_indices
    run("build_row_map", levels, 32, 0, cu_k, row_map, 0, documents, levels)
    run("hist", ctas, 32 * WARPS, words, q2k, cu_q, row_map, counts, tile_counts, *sizes, *strides)
    run("row_prefix", heads, 1024, 0, counts, row_ptr, 0, 0, 0, rows, 1, 0)
    run("tile_prefix", heads * -(-rows // 8), 256, 8 * tiles * 4, tile_counts, row_ptr, heads, rows, tiles)
    outputs = (tile_counts, q_idx, split, split_counts)
    run("scatter", ctas, 32 * WARPS, words, q2k, cu_q, row_map, *outputs, *sizes, case.max_seqlen_q, *strides)
    assert torch.equal(row_ptr, expected_ptr)
    assert torch.equal(split_counts, (q2k >= 0).sum(2, dtype=torch.int32).T)
    for head in range(heads):
        for row in range(rows):
            part = slice(int(row_ptr[head, row]), int(row_ptr[head, row + 1]))
            assert torch.equal(q_idx[head, part].sort().values, expected_q[head, part])
