"""Kernels are compiled once: what names a cache entry, who compiles, and how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiling_cases import Compiler, Linker, entries

from msa_vendored import compiling
from msa_vendored.compiling import KernelKey, compile_options, forget_kernels, load_kernel

pytest_plugins = ["compiling_fixtures"]  # fixtures linker


TESTS = Path(__file__).resolve().parent


def test_a_kernel_is_compiled_once_and_then_comes_from_disk(linker: Linker, tmp_path: Path) -> None:
    """Guards seconds of compilation at every start, and a cache whose entries are never found again."""
    compiler = Compiler()
    first = load_kernel(compiler.compile_stage, arch="sm_100a", ratio=16)
    assert load_kernel(compiler.compile_stage, arch="sm_100a", ratio=16) is first
    forget_kernels()  # as in the next process
    second = load_kernel(compiler.compile_stage, arch="sm_100a", ratio=16)
    assert second is not first
    assert first() == second() == "object of {'arch': 'sm_100a', 'ratio': 16}"
    assert compiler.calls == [{"arch": "sm_100a", "ratio": 16}]
    (entry,) = entries(tmp_path)
    assert entry.name.startswith(f"stage-sm_100a-{compiling.digest_sources()[:12]}-")


def test_options_and_architectures_do_not_share_a_kernel(linker: Linker, tmp_path: Path) -> None:
    """Guards a ratio-16 kernel that serves ratio 8, and True that is taken for 1."""
    compiler = Compiler()
    asked: list[dict[str, Any]] = [
        {"arch": "sm_100a", "ratio": 16},
        {"arch": "sm_103a", "ratio": 16},
        {"arch": "sm_100a", "ratio": 8},
        {"arch": "sm_100a", "ratio": 16, "dq": "fp32"},
        {"arch": "sm_100a", "ratio": "16"},
        {"arch": "sm_100a", "flag": True},
        {"arch": "sm_100a", "flag": 1},
    ]
    texts = [load_kernel(compiler.compile_stage, **options)() for options in asked]
    assert texts == [f"object of {options}" for options in asked]
    assert len(entries(tmp_path)) == len(asked)


def change_source(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "backward").mkdir(parents=True)
    (tree / "backward" / "main.py").write_text("tile = 64\n")
    patch.setattr(compiling, "__file__", str(tree / "compiling.py"))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "sources": change_source,
    "DSL version": lambda patch, _: patch.setattr(compiling, "describe_dsl", lambda: "4.8.0-cu12-00000000"),
    "CUDA flavour": lambda patch, _: patch.setattr(compiling, "describe_dsl", lambda: "4.6.2-cu13-00000000"),
    "settings": lambda patch, _: patch.setattr(compiling, "describe_dsl", lambda: "4.6.2-cu12-11111111"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_the_code_changes_the_entry(
    linker: Linker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Guards against running what other sources or another compiler made."""
    compiler = Compiler()
    load_kernel(compiler.compile_stage, arch="sm_100a")
    CHANGES[what](monkeypatch, tmp_path)
    forget_kernels()
    load_kernel(compiler.compile_stage, arch="sm_100a")
    assert len(compiler.calls) == len(entries(tmp_path)) == 2


@pytest.mark.parametrize("change", ["content", "name", "new file", "split"])
def test_the_digest_sees_every_kernel_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str) -> None:
    """Guards helpers in subfolders, renamed files, and contents that only look alike when joined."""
    for name, text in {"backward/a.py": "one", "hopper/deep/b.py": "two", "compiling.py": "three"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "training").mkdir()
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compiling.py"))

    def digest() -> str:
        compiling.digest_sources.cache_clear()
        return compiling.digest_sources()

    before = digest()
    (tmp_path / "training" / "c.py").write_text("makes no kernel")
    assert digest() == before
    if change == "content":
        (tmp_path / "hopper/deep/b.py").write_text("two!")
    elif change == "name":
        (tmp_path / "backward/a.py").rename(tmp_path / "backward/c.py")
    elif change == "new file":
        (tmp_path / "hopper/new.py").touch()
    else:
        (tmp_path / "backward/a.py").write_text("on")
        (tmp_path / "hopper/deep/b.py").write_text("etwo")
    assert digest() != before
    compiling.digest_sources.cache_clear()


