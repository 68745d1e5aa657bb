"""Building the emulator's interpreter, reading PTX, and the front's refusals."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ptx_emulator import EmulationError, Kernel, Options, PtxError, Report, build, emulate
from ptx_emulator.frames import remember_frames
from ptx_emulator.ptx import parse_entries, split_operands
from ptx_emulator.snippets import module


def test_digest_covers_compiler_flags_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that keeps serving a library of other sources, flags or compilers."""
    first = build._digest(("g++",), {"alu.inc": "a"})
    assert first == build._digest(("g++",), {"alu.inc": "a"})
    assert first != build._digest(("g++",), {"alu.inc": "b"})
    assert first != build._digest(("c++",), {"alu.inc": "a"})
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    assert first != build._digest(("g++",), {"alu.inc": "a"})


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler must say what to install, not fail somewhere in a subprocess."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setattr(build, "find_spec", lambda _name: None)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: install g\+\+ or clang\+\+"):
        build.find_compiler()


def test_failed_build_leaves_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written library that the next process would load. One file of two is right, as it compiles in no time."""
    sources, out = tmp_path / "core", tmp_path / "out"
    for folder in (sources, out):
        folder.mkdir()
    (sources / "right.cpp").write_text("int right() { return 1; }\n")
    (sources / "wrong.cpp").write_text('#include "alu.inc"\n')
    monkeypatch.setattr(build, "CORE", sources)
    with pytest.raises(build.BuildError, match="error"):
        build._compile(build.find_compiler(), {"alu.inc": "#error broken"}, out / "libemulator.so")
    assert list(out.iterdir()) == []


def test_reader_keeps_scopes_lines_and_sources() -> None:
    """Labels and registers of inline assembly hide outer ones; a finding must name the right line."""
    text = module('mov.u32 %r0, 1;\n{ .reg .b32 %r0; L: mov.u32 %r0, 2; }\nL: .loc 1 7 3\nmov.u32 %r0, 3; // "a;b"')
    entry = parse_entries(text + '.file 1 "kernel.py"\n')["test"]
    moves = [s for s in entry.statements if s.text.startswith("mov")]
    assert [s.text for s in moves] == ["mov.u32 %r0, 1", "mov.u32 %r0, 2", "mov.u32 %r0, 3"]
    assert moves[1].scope.parent is moves[0].scope
    assert moves[1].scope.label_target("L") == 1
    assert moves[2].scope.label_target("L") == 2
    assert moves[2].line == moves[0].line + 3
    assert moves[2].source == "kernel.py:7"
    assert moves[0].source is None


@given(st.lists(st.text(alphabet="ab%[]{}+01", min_size=1, max_size=4), min_size=1, max_size=6))
def test_operands_split_and_join(parts: list[str]) -> None:
    """A comma within braces or brackets is no separator."""
    wrapped = [f"[{part.translate(str.maketrans('[]{}', '0000'))}, x]" for part in parts]
    assert split_operands(", ".join(wrapped)) == wrapped


def test_text_without_a_kernel_is_refused() -> None:
    """An empty module that would count as run."""
    with pytest.raises(PtxError, match=r"no \.entry"):
        emulate(".version 8.8")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"schedule": "fast"}, "schedule 'fast'"), ({"checks": ["spelling"]}, r"checks \['spelling'\]")],
)
def test_unknown_option_is_refused(options: dict[str, object], message: str) -> None:
    """A misspelt check that checks nothing."""
    with pytest.raises(ValueError, match=message):
        emulate(module("ret;"), **options)  # type: ignore[arg-type]


def test_wrong_size_of_an_argument_is_refused() -> None:
    """A struct of another size would shift what the kernel reads."""
    with pytest.raises(ValueError, match="a: 8 bytes expected, 3 given"):
        emulate(module("ret;", (".u64 a",)), b"abc")


def test_fault_raises_from_a_kernel_and_is_in_the_report() -> None:
    """Host code with several launches must stop at the first fault."""
    kernel = Kernel(parse_entries(module("trap;"))["test"])
    report = Report()
    with pytest.raises(EmulationError, match="trap"):
        kernel.run((1, 1, 1), (32, 1, 1), 0, [], [], Options(), report)
    assert report.fatal is not None
    assert report.fatal.kind == "trap"


def test_loop_of_launches_keeps_memory() -> None:
    """Several launches in a row see what the ones before wrote."""
    tensor = torch.zeros(1, dtype=torch.int32)
    kernel = Kernel(parse_entries(module("ld.param.u64 %d0, [a]; red.global.add.u32 [%d0], 1;", (".u64 a",)))["test"])
    for _ in range(3):
        emulate(kernel, tensor).require_clean()
    assert int(tensor) == 96


def test_remembered_frames_are_those_of_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that names the line of another instruction: of another call in the line, or of a loop's first round."""
    look_up = inspect.getframeinfo
    monkeypatch.setattr(inspect, "getframeinfo", look_up)
    remember_frames()

    def ask() -> bool:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        return inspect.getframeinfo(frame.f_back) == look_up(frame.f_back)

    for _ in range(2):
        assert [ask(), ask()] == [True, True]
        code = compile("\n\nright = [ask(),\n  ask()]", "made here", "exec")
        names: dict[str, object] = {"ask": ask}
        exec(code, names)  # noqa: S102 -- code without a file, as the DSL makes it
        assert names["right"] == [True, True]
