"""Building the emulator's interpreter, reading PTX, and the front's refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ptx_emulator import EmulationError, Kernel, Options, PtxError, Report, build, emulate
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


def test_failed_build_leaves_no_library(tmp_path: Path) -> None:
    """A half-written library that the next process would load."""
    target = tmp_path / "libemulator.so"
    with pytest.raises(build.BuildError, match="error"):
        build._compile(build.find_compiler(), {"alu.inc": "#error broken", "kinds.inc": "#error broken"}, target)
    assert list(tmp_path.iterdir()) == []


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
