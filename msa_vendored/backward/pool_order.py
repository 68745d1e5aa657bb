"""Orders of accumulators: where element (row, d) of a gradient lies in the pool that a main kernel adds to.

A main kernel adds 16 bytes at a time from the registers of its tensor-core fragments, so its pools are permuted. Every
such order permutes the *bits* of (row in tile, d): a tile of 2^n rows x 128 takes 2^(n + 7) consecutive elements, and
an order lists, lowest bit of the element number first, which bit of the row (``r0``, ``r1``, ...) or of d (``d0`` to
``d6``) it is. ``"d0 d1 d2 d3 d4 d5 d6"`` is a row by itself; ``"r0 d0 d1 d2 d3 d4 d5 d6"`` has two rows side by side.

From an order follows how to read it back in whole 16-byte vectors and write bf16 in whole 16-byte *octets* (8
consecutive d of a row): a *granule* is the smallest set that is both. No GPU and no CuTe here.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM_BITS = 7
OCTET_BITS = 3
VECTOR_BYTES = 16

ROW_ORDER = "d0 d1 d2 d3 d4 d5 d6"
"""The order of the gradient itself."""

IN_PLACE = "in place"
"""No order of a pool: the main kernel adds to the bf16 gradient itself."""


def head_group_order(heads: int) -> str:
    """``heads`` (1, 2, 4 or 8) neighbouring heads side by side: the dQ pool of the SM100 main kernel."""
    return " ".join([*(f"r{i}" for i in range(heads.bit_length() - 1)), ROW_ORDER])


SM100_DKV_ORDER = "d0 d1 r0 r1 r2 r3 r4 r5 r6 d2 d3 d4 d5 d6"
"""dK and dV of the SM100 main kernel, a tile for each (key block, kv head): ``[d // 4, key, d % 4]``."""

SM90_DKV_ORDER = "d0 r3 d1 d2 r0 r1 r2 d3 d4 d5 d6 r4 r5 r6"
"""dK and dV of the SM90 main kernel, a tile for each (key block, kv head). Its dQ has :data:`ROW_ORDER` in fp32, and
is added in place in bf16."""


@dataclass(frozen=True, slots=True)
class Stride:
    """What one bit of a granule's number adds: elements of the pool, rows of the tile, d."""

    pool: int
    row: int
    d: int


@dataclass(frozen=True, slots=True)
class GranulePlan:
    """How the granules of a tile are read and written.

    Attributes:
        tile_rows: rows of a tile.
        vectors: pool offsets of the 16-byte vectors of granule 0, ascending.
        octets: (row, d) of the octets of granule 0, and for each of the 8 values which vector and which value in it.
        strides: for each bit of a granule's number within its tile, lowest first.
    """

    tile_rows: int
    vectors: tuple[int, ...]
    octets: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    strides: tuple[Stride, ...]

    @property
    def granules_per_tile(self) -> int:
        """Granules of a tile."""
        return 1 << len(self.strides)


def parse_order(order: str) -> tuple[str, ...]:
    """The bits of an order, lowest first.

    Raises:
        ValueError: it is not a permutation of ``d0`` to ``d6`` and ``r0`` to some ``r``.
    """
    bits = tuple(order.split())
    rows = len(bits) - HEAD_DIM_BITS
    if sorted(bits) != sorted([f"d{i}" for i in range(HEAD_DIM_BITS)] + [f"r{i}" for i in range(rows)]):
        raise ValueError(f"not an order of the bits d0 to d6 and of those of a row: {order!r}")
    return bits


def element_index(order: str, row: int, d: int) -> int:
    """Number of element (row of the tile, d) in its tile."""
    source = {"r": row, "d": d}
    return sum((source[bit[0]] >> int(bit[1:]) & 1) << i for i, bit in enumerate(parse_order(order)))


def plan_granules(order: str, element_bytes: int) -> GranulePlan:
    """How to read a pool of ``element_bytes`` (2 or 4) in this order.

    The granule's number counts, alternately, upwards in the pool and along the output, so that neighbouring threads
    fill the 32-byte sectors and 128-byte lines of both sides.
    """
    bits = parse_order(order)
    vector_bits = (VECTOR_BYTES // element_bytes).bit_length() - 1
    inside = [bit for i, bit in enumerate(bits) if i < vector_bits or bit in ("d0", "d1", "d2")]
    octet_bits = [bit for bit in inside if bit not in ("d0", "d1", "d2")]
    octets = []
    vectors = sorted({_offset(bits, inside, n) >> vector_bits << vector_bits for n in range(1 << len(inside))})
    for n in range(1 << len(octet_bits)):
        row, d = _place(octet_bits, n)
        indices = [element_index(order, row, d + k) for k in range(1 << OCTET_BITS)]
        mask = (1 << vector_bits) - 1
        octets.append((row, d, tuple((vectors.index(i & ~mask), i & mask) for i in indices)))
    outside = [bit for bit in bits if bit not in inside]
    along = sorted(outside, key=lambda bit: (bit[0] == "r", int(bit[1:])))
    strides: list[Stride] = []
    while outside:
        bit = outside[0] if len(strides) % 2 == 0 else along[0]
        outside.remove(bit)
        along.remove(bit)
        strides.append(Stride(1 << bits.index(bit), *_place([bit], 1)))
    return GranulePlan(1 << (len(bits) - HEAD_DIM_BITS), tuple(vectors), tuple(octets), tuple(strides))


def _offset(bits: tuple[str, ...], chosen: list[str], number: int) -> int:
    return sum((number >> i & 1) << bits.index(bit) for i, bit in enumerate(chosen))


def _place(chosen: list[str], number: int) -> tuple[int, int]:
    """Row and d whose bits ``chosen`` spell ``number`` and whose others are 0."""
    values = {"r": 0, "d": 0}
    for i, bit in enumerate(chosen):
        values[bit[0]] |= (number >> i & 1) << int(bit[1:])
    return values["r"], values["d"]
