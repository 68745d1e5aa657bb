"""The parts of the rebase for themselves: the summary, versions, git targets, publication."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rebase_lab import TESTED_WITH, Lab, make_manifest

from msa_vendored.trees import REGULAR
from msa_vendored.vendoring.built import tree_key
from msa_vendored.vendoring.lock import GitSource, Pin, Submodule
from msa_vendored.vendoring.lock_text import dump_lock
from msa_vendored.vendoring.publication import finish_publication, publish_files
from msa_vendored.vendoring.rebase.content import Content
from msa_vendored.vendoring.rebase.proof import list_requirements
from msa_vendored.vendoring.rebase.summary import summarise
from msa_vendored.vendoring.rebase.wheels import parse_requirements


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch repositories go below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Summary ------------------------------------------------------------------------------------------------------------

SPDX = "# SPDX-License-Identifier: {}\n"
OLD_TREE = {
    "api.py": (SPDX.format("MIT") + "import torch\ndef fmha_sm100(q, k=1):\n    pass\n").encode(),
    "cute/interface.py": b"def sparse_atten_func(q, *, causal=False):\n    pass\n",
    "cute/sparse_index_utils.py": b"def build_k2q_csr(q, rows=None):\n    pass\n",
    "jit.py": b'FLAGS = ["-gencode=arch=compute_100a,code=sm_100a"]\n',
    "cute/requirements.txt": b"quack>=0.2\n",
    "cutlass/include/a.hpp": b"1\n",
    "gone.py": b"",
}
NEW_TREE = {
    "api.py": (SPDX.format("Apache-2.0") + "# Copyright (c) 2026 Someone\nimport torch, json, flash\n").encode()
    + b"from .jit import x\ndef fmha_sm100(k=2, q=None):\n    pass\ndef fmha_sm100_plan(n):\n    pass\n",
    "cute/interface.py": b"def sparse_atten_func(\n    q,\n    *,\n    causal=False,  # as before\n):\n    pass\n",
    "cute/sparse_index_utils.py": b"def build_k2q_csr(q: int, rows=None) -> int:\n    pass\n",
    "jit.py": b'FLAGS = ["-gencode=arch=compute_100a,code=sm_100a", "-gencode=arch=compute_100f,code=sm_100f"]\n',
    "cute/requirements.txt": b"quack>=0.6\n",
    "cutlass/include/a.hpp": b"2\n",
    "LICENSE": b"text\n",
    **{f"new/{number}.py": SPDX.format("GPL-3.0-only").encode() for number in range(7)},
}


def make_content(files: dict[str, bytes]) -> Content:
    """A tree of regular files."""
    return Content(files, dict.fromkeys(files, REGULAR))


def test_the_summary_names_what_a_reviewer_must_see(tmp_path: Path) -> None:
    """Guards each section: files, imports, signatures by syntax tree, targets, versions and licences."""
    pin = Lab(tmp_path, {"x": b""}).lock.pins[0]
    new_pin = replace(pin, id="vllm-2.0", tested_with={**TESTED_WITH, "quack-kernels": "0.6.5"})
    summary = summarise(make_content(OLD_TREE), make_content(NEW_TREE), pin, new_pin)
    assert summary.added == ("LICENSE", *(f"new/{number}.py" for number in range(7)))
    assert summary.removed == ("gone.py",)
    assert "cutlass/include/a.hpp" in summary.changed
    assert summary.imports == {"flash": ("api.py",)}, "neither json of the standard library nor relative imports"
    assert summary.signatures == (
        "`fmha_sm100`: removed `q`",
        "`fmha_sm100`: removed `k=1`",
        "`fmha_sm100`: added `k=2`",
        "`fmha_sm100`: added `q=None`",
        "`fmha_sm100_plan`: not defined before",
    )
    assert summary.targets == ("`jit.py`: added `-gencode=arch=compute_100f,code=sm_100f`",)
    assert summary.requirements == (
        "tested with: quack-kernels 0.6.4 to 0.6.5",
        "`cute/requirements.txt`: `-quack>=0.2`",
        "`cute/requirements.txt`: `+quack>=0.6`",
    )
    assert summary.licences == (
        "`api.py`: MIT became Apache-2.0",
        "1 new files: (no SPDX header)",
        "7 new files: GPL-3.0-only",
        "**Apache-2.0 is not in the pin's licence expression MIT**",
        "**GPL-3.0-only is not in the pin's licence expression MIT**",
        "new copyright holder: Someone",
        "`LICENSE` added",
    )
    text = summary.to_markdown()
    assert "**8 files added (0 of them CUTLASS headers)**\n\n- `LICENSE`\n- `new/`: 7 files\n" in text
    assert "- `cutlass/include/a.hpp`" not in text


def test_unchanged_trees_have_nothing_to_say(tmp_path: Path) -> None:
    """Guards against noise: equal trees give an empty summary."""
    pin = replace(Lab(tmp_path, {"x": b""}).lock.pins[0], spdx="MIT AND Apache-2.0 AND GPL-3.0-only")
    summary = summarise(make_content(NEW_TREE), make_content(NEW_TREE), pin, pin)
    assert (summary.added, summary.removed, summary.changed, dict(summary.imports)) == ((), (), (), {})
    assert (summary.signatures, summary.targets, summary.requirements, summary.licences) == ((), (), (), ())


# Versions -----------------------------------------------------------------------------------------------------------


def test_requirements_of_a_wheel_are_read_from_its_metadata() -> None:
    """Guards the versions of a new pin: extras and markers, parentheses, and names with underscores."""
    metadata = (
        "Metadata-Version: 2.1\nName: x\nRequires-Dist: nvidia-cutlass-dsl[cu13]==4.8.0\n"
        "Requires-Dist: quack_kernels (>=0.3.3)\nRequires-Dist: apache-tvm-ffi ==0.1.11\n"
        "Requires-Dist: torch==2.14.0; extra == 'gpu'\n\nRequires-Dist: text\n"
    )
    found = {item.name: (item.extras, item.version, str(item)) for item in parse_requirements(metadata)}
    assert found == {
        "nvidia-cutlass-dsl": (("cu13",), "4.8.0", "nvidia-cutlass-dsl[cu13]==4.8.0"),
        "quack-kernels": ((), None, "quack-kernels>=0.3.3"),
        "apache-tvm-ffi": ((), "0.1.11", "apache-tvm-ffi==0.1.11"),
    }


def test_the_compiler_s_environment_takes_the_pin_s_versions() -> None:
    """Guards the compile check: under the default pin's versions it would prove nothing about the new pin."""
    project = {
        "dependency-groups": {
            "test": ["torch==2.13.0", "nvidia-cutlass-dsl==4.6.2", "apache-tvm-ffi==0.1.11", "pytest==9.2.0"],
            "test-no-deps": ["quack-kernels==0.6.4", "triton==3.6.0"],
        }
    }
    tested = {"nvidia-cutlass-dsl": "4.8.0", "quack-kernels": "0.6.5", "apache-tvm-ffi": "0.1.12"}
    assert list_requirements(project, tested, {"nvidia-cutlass-dsl": ("cu13",)}) == (
        ["torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.8.0", "apache-tvm-ffi==0.1.12", "pytest==9.2.0"],
        ["quack-kernels==0.6.5", "triton==3.6.0"],
    )


