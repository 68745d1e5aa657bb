"""The same PTX run by the emulator and by the card: equal bit for bit where the arithmetic is defined.

Runs on an sm_90 device: what SM100 shares with it (lane-wise instructions, tensor maps and copies, mbarriers,
fragments), not tcgen05.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from child_processes import run_module
from ptx_emulator import emulate
from ptx_emulator.alu import LANE_OPS
from ptx_emulator.card import Card
from ptx_emulator.hopper_example import expect, make_problem
from ptx_emulator.snippets import WIDTHS, lane_address, lane_op_module, module
from ptx_emulator.tensor_map import encode_tensor_map

pytestmark = pytest.mark.gpu
TARGET = "sm_90a"
APPROXIMATE = ("ex2", "lg2", "rcp.approx", "rsqrt", "sqrt.approx", "div.approx", "div.full", "sin", "cos", "tanh")
SM100_ONLY = ("f32x2", "max3", "min3", "add.rn.f32.", "fma.rn.f32.bf16", "fma.rn.f32.f16", "mad24", "mul24")
NOT_COMPARED = ("cvta.", "lop3.")
"""Addresses, since the emulator's windows are not the card's; lop3, whose table must be an immediate."""
FLOAT_TYPES = {"f32": torch.float32, "f64": torch.float64}
SPECIAL_WORDS = [0, 1, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x007FFFFF]
SPECIAL_WORDS += [0x00800000, 0x7F7FFFFF, 0x477FE000, 0x477FF000, 0x33800000, 0x4F000000, 0xFFFFFFFF, 0x7FFFFFFF]


@pytest.fixture(scope="module")
def card() -> Card:
    return Card()


def operand(kind: str, generator: random.Random) -> torch.Tensor:
    """32 values of a type: special ones first, then any bits."""
    width = WIDTHS[kind]
    bits = [generator.choice(SPECIAL_WORDS) if i % 2 else generator.getrandbits(32) for i in range(32 * width // 4 + 1)]
    if kind in ("u32", "u64", "s32") and generator.random() < 0.5:
        bits = [word % 70 for word in bits]
    words = torch.tensor([word - (1 << 32) if word >> 31 else word for word in bits], dtype=torch.int32)
    return words.view(torch.uint8)[: 32 * width].clone()


def same(kind: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, except that one NaN is as good as another where the ISA does not give its payload."""
    if kind in FLOAT_TYPES:
        words = torch.int32 if kind == "f32" else torch.int64
        both_nan = torch.isnan(a.view(FLOAT_TYPES[kind])) & torch.isnan(b.view(FLOAT_TYPES[kind]))
        return bool((both_nan | (a.view(words) == b.view(words))).all())
    return bool(torch.equal(a, b))


@pytest.mark.parametrize(
    "opcode", [name for name in LANE_OPS if not any(part in name for part in (*SM100_ONLY, *NOT_COMPARED))]
)
def test_lane_instruction_agrees_with_the_card(card: Card, opcode: str) -> None:
    """An instruction that the table gets wrong in a corner that nobody thought of."""
    op = LANE_OPS[opcode]
    kind = "u32" if op.is_compare else op.result
    text = lane_op_module(opcode, TARGET)
    for seed in range(4):
        generator = random.Random(f"{opcode} {seed}")  # noqa: S311 -- test data
        sources = [operand(source, generator) for source in op.sources]
        if any(opcode.startswith(prefix) for prefix in APPROXIMATE):  # the ISA bounds errors on moderate arguments
            sources = [
                torch.rand(32, generator=torch.manual_seed(seed)).mul(3).add(0.01).view(torch.uint8) for _ in sources
            ]
        if opcode.startswith(("div.s", "div.u", "rem.")):  # division by zero is left open
            sources[1].view(torch.int32 if WIDTHS[op.sources[1]] == 4 else torch.int64).bitwise_or_(1)
        if opcode in ("bfi.b64", "bfe.u64"):  # position and length: ptxas's code looks at more than the ISA's 8 bits
            for source in sources[-2:]:
                source.view(torch.int32).bitwise_and_(255)
        if opcode.startswith("fns"):  # results for offsets out of range are left open
            sources[1:] = [torch.full((32,), 1, dtype=torch.int32).view(torch.uint8)] * 2
        out = torch.zeros(32 * WIDTHS[kind], dtype=torch.uint8)
        expected = card.run(text, [*sources, out])[-1]
        emulate(text, *sources, out)
        if any(opcode.startswith(prefix) for prefix in APPROXIMATE):
            # The ISA's bound for tanh is 2^-11, for the others 2^-22 or better.
            bound = 2**-10 if opcode.startswith("tanh") else 2**-20
            torch.testing.assert_close(out.view(torch.float32), expected.view(torch.float32), rtol=bound, atol=bound)
        else:
            assert same(kind, out, expected), describe(op.sources, sources, kind, out, expected)


