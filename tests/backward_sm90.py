"""Runs the SM90 main kernel of the backward: builds tables and sums, puts results in ordinary order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from backward_cases import Problem
from backward_tables import Tables, build_tables
from dq_scale_cases import row_factors, sum_magnitudes

from msa_vendored.backward.accumulation import DQ_DTYPES
from msa_vendored.backward.sm90_layout import dkv_sum_index


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Arguments of one call of the compiled kernel."""

    problem: Problem
    tables: Tables
    dq_sum: torch.Tensor
    dk_sum: torch.Tensor
    dv_sum: torch.Tensor
    softmax_scale: float
    grid: int
    bounds: tuple[()] | tuple[torch.Tensor, torch.Tensor] = ()

    def arguments(self) -> tuple[Any, ...]:
        """As the module docstring of the kernel orders them."""
        p, t = self.problem, self.tables
        return (
            p.q, p.k, p.v, p.grad_out, p.lse, p.delta, t.meta, t.qrows, t.qpos, p.cu_seqlens, t.starts, t.descriptor,
            self.dq_sum, self.dk_sum, self.dv_sum, *self.bounds, self.softmax_scale, self.grid,
        )  # fmt: skip

    def clear(self) -> None:
        """Zero the sums."""
        for tensor in (self.dq_sum, self.dk_sum, self.dv_sum):
            tensor.zero_()

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients: dq like q; dk and dv of the tokens, ``[T, Hkv, 128]``; sums in ordinary order, not rounded."""
        where = [[dkv_sum_index(key, d) for d in range(128)] for key in range(128)]
        index = torch.tensor(where, device=self.dq_sum.device).view(-1)
        rows = self.problem.key_rows
        pair = []
        for tensor in (self.dk_sum, self.dv_sum):
            blocks = tensor[:, :, index].view(*tensor.shape[:2], 128, 128)
            pair.append(blocks.transpose(1, 2).reshape(-1, tensor.shape[1], 128)[rows])
        dq = self.dq_sum
        if self.bounds:
            dq = dq.double() / row_factors(*self.bounds, self.softmax_scale)[:, :, None]
        return dq, pair[0], pair[1]


def prepare_call(
    problem: Problem,
    *,
    dq_accumulation: str,
    grid: int,
    window: int = 2048,
    rows_per_chunk: int = 64,
    softmax_scale: float = 128**-0.5,
    tables: Tables | None = None,
) -> Call:
    """Tables of the problem's selection and zeroed sums."""
    if tables is None:
        tables = build_tables(
            problem.selection, problem.cu_seqlens, ratio=problem.ratio, window=window, grid=grid,
            rows_per_chunk=rows_per_chunk,
        )  # fmt: skip
    dtype = DQ_DTYPES[dq_accumulation]
    dq = torch.zeros(problem.q.shape, dtype=dtype, device=problem.q.device)
    blocks = (problem.k.shape[0] // 128, problem.k.shape[1], 128 * 128)
    dk, dv = (torch.zeros(blocks, device=problem.q.device) for _ in range(2))
    bounds = bound_rows(problem) if dq_accumulation == "fp16" else ()
    return Call(problem, tables, dq, dk, dv, softmax_scale, grid, bounds)


def bound_rows(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of the rows of dO, and the largest key and value of each head, as the stages before find them."""
    keys = [tensor[problem.key_rows].float().nan_to_num(0, 0, 0) for tensor in (problem.k, problem.v)]
    return sum_magnitudes(problem.grad_out), torch.stack([tensor.abs().amax((0, 2)) for tensor in keys], 1)


Kernel = Callable[..., None]
