"""PTX of SM100 that the main backward kernel needs, one function an instruction (or a few that belong together).

Shared-memory and tensor-memory addresses are ``Int32``; a pair of fp32 is an ``Int64``, as packed instructions take it.
What only computes may be moved or merged by the compiler; whatever touches memory or a barrier stays in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu as nvgpu_ir
from cutlass._mlir.dialects import llvm

_LETTERS = {Int32: "r", Int64: "l", Float32: "f"}


def _assemble(text: str, results: Sequence[Any], operands: Sequence[Any], *, pure: bool = False) -> list[Any]:
    constraints = ["=" + _LETTERS[kind] for kind in results] + [_LETTERS[type(value)] for value in operands]
    if len(results) > 1:
        kind = llvm.StructType.get_literal([result.mlir_type for result in results])
    else:
        kind = results[0].mlir_type if results else None
    values = [value.ir_value() for value in operands]
    out = llvm.inline_asm(
        kind,
        values,
        text,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(results) > 1:
        return [result(llvm.extractvalue(result.mlir_type, out, [i])) for i, result in enumerate(results)]
    return [results[0](out)] if results else []


def _list(first: int, count: int) -> str:
    return "{" + ",".join(f"${first + i}" for i in range(count)) + "}"


# -- arithmetic ---------------------------------------------------------------------------------------------------


def pack(low: Any, high: Any) -> Any:
    """Two fp32 as a pair."""
    return _assemble("mov.b64 $0, {$1, $2};", [Int64], [low, high], pure=True)[0]


def unpack(pair: Any) -> tuple[Any, Any]:
    """The two fp32 of a pair."""
    low, high = _assemble("mov.b64 {$0, $1}, $2;", [Float32, Float32], [pair], pure=True)
    return low, high


def fma_pair(a: Any, b: Any, c: Any) -> Any:
    """Computes a * b + c of pairs, rounded once."""
    return _assemble("fma.rn.f32x2 $0, $1, $2, $3;", [Int64], [a, b, c], pure=True)[0]


def mul_pair(a: Any, b: Any) -> Any:
    """Computes a * b of pairs."""
    return _assemble("mul.rn.f32x2 $0, $1, $2;", [Int64], [a, b], pure=True)[0]


def add_pair(a: Any, b: Any) -> Any:
    """Computes a + b of pairs."""
    return _assemble("add.rn.f32x2 $0, $1, $2;", [Int64], [a, b], pure=True)[0]


def exp2(x: Any) -> Any:
    """2**x within 2 ulp; 0 for -inf."""
    return _assemble("ex2.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)[0]


def to_bf16x2(low: Any, high: Any) -> Any:
    """Both rounded to nearest even, ``low`` in the lower half."""
    return _assemble("cvt.rn.bf16x2.f32 $0, $1, $2;", [Int32], [high, low], pure=True)[0]


def bits(value: Any) -> Any:
    """The bits of a fp32 as an Int32."""
    return _assemble("mov.b32 $0, $1;", [Int32], [value], pure=True)[0]


def select(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds; both are computed."""
    return type(yes)(cutlass.select_(condition, yes, no))


def read_cta_index() -> Any:
    """%ctaid.x, read here: a copy shared by the warp roles would be spilled by ptxas."""
    return _assemble("mov.u32 $0, %ctaid.x;", [Int32], [])[0]


# -- memory -------------------------------------------------------------------------------------------------------


def load_global_ints(address: Any, count: int) -> list[Any]:
    """``count`` int32 (1, 2 or 4) that nothing writes during the launch."""
    if count == 1:
        return _assemble("ld.global.nc.b32 $0, [$1];", [Int32], [address])
    text = f"ld.global.nc.v{count}.b32 {_list(0, count)}, [${count}];"
    return _assemble(text, [Int32] * count, [address])


def load_global_floats(address: Any, count: int) -> list[Any]:
    """``count`` fp32 (1, 2 or 4) that nothing writes during the launch."""
    if count == 1:
        return _assemble("ld.global.nc.f32 $0, [$1];", [Float32], [address])
    text = f"ld.global.nc.v{count}.f32 {_list(0, count)}, [${count}];"
    return _assemble(text, [Float32] * count, [address])


