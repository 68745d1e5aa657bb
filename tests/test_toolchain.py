"""The nvcc that MSA will run: found as MSA finds it, asked at most once, identified without being run."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from msa_vendored import toolchain
from msa_vendored.toolchain import (
    SM103A_FLAG,
    ToolchainError,
    find_cuda_home,
    find_nvcc,
    fingerprint_nvcc,
    nvcc_release,
    sm103a_flags,
)

REPORT = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Cuda compilation tools, release {0}, V{0}.88
"""


def make_toolkit(home: Path, release: str = "13.0", body: str | None = None) -> Path:
    """A CUDA_HOME whose nvcc is a script that notes each run in ``<home>/runs`` and reports a release."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    text = body if body is not None else f"cat <<'END'\n{REPORT.format(release)}END"
    nvcc.write_text(f"#!/bin/sh\necho run >> '{home}/runs'\n{text}\n")
    nvcc.chmod(0o755)
    return home


def make_binary(path: Path, content: bytes = b"\x7fELF nvcc") -> Path:
    """A file that can be executed by its mode, is no script, and fails if it is run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def count_runs(home: Path) -> int:
    runs = home / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


@pytest.mark.parametrize(
    ("release", "flags"),
    [
        ("11.8", ()),
        ("12.8", ()),
        ("12.9", (SM103A_FLAG,)),
        ("12.10", (SM103A_FLAG,)),
        ("13.0", (SM103A_FLAG,)),
        ("13.3", (SM103A_FLAG,)),
    ],
)
def test_sm103a_stays_exactly_from_nvcc_12_9_on(tmp_path: Path, release: str, flags: tuple[str, ...]) -> None:
    """Guards both sides: 12.8 rejects the whole kernel for the flag, and a GB300 has no kernel without it."""
    assert sm103a_flags(str(make_toolkit(tmp_path, release))) == flags


