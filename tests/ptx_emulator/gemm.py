"""A small GEMM of ours in PTX: tensor copies into two stages, tcgen05.mma, an epilogue by four warps.

The smallest kernel with everything that the attention kernels are built of: a producer warp, an MMA warp, full and
empty barriers that go through several phases, tensor memory, two CTAs.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from ptx_emulator.launch import Kernel, Options, emulate
from ptx_emulator.ptx import parse_entries
from ptx_emulator.snippets import module
from ptx_emulator.subjects import Outcome, Subject
from ptx_emulator.tensor_map import encode_tensor_map

ROWS, COLUMNS, K_BLOCK, STAGES = 128, 64, 64, 2
A_BYTES, B_BYTES = ROWS * K_BLOCK * 2, COLUMNS * K_BLOCK * 2
B_AT = STAGES * A_BYTES
FULL = B_AT + STAGES * B_BYTES
EMPTY, DONE, TMEM_AT = FULL + 8 * STAGES, FULL + 16 * STAGES, FULL + 16 * STAGES + 8
DESCRIPTOR = 1 << 46 | 2 << 61 | (1024 >> 4) << 32 | 1 << 16
IDESC = 1 << 4 | 1 << 7 | 1 << 10 | COLUMNS // 8 << 17 | ROWS // 16 << 24


def wait(label: str, barrier: str, parity: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p9, [{barrier}], {parity}; @!%p9 bra {label};"


BODY = f"""
mov.u32 %r0, %tid.x; and.b32 %r2, %r0, 31; shr.u32 %r1, %r0, 5; mov.u32 %r3, smem; mov.u32 %r4, %ctaid.x;
setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r1, 0; setp.eq.s32 %p3, %r1, 1; ld.param.u32 %r5, [blocks];
@!%p1 bra NOINIT;
mbarrier.init.shared.b64 [%r3+{FULL}], 1; mbarrier.init.shared.b64 [%r3+{FULL + 8}], 1;
mbarrier.init.shared.b64 [%r3+{EMPTY}], 1; mbarrier.init.shared.b64 [%r3+{EMPTY + 8}], 1;
mbarrier.init.shared.b64 [%r3+{DONE}], 1;
fence.mbarrier_init.release.cluster;
NOINIT:
@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+{TMEM_AT}], {COLUMNS};
bar.sync 0;
ld.shared.b32 %r8, [%r3+{TMEM_AT}];
mov.b32 %r10, 0;
@%p2 bra PRODUCER;
@%p3 bra CONSUMER;
bra EPILOGUE;

PRODUCER: elect.sync %r11|%p4, -1; @!%p4 bra EPILOGUE;
mov.b64 %d1, map_a; cvta.param.u64 %d1, %d1; mov.b64 %d2, map_b; cvta.param.u64 %d2, %d2;
NEXTLOAD: and.b32 %r12, %r10, 1; shr.u32 %r13, %r10, 1; and.b32 %r13, %r13, 1; xor.b32 %r14, %r13, 1;
mad.lo.u32 %r15, %r12, 8, %r3;
add.s32 %r16, %r15, {EMPTY};
{wait("WAITEMPTY", "%r16", "%r14")}
mbarrier.arrive.expect_tx.shared.b64 _, [%r15+{FULL}], {A_BYTES + B_BYTES};
mad.lo.u32 %r17, %r12, {A_BYTES}, %r3; mad.lo.u32 %r18, %r12, {B_BYTES}, %r3;
shl.b32 %r19, %r10, 6; shl.b32 %r20, %r4, 7;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r17], [%d1, {{%r19, %r20}}], [%r15+{FULL}];
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r18+{B_AT}], [%d2, {{%r19, 0}}], [%r15+{FULL}];
add.s32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, %r5; @%p5 bra NEXTLOAD;
bra EPILOGUE;

