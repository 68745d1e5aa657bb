"""The five launchers in PyTorch: any device, the semantics of the SM100 kernels, memory linear in tokens.

``build_k2q_csr``, ``sparse_atten_func``, ``fmha_sm100_plan``, ``fmha_sm100`` and ``run_backward`` take the arguments
of the official launchers and return the same shapes, sentinels and units. They exist to train on a laptop and to
check kernels, so they accept more (float32 and float64, head dims other than 128, any number of index heads) and
refuse what they do not do: an argument that only the kernels use raises an error that names it.

What the GPU leaves undefined is refused here: duplicates in a selection, -1 before the end of a selection, blocks
beyond the document, empty documents, too few rows. A call that passes here is a legal call there, within the
kernels' fixed shapes.
"""

from __future__ import annotations

from msa_vendored.reference.backward import BackwardSchedule, run_backward
from msa_vendored.reference.csr import build_k2q_csr
from msa_vendored.reference.dense import dense_attention
from msa_vendored.reference.forward import sparse_atten_func
from msa_vendored.reference.schedule import SparseAttentionSchedule
from msa_vendored.reference.score import fmha_sm100, fmha_sm100_plan

__all__ = [
    "BackwardSchedule",
    "SparseAttentionSchedule",
    "build_k2q_csr",
    "dense_attention",
    "fmha_sm100",
    "fmha_sm100_plan",
    "run_backward",
    "sparse_atten_func",
]