def describe(
    kinds: tuple[str, ...], sources: list[torch.Tensor], kind: str, out: torch.Tensor, expected: torch.Tensor
) -> str:
    """The first lane that differs, in hexadecimal."""
    width = WIDTHS[kind]
    for lane in range(32):
        part = slice(lane * width, (lane + 1) * width)
        got, want = (bytes(t[part].tolist())[::-1].hex() for t in (out, expected))
        if not same(kind, out[part].clone(), expected[part].clone()):
            values = [
                bytes(s[lane * WIDTHS[k] : (lane + 1) * WIDTHS[k]].tolist())[::-1].hex()
                for s, k in zip(sources, kinds, strict=True)
            ]
            return f"lane {lane}: {values} gives {got}, on the card {want}"
    return "equal"


LANE = "mov.u32 %r0, %tid.x; and.b32 %r2, %r0, 31; shr.u32 %r1, %r0, 5; setp.eq.s32 %p1, %r0, 0; mov.u32 %r3, smem;"
INIT = "@!%p1 bra I; mbarrier.init.shared.b64 [%r3+32768], 1; fence.mbarrier_init.release.cluster; I: bar.sync 0;"
WAIT = "L: mbarrier.try_wait.parity.shared.b64 %p9, [%r3+32768], 0; @!%p9 bra L;"


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_map_is_what_the_driver_encodes(card: Card, swizzle: int, rank: int) -> None:
    """Fields of the undocumented 128 bytes that were read wrongly: the first 64 hold all that is used."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inner = (swizzle or 64) // dtype.itemsize
        tensor = torch.zeros((5, 7, 12, 80)[-rank:], dtype=dtype)
        box = (2, 3, 4, inner)[-rank:]
        expected = card.encode_tensor_map(tensor.cuda(), box, swizzle)
        got = encode_tensor_map(tensor, box, swizzle)
        # The address differs; so does what only the driver sets (L2 promotion and the like) in the low fields.
        assert got[16:64] == expected[16:64]
        known = 0x7 << 4 | 0xF << 7 | 0x3 << 13
        fields = [int.from_bytes(raw[8:12], "little") & known for raw in (got, expected)]
        assert fields[0] == fields[1]
        assert got[12:16] == expected[12:16]


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_load_agrees_with_the_card(card: Card, swizzle: int) -> None:
    """A corner tile, loaded with zero fill and copied out raw: swizzle, fill and transaction count in one."""
    columns = (swizzle or 64) // 2
    source = torch.arange(12 * 40, dtype=torch.float32).view(12, 40).to(torch.bfloat16)
    size = 32 * columns
    body = (
        LANE
        + INIT
        + f"""
    mov.b64 %d1, a; cvta.param.u64 %d1, %d1; ld.param.u64 %d3, [b];
    @!%p1 bra W;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3+32768], {size};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r3], [%d1, {{-8, 3}}], [%r3+32768];
    W: {WAIT}
    @!%p1 bra E;
    cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r3], {size};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:"""
    )
    parameters = [".align 128 .b8 a[128]", ".u64 b", ".u64 keep"]
    text = module(body, parameters, shared_bytes=32776, target=TARGET)
    on_card = source.cuda()
    tensor_map = card.encode_tensor_map(on_card, (16, columns), swizzle)
    expected = card.run(text, [tensor_map, torch.zeros(size, dtype=torch.uint8), on_card])[0]
    out = torch.zeros(size, dtype=torch.uint8)
    emulate(text, encode_tensor_map(source, (16, columns), swizzle), out, source).require_clean()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_fragments_and_mma_sync_agree_with_the_card(card: Card, kind: str) -> None:
    """ldmatrix, its transpose, stmatrix and the product; small integers, so that the sum is exact in any order."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    torch.manual_seed(1)
    a, b = torch.randint(-4, 5, (16, 16)).to(dtype), torch.randint(-4, 5, (16, 8)).to(dtype)
    out, copied = torch.zeros(16, 8), torch.zeros(16, 16, dtype=dtype)
    body = (
        LANE
        + f"""
    ld.param.u64 %d0, [a]; mad.wide.u32 %d0, %r0, 16, %d0; mad.lo.u32 %r4, %r0, 16, %r3;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d0]; st.shared.v4.b32 [%r4], {{%r10, %r11, %r12, %r13}};
    setp.lt.u32 %p2, %r0, 16; ld.param.u64 %d1, [b]; mad.wide.u32 %d1, %r0, 16, %d1;
    @%p2 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d1];
    @%p2 st.shared.v4.b32 [%r4+1024], {{%r10, %r11, %r12, %r13}};
    bar.sync 0;
    and.b32 %r4, %r0, 15; shr.u32 %r5, %r0, 4; mad.lo.u32 %r6, %r4, 32, %r3; mad.lo.u32 %r6, %r5, 16, %r6;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
    mad.lo.u32 %r7, %r4, 16, %r3;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r14, %r15}}, [%r7+1024];
    mov.f32 %f4, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f0, %f1, %f2, %f3}},
        {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%f4, %f4, %f4, %f4}};
    shr.u32 %r20, %r2, 2; and.b32 %r21, %r2, 3; mul.lo.u32 %r22, %r20, 8; mad.lo.u32 %r22, %r21, 2, %r22;
    ld.param.u64 %d2, [c]; mad.wide.u32 %d2, %r22, 4, %d2;
    st.global.v2.f32 [%d2], {{%f0, %f1}}; st.global.v2.f32 [%d2+256], {{%f2, %f3}};
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6+2048], {{%r10, %r11, %r12, %r13}};
    bar.sync 0;
    mad.lo.u32 %r23, %r0, 16, %r3; ld.shared.v4.b32 {{%r40, %r41, %r42, %r43}}, [%r23+2048];
    ld.param.u64 %d3, [d]; mad.wide.u32 %d3, %r0, 16, %d3; st.global.v4.b32 [%d3], {{%r40, %r41, %r42, %r43}};
    """
    )
    text = module(body, [".u64 a", ".u64 b", ".u64 c", ".u64 d"], shared_bytes=4096, target=TARGET)
    expected = card.run(text, [a, b, out, copied])
    emulate(text, a, b, out, copied).require_clean()
    assert torch.equal(out, expected[2])
    assert torch.equal(copied, expected[3])
    assert torch.equal(out, a.float() @ b.float())


