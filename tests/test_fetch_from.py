"""What ``--from`` may name: folders, archives, clones and URLs, and nothing else."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from fetch_cases import FILES, WHEEL, Upstream, make_manifest, make_pin, make_wheel, read_source, write_files

from msa_vendored.vendoring.errors import ArchiveError, OfflineError, UsageError
from msa_vendored.vendoring.fetch import classify_source
from msa_vendored.vendoring.git import is_repository

pytest_plugins = ["fetch_fixtures"]  # fixtures shared_upstream


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
