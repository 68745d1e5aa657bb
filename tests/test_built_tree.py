"""The built tree: made from exactly the pin and the series, named by its digest, whole or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from msa_vendored.trees import FileEntry, Manifest, scan_tree
from msa_vendored.vendoring import built as built_module
from msa_vendored.vendoring.built import build_tree, load_tree, tree_key
from msa_vendored.vendoring.errors import DriftError, PatchError
from msa_vendored.vendoring.lock import Pin, WheelSource
from msa_vendored.vendoring.series import Patch, compute_locks, parse_patch

FILES = {
    "__init__.py": b"from .api import run\n",
    "api.py": b"from interface import run\nVALUE = 1\n",
    "bench_utils.py": b"import numpy\n",
    "cute/interface.py": b"import src.kernel as kernel\n\n\ndef run():\n    return kernel.VALUE\n",
    "cute/src/__init__.py": b"",
    "cute/src/kernel.py": b"VALUE = 1\n",
    "cute/test_kernel.py": b"from src import kernel\n",
    "run.sh": b"#!/bin/sh\n",
}

HEADER = """\
Description: make the value {value}
 The test wants it.
Author: A Tester
Origin: vendor
Forwarded: not-needed
Last-Update: 2026-11-30
Kind: numerical
Drop-When: never
Test: tests/test_x.py::test_x
Fails-With: wrong value

"""


def make_patch(name: str, path: str, old: str, new: str) -> Patch:
    """A patch that replaces the only line of a file."""
    body = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n"
    return parse_patch(name, (HEADER.format(value=new) + body).encode(), name)


KERNEL = make_patch("kernel.patch", "cute/src/kernel.py", "VALUE = 1", "VALUE = 2")


@pytest.fixture
def pristine(tmp_path: Path) -> Path:
    """A vendored tree."""
    root = tmp_path / "pristine"
    for path, data in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    (root / "run.sh").chmod(0o755)
    return root


@pytest.fixture
def manifest(pristine: Path) -> Manifest:
    """Its manifest."""
    return scan_tree(pristine)


def make_pin(manifest: Manifest, *patches: Patch) -> Pin:
    """A pin of that tree with locks for the patches."""
    source = WheelSource("vllm", "1.0", "vllm-1.0-py3-none-any.whl", "0" * 64, 1, "any", "vllm/msa")
    pin = Pin("vllm-1.0", source, "MIT", (), {"nvidia-cutlass-dsl": "4.6.2"}, "m.tsv", manifest.digest)
    return replace(pin, patches=compute_locks(FILES, patches))


def test_built_tree_holds_the_patched_and_rewritten_package(pristine: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Guards the whole step: patched bytes, relative imports, no tests or benchmarks, modes kept."""
    built = build_tree(make_pin(manifest, KERNEL), pristine, manifest, [KERNEL], tmp_path / "trees")
    package = built.root / "msa_vendored" / built.package
    assert (package / "cute/src/kernel.py").read_bytes() == b"VALUE = 2\n"
    assert (package / "cute/interface.py").read_bytes().startswith(b"from .src import kernel as kernel\n")
    assert (package / "api.py").read_bytes() == b"from .cute.interface import run\nVALUE = 1\n"
    assert not (package / "bench_utils.py").exists()
    assert not (package / "cute/test_kernel.py").exists()
    assert built.manifest.by_path["run.sh"].mode == "100755"
    assert scan_tree(package) == built.manifest


