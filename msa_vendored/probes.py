"""What binding the official launchers needs, and what of it is there: all is looked at before anything is judged.

A first pass reads metadata and files and imports nothing, so that a wrong version is reported as such and not by
whatever breaks when it is imported. Only if that pass finds nothing wrong, :func:`import_symbols` imports.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module, invalidate_caches, metadata
from importlib.util import find_spec
from pathlib import Path

from msa_vendored.errors import UnavailableError
from msa_vendored.installed import (
    BUILD_COMMAND,
    Provenance,
    ProvenanceError,
    find_touched_drift,
    provenance,
    reinstall_command,
)

PINNED = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
"""Distributions of which one version is known to work with a pin; provenance says which."""

UNPINNED = ("torch", "cuda-bindings", "jinja2")
"""Distributions of which any version that pip resolves will do."""

IMPORTS = {
    "jinja2": "jinja2",
    "cuda.bindings.driver": "cuda-bindings",
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "quack": "quack-kernels",
}
"""Module -> the distribution that brings it; imported one by one, so that each failure is seen."""

HOPPER_TESTED_WITH = {"nvidia-cutlass-dsl": "4.6.2", "apache-tvm-ffi": "0.1.11"}
"""What the sm90 launchers need beside torch: the versions that they were run with. They need no built tree."""

HOPPER_IMPORTS = ("cutlass", "tvm_ffi")
"""Modules that the sm90 launchers import when they compile."""


class Remedy(Enum):
    """What to do about a missing part; the order of the members is the order of the steps."""

    BUILD = "build and install the wheel"
    REINSTALL = "install the wheel again"
    INSTALL = "install what the extra [sm100] names"
    HOPPER = "install what the extra [sm90] names"
    TRITON = "install triton alone"
    REPAIR = "write the files of a distribution again"
    PATH = "put the environment's programs on PATH"


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that binding needs.

    Attributes:
        name: distribution, module, program or "patched MSA".
        expected: what is needed, in words or as a pip requirement.
        got: what is there.
        remedy: None if that is good enough.
    """

    name: str
    expected: str
    got: str
    remedy: Remedy | None = None

    @property
    def present(self) -> bool:
        """Whether the part is there and right."""
        return self.remedy is None


def forget_environment() -> None:
    """Make the next probe and import see what was installed since the last one, in this same process."""
    invalidate_caches()
    # Python 3.11 does not pass invalidate_caches() on to its reader of metadata.
    metadata.MetadataPathFinder().invalidate_caches()


def probe_parts() -> tuple[Part, ...]:
    """Look at every part that can be judged without importing anything; a missing part raises nothing."""
    record, tree = _probe_tree()
    tested: Mapping[str, str] = record.tested_with if record is not None else dict.fromkeys(PINNED, "")
    pinned = [probe_distribution(name, version) for name, version in tested.items()]
    unpinned = [probe_distribution(name) for name in UNPINNED]
    return (tree, *pinned, *unpinned, _probe_triton(), _probe_ninja())


def require_parts(parts: Iterable[Part], purpose: str) -> None:
    """Refuse if any part is missing or wrong.

    Args:
        parts: of :func:`probe_parts` or :func:`import_symbols`.
        purpose: what cannot be done without them, a clause that the message begins with.

    Raises:
        UnavailableError: names every such part and the one command that mends them all.
    """
    wrong = [part for part in parts if not part.present]
    if wrong:
        raise UnavailableError(
            f"{purpose}: {len(wrong)} part{'s are' if len(wrong) > 1 else ' is'} missing or wrong",
            where=sys.prefix,
            expected="; ".join(part.expected for part in wrong),
            got="; ".join(part.got for part in wrong),
            next_command=combine_remedies(wrong),
        )


def combine_remedies(wrong: Sequence[Part]) -> str:
    """One command line that mends all these parts. Building also installs, so it replaces most other pip commands."""
    needed = {part.remedy for part in wrong}
    if Remedy.BUILD in needed:
        needed -= {Remedy.REINSTALL, Remedy.INSTALL, Remedy.REPAIR}
    return " && ".join(_command(step, wrong) for step in Remedy if step in needed)


