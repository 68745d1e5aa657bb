"""Compile the official sparse forward for an architecture without owning a GPU of it.

CuTe DSL needs no device to compile: shapes come from fake tensors and the target from ``CUTE_DSL_ARCH``. This is
how the build proves on a CPU that the pinned MSA, patched, and the installed DSL fit each other. One process
compiles for one architecture, because the DSL reads the variable when it is imported:
``python -m msa_vendored.offline_compile --arch sm_100a``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ARCHITECTURES = ("sm_100a", "sm_100f", "sm_103a", "sm_110a")
"""Targets that the forward was seen to compile for; for sm_90a and sm_120a the DSL raises OpError."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compilation produced."""

    arch: str
    head_ratio: int
    seconds: float
    ptx_bytes: int
    cubin_bytes: int


def compile_forward(arch: str = "sm_100a", head_ratios: Sequence[int] = (16,)) -> list[Compiled]:
    """Compile the bf16 causal sparse forward of the built package, once a head ratio.

    Args:
        arch: one of ``ARCHITECTURES``.
        head_ratios: query heads per KV head: 1, 2, 4, 8 or 16.

    Raises:
        RuntimeError: ``cutlass`` is already imported in this process, maybe for another architecture.
        Whatever the DSL raises when the kernel does not compile.

    Side effects:
        Sets ``CUTE_DSL_ARCH``, ``CUTE_DSL_KEEP`` and ``CUTE_DSL_DUMP_DIR`` for the process; imports MSA and the DSL.
    """
    if "cutlass" in sys.modules:
        raise RuntimeError("cutlass is already imported; compile in a fresh process")
    done = []
    with tempfile.TemporaryDirectory(prefix="msa-vendored-compile-") as folder:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ptx,cubin", CUTE_DSL_DUMP_DIR=folder)
        for head_ratio in head_ratios:
            started = time.perf_counter()
            _compile(head_ratio)
            seconds = round(time.perf_counter() - started, 1)
            dumps = {kind: list(Path(folder).rglob(f"*.{kind}")) for kind in ("ptx", "cubin")}
            sizes = {kind: sum(path.stat().st_size for path in paths) for kind, paths in dumps.items()}
            done.append(Compiled(arch, head_ratio, seconds, sizes["ptx"], sizes["cubin"]))
            for path in (*dumps["ptx"], *dumps["cubin"]):
                path.unlink()
    return done


def _compile(head_ratio: int) -> None:
    import cutlass
    import cutlass.cute as cute

    from msa_vendored.installed import provenance

    forward = import_module(f"{provenance().package}.cute.src.sm100.fwd.atten_fwd").SparseAttentionForwardSm100
    bf16, i32, f32 = cutlass.BFloat16, cutlass.Int32, cutlass.Float32
    kernel = forward(head_dim=128, qheadperkv=head_ratio, n_block_size=128, causal=True, qk_dtype=bf16, pv_dtype=bf16)
    # Ratios below 8 gather four query rows at a time through a tensor map that is built on the device: 128 bytes.
    descriptor = _fake(cutlass.Uint8, 1) if head_ratio in (1, 2, 4) else None
    csr = [_fake(i32, 2), _fake(i32, 2), _fake(i32, 2)]  # q_indices, q_indices with split slot, row_ptr
    schedule = [_fake(i32, 2), _fake(i32, 1)]  # scheduler_metadata, work_count
    partial = [_fake(bf16, 2), _fake(f32, 3), None]  # O, LSE, LSE at another temperature
    q = _fake(bf16, 2)
    lengths = [None, None, _fake(i32, 1), _fake(i32, 1)]  # page_table, seqused_k, cu_seqlens_q, cu_seqlens_k
    scalars = [f32(1.0), f32(1.0), i32(4), i32(4), i32(512), i32(64)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    cute.compile(
        kernel,
        _fake(bf16, 3),
        _fake(bf16, 3),
        *csr,
        *schedule,
        *partial,
        q,
        descriptor,
        *lengths,
        *scalars,
        stream,
        options="--enable-tvm-ffi",
    )


def _fake(dtype: Any, rank: int) -> Any:
    """A contiguous tensor of unknown sizes, 16-byte aligned as torch's allocator and MSA's checks guarantee."""
    import cutlass.cute as cute

    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = (*(cute.sym_int64() for _ in range(rank - 1)), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=16)


def main(arguments: list[str] | None = None) -> int:
    """Command line: compile once, print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m msa_vendored.offline_compile", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_100a")
    parser.add_argument("--head-ratio", type=int, choices=(1, 2, 4, 8, 16), nargs="+", default=[16])
    options = parser.parse_args(arguments)
    for compiled in compile_forward(options.arch, options.head_ratio):
        print(json.dumps(asdict(compiled)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
