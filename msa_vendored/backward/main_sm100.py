"""The main kernel of the SM100/SM103 backward: gradients of one list of tiles, by tcgen05.

A CTA walks a contiguous interval of the task table. One task is one tile (see ``sm100_layout``): up to ``128 // ratio``
queries of one key head against one block of 128 keys. A run of tasks of one key head and block is a *segment*: K and V
stay in shared memory, dK and dV in tensor memory, and are reduced to global memory at its end.

``docs/sm100_backward.md`` draws tensor memory, shared memory, warps, and who waits for whom. The order of products is
dV(i), dP(i), S(i+1), dK(i), dQ(i): while compute warps turn S(i+1) into P, the tensor cores do dK(i) and dQ(i).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from msa_vendored.backward import sm100_layout as plan
from msa_vendored.backward import sm100_ptx as ptx
from msa_vendored.backward.sm100_compute import ComputeRole
from msa_vendored.backward.sm100_layout import HEAD_DIM, TILE, Smem
from msa_vendored.backward.sm100_mma import MultiplyRole
from msa_vendored.backward.sm100_producers import ProducerRoles
from msa_vendored.backward.sm100_reduce import ReduceRole
from msa_vendored.backward.sm100_walk import Context
from msa_vendored.compiling import compile_options


class MainKernel(ProducerRoles, MultiplyRole, ComputeRole, ReduceRole):
    """One compiled variant: host code, the start of a CTA, and the roles of its warps."""

    # -- host ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        grad_out: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        descriptor: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        dq_pool: cute.Tensor,
        dkv: cute.Tensor,
        softmax_scale: Float32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        """Launch; see :func:`compile_main`."""
        by_tma = plan.gathers_by_tma(self.ratio)
        row_maps = (self._row_map(q), self._row_map(grad_out)) if const_expr(by_tma) else (None, None)
        maps = (*row_maps, self._block_map(k), self._block_map(v))
        tables = (task_meta, task_qrows, task_qpos, descriptor, cu_seqlens, document_workspace_starts)
        self.kernel(*maps, q, grad_out, lse, delta, *tables, dq_pool, dkv, k.shape[1], softmax_scale).launch(
            grid=(ctas, 1, 1),
            block=(plan.PLAN.threads, 1, 1),
            smem=plan.smem_bytes(self.ratio),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _row_map(self, tensor: cute.Tensor) -> Any:
        """Tensor map of q or dO: the rows of one token and key head, in the order of shared memory, are one box."""
        tokens, heads = tensor.shape[0], tensor.shape[1]
        groups = heads // plan.SWIZZLE_ROWS
        shape = (64, plan.SWIZZLE_ROWS, 2, groups, tokens)
        stride = (1, HEAD_DIM, 64, plan.SWIZZLE_ROWS * HEAD_DIM, cute.assume(heads * HEAD_DIM, divby=HEAD_DIM))
        return self._make_map(tensor, shape, stride, (64, plan.SWIZZLE_ROWS, 2, self.ratio // plan.SWIZZLE_ROWS, 1))

    def _block_map(self, tensor: cute.Tensor) -> Any:
        """Tensor map of k or v: one block of one key head is one box of 32 KiB."""
        rows, heads = tensor.shape[0], tensor.shape[1]
        row_stride = cute.assume(heads * HEAD_DIM, divby=HEAD_DIM)
        group_stride = cute.assume(plan.SWIZZLE_ROWS * heads * HEAD_DIM, divby=HEAD_DIM)
        shape = (64, plan.SWIZZLE_ROWS, 2, rows // plan.SWIZZLE_ROWS, heads)
        stride = (1, row_stride, 64, group_stride, HEAD_DIM)
        return self._make_map(tensor, shape, stride, (64, plan.SWIZZLE_ROWS, 2, TILE // plan.SWIZZLE_ROWS, 1))

    def _make_map(self, tensor: cute.Tensor, shape: Any, stride: Any, box: tuple[int, ...]) -> Any:
        view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        box_layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(box))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box_layout, box)[0]

    # -- device -------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        q_map: Any,
        grad_out_map: Any,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        q: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        task_meta: cute.Tensor,
        task_qrows: cute.Tensor,
        task_qpos: cute.Tensor,
        descriptor: cute.Tensor,
        cu_seqlens: cute.Tensor,
        document_workspace_starts: cute.Tensor,
        dq_pool: cute.Tensor,
        dkv: cute.Tensor,
        key_heads: Int32,
        softmax_scale: Float32,
    ) -> None:
        """Fills the context; CTAs beyond the last chunk do nothing more."""
        c = Context()
        c.descriptor, c.task_meta = _address(descriptor), _address(task_meta)
        c.task_qrows, c.task_qpos = _address(task_qrows), _address(task_qpos)
        c.cu_seqlens, c.document_workspace_starts = _address(cu_seqlens), _address(document_workspace_starts)
        c.q, c.grad_out, c.lse, c.delta = _address(q), _address(grad_out), _address(lse), _address(delta)
        c.dq_pool, c.dk = _address(dq_pool), _address(dkv)
        c.dv = c.dk + Int64(dkv.shape[0]) * 2
        c.k_map, c.v_map = ptx.tensor_map_address(k_map), ptx.tensor_map_address(v_map)
        if const_expr(plan.gathers_by_tma(self.ratio)):
            c.q_map, c.grad_out_map = ptx.tensor_map_address(q_map), ptx.tensor_map_address(grad_out_map)
        c.smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024).toint())
        c.key_heads, c.scale = key_heads, softmax_scale
        if cute.arch.block_idx()[0] < ptx.load_global_ints(c.descriptor + 16, 1)[0]:
            self._run(c)

    @cute.jit
    def _run(self, c: Context) -> None:
        c.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if c.warp == plan.MMA_WARP:
            with ptx.elect():
                for index, arrivals in enumerate(plan.barrier_arrivals()):
                    ptx.initialise_barrier(c.smem + (Smem.BARRIERS + 8 * index), arrivals)
                cute.arch.mbarrier_init_fence()
            ptx.allocate_tensor_memory(c.smem + Smem.TMEM_ADDRESS, plan.TMEM_COLUMNS)
        cute.arch.sync_threads()
        service, compute, reduce = plan.PLAN.registers
        if c.warp < 4:
            cute.arch.setmaxregister_decrease(service)
            if c.warp == plan.MMA_WARP:
                self.multiply(c)
            elif c.warp == plan.LOAD_WARP:
                self.load(c)
            elif c.warp == plan.ROW_WARP:
                self.stage_rows(c)
            elif const_expr(not plan.gathers_by_tma(self.ratio)):
                self.gather(c)
        elif c.warp < 8:
            cute.arch.setmaxregister_increase(compute)
            self.compute(c)
        else:
            cute.arch.setmaxregister_increase(reduce)
            self.reduce(c)


def _address(tensor: cute.Tensor) -> Any:
    return Int64(tensor.iterator.toint())


def compile_main(
    *, arch: str = "sm_100a", ratio: int = 16, dq_accumulation: str = "bf16", gradients: str = "all"
) -> Any:
    """Compile the main kernel for one architecture.

    Args:
        arch: ``sm_100a`` or ``sm_103a``.
        ratio: query heads for each key head, 1, 2, 4, 8 or 16.
        dq_accumulation: dtype of ``dq_pool``: ``"bf16"`` or ``"fp32"``.
        gradients: what the kernel adds: ``"all"``, ``"dq"`` or ``"dkv"``; the other accumulators are left alone.

    Returns:
        A function that adds to ``dq_pool`` and ``dkv`` (layouts in ``sm100_layout``). Tensors are contiguous, on one
        device and 16-byte aligned, but ``cu_seqlens`` and ``document_workspace_starts`` only 4-byte. In this order:

        - q, grad_out: bf16 ``[T, Hq, 128]``; k, v: bf16 ``[W, Hkv, 128]``, W a multiple of 128
        - lse (natural log), delta: fp32 ``[T, Hq]``
        - task_meta, task_qrows, task_qpos, descriptor, cu_seqlens, document_workspace_starts: int32, see ``tasks``
        - dq_pool: flat, of ``dq_accumulation``; dkv: flat fp32
        - softmax_scale: float; ctas: int, size of the grid
    """
    tokens, rows = cute.sym_int(), cute.sym_int(divisibility=TILE)
    query_heads, key_heads, tasks = cute.sym_int(divisibility=ratio), cute.sym_int(), cute.sym_int()
    slots = plan.slots(ratio)
    queries, keys = _fake(BFloat16, tokens, query_heads, HEAD_DIM), _fake(BFloat16, rows, key_heads, HEAD_DIM)
    statistic = _fake(Float32, tokens, query_heads)
    tables = [
        _fake(Int32, tasks, 4),
        _fake(Int32, tasks, slots),
        _fake(Int32, tasks, slots),
        _fake(Int32, cute.sym_int()),
    ]
    lists = [_fake(Int32, cute.sym_int(), alignment=4) for _ in range(2)]
    dq_dtype = {"bf16": BFloat16, "fp32": Float32}[dq_accumulation]
    return cute.compile(
        MainKernel(ratio, dq_dtype, gradients),
        *(queries, queries, keys, keys, statistic, statistic),
        *tables,
        *lists,
        _fake(dq_dtype, cute.sym_int64()),
        _fake(Float32, cute.sym_int64()),
        Float32(1.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )


def _fake(dtype: Any, *shape: Any, alignment: int = 16) -> Any:
    """A contiguous tensor without data; sizes are numbers or symbols."""
    stride: tuple[Any, ...] = (1,)
    for size in shape[:0:-1]:
        known = isinstance(size, int) and isinstance(stride[0], int)
        stride = (size * stride[0] if known else cute.sym_int64(divisibility=stride[0]), *stride)
    return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=alignment)
