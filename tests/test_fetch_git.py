"""Commits come by git, whatever the user's configuration and environment say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fetch_cases import Upstream, commit_files, git, make_manifest, make_pin, read_source

from msa_vendored.vendoring.errors import ArchiveError, BadHashError, OfflineError
from msa_vendored.vendoring.git import GitFailedError, fetch_commit, isolate_environment, run_git
from msa_vendored.vendoring.lock import GitSource

pytest_plugins = ["fetch_fixtures"]  # fixtures shared_upstream


@pytest.fixture
def user_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's global git configuration; empty at first."""
    path = tmp_path / "gitconfig"
    path.touch()
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(path))
    return path


@pytest.mark.parametrize("form", ["{main}", "git+file://{main}", "file://{main}", "{main}/.git", None])
def test_commit_is_read_with_its_submodule(
    shared_upstream: Upstream, user_config: Path, tmp_path: Path, form: str | None
) -> None:
    """Guards against an empty submodule folder, and against its unused parts counting as extra files."""
    upstream = shared_upstream
    what = None if form is None else form.format(main=upstream.main)
    assert read_source(upstream.pin, upstream.manifest, what, tmp_path / "work") == upstream.files


def test_commit_is_read_from_a_local_clone_without_its_submodule_s_origin(
    shared_upstream: Upstream, user_config: Path, tmp_path: Path
) -> None:
    """Guards against going to the network for a submodule that is checked out beside; works with --offline."""
    upstream, clone = shared_upstream, tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--recurse-submodules", str(upstream.main), str(clone))
    far = replace(upstream.source.submodules[0], url="https://unreachable.invalid/cut.git")
    pin = make_pin(replace(upstream.source, submodules=(far,)), upstream.manifest)
    (clone / "python/pkg/jit.py").write_bytes(b"edited, not committed")
    assert read_source(pin, upstream.manifest, str(clone), tmp_path / "work", offline=True) == upstream.files
    with pytest.raises(OfflineError) as caught:
        read_source(pin, upstream.manifest, str(upstream.main / ".git"), tmp_path / "work", offline=True)
    assert caught.value.what == (
        "https://unreachable.invalid/cut.git is not on this machine, and --offline forbids to fetch"
    )


