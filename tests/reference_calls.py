"""The reference forward as the tests call it."""

from __future__ import annotations

from typing import Any

from msa_vendored.reference import sparse_atten_func
from msa_vendored.reference.cases import PackedCase, invert_selection

# Two float64 evaluations of sums of up to 1,024 terms of order 1, in different order.
FLOAT64_TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}


def attend(case: PackedCase, **changes: Any) -> Any:
    row_ptr, q_indices, schedule = invert_selection(case)
    arguments: dict[str, Any] = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "k2q_row_ptr": row_ptr,
        "k2q_q_indices": q_indices,
        "topK": case.q2k_indices.shape[2],
        "cu_seqlens_q": case.cu_seqlens_q,
        "cu_seqlens_k": case.cu_seqlens_k,
        "max_seqlen_q": case.max_seqlen_q,
        "max_seqlen_k": case.max_seqlen_k,
        "causal": True,
        "return_softmax_lse": True,
        "schedule": schedule,
        **changes,
    }
    return sparse_atten_func(**arguments)
