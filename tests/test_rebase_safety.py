"""What a rebase must not do to anybody's files: killed, among other repositories and settings, or exporting wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rebase_lab import UPSTREAM, Lab, make_lab, make_repository, resolve

from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.rebase.export import export_patches, lay_out


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scratch repositories go below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "msa_vendored"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """See ``make_lab``."""
    return make_lab(tmp_path)


# Killed -------------------------------------------------------------------------------------------------------------

KILLER = """
import os, signal, sys
count, limit, writes, root = 0, int(os.environ["KILL_AT"]), [], sys.argv[2]
def hook(event, arguments):
    global count
    if event in ("os.rename", "os.remove", "subprocess.Popen"):
        count += 1
        if event != "subprocess.Popen" and str(arguments[0]).startswith(root):
            writes.append(count)
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from msa_vendored.vendoring.__main__ import main
code = main(sys.argv[1:])
print(count, *writes)
sys.exit(code)
"""


def run_and_kill(lab: Lab, at: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that kills itself at its ``at``-th rename, removal or subprocess."""
    command = [sys.executable, "-c", KILLER, "--root", str(lab.root), "rebase", "--no-checks", *arguments]
    folders = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "KILL_AT": str(at), "PYTHONPATH": folders}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_undisturbed(home: Path) -> tuple[list[int], dict[str, bytes]]:
    """When to kill, and what a rebase that is not killed leaves.

    The moments are each rename and removal in the checkout, and some between, where git is at work.
    """
    lab = make_lab(home)
    wheel = lab.make_wheel("2.0", UPSTREAM)
    run = run_and_kill(lab, 0, "--to", "vllm==2.0", "--from-source", str(wheel), "--skip", "fix")
    assert run.returncode == 0, run.stderr
    total, *writes = (int(word) for word in run.stdout.splitlines()[-1].split())
    assert len(writes) > 8, "state, journal, four files and the state's end are renamed or removed"
    return sorted({*range(2, total, total // 6), *writes}), lab.snapshot()


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_the_old_checkout_or_the_new_one(tmp_path: Path, own_cache: Path) -> None:
    """Guards all or nothing: whatever moment a kill strikes, the next command finds one of two states and can go on."""
    moments, reference = run_undisturbed(tmp_path / "reference")
    seen = set()
    for at in moments:
        lab = make_lab(tmp_path / f"at-{at}")
        old = lab.snapshot()
        wheel = lab.make_wheel("2.0", UPSTREAM)
        arguments = ["--to", "vllm==2.0", "--from-source", str(wheel), "--skip", "fix"]
        assert run_and_kill(lab, at, *arguments).returncode == -9
        for pin in lab.lock.pins:
            assert verify_checkout(lab.root, pin.id)[1] == [], f"killed at {at}"
        state = "old" if lab.snapshot() == old else "new" if lab.snapshot() == reference else "mixed"
        seen.add(state)
        assert state != "mixed", f"killed at {at} of {moments}"
        if (lab.root / "build/rebase/state.json").exists():
            assert lab.rebase("--continue").code == 0
        elif state == "old":
            assert lab.rebase(*arguments).code == 0
        assert lab.snapshot() == reference, f"killed at {at}"
    assert seen == {"old", "new"}


# Other people's git -------------------------------------------------------------------------------------------------


def list_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_checkout_inside_another_repository_and_a_hook_s_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the caller's repository: GIT_DIR from a hook sends every git command there, unless it is dropped."""
    outer = make_repository(tmp_path / "outer")
    lab = make_lab(outer / "sub")
    (outer / ".gitignore").write_text("*\n")
    before = list_bytes(outer / ".git")
    monkeypatch.setenv("XDG_CACHE_HOME", str(outer / "cache"))
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(outer / ".git" / ("index" if "INDEX" in name else "")))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    assert lab.upgrade(UPSTREAM).code == 13
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_WORK_TREE"):
        monkeypatch.delenv(name)
    resolve(lab)
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    assert lab.rebase("--continue").code == 0
    assert list_bytes(outer / ".git") == before


def test_settings_and_hooks_of_the_user_change_nothing(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the bytes: autocrlf, whitespace repair, attributes, hooks, signing and rerere of the user stay outside."""
    home, hooks = tmp_path / "home", tmp_path / "hooks"
    home.mkdir()
    hooks.mkdir()
    for name in ("pre-commit", "commit-msg", "post-checkout", "pre-rebase", "post-rewrite", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf merge=ours\n")
    (home / ".gitconfig").write_text(
        f"""
[user]
    name = Somebody Else
    email = else@example.org
[core]
    autocrlf = true
    hooksPath = {hooks}
    attributesFile = {home}/attributes
[apply]
    whitespace = fix
[commit]
    gpgSign = true
[rerere]
    enabled = true
[merge]
    conflictStyle = merge
[rebase]
    autoSquash = true
    backend = apply
[diff]
    noprefix = true
    renames = false
"""
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.autocrlf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    run = lab.upgrade(UPSTREAM)
    assert (run.code, run.verdicts) == (13, {"fix": "conflict", "other": "moved"})
    assert b"\r" not in (lab.scratch / "x.txt").read_bytes()
    monkeypatch.delenv("GIT_CONFIG_COUNT")
    wanted = b"one\r\nZwei \t \nthree\r\nfour\nfive\r\n"
    resolve(lab, wanted)  # with the user's own git and settings, which would turn CRLF to LF
    lab.git("-c", "core.editor=true", "rebase", "--continue")  # and sign, and run hooks
    run = lab.rebase("--continue")
    assert run.code == 0, run.err
    assert lab.patched("vllm-2.0", UPSTREAM)["x.txt"] == wanted
    assert not (tmp_path / "hook-ran").exists()


def test_a_scratch_repository_inside_the_checkout_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the checkout: git and the build would take the scratch files for the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.root / "build"))
    run = lab.upgrade(UPSTREAM)
    assert (run.code, run.err.partition("\n")[0]) == (
        2,
        "error[MSAV2]: the scratch repository would be inside the checkout",
    )


# The last checks before anything is written -------------------------------------------------------------------------

LANDING = "msa_vendored.vendoring.rebase.landing"


def test_an_export_that_differs_from_what_git_has_is_not_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the strict application from zero: a patch that lost a change must not be written."""
    before = lab.snapshot()
    monkeypatch.setattr(f"{LANDING}.export_patches", lambda *arguments: export_patches(*arguments)[:0])
    run = lab.upgrade(UPSTREAM, "--skip", "fix")
    assert run.code == 21
    assert "the exported patches do not give the tree that git has" in run.err
    assert lab.snapshot() == before


def test_a_checkout_that_would_not_verify_is_not_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rehearsal: lock, manifest and series must agree for every pin before the first file is written."""
    before = lab.snapshot()
    without = "third_party/vllm-2.0.manifest.tsv"
    monkeypatch.setattr(f"{LANDING}.lay_out", lambda *a: {p: d for p, d in lay_out(*a).items() if p != without})
    run = lab.upgrade(UPSTREAM, "--skip", "fix")
    assert run.code == 21
    assert "the checkout would not verify with the rebased patches; nothing was written" in run.err
    assert lab.snapshot() == before