def test_wgmma_agrees_with_the_card(card: Card) -> None:
    """The descriptor of an unswizzled K-major operand and the accumulator's fragment."""
    torch.manual_seed(2)
    a, b = torch.randint(-4, 5, (64, 16)).to(torch.bfloat16), torch.randint(-4, 5, (8, 16)).to(torch.bfloat16)
    flat = [m.reshape(-1, 8, 2, 8).permute(0, 2, 1, 3).reshape(-1).contiguous() for m in (a, b)]
    out = torch.zeros(64, 8)
    layout = 128 >> 4 << 16 | 256 >> 4 << 32
    body = (
        LANE
        + f"""
    ld.param.u64 %d0, [a]; mad.wide.u32 %d0, %r0, 16, %d0; mad.lo.u32 %r4, %r0, 16, %r3;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d0]; st.shared.v4.b32 [%r4], {{%r10, %r11, %r12, %r13}};
    setp.lt.u32 %p2, %r0, 16; ld.param.u64 %d1, [b]; mad.wide.u32 %d1, %r0, 16, %d1;
    @%p2 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d1];
    @%p2 st.shared.v4.b32 [%r4+8192], {{%r10, %r11, %r12, %r13}};
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r9, %r3, 4; cvt.u64.u32 %d20, %r9;
    add.s64 %d21, %d20, {layout}; add.s64 %d22, %d20, {layout + (8192 >> 4)};
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %d21, %d22, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    shr.u32 %r20, %r2, 2; and.b32 %r21, %r2, 3; mad.lo.u32 %r20, %r1, 16, %r20;
    mul.lo.u32 %r22, %r20, 8; mad.lo.u32 %r22, %r21, 2, %r22;
    ld.param.u64 %d2, [c]; mad.wide.u32 %d2, %r22, 4, %d2;
    st.global.v2.f32 [%d2], {{%f0, %f1}}; st.global.v2.f32 [%d2+256], {{%f2, %f3}};
    """
    )
    text = module(body, [".u64 a", ".u64 b", ".u64 c"], threads=128, shared_bytes=16384, target=TARGET)
    expected = card.run(text, [*flat, out], threads=128)[2]
    emulate(text, *flat, out).require_clean()
    assert torch.equal(out, expected)
    assert torch.equal(out, a.float() @ b.float().T)


