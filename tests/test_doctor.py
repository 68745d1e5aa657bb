"""The command line of an installed msa_vendored: what it prints, where, and which exit code it returns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from msa_vendored import doctor
from msa_vendored.doctor import Report, print_report
from msa_vendored.installed import parse_provenance

if TYPE_CHECKING:
    from conftest import FakeSite

TORCH = """
from types import SimpleNamespace as N
version = N(cuda="13.0")
gpu = N(name="NVIDIA GB300", major=10, minor=3, total_memory=2**30)
cuda = N(is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda number: gpu)
"""

NVCC = """#!/bin/sh
echo "Cuda compilation tools, release {release}, V{release}.0"
"""

REPORT_KEYS = [
    "available",
    "backend",
    "built_tree_digest",
    "caches",
    "error",
    "gpus",
    "launchers",
    "machine",
    "nvcc",
    "package",
    "packages",
    "parts",
    "patches",
    "pin",
    "python",
    "schema",
    "version",
]


def add_toolkit(site: FakeSite, release: str | None) -> str:
    home = site.root.parent / "cuda"
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    if release is not None:
        nvcc.write_text(NVCC.format(release=release))
        nvcc.chmod(0o755)
    return str(home)


def run_json(site: FakeSite, release: str | None = "13.0") -> tuple[int, dict[str, Any], str]:
    result = site.run("-m", "msa_vendored", "doctor", "--json", CUDA_HOME=add_toolkit(site, release))
    return result.returncode, json.loads(result.stdout), result.stderr


def test_doctor_reports_everything_and_returns_0_where_the_launchers_bind(fake_site: FakeSite) -> None:
    """Guards the JSON form: scripts read these keys."""
    code, report, errors = run_json(fake_site)
    assert (code, errors) == (0, "")
    assert sorted(report) == REPORT_KEYS
    assert report["schema"] == 1
    assert report["available"] is True
    assert report["error"] is None
    assert report["package"] == f"msa_vendored.{fake_site.private.name}"
    assert report["pin"]["id"] == "vllm-0.24.0"
    assert report["pin"]["source"] == {"project": "vllm", "version": "0.24.0"}
    assert [(p["file"], p["kind"]) for p in report["patches"]] == [("fmax.patch", "numerical")]
    versions = {p["name"]: (p["installed"], p["tested_with"], p["ok"]) for p in report["packages"]}
    assert versions["nvidia-cutlass-dsl"] == ("4.6.2", "4.6.2", True)
    assert versions["torch"] == ("2.13.0+cpu", None, True)
    assert versions["rich"] == (None, None, False)
    assert all(part["present"] for part in report["parts"])
    assert report["nvcc"]["release"] == "13.0"
    assert report["nvcc"]["sm_103a"] is True
    assert report["gpus"] == []


@pytest.mark.parametrize(("major", "backend"), [(9, "sm90"), (10, "sm100"), (8, "sm100")])
def test_doctor_speaks_of_the_launchers_that_the_gpu_runs(fake_site: FakeSite, major: int, backend: str) -> None:
    """Guards Hopper users against being told to build the SM100 tree."""
    fake_site.add_module("torch", TORCH.replace("major=10, minor=3", f"major={major}, minor=0"))
    fake_site.remove_build()
    code, report, _ = run_json(fake_site)
    assert report["backend"] == backend
    assert (code, report["available"]) == ((0, True) if backend == "sm90" else (1, False))
    needs = report["launchers"]["sparse_atten_func"]
    assert needs == {"bound": True, "CUDA torch": True, "Hopper GPU": True} or backend == "sm100"


def test_doctor_returns_1_and_the_reason_where_they_do_not(fake_site: FakeSite) -> None:
    """Guards the exit code, the only thing that a script may look at."""
    fake_site.remove_distribution("nvidia-cutlass-dsl")
    code, report, errors = run_json(fake_site)
    assert code == 1
    assert report["available"] is False
    assert report["error"]["next_command"] == "pip install 'msa_vendored[sm100]'"
    assert [part["name"] for part in report["parts"] if not part["present"]] == ["nvidia-cutlass-dsl"]
    assert errors.splitlines() == [
        "error[MSAV1]: the sm100 launchers cannot be bound: 1 part is missing or wrong",
        f"  where:    {report['error']['where']}",
        "  expected: nvidia-cutlass-dsl==4.6.2",
        "  got:      no nvidia-cutlass-dsl",
        "  next:     pip install 'msa_vendored[sm100]'",
    ]


def test_doctor_really_binds(fake_site: FakeSite) -> None:
    """Guards against an answer from metadata alone: the import itself may fail, in any way."""
    fake_site.add_module("cutlass", "raise RuntimeError('libcuda is too old')\n")
    code, report, errors = run_json(fake_site)
    assert code == 1
    assert all(part["present"] for part in report["parts"])
    assert report["error"]["type"] == "RuntimeError"
    assert errors == "error[MSAV1]: RuntimeError: libcuda is too old\n"


def test_doctor_works_where_nothing_is_built(fake_site: FakeSite) -> None:
    """Guards the source checkout, where doctor is the first thing that is run."""
    fake_site.remove_build()
    code, report, _ = run_json(fake_site)
    assert (code, report["pin"], report["package"], report["patches"]) == (1, None, None, [])


@pytest.mark.parametrize(
    ("release", "nvcc"),
    [
        ("12.8", {"release": "12.8", "sm_103a": False, "error": None}),
        ("12.9", {"release": "12.9", "sm_103a": True, "error": None}),
        (None, {"release": None, "sm_103a": False, "error": "no bin/nvcc to run there", "path": None}),
        ("soon", {"release": None, "sm_103a": False}),
    ],
)
def test_doctor_says_what_the_toolkit_can_compile(
    fake_site: FakeSite, release: str | None, nvcc: dict[str, Any]
) -> None:
    """Guards the answer to "why is there no kernel for my GB300"; a broken nvcc does not stop the report."""
    code, report, _ = run_json(fake_site, release)
    assert code == 0
    assert {key: report["nvcc"][key] for key in nvcc} == nvcc
    assert (report["nvcc"]["error"] is None) == (report["nvcc"]["release"] is not None)


def test_doctor_says_for_each_launcher_what_is_there(fake_site: FakeSite) -> None:
    """Guards the difference between a launcher that binds and one that can run."""
    fake_site.add_module("torch", TORCH)
    fake_site.add_program("c++", "exit 0")
    _, report, _ = run_json(fake_site, "13.0")
    assert report["gpus"] == [{"name": "NVIDIA GB300", "arch": "sm_103", "memory_bytes": 2**30}] * 2
    assert len(report["launchers"]) == 5
    assert all(all(needs.values()) for needs in report["launchers"].values())


def test_doctor_on_an_older_gpu_says_so(fake_site: FakeSite) -> None:
    """Guards against calling any CUDA device good enough for SM100 kernels."""
    fake_site.add_module("torch", TORCH.replace("major=10, minor=3", "major=8, minor=0"))
    _, report, _ = run_json(fake_site, None)
    assert report["launchers"]["build_k2q_csr"] == {
        "bound": True,
        "nvcc": False,
        "ninja": True,
        "C++ compiler": False,
        "CUDA torch": True,
        "Blackwell GPU": False,
    }


def test_doctor_prints_plain_lines_into_a_pipe(fake_site: FakeSite) -> None:
    """Guards logs and bug reports against control characters and boxes; rich need not be installed."""
    result = fake_site.run("-m", "msa_vendored", "doctor", CUDA_HOME=add_toolkit(fake_site, "13.0"))
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[msa_vendored]",
        "[patches]",
        "[parts]",
        "[nvcc]",
        "[GPUs]",
        "[launchers]",
        "[caches]",
        "[kernels()]",
    ]
    assert "numerical  fmax.patch  call fmax as the binding wants it" in lines
    assert lines[-1] == "sm100  binds  yes"
    assert result.stdout.isascii()


class Terminal(io.StringIO):
    """Text output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_doctor_prints_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tables, and texts in brackets against being taken for rich's markup."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    document = make_document(subject="keep [bold]this[/bold]")
    out = Terminal()
    print_report(make_report(document), out)
    text = out.getvalue()
    assert "keep [bold]this[/bold]" in text
    assert "│" in text
    assert "NVIDIA GB300" in text