def load_shared_pairs(address: Any, offset: int) -> list[Any]:
    """Four fp32 as two pairs."""
    return _assemble(f"ld.shared.v2.b64 {{$0,$1}}, [$2+{offset}];", [Int64, Int64], [address])


def load_shared_ints(address: Any, offset: int, count: int) -> list[Any]:
    """``count`` int32 (1, 2 or 4)."""
    if count == 1:
        return _assemble(f"ld.shared.b32 $0, [$1+{offset}];", [Int32], [address])
    return _assemble(f"ld.shared.v{count}.b32 {_list(0, count)}, [${count}+{offset}];", [Int32] * count, [address])


def store_shared(address: Any, values: Sequence[Any], offset: int = 0) -> None:
    """One, two or four words: Int32 or Float32."""
    count = len(values)
    values = [bits(value) if isinstance(value, Float32) else value for value in values]
    if count == 1:
        _assemble(f"st.shared.b32 [$0+{offset}], $1;", [], [address, *values])
    else:
        _assemble(f"st.shared.v{count}.b32 [$0+{offset}], {_list(1, count)};", [], [address, *values])


def add_global_floats(address: Any, values: Sequence[Any], offset: int = 0, where: Any = None) -> None:
    """Reduction of 1, 2 or 4 consecutive fp32; only if ``where`` is not negative."""
    _reduce("", "f32", address, values, offset, where)


def add_global_bf16(address: Any, words: Sequence[Any], offset: int = 0, where: Any = None) -> None:
    """Reduction of 1, 2 or 4 consecutive words of two bf16; only if ``where`` is not negative."""
    _reduce(".noftz", "bf16x2", address, words, offset, where)


def _reduce(rounding: str, kind: str, address: Any, values: Sequence[Any], offset: int, where: Any) -> None:
    count = len(values)
    vector, listed = (f".v{count}", _list(1, count)) if count > 1 else ("", "$1")
    text = f"red.relaxed.gpu.global.add{rounding}{vector}.{kind} [$0+{offset}], {listed};"
    if where is None:
        _assemble(text, [], [address, *values])
        return
    text = f"{{\n\t.reg .pred p;\n\tsetp.ge.s32 p, ${count + 1}, 0;\n\t@p {text}\n\t}}"
    _assemble(text, [], [address, *values, where])


def copy_async(target: Any, target_offset: int, source: Any, source_offset: int, size_bytes: Any) -> None:
    """16 bytes from global to shared memory, of which the first ``size_bytes`` are read and the rest are zeros."""
    text = f"cp.async.cg.shared.global [$0+{target_offset}], [$1+{source_offset}], 16, $2;"
    _assemble(text, [], [target, source, size_bytes])


def wait_async_copies() -> None:
    """Until this thread's :func:`copy_async` have written."""
    _assemble("cp.async.wait_all;", [], [])


