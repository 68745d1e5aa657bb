"""Wheels come by pip, and are checked whatever pip says."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from fetch_cases import FILES, WHEEL, ignore_report, make_manifest, make_pin, make_wheel, read_source

from msa_vendored.vendoring.errors import BadHashError, OfflineError
from msa_vendored.vendoring.fetch import fetch_wheel
from msa_vendored.vendoring.lock import WheelSource


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
