"""Runs every SM90 kernel under NVIDIA's compute-sanitizer: ``nox -s sanitize``, or ``python -m sanitize_kernels``.

First the cases run without it: their results must agree with the reference, they must launch every ``@cute.kernel`` of
the SM90 launchers, and what they compile is kept on disk, since the sanitizer would slow the compiler down too. Then
each tool runs the same cases in a process of its own, all tools at once. The exit status is 0 only if no tool reports
anything but what ``sanitize_reports.py`` explains. ``--tools`` and ``--only`` choose; ``--sanitizer`` names a program
elsewhere.

Documents are tiny, because a sanitized kernel takes 10 to 100 times as long. torch's allocator is switched off, so
that an access past the end of a tensor is one past the end of an allocation.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sanitize_reports import PACKAGE, find_problems

import msa_vendored
from msa_vendored import kernels
from msa_vendored.compiling import CACHE_VARIABLE, kernel_cache_folder

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OTHER_ARCHITECTURES = ("main_sm100.py",)
"""Files of kernels that no SM90 launcher uses."""
TOLERANCE = 6e-3
"""Relative L2 against float32: twice what bf16 kernels show (2.1e-3 to 3.0e-3). What is checked here is that a case
computes what it should; the tests hold results to tighter limits."""
FOUND_EXIT_CODE = 86
TOOL_TIMEOUT_S = 900
LENGTHS = (140, 1, 70, 131)


def leave(value: Any) -> Any:
    """The value where it is, for the reference."""
    return value


def on_gpu(value: Any) -> Any:
    """A tensor, or a dataclass or dictionary with tensors in it, on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if is_dataclass(value) and not isinstance(value, type):
        tensors = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{name: on_gpu(x) for name, x in tensors.items() if isinstance(x, torch.Tensor)})
    if isinstance(value, dict):
        return {name: on_gpu(x) for name, x in value.items()}
    return value


