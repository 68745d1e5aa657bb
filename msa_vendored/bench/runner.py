"""Runs every implementation on every case, and keeps going when one fails."""

from __future__ import annotations

import gc
import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

import msa_vendored
from msa_vendored.bench.check import compare_sample
from msa_vendored.bench.errors import BenchArgumentError, PeerMissingError, TimeLimitError
from msa_vendored.bench.implementations import OURS, Implementation
from msa_vendored.bench.timing import (
    BUDGET_S,
    LIMIT_S,
    Timing,
    measure_copy_tb_per_s,
    measure_peak_tflops,
    time_calls,
    time_limit,
)
from msa_vendored.bench.workload import (
    QUERY_HEADS,
    RATIO,
    Case,
    Operands,
    forward_flops,
    make_operands,
    score_flops,
)

SCHEMA = 1
BACKWARD_PER_FORWARD = 2.5
"""FLOPs of the backward's five GEMMs over the forward's two."""

ERROR_LIMITS = {"out": 6e-3, "dq": 6e-3, "dk": 6e-3, "dv": 6e-3, "lse": 1e-3}
"""Relative L2 against float32, and absolute for the LSE, beyond which a result counts as wrong and not as rounded:
twice what implementations in bf16 show (2.1e-3 to 3.0e-3)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, or why there is none.

    Attributes:
        case: its name.
        selection: how blocks were selected.
        tokens: of the case.
        documents: of the case.
        implementation: name.
        dense: whether FLOPs count all earlier keys.
        part: "forward", "backward", …; empty for a failure or an absence.
        timing: None if there is none.
        tflops: exact causal FLOPs / median; None for parts that are no attention.
        errors: of the sample, by tensor; the same for all parts of an implementation and case.
        note: what the time includes, or the error.
        status: "ok", "wrong" (an error above its limit), "absent", "skipped" or "failed".
        peak_bytes: memory that the part needed on top of its operands.
    """

    case: str
    selection: str
    tokens: int
    documents: int
    implementation: str
    dense: bool
    part: str = ""
    timing: Timing | None = None
    tflops: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    status: str = "ok"
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a run found; ``to_dict`` is the JSON form, and ``from_dict`` reads it."""

    environment: dict[str, Any]
    peak_tflops: float
    copy_tb_per_s: float
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, schema 1; times in milliseconds."""
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "peak_tflops": self.peak_tflops,
            "copy_tb_per_s": self.copy_tb_per_s,
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Report:
        """The report of a JSON document.

        Raises:
            BenchArgumentError: it has another schema.
        """
        if document.get("schema") != SCHEMA:
            raise BenchArgumentError(
                "these are no results of this benchmark",
                where="schema",
                expected=str(SCHEMA),
                got=repr(document.get("schema")),
            )
        rows = ({**row, "timing": row["timing"] and Timing(**row["timing"])} for row in document["rows"])
        measured = document["peak_tflops"], document["copy_tb_per_s"]
        return cls(document["environment"], *measured, tuple(Row(**row) for row in rows))


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        iterations: timed calls of each part; at least 20 for a median worth quoting.
        operand_sets: sets of operands that calls rotate over.
        seed: of the first set.
        check: compare a sample with float32.
        budget_s: seconds of timed calls of a part, see :func:`~msa_vendored.bench.timing.time_calls`.
        every_selection: sparse peers run every selection, not only the first.
        limit_s: seconds for one implementation in one case, compilation included.
    """

    iterations: int = 20
    operand_sets: int = 2
    seed: int = 1
    check: bool = True
    budget_s: float = BUDGET_S
    every_selection: bool = False
    limit_s: float = LIMIT_S


def describe_environment() -> dict[str, Any]:
    """Card, driver and versions.

    Raises:
        BenchArgumentError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise BenchArgumentError(
            "the benchmark needs a CUDA device", where="torch.cuda", expected="an NVIDIA GPU", got="none"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    packages = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "flash-msa", "triton")
    return {
        "card": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "msa_vendored": msa_vendored.__version__,
        "packages": {name: version for name in packages if (version := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _driver_version() -> str:
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"


def run_benchmark(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    settings: Settings,
    advance: Callable[[str], None],
) -> Iterator[Report]:
    """Measure everything on the current device; yields what is known so far after each of them.

    An implementation that exceeds the time limit in one case is left out of later ones.

    Args:
        cases: workloads, in order.
        implementations: in order.
        settings: how.
        advance: called with a label before each implementation of each case.
    """
    environment = describe_environment()
    peak, copy = measure_peak_tflops(), measure_copy_tb_per_s()
    versions = {peer.name: find_version(peer) for peer in implementations}
    environment["implementations"] = {name: version for name, (version, _) in versions.items()}
    rows: list[Row] = []
    late: set[str] = set()
    for case in cases:
        operand_sets: list[Operands] = []
        for peer in implementations:
            advance(f"{case.name} {case.selection}: {peer.name}")
            version, present = versions[peer.name]
            reason = find_reason(case, peer, cases, settings, late) if present else version
            if reason is not None:
                rows.append(_row(case, peer, note=reason, status="skipped" if present else "absent"))
                continue
            operand_sets = operand_sets or _draw_operands(case, settings)
            rows += run_guarded(case, peer, operand_sets, settings)
            late |= {row.implementation for row in rows[-1:] if TimeLimitError.__name__ in row.note}
            free_memory()
            yield Report(environment, peak, copy, tuple(rows))
        del operand_sets
        free_memory()
    yield Report(environment, peak, copy, tuple(rows))


def find_reason(
    case: Case, peer: Implementation, cases: Sequence[Case], settings: Settings, late: set[str]
) -> str | None:
    """Why a peer that is there does not run a case; None if it does. ``late``: names of those that took too long."""
    if peer.name in late:
        return f"it took more than {settings.limit_s:g} s in an earlier case"
    return peer.refuse(case) or find_repetition(case, peer, cases, every=settings.every_selection)


def find_version(peer: Implementation) -> tuple[str, bool]:
    """Version of an implementation and True, or why it is not there and False."""
    try:
        return peer.find_version(), True
    except PeerMissingError as error:
        return error.what, False


def find_repetition(case: Case, peer: Implementation, cases: Sequence[Case], *, every: bool) -> str | None:
    """Why a peer need not run a case: another selection of the same documents came before.

    Args:
        case: to run or not.
        peer: ours run everything.
        cases: all, in order.
        every: sparse peers run every selection; dense ones take none.
    """
    before = next((other for other in cases if other.lengths == case.lengths), case)
    if before.selection == case.selection or peer.name == OURS or (every and not peer.dense):
        return None
    return f"{'dense attention takes none' if peer.dense else 'a peer runs one selection'}: see {before.selection}"


def _draw_operands(case: Case, settings: Settings) -> list[Operands]:
    device = torch.device("cuda", torch.cuda.current_device())
    return [make_operands(case, device, settings.seed + index) for index in range(settings.operand_sets)]


def run_guarded(case: Case, peer: Implementation, operand_sets: Sequence[Operands], settings: Settings) -> list[Row]:
    """Rows of one implementation on one case; if it fails, what it gave until then and a row with its error."""
    rows: list[Row] = []
    try:
        with time_limit(settings.limit_s):
            rows.extend(run_implementation(case, peer, operand_sets, settings))
    except Exception as error:  # noqa: BLE001 -- a peer may raise anything; it is reported, and the run goes on
        lines = traceback.format_exception_only(error)[-1].strip().splitlines()
        rows.append(_row(case, peer, note=lines[0][:300], status="failed"))
    return rows


def run_implementation(
    case: Case, peer: Implementation, operand_sets: Sequence[Operands], settings: Settings
) -> Iterator[Row]:
    """Check on the first set of operands, then time every part over all sets."""
    prepared = [peer.prepare(operands) for operands in operand_sets]
    errors = compare_sample(operand_sets[0], prepared[0].results(), dense=peer.dense) if settings.check else {}
    wrong = any(not error <= ERROR_LIMITS[name] for name, error in errors.items())
    pairs = sum(operands.sparse_pairs for operands in operand_sets) / len(operand_sets)
    for part in prepared[0].parts:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls = [each.parts[part] for each in prepared]
        timing = time_calls(calls, iterations=settings.iterations, budget_s=settings.budget_s)
        flops = count_flops(part, case, pairs, dense=peer.dense)
        yield _row(
            case,
            peer,
            part=part,
            timing=timing,
            tflops=None if flops is None else flops / timing.median_ms / 1e9,
            errors=errors,
            note=prepared[0].note,
            status="wrong" if wrong else "ok",
            peak_bytes=torch.cuda.max_memory_allocated() - before,
        )


def count_flops(part: str, case: Case, sparse_pairs: float, *, dense: bool) -> float | None:
    """Exact FLOPs of a part; None for parts without GEMMs."""
    forward = forward_flops(case.dense_pairs, QUERY_HEADS) if dense else forward_flops(1, RATIO) * sparse_pairs
    both = 1 + BACKWARD_PER_FORWARD
    factors = {
        "forward": 1.0,
        "autograd forward": 1.0,
        "backward": BACKWARD_PER_FORWARD,
        "autograd forward + backward": both,
    }
    if part == "select":
        return float(score_flops(case))
    return factors[part] * forward if part in factors else None


def _row(case: Case, peer: Implementation, **values: Any) -> Row:
    return Row(case.name, case.selection, case.tokens, len(case.lengths), peer.name, peer.dense, **values)


def free_memory() -> None:
    """Give memory back between implementations, so that one's peak is not another's."""
    gc.collect()
    torch.cuda.empty_cache()
