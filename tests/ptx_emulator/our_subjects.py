"""Our own kernels as subjects of the mutation, second-opinion and speed sessions.

Each builder is a small case of one launcher, run through the helpers of that launcher's own tests. A function of
several kernels gives a subject for each. What an assertion or exception of the helper says is a wrong result: a
mutant may leave tables that the reference cannot even read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ptx_emulator import cute_host
from ptx_emulator.launch import EmulationError, Kernel, Options
from ptx_emulator.report import Report, Suppression
from ptx_emulator.subjects import Outcome, Subject


class Loader:
    """In place of ``load_kernel``: compiles with the DSL, launches in the emulator with the current options."""

    def __init__(self, arch: str, prepared: bool = False) -> None:
        if not prepared:
            cute_host.prepare(arch)
        self.arch = arch
        self.options, self.report = Options(), Report()
        self.functions: dict[Any, cute_host.CompiledFunction] = {}

    def load(self, compile_stage: Callable[..., Any], **options: Any) -> Callable[..., None]:
        """What a launcher calls to get its kernel."""
        key = f"{compile_stage.__module__}.{compile_stage.__qualname__} {sorted(options.items())}"
        if key not in self.functions:
            self.functions[key] = cute_host.CompiledFunction(compile_stage(**options))
        return lambda *arguments: self.functions[key].run(arguments, self.options, self.report)

    def subjects(
        self,
        check: Callable[[], set[str] | None],
        parts: Mapping[str, str],
        case: str,
        suppress: Sequence[Suppression] = (),
        tiny: Callable[[], set[str] | None] | None = None,
        verifier: Mapping[str, Any] | None = None,
        spread: tuple[str, Callable[[], set[str] | None]] | None = None,
    ) -> list[Subject]:
        """A subject for each kernel that ``check`` launches and whose entry contains one of the parts.

        Args:
            check: runs a case through :meth:`load`; the names of wrong results, or an exception.
            parts: label of each kernel to a text that only its entry name contains.
            case: in words.
            suppress: findings that are expected.
            tiny: as ``check``, a smaller case.
            verifier: settings for the static verifier.
            spread: as ``case`` and ``check``, a larger case with several CTAs.
        """

        def run(options: Options) -> Outcome:
            return self._run(check, replace(options, suppress=tuple(suppress)))

        def run_tiny(options: Options) -> Outcome:
            return self._run(tiny or check, replace(options, suppress=tuple(suppress)))

        def run_spread(options: Options) -> Outcome:
            return self._run(spread[1] if spread else check, replace(options, suppress=tuple(suppress)))

        first = run(Options(checks=frozenset()))
        if first.wrong:
            raise AssertionError(f"{case}: {sorted(first.wrong)}")
        made = []
        for label, part in parts.items():
            function, entry = self._find(part)
            kernels: dict[str, Kernel] = function.kernels
            settings = (function.function.__ptx__, run_tiny, verifier or {}, label if len(parts) > 1 else "")
            wide = (spread[0], run_spread) if spread else None
            made.append(Subject(case, kernels, entry, run, *settings, spread=wide))
        return made

    def _find(self, part: str) -> tuple[cute_host.CompiledFunction, str]:
        found = [(f, name) for f in self.functions.values() for name in f.kernels if part in name]
        if len(found) != 1:
            raise AssertionError(f"{part!r} is in {len(found)} entries")
        return found[0]

    def _run(self, check: Callable[[], set[str] | None], options: Options) -> Outcome:
        self.options, self.report = options, Report()
        try:
            wrong = check() or set()
        except EmulationError as error:
            return Outcome(error.report)
        except Exception as error:  # noqa: BLE001 -- whatever a mutant's results lead to
            wrong = {f"{type(error).__name__}: {str(error)[:80]}"}
        return Outcome(self.report, frozenset(wrong))


def backward_sm100() -> list[Subject]:
    """The main kernel of the backward on SM100. The verifier gets full tasks: it takes no padding (-1) for a row."""
    loader = Loader("sm_100a")
    import sm100_backward as runs
    from sm100_cases import Case, make_problem

    from msa_vendored.backward.main_sm100 import compile_main

    def make_check(case: Case) -> Callable[[], set[str]]:
        problem = make_problem(case)

        def check() -> set[str]:
            arguments = runs.make_arguments(case, problem)
            loader.load(compile_main, ratio=case.ratio, dq_accumulation=case.accumulation)(*arguments)
            got = runs.read_accumulators(case, arguments[12:-2])
            triples = zip(("dq", "dk", "dv"), got, problem.expected, strict=True)
            limit = runs.MUTATED_TOLERANCE
            return {name for name, a, b in triples if not float((a - b).norm() / b.norm()) <= limit}

        return check

    words = f"documents of {runs.MUTATED.lengths} tokens, 16/1 heads, top-k 2, one CTA"
    small = make_check(Case((8,), topk=1, ctas=1, seed=1))  # one full task; 40 s a question, with three 8 minutes
    spread = (
        "documents of 200 and 100 tokens, 32/2 heads, top-k 4, 4 CTAs",
        make_check(Case((200, 100), key_heads=2, ctas=4)),
    )
    return loader.subjects(make_check(runs.MUTATED), {"": "MainKernel"}, words, tiny=small, spread=spread)


def backward_sm90() -> list[Subject]:
    """The main kernel of the backward on Hopper: several segments a CTA, so that every pipeline wraps."""
    loader = Loader("sm_90a")
    from backward_cases import relative_error
    from backward_sm90 import prepare_call
    from backward_sm90_emulated import Case, problem_of

    from msa_vendored.backward.main_sm90 import compile_main

    def make_check(case: Case) -> Callable[[], set[str]]:
        problem = problem_of(case)

        def check() -> set[str]:
            call = prepare_call(
                problem, dq_accumulation=case.dq_accumulation, grid=case.grid, window=case.window,
                rows_per_chunk=case.rows_per_chunk,
            )  # fmt: skip
            loader.load(compile_main, ratio=case.ratio, dq_accumulation=case.dq_accumulation)(*call.arguments())
            pairs = zip(("dq", "dk", "dv"), call.gradients(), problem.gradients or (), strict=True)
            return {name for name, got, want in pairs if not relative_error(got, want) <= 6e-3}

        return check

    words = "documents of 150 and 3 tokens, 16/1 heads, top-k 2, one CTA"
    case = Case((150, 3), topk=2, grid=1, rows_per_chunk=4)
    wide = make_check(Case((150, 80), topk=2, kv_heads=2, grid=4, rows_per_chunk=4))
    spread = ("documents of 150 and 80 tokens, 32/2 heads, top-k 2, 4 CTAs", wide)
    return loader.subjects(make_check(case), {"": "MainBackwardSm90"}, words, spread=spread)


def tasks() -> list[Subject]:
    """The five kernels that build the task tables."""
    loader = Loader("sm_100a")
    from stage_runs import DeviceTables
    from task_cases import make_task_case

    from msa_vendored.backward.task_build import compile_task_build

    case = make_task_case([127, 129, 1, 2, 3, 5, 128], gap_blocks=1)

    def check() -> None:
        tables = DeviceTables.allocate(case)
        options = {"arch": loader.arch, "ratio": tables.geometry.ratio}
        walk = getattr(tables.geometry, "walk", None)
        build = loader.load(compile_task_build, **options, **({"walk": walk} if walk else {}))
        build(*tables.arguments(case))
        tables.require_equal(case)

    names = ("clear", "read_items", "check_rows", "scan_windows", "count_tasks", "write_tables")
    subjects = []
    for name in names:
        try:
            parts = {name: f"cutlass_{name}_msa_vendoredbackwardtask_build"}
            subjects += [replace(made, label=name) for made in loader.subjects(check, parts, "7 documents, 4 heads")]
        except AssertionError as error:
            if "0 entries" not in str(error):
                raise
    return subjects


def delta() -> list[Subject]:
    """Row sums of O times dO."""
    loader = Loader("sm_100a")
    import torch
    from stage_runs import delta_model, random_bf16

    from msa_vendored.backward.delta import compile_delta

    out, grad = random_bf16(7, 4, 128, seed=1), random_bf16(7, 4, 128, seed=2)

    def check() -> set[str]:
        got = torch.full((7, 4), math.nan)
        loader.load(compile_delta, arch=loader.arch)(out, grad, got)
        return set() if torch.equal(got, delta_model(out, grad)) else {"delta"}

    return loader.subjects(check, {"": "sum_rows"}, "7 tokens, 4 heads")


def postprocess() -> list[Subject]:
    """Sums to gradients in bf16."""
    loader = Loader("sm_100a")
    import torch
    from stage_runs import POOLS, postprocess_arguments

    from msa_vendored.backward.postprocess import compile_postprocess

    dtype, dq_order, dkv_order = POOLS["sm100 bf16"]

    def check() -> set[str]:
        arguments, expected = postprocess_arguments("sm100 bf16", 9, 2, 256)
        options = {"dq_dtype": dtype, "dq_order": dq_order, "dkv_order": dkv_order}
        loader.load(compile_postprocess, arch=loader.arch, **options)(*arguments)
        pairs = (("dq", arguments[1], expected[0]), ("dk, dv", arguments[3], expected[1]))
        return {name for name, got, want in pairs if not torch.equal(got, want)}

    return loader.subjects(check, {"": "Postprocess"}, "9 tokens, 16/2 heads, 256 workspace rows, bf16 sums")


def forward_sm90() -> list[Subject]:
    """The kernels of the forward on Hopper, through its launcher."""
    from ptx_emulator import hopper_forward

    launcher = hopper_forward.Launcher()
    hopper_forward.poison_new_tensors()
    loader = Loader("sm_90a", prepared=True)
    loader.functions = launcher.functions
    suppress = getattr(hopper_forward, "COUNTED", ())
    # The launcher makes its options from the case's; here they are the session's.
    module: Any = hopper_forward
    module.Options = lambda *_a, **_k: loader.options

    def check(case: hopper_forward.Case) -> set[str]:
        try:
            (result,) = launcher.run(case)
        finally:
            loader.report = launcher.report
        wrong = {"O"} if not result.out_error <= 4e-3 else set()
        return wrong | ({"LSE"} if not result.lse_error <= 1e-3 or result.nans else set())

    narrow = partial(check, hopper_forward.Case((133, 5), topk=4, index_heads=1, ctas=1))
    tiny = partial(check, hopper_forward.Case((8,), topk=4, index_heads=1, ctas=1))
    wide = partial(check, hopper_forward.Case((200, 100), topk=4, index_heads=2, ctas=4))
    spread = ("documents of 200 and 100 tokens, 32/2 heads, top-k 4, 4 CTAs", wide)
    parts = {name: name for name in hopper_forward.KERNELS}
    words = "documents of 133 and 5 tokens, 16/1 heads, top-k 4, one CTA"
    return loader.subjects(narrow, parts, words, suppress, tiny=tiny, spread=spread)


def index_sm90() -> list[Subject]:
    """The six kernels of the index on Hopper."""
    loader = Loader("sm_90a")
    from hopper_kernels import run_index

    names = ("map_rows", "count_edges", "scan_chunks", "scan_rows", "place_edges", "write_items")
    parts = {name: f"cutlass_{name}_msa_vendoredhopper" for name in names}
    lengths = [300, 129, 1, 2]
    check = lambda: run_index(loader, lengths, lengths, 4, 2, 16, 0)  # type: ignore[arg-type]  # noqa: E731
    return loader.subjects(check, parts, "documents of 300, 129, 1 and 2 tokens, 2 heads, top-k 4")


def score_sm90() -> list[Subject]:
    """The block scores on Hopper."""
    loader = Loader("sm_90a")
    from hopper_kernels import run_scores

    narrow = partial(run_scores, loader, [130, 37], [300, 37], 4, 1, 1)  # type: ignore[arg-type]
    wide = partial(run_scores, loader, [300, 200], [300, 200], 4, 1, 4)  # type: ignore[arg-type]
    words, spread = "documents of {} tokens, 4/1 heads, {}", "msa_vendoredhopperscore"
    wide_case = (words.format("300 and 200", "4 CTAs"), wide)
    return loader.subjects(narrow, {"": spread}, words.format("130 and 37", "one CTA"), spread=wide_case)


def select_sm90() -> list[Subject]:
    """The ranking of scores on Hopper."""
    loader = Loader("sm_90a")
    from hopper_kernels import run_ranking

    check = lambda: run_ranking(loader, 16)  # type: ignore[arg-type]  # noqa: E731
    return loader.subjects(check, {"": "msa_vendoredhopperselect"}, "2 heads, 40 blocks, 157 queries, 16 of them")
