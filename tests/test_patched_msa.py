"""The guards of the patches: each header's ``Test:`` names one of these, and it fails when its patch is left out.

They run against the installed wheel, each in a process of its own, since imports, registrations and the DSL's
target are process-wide. Failure messages are one line, so that ``nox -s verify -- --red-green`` can read them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import msa_vendored

ROOT = Path(__file__).resolve().parents[1]
PIN = msa_vendored.provenance().pin.id
# What vLLM ships beside us is the same release; the pin from git stands for vLLM 0.24.0, which took that commit.
PRISTINE = ROOT / "third_party" / "msa" / (PIN if PIN.startswith("vllm-") else "vllm-0.24.0")

IMPORT_PACKAGE = """
import importlib, json, sys
import msa_vendored
PACKAGE = msa_vendored.provenance().package
TREE = msa_vendored.provenance().built_tree_digest.removeprefix("sha256:")[:12]
"""


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; returns its output, or fails with the last line of its errors."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_PACKAGE + code]
    return run(command, **environment)


def run(command: list[str], **environment: str) -> str:
    """Run a command; returns its output, or fails with the last of its error lines, in one line."""
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no error output"]
    errors = [line for line in lines if "rror:" in line or "\x1b[0m" in line] or lines  # the DSL colours its reports
    assert result.returncode == 0, f"exit {result.returncode}: {'; '.join(errors[-6:])}"
    return result.stdout


def make_toolkit(folder: Path, release: str, *, link: str = ":") -> Path:
    """A CUDA toolkit whose nvcc only reports a release, makes empty objects and runs ``link`` to link."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f"""#!/bin/sh
out=
case "$*" in *--version*) echo "Cuda compilation tools, release {release}, V{release}.0"; exit 0;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; [ "$1" = -shared ] && shared=1; shift; done
if [ -n "$shared" ]; then {link}; else : > "$out"; fi
"""
    )
    nvcc.chmod(0o755)
    return folder


def test_private_package_imports_under_the_tested_dsl() -> None:
    """Guards thrmma: annotations that name a class of an older DSL kill the import."""
    assert run_python('importlib.import_module(PACKAGE + ".sparse"); print("imported")') == "imported\n"


def compile_forward(*head_ratios: str) -> list[dict[str, object]]:
    """Compile for sm_100a in a fresh process; one report a head ratio."""
    command = [sys.executable, "-W", "ignore", "-m", "msa_vendored.offline_compile", "--arch", "sm_100a"]
    return [json.loads(line) for line in run([*command, "--head-ratio", *head_ratios]).splitlines()]


def test_sparse_forward_compiles_for_sm100a() -> None:
    """Guards fmax: the wrong call form stops the compilation of every softmax."""
    (report,) = compile_forward("16")
    # Seen with DSL 4.6.2: 256 KB of PTX, 136 KB of cubin. A tenth would be a kernel that lost its body.
    assert report["ptx_bytes"] > 100_000  # type: ignore[operator]  # JSON numbers
    assert report["cubin_bytes"] > 50_000  # type: ignore[operator]  # JSON numbers


def test_sparse_forward_compiles_for_small_head_ratios() -> None:
    """Guards tma-prefetch: head ratios 1, 2 and 4 prefetch a tensor map through a raw pointer."""
    assert [report["head_ratio"] for report in compile_forward("1", "2", "4")] == [1, 2, 4]


WITH_SM100F = ("vllm-0.33.0",)

NVCC_FLAGS = """
from pathlib import Path
print(importlib.import_module(PACKAGE + ".jit")._get_nvcc_flags(Path("cache")))
"""


def test_nvcc_flags_name_only_targets_the_toolkit_knows(tmp_path: Path) -> None:
    """Guards sm-103a: nvcc before 12.9 rejects the whole kernel for one unknown target, be it sm_103a or sm_100f."""
    expected = {"12.8": False, "12.9": True, "13.0": True}
    for release, named in expected.items():
        toolkit = make_toolkit(tmp_path / release, release)
        flags = run_python(NVCC_FLAGS, CUDA_HOME=str(toolkit)).split()
        assert "-gencode=arch=compute_100a,code=sm_100a" in flags
        found = "-gencode=arch=compute_103a,code=sm_103a" in flags
        assert found == named, f"nvcc {release}: sm_103a in the flags is {found}, expected {named}"
        others = [flag for flag in flags if flag.startswith("-gencode") and "100a" not in flag and "103a" not in flag]
        assert others == (["-gencode=arch=compute_100f,code=sm_100f"] if named and PIN in WITH_SM100F else [])


def real_nvcc() -> Path | None:
    """An nvcc of release 12.9 or later, or None."""
    from msa_vendored import toolchain

    found = toolchain.find_nvcc()
    return Path(found) if found and toolchain.nvcc_release(found) >= toolchain.MIN_SM103A_NVCC else None


@pytest.mark.nvcc
@pytest.mark.slow
def test_planner_compiles_for_both_blackwell_targets(tmp_path: Path) -> None:
    """Guards the flags as a whole: they must be ones that a real nvcc takes for a source of MSA."""
    nvcc = real_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc of release 12.9 or later on this machine; the planner was not compiled")
    flags = run_python(NVCC_FLAGS.replace("(Path", ", False)(Path").replace("flags, False)(", "flags("))
    assert "sm_103a" in flags
    package = Path(msa_vendored.__file__).parent / msa_vendored.provenance().package.rpartition(".")[2]
    source, target = package / "csrc" / "fmha_sm100_plan.cu", tmp_path / "plan.o"
    run(["sh", "-c", f"'{nvcc}' {flags.strip()} -c '{source}' -o '{target}'"])
    assert target.stat().st_size > 10_000


def test_kernel_caches_are_keyed_by_the_built_tree(tmp_path: Path) -> None:
    """Guards cache-keys: a binary of another tree has the same variant name and would be loaded."""
    code = """
