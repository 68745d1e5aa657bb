"""What a rebase says about each patch: one small upstream a scenario, and the guard that makes it come out right."""

from __future__ import annotations

from pathlib import Path

import pytest
from rebase_lab import Lab

from msa_vendored.trees import EXECUTABLE
from msa_vendored.vendoring.pin_series import read_pin_series


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch repositories go below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def launcher(name: str) -> str:
    """One of several launchers that differ in their name only."""
    body = "".join(f"    step_{number}(q, k, v)\n" for number in range(6))
    return f"def {name}(q, k, v):\n{body}    return scale * 1.0\n\n\n"


FWD_BWD = (launcher("launch_fwd") + launcher("launch_bwd")).encode()


def edit_launcher(source: bytes, name: str, old: bytes, new: bytes) -> tuple[bytes, bytes]:
    """Replacement of a text within one launcher, as ``Lab.add_patch`` wants it: unique by what surrounds it."""
    start = source.index(b"def " + name.encode())
    rest = source[start:]
    return rest, rest.replace(old, new, 1)


def test_the_right_one_of_two_equal_functions_is_patched_when_a_third_is_inserted_above(tmp_path: Path) -> None:
    """Guards rebase --merge: git apply, git am and rebase --apply patch the wrong function here and report success."""
    lab = Lab(tmp_path, {"launch.py": FWD_BWD})
    lab.add_patch("scale", {"launch.py": edit_launcher(FWD_BWD, "launch_bwd", b"scale * 1.0", b"scale * 2.0")})
    upstream = (launcher("launch_new") + launcher("launch_fwd") + launcher("launch_bwd")).encode()
    run = lab.upgrade({"launch.py": upstream})
    assert (run.code, run.verdicts) == (0, {"scale": "moved"}), run.err
    (patched,) = lab.patched("vllm-2.0", {"launch.py": upstream}).values()
    assert patched.count(b"2.0") == 1
    assert patched.index(b"2.0") > patched.index(b"def launch_bwd")


def test_a_change_that_lands_in_another_function_is_refused(tmp_path: Path) -> None:
    """Guards the anchors: upstream swaps two names, git merges without conflict, and the wrong function is changed."""
    source = (launcher("launch_fwd") + launcher("launch_bwd").replace("step", "back")).encode()
    lab = Lab(tmp_path, {"launch.py": source})
    lab.add_patch("scale", {"launch.py": edit_launcher(source, "launch_bwd", b"scale * 1.0", b"scale * 2.0")})
    before = lab.snapshot()
    upstream = source.replace(b"launch_fwd", b"launch_x").replace(b"launch_bwd", b"launch_fwd")
    upstream = upstream.replace(b"launch_x", b"launch_bwd")
    run = lab.upgrade({"launch.py": upstream})
    assert (run.code, run.verdicts) == (19, {"scale": "misplaced"})
    assert "error[MSAV19]: scale.patch ended up in another function than it was made for" in run.err
    assert run.patch("scale")["details"] == ["launch.py:17: made for launch_bwd, ended up in launch_fwd"]
    assert lab.snapshot() == before
    kept = lab.rebase("--keep", "scale")
    assert kept.code == 0, kept.err
    assert "vllm-2.0" in [pin.id for pin in lab.lock.pins]


KERNELS = """\
#include "x.h"

__global__ void __launch_bounds__(256) scale_fwd(float* x, int n) {
  int i = threadIdx.x;
  int j = blockIdx.x;
  x[i] = 1.0f;
}

__global__ void __launch_bounds__(256) scale_bwd(float* x, int n) {
  int i = threadIdx.x;
  int j = blockIdx.y;
  x[i] = 1.0f;
}
"""


@pytest.mark.parametrize(
    ("upstream", "verdict"),
    [
        (
            KERNELS.replace("scale_fwd", "t").replace("scale_bwd", "scale_fwd").replace(" t(", " scale_bwd("),
            "misplaced",
        ),
        (KERNELS.replace("(float* x, int n)", "(float* __restrict__ x, long n)"), "clean"),
        (KERNELS.replace('"x.h"\n', '"x.h"\n#include "y.h"\n'), "moved"),
    ],
    ids=["swapped", "other-parameters", "another-include"],
)
def test_cuda_changes_are_anchored_by_the_name_of_the_function(tmp_path: Path, upstream: str, verdict: str) -> None:
    """Guards git's hunk function for CUDA: a swap must show, a changed list of parameters must not."""
    source = KERNELS.encode()
    lab = Lab(tmp_path, {"a.cu": source})
    lab.add_patch("one", {"a.cu": (b"blockIdx.y;\n  x[i] = 1.0f", b"blockIdx.y;\n  x[i] = 2.0f")})
    run = lab.upgrade({"a.cu": upstream.encode()})
    assert run.verdicts == {"one": verdict}, run.err
    if verdict == "misplaced":
        assert run.patch("one")["details"] == ["a.cu:12: made for scale_bwd, ended up in scale_fwd"]


