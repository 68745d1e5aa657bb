"""Properties of the emulator's reader, its barriers and its cache that hold for any input, not for chosen ones."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_emulator import PtxError, UnsupportedPtxError, build, emulate
from ptx_emulator.lower import lower
from ptx_emulator.ptx import parse_entries
from ptx_emulator.snippets import module

STATEMENTS = ["mov.u32 %r0, 1;", "add.s32 %r1, %r0, %r2;", "@%p0 bra L;", "bar.sync 0;", "ld.shared.b32 %r1, [smem+4];"]
COMMENTS = ["", " // ; } {", " /* ; } : */", "\n", "\n\n  "]


@given(st.lists(st.tuples(st.sampled_from(STATEMENTS), st.sampled_from(COMMENTS)), max_size=12))
def test_reader_returns_the_statements_in_order(parts: list[tuple[str, str]]) -> None:
    """A statement that layout or a comment swallows, splits or moves to another line."""
    text = module("\n".join(statement + comment for statement, comment in parts) + "\nL:", shared_bytes=16)
    lines = text.splitlines()
    statements = parse_entries(text)["test"].statements
    assert [s.text + ";" for s in statements] == [*(statement for statement, _ in parts), "ret;"]
    assert all(s.text in lines[s.line - 1] for s in statements)


@given(st.recursive(st.just(""), lambda inner: st.tuples(inner, inner).map(lambda p: f"{p[0]}{{ L: bra L; {p[1]} }}")))
def test_labels_belong_to_the_innermost_block(body: str) -> None:
    """Inline assembly repeats the same label in every block: a branch must stay in its own."""
    program = lower(parse_entries(module(body))["test"], 0)
    branches = [pc for pc in range(len(program.instructions)) if program.kind(pc) == "BRA"]
    assert len(branches) == body.count("bra")
    assert all(program.instructions[pc][-1] == pc for pc in branches)


@given(st.text(alphabet="abcdefm.%0123{}[]; ,@!", max_size=40))
def test_any_text_is_read_or_refused(body: str) -> None:
    """An exception of another kind would escape the tools that show which line is at fault."""
    with suppress(PtxError, UnsupportedPtxError):
        lower(parse_entries(module(body))["test"], 0)


OPCODES = ["mov.u32", "add.s32", "ld.shared.b32", "mbarrier.arrive.shared.b64", "wgmma.fence.sync.aligned"]


@given(st.sampled_from(OPCODES), st.text(alphabet="abcxyz012", min_size=1, max_size=5))
def test_unknown_modifier_is_never_ignored(opcode: str, modifier: str) -> None:
    """A modifier that a pattern lets pass and that changes what the instruction does."""
    known = {"ca", "cta", "aa", "cc"}
    if modifier in known:
        return
    with pytest.raises(UnsupportedPtxError, match=r"opcode or modifier not known|not modelled"):
        lower(parse_entries(module(f"{opcode}.{modifier} %r0, %r1;"))["test"], 0)


@st.composite
def phases(draw: st.DrawFn) -> list[tuple[list[int], list[int], int]]:
    """For each phase: bytes that threads expect, the sizes of the copies that bring them, and plain arrivals."""
    result = []
    for _ in range(draw(st.integers(1, 4))):
        copies = draw(st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=4))
        total = sum(copies)
        first = draw(st.integers(0, total))
        result.append((([first, total - first] if draw(st.booleans()) else [total]), copies, draw(st.integers(0, 2))))
    return result


@settings(max_examples=40, deadline=None)
@given(phases(), st.sampled_from(["eager", "lazy", "random"]), st.integers(0, 99))
def test_phase_ends_with_its_last_arrival_and_byte(
    plan: list[tuple[list[int], list[int], int]], schedule: str, seed: int
) -> None:
    """Pending count and tx-count: a phase that ends early, late, or takes bytes of the next one."""
    body = ["mov.u32 %r3, smem; ld.param.u64 %d0, [a]; mov.u32 %r0, %tid.x; setp.ne.s32 %p0, %r0, 0; @%p0 bra END;"]
    for number, (expected, _, plain) in enumerate(plan):
        barrier = f"%r3+{1024 + 8 * number}"
        body.append(f"mbarrier.init.shared.b64 [{barrier}], {len(expected) + plain};")
    body.append("fence.mbarrier_init.release.cluster;")
    for number, (expected, copies, plain) in enumerate(plan):
        barrier, label = f"%r3+{1024 + 8 * number}", f"W{number}"
        body += [f"mbarrier.arrive.expect_tx.shared.b64 _, [{barrier}], {size};" for size in expected]
        body.append(f"mbarrier.test_wait.parity.shared.b64 %p1, [{barrier}], 0;")
        body.append(f"selp.b32 %r{20 + number}, 1, 0, %p1;" if plain else f"mov.u32 %r{20 + number}, 0;")
        at = 0
        for size in copies:
            body.append(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                f"[%r3+{256 * number + at}], [%d0], {size}, [{barrier}];"
            )
            at += size
        body += [f"mbarrier.arrive.shared.b64 _, [{barrier}];"] * plain
        body.append(f"{label}: mbarrier.try_wait.parity.shared.b64 %p2, [{barrier}], 0; @!%p2 bra {label};")
        body.append(f"ld.shared.b32 %r{30 + number}, [%r3+{256 * number + at - 4}];")
    body.append("ld.param.u64 %d1, [b];")
    for number in range(len(plan)):
        body.append(f"st.global.v2.b32 [%d1+{8 * number}], {{%r{20 + number}, %r{30 + number}}};")
    text = module("\n".join([*body, "END:"]), [".u64 a", ".u64 b"], shared_bytes=1088)
    source, out = torch.arange(16, dtype=torch.int32), torch.full((8,), -1, dtype=torch.int32)
    emulate(text, source, out, schedule=schedule, seed=seed).require_clean()
    for number, (_, copies, _) in enumerate(plan):
        assert out[2 * number] == 0  # before the last arrival
        assert out[2 * number + 1] == copies[-1] // 4 - 1


@given(st.integers(1, 3), st.integers(0, 6))
@settings(max_examples=20, deadline=None)
def test_parity_alternates(expected: int, arrivals: int) -> None:
    """The parity that a wait sees after any number of arrivals."""
    body = f"mov.u32 %r3, smem; mov.u32 %r0, %tid.x; mbarrier.init.shared.b64 [%r3], {expected};"
    body += "mbarrier.arrive.shared.b64 _, [%r3];" * arrivals
    body += "".join(
        f"mbarrier.test_wait.parity.shared.b64 %p{p}, [%r3], {p}; selp.b32 %r{10 + p}, 1, 0, %p{p};" for p in (0, 1)
    )
    body += "ld.param.u64 %d0, [a]; st.global.v2.b32 [%d0], {%r10, %r11};"
    text = module(body, [".u64 a"], threads=1, shared_bytes=16)
    out = torch.zeros(2, dtype=torch.int32)
    emulate(text, out).require_clean()
    current = arrivals // expected % 2
    assert out.tolist() == [int(current != 0), int(current != 1)]


COMPILER = """
import shutil, sys, time
if "--version" in sys.argv:
    print("copying compiler 1.0"); raise SystemExit
