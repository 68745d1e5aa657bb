"""What compute-sanitizer says in its output, and which of racecheck's reports are known to be no races."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msa_vendored

PACKAGE = Path(msa_vendored.__file__).resolve().parent

HANDED_OVER = {
    ("forward_*.py", "load"): "fields of a segment, for the consumers and the warps that clear V and store O",
    ("forward_*.py", "publish_queries"): "queries of a tile, for the consumers",
    ("forward_*.py", "clear_tails"): "zeroed rows of V, for the consumers' wgmma",
    ("sm90_load.py", "load_places"): "place and flags of a task, for the consumers",
    ("sm90_load.py", "load_token_rows"): "token rows of a task, for the consumers",
    ("sm90_load.py", "load_rows"): "lse and delta of a task, for the consumers",
}
"""Functions, by pattern of the file and name, whose writes to shared memory one lane announces for its warp: all lanes
write, ``bar.warp.sync`` orders that before the elected lane's ``mbarrier.arrive`` (release), and readers wait on the
barrier (acquire). PTX's causality order is transitive; racecheck takes only the arriving lane's own writes as
published, and reports the other lanes'. Evidence: with an arrival of every lane, and counts to match, it reports
nothing (docs/hopper_log.md)."""

OWN_BYTES = {
    ("combine.py", "copy_batch"): "a stage of partial outputs: each lane copies into 16 bytes that it alone reads"
}
"""Functions whose ``cp.async`` writes over what the same lane's earlier one wrote: it has waited for that with
``cp.async.wait_group`` and read it. racecheck does not order two asynchronous writes of one lane, and warns."""

_REPORT = re.compile(r"=+ (Error|Warning|Invalid|Uninit|Barrier|Race)")
_ACCESS = re.compile(r"(Write|Read|Atomic) access at .*?\+0x[0-9a-f]+(?: in (\S+):(\d+))?")
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)")


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a race: "Write", "Read" or "Atomic", and file name and function if the code has line numbers."""

    kind: str
    file: str
    function: str


@cache
def find_function(file: str, line: int) -> str:
    """Innermost function of one of our kernel files that a line lies in; empty if there is none."""
    found: list[tuple[int, str]] = []
    for path in [*PACKAGE.glob(f"hopper/{file}"), *PACKAGE.glob(f"backward/{file}")]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        found += [(f.lineno, f.name) for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    return max(found, default=(0, ""))[1]


def read_races(output: str) -> list[tuple[str, list[Access]]]:
    """Every report of racecheck: its first line, and the accesses that it pairs, the first with each other one."""
    races: list[tuple[str, list[Access]]] = []
    for line in output.splitlines():
        match = _ACCESS.search(line)
        if match is None:
            continue
        file = Path(match[2] or "").name
        access = Access(match[1], file, find_function(file, int(match[3])) if file else "")
        if "Race reported between" in line:
            races.append((line, [access]))
        elif races:
            races[-1][1].append(access)
    return races


def is_handed_over(accesses: list[Access]) -> bool:
    """Whether every pair of a report has a write of :data:`HANDED_OVER` on one side and a read on the other."""
    first, others = accesses[0], accesses[1:]

    def announced(access: Access) -> bool:
        places = [function for pattern, function in HANDED_OVER if fnmatch(access.file, pattern)]
        return access.kind == "Write" and access.function in places

    def fits(other: Access) -> bool:
        return (announced(first) and other.kind == "Read") or (announced(other) and first.kind == "Read")

    return bool(others) and all(fits(other) for other in others)


def overwrites_own_bytes(accesses: list[Access]) -> bool:
    """Whether a report pairs nothing but writes of one function of :data:`OWN_BYTES`."""
    places = {(access.file, access.function) for access in accesses}
    return (
        len(accesses) > 1
        and len(places) == 1
        and places <= OWN_BYTES.keys()
        and all(access.kind == "Write" for access in accesses)
    )


def find_problems(tool: str, returncode: int, output: str, cases: int, exit_code: int) -> list[str]:
    """Why a run of a tool does not count as clean: what it reports, or that it did not do its work.

    Args:
        tool: its name.
        returncode: of its process.
        output: all of it, with every report.
        cases: how many must have run.
        exit_code: what it was told to return if it reports anything.
    """
    races = read_races(output) if tool == "racecheck" else []
    known = [line for line, accesses in races if is_handed_over(accesses) or overwrites_own_bytes(accesses)]
    problems = [line for line in output.splitlines() if _REPORT.match(line) and line not in known]
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    if not summaries:
        problems.append("the tool printed no summary")
    elif sum(summaries) != len(known):
        problems.append(f"the summary counts {sum(summaries)}, {len(known)} of them known")
    if (ran := len(re.findall(r"^ran ", output, re.MULTILINE))) != cases:
        problems.append(f"{ran} of {cases} cases ran")
    if returncode != (exit_code if known else 0) and not problems:
        problems.append(f"exit status {returncode}")
    return [f"{tool}: {problem}" for problem in problems]
