"""Memory, warp and tensor instructions of the PTX emulator against values computed from the PTX ISA's definitions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ptx_emulator import emulate
from ptx_emulator.snippets import lane_address, module
from ptx_emulator.tensor_map import encode_tensor_map

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LANE = "mov.u32 %r0, %tid.x; and.b32 %r2, %r0, 31; shr.u32 %r1, %r0, 5; setp.eq.s32 %p1, %r0, 0; mov.u32 %r3, smem;"


def run(body: str, *arguments: Any, threads: int = 32, shared_bytes: int = 16, **options: Any) -> None:
    kinds = [f".align 128 .b8 a{i}[128]" if isinstance(a, bytes) else f".u64 a{i}" for i, a in enumerate(arguments)]
    text = module(body, kinds, threads=threads, shared_bytes=shared_bytes)
    emulate(text, *arguments, **options).require_clean()


def words(count: int = 32) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def test_shuffles_and_votes() -> None:
    """A shuffle that takes the wrong lane or ignores the clamp; a vote over the wrong lanes."""
    out = words(7 * 32)
    body = LANE + "mul.lo.s32 %r10, %r0, 3;"
    for i, text in enumerate(
        [
            "shfl.sync.bfly.b32 %r20, %r10, 5, 31, -1;",
            "shfl.sync.up.b32 %r20, %r10, 3, 0, -1;",
            "shfl.sync.down.b32 %r20, %r10, 3, 31, -1;",
            "shfl.sync.idx.b32 %r20|%p5, %r10, 2, 0x181f, -1;",
            "setp.gt.u32 %p6, %r0, 20; vote.sync.ballot.b32 %r20, %p6, -1;",
            "redux.sync.add.u32 %r20, %r10, -1;",
            "and.b32 %r21, %r0, 3; match.any.sync.b32 %r20, %r21, -1;",
        ]
    ):
        body += f"{text} {lane_address('%d0', 'a0', 4)} st.global.b32 [%d0+{128 * i}], %r20;"
    run(body, out)
    rows = out.view(7, 32).tolist()
    lanes = range(32)
    assert rows[0] == [3 * (lane ^ 5) for lane in lanes]
    assert rows[1] == [3 * (lane - 3 if lane >= 3 else lane) for lane in lanes]
    assert rows[2] == [3 * (lane + 3 if lane + 3 < 32 else lane) for lane in lanes]
    assert rows[3] == [3 * (lane // 8 * 8 + 2) for lane in lanes]
    assert [value & 0xFFFFFFFF for value in rows[4]] == [0xFFFFFFFF << 21 & 0xFFFFFFFF] * 32
    assert rows[5] == [3 * sum(lanes)] * 32
    assert [v & 0xFFFFFFFF for v in rows[6]] == [0x11111111 << lane % 4 & 0xFFFFFFFF for lane in lanes]


def test_divergent_lanes_meet_again_and_elect_takes_one() -> None:
    """Lanes of both sides of a branch must run, and meet before the instruction after it."""
    out = words()
    body = (
        LANE
        + """
    setp.lt.u32 %p2, %r0, 7; @%p2 bra LOW; mov.u32 %r10, 100; bra JOIN; LOW: mov.u32 %r10, 1;
    JOIN: elect.sync %r11|%p3, -1; @%p3 add.s32 %r10, %r10, 1000;
    """
    )
    run(body + lane_address("%d0", "a0", 4) + "st.global.b32 [%d0], %r10;", out)
    assert out.tolist() == [1001] + [1] * 6 + [100] * 25


@pytest.mark.parametrize(
    ("opcode", "old", "expected"),
    [
        ("atom.global.add.u32", 5, 5 + 32 * 3),
        ("atom.global.max.s32", 2, 3),
        ("atom.global.min.s32", 2, 2),
        ("atom.global.or.b32", 4, 7),
        ("atom.global.exch.b32", 9, 3),
        ("atom.global.inc.u32", 0, 0),
    ],
)
def test_atomic(opcode: str, old: int, expected: int) -> None:
    """An atomic of another operation, or one that loses lanes; inc wraps at its operand: 32 steps modulo 4."""
    place = torch.tensor([old], dtype=torch.int32)
    run(f"ld.param.u64 %d0, [a0]; {opcode} %r1, [%d0], 3;", place)
    assert int(place) == expected


def test_vector_and_packed_reductions() -> None:
    """Reductions of packed 16-bit values and of four floats at once."""
    half = torch.tensor([1.0, 2.0], dtype=BF16)
    four = torch.zeros(4)
    body = """ld.param.u64 %d0, [a0]; ld.param.u64 %d1, [a1]; mov.b32 %r1, 0x40003f80;
    red.global.add.noftz.bf16x2 [%d0], %r1;
    mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f40000000;
    red.global.add.v4.f32 [%d1], {%f0, %f1, %f0, %f1};"""
    run(body, half, four)
    assert half.tolist() == [33.0, 66.0]
    assert four.tolist() == [32.0, 64.0, 32.0, 64.0]


def test_wide_register_loads_sign_extend() -> None:
    """ld.global.s32 into a 64-bit register has 8 bytes a lane to write, not 4."""
    source = torch.arange(-16, 16, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int64)
    body = lane_address("%d0", "a0", 4) + "ld.global.s32 %d1, [%d0];" + lane_address("%d2", "a1", 8)
    run(body + "st.global.b64 [%d2], %d1;", source, out)
    assert out.tolist() == list(range(-16, 16))


BARRIER = """@!%p1 bra INIT; mbarrier.init.shared.b64 [%r3+32768], 1;
fence.mbarrier_init.release.cluster; INIT: bar.sync 0;"""
WAIT = "LOOP{n}: mbarrier.try_wait.parity.shared.b64 %p9, [%r3+32768], {n}; @!%p9 bra LOOP{n};"


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_copy_swizzles_and_fills(swizzle: int, schedule: str) -> None:
    """A tile at the corner: rows and columns outside are zeros when loaded and left alone when stored."""
    columns = (swizzle or 64) // 2
    source = torch.arange(12 * 40, dtype=F32).view(12, 40).to(BF16)
    target = torch.full((12, 40), -1.0, dtype=BF16)
    raw = torch.zeros(16 * columns, dtype=BF16)
    maps = [encode_tensor_map(t, (16, columns), swizzle) for t in (source, target)]
    body = (
        LANE
        + BARRIER
        + f"""
    mov.b64 %d1, a0; mov.b64 %d2, a1; ld.param.u64 %d3, [a2];
    @!%p1 bra W;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3+32768], {32 * columns};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%d1, {{-8, 3}}], [%r3+32768];
    W: {WAIT.format(n=0)}
    @!%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r3], {32 * columns};
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {{-8, 3}}], [%r3];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:"""
    )
    text = module(body, [".align 128 .b8 a0[128]", ".align 128 .b8 a1[128]", ".u64 a2"], shared_bytes=32776)
    from ptx_emulator import Kernel, Options
    from ptx_emulator.ptx import parse_entries
    from ptx_emulator.report import NamedTensor, Report

    report = Report()
    kernel = Kernel(parse_entries(text)["test"])
    tensors = [NamedTensor(n, t) for n, t in (("source", source), ("target", target), ("raw", raw))]
    values = [*maps, raw.data_ptr().to_bytes(8, "little")]
    kernel.run((1, 1, 1), (32, 1, 1), 0, values, tensors, Options(schedule, 3), report)
    report.require_clean()
    tile = torch.zeros(16, columns, dtype=BF16)
    width = min(columns - 8, 40)
    tile[:9, 8 : 8 + width] = source[3:, :width]
    expected = torch.full_like(target, -1.0)
    expected[3:, :width] = source[3:, :width]
    assert torch.equal(target, expected)
    assert torch.equal(swizzle_rows(tile, swizzle), raw)


ATOMS_32B = -128
"""Swizzle of 128 bytes in atoms of 32, the layout of an MN-major tf32 operand: chunks move in pairs."""


def swizzle_rows(tile: torch.Tensor, swizzle: int) -> torch.Tensor:
    """A row-major tile as it lies in shared memory: the 16-byte chunk index xor the index of the 128-byte line."""
    flat = tile.reshape(-1, 16 // tile.element_size())
    mask = {0: 0, 32: 1, 64: 3, 128: 7, ATOMS_32B: 6}[swizzle]
    out = torch.empty_like(flat)
    for chunk in range(flat.shape[0]):
        line = chunk // 8 * (2 if swizzle == ATOMS_32B else 1)
        out[chunk ^ (line & mask)] = flat[chunk]
    return out.reshape(-1)


def core_matrices(matrix: torch.Tensor, mn_major: bool, swizzle: int) -> tuple[torch.Tensor, int, int]:
    """A [rows, 16 or 8] operand in a canonical layout; returns its bytes, leading and stride byte offsets."""
    rows, depth = matrix.shape
    size = matrix.element_size()
    per_chunk = 16 // size
    if not mn_major:
        chunks = matrix.reshape(rows // 8, 8, depth // per_chunk, per_chunk)
        if swizzle == 0:  # core matrices of 8 rows x 16 bytes, K chunks 128 bytes apart
            return chunks.permute(0, 2, 1, 3).reshape(-1), 128, 256
        row = torch.zeros(rows, swizzle // size, dtype=matrix.dtype)
        row[:, :depth] = matrix
        return swizzle_rows(row, swizzle), 16, 8 * swizzle
    columns = matrix.T.contiguous()  # [depth, rows]: rows contiguous
    if swizzle == ATOMS_32B:  # 4 values of K of every panel of 32 rows, then the next 4
        panels = columns.reshape(depth // 4, 4, rows // 32, 32).permute(0, 2, 1, 3).contiguous()
        return swizzle_rows(panels, swizzle), 512, 16 * rows
    if swizzle == 0:
        chunks = columns.reshape(depth // 8, 8, rows // 8, 8)
        return chunks.permute(2, 0, 1, 3).reshape(-1), 128, 256
    span = swizzle // size
    panels = columns.reshape(depth, rows // span, span).permute(1, 0, 2).contiguous()
    flat = torch.cat([swizzle_rows(panel, swizzle) for panel in panels])
    return flat, depth * swizzle, 8 * swizzle


LAYOUT = {0: 0, ATOMS_32B: 1, 128: 2, 64: 4, 32: 6}


def descriptor(address: int, leading: int, stride: int, swizzle: int, version: int = 1) -> int:
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | version << 46 | LAYOUT[swizzle] << 61


def instruction_descriptor(rows: int, columns: int, dtype: torch.dtype, a_mn: bool, b_mn: bool) -> int:
    kind = {F16: 0, BF16: 1, F32: 2}[dtype]
    return 1 << 4 | kind << 7 | kind << 10 | a_mn << 15 | b_mn << 16 | columns // 8 << 17 | rows // 16 << 24


B_AT = 16384


def stage(name: str, size_bytes: int, shared: str, threads: int) -> str:
    """Copy a tensor into shared memory by threads, 16 bytes each."""
    text = f"ld.param.u64 %d10, [{name}]; mad.wide.u32 %d11, %r0, 16, %d10; "
    text += f"mov.u32 %r30, {shared}; mad.lo.u32 %r31, %r0, 16, %r30;"
    for at in range(0, size_bytes, 16 * threads):
        guard = size_bytes - at
        text += f"setp.lt.u32 %p20, %r0, {guard // 16}; @%p20 ld.global.v4.b32 {{%r32, %r33, %r34, %r35}}, [%d11+{at}];"
        text += f"@%p20 st.shared.v4.b32 [%r31+{at}], {{%r32, %r33, %r34, %r35}};"
    return text


LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]
MMA_CASES = [(BF16, rows, a, b, s) for (a, b), s, rows in itertools.product(LAYOUTS, (0, 32, 64, 128), (64, 128))]
MMA_CASES += [(F16, 128, False, False, 128), (F32, 128, False, False, 128), (F32, 64, False, False, 0)]
# An MN-major tf32 operand lies in atoms of 32 bytes; the swizzle is that of a K-major one.
MMA_CASES += [(F32, rows, a, b, 64) for (a, b), rows in itertools.product(LAYOUTS[1:], (64, 128))]


@pytest.mark.parametrize(("dtype", "rows", "a_mn", "b_mn", "swizzle"), MMA_CASES)
def test_tcgen05_mma(dtype: torch.dtype, rows: int, a_mn: bool, b_mn: bool, swizzle: int) -> None:
    """A descriptor layout, operand format or row placement that is read wrongly. Small integers: exact in any order."""
    columns, depth = 64, 32 // dtype.itemsize
    torch.manual_seed(rows + swizzle)
    a = torch.randint(-4, 5, (rows, depth)).to(dtype)
    b = torch.randint(-4, 5, (columns, depth)).to(dtype)
    out = torch.zeros(128, columns)
    kind = "tf32" if dtype == F32 else "f16"
    a_swizzle, b_swizzle = (ATOMS_32B if mn and dtype == F32 else swizzle for mn in (a_mn, b_mn))
    a_flat, a_leading, a_stride = core_matrices(a, a_mn, a_swizzle)
    b_flat, b_leading, b_stride = core_matrices(b, b_mn, b_swizzle)
    a_descriptor = descriptor(0, a_leading, a_stride, a_swizzle)
    b_descriptor = descriptor(0, b_leading, b_stride, b_swizzle)
    body = LANE + BARRIER + stage("a0", a_flat.nbytes, "smem", 128) + stage("a1", b_flat.nbytes, f"smem+{B_AT}", 128)
    body += f"""
    setp.eq.s32 %p2, %r1, 0;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+32776], 64;
    fence.proxy.async.shared::cta; bar.sync 0;
    ld.shared.b32 %r8, [%r3+32776];
    @!%p1 bra W;
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9; add.s64 %d21, %d20, {a_descriptor};
    add.s64 %d22, %d20, {b_descriptor + (B_AT >> 4)};
    mov.b32 %r10, {instruction_descriptor(rows, columns, dtype, a_mn, b_mn)};
    tcgen05.mma.cta_group::1.kind::{kind} [%r8], %d21, %d22, %r10, 0;
    tcgen05.mma.cta_group::1.kind::{kind} [%r8], %d21, %d22, %r10, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+32768];
    W: {WAIT.format(n=0)}
    shl.b32 %r11, %r1, 21; add.s32 %r12, %r8, %r11;
    ld.param.u64 %d0, [a2]; mad.wide.u32 %d0, %r0, {4 * columns}, %d0;
    """
    lanes_used = "" if rows == 128 else "setp.ge.u32 %p3, %r2, 16; "
    guard = "" if rows == 128 else "@!%p3 "
    body += lanes_used
    if rows == 64:  # 16 of each quarter's lanes hold rows; the others were never written
        for column in range(0, columns, 8):
            body += f"tcgen05.ld.sync.aligned.16x256b.x1.b32 {{%r40, %r41, %r42, %r43}}, [%r12+{column}];"
            body += "tcgen05.wait::ld.sync.aligned;"
            body += "shr.u32 %r20, %r2, 2; and.b32 %r21, %r2, 3; ld.param.u64 %d1, [a2];"
            body += f"mad.lo.u32 %r22, %r1, 32, %r20; mul.lo.u32 %r22, %r22, {columns}; mad.lo.u32 %r22, %r21, 2, %r22;"
            body += f"mad.wide.u32 %d1, %r22, 4, %d1; st.global.v2.b32 [%d1+{4 * column}], {{%r40, %r41}};"
            body += f"st.global.v2.b32 [%d1+{4 * column + 8 * 4 * columns}], {{%r42, %r43}};"
    else:
        for column in range(columns):
            body += f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r40}}, [%r12+{column}]; tcgen05.wait::ld.sync.aligned;"
            body += f"{guard}st.global.b32 [%d0+{4 * column}], %r40;"
    body += "bar.sync 1; @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;"
    run(body, a_flat, b_flat, out, threads=128, shared_bytes=32780)
    got = out if rows == 128 else out.view(4, 32, columns)[:, :16].reshape(64, columns)
    assert torch.equal(got, 2 * (a.float() @ b.float().T))


REFUSED = "MN-major tf32 operand with matrix descriptor layout"
REFUSALS = [(F32, True, s, f"{REFUSED} {LAYOUT[s]}") for s in (0, 32, 64, 128)]
REFUSALS += [(t, mn, ATOMS_32B, "matrix descriptor layout 1") for t, mn in ((BF16, True), (BF16, False), (F32, False))]


@pytest.mark.parametrize(("dtype", "mn_major", "swizzle", "message"), REFUSALS)
def test_layouts_without_a_meaning_are_refused(dtype: torch.dtype, mn_major: bool, swizzle: int, message: str) -> None:
    """32-byte atoms belong to MN-major tf32 operands, and those to 32-byte atoms: nothing else is guessed."""
    kind = "tf32" if dtype == F32 else "f16"
    body = (
        LANE
        + f"""
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+4096], 32; ld.shared.b32 %r8, [%r3+4096];
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9; add.s64 %d21, %d20, {descriptor(0, 512, 512, swizzle)};
    mov.b32 %r10, {instruction_descriptor(64, 32, dtype, mn_major, mn_major)};
    @%p1 tcgen05.mma.cta_group::1.kind::{kind} [%r8], %d21, %d21, %r10, 0;
    """
    )
    with pytest.raises(AssertionError, match=f"not-modelled: {message}"):
        run(body, threads=32, shared_bytes=4104)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_tcgen05_mma_with_a_in_tensor_memory(dtype: torch.dtype) -> None:
    """A read from the wrong columns, or its two halves swapped."""
    torch.manual_seed(5)
    a, b = torch.randint(-4, 5, (128, 16)).to(dtype), torch.randint(-4, 5, (32, 16)).to(dtype)
    out = torch.zeros(128, 32)
    b_flat, leading, stride_bytes = core_matrices(b, False, 0)
    body = (
        LANE
        + BARRIER
        + stage("a1", b_flat.nbytes, "smem", 128)
        + f"""
    setp.eq.s32 %p2, %r1, 0;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+32776], 64;
    fence.proxy.async.shared::cta; bar.sync 0;
    ld.shared.b32 %r8, [%r3+32776]; shl.b32 %r11, %r1, 21; add.s32 %r12, %r8, %r11;
    ld.param.u64 %d0, [a0]; mad.wide.u32 %d0, %r0, 32, %d0;
    ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%d0]; ld.global.v4.b32 {{%r44, %r45, %r46, %r47}}, [%d0+16];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12+32], {{%r40, %r41, %r42, %r43, %r44, %r45, %r46, %r47}};
    tcgen05.wait::st.sync.aligned; bar.sync 0;
    @!%p1 bra W;
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9; add.s64 %d22, %d20, {descriptor(0, leading, stride_bytes, 0)};
    mov.b32 %r10, {instruction_descriptor(128, 32, dtype, False, False)};
    tcgen05.mma.cta_group::1.kind::f16 [%r8], [%r8+32], %d22, %r10, 0;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+32768];
    W: {WAIT.format(n=0)}
    ld.param.u64 %d1, [a2]; mad.wide.u32 %d1, %r0, 128, %d1;
    """
    )
    for column in range(32):
        body += f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r40}}, [%r12+{column}]; "
        body += f"tcgen05.wait::ld.sync.aligned; st.global.b32 [%d1+{4 * column}], %r40;"
    body += "bar.sync 1; @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;"
    run(body, a, b_flat, out, threads=128, shared_bytes=32780)
    assert torch.equal(out, a.float() @ b.float().T)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_ldmatrix_mma_sync_and_stmatrix(dtype: torch.dtype) -> None:
    """Fragments of one warp: A by ldmatrix, B by ldmatrix of its transpose, the product exact on small integers."""
    torch.manual_seed(3)
    a, b = torch.randint(-4, 5, (16, 16)).to(dtype), torch.randint(-4, 5, (16, 8)).to(dtype)
    out, copied = torch.zeros(16, 8), torch.zeros(16, 16, dtype=dtype)
    name = "bf16" if dtype == BF16 else "f16"
    body = (
        LANE
        + stage("a0", 512, "smem", 32)
        + stage("a1", 256, "smem+1024", 32)
        + f"""
    bar.warp.sync -1;
    and.b32 %r4, %r0, 15; shr.u32 %r5, %r0, 4; mad.lo.u32 %r6, %r4, 32, %r3; mad.lo.u32 %r6, %r5, 16, %r6;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
    mad.lo.u32 %r7, %r4, 16, %r3;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r14, %r15}}, [%r7+1024];
    mov.f32 %f4, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%f0, %f1, %f2, %f3}},
    {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%f4, %f4, %f4, %f4}};
    shr.u32 %r20, %r2, 2; and.b32 %r21, %r2, 3; mul.lo.u32 %r22, %r20, 8; mad.lo.u32 %r22, %r21, 2, %r22;
    ld.param.u64 %d0, [a2]; mad.wide.u32 %d0, %r22, 4, %d0;
    st.global.v2.f32 [%d0], {{%f0, %f1}}; st.global.v2.f32 [%d0+256], {{%f2, %f3}};
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6+2048], {{%r10, %r11, %r12, %r13}};
    bar.warp.sync -1;
    mad.lo.u32 %r23, %r0, 16, %r3; ld.shared.v4.b32 {{%r40, %r41, %r42, %r43}}, [%r23+2048];
    ld.param.u64 %d1, [a3]; mad.wide.u32 %d1, %r0, 16, %d1; st.global.v4.b32 [%d1], {{%r40, %r41, %r42, %r43}};
    """
    )
    run(body, a, b, out, copied, shared_bytes=4096)
    assert torch.equal(out, a.float() @ b.float())
    assert torch.equal(copied, a)


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("waits", [True, False])
def test_wgmma(swizzle: int, waits: bool) -> None:
    """The 64 rows of a warpgroup; registers touched before wgmma.wait_group are reported."""
    torch.manual_seed(4)
    a, b = torch.randint(-4, 5, (64, 16)).to(BF16), torch.randint(-4, 5, (8, 16)).to(BF16)
    out = torch.zeros(64, 8)
    a_flat, a_leading, a_stride = core_matrices(a, False, swizzle)
    b_flat, b_leading, b_stride = core_matrices(b, False, swizzle)
    body = (
        LANE
        + stage("a0", a_flat.nbytes, "smem", 128)
        + stage("a1", b_flat.nbytes, f"smem+{B_AT}", 128)
        + f"""
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9;
    add.s64 %d21, %d20, {descriptor(0, a_leading, a_stride, swizzle, 0)};
    add.s64 %d22, %d20, {descriptor(0, b_leading, b_stride, swizzle, 0) + (B_AT >> 4)};
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %d21, %d22, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {"wgmma.wait_group.sync.aligned 0;" if waits else ""}
    shr.u32 %r20, %r2, 2; and.b32 %r21, %r2, 3; mad.lo.u32 %r20, %r1, 16, %r20;
    mul.lo.u32 %r22, %r20, 8; mad.lo.u32 %r22, %r21, 2, %r22;
    ld.param.u64 %d0, [a2]; mad.wide.u32 %d0, %r22, 4, %d0;
    st.global.v2.f32 [%d0], {{%f0, %f1}}; st.global.v2.f32 [%d0+256], {{%f2, %f3}};
    """
    )
    text = module(body, [".u64 a0", ".u64 a1", ".u64 a2"], threads=128, shared_bytes=32768)
    report = emulate(text, a_flat, b_flat, out)
    assert report.kinds == (set() if waits else {"wgmma-not-waited"})
    # Without the wait a warp stores its accumulators before the others have issued the wgmma.
    assert torch.equal(out, a.float() @ b.float().T) == waits


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_tcgen05_cp_and_16x128b(schedule: str) -> None:
    """tcgen05.cp spreads 128 rows of 16 bytes over the lanes; 16x128b reads them back by fragments."""
    source = torch.arange(512, dtype=torch.int32)
    out = words(512)
    body = (
        LANE
        + BARRIER
        + stage("a0", 2048, "smem", 128)
        + f"""
    setp.eq.s32 %p2, %r1, 0;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+32776], 32;
    fence.proxy.async.shared::cta; bar.sync 0;
    ld.shared.b32 %r8, [%r3+32776]; shl.b32 %r11, %r1, 21; add.s32 %r12, %r8, %r11;
    @!%p1 bra W;
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9; add.s64 %d21, %d20, {descriptor(0, 128, 128, 0)};
    tcgen05.cp.cta_group::1.128x128b [%r8], %d21;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+32768];
    W: {WAIT.format(n=0)}
    tcgen05.ld.sync.aligned.16x128b.x1.b32 {{%r40, %r41}}, [%r12];
    add.s32 %r13, %r12, 0x100000;
    tcgen05.ld.sync.aligned.16x128b.x1.b32 {{%r42, %r43}}, [%r13];
    tcgen05.wait::ld.sync.aligned;
    ld.param.u64 %d0, [a1]; mul.lo.u32 %r20, %r1, 128; add.s32 %r20, %r20, %r2; mad.wide.u32 %d0, %r20, 4, %d0;
    st.global.b32 [%d0], %r40; st.global.b32 [%d0+128], %r41;
    st.global.b32 [%d0+256], %r42; st.global.b32 [%d0+384], %r43;
    bar.sync 1; @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
    """
    )
    run(body, source, out, threads=128, shared_bytes=32780, schedule=schedule, seed=1)
    assert torch.equal(out, source)


@pytest.mark.parametrize("row", [0, -1])
def test_tensor_additions_at_a_negative_coordinate_fail(row: int) -> None:
    """An H200 takes such an addition for an illegal instruction, while a load at -1 gives zeros."""
    target = torch.ones((16, 64), dtype=BF16)
    body = (
        LANE
        + f"""mov.b64 %d1, a0; mov.b32 %r4, 0; mov.b32 %r5, {row};
    mad.lo.s32 %r6, %r2, 4, %r3; mov.b32 %r7, 0x40003f80; st.shared.b32 [%r6], %r7;
    fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra END;
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {{%r4, %r5}}], [%r3];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:"""
    )
    tensor_map = encode_tensor_map(target, (1, 64), 128)
    if row < 0:
        with pytest.raises(AssertionError, match="tensor addition at coordinate -1"):
            run(body, tensor_map, target, shared_bytes=128)
        return
    run(body, tensor_map, target, shared_bytes=128)
    assert target[0].tolist() == [2.0, 3.0] * 32
    assert (target[1:] == 1.0).all()