def test_warp_instructions_agree_with_the_card(card: Card) -> None:
    """Shuffles with clamps and segments, votes, match, redux."""
    statements = [
        f"shfl.sync.{mode}.b32 %r20|%p5, %r10, {b}, {clamp}, -1; selp.b32 %r21, 1, 0, %p5;"
        for mode in ("bfly", "up", "down", "idx")
        for b in (1, 5, 17)
        for clamp in ((0, 0x1800) if mode == "up" else (31, 0x181F))
    ]
    statements += [f"redux.sync.{op}.s32 %r20, %r10, -1; mov.u32 %r21, 0;" for op in ("add", "min", "max")]
    statements.append("and.b32 %r22, %r10, 5; match.any.sync.b32 %r20, %r22, -1; vote.sync.ballot.b32 %r21, %p7, -1;")
    body = LANE + "mul.lo.s32 %r10, %r0, -77; xor.b32 %r10, %r10, 0x1234; setp.gt.s32 %p7, %r10, 0;"
    for i, statement in enumerate(statements):
        body += f"{statement} {lane_address('%d0', 'a', 8)} st.global.v2.b32 [%d0+{256 * i}], {{%r20, %r21}};\n"
    text = module(body, [".u64 a"], shared_bytes=16, target=TARGET)
    out = torch.zeros(64 * len(statements), dtype=torch.int32)
    expected = card.run(text, [out])[0]
    emulate(text, out).require_clean()
    assert torch.equal(out, expected)


def test_cute_kernel_agrees_with_the_card(tmp_path: Path) -> None:
    """The whole of an SM90 kernel: TMA, wgmma of every operand form, stmatrix, bulk and packed reductions."""
    results = []
    for where in ("card", "emulator"):
        file = tmp_path / where
        run_module("ptx_emulator.hopper_example", where, str(file), timeout_s=300)
        results.append(torch.load(file))
    (ptx_on_card, on_card), (ptx_emulated, emulated) = results
    assert ptx_on_card == ptx_emulated
    for got, other, want in zip(emulated, on_card, expect(make_problem(2)), strict=True):
        assert torch.equal(got, other)
        assert torch.equal(got, want)


REDUCTIONS = {
    "red.global.add.f32": ("f32", 1), "red.global.add.v2.f32": ("f32", 2), "red.global.add.v4.f32": ("f32", 4),
    "red.global.add.noftz.bf16x2": ("bf16", 2), "red.global.add.noftz.f16x2": ("f16", 2),
    "red.global.add.noftz.v4.bf16x2": ("bf16", 8), "red.global.add.noftz.v8.f16": ("f16", 8),
    "red.global.add.noftz.v2.bf16": ("bf16", 2), "red.shared.add.f32": ("f32", 1),
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": ("f32", 4),
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16": ("bf16", 8),
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16": ("f16", 8),
}  # fmt: skip
"""Opcode to the type of its elements and how many a thread adds."""
REDUCED_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
WORD_SPECIALS = {
    "f32": [0x00000001, 0x807FFFFF, 0x00400000, 0x00800000, 0x80800001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000],
    "bf16": [0x0001, 0x807F, 0x0040, 0x0080, 0x8081, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F80],
    "f16": [0x0001, 0x83FF, 0x0200, 0x0400, 0x8401, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00],
}
"""Subnormals, the smallest normals, the largest number, infinities and NaN, as bits."""