# Git targets --------------------------------------------------------------------------------------------------------


def commit_files(folder: Path, files: dict[str, bytes], *, submodule: str | None = None) -> str:
    """A commit of these files, and maybe of a submodule's entry at pkg/cut, in a repository of the user; its id."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=U", "-c", "user.email=u@example.org", "-c", "commit.gpgSign=false"]
        command = ["git", *identity, "-c", "core.hooksPath=/dev/null", *arguments]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    folder.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet", ".")
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "pkg/run.sh").chmod(0o755) if (folder / "pkg/run.sh").exists() else None
    git("add", "--all", "--force", ".")
    if submodule:
        git("update-index", "--add", "--cacheinfo", f"160000,{submodule},pkg/cut")
    git("commit", "--quiet", "-m", "x")
    return git("rev-parse", "HEAD")


def add_git_pin(lab: Lab, commit: str, submodule: str) -> None:
    """A pin of kind git in the lock, which gives url, folder and submodules to new ones."""
    module = Submodule("cut", "https://example.org/cut.git", submodule, ("include",))
    source = GitSource("https://example.org/msa.git", commit, "pkg", (module,))
    files = {"x.txt": b"one\n"}
    manifest = make_manifest(files, {})
    name = "minimax-0.manifest.tsv"
    pin = Pin("minimax-0", source, "MIT", ("licenses/MIT.txt",), TESTED_WITH, name, manifest.digest, series="other")
    (lab.root / "other").mkdir()
    (lab.root / "other/series").write_text("")
    (lab.root / "third_party" / name).write_text(manifest.to_text())
    lock = replace(lab.lock, pins=(*lab.lock.pins, pin))
    (lab.root / "third_party/msa.lock.toml").write_text(dump_lock(lock))


def test_a_git_commit_is_a_target_with_its_submodules(tmp_path: Path) -> None:
    """Guards --to COMMIT: modes and submodules come from the commit, url and folder from the pin that is there."""
    lab = Lab(tmp_path, {"x.txt": b"one\ntwo\nthree\n", "run.sh": b"#!/bin/sh\n"})
    lab.add_patch("fix", {"x.txt": (b"two\n", b"2\n")})
    inner = commit_files(tmp_path / "msa/pkg/cut", {"include/a.h": b"a\n", "docs/b": b"b\n"})
    files = {"pkg/x.txt": b"zero\none\ntwo\nthree\n", "pkg/run.sh": b"#!/bin/sh\n", "README": b"r\n"}
    commit = commit_git_target(tmp_path, files, inner)
    add_git_pin(lab, "a" * 40, "b" * 40)
    run = lab.rebase("--to", commit, "--from-source", str(tmp_path / "msa"))
    assert (run.code, run.verdicts) == (0, {"fix": "moved"}), run.err
    pin = lab.lock.pin(f"minimax-{commit[:8]}")
    assert isinstance(pin.source, GitSource)
    assert (pin.source.url, pin.source.commit, pin.series) == ("https://example.org/msa.git", commit, "patches")
    assert [(m.path, m.commit, m.include) for m in pin.source.submodules] == [("cut", inner, ("include",))]
    manifest = (lab.root / "third_party" / pin.manifest).read_text().splitlines()
    assert [line.split("\t")[:2] for line in manifest] == [
        ["cut/include/a.h", "100644"], ["run.sh", "100755"], ["x.txt", "100644"],
    ]  # fmt: skip


def commit_git_target(tmp_path: Path, files: dict[str, bytes], inner: str) -> str:
    """The outer repository, whose submodule is checked out in it."""
    folder = tmp_path / "msa"
    (folder / "pkg/cut").rename(tmp_path / "aside")
    commit = commit_files(folder, files, submodule=inner)
    (folder / "pkg/cut").rmdir() if (folder / "pkg/cut").exists() else None
    (tmp_path / "aside").rename(folder / "pkg/cut")
    return commit


# Publication --------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from(["a", "p/b", "p/q/c", "d"]), st.none() | st.binary(max_size=9), min_size=1),
    st.integers(min_value=0, max_value=8),
)
def test_publication_is_all_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes | None], stop: int
) -> None:
    """Guards the journal: interrupted at any rename, the files are all old, or all new after the next read."""
    root = tmp_path_factory.mktemp("root")
    old = {"a": b"A", "p/b": b"B"}
    for path, data in old.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(data)
    calls = 0

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls > stop:
            raise KeyboardInterrupt
        path.replace(target)
        return target

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            publish_files(root, files)
    finish_publication(root)
    found = {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and not p.is_relative_to(root / "build")
    }
    new = {path: data for path, data in {**old, **files}.items() if data is not None}
    assert found == (old if stop == 0 else new)


def test_a_built_tree_of_other_tested_versions_is_another_tree(tmp_path: Path) -> None:
    """Guards the wheel after --tested-with: provenance names those versions, so an older built tree must not serve."""
    pin = Lab(tmp_path, {"x": b""}).lock.pins[0]
    other = replace(pin, tested_with={**pin.tested_with, "quack-kernels": "0.6.5"})
    assert tree_key(pin, ()) == tree_key(replace(pin), ())
    assert tree_key(pin, ()) != tree_key(other, ())
