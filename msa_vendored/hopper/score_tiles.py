"""What the score kernels of SM90 have in common: tiles of queries and keys, how they arrive, their product, its maxima.

A tile is 128 queries of up to four heads, or 128 keys that these heads share. Q of a tile stays in shared memory while
its tiles of keys stream through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

HEAD_DIM = 128
TILE = 128
HALF = 64
HEADS = 4
"""Heads of one CTA, which share their keys."""

K_STAGES = 3
Q_BYTES = HALF * HEAD_DIM * 2
K_BYTES = TILE * HEAD_DIM * 2

SEGMENT_FIELDS = 8
"""Columns of the segment table: first query token, valid queries, first key token of the document, keys of the
document, key position that query 0 of the tile still sees, key tiles, column of query 0 in the scores, unused."""


@dataclass(frozen=True, slots=True, eq=False)
class TileBuffers:
    """Shared memory of a CTA.

    Attributes:
        q: ``(64, 128, 2 heads)``, two halves of 64 queries for each head.
        k: ``(128, 128, stages)``.
        q_full: barrier of each head, completed by its copy.
        q_empty: barrier of each head, four warps arrive.
        k_full: barrier of each stage.
        k_empty: barrier of each stage; every warp that reads it arrives.
    """

    q: Any
    k: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any


def make_layouts() -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Layouts of Q and K in shared memory, as the tensor cores read them."""
    swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    q_layout = cute.tile_to_shape(swizzled, (HALF, HEAD_DIM, 2 * HEADS), order=(0, 1, 2))
    return q_layout, cute.tile_to_shape(swizzled, (TILE, HEAD_DIM, K_STAGES), order=(0, 1, 2))