def make_document(subject: str) -> dict[str, Any]:
    patch = {"file": "a.patch", "kind": "build", "sha256": "2" * 64, "subject": subject, "drop_when": "d"}
    return {
        "schema": 1,
        "version": "0.1.0",
        "package": "msa_vendored._msa_0123456789ab",
        "manifest": "_msa_0123456789ab.manifest.tsv",
        "pin": {"id": "p", "kind": "git", "source": {"url": "u"}, "tree_digest": "sha256:" + "1" * 64},
        "tested_with": {},
        "patches": [patch],
        "built_tree_digest": "sha256:" + "3" * 64,
        "touched": [],
    }


def make_report(document: dict[str, Any]) -> Report:
    return Report(
        backend="sm100",
        available=True,
        error=None,
        record=parse_provenance(json.dumps(document), "x"),
        parts=(),
        packages=(),
        nvcc=None,
        gpus=({"name": "NVIDIA GB300", "arch": "sm_103", "memory_bytes": 2**30},),
        launchers={"run_backward": {"bound": True}},
        caches=({"name": "nvcc kernels", "path": "/c", "files": 2, "size_bytes": 2**21},),
    )


def test_doctor_needs_of_every_launcher_are_known() -> None:
    """Guards a sixth launcher, or a renamed one, against missing from the report."""
    assert list(doctor._LAUNCHER_NEEDS) == [
        "build_k2q_csr",
        "sparse_atten_func",
        "fmha_sm100",
        "fmha_sm100_plan",
        "run_backward",
    ]


