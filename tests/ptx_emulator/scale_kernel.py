"""The smallest kernel with a tensor, a scalar and a stream; imported after :func:`ptx_emulator.cute_host.prepare`."""

from typing import Any

import cutlass
import cutlass.cute as cute

from msa_vendored.compiling import compile_options

THREADS = 128


@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32) -> None:
    """One element a thread."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        y[i] = x[i] * factor


@cute.jit
def launch_scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream: Any) -> None:
    """As many CTAs as cover x."""
    scale(x, y, factor).launch(
        grid=[(cute.size(x) + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def compile_scale(*, arch: str) -> Any:
    """``(x, y, factor)``, float32 vectors of one length: sets y to factor * x."""
    size = cute.sym_int()
    vector = [cute.runtime.make_fake_tensor(cutlass.Float32, (size,), stride=(1,), assumed_align=16) for _ in "xy"]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_scale, *vector, cutlass.Float32(1.0), stream, options=compile_options(arch))