def require_close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Relative L2 within :data:`TOLERANCE`; compared on the CPU, so that no kernel of torch runs.

    Raises:
        AssertionError: it is not, or not a number.
    """
    error = float((got.cpu().double() - want.double()).norm() / want.double().norm())
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


def build_index(topk: int = 4) -> None:
    """Bitmap, counting sort and work items, with rows to spare."""
    from msa_vendored.reference.cases import make_case

    case = make_case(LENGTHS, topk=topk, index_heads=2, head_dim=8)
    sizes = {"total_k": sum(LENGTHS), "max_seqlen_k": max(LENGTHS), "max_seqlen_q": max(LENGTHS), "total_rows": 8}
    operands = case.q2k_indices, case.cu_seqlens_q, case.cu_seqlens_k
    want, got = (
        kernels(backend=backend).build_k2q_csr(
            *(move(operand) for operand in operands), 128, **sizes, qhead_per_kv=16, return_schedule=True
        )
        for backend, move in (("reference", leave), ("sm90", on_gpu))
    )
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(got[-1].scheduler_metadata.cpu(), want[-1].scheduler_metadata)


def score_blocks() -> None:
    """Six heads of two key heads; integers, so that sums are exact."""
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    q, k = (torch.randint(-4, 5, (sum(LENGTHS), heads, 128)).bfloat16() for heads in (6, 2))
    results = []
    for backend, move in (("reference", leave), ("sm90", on_gpu)):
        bundle = kernels(backend=backend)
        plan = bundle.fmha_sm100_plan(lengths, lengths, 6, num_kv_heads=2, output_maxscore=True)
        results.append(bundle.fmha_sm100(move(q), move(k), move(k), plan, output_o=False)[1].cpu())
    assert torch.equal(*results)


def select(topk: int, *, fused: bool) -> None:
    """Score and rank, in one kernel or in two with several chunks."""
    from msa_vendored.hopper import score
    from msa_vendored.hopper.select import make_chunks, select_fused, select_in_chunks, share_segments
    from msa_vendored.training import Microbatch, select_blocks

    torch.manual_seed(topk)
    index_q, index_k = (torch.randint(-1, 2, (sum(LENGTHS), heads, 128)).bfloat16() for heads in (4, 1))
    batch = Microbatch.from_cu_seqlens(torch.tensor([0, *LENGTHS]).cumsum(0), (1, 1))
    want = select_blocks(index_q.float(), index_k.float(), batch, topk=topk, backend="reference")
    plan = score.fmha_sm100_plan(batch.lengths, batch.key_lengths, 4, num_kv_heads=1, output_maxscore=True)[3]
    assert isinstance(plan, score.ScorePlan)
    device, operands = torch.device("cuda", 0), (on_gpu(index_q), on_gpu(index_k))
    options: dict[str, Any] = {"init": 1, "local": 1, "topk": topk}
    if fused:
        got = select_fused(*operands, share_segments(plan, device, ctas=3), **options)
    else:
        chunks = make_chunks(plan, device, ctas=3, budget=4 * 2 * 150)
        got = select_in_chunks(*operands, chunks, on_gpu(batch.document_positions), **options)
    assert torch.equal(got.cpu(), want)


@contextmanager
def fill_partial_outputs() -> Iterator[None]:
    """Fill the forward's partial outputs, the one flat bf16 tensor that it makes, with NaN before its kernels run.

    initcheck (2025.3.1) does not see ``cp.async.bulk`` write to device memory, and reports every read of what the
    kernel stored so. It sees this fill; a partial output that no kernel stored is then a NaN in the result.
    """
    new_empty, filled = torch.Tensor.new_empty, 0

    def filling(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal filled
        made = new_empty(tensor, *arguments, **options)
        if made.dim() != 1 or made.dtype != torch.bfloat16:
            return made
        filled += 1
        return made.fill_(math.nan)

    torch.Tensor.new_empty = filling
    try:
        yield
    finally:
        torch.Tensor.new_empty = new_empty
    assert filled == 1, f"{filled} flat tensors made, not the partial outputs alone"


def attend(ratio: int, topk: int, scale: float | None = None) -> None:
    """Segments, main kernel and combine."""
    from msa_vendored.reference.cases import invert_selection, make_case

    case = make_case(LENGTHS, topk=topk, index_heads=2, heads_per_index_head=ratio)
    row_ptr, q_indices, schedule = invert_selection(case)
    call = {
        "q": case.q, "k": case.k, "v": case.v, "k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices, "topK": topk,
        "cu_seqlens_q": case.cu_seqlens_q, "cu_seqlens_k": case.cu_seqlens_k, "max_seqlen_q": case.max_seqlen_q,
        "max_seqlen_k": case.max_seqlen_k, "causal": True, "return_softmax_lse": True, "schedule": schedule,
        "output_scale": None if scale is None else torch.tensor([scale]),
    }  # fmt: skip
    with fill_partial_outputs():
        out, lse = kernels(backend="sm90").sparse_atten_func(**on_gpu(call))
    wide = {name: call[name].float() for name in ("q", "k", "v")}
    want = kernels(backend="reference").sparse_atten_func(**{**call, **wide})
    require_close("out", out, want[0])
    require_close("lse", lse, want[1])


def differentiate(ratio: int, dq_accumulation: str, *, deterministic: bool = False) -> None:
    """Delta, task build, main kernel and postprocess, with NaN in the workspace's padding."""
    from msa_vendored.reference import BackwardSchedule
    from msa_vendored.reference.cases import invert_selection, make_case, plan_workspace

    case = make_case(LENGTHS, topk=4, index_heads=2, heads_per_index_head=ratio)
    cu, workspace = case.cu_seqlens_q, plan_workspace(case.cu_seqlens_q)
    row_ptr, q_indices, forward = invert_selection(case)
    out, lse = kernels(backend="reference").sparse_atten_func(
        case.q, case.k, case.v, row_ptr, q_indices, 4, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True,
        max_seqlen_q=case.max_seqlen_q, max_seqlen_k=case.max_seqlen_k, return_softmax_lse=True, schedule=forward,
    )  # fmt: skip
    schedule = BackwardSchedule(
        row_ptr, q_indices, forward.scheduler_metadata, forward.work_count, cu, workspace.starts
    )
    operands = {"q": case.q, "grad_out": case.grad_out, "out": out}
    exact = {name: tensor.float() for name, tensor in operands.items()} | {"lse": lse.float()}
    exact |= {f"{name}_aligned": workspace.align(getattr(case, name)).float() for name in "kv"}
    operands |= {f"{name}_aligned": workspace.align(getattr(case, name), torch.nan) for name in "kv"} | {"lse": lse}
    want = kernels(backend="reference").run_backward(**exact, schedule=schedule)
    moved = BackwardSchedule(*(on_gpu(getattr(schedule, f.name)) for f in fields(schedule)))
    got = kernels(backend="sm90").run_backward(
        **on_gpu(operands), schedule=moved, dq_accumulation=dq_accumulation, deterministic=deterministic, check=True
    )
    for name, mine, theirs in zip(("dq", "dk", "dv"), got, want, strict=True):
        require_close(name, mine, theirs)