jit = importlib.import_module(PACKAGE + ".jit")
aot = importlib.import_module(PACKAGE + ".cute.src.common.aot_cache")
print(json.dumps([TREE, str(jit.CACHE_BASE), aot._key_to_path(("fwd", 128))]))
"""
    toolkit = make_toolkit(tmp_path / "cuda", "13.0")
    environment = {"CUDA_HOME": str(toolkit), "MINFER_FMHA_CACHE_DIR": str(tmp_path), "CUTE_DSL_ARCH": "sm_100a"}
    tree, csrc, aot = json.loads(run_python(code, **environment).splitlines()[-1])
    for path in (csrc, aot):
        assert tree in path, f"the built tree {tree} is not in the cache path {path}"
    assert csrc.startswith(str(tmp_path)), "the user's cache folder is not the parent"
    assert "sm_100a" in aot, "two architectures would share an object"


def test_torch_extensions_are_named_after_the_built_tree(tmp_path: Path) -> None:
    """Guards extension-names: under a fixed name a second copy of MSA gets the first one's binary."""
    code = """
import torch.utils.cpp_extension as cpp_extension
names = []
cpp_extension.load = lambda name, **_: names.append(name)
importlib.import_module(PACKAGE + ".cute.src.sm100.build_k2q_csr")
importlib.import_module(PACKAGE + ".cute.src.sm100.fwd_decode.build_decode_schedule")._load_ext()
print(json.dumps([TREE, names]))
"""
    toolkit = make_toolkit(tmp_path / "cuda", "13.0")
    tree, names = json.loads(run_python(code, CUDA_HOME=str(toolkit)).splitlines()[-1])
    assert len(names) == 2
    for name in names:
        assert tree in name, f"extension {name} does not contain the built tree {tree}"
        assert name.isidentifier()