def test_caller_s_git_variables_do_not_leak(
    shared_upstream: Upstream, user_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rewriting the caller's repository when a git hook, which sets GIT_DIR, runs the build."""
    other = tmp_path / "other"
    head = commit_files(other, {"x": b"x"})
    before = sorted(str(path) for path in other.rglob("*"))
    hostile = {
        "GIT_DIR": str(other / ".git"),
        "GIT_WORK_TREE": str(other),
        "GIT_INDEX_FILE": str(other / ".git/index"),
        "GIT_OBJECT_DIRECTORY": str(other / ".git/objects"),
        "GIT_NAMESPACE": "x",
        "GIT_TRACE": str(other / "trace"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.bare",
        "GIT_CONFIG_VALUE_0": "nonsense",
    }
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    upstream = shared_upstream
    assert read_source(upstream.pin, upstream.manifest, None, tmp_path / "work") == upstream.files
    assert sorted(str(path) for path in other.rglob("*")) == before
    assert git(other, "rev-parse", "HEAD") == head


def test_environment_for_git_has_only_what_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the list itself: no GIT_* variable of the caller locally, the credential ones for a fetch."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_DIR", "GIT_SSH_COMMAND", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_PARAMETERS", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "mine")
    forced = {
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    for network, expected in (
        (False, forced),
        (True, {**forced, "GIT_CONFIG_GLOBAL": "mine", "GIT_SSH_COMMAND": "mine"}),
    ):
        environment = isolate_environment(network=network, folder=tmp_path / "x")
        assert {name: value for name, value in environment.items() if name.startswith("GIT_")} == expected
        assert (environment["LC_ALL"], environment["HTTPS_PROXY"]) == ("C", "mine")


def test_user_s_configuration_cannot_alter_bytes_or_run_hooks(
    shared_upstream: Upstream, user_config: Path, tmp_path: Path
) -> None:
    """Guards against CR LF from core.autocrlf, hooks that run on a fetch, and refused bare repositories."""
    hooks, ran = tmp_path / "hooks", tmp_path / "ran"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (hooks / "reference-transaction").chmod(0o755)
    user_config.write_text(
        f"[core]\n\tautocrlf = true\n\teol = crlf\n\thooksPath = {hooks}\n\tattributesFile = {tmp_path}/attributes\n"
        "[safe]\n\tbareRepository = explicit\n[init]\n\tdefaultObjectFormat = sha256\n[protocol]\n\tversion = 0\n"
    )
    (tmp_path / "attributes").write_text("* text eol=crlf\n")
    upstream = shared_upstream
    assert read_source(upstream.pin, upstream.manifest, None, tmp_path / "work") == upstream.files
    # A fetch that updates references, so that the hook would run: the commit is not advertised.
    commit_files(tmp_path / "repository", {"x": b"1"})
    old = git(tmp_path / "repository", "rev-parse", "HEAD")
    commit_files(tmp_path / "repository", {"x": b"2"})
    fetch_commit(tmp_path / "bare", str(tmp_path / "repository"), old, otherwise="")
    assert run_git(["--git-dir=.", "cat-file", "blob", f"{old}:x"], tmp_path / "bare") == b"1"
    assert run_git(["--git-dir=.", "for-each-ref"], tmp_path / "bare") != b""
    assert not ran.exists()


def test_submodule_at_another_commit_is_refused(shared_upstream: Upstream, user_config: Path, tmp_path: Path) -> None:
    """Guards against headers of another CUTLASS than the one that the upstream commit was made with."""
    upstream = shared_upstream
    locked = replace(upstream.source.submodules[0], commit="1" * 40)
    pin = make_pin(replace(upstream.source, submodules=(locked,)), upstream.manifest)
    with pytest.raises(BadHashError) as caught:
        read_source(pin, upstream.manifest, None, tmp_path / "work")
    assert str(caught.value) == (
        "a submodule is not at the pinned commit\n"
        f"  where:    {upstream.main}: cut\n"
        f"  expected: {'1' * 40}\n"
        f"  got:      {upstream.source.submodules[0].commit}\n"
        "  next:     correct the submodule's commit in third_party/msa.lock.toml, or pass another --from"
    )


def test_repository_without_the_commit_is_refused(shared_upstream: Upstream, user_config: Path, tmp_path: Path) -> None:
    """Guards against reading whatever commit a repository happens to have."""
    upstream = shared_upstream
    with pytest.raises(BadHashError) as caught:
        read_source(upstream.pin, upstream.manifest, str(upstream.cut), tmp_path / "work")
    assert str(caught.value) == (
        "the repository does not have the pinned commit\n"
        f"  where:    {upstream.cut}\n"
        f"  expected: commit {upstream.commit}\n"
        "  next:     bring a checkout with its submodules, then: nox -s vendor -- --pin sample --from CHECKOUT"
    )


def test_unreachable_repository_is_an_offline_error(
    shared_upstream: Upstream, user_config: Path, tmp_path: Path
) -> None:
    """Guards against git's exit status alone in place of what it said and the way without the network."""
    upstream, gone = shared_upstream, f"file://{tmp_path}/gone"
    with pytest.raises(OfflineError) as caught:
        read_source(upstream.pin, upstream.manifest, gone, tmp_path / "work")
    assert str(caught.value) == (
        f"git could not fetch from {gone}\n"
        f"  expected: commit {upstream.commit}\n"
        f"  got:      fatal: '{tmp_path}/gone' does not appear to be a git repository\n"
        "  next:     bring a checkout with its submodules, then: nox -s vendor -- --pin sample --from CHECKOUT"
    )


def test_symbolic_link_in_a_commit_is_refused(user_config: Path, tmp_path: Path) -> None:
    """Guards against the text of a link's target in place of a file."""
    repository = tmp_path / "repository"
    commit_files(repository, {"pkg/a.py": b"x"})
    (repository / "pkg/link.py").symlink_to("/etc/passwd")
    commit = commit_files(repository, {})
    manifest = make_manifest({"a.py": b"x"})
    pin = make_pin(GitSource(str(repository), commit, "pkg"), manifest)
    with pytest.raises(ArchiveError) as caught:
        read_source(pin, manifest, None, tmp_path / "work")
    assert (caught.value.what, caught.value.where) == ("not a regular file", f"{repository}: link.py")


def test_blobs_are_capped_before_they_are_read(
    shared_upstream: Upstream, user_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a commit whose files fill the memory."""
    monkeypatch.setattr("msa_vendored.vendoring.archives.MAX_MEMBER_BYTES", 12)
    upstream = shared_upstream
    with pytest.raises(ArchiveError) as caught:
        read_source(upstream.pin, upstream.manifest, None, tmp_path / "work")
    assert (caught.value.expected, caught.value.got) == ("at most 12 bytes a file", "13 bytes")


def test_git_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against swallowing git's message, and against a traceback where git is not installed."""
    with pytest.raises(GitFailedError) as caught:
        run_git(["--git-dir=.", "cat-file", "-e", "HEAD"], tmp_path)
    assert (caught.value.what, caught.value.got) == ("git cat-file failed", "fatal: not a git repository: '.'")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitFailedError, match="git is not installed"):
        run_git(["--version"], tmp_path)


def test_external_transport_helpers_never_run(tmp_path: Path, user_config: Path) -> None:
    """Guards against a URL that is a command: git's ext:: transport runs it, where the user's configuration lets it."""
    user_config.write_text('[protocol "ext"]\n\tallow = always\n')
    with pytest.raises(OfflineError) as caught:
        fetch_commit(tmp_path / "bare", f"ext::touch {tmp_path / 'ran'}", "1" * 40, otherwise="")
    assert caught.value.got == "fatal: transport 'ext' not allowed"
    assert not (tmp_path / "ran").exists()