def test_nvcc_is_asked_once_for_many_threads(tmp_path: Path) -> None:
    """Guards against one run per kernel variant, and against each thread of a first use starting its own."""
    home = make_toolkit(tmp_path, body=f"sleep 0.1; cat <<'END'\n{REPORT.format('12.9')}END")
    barrier = threading.Barrier(8)
    found: list[tuple[str, ...]] = []

    def ask() -> None:
        barrier.wait()
        found.append(sm103a_flags(str(home)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(SM103A_FLAG,)] * 8
    assert count_runs(home) == 1


def test_two_toolkits_are_asked_each(tmp_path: Path) -> None:
    """Guards against one answer for the whole process, whatever the path."""
    old, new = make_toolkit(tmp_path / "old", "12.8"), make_toolkit(tmp_path / "new", "13.0")
    assert [nvcc_release(f"{home}/bin/nvcc") for home in (old, new)] == [(12, 8), (13, 0)]


@pytest.mark.parametrize("make", ["no folder", "folder without nvcc", "not executable", "folder named nvcc"])
def test_without_an_nvcc_the_flag_stays(tmp_path: Path, make: str) -> None:
    """Guards that a missing nvcc stays MSA's own error, raised where MSA runs it and naming the file."""
    home = tmp_path / "cuda"
    if make == "folder without nvcc":
        (home / "bin").mkdir(parents=True)
    elif make == "not executable":
        make_binary(home / "bin" / "nvcc").chmod(0o644)
    elif make == "folder named nvcc":
        (home / "bin" / "nvcc").mkdir(parents=True)
    assert sm103a_flags(str(home)) == (SM103A_FLAG,)


def test_asking_a_missing_nvcc_raises_what_python_raises(tmp_path: Path) -> None:
    """Guards the contract that a missing nvcc is not dressed up as one of our errors."""
    with pytest.raises(FileNotFoundError):
        nvcc_release(str(tmp_path / "nvcc"))


@pytest.mark.parametrize(
    ("body", "expected", "got"),
    [
        ("echo something else", "text with 'release X.Y'", "'something else\\n'"),
        ("true", "text with 'release X.Y'", "''"),
        ("echo lost licence >&2; exit 3", "exit status 0", "3: lost licence"),
    ],
)
def test_an_nvcc_without_an_answer_is_an_error(tmp_path: Path, body: str, expected: str, got: str) -> None:
    """Guards against guessing a release: too new breaks the compilation, too old drops the GB300 kernel silently."""
    home = make_toolkit(tmp_path, body=body)
    with pytest.raises(ToolchainError) as caught:
        sm103a_flags(str(home))
    nvcc = f"{home}/bin/nvcc"
    assert str(caught.value) == (
        "nvcc does not say which release it is\n"
        f"  where:    {nvcc}\n"
        f"  expected: {expected}\n"
        f"  got:      {got}\n"
        f"  next:     {nvcc} --version"
    )


def test_an_nvcc_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a training job against waiting for ever for a wrapper on a dead file system."""
    monkeypatch.setattr(toolchain, "NVCC_TIMEOUT_S", 0.2)
    home = make_toolkit(tmp_path, body="exec sleep 30")
    with pytest.raises(ToolchainError) as caught:
        sm103a_flags(str(home))
    assert caught.value.expected == "an answer within 0.2 s"


def test_an_nvcc_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    """Guards against an OSError without a hint, for a toolkit of another architecture."""
    make_binary(tmp_path / "bin" / "nvcc")
    with pytest.raises(ToolchainError) as caught:
        sm103a_flags(str(tmp_path))
    assert caught.value.expected == "a program that can be run"
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failure_to_answer_is_not_remembered(tmp_path: Path) -> None:
    """Guards a repair of the toolkit within a session."""
    home = make_toolkit(tmp_path, body="exit 1")
    with pytest.raises(ToolchainError):
        sm103a_flags(str(home))
    make_toolkit(home, "12.8")
    assert sm103a_flags(str(home)) == ()


def test_the_toolkit_is_found_where_msa_finds_it(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    """Guards against keying the cache by another nvcc than the one that MSA runs: its order, links resolved."""
    real = make_toolkit(tmp_path / "cuda-13.0")
    links = tmp_path / "links"
    links.mkdir()
    (links / "nvcc").symlink_to(real / "bin" / "nvcc")
    clean_environment.setenv("PATH", str(links))
    assert (find_cuda_home(), find_nvcc()) == (str(real), f"{real}/bin/nvcc")
    clean_environment.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert (find_cuda_home(), find_nvcc()) == (str(tmp_path / "other"), None)
    clean_environment.setenv("CUDA_HOME", "")
    assert (find_cuda_home(), find_nvcc()) == ("", None)


def test_a_binary_is_identified_without_being_run(tmp_path: Path) -> None:
    """Guards a warm cache: looking for its folder must not start nvcc, which here could not even be started."""
    first = fingerprint_nvcc(str(make_binary(tmp_path / "a" / "nvcc", b"\x7fELF 12.9")))
    same = fingerprint_nvcc(str(make_binary(tmp_path / "b" / "nvcc", b"\x7fELF 12.9")))
    other = fingerprint_nvcc(str(make_binary(tmp_path / "c" / "nvcc", b"\x7fELF 13.0")))
    assert first == same, "the same compiler in another folder is the same compiler"
    assert first != other
    assert len(first) == 12


def test_a_replaced_binary_is_seen(tmp_path: Path) -> None:
    """Guards the in-process memory of digests, which must not outlive the file."""
    nvcc = make_binary(tmp_path / "nvcc", b"\x7fELF one")
    before = fingerprint_nvcc(str(nvcc))
    make_binary(nvcc, b"\x7fELF two")
    os.utime(nvcc, ns=(1, 1))
    assert fingerprint_nvcc(str(nvcc)) != before


@pytest.mark.parametrize("name", ["bin/ptxas", "nvvm/bin/cicc", "bin/nvcc.profile"])
def test_the_programs_that_nvcc_calls_are_part_of_its_identity(tmp_path: Path, name: str) -> None:
    """Guards against a mixed toolkit: pip updates ptxas and cicc apart from the nvcc driver."""
    nvcc = make_binary(tmp_path / "bin" / "nvcc")
    alone = fingerprint_nvcc(str(nvcc))
    make_binary(tmp_path / name, b"old" + bytes(200_000) + b"12.9")
    old = fingerprint_nvcc(str(nvcc))
    make_binary(tmp_path / name, b"old" + bytes(200_000) + b"13.0")
    assert len({alone, old, fingerprint_nvcc(str(nvcc))}) == 3


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths whose version was asked for; none is run."""
    paths: list[str] = []

    def report(nvcc: str) -> str:
        paths.append(nvcc)
        return REPORT.format("13.0")

    monkeypatch.setattr(toolchain, "nvcc_report", report)
    return paths


@pytest.mark.parametrize("script", ['exec {target} "$@"', '# wrapper\n\n  {target} "$@"', 'exec {target} "$@";'])
def test_a_forwarding_script_is_identified_by_its_target(tmp_path: Path, asked: list[str], script: str) -> None:
    """Guards a warm cache behind the usual wrapper, and sees the target being updated under an unchanged script."""
    target = make_binary(tmp_path / "cuda" / "bin" / "nvcc", b"\x7fELF 12.9")
    wrapper = make_binary(tmp_path / "nvcc", f"#!/bin/sh\n{script.format(target=target)}\n".encode())
    before = fingerprint_nvcc(str(wrapper))
    make_binary(target, b"\x7fELF 13.0 newer")
    assert fingerprint_nvcc(str(wrapper)) != before
    assert asked == []


@pytest.mark.parametrize(
    "script",
    [
        "",
        'exec "$CUDA_ROOT"/bin/nvcc "$@"',
        'exec $CUDA_ROOT/bin/nvcc "$@"',
        'exec ./nvcc "$@"',
        'exec nvcc "$@"',
        'export X=1\nexec {target} "$@"',
        'exec {target} -Werror "$@"',
        "exec {target}",
        "exec {target} $@",
        'exec ccache {target} "$@"',
        'exec {target} "$@" && true',
        '{target} "$@"\necho done',
        'exec {target}.gone "$@"',
    ],
)
def test_any_other_script_is_asked(tmp_path: Path, asked: list[str], script: str) -> None:
    """Guards against taking a script for a plain forwarder: what it runs may change while its bytes do not."""
    target = make_binary(tmp_path / "cuda" / "bin" / "nvcc")
    wrapper = make_binary(tmp_path / "nvcc", f"#!/bin/sh\n{script.format(target=target)}\n".encode())
    fingerprint_nvcc(str(wrapper))
    assert asked == [str(wrapper)]


def test_scripts_that_answer_differently_are_different_compilers(tmp_path: Path) -> None:
    """Guards the answer's part in the identity: the same script can find two compilers."""
    prints = []
    for release in ("12.8", "13.0"):
        nvcc = make_binary(tmp_path / release / "nvcc", b'#!/bin/sh\ncat "$(dirname "$0")/report"\n')
        (nvcc.parent / "report").write_text(REPORT.format(release))
        prints.append(fingerprint_nvcc(str(nvcc)))
    assert prints[0] != prints[1]


def test_a_compiler_cache_under_the_name_of_nvcc_is_asked(tmp_path: Path, asked: list[str]) -> None:
    """Guards against identifying ccache, which stays the same when the compiler behind it is replaced."""
    (tmp_path / "nvcc").symlink_to(make_binary(tmp_path / "ccache"))
    fingerprint_nvcc(str(tmp_path / "nvcc"))
    assert asked == [str(tmp_path / "nvcc")]


def test_wrappers_of_each_other_end(tmp_path: Path, asked: list[str]) -> None:
    """Guards against an endless walk through two scripts that forward to one another."""
    pair = tmp_path / "nvcc-a", tmp_path / "nvcc-b"
    for script, target in (pair, pair[::-1]):
        make_binary(script, f'#!/bin/sh\nexec {target} "$@"\n'.encode())
    assert len(fingerprint_nvcc(str(pair[0]))) == 12
    assert len(asked) == 1


@pytest.mark.nvcc
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine; its words were not parsed")
def test_the_nvcc_of_this_machine_is_understood() -> None:
    """Guards the parser against the words of a real nvcc."""
    nvcc = find_nvcc()
    assert nvcc is not None
    assert nvcc_release(nvcc) >= (11, 0)
    assert len(fingerprint_nvcc(nvcc)) == 12