CONSUMER: elect.sync %r11|%p4, -1; @!%p4 bra EPILOGUE;
mov.b32 %r21, {IDESC};
NEXTMMA: and.b32 %r12, %r10, 1; shr.u32 %r13, %r10, 1; and.b32 %r13, %r13, 1;
mad.lo.u32 %r15, %r12, 8, %r3; add.s32 %r16, %r15, {FULL};
{wait("WAITFULL", "%r16", "%r13")}
mad.lo.u32 %r17, %r12, {A_BYTES}, %r3; mad.lo.u32 %r18, %r12, {B_BYTES}, %r3; add.s32 %r18, %r18, {B_AT};
shr.u32 %r17, %r17, 4; shr.u32 %r18, %r18, 4; cvt.u64.u32 %d3, %r17; cvt.u64.u32 %d4, %r18;
or.b64 %d3, %d3, {DESCRIPTOR}; or.b64 %d4, %d4, {DESCRIPTOR};
setp.ne.u32 %p6, %r10, 0;
tcgen05.mma.cta_group::1.kind::f16 [%r8], %d3, %d4, %r21, %p6;
add.s64 %d5, %d3, 2; add.s64 %d6, %d4, 2; tcgen05.mma.cta_group::1.kind::f16 [%r8], %d5, %d6, %r21, 1;
add.s64 %d5, %d3, 4; add.s64 %d6, %d4, 4; tcgen05.mma.cta_group::1.kind::f16 [%r8], %d5, %d6, %r21, 1;
add.s64 %d5, %d3, 6; add.s64 %d6, %d4, 6; tcgen05.mma.cta_group::1.kind::f16 [%r8], %d5, %d6, %r21, 1;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r15+{EMPTY}];
add.s32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, %r5; @%p5 bra NEXTMMA;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+{DONE}];

EPILOGUE: bar.warp.sync -1;
add.s32 %r16, %r3, {DONE};
{wait("WAITDONE", "%r16", "0")}
shl.b32 %r22, %r1, 21; add.s32 %r22, %r22, %r8;
ld.param.u64 %d7, [out]; mad.lo.u32 %r23, %r4, {ROWS}, %r0; mad.wide.u32 %d7, %r23, {4 * COLUMNS}, %d7;
mov.b32 %r24, 0;
COLUMN: tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r30, %r31, %r32, %r33}}, [%r22];
tcgen05.wait::ld.sync.aligned;
st.global.v4.b32 [%d7], {{%r30, %r31, %r32, %r33}};
add.s32 %r22, %r22, 4; add.s64 %d7, %d7, 16; add.s32 %r24, %r24, 4;
setp.lt.u32 %p5, %r24, {COLUMNS}; @%p5 bra COLUMN;
bar.sync 1;
@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, {COLUMNS};
"""
PARAMETERS = (".align 128 .b8 map_a[128]", ".align 128 .b8 map_b[128]", ".u64 out", ".u32 blocks", ".u64 a", ".u64 b")
NAMES = ("out", "a", "b")


def make_text(body: str = BODY) -> str:
    """The PTX of the GEMM, or of a variant of its body."""
    return module(body, PARAMETERS, threads=128, shared_bytes=TMEM_AT + 16)


def run(kernel: Kernel, k_blocks: int, options: Options) -> Outcome:
    """Two CTAs, small integers: the product is exact in any order."""
    torch.manual_seed(k_blocks)
    a = torch.randint(-3, 4, (2 * ROWS, k_blocks * K_BLOCK)).to(torch.bfloat16)
    b = torch.randint(-3, 4, (COLUMNS, k_blocks * K_BLOCK)).to(torch.bfloat16)
    out = torch.full((2 * ROWS, COLUMNS), torch.nan)
    maps = [encode_tensor_map(a, (ROWS, K_BLOCK), 128), encode_tensor_map(b, (COLUMNS, K_BLOCK), 128)]
    settings = {f.name: getattr(options, f.name) for f in fields(options)}
    report = emulate(kernel, *maps, out, k_blocks, a, b, names=NAMES, grid=(2,), **settings)
    right = torch.equal(out, a.float() @ b.float().T)
    return Outcome(report, frozenset() if right else frozenset({"product"}))


def subject(body: str = BODY, k_blocks: int = 5) -> Subject:
    """The GEMM over five blocks of K: each stage goes through several phases."""
    text = make_text(body)
    kernels = {"test": Kernel(parse_entries(text)["test"])}
    rows = f"{2 * ROWS} x {COLUMNS} x {K_BLOCK * k_blocks}, 2 CTAs"
    return Subject(rows, kernels, "test", lambda options: run(kernels["test"], k_blocks, options), text)
