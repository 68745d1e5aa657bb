"""``run_backward`` on the GPU: the stages in order, on the caller's stream, without waiting for the device.

Order of a call: delta (``sum(out * dO)`` of every row), task build (tables of the work, made on the device from the
schedule), main kernel (the five matrix products, which adds to fp32 dK, dV and to the sums of dQ), postprocess (sums
to bf16). One allocation holds everything in between; results are two more. All sizes are runtime arguments of
kernels that are compiled once, see :mod:`msa_vendored.compiling`.

SM100, SM103 and SM90 differ in the main kernel and in the order of the elements of what it adds to.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from msa_vendored.backward.accumulation import DQ_DTYPES, DQAccumulation, choose_dq_accumulation
from msa_vendored.backward.arguments import require_operands, require_scale
from msa_vendored.backward.checks import aligned_operand, require_tensor
from msa_vendored.backward.error_word import ErrorWord, find_error_word, get_error_word
from msa_vendored.backward.plan import Sizes, plan_call
from msa_vendored.backward.schedule import MSABackwardSchedule, aligned_schedule
from msa_vendored.backward.stages import (
    GRADIENTS,
    MainArguments,
    Stages,
    Structure,
    count_multiprocessors,
    load_stages,
    require_arch,
)
from msa_vendored.backward.tasks import grid_bound
from msa_vendored.errors import MSAVendoredError


class CaptureError(MSAVendoredError, RuntimeError):
    """Something that a CUDA graph capture does not allow."""


def run_backward(
    *,
    q: torch.Tensor,
    k_aligned: torch.Tensor,
    v_aligned: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    schedule: MSABackwardSchedule,
    softmax_scale: float | None = None,
    dq_accumulation: DQAccumulation | None = None,
    deterministic: bool = False,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of causal block-sparse attention on an SM90, SM100 or SM103 GPU. The last four arguments are ours.

    Query head ``h`` attends with key head ``h // (Hq / Hkv)``, which is also its index head. A query at document
    position p sees a key of a selected block at document position <= p.

    Args:
        q: bf16 ``[T, Hq, 128]``, compact tokens (no padding between documents); Hq / Hkv is 1, 2, 4, 8 or 16.
        k_aligned: bf16 ``[W, Hkv, 128]``, W a positive multiple of 128; every document starts at a multiple of 128
            rows. Rows past the end of a document are ignored, NaN included.
        v_aligned: as ``k_aligned``.
        grad_out: bf16 ``[T, Hq, 128]``, gradient of ``out``.
        lse: fp32 ``[T, Hq]``, natural log of the sum of exp of scaled logits. A row that is not finite gets and gives
            no gradient.
        out: bf16 ``[T, Hq, 128]``, result of the forward.
        schedule: selection in CSR form; :class:`MSABackwardSchedule` for 4 key heads, its subclass
            :class:`msa_vendored.reference.BackwardSchedule` for any number.
        softmax_scale: factor on the logits; ``128 ** -0.5`` if None.
        dq_accumulation: type of the sums of dq between key blocks. ``"bf16"`` rounds once a block. ``"fp16"``, on SM90
            alone and the default there, has an eighth of that error for the same bytes: each row is scaled by a power
            of two that no sum can overflow (:mod:`msa_vendored.backward.dq_scale`), and dq is passed over once more.
            The error of ``"fp32"`` does not grow with the number of blocks; it moves twice the bytes. None is
            ``"fp16"`` on SM90, else ``"bf16"``.
        deterministic: same bits for the same arguments. Every sum is then made by one CTA in a fixed order, which takes
            two passes of the main kernel, one for dk and dv and one for dq.
        check: wait for the device, and raise if it found the schedule inconsistent. Without it, the next call on
            the device raises.

    Any strides and storage offsets are accepted: operands are detached and, where they are not contiguous or not at a
    16-byte address, copied. No operand is written to, and no autograd graph is recorded.

    Returns:
        bf16 dq ``[T, Hq, 128]``, dk and dv ``[W, Hkv, 128]``, the latter two views of one buffer. Keys that no query
        selected, and rows outside documents, are exactly zero.

    Raises:
        TypeError: an operand is not a tensor or has the wrong dtype.
        ValueError: wrong shape, or another device than q's. Nothing was launched then. Or an earlier call's schedule
            was inconsistent (:class:`~msa_vendored.backward.error_word.ScheduleError`).
        NotImplementedError: an option that the device's kernels do not have.
        UnavailableError: q is on another device than these GPUs, or CuTe DSL is missing. Nothing was compiled then.
        CaptureError: (a RuntimeError) the first call on a device inside a CUDA graph capture, or ``check`` in one.

    Side effects:
        Runs on the current stream of q's device. Allocates dq, dk/dv and a workspace of about
        ``T * Hq * 256 * (1 or 2) + W * Hkv * 1024 + T * Hq * 4`` bytes (without the first term on SM90 with fp16 or
        bf16 sums, which become dq itself; fp16 takes ``T * Hq * 4`` for norms) plus tables (for top-k selections at
        ratio 16, 8 to 9 bytes per selected block, query and key head). The first call on a device compiles or loads
        kernels.
    """
    require_tensor("q", q)
    arch = require_arch(q.device)
    accumulation = choose_dq_accumulation(arch, dq_accumulation)
    sizes = require_operands(
        schedule,
        accumulation,
        {"q": q, "k_aligned": k_aligned, "v_aligned": v_aligned, "grad_out": grad_out, "lse": lse, "out": out},
    )
    scale = require_scale(softmax_scale)
    structure = Structure(arch, sizes.ratio, accumulation, bool(deterministic))
    _require_capturable(q.device, structure, check)
    with torch.no_grad(), torch.cuda.device(q.device):
        error = get_error_word(q.device)
        error.raise_seen()
        stages = get_stages(structure)
        operands = tuple(aligned_operand(t) for t in (q, k_aligned, v_aligned, grad_out, lse, out))
        results = launch(
            stages, operands, aligned_schedule(schedule), sizes, scale, count_multiprocessors(q.device), error
        )
        _ready.add((q.device, structure))
        if check:
            error.raise_now()
    return results


