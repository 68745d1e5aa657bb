"""Where the new release comes from: an index, a file, and what is wrong with it; nothing of it is left behind."""

from __future__ import annotations

import http.server
import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rebase_lab import FOLDER, UPSTREAM, Lab, make_lab


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scratch repositories go below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "msa_vendored"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """See ``make_lab``."""
    return make_lab(tmp_path)


@contextmanager
def serve_index(wheel: Path, *, cut: bool) -> Iterator[str]:
    """A package index with one wheel; with ``cut`` the connection closes in the middle of it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = wheel.read_bytes()
            if self.path.rstrip("/").endswith("/vllm"):
                body = f'<html><a href="/files/{wheel.name}">{wheel.name}</a></html>'.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
            else:
                self.send_response(200)
                body = data[: len(data) // 2] if cut else data
            self.send_header("Content-Length", str(len(data) if self.path.startswith("/files") else len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pip knows no index but the one that the test serves, tries once, and keeps nothing."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return monkeypatch


def fetch(lab: Lab, alone: pytest.MonkeyPatch, *arguments: str, cut: bool) -> tuple[int, str]:
    """Rebase onto release 2.0 of a served index; exit status and errors."""
    wheel = lab.make_wheel("2.0", UPSTREAM)
    with serve_index(wheel, cut=cut) as url:
        alone.setenv("PIP_INDEX_URL", url)
        run = lab.rebase("--to", "vllm==2.0", "--skip", "fix", *arguments)
    return run.code, run.err


def test_a_release_is_fetched_with_pip_and_its_versions_are_read(lab: Lab, alone: pytest.MonkeyPatch) -> None:
    """Guards the plain case, and the versions that the wheel itself asks for."""
    code, err = fetch(lab, alone, "--tested-with", "apache-tvm-ffi=0.1.12", cut=False)
    assert code == 0, err
    pin = lab.lock.pin("vllm-2.0")
    assert pin.tested_with == {"nvidia-cutlass-dsl": "4.8.0", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.12"}


def test_an_interrupted_download_leaves_nothing(lab: Lab, alone: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Guards against half a wheel: exit 16, no pin, no leftovers, and the next run may begin."""
    before = lab.snapshot()
    code, err = fetch(lab, alone, cut=True)
    assert (code, err.splitlines()[1]) == (16, "error[MSAV16]: pip could not fetch vllm==2.0")
    assert lab.snapshot() == before
    assert list(own_cache.iterdir()) == []
    assert fetch(lab, alone, cut=False)[0] == 0


def test_a_bad_hash_is_refused(lab: Lab, alone: pytest.MonkeyPatch) -> None:
    """Guards --sha256 with the index and with a file, and a release that the lock knows by its digest."""
    before = lab.snapshot()
    assert fetch(lab, alone, "--sha256", "0" * 64, cut=False)[0] == 11
    run = lab.upgrade(UPSTREAM, "--sha256", "0" * 64)
    assert (run.code, run.err.splitlines()[0]) == (11, "error[MSAV11]: the wheel is not the expected one")
    assert lab.snapshot() == before
    assert lab.upgrade(UPSTREAM, "--skip", "fix").code == 0
    # The lock knows 2.0 now: another wheel under the same name is refused.
    other = lab.make_wheel("2.0", {**UPSTREAM, "y.txt": b"evil\n"})
    run = lab.rebase("--to", "vllm==2.0", "--from-source", str(other))
    assert run.code == 11, run.err


@pytest.mark.parametrize("member", [f"{FOLDER}/../../../evil.py", "/etc/evil.py", f"{FOLDER}/a\\b.py"])
def test_an_archive_that_tries_to_escape_is_refused(lab: Lab, own_cache: Path, member: str) -> None:
    """Guards the file system: no member outside of the wheel's folder, whatever its name says."""
    before = lab.snapshot()
    wheel = lab.make_wheel("2.0", UPSTREAM)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(member, b"evil\n")
    run = lab.rebase("--to", "vllm==2.0", "--from-source", str(wheel))
    assert run.code == 17
    assert lab.snapshot() == before
    assert list(own_cache.iterdir()) == []


def test_offline_fetches_nothing(lab: Lab) -> None:
    """Guards --offline."""
    run = lab.rebase("--to", "vllm==2.0", "--offline")
    assert (run.code, run.err.splitlines()[0]) == (
        16,
        "error[MSAV16]: vllm==2.0 must be fetched, and --offline forbids it",
    )
