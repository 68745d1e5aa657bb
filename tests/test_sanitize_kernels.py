"""What the driver of compute-sanitizer makes of a tool's output, and which kernels it knows of; no GPU."""

from __future__ import annotations

import pytest
import sanitize_kernels as driver
import sanitize_reports as reports
import torch

CLEAN = "========= COMPUTE-SANITIZER\nran a\nran b\n========= ERROR SUMMARY: 0 errors\n"
RACE = "========= Error: Race reported between Write access at f and Read access at g [128 hazards]\n"
NO_RACE = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
INVALID = "========= Invalid __global__ read of size 4 bytes\n"


@pytest.mark.parametrize(
    ("output", "returncode", "problems"),
    [
        (CLEAN, 0, []),
        (CLEAN.replace("ERROR SUMMARY: 0 errors", NO_RACE), 0, []),
        (CLEAN, 86, ["exit status 86"]),
        (CLEAN.replace("0 errors", "3 errors"), 0, ["the summary counts 3, 0 of them known"]),
        (CLEAN.replace("ran b\n", ""), 0, ["1 of 2 cases ran"]),
        ("ran a\nran b\n", 0, ["the tool printed no summary"]),
        ("", 1, ["the tool printed no summary", "0 of 2 cases ran"]),
        (RACE + CLEAN, 0, [RACE.strip()]),
        (INVALID + CLEAN, 0, [INVALID.strip()]),
    ],
)  # fmt: skip
def test_only_a_clean_run_counts_as_clean(output: str, returncode: int, problems: list[str]) -> None:
    """Guards a tool that crashed, did not start, or found something, and is taken for clean."""
    assert reports.find_problems("tool", returncode, output, 2, 86) == [f"tool: {problem}" for problem in problems]


def test_every_device_function_is_looked_for() -> None:
    """Guards a kernel that no tool ever saw: functions are read from the source, and told apart by module and class."""
    found = {(f.file, f.name): f for f in driver.list_device_functions()}
    delta, main = found["backward/delta.py", "sum_rows"], found["hopper/forward_main.py", "kernel"]
    assert ("backward/task_build.py", "write_tables") in found
    assert ("hopper/csr_kernels.py", "place_edges") in found
    assert not any("sm100" in file for file, _ in found)
    assert delta.is_launched_as("kernel_cutlass_sum_rows_ptrbf16gmemalign16_0")
    assert main.is_launched_as("kernel_cutlass_kernel_msa_vendoredhopperforward_mainForwardMain_object_at__0")
    assert not main.is_launched_as("kernel_cutlass_kernel_msa_vendoredhoppercombineCombinePartials_object_at__0")


def test_only_initcheck_follows_kernels_of_torch() -> None:
    """Guards reports about memory that a kernel of torch wrote, and hours spent in kernels that are not ours."""
    filtered = {tool: "--kernel-name" in driver.tool_command("x", tool, ["index"]) for tool in driver.TOOLS}
    assert filtered == {"memcheck": True, "racecheck": True, "initcheck": False, "synccheck": True}


def race(first: tuple[str, str, str], *others: tuple[str, str, str]) -> str:
    """A report in racecheck's words; a place is a kind of access, a file and a name of a function in it."""

    def place(kind: str, file: str, function: str) -> str:
        (path,) = [*reports.PACKAGE.glob(f"hopper/{file}"), *reports.PACKAGE.glob(f"backward/{file}")]
        text = path.read_text(encoding="utf-8")
        line = text[: text.index(f"def {function}(")].count("\n") + 2
        return f"{kind} access at kernel_cutlass_kernel_x_0+0x850 in {file}:{line}"

    lines = [f"Error: Race reported between {place(*first)}"]
    lines += [f"    and {place(*other)} [164 hazards]" for other in others]
    return "".join(f"========= {line}\n" for line in lines)


WRITE, READ = ("Write", "sm90_load.py", "load_rows"), ("Read", "forward_main.py", "consume")
OTHER_WRITE = ("Write", "forward_main.py", "consume")
COPY, SUM = ("Write", "combine.py", "copy_batch"), ("Read", "combine.py", "add_batch")


@pytest.mark.parametrize(
    ("accesses", "known"),
    [
        ([WRITE, READ], True),
        ([WRITE, READ, READ], True),
        ([READ, WRITE], True),
        ([WRITE, WRITE], False),
        ([WRITE, READ, OTHER_WRITE], False),
        ([OTHER_WRITE, READ], False),
        ([("Write", "combine.py", "merge_item"), ("Read", "combine.py", "merge_item")], False),
        ([COPY, COPY], True),
        ([COPY, COPY, SUM], False),
        ([COPY, SUM], False),
        ([COPY, OTHER_WRITE], False),
        ([COPY, ("Read", "combine.py", "copy_batch")], False),
    ],
)
def test_only_what_is_explained_is_excused(accesses: list[tuple[str, str, str]], known: bool) -> None:
    """Guards a race of ours that hides among reports of racecheck that are explained."""
    output = race(*accesses) + "ran a\n========= RACECHECK SUMMARY: 1 hazard displayed (2 errors, 0 warnings)\n"
    assert (reports.find_problems("racecheck", 86, output, 1, 86) == []) == known
    assert reports.find_problems("racecheck", 86, output.replace(": 1 hazard", ": 2 hazards"), 1, 86)
    elsewhere = output.replace(" in sm90_load.py:", " in other.py:").replace(" in combine.py:", " in other.py:")
    assert reports.find_problems("racecheck", 86, elsewhere, 1, 86)


def test_what_is_excused_exists() -> None:
    """Guards an excuse that outlives its function and then covers another of that name."""
    for pattern, function in [*reports.HANDED_OVER, *reports.OWN_BYTES]:
        paths = [*reports.PACKAGE.glob(f"hopper/{pattern}"), *reports.PACKAGE.glob(f"backward/{pattern}")]
        assert sum(f"def {function}(" in path.read_text(encoding="utf-8") for path in paths) == 1, function


def test_a_partial_output_that_no_kernel_stored_is_a_nan() -> None:
    """Guards a fill for initcheck's sake that hides what is never written, or fills nothing any more."""
    like = torch.zeros(2, dtype=torch.bfloat16)
    with driver.fill_partial_outputs():
        assert like.new_empty(3).isnan().all()
        assert like.new_empty((2, 2)).shape == like.new_empty(1, dtype=torch.float32).expand(2, 2).shape
    with pytest.raises(AssertionError, match="0 flat tensors made"), driver.fill_partial_outputs():
        like.new_empty(3, dtype=torch.int32)
