"""``kernels()``: what binds, what is remembered, and the backends beside the official one."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from msa_vendored import bundle
from msa_vendored.bundle import KernelBinder, MSAKernels, UnknownBackendError
from msa_vendored.errors import UnavailableError

if TYPE_CHECKING:
    from conftest import FakeSite
from bundle_cases import INSTALL, attempt, damage_tree, remove, replace

FIELDS = ["build_k2q_csr", "sparse_atten_func", "fmha_sm100", "fmha_sm100_plan", "run_backward"]
HOPPER_INSTALL = "pip install 'msa_vendored[sm90]'"


def test_the_bundle_is_a_frozen_slotted_value_with_the_five_launchers_in_order() -> None:
    """Guards code that unpacks or constructs the bundle by position, as NeMo's does."""
    assert [field.name for field in dataclasses.fields(MSAKernels)] == FIELDS
    bound = MSAKernels(*([lambda: None] * 5))  # type: ignore[arg-type]  # only the container is looked at
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.run_backward = bound.fmha_sm100  # type: ignore[misc]  # what is tested
    assert not hasattr(bound, "__dict__")


def test_unavailable_is_no_import_error() -> None:
    """Guards against code that swallows ImportError and then runs without the patched launchers."""
    assert issubclass(UnavailableError, Exception)
    assert not issubclass(UnavailableError, ImportError)


def test_the_official_launchers_are_bound_as_they_are(fake_site: FakeSite) -> None:
    """Guards against wrappers that change signatures, tracing or identity."""
    code = """
from importlib import import_module
from msa_vendored import provenance
bound = kernels()
package = provenance().package
sparse, api = import_module(package + ".sparse"), import_module(package + ".api")
import msa_vendored.backward
print(json.dumps([
    bound.build_k2q_csr is sparse.build_k2q_csr,
    bound.sparse_atten_func is sparse.sparse_atten_func,
    bound.fmha_sm100 is api.fmha_sm100,
    bound.fmha_sm100_plan is api.fmha_sm100_plan,
    bound.run_backward is msa_vendored.backward.run_backward,
]))
"""
    assert attempt(fake_site, code) == [True] * 5


def test_a_failure_is_not_remembered(fake_site: FakeSite) -> None:
    """Guards a notebook in which the missing package was installed after the first attempt, on disk, like pip does."""
    fake_site.remove_distribution("jinja2")
    fake_site.remove_module("jinja2")
    code = f"""
import os, pathlib
site = pathlib.Path({str(fake_site.root)!r})
listed = site.stat()
first = attempt()
(site / "jinja2-3.1.6.dist-info").mkdir()
(site / "jinja2-3.1.6.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\\nName: jinja2\\nVersion: 3.1.6\\n")
(site / "jinja2.py").touch()
os.utime(site, ns=(listed.st_atime_ns, listed.st_mtime_ns))  # as on a file system with coarse times
print(json.dumps([first["got"], attempt()]))
"""
    assert attempt(fake_site, code) == ["no jinja2", "bound"]


def test_a_tree_that_is_built_after_a_failed_attempt_is_found(fake_site: FakeSite) -> None:
    """Guards against remembering the provenance of the tree that was there before."""
    modules = {name: (fake_site.private / name).read_text() for name in ("__init__.py", "api.py", "sparse.py")}
    damage_tree(fake_site)
    old = fake_site.private.name
    code = f"""
import pathlib, shutil
package = pathlib.Path({str(fake_site.package_dir)!r})
first = attempt()
shutil.rmtree(package / {old!r})
shutil.copytree(package.parent.parent / "new" / "tree", package, dirs_exist_ok=True)
from msa_vendored import provenance
print(json.dumps([first["got"], attempt(), provenance().folder]))
"""
    new = type(fake_site)(fake_site.root.parent / "new")
    new.package_dir.mkdir(parents=True)
    new.build({**modules, "csrc/plan.cu": "// another kernel\n"})
    new.package_dir.rename(new.root / "tree")
    found = attempt(fake_site, code)
    assert found[:2] == ["changed or missing: api.py, sparse.py", "bound"]
    assert found[2] != old


def test_success_is_kept_until_it_is_cleared(fake_site: FakeSite) -> None:
    """Guards the hot path of every layer, and tests that clear the cache between cases."""
    code = """
import msa_vendored.bundle as bundle
calls = []
real = bundle.probe_parts
bundle.probe_parts = lambda: calls.append(1) or real()
first, second = kernels(), kernels()
by_name = kernels(backend="sm100")
kernels.cache_clear()
third = kernels()
print(json.dumps([first is second, first is by_name, first is third, len(calls), repr(kernels)]))
"""
    assert attempt(fake_site, code) == [True, True, False, 2, "<msa_vendored.kernels, bound: sm100>"]


