"""Deletes each executed synchronisation instruction of a kernel in turn: ``python -m ptx_emulator.mutate forward``.

A deletion is *caught* if a run deadlocks, faults, gives a wrong result or has a finding that the whole kernel has not.
A survivor had no finding under any schedule: with it gone, every conflicting pair of accesses that was executed is
still ordered in the happens-before model, by something else. That is redundancy on the paths that ran, as far as the
model sees (docs/emulator.md says where it is blind), and no more.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ptx_emulator.launch import EmulationError, Kernel
from ptx_emulator.lower import KIND_NUMBERS, ROLES, Program
from ptx_emulator.official import Case, Official, Result

NAMES = {
    "MB_INIT": "mbarrier.init",
    "MB_WAIT": "mbarrier wait",
    "MB_ARRIVE": "mbarrier.arrive",
    "MB_ARRIVE_TX": "mbarrier.arrive.expect_tx",
    "MB_EXPECT_TX": "mbarrier.expect_tx",
    "BAR": "bar.sync, bar.arrive",
    "FENCE_PROXY": "fence.proxy.async",
    "FENCE_MBAR_INIT": "fence.mbarrier_init",
    "T5_WAIT": "tcgen05.wait",
    "T5_COMMIT": "tcgen05.commit",
    "BULK_WAIT": "cp.async.bulk.wait_group",
    "CP_ARRIVE": "cp.async.mbarrier.arrive",
    "CP_WAIT": "cp.async.wait_group",
    "CP_COMMIT": "cp.async.commit_group",
    "SYNCWARP": "bar.warp.sync",
}
"""Kinds that are deleted, and how the table calls them."""

KERNELS = {"forward": "SparseAttentionForwardSm100", "combine": "SparseAttentionForwardCombine"}
SCHEDULES = (("eager", 0, True), ("lazy", 0, True), ("random", 1, True), ("random", 2, True))
# Tokens of each document x 16 heads fill whole tiles of 64 rows in the combine; else it reads shared memory that
# nothing wrote (docs/findings/).
CASE = Case((200, 12), topk=4, index_heads=1, sm_count=1, schedules=SCHEDULES)
OUT_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3
INSTRUCTION_LIMIT = 4_000_000
"""Four times what the whole kernel takes: a mutant that spins is stopped early."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One deletion and what noticed it: signs of wrong results and findings."""

    kind: str
    place: str
    functional: frozenset[str]
    strict: frozenset[str]

    @property
    def verdict(self) -> str:
        """``functional``, ``strict`` or ``survived``."""
        return "functional" if self.functional else "strict" if self.strict else "survived"


def delete(pc: int) -> Callable[[Program], None]:
    """A change that makes one instruction do nothing; a wait always succeeds."""

    def change(program: Program) -> None:
        kind, guard, negated, _, _, _, _, at, _ = program.instructions[pc]
        if kind == KIND_NUMBERS["MB_WAIT"]:
            target = len(program.operands)
            program.operands += [program.operands[at + 1], -1]
            program.roles += [ROLES["define_predicate"], ROLES["none"]]
            program.instructions[pc] = (KIND_NUMBERS["PRED_MOV"], guard, negated, 0, 0, 0, 2, target, 1)
        else:
            program.instructions[pc] = (KIND_NUMBERS["NOP"], -1, 0, 0, 0, 0, 0, at, 0)

    return change


def mutate(which: str, limit: int | None = None) -> list[Mutant]:
    """Try every deletion in one of the official kernels.

    Raises:
        AssertionError: the whole kernel is not right or not clean to begin with.
    """
    official = Official()
    for result in official.run(CASE):
        if _wrong(result) or result.findings:
            raise AssertionError(f"not right before any deletion: {result.findings}")
    function, name = next((f, n) for f in official.functions for n in f.kernels if KERNELS[which] in n)
    whole: Kernel = function.kernels[name]
    executed = whole.interpreter.profile()
    names = {KIND_NUMBERS[kind]: text for kind, text in NAMES.items()}
    mutants = []
    for pc, instruction in enumerate(whole.program.instructions):
        if instruction[0] not in names or not executed[pc]:
            continue
        function.kernels[name] = Kernel(whole.entry, delete(pc))
        statement = whole.program.statement(pc)
        place = f"line {statement.line}: {statement.text[:70]} ({statement.source})"
        mutants.append(_try(official, names[instruction[0]], place))
        function.kernels[name] = whole
        if limit is not None and len(mutants) >= limit:
            break
    return mutants


def _try(official: Official, kind: str, place: str) -> Mutant:
    functional, strict = set(), set()
    for schedule in SCHEDULES:
        try:
            (result,) = official.run(replace(CASE, schedules=(schedule,), max_instructions=INSTRUCTION_LIMIT))
        except EmulationError as error:
            functional.add(error.report.fatal.kind if error.report.fatal else "fault")
            continue
        functional |= _wrong(result)
        strict |= set(result.kinds)
    return Mutant(kind, place, frozenset(functional), frozenset(strict))


def _wrong(result: Result) -> set[str]:
    good = result.out_error <= OUT_TOLERANCE and result.lse_error <= LSE_TOLERANCE and not result.nans
    return set() if good else {"wrong result"}


def format_table(mutants: Sequence[Mutant]) -> str:
    """Counts by kind of instruction and verdict, then the survivors."""
    counts = Counter((mutant.kind, mutant.verdict) for mutant in mutants)
    lines = [f"{'deleted':28}{'all':>5}{'functional':>12}{'strict only':>13}{'survived':>10}"]
    for kind in dict.fromkeys(NAMES.values()):
        row = [counts[kind, verdict] for verdict in ("functional", "strict", "survived")]
        if sum(row):
            lines.append(f"{kind:28}{sum(row):5}{row[0]:12}{row[1]:13}{row[2]:10}")
    total = [sum(m.verdict == verdict for m in mutants) for verdict in ("functional", "strict", "survived")]
    lines.append(f"{'total':28}{len(mutants):5}{total[0]:12}{total[1]:13}{total[2]:10}")
    lines += ["", "survivors:", *(f"  {m.kind}: {m.place}" for m in mutants if m.verdict == "survived")]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--limit", type=int, help="stop after so many deletions")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    mutants = mutate(options.kernel, options.limit)
    print(format_table(mutants))
    print(f"\n{len(mutants)} deletions x {len(SCHEDULES)} schedules in {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