CASES: dict[str, Callable[[], None]] = {
    "index": build_index,
    "score": score_blocks,
    "select in two kernels": lambda: select(4, fused=False),
    "select in one kernel": lambda: select(4, fused=True),
    "forward": lambda: attend(16, 4),
    "forward, ratio 2, scaled": lambda: attend(2, 4, 2.5),
    "backward, bf16 sums": lambda: differentiate(16, "bf16"),
    "backward, fp16 sums": lambda: differentiate(16, "fp16"),
    "backward, fp32 sums": lambda: differentiate(16, "fp32"),
    "backward, ratio 2": lambda: differentiate(2, "bf16"),
    "backward, deterministic": lambda: differentiate(16, "bf16", deterministic=True),
}


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """A ``@cute.kernel``: file below the package, class if it is a method, and name."""

    file: str
    owner: str
    name: str

    def is_launched_as(self, symbol: str) -> bool:
        """Whether a symbol is this function's: the DSL appends module and class of ``self`` to the name."""
        module = self.file.removesuffix(".py").replace("/", "")
        suffix = f"{msa_vendored.__name__}{module}{self.owner}" if self.owner else ""
        return symbol.startswith(f"kernel_cutlass_{self.name}_{suffix}")


def list_device_functions() -> list[DeviceFunction]:
    """Every device function that an SM90 launcher may launch, from the source."""

    def is_kernel(node: ast.AST) -> bool:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        return any(ast.unparse(decorator) == "cute.kernel" for decorator in decorators)

    found = []
    for path in sorted([*PACKAGE.glob("hopper/*.py"), *PACKAGE.glob("backward/*.py")]):
        if path.name in OTHER_ARCHITECTURES:
            continue
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            owner = node.name if isinstance(node, ast.ClassDef) else ""
            found += [DeviceFunction(name, owner, f.name) for f in members if is_kernel(f)]  # type: ignore[attr-defined]
    return found


def run_cases(chosen: Sequence[str]) -> None:
    """Run cases in this process, with a line for each."""
    for name in chosen:
        CASES[name]()
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


def trace_cases(chosen: Sequence[str]) -> list[str]:
    """Run cases; names of the kernels that they launched."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run_cases(chosen)
    return sorted({event.key for event in trace.key_averages()})


def tool_command(sanitizer: str, tool: str, chosen: Sequence[str]) -> list[str]:
    """The command line of one tool. Only initcheck follows torch's kernels: it must see what they write."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_EXIT_CODE)]
    command += ["--print-limit", "0" if tool == "racecheck" else "100"]  # racecheck's are few, and read one by one
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch asks for what is not there; ours raise in the process
    if tool != "initcheck":
        command += ["--kernel-name", "kns=kernel_cutlass"]
    return [*command, sys.executable, "-m", "sanitize_kernels", "--run", json.dumps(list(chosen))]


def run_tools(
    sanitizer: str, tools: Sequence[str], chosen: Sequence[str], logs: Path
) -> Iterator[tuple[str, list[str]]]:
    """Run the tools at once; gives each with its problems, as it ends in order."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = []
    for tool in tools:
        with (logs / f"{tool}.log").open("w") as log:
            command = tool_command(sanitizer, tool, chosen)
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    for tool, process in zip(tools, running, strict=True):
        try:
            process.wait(TOOL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        returncode, output = process.wait(), (logs / f"{tool}.log").read_text(errors="replace")
        yield tool, find_problems(tool, returncode, output, len(chosen), FOUND_EXIT_CODE)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m sanitize_kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated")
    parser.add_argument("--only", default="", help="cases whose names contain this; the coverage is not checked then")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--logs", type=Path, help="folder that is left with each tool's output")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run is not None:
        run_cases(options.run)
        return 0
    chosen = [name for name in CASES if options.only in name]
    folder = kernel_cache_folder()
    if shutil.which(options.sanitizer) is None or not chosen or folder is None:
        parser.error(f"needs {options.sanitizer}, a case named like {options.only!r}, and {CACHE_VARIABLE} not off")
    # Line numbers in the code, which is otherwise the same; beside the kernels of others, whose names do not say so.
    os.environ.update({"CUTE_DSL_LINEINFO": "1", CACHE_VARIABLE: str(folder / "lineinfo")})
    launched = trace_cases(chosen)
    functions = [] if options.only else list_device_functions()
    missed = [f for f in functions if not any(f.is_launched_as(symbol) for symbol in launched)]
    problems = [f"no case launches {f.file}: {f.owner} {f.name}" for f in missed]
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for tool, found in run_tools(options.sanitizer, options.tools.split(","), chosen, logs):
            print(f"{tool}: {'clean' if not found else f'{len(found)} problems'}", flush=True)
            problems += found
    print(f"{len(functions) - len(missed)} of {len(functions)} device functions, {len(chosen)} cases")
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
