"""Counts what the SM100 main backward kernel executes: ``python -m sm100_cost [ratio] [bf16|fp32]``.

Dynamic PTX warp instructions of each role, fitted to tiles, segments, CTAs with work and CTAs without over several
walks of one problem, and how often each kind of instruction runs for one tile. Retries of waits are included.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import sm100_backward as lab
from ptx_emulator import cute_host
from ptx_emulator.launch import Options
from ptx_emulator.report import Report
from sm100_cases import Case, count_segments, make_problem

ROLES = ("start", "mma", "load", "rows", "compute", "reduce")
PARTS = ("f32x2",)
"""Of KINDS: may stand anywhere in the opcode."""
WALKS = ((1, 64, 1), (2, 64, 2), (4, 64, 24), (8, 16, 8), (16, 8, 20), (3, 5, 3), (30, 3, 40), (1, 64, 50))
"""CTAs of the walk, tasks of a chunk at most, and CTAs that are launched."""
KINDS = (
    "tcgen05.mma", "tcgen05.commit", "tcgen05.ld", "tcgen05.st", "tcgen05.wait::ld", "tcgen05.wait::st",
    "fence.proxy.async", "red.", "shfl", "cp.async.bulk.tensor", "cp.async.cg", "ex2", "f32x2", "cvt.rn.bf16x2",
    "ld.shared", "st.shared", "mbarrier.try_wait", "mbarrier.arrive", "mov",
)  # fmt: skip


def split_roles(program: Any, gathers: bool) -> dict[str, range]:
    """Program counters of each role. Each reads %ctaid.x first thing, and their code is laid out one after another."""
    marker = re.compile(r"mov\.u32\s+%r\d+, %ctaid\.x")
    size = len(program.instructions)
    marks = [pc for pc in range(size) if marker.search(program.statement(pc).text)]
    roles = (*ROLES[:4], "gather", *ROLES[4:]) if gathers else ROLES
    # The first is the test whether this CTA has work.
    starts = [0, *marks[1:], size]
    if len(starts) != len(roles) + 1:
        raise AssertionError(f"{len(starts) - 1} roles found, {roles} expected")
    return {role: range(a, b) for role, a, b in zip(roles, starts, starts[1:], strict=False)}


def count(case: Case, ctas: int) -> tuple[dict[str, int], dict[str, Counter[str]], tuple[int, int, int, int]]:
    """Instructions of each role, by kind as well, and (tiles, segments, CTAs with and without work)."""
    problem = make_problem(case)
    function = lab.compile_kernel(case.ratio, case.accumulation)
    (kernel,) = function.kernels.values()
    lab.launch(replace(case, ctas=ctas), problem, Options("eager", 0, frozenset()), Report())
    profile, program = kernel.interpreter.profile(), kernel.program
    totals, kinds = {}, {}
    for role, pcs in split_roles(program, case.ratio < 8).items():
        totals[role] = sum(profile[pc] for pc in pcs)
        tally: Counter[str] = Counter()
        for pc in pcs:
            text = program.statement(pc).text
            opcode = re.sub(r"^@!?\S+\s+|^\{\s*", "", text)
            tally.update(
                {kind: profile[pc] for kind in KINDS if opcode.startswith(kind) or (kind in PARTS and kind in opcode)}
            )
        kinds[role] = tally
    chunks = int(problem.descriptor[4])
    return (
        totals,
        kinds,
        (problem.meta.shape[0], count_segments(problem, ctas), min(chunks, ctas), max(0, ctas - chunks)),
    )


def main() -> int:
    """Print the table."""
    ratio = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    accumulation = sys.argv[2] if len(sys.argv) > 2 else "bf16"
    cute_host.prepare()
    rows, sizes, kinds = [], [], []
    for ctas, chunk, launched in WALKS:
        case = Case((400,), ratio=ratio, accumulation=accumulation, ctas=ctas, chunk=chunk, poison=math.nan)
        totals, kind, size = count(case, launched)
        rows.append(totals)
        sizes.append(size)
        kinds.append(kind)
    matrix = np.array(sizes, float)
    print(f"ratio {ratio}, dQ {accumulation}; walks (tiles, segments, active, empty CTAs): {sizes}")
    columns = ("role", "per tile", "per segment", "per active CTA", "per empty CTA", "largest residual")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for role in [*rows[0], "total"]:
        values = np.array([sum(r.values()) if role == "total" else r[role] for r in rows], float)
        fit = np.linalg.lstsq(matrix, values, rcond=None)[0]
        residual = np.abs(matrix @ fit - values).max() / values.max()
        print(f"| {role} | " + " | ".join(f"{x:,.0f}" for x in fit) + f" | {residual:.1%} |")
    print("\nper tile and per segment, fitted, by kind:")
    for name in KINDS:
        for role in rows[0]:
            values = np.array([tally[role][name] for tally in kinds], float)
            if values.any():
                fit = np.linalg.lstsq(matrix, values, rcond=None)[0]
                print(f"  {name:24} {role:8} {fit[0]:9.1f} {fit[1]:9.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
