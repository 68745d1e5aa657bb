"""Where a pin's files come from: pip for wheels, git for commits, and what ``--from`` may name."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from msa_vendored.trees import FileEntry, Manifest
from msa_vendored.vendoring.errors import ArchiveError, BadHashError, OfflineError, UsageError
from msa_vendored.vendoring.fetch import classify_source, fetch_wheel, open_source
from msa_vendored.vendoring.git import GitFailedError, fetch_commit, is_repository, isolate_environment, run_git
from msa_vendored.vendoring.lock import GitSource, Pin, Submodule, WheelSource

FILES = {"jit.py": b"flags = []\n", "csrc/a.cu": b"\xff\r\n"}
HEADERS = {"include/x.hpp": b"#pragma once\n", "tools/util/include/y.hpp": b"// y\n"}
UNUSED = {"README.md": b"unused\n", "examples/x.hpp": b"unused\n"}
WHEEL = "fakemsa-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
TESTED_WITH = {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"}


def make_manifest(files: dict[str, bytes]) -> Manifest:
    return Manifest(tuple(FileEntry.from_bytes(path, data) for path, data in files.items()))


def make_pin(source: WheelSource | GitSource, manifest: Manifest) -> Pin:
    return Pin("sample", source, "MIT", ("licenses/MIT.txt",), TESTED_WITH, "sample.manifest.tsv", manifest.digest)


def ignore_report(_line: str) -> None:
    pass


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def read_source(
    pin: Pin, manifest: Manifest, what: str | None, work: Path, *, offline: bool = False
) -> dict[str, bytes]:
    work.mkdir(exist_ok=True)
    with open_source(pin, manifest, what, offline=offline, work=work, report=ignore_report) as source:
        return dict(source.read(sorted(source.list_files())))


# Wheels and pip ------------------------------------------------------------------------------------------------------


def make_wheel(path: Path) -> WheelSource:
    info = "fakemsa-1.0.dist-info"
    members = {f"top/pkg/{name}": data for name, data in FILES.items()}
    members |= {"top/other.so": b"not needed"}
    members |= {f"{info}/METADATA": b"Metadata-Version: 2.1\nName: fakemsa\nVersion: 1.0\n"}
    members |= {f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp38-abi3-manylinux_2_28_x86_64\n"}
    members |= {f"{info}/RECORD": b""}
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            target.writestr(name, data)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return WheelSource("fakemsa", "1.0", WHEEL, digest, len(data), "manylinux_2_28_x86_64", "top/pkg")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, and pip's own configuration out of the way."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_wheel_is_fetched_by_pip_for_the_pinned_platform(index: Path, tmp_path: Path) -> None:
    """Guards against fetching for the running host: the wheel's tag suits no other platform and no other Python."""
    source, manifest = make_wheel(index / WHEEL), make_manifest(FILES)
    assert read_source(make_pin(source, manifest), manifest, None, tmp_path / "work") == FILES


