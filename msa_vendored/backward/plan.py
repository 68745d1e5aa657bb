"""What a backward call allocates and how large its tables are, from sizes that the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from msa_vendored.backward.accumulation import DQ_DTYPES
from msa_vendored.backward.tasks import (
    DESCRIPTOR_WORDS,
    choose_owned_window,
    choose_window,
    descriptor_words,
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
class PassPlan:
    """Of one pass of the task build and the main kernel.

    Attributes:
        walk: kind of walk.
        window: queries per window of the task order.
        capacity: rows of the task tables, which no valid schedule exceeds.
        chunks: of the walk at most.
        scratch_words: of the task build.
        descriptor_words: likewise.
    """

    walk: str
    window: int
    capacity: int
    chunks: int
    scratch_words: int
    descriptor_words: int


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What follows from the sizes.

    Attributes:
        passes: in the order of their launches.
        workspace: of the call; the passes share tables and scratch.
    """

    passes: tuple[PassPlan, ...]
    workspace: WorkspacePlan


@lru_cache(maxsize=64)
def plan_call(
    sizes: Sizes, window: int, walks: tuple[str, ...], multiprocessors: int, *, dq_in_place: bool = False
) -> CallPlan:
    """Tables and workspace for these sizes.

    Args:
        sizes: of the call.
        window: the narrowest that will do in the even walk.
        walks: kind of walk of each pass.
        multiprocessors: CTAs that the main kernel is launched with at most.
        dq_in_place: no ``dq_sum`` is needed.

    Raises:
        ArgumentValueError: more key blocks than the task build can order.
    """
    s = sizes
    passes = tuple(_plan_pass(s, window, walk, multiprocessors) for walk in walks)
    capacity, slots = max(p.capacity for p in passes), queries_per_task(s.ratio)
    f32, i32 = torch.float32, torch.int32
    scaled = s.dq_accumulation == "fp16"
    dkv_elements = 2 * s.workspace_rows * s.key_heads * HEAD_DIM
    dq_elements = 0 if dq_in_place else s.tokens * s.query_heads * HEAD_DIM
    regions = [
        Region("dq_sum", DQ_DTYPES[s.dq_accumulation], (dq_elements,), zeroed=True),
        Region("dkv_sum", f32, (dkv_elements,), zeroed=True),
        Region("error_word", i32, (1,), zeroed=True),
        Region("key_maxima", f32, (s.key_heads if scaled else 0, 2), zeroed=True),
        Region("delta", f32, (s.tokens, s.query_heads)),
        Region("norms", f32, (s.tokens if scaled else 0, s.query_heads)),
        Region("scratch", i32, (max(p.scratch_words for p in passes),)),
        Region("task_meta", i32, (capacity, 4)),
        Region("task_qrows", i32, (capacity, slots)),
        Region("task_qpos", i32, (capacity, slots)),
        Region("descriptor", i32, (max(p.descriptor_words for p in passes),)),
    ]
    return CallPlan(passes, plan_workspace(regions))


def _plan_pass(s: Sizes, window: int, walk: str, multiprocessors: int) -> PassPlan:
    if walk == "even":
        window = choose_window(s.tokens, s.workspace_rows, s.key_heads, window=window)
    elif walk == "windows":
        window = choose_owned_window(s.tokens, s.workspace_rows, s.key_heads, multiprocessors)
    else:
        window = choose_window(s.tokens, s.workspace_rows, s.key_heads, window=s.tokens)
    windows = -(-s.tokens // window) if walk == "windows" else 1
    capacity = max(
        1, task_capacity(s.edge_capacity, s.work_capacity, s.key_heads, s.ratio, rows=s.rows, windows=windows)
    )
    words = descriptor_words(s.key_heads, s.tokens, s.workspace_rows, window, walk)
    chunks = capacity if walk == "even" else words - DESCRIPTOR_WORDS - 1
    scratch = plan_scratch(s.key_heads, s.rows, s.tokens, s.workspace_rows, window, walk=walk)
    return PassPlan(walk, window, capacity, chunks, scratch.words, words)
