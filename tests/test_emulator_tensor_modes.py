"""Rarer modes of tensor copies and tcgen05 in the PTX emulator, against their definitions."""

from __future__ import annotations

import pytest
import torch
from ptx_emulator import Kernel, Options
from ptx_emulator.ptx import parse_entries
from ptx_emulator.report import NamedTensor, Report
from ptx_emulator.snippets import module
from ptx_emulator.tensor_map import encode_tensor_map

BF16 = torch.bfloat16
LANE = "mov.u32 %r0, %tid.x; setp.eq.s32 %p1, %r0, 0; mov.u32 %r3, smem;"
BARRIER = """@!%p1 bra INIT; mbarrier.init.shared.b64 [%r3+4096], 1;
fence.mbarrier_init.release.cluster; INIT: bar.sync 0;"""
WAIT = "LOOP: mbarrier.try_wait.parity.shared.b64 %p9, [%r3+4096], 0; @!%p9 bra LOOP;"


def gather(rows: tuple[int, int, int, int], box_rows: int = 1, schedule: str = "eager") -> tuple[Report, torch.Tensor]:
    """Four rows of ``source`` gathered at column 32, then scattered to the same rows of a tensor of ones."""
    source = torch.arange(10 * 96, dtype=torch.float32).view(10, 96).to(BF16)
    target = torch.ones(10, 96, dtype=BF16)
    at = ", ".join(map(str, rows))
    body = (
        LANE
        + BARRIER
        + f"""
    mov.b64 %d1, a0; mov.b64 %d2, a1;
    @!%p1 bra W;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3+4096], 512;
    cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
        [%r3], [%d1, {{32, {at}}}], [%r3+4096];
    W: {WAIT}
    @!%p1 bra END;
    cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d2, {{32, {at}}}], [%r3];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:"""
    )
    text = module(body, [".align 128 .b8 a0[128]", ".align 128 .b8 a1[128]"], shared_bytes=4104)
    maps = [encode_tensor_map(tensor, (box_rows, 64), 128) for tensor in (source, target)]
    tensors = [NamedTensor("source", source), NamedTensor("target", target)]
    report = Report()
    Kernel(parse_entries(text)["test"]).run((1, 1, 1), (32, 1, 1), 0, maps, tensors, Options(schedule, 1), report)
    expected = torch.ones(10, 96, dtype=BF16)
    for row in set(rows):
        if 0 <= row < 10:
            expected[row, 32:] = source[row, 32:]
    assert torch.equal(target, expected)
    return report, target


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("rows", [(7, 0, 3, 9), (2, 12, -1, 5)])
def test_gather_and_scatter_of_four_rows(rows: tuple[int, int, int, int], schedule: str) -> None:
    """Rows in the order that the instruction names them; outside the tensor, zeros in and nothing out."""
    gather(rows, schedule=schedule)[0].require_clean()


def test_gather_needs_a_map_of_single_rows() -> None:
    """A map that was made for tiles of rows, which the hardware does not take for a gather."""
    with pytest.raises(Exception, match="box of 4 rows for a gather of four"):
        gather((0, 1, 2, 3), box_rows=4)


TMEM = """
    and.b32 %r2, %r0, 31; shr.u32 %r1, %r0, 5; setp.eq.s32 %p2, %r1, 0;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+4104], 32;
    bar.sync 0; ld.shared.b32 %r8, [%r3+4104]; shl.b32 %r11, %r1, 21; add.s32 %r12, %r8, %r11;
"""
FREE = "bar.sync 1; @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;"


def in_tmem(body: str, words: int, source: torch.Tensor | None = None, schedule: str = "eager") -> torch.Tensor:
    """Run four warps with 32 columns allocated; returns ``out``, 128 threads x ``words``, and may read ``a0``."""
    out = torch.zeros(128, words, dtype=torch.int32)
    text = module(
        LANE + BARRIER + TMEM + body + FREE, [".u64 a0", ".u64 a1"], threads=128, shared_bytes=4112
    )  # fmt: skip
    report = Report()
    tensors = [NamedTensor("a0", out if source is None else source), NamedTensor("a1", out)]
    values = [tensor.tensor.data_ptr().to_bytes(8, "little") for tensor in tensors]
    kernel = Kernel(parse_entries(text)["test"])
    kernel.run((1, 1, 1), (128, 1, 1), 0, values, tensors, Options(schedule, 2), report)
    report.require_clean()
    return out


