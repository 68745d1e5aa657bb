"""Sizes, flags, barriers and element orders of the SM90 main kernel, and its structural options."""

from typing import Any

HEAD_DIM = 128
KEYS = 128
ROWS = 128
HALF = 64
STAGES = 2
WARPGROUP = 128
THREADS = 3 * WARPGROUP
CONSUMERS = 2 * WARPGROUP
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
TILE_BYTES = ROWS * HEAD_DIM * 2
PLACE = 8
"""Words of ``info`` before the token rows of the slots: kv head, key block, flags, valid keys, task, distance from the
token row of a query to its last visible key in the block, 2 unused."""
FIRST, LAST, MASKED = 1, 2, 4
EVICT_LAST = 0x14F0000000000000
"""L2 policy of CUTLASS's ``TMA::CacheHintSm90`` for Q, dO and dQ: up to 16 tasks of a window come back to them."""
DQ_BYTES = 4096
"""Shared memory of a warp's dQ: 16 rows of bf16, or 8 of fp32 at a time."""
BARRIER_DS = 1
"""Named barriers 1, 2: dS of half 0, 1 is stored; 3, 4: the other warpgroup may overwrite it; 5: K and V are cleaned,
or Q and dO were read for the last time in a segment; 6, 7: the warpgroup's own warps may overwrite dS."""


def dkv_sum_index(key: int, d: int) -> int:
    """Where element (key of the block, d) is in the 128 * 128 elements of a block of ``dk_sum`` or ``dv_sum``.

    Each of 8 warps adds 16 keys as it holds them in its wgmma accumulator: 2,048 consecutive elements, of which 128 are
    8 columns. Element 4 l + i of these is accumulator i of lane l: keys l // 4 (+ 8 for i = 2, 3), columns
    2 (l % 4) + i % 2.
    """
    warp, lane, below = key // 16, key % 8 * 4 + d % 8 // 2, key % 16 // 8
    return (warp * 16 + d // 8) * 128 + lane * 4 + below * 2 + d % 2


class StructureSm90:
    """What follows from the options; see :class:`msa_vendored.backward.main_sm90.MainBackwardSm90`."""

    def __init__(self, ratio: int, dq_accumulation: str, gradients: str = "all") -> None:
        self.ratio = ratio
        self.wants_dq, self.wants_dkv = gradients != "dkv", gradients != "dq"
        # TMA reductions of one CTA may overtake one another until they are complete, not merely read.
        self.read_suffices = gradients != "dq"
        self.slots = ROWS // ratio
        self.dq_accumulation = dq_accumulation
        self.fp32_sum, self.scaled_sum = dq_accumulation == "fp32", dq_accumulation == "fp16"
        self.sum_bytes = 4 if self.fp32_sum else 2
        # Elements of dQ in 128 bytes, the width of a swizzled row of shared memory.
        self.sum_width = 128 // self.sum_bytes
        # With 8 or 16 heads one TMA box brings both 64-column halves of a token: [2][ratio][64] elements.
        self.wide = ratio >= 8
        self.group_stride = ratio * HEAD_DIM if self.wide else 8 * 64
        self.half_offset = 8 * 64 if ratio == 16 else 8 * self.group_stride
        self.column_stride = ratio * 64 if self.wide else ROWS * 64
        self.slot_stride = ratio * HEAD_DIM if self.wide else ratio * 64
        # 128 token rows of one head do not fit in shared memory; they are then read from the table again.
        self.rows_shared = ratio > 1
        self.info_words = PLACE + (self.slots if self.rows_shared else 0)

    def token_row(self, info: Any, task_qrows: Any, slot: Any) -> Any:
        """Row of q of a slot, -1 if it holds no query."""
        return info[PLACE + slot] if self.rows_shared else task_qrows[info[4], slot]