UTILS = b'''\
def make_fragment(smem, thr_mma: cute.core.ThrMma, swap=False) -> Tensor:
    """Make it."""
    return smem


def prefetch(pointer):
    kind = Pointer.get(
        Descriptor.get(),
        Space.gmem,
        128,
    )
    emit(kind, pointer)
'''


@pytest.mark.parametrize(
    ("old", "new", "upstream"),
    [
        pytest.param(
            b"cute.core.ThrMma",
            b"cute.ThrMma",
            UTILS.replace(
                b"smem, thr_mma: cute.core.ThrMma, swap=False",
                b"\n    smem,\n    thr_mma: cute.ThrMma,\n    swap=False,\n",
            ),
            id="arguments-on-lines-of-their-own",
        ),
        pytest.param(
            b"Space.gmem",
            b"Space.generic",
            UTILS.replace(
                b"    kind = Pointer.get(\n        Descriptor.get(),\n        Space.gmem,\n        128,\n    )\n",
                b"    if True:\n        kind = Pointer.get(Descriptor.get(), Space.generic, 128)\n",
            ),
            id="inside-a-branch-and-on-one-line",
        ),
        pytest.param(b"Space.gmem", b"Space.generic", UTILS.replace(b"gmem", b"generic"), id="the-same-bytes"),
    ],
)
def test_a_patch_that_is_upstream_in_other_formatting_is_recognised(
    tmp_path: Path, old: bytes, new: bytes, upstream: bytes
) -> None:
    """Guards the comparison of syntax trees: git sees a conflict, or an unneeded patch stays for ever."""
    lab = Lab(tmp_path, {"utils.py": UTILS})
    lab.add_patch("fix", {"utils.py": (old, new)})
    before = lab.snapshot()
    run = lab.upgrade({"utils.py": upstream})
    assert (run.code, run.verdicts) == (14, {"fix": "upstreamed"})
    assert run.err.count("error[MSAV14]: fix.patch seems to be upstream in vllm-2.0") == 1
    assert "nox -s patch -- drop fix;" in run.err
    assert lab.snapshot() == before, "a patch is never dropped by itself"
    assert lab.run("patch", "drop", "fix").code == 0
    run = lab.rebase("--continue")
    assert (run.code, run.patch("fix")["decision"]) == (0, "skip")
    assert read_pin_series(lab.root, lab.lock.pin("vllm-2.0")) == ()
    assert [patch.name for patch in read_pin_series(lab.root, lab.lock.pin("vllm-1.0"))] == ["fix.patch"]


def test_an_edit_that_upstream_has_made_elsewhere_in_the_file_is_no_reason_to_drop(tmp_path: Path) -> None:
    """Guards the comparison function by function: the same statement in another function is not this patch."""
    source = b"def one():\n    a = 1\n    return a\n\n\ndef two():\n    b = 1\n    c = 2\n    return b\n"
    lab = Lab(tmp_path, {"x.py": source})
    lab.add_patch("fix", {"x.py": (b"    return a\n", b"    a = 2\n    return a\n")})
    upstream = source.replace(b"    b = 1\n", b"    b = 1\n    a = 2\n")
    run = lab.upgrade({"x.py": upstream})
    assert (run.code, run.verdicts) == (0, {"fix": "clean"}), run.err


def test_a_renamed_file_is_followed(tmp_path: Path) -> None:
    """Guards rename detection: without it the patch would be obsolete, though its code is all there."""
    lab = Lab(tmp_path, {"old.py": FWD_BWD})
    lab.add_patch("scale", {"old.py": edit_launcher(FWD_BWD, "launch_bwd", b"scale * 1.0", b"scale * 2.0")})
    run = lab.upgrade({"new.py": FWD_BWD})
    assert (run.code, run.verdicts) == (0, {"scale": "merged"}), run.err
    assert "old.py is now new.py" in run.patch("scale")["details"]
    (patch,) = read_pin_series(lab.root, lab.lock.pin("vllm-2.0"))
    assert [file.path for file in patch.files] == ["new.py"]
    assert b"2.0" in lab.patched("vllm-2.0", {"new.py": FWD_BWD})["new.py"]


def test_a_deleted_file_makes_its_patch_obsolete(tmp_path: Path) -> None:
    """Guards against a modify/delete conflict, in which there is nothing to resolve."""
    lab = Lab(tmp_path, {"x.py": b"a = 1\n", "y.py": b"b = 1\n"})
    lab.add_patch("fix", {"x.py": (b"1", b"2")})
    lab.add_patch("other", {"y.py": (b"1", b"2")})
    run = lab.upgrade({"y.py": b"b = 1\n"})
    assert (run.code, run.verdicts) == (20, {"fix": "obsolete", "other": "clean"})
    assert "error[MSAV20]: fix.patch changes a file that is gone" in run.err
    assert lab.rebase("--skip", "fix").code == 0
    assert [patch.name for patch in read_pin_series(lab.root, lab.lock.pin("vllm-2.0"))] == ["other.patch"]


