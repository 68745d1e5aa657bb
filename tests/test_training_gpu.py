"""The training API on a CUDA device with ``backend="reference"``, against float64 on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from msa_vendored import kernels
from msa_vendored.errors import UnavailableError
from msa_vendored.training import Microbatch, resolve_backend, select_blocks, sparse_attention

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)

PACKS = {
    "lengths around a block": [127, 129, 1, 2, 3, 5, 128],
    "truncated to 16 of 18 blocks": [2177],
    "long and short": [700, 1, 1500, 64],
}

LIMITS = {
    # Relative L2 against float64 on the same inputs: results are rounded once, to 2**-9 and 2**-24.
    torch.bfloat16: 3e-3,
    torch.float32: 5e-6,
}


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def draw(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.detach().cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_select_index_attend_backward(lengths: list[int], dtype: torch.dtype) -> None:
    """Guards the whole chain on a device: selection, CSR, forward, backward, at the model's 64 / 4 / 128 / 16."""
    on_gpu = Microbatch.from_cu_seqlens(bounds(lengths), device=CUDA)
    on_cpu = Microbatch.from_cu_seqlens(bounds(lengths))
    tokens = on_gpu.num_tokens
    # Small integers are exact in bfloat16 and their products in float32, so ties are ties on both devices.
    index_q, index_k = (draw(tokens, heads, 128, torch.float32, heads).round() for heads in (4, 1))
    ids = select_blocks(index_q.to(CUDA, dtype), index_k.to(CUDA, dtype), on_gpu, backend="reference")
    assert torch.equal(ids.cpu(), select_blocks(index_q.double(), index_k.double(), on_cpu))

    row_ptr, q_indices = kernels(backend="reference").build_k2q_csr(
        ids,
        on_gpu.cu_seqlens,
        on_gpu.cu_seqlens,
        128,
        total_k=tokens,
        max_seqlen_k=on_gpu.max_seqlen,
        max_seqlen_q=on_gpu.max_seqlen,
        total_rows=on_gpu.workspace_size // 128,
        qhead_per_kv=16,
    )
    assert int(row_ptr[:, -1].sum()) == int((ids >= 0).sum())
    assert row_ptr.device == q_indices.device == CUDA

    q, k, v = inputs = [draw(tokens, heads, 128, dtype, seed) for seed, heads in enumerate((64, 4, 4))]
    grad_out = draw(tokens, 64, 128, dtype, 9)
    q, k, v = here = [tensor.to(CUDA).requires_grad_() for tensor in inputs]
    out = sparse_attention(q, k, v, ids, on_gpu, backend="reference")
    grads = torch.autograd.grad(out, here, grad_out.to(CUDA))
    q, k, v = there = [tensor.double().requires_grad_() for tensor in inputs]
    expected = sparse_attention(q, k, v, ids.cpu(), on_cpu)
    expected_grads = torch.autograd.grad(expected, there, grad_out.double())
    for got, want in zip((out, *grads), (expected.detach(), *expected_grads), strict=True):
        assert got.device == CUDA
        assert got.dtype == dtype
        assert relative_error(got, want) < LIMITS[dtype]


def test_what_the_kernels_lack_is_refused_and_not_computed_by_the_reference() -> None:
    """Guards a GPU run that quietly computes in PyTorch: on a card without kernels, and where they take less."""
    capability = torch.cuda.get_device_capability(CUDA)
    microbatch = Microbatch.from_cu_seqlens(bounds([5]), device=CUDA)
    q, k, ids = torch.zeros(5, 4, 8, device=CUDA), torch.zeros(5, 4, 8, device=CUDA), torch.zeros(4, 5, 4).int()
    own = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}.get(capability)
    if own is not None:
        assert resolve_backend(None, CUDA) == own
    with pytest.raises(UnavailableError if own is None else ValueError, match='backend="reference"'):
        sparse_attention(q, k, k, ids.to(CUDA), microbatch)