def test_pip_is_asked_for_one_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards each option: without one of them another host, Python or index gets another file, or dependencies too."""
    asked: list[str] = []

    def run(command: list[object], **_options: object) -> subprocess.CompletedProcess[str]:
        asked.extend(str(part) for part in command)
        return subprocess.CompletedProcess([], 1, "", "ERROR: no network\nnotice: x\n")

    monkeypatch.setattr(subprocess, "run", run)
    source = WheelSource("fakemsa", "1.0", WHEEL, "0" * 64, 4, "manylinux_2_28_aarch64", "top/pkg")
    with pytest.raises(OfflineError) as caught:
        fetch_wheel(source, tmp_path, ignore_report)
    assert caught.value.got == "ERROR: no network"
    pairs = dict(pairwise(asked))
    expected = {"-m": "pip", "pip": "download", "--only-binary": ":all:", "--platform": "manylinux_2_28_aarch64"}
    expected |= {"--python-version": "3.11", "--implementation": "cp", "--dest": str(tmp_path / "wheel")}
    assert {key: pairs.get(key) for key in expected} == expected
    assert {"--no-deps", "--no-input"} <= set(asked)
    assert Path(pairs["--requirement"]).read_text() == f"fakemsa==1.0 --hash=sha256:{'0' * 64}\n"


def test_wheel_with_other_bytes_is_refused_by_pip(index: Path, tmp_path: Path) -> None:
    """Guards against an index or mirror that delivers another file under the same name."""
    source = replace(make_wheel(index / WHEEL), sha256="0" * 64)
    got = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    with pytest.raises(BadHashError) as caught:
        fetch_wheel(source, tmp_path, ignore_report)
    assert str(caught.value) == (
        "the package index delivers another file than the pinned one; it was deleted\n"
        f"  where:    {WHEEL}\n"
        f"  expected: sha256 {'0' * 64}, {source.size_bytes:,} bytes\n"
        f"  got:      {got}\n"
        "  next:     check the index that pip is configured to use (pip config list), then run the same command again"
    )
    assert list((tmp_path / "wheel").iterdir()) == []


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"1234", "03ac674216f3e15c761ee1a5e255f067953623c8b388b4459e13f978d7c846f4"),
        (b"12345", f"{WHEEL} of 5 bytes"),
        (None, "no file"),
    ],
    ids=["other_bytes", "other_size", "nothing"],
)
def test_wheel_is_checked_whatever_pip_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None, got: str
) -> None:
    """Guards against trusting pip alone, whose hash check a user's configuration or an old version may lack."""

    def run(command: list[object], **_options: object) -> subprocess.CompletedProcess[str]:
        if data is not None:
            Path(str(command[command.index("--dest") + 1]), WHEEL).write_bytes(data)
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    source = WheelSource("fakemsa", "1.0", WHEEL, "0" * 64, 4, "manylinux_2_28_x86_64", "top/pkg")
    with pytest.raises(BadHashError) as caught:
        fetch_wheel(source, tmp_path, ignore_report)
    assert caught.value.got == got
    assert list((tmp_path / "wheel").iterdir()) == []


def test_wheel_that_pip_cannot_find_is_an_offline_error(index: Path, tmp_path: Path) -> None:
    """Guards against pip's page of output, or none of it, in place of its last word and the way without it."""
    source = make_wheel(tmp_path / WHEEL)
    with pytest.raises(OfflineError) as caught:
        fetch_wheel(source, tmp_path, ignore_report)
    assert str(caught.value) == (
        "pip could not fetch fakemsa==1.0\n"
        f"  expected: {WHEEL}\n"
        "  got:      ERROR: No matching distribution found for fakemsa==1.0\n"
        f"  next:     on a machine that can, fetch that file; then: nox -s vendor -- --from {WHEEL}"
    )