def test_the_real_description_names_what_the_issue_asks_for() -> None:
    """Guards the key against losing an input: sources, DSL, flavour, architecture."""
    text = json.loads(KernelKey("m.compile_x", "sm_90a", '{"ratio": 16}').describe())
    assert text["arch"] == "sm_90a"
    assert text["options"] == '{"ratio": 16}'
    assert text["sources"] == compiling.digest_sources()
    version, flavour, settings = text["dsl"].split("-")
    assert version.count(".") == 2
    assert flavour in ("cu12", "cu13")
    assert len(settings) == 8


def test_threads_compile_a_kernel_once_and_different_kernels_take_turns(linker: Linker) -> None:
    """Guards two layers' first calls, and the DSL's global compile options."""
    running, most = [], []

    class Slow(Compiler):
        def compile_stage(self, **options: Any) -> Any:
            running.append(1)
            most.append(len(running))
            time.sleep(0.02)
            running.pop()
            return super().compile_stage(**options)

    compiler, barrier = Slow(), threading.Barrier(8)
    found: list[tuple[int, Any]] = []

    def call(ratio: int) -> None:
        barrier.wait()
        found.append((ratio, load_kernel(compiler.compile_stage, arch="sm_90a", ratio=ratio)))

    threads = [threading.Thread(target=call, args=(ratio,)) for ratio in (1, 2) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(call["ratio"] for call in compiler.calls) == [1, 2]
    assert len({id(kernel) for _, kernel in found}) == 2
    assert max(most) == 1


def test_a_failure_is_not_remembered(linker: Linker, tmp_path: Path) -> None:
    """Guards a process that could not compile once, for want of memory say, and then never again."""
    compiler = Compiler()
    compiler.failures = 1
    with pytest.raises(RuntimeError, match="does not compile"):
        load_kernel(compiler.compile_stage, arch="sm_90a")
    assert entries(tmp_path) == []
    assert load_kernel(compiler.compile_stage, arch="sm_90a")() == "object of {'arch': 'sm_90a'}"


def test_an_error_of_the_compiler_is_not_taken_for_one_of_the_disk(linker: Linker) -> None:
    """Guards against compiling twice and hiding why: a missing compiler is an OSError too."""
    calls = []

    def compile_stage(**options: Any) -> Any:
        calls.append(options)
        raise FileNotFoundError("ptxas")

    with pytest.raises(FileNotFoundError, match="ptxas"):
        load_kernel(compile_stage, arch="sm_90a")
    assert len(calls) == 1


def test_off_means_off(linker: Linker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the documented switch."""
    monkeypatch.setenv(compiling.CACHE_VARIABLE, "off")
    load_kernel(Compiler().compile_stage, arch="sm_90a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, ".cache/msa_vendored/kernels"), ({"XDG_CACHE_HOME": "/x"}, "/x/msa_vendored/kernels")],
)
def test_the_folder_follows_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], expected: str
) -> None:
    """Guards the documented default."""
    for name in (compiling.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compiling.kernel_cache_folder() == tmp_path / expected


def test_compile_options_name_the_architecture() -> None:
    """Guards a kernel compiled for the first visible GPU instead of the one that it will run on."""
    assert compile_options("sm_90a", "--opt-level 2") == "--enable-tvm-ffi --gpu-arch sm_90a --opt-level 2"


def test_objects_from_disk_run_and_processes_compile_once(tmp_path: Path) -> None:
    """Guards the real thing: two processes at once, one compilation, each runs the loaded object in the emulator."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        compiling.CACHE_VARIABLE: str(tmp_path / "kernels"),
    }
    command = [sys.executable, "-m", "ptx_emulator.compile_once", "sm_90a", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["exact"] for result in results] == [True, True]
    assert sum(result["compilations"] for result in results) == 1
    assert len(entries(tmp_path)) == 1
    assert not list(tmp_path.rglob(".*"))
