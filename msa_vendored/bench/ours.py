"""Our launchers on this card, and the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import msa_vendored
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.bench.check import Results
from msa_vendored.bench.errors import PeerMissingError
from msa_vendored.bench.implementations import OURS, Implementation, Prepared
from msa_vendored.bench.workload import RATIO, SOFTMAX_SCALE, TOPK, Case, Operands
from msa_vendored.errors import UnavailableError
from msa_vendored.reference.backward import BackwardSchedule
from msa_vendored.training import resolve_backend, select_blocks, sparse_attention
from msa_vendored.training.backends import bind_kernels
from msa_vendored.training.ops import backward_work

REFERENCE_TOKENS = 4096
"""The reference in PyTorch takes seconds beyond."""


@dataclass(frozen=True, slots=True)
class Launchers:
    """The five launchers of a backend, one by one, and ``sparse_attention`` with autograd around them.

    Attributes:
        name: label in tables.
        backend: None for the kernels of the card.
        most_tokens: larger cases are left out.
    """

    name: str
    backend: str | None
    most_tokens: int = 1 << 30
    dense: bool = False

    def find_version(self) -> str:
        """See :class:`~msa_vendored.bench.implementations.Implementation`."""
        try:
            name = resolve_backend(self.backend, torch.device("cuda", torch.cuda.current_device()))
            bind_kernels(name)
        except UnavailableError as error:
            raise PeerMissingError(f"{error.what}: {error.got}", where=self.name) from error
        return f"{msa_vendored.__version__}, backend {name}"

    def refuse(self, case: Case) -> str | None:
        """See :class:`~msa_vendored.bench.implementations.Implementation`."""
        return f"only up to {self.most_tokens:,} tokens" if case.tokens > self.most_tokens else None

    def prepare(self, operands: Operands) -> Prepared:
        """See :class:`~msa_vendored.bench.implementations.Implementation`."""
        calls = LauncherCalls(self.backend, operands)
        return Prepared(
            {
                "forward": calls.attend,
                "backward": calls.differentiate,
                "index": calls.build_index,
                "select": calls.select,
                "autograd forward": calls.run_layer,
                "autograd forward + backward": calls.run_layer_both_ways,
            },
            calls.collect,
            "forward and backward launcher alone; index and select extra",
        )


class LauncherCalls:
    """The calls that training makes, on one set of operands, with what one call needs of another kept."""

    def __init__(self, backend: str | None, operands: Operands) -> None:
        self.name = resolve_backend(backend, operands.q.device)
        self.backend = backend
        self.bundle: Any = bind_kernels(self.name)
        self.operands = operands
        self.index = self.build_index()
        self.out, self.lse = self.attend()
        batch = operands.microbatch
        row_ptr, q_indices = self.index[:2]
        metadata, work_count = backward_work(row_ptr, batch.csr_rows)
        make = msa_vendored.MSABackwardSchedule if self.name == "sm100" else BackwardSchedule
        starts = batch.document_workspace_starts
        self.schedule = make(row_ptr, q_indices, metadata, work_count, batch.cu_seqlens, starts)
        self.k_aligned, self.v_aligned = (batch.to_workspace(x) for x in (operands.k, operands.v))

    def build_index(self) -> Any:
        """CSR and schedule of the selection."""
        batch = self.operands.microbatch
        return self.bundle.build_k2q_csr(
            self.operands.block_ids,
            batch.cu_seqlens,
            batch.cu_seqlens,
            BLOCK_SIZE,
            total_k=batch.num_key_tokens,
            max_seqlen_k=batch.max_key_seqlen,
            max_seqlen_q=batch.max_seqlen,
            total_rows=batch.csr_rows.shape[0],
            qhead_per_kv=RATIO,
            return_schedule=True,
        )

    def attend(self) -> Any:
        """The forward launcher, on the index that is there."""
        operands, batch = self.operands, self.operands.microbatch
        return self.bundle.sparse_atten_func(
            operands.q,
            operands.k,
            operands.v,
            *self.index[:2],
            TOPK,
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_k=batch.max_key_seqlen,
            blk_kv=BLOCK_SIZE,
            causal=True,
            softmax_scale=SOFTMAX_SCALE,
            partial_dtype=torch.bfloat16,
            return_softmax_lse=True,
            schedule=self.index[-1],
        )

    def differentiate(self) -> Any:
        """The backward launcher, on the forward's output that is there."""
        return self.bundle.run_backward(
            q=self.operands.q,
            k_aligned=self.k_aligned,
            v_aligned=self.v_aligned,
            grad_out=self.operands.grad_out,
            lse=self.lse,
            out=self.out,
            schedule=self.schedule,
            **({} if self.name == "sm100" else {"softmax_scale": SOFTMAX_SCALE}),
        )

    def select(self) -> Tensor:
        """Score pass and ranking."""
        operands = self.operands
        return select_blocks(operands.index_q, operands.index_k, operands.microbatch, topk=TOPK, backend=self.backend)

    def run_layer(self) -> Tensor:
        """``sparse_attention`` without gradients: index, forward, and what PyTorch adds."""
        operands = self.operands
        with torch.no_grad():
            return sparse_attention(
                operands.q, operands.k, operands.v, operands.block_ids, operands.microbatch, backend=self.backend
            )

    def run_layer_both_ways(self) -> tuple[Tensor, ...]:
        """``sparse_attention`` and its backward, through autograd."""
        operands = self.operands
        q, k, v = inputs = [x.detach().requires_grad_() for x in (operands.q, operands.k, operands.v)]
        out = sparse_attention(q, k, v, operands.block_ids, operands.microbatch, backend=self.backend)
        grads: tuple[Tensor, ...] = torch.autograd.grad(out, inputs, operands.grad_out)
        return grads

    def collect(self) -> Results:
        """Forward by launcher, gradients by autograd."""
        out, lse = self.attend()
        return Results(out, lse, *self.run_layer_both_ways())


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Launchers(OURS, None),
    Launchers(f"{OURS} reference", "reference", REFERENCE_TOKENS),
)
