"""The official kernels as subjects of the mutation, second-opinion and speed sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ptx_emulator.attention_case import compare_attention
from ptx_emulator.launch import EmulationError, Options
from ptx_emulator.official import (
    LSE_TOLERANCE,
    OUT_TOLERANCE,
    SUPPRESSIONS,
    Case,
    Official,
    Problem,
    make_problem,
)
from ptx_emulator.subjects import Outcome, Subject


def schedule_subject() -> Subject:
    """The schedule kernel: the list of work for the forward."""
    return _subject("PrepareFlatSchedule")


def split_subject() -> Subject:
    """The split: which partial result each query gets from each key block."""
    return _subject("PrepareFwdSplit")


def forward_subject() -> Subject:
    """The forward."""
    return _subject("SparseAttentionForwardSm100")


def combine_subject() -> Subject:
    """The combine. Its loop over the splits ends where the LSE says: data."""
    assumptions = {"representative_branches": True, "bounded_computation_loops": True}
    settings = {"assumptions": assumptions, "data_branch_loop_iterations": 2}
    return _subject("SparseAttentionForwardCombine", settings, tiny_tokens=8)


def _subject(entry_part: str, verifier: dict[str, Any] | None = None, tiny_tokens: int = 12) -> Subject:
    official = Official()
    # Tokens of each document x 16 heads fill whole tiles of 64 rows in the combine; else it reads shared memory that
    # nothing wrote (docs/findings/). One SM: many tiles a CTA, so that every pipeline wraps.
    case, tiny = (Case(lengths, topk=4, index_heads=1, sm_count=1) for lengths in ((200, 12), (tiny_tokens,)))
    wide = Case((100, 61), topk=4, index_heads=4, sm_count=8)
    run, run_tiny, run_wide = (_make_run(official, c) for c in (case, tiny, wide))
    run(Options(checks=frozenset()))
    function, entry = next((f, n) for f in official.functions for n in f.kernels if entry_part in n)
    words = "documents of 200 and 12 tokens, 16/1 heads, top-k 4, one SM"
    spread = ("documents of 100 and 61 tokens, 64/4 heads, top-k 4, 8 SMs", run_wide)
    settings = (function.function.__ptx__, run_tiny, verifier or {})
    return Subject(words, function.kernels, entry, run, *settings, spread=spread)


def _make_run(official: Official, case: Case) -> Callable[[Options], Outcome]:
    problem = make_problem(case)

    def run(options: Options) -> Outcome:
        official.sm_count = case.sm_count
        return _run_subject(official, problem, options)

    return run


def _run_subject(official: Official, problem: Problem, options: Options) -> Outcome:
    try:
        got = official.call(problem, replace(options, suppress=SUPPRESSIONS))
    except EmulationError as error:
        return Outcome(error.report)
    out_error, lse_error = compare_attention(got, problem.expected)
    wrong = {"O"} if not out_error <= OUT_TOLERANCE else set()
    wrong |= {"LSE"} if not lse_error <= LSE_TOLERANCE else set()
    return Outcome(official.report, frozenset(wrong))
