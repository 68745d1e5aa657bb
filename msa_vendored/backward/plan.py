"""What a backward call allocates and how large its tables are, from sizes that the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from msa_vendored.backward.tasks import (
    DESCRIPTOR_WORDS,
    choose_window,
    plan_scratch,
    queries_per_task,
    task_capacity,
)
from msa_vendored.backward.workspace import Region, WorkspacePlan, plan_workspace

HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """All that decides the layout of a call, known on the host without looking at the device.

    Attributes:
        tokens: rows of q.
        workspace_rows: rows of k.
        query_heads: of q.
        key_heads: of k, which are the index heads.
        rows: key blocks of the CSR.
        edge_capacity: columns of ``q_indices``.
        work_capacity: rows of ``scheduler_metadata``.
        dq_accumulation: type of the dQ pool.
    """

    tokens: int
    workspace_rows: int
    query_heads: int
    key_heads: int
    rows: int
    edge_capacity: int
    work_capacity: int
    dq_accumulation: str

    @property
    def ratio(self) -> int:
        """Query heads per key head."""
        return self.query_heads // self.key_heads


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What follows from the sizes.

    Attributes:
        window: queries per window of the task order.
        capacity: rows of the task tables, which no valid schedule exceeds.
        workspace: of the call.
    """

    window: int
    capacity: int
    workspace: WorkspacePlan


@lru_cache(maxsize=64)
def plan_call(sizes: Sizes, window: int) -> CallPlan:
    """Tables and workspace for these sizes; ``window`` is the narrowest that will do.

    Raises:
        ArgumentValueError: more key blocks than the task build can order.
    """
    s = sizes
    window = choose_window(s.tokens, s.workspace_rows, s.key_heads, window=window)
    capacity = max(1, task_capacity(s.edge_capacity, s.work_capacity, s.key_heads, s.ratio, rows=s.rows))
    slots = queries_per_task(s.ratio)
    scratch_words = plan_scratch(s.key_heads, s.rows, s.tokens, s.workspace_rows, window).words
    f32, i32 = torch.float32, torch.int32
    dq_dtype = {"bf16": torch.bfloat16, "fp32": f32}[s.dq_accumulation]
    regions = [
        Region("dq_sum", dq_dtype, (s.tokens * s.query_heads * HEAD_DIM,), zeroed=True),
        Region("dkv_sum", f32, (2 * s.workspace_rows * s.key_heads * HEAD_DIM,), zeroed=True),
        Region("error_word", i32, (1,), zeroed=True),
        Region("delta", f32, (s.tokens, s.query_heads)),
        Region("scratch", i32, (scratch_words,)),
        Region("task_meta", i32, (capacity, 4)),
        Region("task_qrows", i32, (capacity, slots)),
        Region("task_qpos", i32, (capacity, slots)),
        Region("descriptor", i32, (DESCRIPTOR_WORDS,)),
    ]
    return CallPlan(window, capacity, plan_workspace(regions))
