"""Rewriting imports: only import statements of local modules change, and lines stay where they are."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.rewrite import find_local_modules, rewrite_imports, rewrite_module

LOCAL = {"src": "cute", "interface": "cute"}

CASES = {
    "from-root": ("sparse.py", "from interface import f\n", "from .cute.interface import f\n"),
    "from-sibling": ("cute/interface.py", "from src.a import f\n", "from .src.a import f\n"),
    "from-same-package": ("cute/src/common/mask.py", "from src.common.x import f\n", "from .x import f\n"),
    "from-package-itself": ("cute/src/common/mask.py", "from src.common import x\n", "from . import x\n"),
    "from-cousin": ("cute/src/sm100/fwd/k.py", "from src.common.x import f\n", "from ...common.x import f\n"),
    "from-init": ("cute/src/sm100/__init__.py", "from src.sm100.x import f\n", "from .x import f\n"),
    "import-as": ("cute/src/common/mask.py", "import src.common.utils as u\n", "from . import utils as u\n"),
    "import-plain": ("sparse.py", "import interface\n", "from .cute import interface\n"),
    "import-star": ("cute/a.py", "from src.a import *\n", "from .src.a import *\n"),
    "comment": (
        "sparse.py",
        "from interface import f  # noqa: E402\n",
        "from .cute.interface import f  # noqa: E402\n",
    ),
    "parentheses": (
        "sparse.py",
        "from interface import (  # why\n    f,\n\n    g,  # this\n)\n",
        "from .cute.interface import (  # why\n    f,\n\n    g,  # this\n)\n",
    ),
    "backslash": ("cute/a.py", "from src.a import f, \\\n    g\n", "from .src.a import f, \\\n    g\n"),
    "nested": (
        "cute/a.py",
        "def f():\n    if 1:\n        from src.a import g\n",
        "def f():\n    if 1:\n        from .src.a import g\n",
    ),
    "one-line": (
        "cute/a.py",
        "import src.a as a; import src.b as b; c = 1\n",
        "from .src import a as a; from .src import b as b; c = 1\n",
    ),
    "after-non-ascii": ("cute/a.py", "s = 'é'; from src.a import f\n", "s = 'é'; from .src.a import f\n"),
    "crlf": ("cute/a.py", "from src.a import f\r\nx = 1\r\n", "from .src.a import f\r\nx = 1\r\n"),
    "no-newline-at-end": ("cute/a.py", "from src.a import f", "from .src.a import f"),
}


@pytest.mark.parametrize(("path", "old", "new"), CASES.values(), ids=CASES)
def test_local_imports_become_relative(path: str, old: str, new: str) -> None:
    """Guards each spelling: one left absolute leaks a top-level module, or finds another package's."""
    assert rewrite_module(path, old.encode(), LOCAL)[0].decode() == new


UNTOUCHED = {
    "other-package": "import torch\nfrom cutlass.cute import x\n",
    "same-prefix": "from srcery import x\nimport interfaces as y\n",
    "already-relative": "from .src import x\nfrom . import interface\n",
    "string": "code = 'from src.a import b'\n",
    "docstring": '"""Use:\n    from interface import f\n"""\n',
    "attribute": "x = src.common\ninterface = 1\n",
}


@pytest.mark.parametrize("text", UNTOUCHED.values(), ids=UNTOUCHED)
def test_everything_else_stays(text: str) -> None:
    """Guards against textual replacement: strings, other packages and relative imports are no business of ours."""
    assert rewrite_module("cute/a.py", text.encode(), LOCAL) == (text.encode(), 0)


def test_a_dotted_import_without_a_name_is_refused() -> None:
    """Guards ``import a.b``: it binds ``a``, which no relative import can; guessing would change behaviour."""
    with pytest.raises(PatchError) as caught:
        rewrite_module("cute/a.py", b"x = 1\nimport src.common.utils\n", LOCAL)
    assert str(caught.value) == (
        "an import of a local module has no relative spelling\n"
        "  where:    cute/a.py:2\n"
        "  expected: import a.b as c, import a, or from a.b import c; one module a statement\n"
        "  got:      import src.common.utils\n"
        "  next:     change the statement in a patch of its own in patches/"
    )


def test_a_file_that_is_not_python_is_refused_by_name() -> None:
    """Guards the place in the message: a patch that breaks a file must be found without searching."""
    with pytest.raises(PatchError) as caught:
        rewrite_module("cute/a.py", b"import src.a as b\nx = (\n", LOCAL)
    assert caught.value.where == "cute/a.py:2"


def test_local_modules_are_those_that_a_root_makes_importable() -> None:
    """Guards the set of names: a folder without __init__.py, data files and the root's own name are not modules."""
    paths = [
        "sparse.py",
        "cute/interface.py",
        "cute/src/__init__.py",
        "cute/src/a.py",
        "cute/data/x.py",
        "cute/README.md",
    ]
    assert find_local_modules(paths, ["cute"]) == {"interface": "cute", "src": "cute"}


def test_only_changed_files_are_returned() -> None:
    """Guards provenance: a file that is listed as touched must be touched."""
    files = {
        "cute/src/__init__.py": b"",
        "cute/a.py": b"from src import b\n",
        "cute/b.py": b"src = 1\n",
        "n.cu": b"src",
    }
    rewrite = rewrite_imports(files, ["cute"])
    assert rewrite.files == {"cute/a.py": b"from .src import b\n"}
    assert rewrite.statements == 1


statements = st.sampled_from(
    [
        "from src.a import b",
        "import src.a as c",
        "import torch",
        "x = 1",
        "from interface import (\n    f,\n)",
        "",
        "# src",
    ]
)


@given(st.lists(statements, max_size=12), st.sampled_from(["cute/a.py", "sparse.py", "cute/src/b.py"]))
def test_lines_keep_their_numbers_and_all_else_its_bytes(lines: list[str], path: str) -> None:
    """Guards CuTe DSL, which reads the source of a kernel by line number."""
    old = "\n".join(lines).encode()
    new, _ = rewrite_module(path, old, LOCAL)
    old_nodes, new_nodes = ast.parse(old).body, ast.parse(new).body
    assert [(n.lineno, n.end_lineno) for n in old_nodes] == [(n.lineno, n.end_lineno) for n in new_nodes]
    assert new.count(b"\n") == old.count(b"\n")
    for a, b in zip(old_nodes, new_nodes, strict=True):
        if not isinstance(a, ast.Import | ast.ImportFrom):
            assert ast.dump(a) == ast.dump(b)


@given(st.lists(statements, max_size=12))
def test_rewriting_twice_changes_nothing_more(lines: list[str]) -> None:
    """Guards idempotence: the rewritten tree has no import left that the rewrite would touch."""
    once, _ = rewrite_module("cute/a.py", "\n".join(lines).encode(), LOCAL)
    assert rewrite_module("cute/a.py", once, LOCAL) == (once, 0)