@lru_cache(maxsize=64)
def get_stages(structure: Structure) -> Stages:
    """As :func:`msa_vendored.backward.stages.load_stages`, remembered: looking each kernel up takes 0.1 ms a call."""
    return load_stages(structure)


_ready: set[tuple[torch.device, Structure]] = set()
"""Devices and kernels that ran: nothing is left to be loaded or allocated for good."""


def launch(
    stages: Stages,
    operands: tuple[torch.Tensor, ...],
    schedule: MSABackwardSchedule,
    sizes: Sizes,
    softmax_scale: float,
    multiprocessors: int,
    error: ErrorWord,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enqueue the stages; see :func:`run_backward`. Arguments are checked, contiguous and at 16-byte addresses.

    Args:
        stages: compiled kernels. Emulated ones take CPU tensors.
        operands: q, k_aligned, v_aligned, grad_out, lse, out.
        schedule: on their device.
        sizes: of both.
        softmax_scale: factor on the logits.
        multiprocessors: CTAs that the main kernel is launched with at most.
        error: into whose word the call's own is ORed in the end.
    """
    q, k, v, grad_out, lse, out = operands
    walks, in_place = tuple(run.walk for run in stages.passes), stages.dq_in_place
    plan = plan_call(sizes, stages.walk.window, walks, multiprocessors, dq_in_place=in_place)
    parts = plan.workspace.allocate(q.device)
    dq, dkv = torch.empty_like(q), q.new_empty((2, *k.shape))
    dq_sum = dq.view(DQ_DTYPES[sizes.dq_accumulation]).view(-1) if in_place else parts["dq_sum"]
    tables = parts["task_meta"], parts["task_qrows"], parts["task_qpos"]
    documents = schedule.cu_seqlens, schedule.document_workspace_starts
    scale: tuple[torch.Tensor, ...] = ()
    if stages.key_maxima is not None:
        scale = parts["norms"], parts["key_maxima"]
        items = schedule.scheduler_metadata, schedule.work_count
        stages.key_maxima(k, v, *items, *documents, parts["key_maxima"].view(torch.int32))
    stages.delta(out, grad_out, parts["delta"], *((dq,) if in_place else ()), *scale[:1])
    for run, how in zip(stages.passes, plan.passes, strict=True):
        grid = grid_bound(how.chunks, multiprocessors)
        run.build_tasks(
            schedule.row_ptr, schedule.q_indices, schedule.scheduler_metadata, schedule.work_count, *documents,
            parts["scratch"], *tables, parts["descriptor"], parts["error_word"], sizes.tokens, sizes.workspace_rows,
            how.window, grid, stages.walk.rows_per_chunk,
        )  # fmt: skip
        stages.main(
            MainArguments(
                q, k, v, grad_out, lse, parts["delta"], *tables, *documents, parts["descriptor"], dq_sum,
                parts["dkv_sum"], softmax_scale, grid, GRADIENTS[run.walk], scale,
            )
        )  # fmt: skip
    undo = (*scale, softmax_scale) if scale else ()
    stages.postprocess(dq_sum, dq, parts["dkv_sum"], dkv, parts["error_word"], error.word, *undo)
    error.enqueue_copy()
    return dq, dkv[0], dkv[1]


def _require_capturable(device: torch.device, structure: Structure, check: bool) -> None:
    if not torch.cuda.is_current_stream_capturing():
        return
    if check:
        raise CaptureError(
            "check=True waits for the device, which a CUDA graph capture does not allow",
            where="argument check",
            expected="check=False",
            got="check=True",
            next_command="capture without check; the first call after a replay raises what the replay found",
        )
    if (device, structure) not in _ready or find_error_word(device) is None:
        raise CaptureError(
            "the first call on a device loads kernels and allocates, which a CUDA graph capture does not allow",
            where="run_backward",
            expected="one call with the same options and head ratio before the capture",
            got=f"a capture on {device}",
            next_command="call run_backward once, then capture",
        )
