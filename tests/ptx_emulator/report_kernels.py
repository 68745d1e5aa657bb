"""Kernels with known resources, for tests of the kernel report."""

from typing import Any

import cutlass
import cutlass.cute as cute

from msa_vendored.compiling import compile_options

THREADS, SHARED_FLOATS, LOCAL_FLOATS = 96, 1000, 64


@cute.kernel
def modest(x: cute.Tensor) -> None:
    """One thread, one element."""
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] * 2.0


@cute.kernel
def greedy(x: cute.Tensor, steps: cutlass.Int32) -> None:
    """Shared memory, a barrier, and an array that is indexed by a number only known at run time: local memory."""
    thread, _, _ = cute.arch.thread_idx()
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(SHARED_FLOATS))
    local = cute.make_rmem_tensor(LOCAL_FLOATS, cutlass.Float32)
    shared[thread] = x[thread]
    cute.arch.sync_threads()
    for i in cutlass.range(steps, unroll=1):
        local[(i * thread) % LOCAL_FLOATS] = shared[(thread + i) % THREADS]
    x[thread] = local[steps % LOCAL_FLOATS]


@cute.jit
def launch_both(x: cute.Tensor, steps: cutlass.Int32, stream: Any) -> None:
    """Two launches, so that resources have to be told apart."""
    modest(x).launch(grid=(1, 1, 1), block=(32, 2, 1), stream=stream)
    greedy(x, steps).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def compile_both(*, arch: str, ratio: int) -> Any:
    """Both kernels in one function; ``ratio`` is only there to be printed."""
    x = cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), stride=(1,), assumed_align=16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_both, x, cutlass.Int32(1), stream, options=compile_options(arch))
