"""A small checkout of its own, with a small upstream whose releases are wheels: what the rebase tests work on."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msa_vendored.trees import EXECUTABLE, REGULAR, FileEntry, Manifest
from msa_vendored.vendoring.__main__ import main
from msa_vendored.vendoring.lock import Lock, Pin, WheelSource, read_lock
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.pin_series import read_pin_series
from msa_vendored.vendoring.series import Patch, apply_series, compute_locks, parse_patch
from msa_vendored.vendoring.udiff import make_udiff
from msa_vendored.vendoring.vendor import vendor_pin

FOLDER = "vllm/msa"
HEADER = """\
Description: {subject}
 The test wants it.
Author: A Tester
Origin: vendor
Forwarded: not-needed
Last-Update: 2026-11-30
Kind: build
Drop-When: never
Test: tests/test_x.py::test_x
Fails-With: wrong value

"""
METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
Requires-Dist: torch==2.13.0
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.8.0
Requires-Dist: quack-kernels>=0.6
Requires-Dist: apache-tvm-ffi==9.9 ; extra == "other"
"""
TESTED_WITH = {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4", "apache-tvm-ffi": "0.1.11"}


@dataclass(frozen=True)
class Run:
    """One run of the command line: exit status, both outputs, and the JSON document if one was printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The document of ``--json``."""
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict by patch, its suffix left out."""
        return {item["name"].removesuffix(".patch"): item["verdict"] for item in self.document.get("patches", [])}

    def patch(self, name: str) -> dict[str, Any]:
        """What the document says about a patch."""
        item: dict[str, Any] = next(p for p in self.document["patches"] if p["name"] == f"{name}.patch")
        return item


@dataclass
class Lab:
    """A checkout below ``home`` whose default pin is release 1.0."""

    home: Path
    files: dict[str, bytes]
    modes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in (self.root / "third_party" / "licenses", self.root / "patches"):
            folder.mkdir(parents=True)
        (self.root / "third_party/licenses/MIT.txt").write_text("MIT\n")
        (self.root / "patches/series").write_text("# the patches\n")
        pin = self.describe("1.0", self.files, self.modes)
        self.write_pin(pin, self.files, self.modes)

    @property
    def root(self) -> Path:
        """The checkout."""
        return self.home / "checkout"

    @property
    def lock(self) -> Lock:
        """The lock as it is on disk."""
        return read_lock(self.root / "third_party/msa.lock.toml")

    def make_wheel(self, version: str, files: Mapping[str, bytes], modes: Mapping[str, str] | None = None) -> Path:
        """The wheel of a release."""
        folder = self.home / "wheels" / version
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"vllm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, data in files.items():
                info = zipfile.ZipInfo(f"{FOLDER}/{name}")
                info.external_attr = (0o100755 if (modes or {}).get(name) == EXECUTABLE else 0o100644) << 16
                wheel.writestr(info, data)
            texts = {"METADATA": METADATA.format(version=version), "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
            for name, text in texts.items():  # with ZipInfo: without, the time of day would be in the digest
                wheel.writestr(zipfile.ZipInfo(f"vllm-{version}.dist-info/{name}"), text)
        return path

    def describe(self, version: str, files: Mapping[str, bytes], modes: Mapping[str, str] | None = None) -> Pin:
        """The pin of a release."""
        wheel = self.make_wheel(version, files, modes)
        data = wheel.read_bytes()
        source = WheelSource("vllm", version, wheel.name, hashlib.sha256(data).hexdigest(), len(data), "any", FOLDER)
        manifest = make_manifest(files, modes or {})
        name = f"vllm-{version}.manifest.tsv"
        return Pin(f"vllm-{version}", source, "MIT", ("licenses/MIT.txt",), TESTED_WITH, name, manifest.digest)

    def write_pin(self, pin: Pin, files: Mapping[str, bytes], modes: Mapping[str, str]) -> None:
        """Add a pin with the patches that there are to the lock, and vendor its tree."""
        third_party = self.root / "third_party"
        manifest = make_manifest(files, modes)
        (third_party / pin.manifest).write_text(manifest.to_text())
        pin = replace(pin, patches=compute_locks(files, read_pin_series(self.root, pin)))
        known = self.lock if (third_party / "msa.lock.toml").is_file() else Lock(pin.id, ())
        pins = (*(other for other in known.pins if other.id != pin.id), pin)
        (third_party / "msa.lock.toml").write_text(dump_lock(replace(known, pins=pins)))
        version = pin.id.removeprefix("vllm-")
        vendor_pin(pin, manifest, third_party, source=str(self.make_wheel(version, files, modes)))

    def add_patch(
        self, name: str, edits: Mapping[str, tuple[bytes, bytes] | bytes], *, subject: str | None = None
    ) -> Patch:
        """Add a patch at the end of the series.

        Args:
            name: without its suffix.
            edits: by path: text to replace, which is there once, and what takes its place; or a whole new file.
            subject: of the header.
        """
        tree, diffs = self.patched(), b""
        for path, edit in edits.items():
            old = tree.get(path)
            if isinstance(edit, bytes):
                new = edit
            else:
                assert old is not None
                assert old.count(edit[0]) == 1, f"{edit[0]!r} is {old.count(edit[0])} times in {path}"
                new = old.replace(*edit)
            diffs += make_udiff(path, old, new)
        data = HEADER.format(subject=subject or name).encode() + diffs
        (self.root / f"patches/{name}.patch").write_bytes(data)
        with (self.root / "patches/series").open("a") as series:
            series.write(f"{name}.patch\n")
        pin = self.lock.pins[0]
        self.write_pin(replace(pin, patches=()), self.files, self.modes)
        return parse_patch(f"{name}.patch", data, name)

    def patched(self, pin_id: str = "vllm-1.0", files: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
        """The files of a pin with its patches, applied by the rules of the build."""
        pin = self.lock.pin(pin_id)
        tree = dict(self.files if files is None else files)
        changed = apply_series(tree, read_pin_series(self.root, pin), pin.patches, pin=pin_id)
        merged = {**tree, **changed}
        return {path: data for path, data in merged.items() if data is not None}

    def run(self, *arguments: str) -> Run:
        """Run the command line in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["--root", str(self.root), *arguments])
        return Run(code, out.getvalue(), err.getvalue())

    def rebase(self, *arguments: str) -> Run:
        """Run ``rebase`` without the checks of the build, which need the real MSA."""
        return self.run("rebase", "--json", "--no-checks", *arguments)

    def upgrade(self, files: Mapping[str, bytes], *arguments: str, modes: Mapping[str, str] | None = None) -> Run:
        """Rebase onto release 2.0, which has these files."""
        wheel = self.make_wheel("2.0", files, modes)
        return self.rebase("--to", "vllm==2.0", "--from-source", str(wheel), *arguments)

    @property
    def scratch(self) -> Path:
        """The scratch repository of the rebase that has stopped."""
        state = json.loads((self.root / "build/rebase/state.json").read_text())
        return Path(state["scratch"])

    def git(self, *arguments: str) -> str:
        """The user's own git in the scratch repository, with the user's environment."""
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=self.scratch, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def snapshot(self) -> dict[str, bytes]:
        """Every file of the checkout that git would show."""
        files = [path for name in ("third_party", "patches") for path in (self.root / name).rglob("*")]
        tree = self.root / "third_party" / "msa"
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in files
            if path.is_file() and not path.is_relative_to(tree)
        }


