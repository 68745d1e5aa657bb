"""Calls of ``kernels`` in a made-up installation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import FakeSite


INSTALL = "pip install 'msa_vendored[sm100]'"

PREAMBLE = """
import json, sys
from msa_vendored import kernels, UnavailableError
def attempt(**arguments):
    try:
        kernels(**arguments)
    except UnavailableError as error:
        return {"what": error.what, "expected": error.expected, "got": error.got, "next": error.next_command}
    return "bound"
"""


def attempt(site: FakeSite, code: str = "print(json.dumps(attempt()))", **environment: str) -> Any:
    return site.evaluate(PREAMBLE + code, **environment)


def remove(name: str) -> Any:
    return lambda site: site.remove_distribution(name)


def replace(name: str, version: str) -> Any:
    def change(site: FakeSite) -> None:
        site.remove_distribution(name)
        site.add_distribution(name, version)

    return change


def damage_tree(site: FakeSite) -> None:
    (site.private / "api.py").write_text("def fmha_sm100(): 'unpatched'\n")
    (site.private / "sparse.py").unlink()
