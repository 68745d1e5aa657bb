"""What importing the package costs and promises: nothing heavy is imported before it is used."""

from __future__ import annotations

import pkgutil
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from child_processes import evaluate_code

import msa_vendored

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(msa_vendored.__file__).resolve().parents[1]

HEAVY = ("torch", "cutlass", "cuda", "numpy", "rich", "quack", "triton", "tvm_ffi", "libcst", "jinja2")
"""Everything that is not the standard library and that some module of ours or of MSA imports."""

LIGHT_MODULES = ("bundle", "caches", "doctor", "errors", "installed", "probes", "toolchain", "trees", "__main__")


@pytest.mark.parametrize(
    "statement",
    [
        "import msa_vendored",
        "from msa_vendored import MSAKernels, UnavailableError, kernels, provenance",
        *(f"import msa_vendored.{name}" for name in LIGHT_MODULES),
    ],
)
def test_importing_pulls_in_nothing_heavy(statement: str) -> None:
    """Guards the start-up time of programs that only might use MSA, and machines without torch or the DSL."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    assert evaluate_code(code) == []


def test_importing_pulls_in_no_build_tool() -> None:
    """Guards the wheel against needing what only the build has."""
    code = "import json, sys\nimport msa_vendored.__main__, msa_vendored.doctor\nprint(json.dumps(sorted(sys.modules)))"
    assert not [name for name in evaluate_code(code) if name.startswith("msa_vendored.vendoring")]


def test_kernels_stays_the_callable() -> None:
    """Guards against a submodule named like a public name: once imported by anybody it takes the name's place."""
    submodules = {module.name for module in pkgutil.iter_modules(msa_vendored.__path__)}
    assert submodules & set(msa_vendored.__all__) == set()
    code = """
import json, msa_vendored, msa_vendored.bundle, msa_vendored.installed
from msa_vendored import kernels, provenance
same = [kernels is msa_vendored.bundle.kernels, msa_vendored.kernels is kernels, msa_vendored.provenance is provenance]
print(json.dumps([*same, callable(kernels), callable(provenance)]))
"""
    assert evaluate_code(code) == [True] * 5


def test_every_public_name_resolves() -> None:
    """Guards the table of lazy names against renamed modules and functions."""
    resolved = {name: getattr(msa_vendored, name) for name in msa_vendored.__all__}
    assert [name for name, value in resolved.items() if value is None] == []
    assert set(msa_vendored.__all__) <= set(dir(msa_vendored))
    assert set(msa_vendored._HOMES) == set(msa_vendored.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Guards hasattr and the error that a typing mistake gives."""
    with pytest.raises(AttributeError, match="module 'msa_vendored' has no attribute 'kernel'"):
        _ = msa_vendored.kernel


def test_the_version_is_the_installed_wheels() -> None:
    """Guards the version that doctor and bug reports name: hatchling reads it from this module."""
    assert msa_vendored.__version__ == version("msa_vendored")


REFUSE = """
import importlib, json, pkgutil, sys
import msa_vendored
from msa_vendored import UnavailableError, kernels
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "cuda") or name.startswith("msa_vendored._msa_"):
            raise ModuleNotFoundError(f"refused {name}", name=name)
sys.meta_path.insert(0, Refuse())
outcomes = {}
"""


def is_kernel_source(name: str) -> bool:
    """Whether a module's source imports the DSL at its top, as files that hold nothing but kernels do."""
    path = SITE.joinpath(*name.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return re.search(r"^(import|from) cutlass", source, re.MULTILINE) is not None


def test_every_module_imports_without_the_dsl_or_says_that_it_is_unavailable() -> None:
    """Guards NeMo's first import-guard test: no module may die of a missing DSL in another way.

    Files of kernels need the DSL as such; nothing may import one before a launcher has looked for it.
    """
    code = f"""{REFUSE}
for module in pkgutil.walk_packages(msa_vendored.__path__, "msa_vendored."):
    if ".vendoring" in module.name or "._msa_" in module.name or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        outcomes[module.name] = "imported"
    except UnavailableError:
        outcomes[module.name] = "unavailable"
    except ModuleNotFoundError as error:
        outcomes[module.name] = "needs the DSL" if error.name.split(".")[0] == "cutlass" else repr(error)
    except Exception as error:
        outcomes[module.name] = repr(error)
print(json.dumps(outcomes))
"""
    outcomes = evaluate_code(code)
    expected = {name: "needs the DSL" for name in outcomes if is_kernel_source(name)}
    assert {name: o for name, o in outcomes.items() if o not in ("imported", "unavailable")} == expected
    assert outcomes["msa_vendored.bundle"] == "imported"


def test_kernels_without_the_dsl_is_unavailable() -> None:
    """Guards NeMo's second and third import-guard tests, on this installation."""
    code = f"""{REFUSE}
kernels.cache_clear()
try:
    kernels()
    outcome = "bound"
except UnavailableError as error:
    outcome = error.next_command
print(json.dumps(outcome))
"""
    assert "pip install" in evaluate_code(code)


def test_a_microbatch_needs_neither_the_dsl_nor_msa() -> None:
    """Guards NeMo's fifth import-guard test: planning a microbatch runs on data-loading hosts."""
    code = """
import json, sys, torch
from msa_vendored import Microbatch
Microbatch.from_document_map(torch.tensor([[1, 1, 2, 0]]))
names = [n for n in sys.modules if n.split(".")[0] in ("cutlass", "quack", "tvm_ffi") or "._msa_" in n]
print(json.dumps(names))
"""
    assert evaluate_code(code) == []