BYTES = {
    "crlf": (b"one\r\ntwo\r\nthree\r\nfour\r\nfive\r\n", b"two\r\n", b"2\r\n", b"six\r\n"),
    "no-newline-at-end": (b"one\ntwo\nthree\nfour\nfive", b"two\n", b"2\n", b"\nsix"),
    "patch-adds-the-last-line": (b"one\ntwo\nthree\nfour\nfive", b"five", b"five\nsix\n", None),
    "latin-1": (b"one\n\xe9t\xe9\nthree\nfour\nfive\n", b"\xe9t\xe9\n", b"\xe0\n", b"six \xff\n"),
    "mixed-ends": (b"one\r\ntwo\nthree\r\nfour\n", b"two\n", b"2\r\n", b"five\n"),
    "trailing-blanks": (b"one \ntwo\t\nthree  \n", b"two\t\n", b"2 \t \n", b"four  \n"),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_survive_as_they_are(tmp_path: Path, case: str) -> None:
    """Guards against every conversion: line endings, encodings, blanks and the end of the file are content."""
    source, old, new, appended = BYTES[case]
    lab = Lab(tmp_path, {"x.txt": source})
    lab.add_patch("fix", {"x.txt": (old, new)})
    upstream = b"zero\r\n" + source + (appended or b"")
    run = lab.upgrade({"x.txt": upstream})
    assert (run.code, run.verdicts) == (0, {"fix": "moved"}), run.err
    assert lab.patched("vllm-2.0", {"x.txt": upstream})["x.txt"] == upstream.replace(old, new)


def test_attributes_that_upstream_ships_convert_nothing(tmp_path: Path) -> None:
    """Guards against upstream's own .gitattributes, which would make git convert the files that it checks out."""
    attributes = {".gitattributes": b"* text eol=crlf\n*.txt ident\n"}
    source = b"one\ntwo $Id$\nthree\nfour\n"
    lab = Lab(tmp_path, {"x.txt": source, **attributes})
    lab.add_patch("fix", {"x.txt": (b"three\n", b"3\n")})
    upstream = {"x.txt": source.replace(b"three", b"drei"), **attributes}
    assert lab.upgrade(upstream).code == 13
    assert b"one\ntwo $Id$\n<<<" in (lab.scratch / "x.txt").read_bytes()
    wanted = b"one\ntwo $Id: 1 $\n3\r\nfour\n"
    (lab.scratch / "x.txt").write_bytes(wanted)
    lab.git("add", "x.txt")
    run = lab.rebase("--continue")
    assert run.code == 0, run.err
    assert lab.patched("vllm-2.0", upstream)["x.txt"] == wanted


def test_the_executable_bit_survives(tmp_path: Path) -> None:
    """Guards modes: they come from the pin, also where a patch changes the file or upstream changes the mode."""
    files = {"run.sh": b"#!/bin/sh\nexec a\n", "x.sh": b"#!/bin/sh\nexec b\n"}
    lab = Lab(tmp_path, files, {"run.sh": EXECUTABLE})
    lab.add_patch("fix", {"run.sh": (b"exec a", b"exec c"), "x.sh": (b"exec b", b"exec c")})
    run = lab.upgrade(files, modes={"run.sh": EXECUTABLE, "x.sh": EXECUTABLE})
    assert (run.code, run.verdicts) == (0, {"fix": "clean"}), run.err
    manifest = (lab.root / "third_party/vllm-2.0.manifest.tsv").read_text()
    assert [line.split("\t")[:2] for line in manifest.splitlines()] == [["run.sh", "100755"], ["x.sh", "100755"]]
    assert run.document["summary"]["changed"] == ["x.sh"]


def test_added_files_go_along(tmp_path: Path) -> None:
    """Guards patches that add files: they have no base to merge with."""
    lab = Lab(tmp_path, {"x.py": b"import y\n\n\na = 1\n"})
    lab.add_patch("more", {"new/extra.py": b"b = 2\n", "x.py": (b"1", b"2")})
    run = lab.upgrade({"x.py": b"import x\nimport y\n\n\na = 1\n"})
    assert (run.code, run.verdicts) == (0, {"more": "moved"}), run.err
    assert lab.patched("vllm-2.0", {"x.py": b"import x\nimport y\n\n\na = 1\n"})["new/extra.py"] == b"b = 2\n"


def test_every_patch_gets_a_verdict_at_once(tmp_path: Path) -> None:
    """Guards the table: a patch that needs a decision must not hide what becomes of those after it."""
    files = dict.fromkeys(("a", "b", "c", "d", "e"), b"one\ntwo\nthree\nfour\nfive\n")
    lab = Lab(tmp_path, files)
    for name in files:
        lab.add_patch(name, {name: (b"two\n", b"2\n")})
    upstream = {
        "a": files["a"],
        "b": b"zero\n" + files["b"],
        "c": files["c"].replace(b"two", b"zwei"),
        "d": files["d"].replace(b"two", b"2"),
        "e": files["e"].replace(b"three", b"3"),
    }
    run = lab.upgrade(upstream, "--dry-run")
    assert run.verdicts == {"a": "clean", "b": "moved", "c": "conflict", "d": "upstreamed", "e": "conflict"}
    assert run.code == 13, "the first that needs a decision decides the exit code"