COMPILE_PLAN = """
jit = importlib.import_module(PACKAGE + ".jit")
if hasattr(jit, "_do_compile_plan"):
    compile_plan = jit._do_compile_plan
    def find_plan():
        return [path for path in jit.CACHE_BASE.rglob("*.so")]
else:  # since vllm 0.32.0 a record says which library is whole
    def compile_plan():
        return jit.build_module("plan")
    def find_plan():
        jit._jit_cache.clear_memo()
        return [path for path in [jit._module_recipe("plan")[0].lookup()] if path]
def show():
    print([path.read_text().strip() for path in find_plan()])
"""


def test_a_killed_link_leaves_no_shared_object(tmp_path: Path) -> None:
    """Guards atomic-link: a torn file under the final name is loaded by every later process.

    Pins from vllm 0.32.0 on do without the patch, since MSA itself then publishes a library after its link.
    """
    code = f"""{COMPILE_PLAN}
import os
os.environ["TORN"] = "1"
try:
    compile_plan()
except RuntimeError as error:
    print("refused")
show()
del os.environ["TORN"]
compile_plan()
show()
"""
    link = 'if [ -n "$TORN" ]; then echo torn > "$out"; kill -9 $$; else echo whole > "$out"; fi'
    toolkit = make_toolkit(tmp_path / "cuda", "13.0", link=link)
    output = run_python(code, CUDA_HOME=str(toolkit), MINFER_FMHA_CACHE_DIR=str(tmp_path / "cache")).splitlines()
    assert output[0] == "refused"
    assert output[1] == "[]", f"a torn shared object stays: {output[1]}"
    assert output[2] == "['whole']", f"after another compilation there is {output[2]}"


def test_a_finished_link_is_published(tmp_path: Path) -> None:
    """Guards atomic-link against never renaming: the shared object must appear under the name that is loaded."""
    code = f"""{COMPILE_PLAN}
compile_plan()
print([path.name for path in find_plan()])
"""
    toolkit = make_toolkit(tmp_path / "cuda", "13.0", link='echo whole > "$out"')
    output = run_python(code, CUDA_HOME=str(toolkit), MINFER_FMHA_CACHE_DIR=str(tmp_path / "cache"))
    (name,) = json.loads(output.splitlines()[-1].replace("'", '"'))
    assert name.startswith("fmha_sm100_plan")
    assert name.endswith(".so")


def test_two_containers_do_not_export_into_one_file(tmp_path: Path) -> None:
    """Guards aot-temporary: two containers that share a home have equal process ids.

    The second one would write into what the first has under way, and publish it half-written.
    """
    code = """
import pathlib
aot = importlib.import_module(PACKAGE + ".cute.src.common.aot_cache")
found = []
class Slow:
    def export_to_c(self, path, function_name):
        with open(path, "w") as file:
            file.write("half")
            file.flush()
            aot.save_aot(("fwd", 128), Quick())
            found.append(pathlib.Path(aot._key_to_path(("fwd", 128)) + ".o").read_text())
            file.write(" and half")
class Quick:
    def export_to_c(self, path, function_name):
        with open(path, "a") as file:
            file.write("whole")
aot.save_aot(("fwd", 128), Slow())
folder = pathlib.Path(aot._AOT_CACHE_DIR)
print(json.dumps([*found, *(path.read_text() for path in folder.glob("*.o")), len(list(folder.glob("*.tmp*")))]))
"""
    environment = {"MM_SPARSE_ATTN_AOT_CACHE": str(tmp_path / "aot"), "CUTE_DSL_ARCH": "sm_100a"}
    *objects, left = json.loads(run_python(code, **environment).splitlines()[-1])
    assert objects == ["whole", "half and half"], f"objects that were loaded: {objects}"
    assert left == 0


