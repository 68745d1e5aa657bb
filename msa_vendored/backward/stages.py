"""Which compiled kernels make up a backward on which GPU, and how each is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from msa_vendored.backward.accumulation import DQ_DTYPES
from msa_vendored.backward.pool_order import IN_PLACE, ROW_ORDER, SM90_DKV_ORDER, SM100_DKV_ORDER, head_group_order
from msa_vendored.compiling import Kernel, load_kernel
from msa_vendored.errors import UnavailableError

ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability to what its kernels are compiled for; code for one of these runs on no other."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What is compiled into the kernels; everything else is a runtime argument."""

    arch: str
    ratio: int
    dq_accumulation: str
    deterministic: bool


@dataclass(frozen=True, slots=True, eq=False)
class MainArguments:
    """What a main kernel gets; bf16 and fp32 as in :func:`msa_vendored.backward.engine.run_backward`.

    Attributes:
        q: ``[T, Hq, 128]``.
        k: ``[W, Hkv, 128]``.
        v: ``[W, Hkv, 128]``.
        grad_out: ``[T, Hq, 128]``.
        lse: ``[T, Hq]``.
        delta: fp32 ``[T, Hq]``, row sums of out * dO.
        task_meta: tables and descriptor as in :mod:`msa_vendored.backward.tasks`.
        task_qrows: rows of q.
        task_qpos: workspace positions.
        cu_seqlens: ``[documents + 1]``.
        document_workspace_starts: ``[documents]``.
        descriptor: ``[8]``.
        dq_sum: flat, as many elements as q, bf16 or fp32, zero, in the order that the kernel likes.
        dkv_sum: flat fp32, as many elements as k and v, zero; dK first.
        softmax_scale: factor on the logits.
        grid: CTAs.
        gradients: one of :data:`GRADIENTS`; the sums of the others are left alone.
        scale: in fp16 what the rows of ``dq_sum`` are scaled by: norms and key_maxima of
            :mod:`msa_vendored.backward.dq_scale`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    task_meta: torch.Tensor
    task_qrows: torch.Tensor
    task_qpos: torch.Tensor
    cu_seqlens: torch.Tensor
    document_workspace_starts: torch.Tensor
    descriptor: torch.Tensor
    dq_sum: torch.Tensor
    dkv_sum: torch.Tensor
    softmax_scale: float
    grid: int
    gradients: str = "all"
    scale: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Walk:
    """Runtime arguments of the task build that suit a main kernel.

    Attributes:
        window: queries per window of the task order; widened where there would be too many bins.
        rows_per_chunk: tasks that a CTA takes at a time, at most.
    """

    window: int
    rows_per_chunk: int


WALKS = {"sm_90a": Walk(2048, 16), "sm_100a": Walk(1024, 64), "sm_103a": Walk(1024, 64)}
"""SM90: the fastest of 24 pairs at 16,384 and 32,768 tokens on an H200 (chunks of 64: 4 to 11 % slower). SM100: not
measured by us. NeMo's kernel on B200 wants 512, which is 1 % faster than 2,048; 1,024 saves 2 to 6 % of the bytes that
512 reduces (docs/sm100_backward.md)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the task build and the main kernel.

    Attributes:
        walk: one of :data:`msa_vendored.backward.tasks.WALKS`.
        build_tasks: see :func:`msa_vendored.backward.task_build.compile_task_build`.
    """

    walk: str
    build_tasks: Kernel


REPEATABLE_WALKS = ("blocks", "windows")
"""Passes of ``deterministic=True``: the first gives dK and dV, the second dQ."""

GRADIENTS = {"even": "all", "blocks": "dkv", "windows": "dq"}
"""What the main kernel computes in each walk: what one CTA owns there."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The four stages in the order of their launches; :func:`msa_vendored.backward.engine.launch` calls them.

    Attributes:
        delta: ``(out, grad_out, delta)``; also ``dq``, which it zeroes, where that is added to in place; in fp16 also
            ``norms``.
        passes: what the task build and the main kernel run for; one, or two of which each owns what it adds to.
        main: adds to ``dq_sum`` and ``dkv_sum``.
        postprocess: ``(dq_sum, dq, dkv_sum, dkv, error_word, device_word)``, see
            :func:`msa_vendored.backward.postprocess.compile_postprocess`; in fp16 also ``norms, key_maxima, scale``.
        walk: how the main kernel likes its tasks ordered and cut.
        dq_in_place: the main kernel adds to dq itself, which delta zeroes; there is no ``dq_sum`` beside it.
        key_maxima: in fp16, see :func:`msa_vendored.backward.dq_scale.compile_key_maxima`.
    """

    delta: Kernel
    passes: tuple[Pass, ...]
    main: Callable[[MainArguments], None]
    postprocess: Kernel
    walk: Walk
    dq_in_place: bool = False
    key_maxima: Kernel | None = None


@lru_cache(maxsize=64)
def find_arch(device: torch.device) -> str | None:
    """Architecture that kernels for ``device`` are compiled for, None if there are none.

    Remembered, since asking the driver takes 10 us.
    """
    return ARCHITECTURES.get(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def describe_device(device: torch.device) -> str:
    """What a device is, for error messages."""
    if device.type != "cuda":
        return f"device {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def require_arch(device: torch.device) -> str:
    """As :func:`find_arch`.

    Raises:
        UnavailableError: no GPU, or one that the kernels are not written for; the message names it.
    """
    arch = find_arch(device)
    if arch is None:
        raise UnavailableError(
            "run_backward has no kernels for this device",
            where=f"tensors on {device}",
            expected="an NVIDIA GPU of compute capability 9.0, 10.0 or 10.3",
            got=describe_device(device),
            next_command='use kernels(backend="reference").run_backward, which computes the same in PyTorch',
        )
    return arch


@lru_cache(maxsize=64)
def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def load_stages(structure: Structure, load: Callable[..., Kernel] = load_kernel) -> Stages:
    """The stages for one structure.

    Args:
        structure: what to compile in.
        load: ``(compile_stage, *, arch, **options)`` to a launcher; :func:`msa_vendored.compiling.load_kernel`, by
            which each is compiled at most once in a process. Tests emulate here.

    Raises:
        UnsupportedArgumentError: the architecture's main kernel lacks an option.
        UnavailableError: CuTe DSL is missing.
    """
    _require_dsl()
    from msa_vendored.backward.delta import compile_delta
    from msa_vendored.backward.dq_scale import compile_key_maxima
    from msa_vendored.backward.postprocess import compile_postprocess
    from msa_vendored.backward.task_build import compile_task_build

    arch, ratio = structure.arch, structure.ratio
    scaled = structure.dq_accumulation == "fp16"
    walks = REPEATABLE_WALKS if structure.deterministic else ("even",)
    gradients = [GRADIENTS[walk] for walk in walks]
    main, orders = (_load_sm90 if arch == "sm_90a" else _load_sm100)(structure, gradients, load)
    in_place = orders["dq_order"] == IN_PLACE
    return Stages(
        delta=load(compile_delta, arch=arch, zeroes=in_place, norms=scaled),
        passes=tuple(Pass(walk, load(compile_task_build, arch=arch, ratio=ratio, walk=walk)) for walk in walks),
        main=main,
        postprocess=load(
            compile_postprocess, arch=arch, dq_dtype=structure.dq_accumulation, report_errors=True, **orders
        ),
        walk=WALKS[arch],
        dq_in_place=in_place,
        key_maxima=load(compile_key_maxima, arch=arch) if scaled else None,
    )


def _require_dsl() -> None:
    try:
        import cutlass  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            "run_backward compiles its kernels with CuTe DSL, which cannot be imported",
            where="import cutlass",
            expected="nvidia-cutlass-dsl",
            got=str(error),
            next_command="pip install 'msa_vendored[sm100]'",
        ) from error


Main = Callable[[MainArguments], None]


def _load_sm100(
    structure: Structure, gradients: Sequence[str], load: Callable[..., Kernel]
) -> tuple[Main, dict[str, str]]:
    """The tcgen05 kernel, and the orders of its sums, see :mod:`msa_vendored.backward.pool_order`."""
    from msa_vendored.backward.main_sm100 import compile_main
    from msa_vendored.backward.sm100_layout import head_group

    dq_accumulation = structure.dq_accumulation
    options = {"arch": structure.arch, "ratio": structure.ratio, "dq_accumulation": dq_accumulation}
    kernels = {name: load(compile_main, gradients=name, **options) for name in gradients}

    def main(a: MainArguments) -> None:
        kernels[a.gradients](
            a.q, a.grad_out, a.k, a.v, a.lse, a.delta, a.task_meta, a.task_qrows, a.task_qpos, a.descriptor,
            a.cu_seqlens, a.document_workspace_starts, a.dq_sum, a.dkv_sum, a.softmax_scale, a.grid,
        )  # fmt: skip

    dq_order = head_group_order(head_group(structure.ratio, DQ_DTYPES[dq_accumulation].itemsize))
    return main, {"dq_order": dq_order, "dkv_order": SM100_DKV_ORDER}


def _load_sm90(
    structure: Structure, gradients: Sequence[str], load: Callable[..., Kernel]
) -> tuple[Main, dict[str, str]]:
    """The wgmma kernel, and the orders of its sums."""
    dq_accumulation = structure.dq_accumulation
    options = {"arch": structure.arch, "ratio": structure.ratio, "dq_accumulation": dq_accumulation}
    kernels = {name: load(compile_main_sm90, gradients=name, **options) for name in gradients}

    def main(a: MainArguments) -> None:
        dk_sum, dv_sum = a.dkv_sum.view(2, -1, a.k.shape[1], 128 * 128)
        kernels[a.gradients](
            a.q, a.k, a.v, a.grad_out, a.lse, a.delta, a.task_meta, a.task_qrows, a.task_qpos, a.cu_seqlens,
            a.document_workspace_starts, a.descriptor, a.dq_sum.view_as(a.q), dk_sum, dv_sum, *a.scale,
            a.softmax_scale, a.grid,
        )  # fmt: skip

    return main, {"dq_order": ROW_ORDER if dq_accumulation == "fp32" else IN_PLACE, "dkv_order": SM90_DKV_ORDER}


def compile_main_sm90(*, arch: str, ratio: int, dq_accumulation: str, gradients: str = "all") -> Kernel:
    """See :func:`msa_vendored.backward.main_sm90.compile_main`. Of dQ alone, the sums are made in order."""
    from msa_vendored.backward.main_sm90 import compile_main

    return compile_main(ratio=ratio, dq_accumulation=dq_accumulation, gradients=gradients, options=f"--gpu-arch {arch}")