@contextmanager
def serve_index(wheel: bytes, sent_bytes: int) -> Iterator[str]:
    """A package index on this host that announces the whole wheel and sends the first ``sent_bytes`` of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            body, sent = (wheel, sent_bytes) if self.path.endswith(".whl") else (page, len(page))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:sent])

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_interrupted_download_is_an_error_and_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against half a wheel that passes for a whole one, in this run or the next."""
    source = make_wheel(index / WHEEL)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name in ("PIP_RETRIES", "PIP_RESUME_RETRIES"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    data = (index / WHEEL).read_bytes()
    with serve_index(data, len(data) // 2) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises((OfflineError, BadHashError)):
            fetch_wheel(source, tmp_path, ignore_report)
    assert list((tmp_path / "wheel").iterdir()) == []
    again = tmp_path / "again"
    again.mkdir()
    with serve_index(data, len(data)) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert fetch_wheel(source, again, ignore_report).read_bytes() == data


def test_missing_pip_names_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 'No module named pip' from a subprocess, in environments that uv made."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("sys.executable", "/opt/python")
    source = WheelSource("fakemsa", "1.0", WHEEL, "0" * 64, 4, "manylinux_2_28_x86_64", "top/pkg")
    with pytest.raises(OfflineError) as caught:
        fetch_wheel(source, tmp_path, ignore_report)
    assert str(caught.value) == (
        "this Python has no pip to fetch the wheel with\n"
        "  where:    /opt/python\n"
        "  next:     /opt/python -m ensurepip --upgrade"
    )


# Git ----------------------------------------------------------------------------------------------------------------


def git(folder: Path, *args: str) -> str:
    """Run git as the test's own user, independent of the environment."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *identity, *args], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_files(folder: Path, files: dict[str, bytes]) -> str:
    if not folder.exists():
        folder.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main")
    write_files(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


class Upstream:
    """A repository with the package in ``python/pkg`` and a submodule in ``python/pkg/cut``, and a pin of it."""

    def __init__(self, root: Path) -> None:
        self.main, self.cut = root / "main", root / "cut"
        cut_commit = commit_files(self.cut, {**HEADERS, **UNUSED})
        commit_files(self.main, {"README": b"x", **{f"python/pkg/{path}": data for path, data in FILES.items()}})
        git(self.main, "submodule", "--quiet", "add", str(self.cut), "python/pkg/cut")
        self.commit = commit_files(self.main, {})
        self.files = {**FILES, **{f"cut/{path}": data for path, data in HEADERS.items()}}
        self.manifest = make_manifest(self.files)
        submodule = Submodule("cut", str(self.cut), cut_commit, ("include", "tools/util/include"))
        self.source = GitSource(str(self.main), self.commit, "python/pkg", (submodule,))
        self.pin = make_pin(self.source, self.manifest)


@pytest.fixture(scope="module")
def shared_upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    """Read-only for the tests: it takes 0.2 s to make."""
    return Upstream(tmp_path_factory.mktemp("upstream"))


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


# What --from may name ------------------------------------------------------------------------------------------------


def test_from_is_classified(shared_upstream: Upstream, tmp_path: Path) -> None:
    """Guards the order of guesses: an existing path wins over its look, a repository counts for git pins only."""
    manifest = make_manifest(FILES)
    git_pin, wheel_pin = shared_upstream.pin, make_pin(make_wheel(tmp_path / WHEEL), manifest)
    folder = tmp_path / "folder.git"
    folder.mkdir()
    cases = {
        (str(folder), "git"): "folder",
        (str(tmp_path / WHEEL), "wheel"): "archive",
        (str(shared_upstream.main), "git"): "git",
        (str(shared_upstream.main), "wheel"): "folder",
        ("https://example.org/x.git", "git"): "git",
        ("git+https://example.org/x", "git"): "git",
        ("ssh://git@example.org/x", "git"): "git",
        ("git@example.org:a/x.git", "git"): "git",
    }
    found = {case: classify_source(case[0], git_pin if case[1] == "git" else wheel_pin) for case in cases}
    assert found == cases
    assert is_repository(shared_upstream.main)
    assert not is_repository(shared_upstream.main / "python")


@pytest.mark.parametrize(
    "what",
    [
        "missing",
        "",
        "-x",
        "ext::sh -c true",
        "http://example.org/x.git",
        "git@-oProxyCommand=x",
        "https://a b",
        "x.rar",
    ],
)
def test_from_refuses_what_it_does_not_know(
    shared_upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Guards against options or commands that reach git as a URL, and against a vague error for a typing mistake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.rar").touch()
    with pytest.raises(UsageError) as caught:
        classify_source(what, shared_upstream.pin)
    assert (caught.value.what, caught.value.where) == ("--from names nothing that can be read", what)
    assert caught.value.expected == (
        "a folder with the package, an archive (.whl, .zip, .tar, .tar.gz, .tgz, .tar.xz), or a git repository "
        "(a path, https://….git, git+https://, ssh://, file://, user@host:path)"
    )


def test_git_url_for_a_wheel_pin_is_refused(tmp_path: Path) -> None:
    """Guards against fetching a repository that cannot hold the wheel's files."""
    pin = make_pin(make_wheel(tmp_path / WHEEL), make_manifest(FILES))
    with pytest.raises(UsageError, match="pin sample is not in a git repository"):
        classify_source("https://example.org/x.git", pin)


LAYOUTS = ["", "python/pkg/", "msa-1.0/", "msa-1.0/python/pkg/"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["package", "checkout", "package_in_top", "checkout_in_top"])
def test_package_is_found_in_an_archive(shared_upstream: Upstream, tmp_path: Path, layout: str) -> None:
    """Guards the layouts that people have at hand: of git hosts (one top folder), of wheels, of plain ``tar``."""
    upstream, buffer = shared_upstream, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as target:
        for path, data in {**upstream.files, "__pycache__/jit.pyc": b"x", "csrc/.git": b"x"}.items():
            info = tarfile.TarInfo(layout + path)
            info.size = len(data)
            target.addfile(info, io.BytesIO(data))
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(buffer.getvalue())
    assert read_source(upstream.pin, upstream.manifest, str(archive), tmp_path / "work", offline=True) == upstream.files


@pytest.mark.parametrize("layout", ["", "python/pkg/"], ids=["package", "checkout"])
def test_package_is_found_in_a_folder(shared_upstream: Upstream, tmp_path: Path, layout: str) -> None:
    """Guards against residue of git and Python, or unused parts of a submodule, counting as files of the package."""
    upstream = shared_upstream
    root = write_files(tmp_path / "x" / layout, upstream.files)
    write_files(root, {"__pycache__/a.pyc": b"x", "cut/.git": b"gitdir: x", "cut/examples/a.cu": b"x"})
    (root / "cut/examples/link").symlink_to("/etc")
    found = read_source(upstream.pin, upstream.manifest, str(tmp_path / "x"), tmp_path / "work", offline=True)
    assert found == upstream.files


@pytest.mark.parametrize("make", ["file_link", "folder_link", "pipe"])
def test_special_file_in_a_folder_is_refused(shared_upstream: Upstream, tmp_path: Path, make: str) -> None:
    """Guards against following a link out of the folder, and against waiting for a pipe."""
    upstream = shared_upstream
    root = write_files(tmp_path / "x", upstream.files)
    evil = root / "csrc/evil"
    if make == "pipe":
        os.mkfifo(evil)
    else:
        evil.symlink_to("/etc/passwd" if make == "file_link" else "/etc")
    with pytest.raises(ArchiveError) as caught:
        read_source(upstream.pin, upstream.manifest, str(root), tmp_path / "work")
    assert (caught.value.what, caught.value.where) == ("not a regular file", f"{root}: csrc/evil")


def test_source_without_the_package_is_a_usage_error(shared_upstream: Upstream, tmp_path: Path) -> None:
    """Guards against a list of a thousand missing files where the folder is simply the wrong one."""
    upstream = shared_upstream
    root = write_files(tmp_path / "x", {"README": b"x"})
    with pytest.raises(UsageError) as caught:
        read_source(upstream.pin, upstream.manifest, str(root), tmp_path / "work")
    assert str(caught.value) == (
        "no file of pin sample is there\n"
        f"  where:    {root}\n"
        "  expected: the package itself, or a folder that holds it as python/pkg/\n"
        "  next:     pass another --from"
    )


@pytest.mark.parametrize("kind", ["wheel", "git"])
def test_offline_never_runs_pip_or_git(
    shared_upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Guards the promise of --offline: no process is started at all."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    manifest = make_manifest(FILES)
    pin = shared_upstream.pin if kind == "git" else make_pin(make_wheel(tmp_path / WHEEL), manifest)
    with pytest.raises(OfflineError) as caught:
        read_source(pin, manifest, None, tmp_path / "work", offline=True)
    assert str(caught.value) == (
        "the sources of pin sample are not vendored yet, and --offline forbids to fetch\n"
        "  expected: third_party/msa/sample/, or --from with something on this machine\n"
        "  next:     nox -s vendor -- --pin sample"
    )