def test_the_warm_up_finds_the_csr_builder(tmp_path: Path) -> None:
    """Guards warmup-import: a statement that cannot be made relative stops the build, or imports another ``src``."""
    code = """
import ast, importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec(PACKAGE).origin).parent
local = {path.name.removesuffix(".py") for path in (folder / "cute").iterdir()}
left = []
for path in folder.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        left += [f"{path.name}: {name}" for name in names if name.split(".")[0] in local]
built = []
if (folder / "msa_warmup.py").is_file():
    import torch.utils.cpp_extension as cpp_extension
    cpp_extension.load = lambda name, **_: built.append(name)
    warmup = importlib.import_module(PACKAGE + ".msa_warmup")
    items = warmup.plan_warmup("fp8", None, 64, 4, 16, sparse_decode=False)
    [item.build() for item in items if item.label == "k2q CSR builder"]
print(json.dumps([left, built]))
"""
    toolkit = make_toolkit(tmp_path / "cuda", "13.0")
    left, built = json.loads(run_python(code, CUDA_HOME=str(toolkit)).splitlines()[-1])
    assert left == [], f"imports of the package's own modules that are not relative: {left}"
    assert len(built) == (1 if PIN == "vllm-0.33.0" else 0)


@pytest.fixture(scope="session")
def second_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MSA as vLLM ships it, under its own name; only the annotations that stop its import are fixed."""
    if not PRISTINE.is_dir():
        pytest.fail(f"{PRISTINE} is not there: nox -s vendor", pytrace=False)
    folder = tmp_path_factory.mktemp("vllm")
    target = folder / "fmha_sm100"
    shutil.copytree(PRISTINE, target, ignore=shutil.ignore_patterns("cutlass"), copy_function=shutil.copyfile)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        if path.suffix == ".py":
            path.write_bytes(path.read_bytes().replace(b"cute.core.ThrMma", b"cute.ThrMma"))
    return folder


OURS = "ours = msa_vendored.kernels()\n"
THEIRS = "import fmha_sm100, fmha_sm100.sparse\ntheirs = fmha_sm100.fmha_sm100_plan\n"


@pytest.mark.parametrize(("first", "second"), [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours-first", "theirs-first"])
def test_a_second_copy_of_msa_lives_in_the_same_process(second_copy: Path, first: str, second: str) -> None:
    """Guards private-registration: process-global names make whichever copy comes second die."""
    code = f"""
import tvm_ffi
owners, register = {{}}, tvm_ffi.register_global_func
def record(name, function, *arguments, **options):
    register(name, function, *arguments, **options)
    owners[name] = function.__module__
tvm_ffi.register_global_func = record
sys.path.append({str(second_copy)!r})
{first}{second}
assert ours.fmha_sm100_plan is not theirs
assert ours.sparse_atten_func.__module__.startswith(PACKAGE)
assert fmha_sm100.sparse.sparse_atten_func.__module__ == "interface"
assert tvm_ffi.get_global_func("minfer.ops.fmha_sm100_plan") is not None
taken = [name for name, owner in owners.items() if owner.startswith(PACKAGE) and not name.startswith(PACKAGE)]
assert not taken, f"another copy's {{taken}} now run our code"
print("both")
"""
    assert run_python(code).splitlines()[-1] == "both"


PROCESS_STATE = {
    "sys.path": "list(sys.path)",
    "cute.compile": "[id(cutlass.cute.compile), type(cutlass.cute.compile).__name__]",
    "top-level modules": '[n for n in sys.modules if n in {"src", "interface", "quantize", "sparse_index_utils", '
    '"fp4_indexer_interface", "q8_indexer_interface", "fmha_sm100", "sparse"}]',
    "environment": "sorted(os.environ)",
}


@pytest.mark.parametrize("what", PROCESS_STATE)
def test_importing_leaves_the_process_as_it_was(what: str) -> None:
    """Guards sys-path, compile-hook and the import rewrite: binding must not change what others see."""
    code = f"""
import os, cutlass, cutlass.cute, quack, torch
def state():
    return {PROCESS_STATE[what]}
before = state()
msa_vendored.kernels()
print(json.dumps([before, state()]))
"""
    before, after = json.loads(run_python(code).splitlines()[-1])
    assert before == after, f"{what} changed: {before} -> {after}"
