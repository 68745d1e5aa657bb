"""``kernels()`` where a part is missing, wrong or broken: it is named, with the command that brings it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import FakeSite
from bundle_cases import INSTALL, attempt, damage_tree, remove, replace

BUILD = "nox -s build && pip install '.[sm100]'"


def remove_ninja(site: FakeSite) -> None:
    (site.programs / "ninja").unlink()


def hide_ninja(site: FakeSite) -> None:
    remove_ninja(site)
    site.add_distribution("ninja", "1.13.2")


MISSING = {
    "not built": (
        lambda site: site.remove_build(),
        "_provenance.json and the package that it names, which only an installed wheel has",
        "an incomplete installation",
        BUILD,
    ),
    "no DSL": (remove("nvidia-cutlass-dsl"), "nvidia-cutlass-dsl==4.6.2", "no nvidia-cutlass-dsl", INSTALL),
    "another DSL": (
        replace("nvidia-cutlass-dsl", "4.8.0"),
        "nvidia-cutlass-dsl==4.6.2",
        "nvidia-cutlass-dsl 4.8.0",
        INSTALL,
    ),
    "no quack": (remove("quack-kernels"), "quack-kernels==0.6.4", "no quack-kernels", INSTALL),
    "another quack": (replace("quack-kernels", "0.6.5"), "quack-kernels==0.6.4", "quack-kernels 0.6.5", INSTALL),
    "no tvm-ffi": (remove("apache-tvm-ffi"), "apache-tvm-ffi==0.1.11", "no apache-tvm-ffi", INSTALL),
    "another tvm-ffi": (
        replace("apache-tvm-ffi", "0.1.12"),
        "apache-tvm-ffi==0.1.11",
        "apache-tvm-ffi 0.1.12",
        INSTALL,
    ),
    "no cuda-bindings": (remove("cuda-bindings"), "cuda-bindings", "no cuda-bindings", INSTALL),
    "no torch": (remove("torch"), "torch", "no torch", INSTALL),
    "no jinja2": (remove("jinja2"), "jinja2", "no jinja2", INSTALL),
    "no ninja": (remove_ninja, "ninja on PATH", "no ninja", INSTALL),
    "no triton": (
        lambda site: site.remove_module("triton"),
        "triton, which quack imports and a CPU build of torch does not bring",
        "no triton",
        "pip install --no-deps triton",
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_part_is_named_with_the_command_that_brings_it(fake_site: FakeSite, what: str) -> None:
    """Guards each probe: without it the user sees an ImportError, or an AttributeError of another version, later."""
    change, expected, got, command = MISSING[what]
    change(fake_site)
    assert attempt(fake_site) == {
        "what": "the sm100 launchers cannot be bound: 1 part is missing or wrong",
        "expected": expected,
        "got": got,
        "next": command,
    }


def test_a_program_that_is_installed_but_not_on_path_is_told_apart(fake_site: FakeSite) -> None:
    """Guards environments used without activation, where MSA and torch fail to start ninja at the first launch."""
    hide_ninja(fake_site)
    found = attempt(fake_site)
    assert found["got"] == "ninja is installed, but not on PATH"
    assert found["next"].startswith('export PATH="/')
    assert found["next"].endswith('/bin:$PATH"')


def test_a_tree_that_is_not_the_patched_one_is_refused_before_it_is_imported(fake_site: FakeSite) -> None:
    """Guards against training with an unpatched file under the patched package's name."""
    folder = fake_site.private.name
    damage_tree(fake_site)
    assert attempt(fake_site) == {
        "what": "the sm100 launchers cannot be bound: 1 part is missing or wrong",
        "expected": f"{folder} with 3 patched or rewritten files as built",
        "got": "changed or missing: api.py, sparse.py",
        "next": "pip install --force-reinstall --no-deps 'msa_vendored'",
    }


def test_everything_missing_is_listed_at_once_with_one_command(fake_site: FakeSite) -> None:
    """Guards against one failure, one installation, the next failure."""
    for name in ("nvidia-cutlass-dsl", "jinja2"):
        fake_site.remove_distribution(name)
    fake_site.remove_module("triton")
    remove_ninja(fake_site)
    assert attempt(fake_site) == {
        "what": "the sm100 launchers cannot be bound: 4 parts are missing or wrong",
        "expected": "nvidia-cutlass-dsl==4.6.2; jinja2; "
        "triton, which quack imports and a CPU build of torch does not bring; ninja on PATH",
        "got": "no nvidia-cutlass-dsl; no jinja2; no triton; no ninja",
        "next": "pip install 'msa_vendored[sm100]' && pip install --no-deps triton",
    }