target = sys.argv[sys.argv.index("-o") + 1]
with open({log!r}, "a") as log:
    log.write(target.rpartition("/")[2] + "\\n")
time.sleep(0 if "-c" in sys.argv else 0.5)
shutil.copy({library!r}, target)
"""


def test_two_processes_build_once(tmp_path: Path) -> None:
    """Processes that start together and compile twice, or load what the other has half written."""
    log, script = tmp_path / "log", tmp_path / "compiler.py"
    script.write_text(COMPILER.format(log=str(log), library=str(build.library_path())), "utf-8")
    tests = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "CXX": f"{sys.executable} -IS {script}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    code = "from ptx_emulator.bindings import library; from ptx_emulator.build import library_path; "
    command = [sys.executable, "-c", code + "library(); print(library_path())"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    objects = [f"{unit}.o" for unit in ("rest", *build.UNITS)]
    assert sorted(log.read_text("utf-8").split()) == sorted([*objects, "libemulator.so"])
    assert {path.name for path in Path(outputs[0][0].strip()).parent.iterdir()} == {"lock", "libemulator.so"}


FIND_LAUNCH = """
import ctypes, sys
from ptx_emulator.bindings import library, replace_cuda
library()
everywhere = ctypes.CDLL(None)
found = [hasattr(everywhere, "_cudaLaunchKernelEx")]
replace_cuda()
print(*found, hasattr(everywhere, "_cudaLaunchKernelEx"), hasattr(library(), "_cudaLaunchKernelEx"))
"""


def test_cuda_is_replaced_only_where_it_is_asked_for() -> None:
    """Kernels of a card that the emulator launches instead, because PTX was emulated in the same process before."""
    tests = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", FIND_LAUNCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout == "False True True\n", done.stderr