def test_maps_on_the_device_and_on_the_host_agree() -> None:
    """Guards fields left on the host, and coordinates computed differently from a map on the device."""
    doc_ids = torch.tensor([[1, 1, 2, 0], [3, 3, 3, 4]])
    from_device = Microbatch.from_document_map(doc_ids.to(CUDA))
    from_host = Microbatch.from_document_map(doc_ids, device=CUDA)
    assert Microbatch.from_document_map(doc_ids, device=CUDA) is from_host
    for name in ("padding_mask", "token_rows", "workspace_positions", "document_positions", "csr_rows", "cu_seqlens"):
        left, right = getattr(from_device, name), getattr(from_host, name)
        assert left.device == right.device == CUDA, name
        assert torch.equal(left, right), name
    assert from_device.lengths.device == torch.device("cpu")
    batch = torch.randn(2, 4, 3, device=CUDA)
    assert torch.equal(from_device.unpack(from_device.pack(batch)), batch * (doc_ids.to(CUDA) > 0)[..., None])


def small_case(seed: int = 0) -> tuple[list[Tensor], Tensor, Microbatch]:
    microbatch = Microbatch.from_cu_seqlens(bounds([300, 129]), device=CUDA)
    tensors = [draw(429, heads, 16, torch.float32, seed + heads).to(CUDA) for heads in (8, 2, 2)]
    index_q, index_k = (draw(429, heads, 16, torch.float32, seed + 7).to(CUDA) for heads in (2, 1))
    ids = select_blocks(index_q, index_k, microbatch, topk=4, backend="reference")
    return [tensor.requires_grad_() for tensor in tensors], ids, microbatch


def test_another_stream_gives_the_same() -> None:
    """Guards work issued to the default stream by mistake, with inputs that are still being written there."""
    (q, k, v), ids, microbatch = small_case()
    plain = sparse_attention(q, k, v, ids, microbatch, backend="reference")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = sparse_attention(q, k, v, ids, microbatch, backend="reference")
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)


def test_compiles_as_one_graph() -> None:
    """Guards fake implementations whose device differs from the real one's."""
    (q, k, v), ids, microbatch = small_case()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, ids, microbatch, backend="reference")

    torch.compiler.reset()
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, attend(q, k, v), rtol=0, atol=1e-6)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.device == CUDA


REPEAT = """
import torch
from msa_vendored.training import Microbatch, select_blocks, sparse_attention
torch.use_deterministic_algorithms(True)
microbatch = Microbatch.from_cu_seqlens(torch.tensor([0, 600, 729]), device="cuda")
torch.manual_seed(0)
q, k, v = (torch.randn(729, heads, 16, device="cuda", requires_grad=True) for heads in (8, 2, 2))
index_q, index_k = (torch.randn(729, heads, 16, device="cuda") for heads in (2, 1))
results = []
for _ in range(3):
    ids = select_blocks(index_q, index_k, microbatch, topk=4, backend="reference")
    out = sparse_attention(q, k, v, ids, microbatch, backend="reference")
    results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
print("repeated")
"""

FAULT = """
import torch
from msa_vendored.training import checks
ids = torch.full((2, 300, 4), -1, dtype=torch.int32, device="cuda")
ids[:, :, 0] = 1
cu_seqlens = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
checks.assert_selection(ids, cu_seqlens)
torch.cuda.synchronize()
print("usable")
ids[1, 200, 1] = 1
checks.assert_selection(ids, cu_seqlens)
print("issued")
torch.cuda.synchronize()
print("not noticed")
"""


def run_script(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS repeats only with a fixed workspace
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_reference_repeats_bitwise_under_deterministic_algorithms() -> None:
    """Guards an operator without a deterministic CUDA version, and atomics that are not switched off."""
    result = run_script(REPEAT)
    assert result.stdout == "repeated\n", result.stderr


def test_device_side_check_fires_without_synchronising() -> None:
    """Guards both ways: a legal selection passes, and a block named twice ends the run at the next synchronisation."""
    result = run_script(FAULT)
    assert result.stdout == "usable\nissued\n"
    assert result.returncode != 0
    assert "assert" in result.stderr