def make_manifest(files: Mapping[str, bytes], modes: Mapping[str, str]) -> Manifest:
    """The manifest of a tree."""
    return Manifest(tuple(FileEntry.from_bytes(p, data, modes.get(p, REGULAR)) for p, data in files.items()))


def make_repository(folder: Path) -> Path:
    """A git repository of the user with one commit."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    identity = ["-c", "user.name=U", "-c", "user.email=u@example.org", "-c", "commit.gpgSign=false"]
    for command in (["init", "--quiet", "."], [*identity, "commit", "--quiet", "--allow-empty", "-m", "mine"]):
        subprocess.run(["git", *command], cwd=folder, env=environment, check=True, capture_output=True)
    return folder


SOURCE = b"one\ntwo \nthree\nfour\nfive\n"
UPSTREAM = {"x.txt": b"one\nzwei\nthree\nfour\nfive\n", "y.txt": b"zero\n" + SOURCE}


def make_lab(home: Path) -> Lab:
    """A lab whose first patch conflicts with UPSTREAM and whose second moves."""
    lab = Lab(home, {"x.txt": SOURCE, "y.txt": SOURCE})
    lab.add_patch("fix", {"x.txt": (b"two \n", b"2\n")})
    lab.add_patch("other", {"y.txt": (b"four\n", b"4\n")})
    return lab


def resolve(lab: Lab, data: bytes = b"one\nZwei \nthree\nfour\nfive\n") -> None:
    """Resolve the conflict as a maintainer does: edit, then git add with whatever git the user has."""
    (lab.scratch / "x.txt").write_bytes(data)
    lab.git("add", "x.txt")
