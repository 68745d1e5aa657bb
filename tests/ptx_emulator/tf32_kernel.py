# mypy: disable-error-code="untyped-decorator"
"""The kernel of ``tf32_gemm.py``. Imports the DSL, whose settings are read then, and evaluates its annotations."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import utils
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from ptx_emulator.tf32_gemm import COLUMNS, DEPTH, ROWS

f32, tf32 = cutlass.Float32, cutlass.TFloat32
THREADS = 128


@cute.jit
def fill(thread: Any, source: cute.Tensor, target: cute.Tensor, rows: cutlass.Constexpr) -> None:
    """Copy a matrix [rows, DEPTH] element by element to where the DSL's layout of the operand has it."""
    for at in cutlass.range(thread, rows * DEPTH, THREADS, unroll=1):
        row, k = at // DEPTH, at % DEPTH
        target[(row, k % 8), 0, k // 8] = source[row, k]


@cute.kernel
def kernel(
    a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, mma: cute.TiledMma, a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
) -> None:  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = utils.SmemAllocator()
    barrier = memory.allocate_array(cutlass.Int64, 1)
    holder = memory.allocate_array(cutlass.Int32, 1)
    s_a = memory.allocate_tensor(f32, a_layout.outer, 1024, a_layout.inner)
    s_b = memory.allocate_tensor(f32, b_layout.outer, 1024, b_layout.inner)
    if warp_index == 0:
        cute.arch.alloc_tmem(COLUMNS, holder)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    fill(thread, a, s_a, ROWS)
    fill(thread, b, s_b, COLUMNS)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()

    shape = mma.partition_shape_C((ROWS, COLUMNS))
    sums = cute.make_tensor(cute.arch.retrieve_tmem_ptr(f32, 16, holder), mma.make_fragment_C(shape).layout)
    a_fragment, b_fragment = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
    if warp_index == 0:
        for k in cutlass.range_constexpr(DEPTH // 8):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, sums, a_fragment[None, None, k], b_fragment[None, None, k], sums)
        with cute.arch.elect_one():
            tcgen05.commit(barrier)
    cute.arch.mbarrier_wait(barrier, 0)

    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), f32), sums[(None, None), 0, 0]
    ).get_slice(thread)
    target = load.partition_D(mma.get_slice(0).partition_C(out)[(None, None), 0, 0])
    registers = cute.make_rmem_tensor(target.shape, f32)
    cute.copy(load, load.partition_S(sums[(None, None), 0, 0]), registers)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(registers, target)
    cute.arch.barrier()
    if warp_index == 0:
        cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(f32, 16, holder), COLUMNS)


def operand_layout(kind: str, shape: Any, order: tuple[int, int]) -> Any:
    """The DSL's layout of an operand; ``kind`` as in ``tf32_gemm.CASES``."""
    name = kind.removesuffix("_K4")
    atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, name), f32)
    if name != kind:
        atom = cute.make_composed_layout(atom.inner, 0, cute.make_layout((32, 4), stride=(1, 32)))
    return tcgen05.tile_to_mma_shape(atom, shape, order)


def compile_gemm(a_kind: str, b_kind: str, order: tuple[int, int]) -> Any:
    """Compile for the architecture of the process, sm_100a.

    Args:
        a_kind: layout of A, as in ``tf32_gemm.CASES``; it gives the direction along which A is contiguous.
        b_kind: of B.
        order: which direction of the operands' atoms comes first in memory: (1, 2) rows, (2, 1) K.
    """

    @cute.jit
    def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        modes = [OperandMajorMode.MN if kind.startswith("MN") else OperandMajorMode.K for kind in (a_kind, b_kind)]
        one = tcgen05.CtaGroup.ONE
        mma = utils.blackwell_helpers.make_trivial_tiled_mma(tf32, tf32, *modes, f32, one, (ROWS, COLUMNS))
        a_layout = operand_layout(a_kind, mma.partition_shape_A((ROWS, DEPTH)), order)
        b_layout = operand_layout(b_kind, mma.partition_shape_B((COLUMNS, DEPTH)), order)
        kernel(a, b, out, mma, a_layout, b_layout).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    shapes = ((ROWS, DEPTH), (COLUMNS, DEPTH), (ROWS, COLUMNS))
    fake = [cute.runtime.make_fake_compact_tensor(f32, s, stride_order=(1, 0), assumed_align=16) for s in shapes]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *fake, stream, options="--enable-tvm-ffi")