def import_symbols(symbols: Sequence[tuple[str, str]], *, first: Sequence[str] = ()) -> tuple[list[object], list[Part]]:
    """Import modules and take one symbol from each.

    Only ImportError, and a symbol that its module lacks, make a missing part; whatever else a module raises while it
    is imported passes through unchanged.

    Args:
        symbols: pairs of module and symbol.
        first: modules to try before, each for itself. What fails only because of something listed already is not
            listed again.

    Returns:
        The symbols, and the missing parts; the symbols are complete only if no part is missing.
    """
    values: list[object] = []
    missing: list[Part] = []
    for module in first:
        try:
            import_module(module)
        except ImportError as error:
            missing += _explain(module, error, missing, Remedy.REPAIR)
    for module, symbol in symbols:
        try:
            owner = import_module(module)
        except ImportError as error:
            missing += _explain(module, error, missing, Remedy.REINSTALL)
            continue
        try:
            values.append(getattr(owner, symbol))
        except (AttributeError, ImportError) as error:
            missing += _explain(f"{module}.{symbol}", error, missing, Remedy.REINSTALL)
    return values, missing


def _probe_tree() -> tuple[Provenance | None, Part]:
    try:
        record = provenance()
    except ProvenanceError as error:
        return None, Part("patched MSA", f"{error.where}: {error.expected}", str(error.got), Remedy.REINSTALL)
    except UnavailableError as error:
        return None, Part("patched MSA", str(error.expected), str(error.got), Remedy.BUILD)
    drift = find_touched_drift(record)
    expected = f"{record.folder} with {len(record.touched)} patched or rewritten files as built"
    if drift:
        return record, Part("patched MSA", expected, f"changed or missing: {', '.join(drift)}", Remedy.REINSTALL)
    return record, Part("patched MSA", expected, record.package)


def probe_hopper_parts() -> tuple[Part, ...]:
    """Look at what the sm90 launchers need: torch and the DSL, by their metadata."""
    parts = [probe_distribution("torch", remedy=Remedy.HOPPER)]
    parts += [probe_distribution(name, version, Remedy.HOPPER) for name, version in HOPPER_TESTED_WITH.items()]
    return tuple(parts)


def probe_distribution(name: str, version: str = "", remedy: Remedy = Remedy.INSTALL) -> Part:
    """A distribution by its metadata, without importing it; ``version`` empty means that any will do."""
    expected = f"{name}=={version}" if version else name
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Part(name, expected, f"no {name}", remedy)
    wrong = bool(version) and found.partition("+")[0] != version
    return Part(name, expected, f"{name} {found}", remedy if wrong else None)


def _probe_triton() -> Part:
    """Looked for as a module: NVIDIA's and PyTorch's builds of it have several distribution names."""
    expected = "triton, which quack imports and a CPU build of torch does not bring"
    try:
        found = find_spec("triton") is not None
    except ImportError:
        found = False
    return Part("triton", expected, "triton" if found else "no triton", None if found else Remedy.TRITON)


def _probe_ninja() -> Part:
    """MSA and torch run ``ninja`` by name: the distribution alone does not help if its script is not on ``PATH``."""
    expected = "ninja on PATH"
    if program := shutil.which("ninja"):
        return Part("ninja", expected, program)
    if probe_distribution("ninja").present:
        return Part("ninja", expected, "ninja is installed, but not on PATH", Remedy.PATH)
    return Part("ninja", expected, "no ninja", Remedy.INSTALL)


def _explain(name: str, error: ImportError | AttributeError, known: Sequence[Part], remedy: Remedy) -> list[Part]:
    """The part that ``error`` shows to be missing; nothing if it is the consequence of a known one.

    Python reports a module that cannot be imported in the same words to everybody who imports it.
    """
    if any(part.got == str(error) for part in known):
        return []
    return [Part(name, f"import {name}", str(error), remedy)]


def _command(step: Remedy, wrong: Sequence[Part]) -> str:
    match step:
        case Remedy.BUILD:
            return BUILD_COMMAND
        case Remedy.REINSTALL:
            return reinstall_command()
        case Remedy.INSTALL:
            return "pip install 'msa_vendored[sm100]'"
        case Remedy.HOPPER:
            return "pip install 'msa_vendored[sm90]'"
        case Remedy.TRITON:
            return "pip install --no-deps triton"
        case Remedy.REPAIR:
            return _repair_command(wrong)
        case Remedy.PATH:
            return f'export PATH="{Path(sys.executable).parent}:$PATH"'


def _repair_command(wrong: Sequence[Part]) -> str:
    """The distributions are there by their metadata, so pip has to be told to write their files again."""
    broken = {IMPORTS[part.name] for part in wrong if part.name in IMPORTS}
    installed = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions() if d.name}
    # The DSL's files belong to several distributions, such as nvidia-cutlass-dsl-libs-base.
    names = sorted(name for name in installed if any(name == b or name.startswith(f"{b}-libs") for b in broken))
    return "pip install --force-reinstall --no-deps " + " ".join(f"{name}=={installed[name]}" for name in names)
