"""``python -m msa_vendored doctor``: what is installed, what each launcher needs, and whether the launchers bind.

It answers the last question by binding, in this process. Where there are Hopper GPUs and no Blackwell ones it speaks of
the sm90 launchers, else of sm100. The JSON form has a schema number and keys that stay; the tables are for people and
may change.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import msa_vendored
from msa_vendored.bundle import kernels
from msa_vendored.errors import MSAVendoredError, UnavailableError
from msa_vendored.installed import Provenance, provenance
from msa_vendored.probes import PINNED, UNPINNED, Part, probe_distribution, probe_hopper_parts, probe_parts
from msa_vendored.toolchain import MIN_SM103A_NVCC, ToolchainError, find_cuda_home, nvcc_of, nvcc_release

SCHEMA = 1

_PACKAGES = (*PINNED, *UNPINNED, "ninja", "triton", "numpy", "rich")

_LAUNCHER_NEEDS = {
    "build_k2q_csr": ("bound", "nvcc", "ninja", "C++ compiler", "CUDA torch", "Blackwell GPU"),
    "sparse_atten_func": ("bound", "CUDA torch", "Blackwell GPU"),
    "fmha_sm100": ("bound", "nvcc", "ninja", "CUDA torch", "Blackwell GPU"),
    "fmha_sm100_plan": ("bound", "nvcc", "ninja", "CUDA torch", "Blackwell GPU"),
    "run_backward": ("bound", "CUDA torch", "Blackwell GPU"),
}
_HOPPER_NEEDS = ("bound", "CUDA torch", "Hopper GPU")
"""nvcc and ninja compile at the first launch only; with a warm cache the two fmha launchers run without them."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that doctor found; ``available`` is whether ``kernels(backend=…)`` bound for ``backend``."""

    backend: str
    available: bool
    error: dict[str, Any] | None
    record: Provenance | None
    parts: tuple[Part, ...]
    packages: tuple[dict[str, Any], ...]
    nvcc: dict[str, Any] | None
    gpus: tuple[dict[str, Any], ...]
    launchers: dict[str, dict[str, bool]]
    caches: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, schema 1."""
        record = self.record
        return {
            "schema": SCHEMA,
            "version": msa_vendored.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "available": self.available,
            "backend": self.backend,
            "error": self.error,
            "package": record.package if record else None,
            "built_tree_digest": record.built_tree_digest if record else None,
            "pin": record.to_dict()["pin"] if record else None,
            "patches": [asdict(patch) for patch in record.patches] if record else [],
            "parts": [{"name": p.name, "present": p.present, "expected": p.expected, "got": p.got} for p in self.parts],
            "packages": list(self.packages),
            "nvcc": self.nvcc,
            "gpus": list(self.gpus),
            "launchers": self.launchers,
            "caches": list(self.caches),
        }


def make_report() -> Report:
    """Look at everything and try to bind. Imports torch and, where it is there, CuTe DSL; compiles nothing."""
    nvcc, gpus = describe_nvcc(), describe_gpus()
    backend = choose_backend(gpus)
    error = _try_bind(backend)
    try:
        record = provenance()
    except UnavailableError:
        record = None
    return Report(
        backend=backend,
        available=error is None,
        error=error,
        record=record,
        parts=probe_hopper_parts() if backend == "sm90" else probe_parts(),
        packages=tuple(_describe_package(name, record) for name in _PACKAGES),
        nvcc=nvcc,
        gpus=gpus,
        launchers=_describe_launchers(backend, error is None, nvcc, gpus),
        caches=_describe_caches() if record is not None else (),
    )


def choose_backend(gpus: Iterable[Mapping[str, Any]]) -> str:
    """The backend that this machine's GPUs run: sm90 where there are Hopper ones and no Blackwell ones, else sm100."""
    names = {gpu["arch"] for gpu in gpus}
    return "sm90" if "sm_90" in names and not any(name.startswith("sm_10") for name in names) else "sm100"


def describe_nvcc() -> dict[str, Any] | None:
    """The nvcc that MSA will run, None if it finds no toolkit; ``release`` is None and ``error`` set if it fails."""
    home = find_cuda_home()
    if home is None:
        return None
    nvcc = nvcc_of(home)
    if nvcc is None:
        return {"path": None, "cuda_home": home, "release": None, "sm_103a": False, "error": "no bin/nvcc to run there"}
    try:
        release = nvcc_release(nvcc)
    except ToolchainError as error:
        return {"path": nvcc, "cuda_home": home, "release": None, "sm_103a": False, "error": str(error.got)}
    text = ".".join(map(str, release))
    return {"path": nvcc, "cuda_home": home, "release": text, "sm_103a": release >= MIN_SM103A_NVCC, "error": None}


