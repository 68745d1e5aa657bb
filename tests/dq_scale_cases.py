"""The scaling of fp16 sums of dQ in torch, and checks of its stages in the emulator (see ``stage_runs``)."""

from __future__ import annotations

from typing import Any

import torch
from task_cases import TaskCase, corruptions, make_task_case

TINY = 2.0**-126


def row_factors(norms: torch.Tensor, key_maxima: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """The powers of two of :mod:`msa_vendored.backward.dq_scale`, float64 ``[T, Hq]``, by its fp32 arithmetic."""
    largest = key_maxima.repeat_interleave(norms.shape[1] // key_maxima.shape[0], 0)
    slope = torch.fmax(norms * largest[:, 1], norms.new_tensor(TINY))
    length = torch.fmax(2 * largest[:, 0] * abs(softmax_scale), norms.new_tensor(TINY))
    biased = (slope * length).view(torch.int32).bitwise_right_shift(23).bitwise_and(0xFF)
    return torch.exp2((268 - biased).clamp(max=253).double() - 127)


def sum_magnitudes(grad_out: torch.Tensor) -> torch.Tensor:
    """The 1-norms of rows in the order of the delta stage: up a lane's eight values, then lanes 8, 4, 2, 1 apart."""
    values = grad_out.float().abs().view(*grad_out.shape[:2], 16, 8)
    total = values[..., 0]
    for k in range(1, 8):
        total = total + values[..., k]
    lanes = torch.arange(16, device=grad_out.device)
    for step in (8, 4, 2, 1):
        total = total + total[..., lanes ^ step]
    return total[..., 0].contiguous()


def largest_keys(k: torch.Tensor, v: torch.Tensor, case: TaskCase) -> torch.Tensor:
    """``[Hkv, 2]``: largest finite magnitudes in the keys and values of the blocks that have queries."""
    maxima = torch.zeros((k.shape[1], 2))
    for head, _, _, edges, document, block in case.scheduler_metadata[: int(case.work_count)].tolist():
        first = int(case.document_workspace_starts[document]) + block * 128
        length = int(case.cu_seqlens[document + 1] - case.cu_seqlens[document])
        for side, tensor in enumerate((k, v)):
            keys = tensor[first : first + min(length - block * 128, 128), head].float().abs()
            keys = keys[keys.isfinite()]
            if edges and keys.numel():
                maxima[head, side] = max(maxima[head, side], keys.max())
    return maxima


def odd_rows(tokens: int, heads: int) -> torch.Tensor:
    """Rows of dO that no bound holds for, or whose bound is at the edge of fp32."""
    grad = torch.randn((tokens, heads, 128), generator=torch.Generator().manual_seed(7)).bfloat16()
    for row, factor in enumerate((0.0, 2.0**-126, 2.0**-100, 2.0**120, torch.inf, torch.nan)):
        if row < tokens:
            grad[row] *= factor
    return grad


def check_norms(run: Any) -> None:
    """The delta stage where it zeroes dq and sums magnitudes."""
    for tokens, heads in ((7, 4), (1, 1), (33, 20)):
        out, grad = torch.ones((tokens, heads, 128), dtype=torch.bfloat16), odd_rows(tokens, heads)
        dq = torch.full_like(out, torch.nan)
        delta, norms, again = (torch.full((tokens, heads), torch.nan) for _ in range(3))
        run.launch("delta", out, grad, delta, dq, norms, zeroes=True, norms=True)
        run.launch("delta", out, grad, again)
        assert torch.equal(delta.nan_to_num(5), again.nan_to_num(5))
        assert torch.equal(norms.nan_to_num(5), sum_magnitudes(grad).nan_to_num(5))
        assert not dq.any()
        dq.fill_(torch.nan)
        run.launch("delta", out, grad, delta, dq, zeroes=True)
        assert not dq.any()


def check_key_maxima(run: Any) -> None:
    """What lies outside documents, or is not finite, must not count; a corrupt schedule must not be followed."""
    case = make_task_case([300, 129, 5, 1], heads=3, topk=2, seed=5, gap_blocks=1)
    random = torch.Generator().manual_seed(1)
    k, v = (torch.randn((case.workspace_rows, 3, 128), generator=random).bfloat16() for _ in range(2))
    inside = torch.zeros(case.workspace_rows, dtype=torch.bool)
    for start, length in zip(case.document_workspace_starts.tolist(), case.cu_seqlens.diff().tolist(), strict=True):
        inside[start : start + length] = True
    k[~inside], v[~inside] = 1e30, torch.nan
    first = int(case.document_workspace_starts[0])
    k[first, 0, :3] = torch.tensor([torch.nan, -torch.inf, -77.0])
    v[first + 299, 2, 127] = -1e20
    maxima = torch.zeros((3, 2), dtype=torch.int32)
    fields = case.scheduler_metadata, case.work_count, case.cu_seqlens, case.document_workspace_starts
    run.launch("key_maxima", k, v, *fields, maxima, schedule="random", seed=1)
    expected = largest_keys(k, v, case)
    assert torch.equal(maxima.view(torch.float32), expected)
    assert (expected[0, 0], expected[2, 1]) == (77.0, torch.tensor(1e20).bfloat16().float())
    for _, _, change in corruptions(case):
        bad = change(case)
        fields = bad.scheduler_metadata, bad.work_count, bad.cu_seqlens, bad.document_workspace_starts
        run.launch("key_maxima", k, v, *fields, maxima)


def check_scaled_postprocess(run: Any) -> None:
    """Every kind of factor is undone exactly, in place; rows beyond a CTA's last octet are left alone."""
    options = {"dq_dtype": "fp16", "dq_order": "in place", "report_errors": True}
    for tokens, heads, kv_heads, scale in ((7, 4, 2, -0.5), (1, 1, 1, 1e-3), (35, 8, 1, 128**-0.5)):
        norms = sum_magnitudes(odd_rows(tokens, heads))
        maxima = torch.tensor([[3.0, 5.0], [0.0, 1e-30]])[:kv_heads].contiguous()
        pool = torch.randn((tokens, heads, 128), generator=torch.Generator().manual_seed(3)).half()
        pool[0, 0, :3] = torch.tensor([torch.nan, torch.inf, 2.0**-24])
        expected = (pool.double() / row_factors(norms, maxima, scale)[:, :, None]).bfloat16()
        dkv_pool, dkv = torch.zeros(2 * 128 * kv_heads * 128), torch.empty((2, 128, kv_heads, 128)).bfloat16()
        words = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
        for word in (0, 2):
            words[0].fill_(word)
            dq = pool.clone().view(torch.bfloat16)
            run.launch(
                "postprocess", dq.view(torch.half).view(-1), dq, dkv_pool, dkv, *words, norms, maxima, scale,
                dkv_order="d0 r3 d1 d2 r0 r1 r2 d3 d4 d5 d6 r4 r5 r6", **options,
            )  # fmt: skip
            assert dq.isnan().all() if word else torch.equal(dq.nan_to_num(5), expected.nan_to_num(5))


SCALE_CHECKS = {
    "fp16 sums, norms": check_norms,
    "fp16 sums, keys": check_key_maxima,
    "fp16 sums, postprocess": check_scaled_postprocess,
}