def reduction_operands(kind: str, elements: int, seed: int) -> torch.Tensor:
    """Bits of numbers: special ones mixed with any."""
    generator = random.Random(f"{kind} {seed}")  # noqa: S311 -- test data
    bits = 32 if kind == "f32" else 16
    values = [
        generator.choice(WORD_SPECIALS[kind]) if generator.random() < 0.5 else generator.getrandbits(bits)
        for _ in range(elements)
    ]
    signed = [value - (1 << bits) if value >> (bits - 1) else value for value in values]
    return torch.tensor(signed, dtype=torch.int32 if bits == 32 else torch.int16)


def reduction_module(opcode: str, bytes_of_thread: int) -> str:
    """``out`` += ``a``, each thread its own part, by one instruction."""
    words = bytes_of_thread // 4
    registers = [f"%r{10 + i}" for i in range(max(words, 1))]
    listed = f"{{{', '.join(registers)}}}" if words > 1 else registers[0]
    load = f"ld.global.{f'v{words}.' if words > 1 else ''}b32 {listed}, [%d0];"
    body = LANE + lane_address("%d0", "a", bytes_of_thread) + lane_address("%d1", "out", bytes_of_thread) + load
    if opcode.startswith("cp.reduce"):
        body += f"""
        mad.lo.u32 %r4, %r0, {bytes_of_thread}, %r3; st.shared.v{words}.b32 [%r4], {listed};
        fence.proxy.async.shared::cta;
        {opcode} [%d1], [%r4], {bytes_of_thread};
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    elif ".shared." in opcode:
        body += f"""
        mad.lo.u32 %r4, %r0, 4, %r3; ld.global.b32 %r20, [%d1]; st.shared.b32 [%r4], %r20;
        {opcode} [%r4], %r10; ld.shared.b32 %r20, [%r4]; st.global.b32 [%d1], %r20;"""
    elif opcode.endswith((".bf16", ".f16")):
        halves = [f"%h{i}" for i in range(2 * words)]
        body += "".join(f"mov.b32 {{{halves[2 * i]}, {halves[2 * i + 1]}}}, %r{10 + i};" for i in range(words))
        body += f"{opcode} [%d1], {{{', '.join(halves)}}};"
    else:
        body += f"{opcode} [%d1], {listed};"
    return module(body, [".u64 a", ".u64 out"], shared_bytes=1024, target=TARGET)


@pytest.mark.parametrize("opcode", REDUCTIONS)
def test_reduction_agrees_with_the_card(card: Card, opcode: str) -> None:
    """Rounding, flushing and NaN of additions in memory: one addition to each element."""
    kind, elements = REDUCTIONS[opcode]
    dtype = REDUCED_TYPES[kind]
    text = reduction_module(opcode, elements * dtype.itemsize)
    for seed in range(8):
        a = reduction_operands(kind, 32 * elements, seed)
        out = reduction_operands(kind, 32 * elements, seed + 100)
        before = out.clone()
        expected = card.run(text, [a, out])[1]
        emulate(text, a, out).require_clean()
        same_bits = out == expected
        both_nan = torch.isnan(out.view(dtype)) & torch.isnan(expected.view(dtype))
        wrong = (~(same_bits | both_nan)).nonzero().flatten().tolist()
        shown = [tuple(hex(int(t[i]) & 0xFFFFFFFF) for t in (before, a, out, expected)) for i in wrong[:4]]
        assert not wrong, f"{len(wrong)} differ; before, added, emulated, on the card: {shown}"