def store_out(words: int) -> str:
    listed = ", ".join(f"%r{40 + i}" for i in range(words))
    vector = f"v{words}." if words > 1 else ""
    return f"""
    tcgen05.wait::ld.sync.aligned;
    ld.param.u64 %d0, [a1]; mad.wide.u32 %d0, %r0, {4 * words}, %d0;
    st.global.{vector}b32 [%d0], {f"{{{listed}}}" if words > 1 else listed};
    """


# Every cell of a warp's 32 lanes x 4 columns holds 4 * lane + column, written by 32x32b.
FILL = """
    shl.b32 %r20, %r2, 2; add.s32 %r21, %r20, 1; add.s32 %r22, %r20, 2; add.s32 %r23, %r20, 3;
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r12], {%r20, %r21, %r22, %r23}; tcgen05.wait::st.sync.aligned;
"""


def test_load_16x64b() -> None:
    """Thread t: row t / 4, eight below for odd threads; column from bit 1; registers two columns apart."""
    body = FILL + "tcgen05.ld.sync.aligned.16x64b.x2.b32 {%r40, %r41}, [%r12];" + store_out(2)
    out = in_tmem(body, 2).view(4, 32, 2)
    for t in range(32):
        row = t // 4 + 8 * (t % 2)
        assert out[:, t].tolist() == [[4 * row + t // 2 % 2, 4 * row + 2 + t // 2 % 2]] * 4


def test_store_16x64b_is_its_inverse() -> None:
    """A store whose fragments are those of another shape."""
    body = """
    tcgen05.st.sync.aligned.16x64b.x2.b32 [%r12], {%r2, %r0}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.16x64b.x2.b32 {%r40, %r41}, [%r12];
    """
    out = in_tmem(body + store_out(2), 2)
    assert out.tolist() == [[t % 32, t] for t in range(128)]


@pytest.mark.parametrize("split", [1, 2])
def test_load_16x32bx2(split: int) -> None:
    """The lower half of the threads reads columns further to the right."""
    body = FILL + f"tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {{%r40, %r41}}, [%r12], {split};" + store_out(2)
    out = in_tmem(body, 2).view(4, 32, 2)
    for t in range(32):
        first = 4 * (t % 16) + t // 16 * split
        assert out[:, t].tolist() == [[first, first + 1]] * 4


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ("128x128b", list(range(128))),
        ("64x128b.warpx2::02_13", [*range(64)] * 2),
        ("64x128b.warpx2::01_23", [*range(32), *range(32), *range(32, 64), *range(32, 64)]),
        ("32x128b.warpx4", [*range(32)] * 4),
    ],
)
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_copies_from_shared_memory(shape: str, rows: list[int], schedule: str) -> None:
    """Which warps' lanes get which row of 16 bytes."""
    source = torch.arange(512, dtype=torch.int32)
    body = f"""
    ld.param.u64 %d0, [a0]; mad.wide.u32 %d0, %r0, 16, %d0; mad.lo.u32 %r20, %r0, 16, %r3;
    ld.global.v4.b32 {{%r21, %r22, %r23, %r24}}, [%d0]; st.shared.v4.b32 [%r20], {{%r21, %r22, %r23, %r24}};
    fence.proxy.async.shared::cta; bar.sync 0;
    @!%p1 bra W;
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9; add.s64 %d21, %d20, {128 >> 4 << 16 | 128 >> 4 << 32};
    tcgen05.cp.cta_group::1.{shape} [%r8], %d21;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+4096];
    W: {WAIT}
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r40, %r41, %r42, %r43}}, [%r12];
    """
    out = in_tmem(body + store_out(4), 4, source, schedule)
    assert torch.equal(out, source.view(128, 4)[rows])


def test_offset_between_halves_belongs_to_one_shape() -> None:
    """An operand that is dropped without a word."""
    with pytest.raises(Exception, match="belongs to 16x32bx2"):
        in_tmem("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r40}, [%r12], 2;", 1)