def describe_gpus() -> tuple[dict[str, Any], ...]:
    """Name, architecture and memory of every visible GPU; empty where torch is missing or sees none."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple({"name": p.name, "arch": f"sm_{p.major}{p.minor}", "memory_bytes": p.total_memory} for p in properties)


def print_report(report: Report, out: TextIO) -> None:
    """Print tables if ``out`` is a terminal and rich is installed, plain lines otherwise."""
    sections = dict(_sections(report.to_dict()))
    try:
        from rich.console import Console
    except ImportError:
        is_terminal = False
    else:
        is_terminal = out.isatty()
    if not is_terminal:
        for title, rows in sections.items():
            print(f"[{title}]", *("  ".join(row) for row in rows), sep="\n", file=out)
        return
    console = Console(file=out)
    for title, rows in sections.items():
        console.print(_make_table(title, rows))


def _make_table(title: str, rows: Iterable[tuple[str, ...]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, expand=False)
    styles = {"ok": "green", "missing": "red", "yes": "green", "no": "red"}
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    return table


def _sections(d: Mapping[str, Any]) -> Iterable[tuple[str, list[tuple[str, ...]]]]:
    pin = d["pin"] or {"id": "not built", "kind": "", "tree_digest": ""}
    yield (
        "msa_vendored",
        [
            ("version", d["version"]),
            ("pin", " ".join(filter(None, (pin["id"], pin["kind"], pin["tree_digest"])))),
            ("package", d["package"] or "not built"),
        ],
    )
    yield "patches", [(p["kind"], p["file"], p["subject"]) for p in d["patches"]] or [("none", "")]
    yield "parts", [("ok" if p["present"] else "missing", p["name"], p["got"], p["expected"]) for p in d["parts"]]
    nvcc = d["nvcc"] or {"path": None, "cuda_home": "none", "release": None, "error": "no CUDA toolkit found"}
    yield "nvcc", [(nvcc["path"] or str(nvcc["cuda_home"]), nvcc["release"] or str(nvcc["error"]))]
    yield "GPUs", [(gpu["name"], gpu["arch"], _size(gpu["memory_bytes"])) for gpu in d["gpus"]] or [("none", "")]
    yield (
        "launchers",
        [
            (name, *(f"{need}: {'yes' if there else 'no'}" for need, there in needs.items()))
            for name, needs in d["launchers"].items()
        ],
    )
    yield (
        "caches",
        [(c["name"], c["path"], f"{c['files']} files", _size(c["size_bytes"])) for c in d["caches"]] or [("none", "")],
    )
    yield "kernels()", [(d["backend"], "binds", "yes" if d["available"] else "no")]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _try_bind(backend: str) -> dict[str, Any] | None:
    """None if the backend's launchers bind, else why not. Whatever is raised is a finding: nothing gets through."""
    try:
        kernels(backend=backend)
    except Exception as error:  # noqa: BLE001 - a package that fails to import raises anything
        known = error if isinstance(error, MSAVendoredError) else MSAVendoredError(f"{type(error).__name__}: {error}")
        keys = ("what", "where", "expected", "got", "next_command")
        return {"type": type(error).__name__, **{key: getattr(known, key) for key in keys}}
    return None


def _describe_package(name: str, record: Provenance | None) -> dict[str, Any]:
    tested = record.tested_with.get(name) if record else None
    part = probe_distribution(name, tested or "")
    installed = part.got.removeprefix(f"{name} ") if part.got != f"no {name}" else None
    return {"name": name, "installed": installed, "tested_with": tested, "ok": part.present}


def _describe_launchers(
    backend: str, bound: bool, nvcc: Mapping[str, Any] | None, gpus: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, bool]]:
    there = {
        "bound": bound,
        "nvcc": nvcc is not None and nvcc["release"] is not None,
        "ninja": shutil.which("ninja") is not None,
        "C++ compiler": shutil.which("c++") is not None,
        "CUDA torch": _has_cuda_torch(),
        "Blackwell GPU": any(gpu["arch"].startswith("sm_10") for gpu in gpus),
        "Hopper GPU": any(gpu["arch"] == "sm_90" for gpu in gpus),
    }
    needed = {name: _HOPPER_NEEDS if backend == "sm90" else needs for name, needs in _LAUNCHER_NEEDS.items()}
    return {name: {need: there[need] for need in needs} for name, needs in needed.items()}


def _has_cuda_torch() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.cuda is not None


def _describe_caches() -> tuple[dict[str, Any], ...]:
    from msa_vendored.caches import list_cache_folders

    try:
        folders = list_cache_folders()
    except ImportError:  # torch says where its extensions are; without torch there are none
        return ()
    return tuple({**asdict(folder), "path": str(folder.path)} for folder in folders)
