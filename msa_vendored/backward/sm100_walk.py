"""What the warp roles of the SM100 main kernel share: the values of a CTA, its walk over the tasks, its barriers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from msa_vendored.backward import sm100_layout as plan
from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_layout import Smem
from msa_vendored.backward.tasks import DESCRIPTOR_WORDS


class Context:
    """Values of one CTA; global addresses are Int64.

    Those that :meth:`Walker.enter` sets are set by each role for itself.
    """

    descriptor: Any
    task_meta: Any
    task_qrows: Any
    task_qpos: Any
    cu_seqlens: Any
    document_workspace_starts: Any
    q: Any
    grad_out: Any
    lse: Any
    delta: Any
    dq_pool: Any
    dk: Any
    dv: Any
    q_map: Any
    grad_out_map: Any
    k_map: Any
    v_map: Any
    key_heads: Any
    scale: Any
    smem: Any
    warp: Any
    # Set by enter().
    chunk: Any
    grid: Any
    walk: Any
    lane: Any
    tmem: Any


class Walker:
    """Base of the roles.

    Attributes:
        ratio: query heads for each key head: 1, 2, 4, 8 or 16.
        slots: queries of a tile.
        dq_dtype: of ``dq_pool``, BFloat16 or Float32.
        group: heads side by side in ``dq_pool``.
        wants_dq: whether dQ is computed.
        wants_dkv: whether dK and dV are.
    """

    def __init__(self, ratio: int, dq_dtype: Any, gradients: str = "all") -> None:
        self.ratio = ratio
        self.wants_dq, self.wants_dkv = gradients != "dkv", gradients != "dq"
        self.slots = plan.slots(ratio)
        self.dq_dtype = dq_dtype
        self.group = plan.head_group(ratio, dq_dtype.width // 8)

    def enter(self, c: Context) -> None:
        """Loads what a role needs in its own branch: kept in registers from before, it would be spilled there."""
        c.walk = (*ptx.load_global_ints(c.descriptor, 4), *ptx.load_global_ints(c.descriptor + 16, 1))
        c.chunk, c.grid = ptx.read_cta_index(), cute.arch.grid_dim()[0]
        c.lane = cute.arch.lane_idx()
        c.tmem = ptx.load_shared_ints(c.smem, Smem.TMEM_ADDRESS, 1)[0]

    @cute.jit
    def interval(self, c: Context, chunk: Any) -> Any:
        """First task of a chunk and the one after its last: ``full`` chunks of ``size``, then chunks of ``tail``."""
        rows, size, full, tail, chunks = c.walk
        begin, end = chunk * size, chunk * size + size
        if chunk >= full:
            begin = full * size + (chunk - full) * tail
            end = cutlass.min(begin + tail, rows)
        if size == 0:
            # Chunks are listed. One after the last is asked for by next_task, which then ignores the answer.
            listed = c.descriptor + Int64(cutlass.min(chunk, chunks - 1)) * 4
            begin, end = (ptx.load_global_ints(listed + 4 * (DESCRIPTOR_WORDS + i), 1)[0] for i in range(2))
        return begin, end

    @cute.jit
    def next_task(self, c: Context, chunk: Any, task: Any, end: Any) -> Any:
        """The task that this CTA does next, and whether there is one (the same task if not)."""
        following, more = task + 1, Int32(1)
        if following == end:
            following, _ = self.interval(c, chunk + c.grid)
            if chunk + c.grid >= c.walk[4]:
                following, more = task, Int32(0)
        return following, more

    def meta(self, c: Context, task: Any) -> list[Any]:
        """document_ordinal, kv_head, global_kblock, valid_queries of a task."""
        return ptx.load_global_ints(c.task_meta + Int64(task) * 16, 4)

    def query_rows(self, c: Context, task: Any, first: int, count: int) -> list[Any]:
        """Token rows of ``count`` slots of a task from ``first`` on, both multiples of 4; -1 where there is none."""
        row = c.task_qrows + Int64(task) * (self.slots * 4)
        starts = range(first * 4, (first + count) * 4, 16)
        return [word for start in starts for word in ptx.load_global_ints(row + start, 4)]

    def barrier(self, c: Context, which: Any, stage: Any = 0) -> Any:
        """Shared-memory address of an mbarrier."""
        return c.smem + (Smem.BARRIERS + 8 * which) + stage * 8

    def arrive_once(self, address: Any) -> None:
        """One arrival for the whole warp, after all that its lanes did."""
        cute.arch.sync_warp()
        with ptx.elect():
            ptx.arrive(address)