def test_verify_returns_0_for_the_built_tree(fake_site: FakeSite) -> None:
    """Guards the proof of a wheel, which runs this in an empty environment."""
    result = fake_site.run("-m", "msa_vendored", "verify")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"ok: msa_vendored.{fake_site.private.name} is as built (sha256:")


def test_verify_returns_10_and_lists_all_drift(fake_site: FakeSite) -> None:
    """Guards the exit code and that one run is enough to see everything."""
    (fake_site.private / "api.py").write_text("changed")
    (fake_site.private / "csrc" / "plan.cu").unlink()
    (fake_site.private / "new.py").touch()
    result = fake_site.run("-m", "msa_vendored", "verify")
    assert (result.returncode, result.stdout) == (10, "")
    lines = result.stderr.splitlines()
    assert lines[0] == "error[MSAV10]: the installed MSA differs from the built tree in 3 files"
    assert lines[3:] == [
        "  got:      missing: csrc/plan.cu",
        "            extra: new.py",
        "            changed: api.py",
        "  next:     pip install --force-reinstall --no-deps 'msa_vendored'",
    ]


def test_verify_without_a_build_says_how_to_build(fake_site: FakeSite) -> None:
    """Guards the source checkout against a traceback."""
    fake_site.remove_build()
    result = fake_site.run("-m", "msa_vendored", "verify")
    assert result.returncode == 1
    assert result.stderr.startswith("error[MSAV1]: the patched MSA is not built here\n")
    assert result.stderr.endswith("next:     nox -s build && pip install '.[sm100]'\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), ([], 2), (["repair"], 2), (["verify", "--json"], 2), (["--help"], 0)],
    ids=["version", "nothing", "unknown command", "unknown option", "help"],
)
def test_usage(fake_site: FakeSite, arguments: list[str], code: int) -> None:
    """Guards the exit code of usage errors, which differs from that of findings."""
    result = fake_site.run("-m", "msa_vendored", *arguments)
    assert result.returncode == code
    if arguments == ["--version"]:
        assert result.stdout == "msa_vendored 0.1.0\n"


def test_doctor_counts_this_builds_kernels(fake_site: FakeSite, tmp_path: Path) -> None:
    """Guards the cache folders in the report, which users delete."""
    extension = "CUDA_HOME = None\ndef get_default_build_root(): return '/nowhere'\n"
    fake_site.add_module("torch.utils.cpp_extension", extension)
    (fake_site.root / "torch" / "__init__.py").write_text(TORCH)
    home = add_toolkit(fake_site, "13.0")
    code = "import json; from msa_vendored.doctor import make_report as m; print(json.dumps(m().to_dict()['caches']))"
    environment = {"CUDA_HOME": home, "MINFER_FMHA_CACHE_DIR": str(tmp_path / "jit")}
    (empty, *_) = fake_site.evaluate(code, **environment)
    assert (empty["name"], empty["files"]) == ("nvcc kernels", 0)
    Path(empty["path"]).mkdir(parents=True)
    (Path(empty["path"]) / "plan.so").write_bytes(bytes(9))
    (found, *_) = fake_site.evaluate(code, **environment)
    assert (found["path"], found["files"], found["size_bytes"]) == (empty["path"], 1, 9)