def test_threads_that_call_at_once_bind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards two layers' first calls against importing and registering twice."""
    binds: list[str] = []

    def bind(name: str) -> MSAKernels:
        binds.append(name)
        time.sleep(0.05)
        return MSAKernels(*([lambda: None] * 5))  # type: ignore[arg-type]  # only identity is looked at

    monkeypatch.setattr(bundle, "_bind", bind)
    binder, barrier = KernelBinder(), threading.Barrier(8)
    found: list[MSAKernels] = []

    def call() -> None:
        barrier.wait()
        found.append(binder())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert binds == ["sm100"]
    assert all(bound is found[0] for bound in found)
    assert len(found) == 8


def test_the_reference_needs_nothing_built(fake_site: FakeSite) -> None:
    """Guards training on a CPU from a source checkout."""
    fake_site.remove_build()
    fake_site.remove_distribution("nvidia-cutlass-dsl")
    code = """
import msa_vendored.reference as reference
bound = kernels(backend="reference")
names = [field for field in bound.__slots__]
print(json.dumps([all(getattr(bound, name) is getattr(reference, name) for name in names), names,
                  bound is kernels(backend="reference"), attempt() == "bound"]))
"""
    assert attempt(fake_site, code) == [True, FIELDS, True, False]


def test_the_reference_without_torch_is_unavailable(fake_site: FakeSite) -> None:
    """Guards an installation without dependencies."""
    fake_site.remove_distribution("torch")
    found = attempt(fake_site, 'print(json.dumps(attempt(backend="reference")))')
    assert (found["got"], found["next"]) == ("no torch", INSTALL)


def test_the_hopper_launchers_need_torch_and_the_dsl_and_no_built_tree(fake_site: FakeSite) -> None:
    """Guards Hopper users against having to build the official SM100 tree, and binding against importing torch."""
    fake_site.remove_build()
    for name in ("quack-kernels", "cuda-bindings", "jinja2"):
        fake_site.remove_distribution(name)
    code = """
import msa_vendored.hopper.launchers as launchers
bound = kernels(backend="sm90")
print(json.dumps([[name for name in bound.__slots__ if getattr(bound, name) is getattr(launchers, name)],
                  bound is kernels(backend="sm90"), "torch" in sys.modules]))
"""
    assert attempt(fake_site, code) == [FIELDS, True, False]


HOPPER_MISSING = {
    "no torch": (remove("torch"), "no torch", HOPPER_INSTALL),
    "no DSL": (remove("nvidia-cutlass-dsl"), "no nvidia-cutlass-dsl", HOPPER_INSTALL),
    "another DSL": (replace("nvidia-cutlass-dsl", "4.7.1"), "nvidia-cutlass-dsl 4.7.1", HOPPER_INSTALL),
    "no tvm-ffi": (remove("apache-tvm-ffi"), "no apache-tvm-ffi", HOPPER_INSTALL),
}


@pytest.mark.parametrize("case", HOPPER_MISSING)
def test_the_hopper_launchers_name_what_is_missing(fake_site: FakeSite, case: str) -> None:
    """Guards a Hopper job that would otherwise die at its first launch, or run with a DSL that nobody tried."""
    damage, got, command = HOPPER_MISSING[case]
    damage(fake_site)
    found = attempt(fake_site, 'print(json.dumps(attempt(backend="sm90")))')
    assert found["what"] == "the sm90 launchers cannot be bound: 1 part is missing or wrong"
    assert (found["got"], found["next"]) == (got, command)


@pytest.mark.parametrize("name", ["", "SM100", "cuda"])
def test_an_unknown_backend_is_a_value_error_that_lists_the_known_ones(name: str) -> None:
    """Guards against a typing error that ends in other kernels than meant."""
    with pytest.raises(ValueError, match="unknown backend") as caught:
        KernelBinder()(backend=name)
    assert isinstance(caught.value, UnknownBackendError)
    assert caught.value.expected == "None or one of 'sm100', 'sm90', 'reference'"
    assert caught.value.got == repr(name)


def test_binding_writes_nothing(fake_site: FakeSite, tmp_path: Path) -> None:
    """Guards jobs with a read-only home: folders for kernels are made when a kernel is compiled."""
    before = sorted(tmp_path.rglob("*"))
    assert attempt(fake_site) == "bound"
    assert sorted(tmp_path.rglob("*")) == before