def exchange(value: Any, mask: int) -> Any:
    """The fp32 of the lane whose number differs by ``mask``."""
    return _assemble(f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", [Float32], [value])[0]


def fence_async_shared() -> None:
    """What this thread wrote to shared memory may be read by tcgen05 and by bulk copies."""
    _assemble("fence.proxy.async.shared::cta;", [], [])


# -- tensor copies ------------------------------------------------------------------------------------------------


def tensor_map_address(atom: Any) -> Any:
    """Generic address of the tensor map of a TMA copy atom."""
    kind = cute_ir.PtrType.get(Int64.mlir_type, cute_ir.AddressSpace.generic, 64)
    return Int64(nvgpu_ir.get_tma_desc_addr(kind, nvgpu_ir.atom_make_exec_tma(atom._trait.value)).toint())


def copy_tensor(target: Any, tensor_map: Any, coordinates: Sequence[Any], barrier: Any) -> None:
    """One box of a rank-5 map to shared memory; a box outside the tensor arrives as zeros and counts all the same."""
    text = (
        "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$2,$3,$4,$5,$6}], [$7];"
    )
    _assemble(text, [], [target, tensor_map, *(Int32(c) for c in coordinates), barrier])


def prefetch_tensor(tensor_map: Any, coordinates: Sequence[Any]) -> None:
    """One box of a rank-5 map to L2."""
    text = "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [$0, {$1,$2,$3,$4,$5}];"
    _assemble(text, [], [tensor_map, *(Int32(c) for c in coordinates)])


# -- tcgen05 ------------------------------------------------------------------------------------------------------


def multiply_shared(target: Any, a: Any, b: Any, instruction: int, accumulate: Any) -> None:
    """D (+)= A B with both from shared memory; ``accumulate`` is a bool, or an Int32 that is 0 or not."""
    _multiply(target, "$1", a, b, instruction, accumulate)


def multiply_tensor(target: Any, a: Any, b: Any, instruction: int, accumulate: Any) -> None:
    """D (+)= A B with A from tensor memory."""
    _multiply(target, "[$1]", a, b, instruction, accumulate)


def _multiply(target: Any, a_text: str, a: Any, b: Any, instruction: int, accumulate: Any) -> None:
    operation = f"tcgen05.mma.cta_group::1.kind::f16 [$0], {a_text}, $2, $3,"
    word = Int32(instruction)
    if isinstance(accumulate, bool):
        _assemble(f"{operation} {int(accumulate)};", [], [target, a, b, word])
        return
    text = f"{{\n\t.reg .pred p;\n\tsetp.ne.b32 p, $4, 0;\n\t{operation} p;\n\t}}"
    _assemble(text, [], [target, a, b, word, accumulate])


def commit(barrier: Any) -> None:
    """The mbarrier gets one arrival when all products that this thread has issued are done."""
    _assemble("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", [], [barrier])


def load_tensor(address: Any, count: int, kind: Any = Float32) -> list[Any]:
    """``count`` columns (32, 64, ...) of this thread's lane, waited for: their registers exist only after the wait."""
    loads = [
        f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {_list(start, 32)}, [${count}+{start}];"
        for start in range(0, count, 32)
    ]
    text = "\n\t".join([*loads, "tcgen05.wait::ld.sync.aligned;"])
    return _assemble(text, [kind] * count, [address])


def store_tensor(address: Any, words: Sequence[Any], offset: int = 0) -> None:
    """Consecutive columns of this thread's lane; complete after :func:`wait_tensor_stores`."""
    count = len(words)
    _assemble(f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0+{offset}], {_list(1, count)};", [], [address, *words])


def wait_tensor_stores() -> None:
    """Until this warp's :func:`store_tensor` have written."""
    _assemble("tcgen05.wait::st.sync.aligned;", [], [])


def fence_before_signal() -> None:
    """Orders this thread's tcgen05 accesses before a signal that it gives next."""
    _assemble("tcgen05.fence::before_thread_sync;", [], [])


def fence_after_wait() -> None:
    """Orders this thread's tcgen05 accesses after a signal that it has waited for."""
    _assemble("tcgen05.fence::after_thread_sync;", [], [])


def allocate_tensor_memory(address: Any, columns: int) -> None:
    """Writes the first column to shared memory, and lets other CTAs allocate."""
    _assemble(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};\n\t"
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        [],
        [address],
    )


def free_tensor_memory(address: Any, columns: int) -> None:
    """Gives back what :func:`allocate_tensor_memory` took."""
    _assemble(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};", [], [address])


def wait_barrier(address: Any, parity: Any) -> None:
    """Until the phase of this parity is complete; a fresh barrier passes for parity 1."""
    text = "{\n\t.reg .pred p;\n\tWAIT:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n\t@!p bra WAIT;\n\t}"
    _assemble(text, [], [address, parity])


def arrive(address: Any) -> None:
    """One arrival at an mbarrier; what this thread did before is seen by those who waited."""
    _assemble("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [address])


def arrive_expecting(address: Any, size_bytes: int) -> None:
    """One arrival; the phase also waits for so many bytes of copies."""
    _assemble(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size_bytes};", [], [address])


def initialise_barrier(address: Any, arrivals: int) -> None:
    """Makes an mbarrier; to be published by a fence and a barrier of the CTA."""
    _assemble(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [address])


def elect() -> Any:
    """Context in which one lane of the warp runs; always the same one."""
    return cute.arch.elect_one()
