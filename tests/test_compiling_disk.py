"""The folder of compiled kernels when things go wrong: damage, other writers, no permission, killed processes."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compiling_cases import Compiler, Linker, entries

from msa_vendored import compiling
from msa_vendored.compiling import KernelCacheWarning, forget_kernels, load_kernel

pytest_plugins = ["compiling_fixtures"]  # fixtures linker


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
