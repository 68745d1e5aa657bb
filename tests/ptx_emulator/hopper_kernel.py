# mypy: disable-error-code="untyped-decorator"
"""The kernel of ``hopper_example.py``. Imports the DSL, whose settings are read then, and evaluates its annotations."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import utils
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from ptx_emulator.hopper_example import DIM, KEYS, ROWS, WARPGROUP_ROWS

bf16, f32 = cutlass.BFloat16, cutlass.Float32
wgmma = utils.hopper_helpers


@dsl_user_op
def add_pair(pointer: Any, first: Any, second: Any, *, loc: Any = None, ip: Any = None) -> None:
    values = [pointer.toint(loc=loc, ip=ip), first, second]
    llvm.inline_asm(
        None, [x.ir_value(loc=loc, ip=ip) for x in values], "red.global.add.v2.f32 [$0], {$1, $2};", "l,f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def add_halves(pointer: Any, pair: Any, *, loc: Any = None, ip: Any = None) -> None:
    values = [pointer.toint(loc=loc, ip=ip), pair]
    llvm.inline_asm(
        None, [x.ir_value(loc=loc, ip=ip) for x in values], "red.global.add.noftz.bf16x2 [$0], $1;", "l,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def reduce_bulk(target: Any, source: Any, size_bytes: Any, *, loc: Any = None, ip: Any = None) -> None:
    values = [target.toint(loc=loc, ip=ip), source.toint(loc=loc, ip=ip), cutlass.Int32(size_bytes)]
    llvm.inline_asm(
        None, [x.ir_value(loc=loc, ip=ip) for x in values],
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", "l,r,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def make_mma(a_mode: Any, b_mode: Any, source: Any) -> Any:
    return wgmma.make_trivial_tiled_mma(bf16, bf16, a_mode, b_mode, f32, (1, 1, 1), (64, 64), source)


@cute.jit
def multiply(mma: Any, accumulator: Any, a: Any, b: Any) -> None:
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.kernel
def kernel(
    load_q: cute.CopyAtom, q: cute.Tensor, load_k: cute.CopyAtom, k: cute.Tensor, load_v: cute.CopyAtom,
    v: cute.Tensor, store: cute.CopyAtom, out: cute.Tensor, grad: cute.Tensor, sums: cute.Tensor,
    signs: cute.Tensor, layout: cute.ComposedLayout,
) -> None:  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = utils.SmemAllocator()
    barrier = memory.allocate_array(cutlass.Int64, 1)

    def tile_of(element: Any, count: int) -> Any:
        return memory.allocate_tensor(element, cute.append(layout.outer, cute.make_layout(count, stride=KEYS * DIM)),
                                      1024, layout.inner)  # fmt: skip

    s_q, s_k, s_v, s_p = (tile_of(bf16, count) for count in (2, 1, 1, 2))
    s_grad = memory.allocate_tensor(f32, cute.make_layout((KEYS, DIM, 2), stride=(DIM, 1, KEYS * DIM)), 128)
    if warp_index == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if warp_index < 4:
        cute.arch.setmaxregister_decrease(24)
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * WARPGROUP_ROWS * DIM * 2)
            for half in cutlass.range_constexpr(2):
                copy_tile(load_q, q, s_q[None, None, half], 2 * tile + half, barrier)
            copy_tile(load_k, k, s_k[None, None, 0], 0, barrier)
            copy_tile(load_v, v, s_v[None, None, 0], 0, barrier)
    else:
        cute.arch.setmaxregister_increase(240)
        half = warp_index // 4 - 1
        cute.arch.mbarrier_wait(barrier, 0)
        consume(thread % 128, half, 2 * tile + half, s_q, s_k, s_v, s_p, s_grad, store, out, grad, sums, signs)


@cute.jit
def copy_tile(load: Any, source: Any, target: Any, row: Any, barrier: Any) -> None:
    box = cute.local_tile(source, (WARPGROUP_ROWS, DIM), (row, 0))
    to, what = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(box, 0, 2)
    )
    cute.copy(load, what, to, tma_bar_ptr=barrier)


@cute.jit
def consume(
    thread: Any, half: Any, row_tile: Any, s_q: Any, s_k: Any, s_v: Any, s_p: Any, s_grad: Any, store: Any,
    out: Any, grad: Any, sums: Any, signs: Any,
) -> None:  # fmt: skip
    along_k, along_mn = OperandMajorMode.K, OperandMajorMode.MN
    shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    score_mma = make_mma(along_k, along_k, shared)
    out_mma = make_mma(along_k, along_mn, registers)
    grad_mma = make_mma(along_mn, along_mn, shared)
    q, k, v, p = s_q[None, None, half], s_k[None, None, 0], s_v[None, None, 0], s_p[None, None, half]

    slice_ = score_mma.get_slice(thread)
    scores = score_mma.make_fragment_C(score_mma.partition_shape_C((WARPGROUP_ROWS, KEYS)))
    multiply(score_mma, scores, score_mma.make_fragment_A(slice_.partition_A(q)),
             score_mma.make_fragment_B(slice_.partition_B(k)))  # fmt: skip
    # Accumulators in the order of the registers are the fragments of A: pairs of 8 columns are one K of 16.
    a_layout = out_mma.make_fragment_A(out_mma.partition_shape_A((WARPGROUP_ROWS, KEYS))).layout
    p_registers = cute.make_rmem_tensor(scores.layout, bf16)
    p_registers.store(scores.load().to(bf16))

    transposed = cute.select
    v_t, q_t, p_t = (cute.make_tensor(t.iterator, transposed(t.layout, mode=[1, 0])) for t in (v, q, p))
    out_slice = out_mma.get_slice(thread)
    result = out_mma.make_fragment_C(out_mma.partition_shape_C((WARPGROUP_ROWS, DIM)))
    multiply(out_mma, result, cute.make_tensor(p_registers.iterator, a_layout),
             out_mma.make_fragment_B(out_slice.partition_B(v_t)))  # fmt: skip
    store_matrix(thread, half, score_mma, p_registers, p)

    grad_slice = grad_mma.get_slice(thread)
    gradient = grad_mma.make_fragment_C(grad_mma.partition_shape_C((KEYS, DIM)))
    multiply(grad_mma, gradient, grad_mma.make_fragment_A(grad_slice.partition_A(p_t)),
             grad_mma.make_fragment_B(grad_slice.partition_B(q_t)))  # fmt: skip
    cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)  # p is read by all: out takes its place

    out_registers = cute.make_rmem_tensor(result.layout, bf16)
    out_registers.store(result.load().to(bf16))
    columns = grad_slice.partition_C(s_grad[None, None, half])
    cute.autovec_copy(gradient, columns)
    store_matrix(thread, half, score_mma, out_registers, p)
    if thread < 32:
        with cute.arch.elect_one():
            reduce_bulk(grad.iterator, s_grad[None, None, half].iterator, KEYS * DIM * 4)
            to_out(store, out, p, row_tile)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=False)
    add_columns(thread, scores, q, sums, signs)


@cute.jit
def store_matrix(thread: Any, half: Any, mma: Any, fragment: Any, target: Any) -> None:
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), bf16)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(fragment), copy.partition_D(target))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)


@cute.jit
def to_out(store: Any, out: Any, source: Any, row: Any) -> None:
    box = cute.local_tile(out, (WARPGROUP_ROWS, DIM), (row, 0))
    what, to = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(box, 0, 2)
    )
    cute.copy(store, what, to)


@cute.jit
def add_columns(thread: Any, scores: Any, q: Any, sums: Any, signs: Any) -> None:
    flat = cute.make_tensor(scores.iterator, cute.make_layout((2, 2, KEYS // 8)))
    for group in cutlass.range_constexpr(KEYS // 8):
        column = 8 * group + thread % 4 * 2
        totals = [flat[part, 0, group] + flat[part, 1, group] for part in range(2)]
        add_pair(sums.iterator + column, totals[0], totals[1])
    # Each thread a pair of columns of two rows.
    for row in cutlass.range(thread // 32, WARPGROUP_ROWS, 4):
        pair = cute.make_rmem_tensor(2, bf16)
        pair[0], pair[1] = q[row, thread % 32 * 2], q[row, thread % 32 * 2 + 1]
        add_halves(signs.iterator + thread % 32 * 2, cute.recast_tensor(pair, cutlass.Int32)[0])


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, grad: cute.Tensor, sums: cute.Tensor,
    signs: cute.Tensor, stream: Any,
) -> None:  # fmt: skip
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, bf16)
    layout = cute.tile_to_shape(atom, (WARPGROUP_ROWS, DIM), (0, 1))
    load = cpasync.CopyBulkTensorTileG2SOp()
    pairs = [cpasync.make_tiled_tma_atom(load, t, layout, (WARPGROUP_ROWS, DIM)) for t in (q, k, v)]
    store, out_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, layout, (WARPGROUP_ROWS, DIM))
    maps = [part for pair in pairs for part in pair]
    kernel(*maps, store, out_map, grad, sums, signs, layout).launch(
        grid=(cute.size(q, mode=[0]) // ROWS, 1, 1), block=(384, 1, 1), min_blocks_per_mp=1, stream=stream
    )


def compile_example() -> Any:
    """Compile for the architecture of the process, sm_90a; the number of tiles stays open."""
    rows = cute.sym_int()

    def fake(element: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16)

    arguments = [fake(bf16, rows, DIM), fake(bf16, KEYS, DIM), fake(bf16, KEYS, DIM), fake(bf16, rows, DIM)]
    arguments += [fake(f32, KEYS, DIM), fake(f32, KEYS), fake(bf16, DIM)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *arguments, stream, options="--enable-tvm-ffi")
