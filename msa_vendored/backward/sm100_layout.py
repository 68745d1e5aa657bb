"""Plans of the SM100 main backward kernel: tensor memory, shared memory, warps, barriers, accumulators. No CuTe here.

One tile is 128 query rows (``128 // ratio`` queries x ``ratio`` heads) against one block of 128 keys. Five products of
128x128x128 in bf16 with fp32 accumulation::

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ^T = K^T dS^T

What is transposed has keys (for dQ: head dims) in the 128 lanes of tensor memory and query rows in its columns, so that
a compute thread owns one key and the row statistics are the same for a whole warp.

Accumulators that the kernel adds to (zero them before the launch; ``postprocess`` turns them into bf16):

- ``dq_pool``, flat, ``[T, Hq // g, 128, g]`` with ``g = head_group(ratio, dq_bytes)`` heads innermost:
  element ``(t, h, d)`` lies at ``((t * (Hq // g) + h // g) * 128 + d) * g + h % g``. A thread then owns ``g`` heads of
  one ``d``: one reduction of 16 bytes without an exchange between lanes, 512 consecutive bytes a warp.
- ``dkv``, flat fp32, ``[2, W // 128, Hkv, 32, 128, 4]``: which (0 dK, 1 dV), key block, key head, ``d // 4``, key in
  block, ``d % 4``. A thread owns one key: again 16 bytes each, 512 consecutive bytes a warp, no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

TILE = 128
HEAD_DIM = 128
RATIOS = (1, 2, 4, 8, 16)
STAGES = 2
"""Buffers of Q, of dO and of the row statistics."""
SMEM_LIMIT_BYTES = 232_448
"""227 KiB, what one CTA can have on SM100 (CUDA C++ programming guide, technical specifications)."""
TMEM_COLUMNS = 512


class Column(IntEnum):
    """First column of each region of tensor memory. All are 128 columns of fp32.

    P (bf16, two a column) overwrites the first half of S, dS that of dP, and dQ all of dP. Each reader is done by then:
    the thread that writes P or dS has read its row, and products run in the order of their issue.
    """

    S = 0
    DP = 128
    DV = 256
    DK = 384


OPERAND_BYTES = TILE * HEAD_DIM * 2
GROUP_BYTES = 2048
"""Eight rows of an operand: 64 dims of each (1024 bytes, one swizzle atom), then their other 64 dims."""
HALF_BYTES = 1024
SWIZZLE_ROWS = 8


class Smem(IntEnum):
    """Byte offsets in shared memory. Operands are swizzled by 128 bytes and must start at multiples of 1024."""

    K = 0
    V = OPERAND_BYTES
    Q = 2 * OPERAND_BYTES
    DO = Q + STAGES * OPERAND_BYTES
    DS = DO + STAGES * OPERAND_BYTES
    LSE = DS + OPERAND_BYTES
    DELTA = LSE + STAGES * TILE * 4
    BARRIERS = DELTA + STAGES * TILE * 4
    TMEM_ADDRESS = BARRIERS + 32 * 8
    POSITIONS = TMEM_ADDRESS + 16
    """Query positions relative to the key block, clipped to -1..127: int32 for each slot, int16 at ratio 1."""


class Barrier(IntEnum):
    """Index of each mbarrier; those of two stages take two."""

    K_FULL = 0
    V_FULL = 1
    K_EMPTY = 2
    V_EMPTY = 3
    Q_FULL = 4
    Q_EMPTY = 6
    DO_FULL = 8
    DO_EMPTY = 10
    ROW_FULL = 12
    ROW_EMPTY = 14
    S_FULL = 16
    DP_FULL = 17
    P_READY = 18
    DS_READY = 20
    DQ_FULL = 22
    DQ_EMPTY = 23
    DKV_EMPTY = 24


BARRIERS = 25
COMPUTE_WARPS = 4
REDUCE_WARPS = 4
ARRIVALS = {
    Barrier.ROW_EMPTY: COMPUTE_WARPS,
    Barrier.P_READY: COMPUTE_WARPS,
    Barrier.DS_READY: COMPUTE_WARPS,
    Barrier.DQ_EMPTY: REDUCE_WARPS,
    Barrier.DKV_EMPTY: REDUCE_WARPS,
}
"""Arrivals that complete a phase where it is not one."""


def barrier_arrivals() -> list[int]:
    """Expected arrivals of every mbarrier, by index."""
    first = sorted(Barrier)
    owners = [max(b for b in first if b <= index) for index in range(BARRIERS)]
    return [ARRIVALS.get(owner, 1) for owner in owners]


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """Warps of the CTA, in warpgroups of four; one register count for each warpgroup, as PTX asks.

    Attributes:
        threads: of the CTA.
        registers: per thread, for each warpgroup: service (mma, load, rows, gather), compute, reduce.
    """

    threads: int
    registers: tuple[int, ...]


MMA_WARP, LOAD_WARP, ROW_WARP, GATHER_WARP = range(4)
SERVICE_GROUP, COMPUTE_GROUP, REDUCE_GROUP = 0, 1, 2
PLAN = WarpPlan(threads=384, registers=(88, 240, 176))
"""88 + 240 + 176 = 504 registers for the three warps of a sub-partition, of 512."""


def smem_bytes(ratio: int) -> int:
    """Dynamic shared memory of the kernel."""
    return Smem.POSITIONS + STAGES * slots(ratio) * position_bytes(ratio)


def slots(ratio: int) -> int:
    """Queries of a tile."""
    return TILE // ratio


def gathers_by_tma(ratio: int) -> bool:
    """Whether the rows of one query fill groups of eight, so that boxes of a tensor map bring them in."""
    return ratio >= SWIZZLE_ROWS


def position_bytes(ratio: int) -> int:
    """Bytes of one relative position in shared memory: 128 of them at ratio 1 do not fit as int32."""
    return 2 if ratio == 1 else 4


def head_group(ratio: int, dq_bytes: int) -> int:
    """Heads that lie side by side in ``dq_pool``: as many as 16 bytes hold, if the key head has as many."""
    return min(ratio, 16 // dq_bytes)


def operand_offset(row: int, dim: int) -> int:
    """Byte offset of an element of a 128x128 bf16 operand in shared memory, before the 128-byte swizzle."""
    group, in_group = divmod(row, SWIZZLE_ROWS)
    half, in_half = divmod(dim, 64)
    return group * GROUP_BYTES + half * HALF_BYTES + in_group * 128 + in_half * 2


def swizzle(offset: int) -> int:
    """The 128-byte swizzle: bits 4 to 6 of the address are xored with bits 7 to 9."""
    return offset ^ (offset >> 3 & 0x70)


SWIZZLE_128 = 2


def matrix_descriptor(*, along_dims: bool) -> int:
    """The constant part of a shared-memory matrix descriptor (PTX ISA, tcgen05 matrix descriptor); the address is 0.

    The stride offset is the step between groups of eight rows. The leading offset is the step between halves of 64
    dims where dims are the rows or columns of the product; where K runs along dims, a swizzle atom holds a step of K
    whole, the offset has no meaning, and 1 is customary.
    """
    leading, stride, version = 1 if along_dims else HALF_BYTES >> 4, GROUP_BYTES >> 4, 1
    return leading << 16 | stride << 32 | version << 46 | SWIZZLE_128 << 61


def k_step_bytes(step: int, *, along_dims: bool) -> int:
    """Where the 16 elements of K of a step start: along dims (32 bytes each, four a half) or along rows."""
    return step // 4 * HALF_BYTES + step % 4 * 32 if along_dims else step * 2 * GROUP_BYTES


def instruction_descriptor(*, a_along_rows: bool, b_along_rows: bool) -> int:
    """For tcgen05.mma kind::f16, 128x128, bf16 to fp32; whether K runs along the rows of A and B in memory."""
    f32, bf16 = 1, 1
    majors = int(a_along_rows) << 15 | int(b_along_rows) << 16
    return f32 << 4 | bf16 << 7 | bf16 << 10 | majors | TILE // 8 << 17 | TILE // 16 << 24