def make_copies(
    q: cute.Tensor, k: cute.Tensor, q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout
) -> tuple[cute.CopyAtom, cute.Tensor, cute.CopyAtom, cute.Tensor]:
    """Tensor copies of 64 queries of a head and of 128 keys: atom and coordinates ``[token, d, head]`` of each."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    q_rows = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[0, 2, 1]))
    k_rows = cute.make_tensor(k.iterator, cute.select(k.layout, mode=[0, 2, 1]))
    q_atom, q_tma = cpasync.make_tiled_tma_atom(load, q_rows, cute.select(q_layout, mode=[0, 1]), (HALF, HEAD_DIM))
    k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k_rows, cute.select(k_layout, mode=[0, 1]), (TILE, HEAD_DIM))
    return q_atom, q_tma, k_atom, k_tma


def make_mma() -> cute.TiledMma:
    """One warpgroup, 64 queries x 128 keys, both operands in shared memory along d."""
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (HALF, TILE)
    )


def allocate_buffers(q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout) -> TileBuffers:
    """128 KB of Q, three stages of 32 KB of K, and the barriers."""
    smem = cutlass.utils.SmemAllocator()
    q = smem.allocate_tensor(BFloat16, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
    k = smem.allocate_tensor(BFloat16, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
    barriers = smem.allocate_array(Int64, 2 * HEADS + 2 * K_STAGES)
    keys = barriers + 2 * HEADS
    return TileBuffers(q, k, barriers, barriers + HEADS, keys, barriers + 2 * HEADS + K_STAGES)


@cute.jit
def init_barriers(buffers: Any, thread: Int32, heads: Int32, heads_each: cutlass.Constexpr) -> None:
    """By one thread, then the CTA waits. A consumer warpgroup has ``heads_each`` of the CTA's ``heads``."""
    if thread == 0:
        for i in cutlass.range_constexpr(HEADS):
            cute.arch.mbarrier_init(buffers.q_full + i, 1)
            cute.arch.mbarrier_init(buffers.q_empty + i, 4)
        for i in cutlass.range_constexpr(K_STAGES):
            cute.arch.mbarrier_init(buffers.k_full + i, 1)
            cute.arch.mbarrier_init(buffers.k_empty + i, 4 * ((heads + heads_each - 1) // heads_each))
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def copy_tile(
    atom: cute.CopyAtom, rows: cute.Tensor, shape: cutlass.Constexpr, target: cute.Tensor, full: cute.Pointer
) -> None:
    """One tensor copy of ``shape`` from the origin of ``rows``."""
    source = cute.local_tile(rows, shape, (0, 0))
    shared, device = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, device, shared, tma_bar_ptr=full)


@cute.jit
def load_queries(
    atom: cute.CopyAtom, tensor_map: cute.Tensor, buffers: Any, query: Int32, first_head: Int32, heads: Int32,
    phase: Int32,
) -> None:  # fmt: skip
    """By the producer warp: 128 queries of every head, each as soon as the head's buffer is free."""
    for head in cutlass.range(heads, unroll=1):
        cute.arch.mbarrier_wait(buffers.q_empty + head, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(buffers.q_full + head, 2 * Q_BYTES)
        for half in cutlass.range_constexpr(2):
            rows = cute.domain_offset((query + HALF * half, 0), tensor_map[None, None, first_head + head])
            copy_tile(atom, rows, (HALF, HEAD_DIM), buffers.q[None, None, 2 * head + half], buffers.q_full + head)


@cute.jit
def load_keys(
    atom: cute.CopyAtom, tensor_map: cute.Tensor, buffers: Any, key: Int32, tile: Int32, key_head: Int32 | int,
    stage: Int32, phase: Int32,
) -> None:  # fmt: skip
    """By the producer warp: one tile of the keys from ``key`` on, as soon as the stage is free."""
    cute.arch.mbarrier_wait(buffers.k_empty + stage, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(buffers.k_full + stage, K_BYTES)
    rows = cute.domain_offset((key + TILE * tile, 0), tensor_map[None, None, key_head])
    copy_tile(atom, rows, (TILE, HEAD_DIM), buffers.k[None, None, stage], buffers.k_full + stage)


@cute.jit
def multiply(
    mma: cute.TiledMma, sums: cute.Tensor, q_part: cute.Tensor, k_part: cute.Tensor, query: Int32, stage: Int32
) -> None:
    """S of 64 queries and 128 keys, waited for."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for kk in cutlass.range_constexpr(HEAD_DIM // 16):
        cute.gemm(mma, sums, q_part[None, None, kk, query], k_part[None, None, kk, stage], sums)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def mask_keys(
    sums: cute.Tensor, tile: Int32, keys: Int32, first: Int32, begin: cutlass.Constexpr, local: Int32
) -> None:
    """-inf where the tile crosses the diagonal or the document's end; ``local`` is the thread in its warpgroup.

    Register ``i + 2 j + 4 n`` of a thread is row ``16 warp + lane / 4 + 8 j``, column ``8 n + 2 (lane % 4) + i``.
    """
    last_key = TILE * tile + TILE - 1
    if last_key > first + begin or last_key >= keys:
        values = cute.make_tensor(sums.iterator, cute.make_layout(TILE // 2))
        row = begin + local // 32 * 16 + local % 32 // 4
        key = TILE * tile + 2 * (local % 4)
        for j in cutlass.range_constexpr(2):
            limit = cutlass.min(first + row + 8 * j, keys - 1) - key
            for n in cutlass.range_constexpr(TILE // 8):
                for i in cutlass.range_constexpr(2):
                    if 8 * n + i > limit:
                        values[i + 2 * j + 4 * n] = -Float32.inf


@cute.jit
def reduce_rows(sums: cute.Tensor) -> tuple[Float32, Float32]:
    """Maxima of a thread's two rows over all 128 keys, the same in all lanes of a quad; NaN if one is."""
    values = cute.make_tensor(sums.iterator, cute.make_layout(TILE // 2))
    best = [values[0], values[2]]
    for j in cutlass.range_constexpr(2):
        for n in cutlass.range_constexpr(TILE // 8):
            for i in cutlass.range_constexpr(2):
                best[j] = cute.arch.fmax(best[j], values[i + 2 * j + 4 * n], nan=True)
        for offset in (1, 2):
            best[j] = cute.arch.fmax(best[j], cute.arch.shuffle_sync_bfly(best[j], offset), nan=True)
    return best[0], best[1]


def fake_rows(tokens: Any, heads: Any) -> Any:
    """Stand-in for ``[tokens, heads, 128]`` bf16 of any strides that are multiples of 8, to compile with."""
    stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    return cute.runtime.make_fake_tensor(BFloat16, (tokens, heads, HEAD_DIM), stride=stride, assumed_align=16)


def fake_table(columns: int) -> Any:
    """Stand-in for a contiguous int32 table of any length."""
    shape = (cute.sym_int(), columns)
    return cute.runtime.make_fake_tensor(Int32, shape, stride=(columns, 1), assumed_align=4)