def test_building_comes_first_and_brings_the_packages(fake_site: FakeSite) -> None:
    """Guards the advice in a source checkout against naming the same installation twice."""
    fake_site.remove_build()
    fake_site.remove_distribution("nvidia-cutlass-dsl")
    fake_site.remove_module("triton")
    found = attempt(fake_site)
    assert found["what"].endswith("3 parts are missing or wrong")
    assert found["next"] == f"{BUILD} && pip install --no-deps triton"


def test_a_package_of_the_wrong_version_is_not_imported(fake_site: FakeSite) -> None:
    """Guards the message: another DSL breaks at import in ways that do not name the version."""
    replace("nvidia-cutlass-dsl", "4.8.0")(fake_site)
    fake_site.add_module("cutlass", "raise AttributeError('ThrMma')\n")
    assert attempt(fake_site)["got"] == "nvidia-cutlass-dsl 4.8.0"


FINDER = """
class Refuse:
    names = ("cutlass", "cuda", "msa_vendored._msa_")
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names[:2] or name.startswith(self.names[2]):
            raise ModuleNotFoundError(f"refused {name}", name=name)
for name in [n for n in sys.modules if n.split(".")[0] in Refuse.names[:2]]:
    del sys.modules[name]
refuse = Refuse()
sys.meta_path.insert(0, refuse)
kernels.cache_clear()
"""


def test_refused_modules_make_it_unavailable_and_a_repair_in_the_same_process_helps(fake_site: FakeSite) -> None:
    """Guards the contract of NeMo's import-guard tests: UnavailableError, nothing else, and not remembered."""
    code = f"{FINDER}\nfirst = attempt()\nsys.meta_path.remove(refuse)\nprint(json.dumps([first, attempt()]))"
    first, second = attempt(fake_site, code)
    folder = fake_site.private.name
    # quack fails only because it imports cutlass; it says so, and reinstalling it would not help.
    assert first["got"].split("; ") == [
        "refused cuda",
        "refused cutlass",
        f"refused msa_vendored.{folder}",
    ]
    assert first["next"] == (
        "pip install --force-reinstall --no-deps 'msa_vendored' && "
        "pip install --force-reinstall --no-deps cuda-bindings==13.4.4 nvidia-cutlass-dsl==4.6.2"
    )
    assert second == "bound"


@pytest.mark.parametrize("error", ["AttributeError('ThrMma')", "RuntimeError('already registered')", "OSError(5)"])
@pytest.mark.parametrize("module", ["cutlass", "api"])
def test_other_exceptions_of_an_import_pass_through(fake_site: FakeSite, module: str, error: str) -> None:
    """Guards against hiding a broken package behind "not available": only ImportError means that."""
    if module == "cutlass":
        fake_site.add_module("cutlass", f"raise {error}\n")
    else:
        fake_site.remove_build()
        fake_site.build({"__init__.py": "", "api.py": f"raise {error}\n", "sparse.py": ""})
    code = """
try:
    kernels()
except UnavailableError:
    print(json.dumps("hidden"))
except Exception as error:
    print(json.dumps(repr(error)))
"""
    assert attempt(fake_site, code) == error


@pytest.mark.parametrize("symbol", ["build_k2q_csr", "sparse_atten_func", "fmha_sm100", "fmha_sm100_plan"])
def test_a_launcher_that_the_package_lacks_is_named(fake_site: FakeSite, symbol: str) -> None:
    """Guards a pin of another MSA, in which a launcher has another name."""
    owner = "sparse.py" if symbol in ("build_k2q_csr", "sparse_atten_func") else "api.py"
    path = fake_site.private / owner
    source = path.read_text().replace(f"def {symbol}():", "def renamed():")
    modules = {name: (fake_site.private / name).read_text() for name in ("__init__.py", "api.py", "sparse.py")}
    fake_site.remove_build()
    fake_site.build({**modules, owner: source})
    found = attempt(fake_site)
    module = f"msa_vendored.{fake_site.private.name}" + (".sparse" if owner == "sparse.py" else "")
    assert found["expected"] == f"import {module}.{symbol}"


def test_a_backward_that_cannot_be_imported_is_named(fake_site: FakeSite) -> None:
    """Guards the fifth launcher, which is ours: it is probed like the others."""
    (fake_site.package_dir / "backward.py").write_text("import einops\n")
    assert attempt(fake_site)["got"] == "No module named 'einops'"
