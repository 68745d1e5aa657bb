"""Make the imports of a patched tree relative, so that the package lives under any private name.

MSA finds its own modules through entries in ``sys.path``; under a private name it must not. Every absolute import
of one of the tree's own modules becomes relative. Relative imports do not contain the package's name, so that the
name can be derived from the digest of the rewritten tree.

Only import statements change, and the number of lines stays: CuTe DSL reads the source of the functions that it
compiles by line number. ``ast`` finds the statements and libcst rewrites each one alone, comments and all: parsing
whole files with libcst and its positions took 11 s for MSA's 36,000 lines of Python, this way takes 0.4 s.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.helpers import get_full_name_for_node_or_raise

from msa_vendored.vendoring.errors import PatchError


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Outcome of a rewrite: the files that changed, and how many import statements in them."""

    files: dict[str, bytes]
    statements: int


def find_local_modules(paths: Sequence[str], roots: Sequence[str]) -> dict[str, str]:
    """Map each top-level name that ``roots`` make importable to the folder it is found in.

    ``roots`` are folders of the tree that MSA puts on ``sys.path``: with root ``cute``, the file
    ``cute/interface.py`` gives ``interface -> cute`` and ``cute/src/__init__.py`` gives ``src -> cute``.
    """
    local: dict[str, str] = {}
    for root in roots:
        prefix = f"{root}/" if root else ""
        for path in paths:
            if not path.startswith(prefix) or not path.endswith(".py"):
                continue
            first, *rest = path.removeprefix(prefix).split("/")
            if rest and f"{prefix}{first}/__init__.py" not in paths:
                continue
            name = first if rest else first.removesuffix(".py")
            if name != "__init__":
                local[name] = root
    return local


def rewrite_imports(files: Mapping[str, bytes], roots: Sequence[str]) -> Rewrite:
    """Rewrite every Python file of a tree; returns only those that changed.

    Raises:
        PatchError: a file cannot be parsed, a local module is imported in a form that has no relative spelling
            (``import src.common.utils`` without ``as``), or the number of lines would change.
    """
    local = find_local_modules(tuple(files), roots)
    changed, statements = {}, 0
    for path, data in files.items():
        if not path.endswith(".py") or not any(name.encode() in data for name in local):
            continue
        new, count = rewrite_module(path, data, local)
        if count:
            changed[path] = new
            statements += count
    return Rewrite(changed, statements)


def rewrite_module(path: str, data: bytes, local: Mapping[str, str]) -> tuple[bytes, int]:
    """Rewrite one file; returns its new bytes and the number of statements changed."""
    try:
        tree = ast.parse(data)
    except SyntaxError as error:
        raise PatchError(
            "a file of the patched tree is not Python", where=f"{path}:{error.lineno}", got=error.msg
        ) from error
    lines = data.splitlines(keepends=True)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and _imports_local(n, local)]
    # From the end backwards: a statement's columns must not move before its turn (`import src.a as a; import …`).
    for node in sorted(found, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        statement = b"".join(lines[first : last + 1])
        tail = len(lines[last]) - (node.end_col_offset or 0)
        old = statement[node.col_offset : len(statement) - tail]
        new = _relative_statement(old.decode(), path, node.lineno, local).encode()
        if new.count(b"\n") != old.count(b"\n"):
            raise PatchError("rewriting an import changed the number of lines", where=f"{path}:{node.lineno}")
        rewritten = statement[: node.col_offset] + new + statement[len(statement) - tail :]
        lines[first : last + 1] = rewritten.splitlines(keepends=True)
    return b"".join(lines), len(found)


def _imports_local(node: ast.Import | ast.ImportFrom, local: Mapping[str, str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and node.module is not None and node.module.split(".")[0] in local
    return any(alias.name.split(".")[0] in local for alias in node.names)


def _relative_statement(code: str, path: str, line: int, local: Mapping[str, str]) -> str:
    """``from src.common import utils`` -> ``from ..common import utils``; comments and line breaks stay."""
    parsed = cst.parse_statement(code)
    assert isinstance(parsed, cst.SimpleStatementLine)  # noqa: S101 - ast said that this is an import statement
    node = parsed.body[0]
    if isinstance(node, cst.ImportFrom) and node.module is not None:
        dots, parts = _relative_path(get_full_name_for_node_or_raise(node.module), path, local, keep=0)
    else:
        assert isinstance(node, cst.Import)  # noqa: S101 - the other kind of import statement
        name = get_full_name_for_node_or_raise(node.names[0].name)
        if len(node.names) > 1 or (node.names[0].asname is None and "." in name):
            raise PatchError(
                "an import of a local module has no relative spelling",
                where=f"{path}:{line}",
                expected="import a.b as c, import a, or from a.b import c; one module a statement",
                got=code,
                next_command="change the statement in a patch of its own in patches/",
            )
        dots, (*parts, last) = _relative_path(name, path, local, keep=1)
        node = cst.ImportFrom(cst.Name("_"), [node.names[0].with_changes(name=cst.Name(last))])
    module: cst.Attribute | cst.Name | None = None
    for part in parts:
        module = cst.Name(part) if module is None else cst.Attribute(module, cst.Name(part))
    node = node.with_changes(module=module, relative=[cst.Dot()] * dots)
    return cst.Module([]).code_for_node(node)


def _relative_path(name: str, path: str, local: Mapping[str, str], keep: int) -> tuple[int, list[str]]:
    """Number of dots and remaining parts of the relative spelling of a local module, seen from the file ``path``.

    At least ``keep`` parts remain: ``import a.b as c`` must have a last name to import.
    """
    package = path.split("/")[:-1]
    root = local[name.split(".")[0]]
    target = [*(root.split("/") if root else []), *name.split(".")]
    shared = 0
    while shared < min(len(package), len(target) - keep) and package[shared] == target[shared]:
        shared += 1
    return len(package) - shared + 1, target[shared:]