def test_name_and_provenance_follow_the_digest(pristine: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Guards content addressing: other bytes under the same name would reuse another tree's kernels."""
    patched = build_tree(make_pin(manifest, KERNEL), pristine, manifest, [KERNEL], tmp_path / "trees")
    plain = build_tree(make_pin(manifest), pristine, manifest, [], tmp_path / "trees")
    assert patched.package != plain.package
    for tree in (patched, plain):
        digest = str(tree.provenance["built_tree_digest"])
        assert tree.package == "_msa_" + digest.removeprefix("sha256:")[:12]
        assert tree.provenance["package"] == f"msa_vendored.{tree.package}"
    touched = [row["path"] for row in cast("list[dict[str, str]]", patched.provenance["touched"])]
    assert touched == ["api.py", "cute/interface.py", "cute/src/kernel.py"]
    (patch,) = cast("list[dict[str, Any]]", patched.provenance["patches"])
    assert (patch["kind"], patch["subject"]) == ("numerical", "make the value VALUE = 2")
    assert [touch["path"] for touch in patch["touches"]] == ["cute/src/kernel.py"]


def test_a_second_build_reuses_the_verified_tree(pristine: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Guards idempotence: the same inputs give the same folder, and nothing else appears beside it."""
    pin, trees = make_pin(manifest, KERNEL), tmp_path / "trees"
    first = build_tree(pin, pristine, manifest, [KERNEL], trees)
    stamp = first.root.stat().st_mtime_ns
    second = build_tree(pin, pristine, manifest, [KERNEL], trees)
    assert (first.reused, second.reused) == (False, True)
    assert first.root.stat().st_mtime_ns == stamp
    assert [path.name for path in trees.iterdir()] == [first.root.name]


@pytest.mark.parametrize("harm", ["changed", "extra", "missing", "mode"])
def test_a_damaged_built_tree_is_refused(pristine: Path, manifest: Manifest, tmp_path: Path, harm: str) -> None:
    """Guards reuse: a tree edited after its build must not go into a wheel, whatever the edit."""
    pin, trees = make_pin(manifest, KERNEL), tmp_path / "trees"
    built = build_tree(pin, pristine, manifest, [KERNEL], trees)
    target = built.root / "msa_vendored" / built.package / "cute/src/kernel.py"
    if harm == "changed":
        target.write_bytes(b"VALUE = 3\n")
    elif harm == "missing":
        target.unlink()
    elif harm == "mode":
        target.chmod(0o755)
    else:
        target.with_name("more.py").write_bytes(b"")
    with pytest.raises(DriftError) as caught:
        build_tree(pin, pristine, manifest, [KERNEL], trees)
    assert caught.value.what == "a built tree was changed after it was built"
    assert caught.value.next_command == f"rm -rf {built.root} && nox -s build"
    assert harm in str(caught.value.got)


def test_a_changed_pristine_file_is_refused_before_anything_is_written(
    pristine: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """Guards the first arrow: the build re-reads every byte, so an edit of the vendored tree cannot slip in."""
    (pristine / "run.sh").write_bytes(b"#!/bin/bash\n")
    with pytest.raises(DriftError) as caught:
        build_tree(make_pin(manifest), pristine, manifest, [], tmp_path / "trees")
    assert caught.value.got == "run.sh"
    assert list((tmp_path / "trees").iterdir()) == []


def test_a_failing_patch_leaves_nothing_behind(pristine: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Guards atomicity: a series that fails half-way must not leave a half-patched tree for the next run."""
    bad = make_patch("bad.patch", "api.py", "VALUE = 9", "VALUE = 2")
    pin = replace(make_pin(manifest, KERNEL), patches=(*compute_locks(FILES, [KERNEL]),))
    with pytest.raises(PatchError):
        build_tree(pin, pristine, manifest, [KERNEL, bad], tmp_path / "trees")
    assert list((tmp_path / "trees").iterdir()) == []


def test_modes_do_not_depend_on_the_umask(pristine: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Guards reproducibility: a strict umask must not reach the files of a wheel."""
    old = os.umask(0o077)
    try:
        built = build_tree(make_pin(manifest), pristine, manifest, [], tmp_path / "trees")
    finally:
        os.umask(old)
    package = built.root / "msa_vendored" / built.package
    assert oct((package / "api.py").stat().st_mode & 0o777) == "0o644"
    assert oct((package / "run.sh").stat().st_mode & 0o777) == "0o755"


BUILD_PLAIN = """
import sys
from pathlib import Path
from msa_vendored.trees import scan_tree
from msa_vendored.vendoring.built import build_tree
from msa_vendored.vendoring.lock import Pin, WheelSource

pristine, trees = map(Path, sys.argv[1:])
manifest = scan_tree(pristine)
source = WheelSource("vllm", "1.0", "vllm-1.0-py3-none-any.whl", "0" * 64, 1, "any", "vllm/msa")
pin = Pin("vllm-1.0", source, "MIT", (), {"nvidia-cutlass-dsl": "4.6.2"}, "m.tsv", manifest.digest)
print(build_tree(pin, pristine, manifest, [], trees).root)
"""


def test_builds_at_once_end_with_one_whole_tree(pristine: Path, tmp_path: Path) -> None:
    """Guards the race: all must return the same verified tree, and no partial folder may stay."""
    trees = tmp_path / "trees"
    command = [sys.executable, "-c", BUILD_PLAIN, str(pristine), str(trees)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    roots = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [path.name for path in trees.iterdir()] == [Path(root).name for root in roots]
    load_tree(Path(roots.pop()))


def test_the_loser_of_a_race_takes_the_winners_tree(
    pristine: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the exact window between looking and renaming, which the race above may not meet."""
    pin, trees = make_pin(manifest, KERNEL), tmp_path / "trees"
    write = built_module._write_tree

    def write_and_lose(root: Path, *rest: object) -> None:
        write(root, *rest)  # type: ignore[arg-type]  # passed through
        monkeypatch.setattr(built_module, "_write_tree", write)
        build_tree(pin, pristine, manifest, [KERNEL], trees)

    monkeypatch.setattr(built_module, "_write_tree", write_and_lose)
    assert build_tree(pin, pristine, manifest, [KERNEL], trees).reused
    assert len(list(trees.iterdir())) == 1


KEY_CHANGES = {
    "pin": lambda pin: replace(pin, id="vllm-1.1"),
    "tree": lambda pin: replace(pin, tree_digest="sha256:" + "0" * 64),
}


@pytest.mark.parametrize("change", KEY_CHANGES)
def test_the_key_contains_everything_that_decides(manifest: Manifest, change: str) -> None:
    """Guards against a stale tree: anything that can change the result must change its folder."""
    pin = make_pin(manifest, KERNEL)
    assert tree_key(pin, [KERNEL]) != tree_key(KEY_CHANGES[change](pin), [KERNEL])
    assert tree_key(pin, [KERNEL]) != tree_key(pin, [])
    assert tree_key(pin, [KERNEL]) != tree_key(pin, [KERNEL], omit="kernel.patch")
    other = make_patch("kernel.patch", "cute/src/kernel.py", "VALUE = 1", "VALUE = 7")
    assert tree_key(pin, [KERNEL]) != tree_key(pin, [other])


def test_provenance_and_bill_of_materials_name_no_host_and_no_time(
    pristine: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """Guards reproducibility and privacy: neither file may carry a path, a name or a clock of the builder."""
    built = build_tree(make_pin(manifest, KERNEL), pristine, manifest, [KERNEL], tmp_path / "trees")
    sbom = built.sbom.read_text()
    for text in ((built.root / "msa_vendored/_provenance.json").read_text(), sbom):
        assert str(tmp_path) not in text
        assert os.uname().nodename not in text
        assert "timestamp" not in text
    again = build_tree(make_pin(manifest, KERNEL), pristine, manifest, [KERNEL], tmp_path / "again")
    assert again.sbom.read_text() == sbom


def test_the_bill_of_materials_carries_each_patch_as_pedigree(
    pristine: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """Guards the point of the bill: an auditor must see that this MSA is modified, and how."""
    built = build_tree(make_pin(manifest, KERNEL), pristine, manifest, [KERNEL], tmp_path / "trees")
    sbom = json.loads(built.sbom.read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    msa = sbom["components"][0]
    (patch,) = msa["pedigree"]["patches"]
    assert patch["diff"]["text"]["content"] == KERNEL.data.decode()
    assert msa["hashes"][0]["content"] == str(built.provenance["built_tree_digest"]).removeprefix("sha256:")


@pytest.mark.parametrize("omitted", ["first.patch", "second.patch", "third.patch"])
def test_a_series_applies_with_any_one_patch_left_out(
    pristine: Path, manifest: Manifest, tmp_path: Path, omitted: str
) -> None:
    """Guards the red half of red/green: later hunks move by the lines that the omitted patch adds."""
    bodies = {
        "first.patch": b"@@ -1,2 +1,4 @@\n a\n+1\n+1\n b\n",
        "second.patch": b"@@ -6,3 +6,4 @@\n d\n+2\n e\n f\n",
        "third.patch": b"@@ -10,2 +10,1 @@\n g\n-h\n",
    }
    data = b"a\nb\nc\nd\ne\nf\ng\nh\n"
    name, path = "api.py", pristine / "api.py"
    path.write_bytes(data)
    files = {**FILES, name: data}
    manifest = Manifest((*(e for e in manifest if e.path != name), FileEntry.from_bytes(name, data)))
    head = HEADER.format(value=1).encode() + b"--- a/api.py\n+++ b/api.py\n"
    texts = {"second.patch": bodies["second.patch"].replace(b" e\n f\n", b" e\n").replace(b"-6,3 +6,4", b"-6,2 +6,3")}
    patches = [parse_patch(key, head + texts.get(key, body), key) for key, body in bodies.items()]
    pin = replace(make_pin(manifest), patches=compute_locks(files, patches))
    # The text is no Python, so only the patched bytes are looked at, before the rewrite.
    from msa_vendored.vendoring.omit import apply_without

    result = apply_without(files, patches, omitted)[name]
    expected = {
        "first.patch": b"a\nb\nc\nd\n2\ne\nf\ng\n",
        "second.patch": b"a\n1\n1\nb\nc\nd\ne\nf\ng\n",
        "third.patch": b"a\n1\n1\nb\nc\nd\n2\ne\nf\ng\nh\n",
    }
    assert result == expected[omitted]
    assert pin.patches[0].file == "first.patch"
