"""Kernels are compiled once: what names a cache entry, who compiles, and what happens to a damaged entry.

Most tests use a made-up compiler, so that they count its calls; one child process uses the real DSL and runs the
loaded objects in the emulator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_vendored import compiling
from msa_vendored.compiling import KernelCacheWarning, KernelKey, compile_options, forget_kernels, load_kernel

TESTS = Path(__file__).resolve().parent


class Compiler:
    """A stage that counts its compilations; what it exports is text that names the symbol."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.failures = 0

    def compile_stage(self, **options: Any) -> Any:
        self.calls.append(options)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("does not compile")

        def export_to_c(path: str, *, function_name: str) -> None:
            Path(path).write_text(f"object of {options} as {function_name}")

        return SimpleNamespace(export_to_c=export_to_c)


class Linker:
    """Stands in for ``cute.runtime.load_module``: gives the object's text for the symbol that it holds."""

    def __init__(self) -> None:
        self.broken = False

    def load_module(self, path: str, *, enable_tvm_ffi: bool) -> Any:
        assert enable_tvm_ffi
        if self.broken:
            raise RuntimeError("undefined symbol")
        text = Path(path).read_bytes().partition(b'{"name')[0].decode()
        return SimpleNamespace(**{text.rpartition(" ")[2]: lambda: text.rpartition(" as ")[0]})


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Linker]:
    """An empty folder of kernels, no DSL, nothing loaded."""
    linker = Linker()
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(compiling, "describe_dsl", lambda: "4.6.2-cu12-00000000")
    cute = SimpleNamespace(runtime=linker)
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(cute=cute))
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    forget_kernels()
    yield linker
    forget_kernels()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("kernels/*.o"))


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


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the object": lambda content: content[:10],
    "cut in the seal": lambda content: content[:-1],
    "one bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "longer": lambda content: content + b"\0",
    "another entry": lambda content: content.replace(b"ratio", b"ratjo"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_entry_is_made_again_and_never_run(linker: Linker, tmp_path: Path, what: str) -> None:
    """Guards the crash of a process that finds what another left half-written, or renamed."""
    compiler = Compiler()
    load_kernel(compiler.compile_stage, arch="sm_90a", ratio=16)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGE[what](whole))
    forget_kernels()
    with pytest.warns(KernelCacheWarning, match="is damaged; it is compiled again"):
        load_kernel(compiler.compile_stage, arch="sm_90a", ratio=16)
    assert len(compiler.calls) == 2
    assert entry.read_bytes() == whole


def test_containers_that_share_a_folder_do_not_write_into_one_another(linker: Linker, tmp_path: Path) -> None:
    """Guards a torn object: process ids are equal in two containers, and on some file systems locks are not shared."""
    path = tmp_path / "stage-sm_90a.o"
    name = compiling._function_name("{}")

    def export_at_once(partial: str, *, function_name: str) -> None:
        Path(partial).write_text(f"object of the other as {function_name}")

    def export_slowly(partial: str, *, function_name: str) -> None:
        with Path(partial).open("w") as file:
            file.write("object of ")
            file.flush()
            assert compiling._store_entry(path, "{}", SimpleNamespace(export_to_c=export_at_once))
            assert path.read_bytes().startswith(f"object of the other as {name}".encode())
            file.write(f"this one as {function_name}")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiling._store_entry(path, "{}", SimpleNamespace(export_to_c=export_slowly))
    assert path.read_bytes().startswith(f"object of this one as {name}".encode())
    assert list(tmp_path.glob(".*")) == []


def test_private_files_of_killed_writers_are_removed_after_a_day(linker: Linker, tmp_path: Path) -> None:
    """Guards a folder that grows by an object for every job that was killed in its first seconds."""
    load_kernel(Compiler().compile_stage, arch="sm_90a")
    (entry,) = entries(tmp_path)
    old, young, other = (
        entry.with_name(name) for name in (f".{entry.stem}.old.o", f".{entry.stem}.young.o", ".another.old.o")
    )
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - compiling.ABANDONED_AFTER_S - 60,) * 2)
    entry.unlink()
    forget_kernels()
    load_kernel(Compiler().compile_stage, arch="sm_90a")
    assert sorted(path.name for path in entry.parent.glob(".*")) == sorted([young.name, other.name])


def test_an_entry_that_does_not_load_is_made_again_and_the_kernel_still_runs(linker: Linker) -> None:
    """Guards a runtime library that another version replaced: the kernel in memory serves, and it is said."""
    compiler = Compiler()
    load_kernel(compiler.compile_stage, arch="sm_90a")
    forget_kernels()
    linker.broken = True
    with pytest.warns(KernelCacheWarning, match="cannot be loaded .undefined symbol."):
        kernel = load_kernel(compiler.compile_stage, arch="sm_90a")
    assert len(compiler.calls) == 2
    assert isinstance(kernel, SimpleNamespace)


def test_a_folder_that_cannot_be_written_is_said_and_the_kernel_still_runs(
    linker: Linker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards jobs without a home directory; the same kernel runs, only compiled again by each process."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    compiler = Compiler()
    with pytest.warns(KernelCacheWarning, match="cannot be written, stage-sm_90a-.* serves this process only"):
        kernel = load_kernel(compiler.compile_stage, arch="sm_90a")
    assert load_kernel(compiler.compile_stage, arch="sm_90a") is kernel
    assert len(compiler.calls) == 1


def test_a_warm_folder_is_read_without_writing_to_it(
    linker: Linker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards images that ship a warm folder read-only."""
    compiler = Compiler()
    load_kernel(compiler.compile_stage, arch="sm_90a")
    before = sorted(tmp_path.rglob("*"))
    for lock in tmp_path.rglob("*.lock"):
        lock.unlink()
    forget_kernels()

    def refuse(path: Path) -> Any:
        raise PermissionError(path)

    monkeypatch.setattr(compiling, "hold_flock", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_kernel(compiler.compile_stage, arch="sm_90a")
    assert len(compiler.calls) == 1
    assert [path for path in before if path.suffix != ".lock"] == sorted(tmp_path.rglob("*"))


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
