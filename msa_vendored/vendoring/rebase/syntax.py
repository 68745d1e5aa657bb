"""Python by its syntax tree: which function a line belongs to, and whether two texts say the same."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator

MODULE = "<module>"

_Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def parse_python(data: bytes) -> ast.Module | None:
    """The syntax tree; None if the bytes are not Python."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError):
        return None


def is_same_syntax(one: bytes, other: bytes) -> bool:
    """Whether two texts are Python and differ at most in formatting and comments."""
    trees = parse_python(one), parse_python(other)
    return None not in trees and ast.dump(trees[0]) == ast.dump(trees[1])  # type: ignore[arg-type]  # not None


def list_scopes(tree: ast.Module) -> list[tuple[str, _Scope]]:
    """Every module, class and function with its qualified name, outer ones first.

    A name that is defined again gets a number, ``f (2)``: which of them is meant is what matters here.
    """
    scopes: list[tuple[str, _Scope]] = [(MODULE, tree)]
    seen: Counter[str] = Counter()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, _DEFINITIONS):
                name = f"{prefix}{child.name}"
                seen[name] += 1
                name = name if seen[name] == 1 else f"{name} ({seen[name]})"
                scopes.append((name, child))
                inner = f"{name}."
            visit(child, inner)

    visit(tree, "")
    return scopes


def name_lines(data: bytes) -> list[str] | None:
    """For each line the qualified name of the innermost class or function around it, decorators included.

    Returns:
        One name a line, the first line at index 0; None if the bytes are not Python.
    """
    tree = parse_python(data)
    if tree is None:
        return None
    names = [MODULE] * (data.count(b"\n") + 1)
    for name, scope in list_scopes(tree):
        if isinstance(scope, ast.Module):
            continue
        first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
        last = scope.end_lineno or first
        names[first - 1 : last] = [name] * (last - first + 1)
    return names


def has_edit(base: bytes, patched: bytes, current: bytes) -> bool:
    """Whether ``current`` already says what the edit from ``base`` to ``patched`` wants to say.

    Compared are statements (of compound ones only the head), arguments and decorators, each function for itself and
    without regard to order or nesting inside it: upstream may have wrapped a statement in an ``if`` or formatted it
    otherwise. Each statement that the edit adds must be there as often as after the edit, each that it removes no
    more often. An edit that only removes, or that touches no statement, is never found so.
    """
    trees = [parse_python(data) for data in (base, patched, current)]
    if None in trees:
        return False
    old, new, now = (_count_units(tree) for tree in trees if tree is not None)
    added_any = False
    for name in old.keys() | new.keys():
        added, removed = new[name] - old[name], old[name] - new[name]
        added_any |= bool(added)
        if any(now[name][unit] < new[name][unit] for unit in added):
            return False
        if any(now[name][unit] > new[name][unit] for unit in removed):
            return False
    return added_any


def _count_units(tree: ast.Module) -> defaultdict[str, Counter[str]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, scope in list_scopes(tree):
        if not isinstance(scope, ast.Module):
            counts[name].update(_head_units(scope))
        counts[name].update(_body_units(scope))
    return counts


def _head_units(scope: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    yield from (f"decorator {ast.dump(decorator)}" for decorator in scope.decorator_list)
    if isinstance(scope, ast.ClassDef):
        yield from (f"base {ast.dump(base)}" for base in (*scope.bases, *scope.keywords))
        return
    yield from list_parameters(scope, annotations=True)
    if scope.returns is not None:
        yield f"returns {ast.dump(scope.returns)}"


def list_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, annotations: bool = False) -> list[str]:
    """The parameters in order, each as ``kind name[: annotation][=default]``."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    rows = [("", arg, value) for arg, value in zip(positional, [*defaults, *arguments.defaults], strict=True)]
    if arguments.vararg:
        rows.append(("*", arguments.vararg, None))
    rows += [("*, ", arg, value) for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        rows.append(("**", arguments.kwarg, None))
    return [
        f"{kind}{arg.arg}"
        + (f": {ast.unparse(arg.annotation)}" if annotations and arg.annotation else "")
        + (f"={ast.unparse(value)}" if value else "")
        for kind, arg, value in rows
    ]


def _body_units(scope: _Scope) -> Iterator[str]:
    for statement in list_statements(scope, nested=False):
        if isinstance(statement, _DEFINITIONS):
            continue
        blocks = {name for name, value in ast.iter_fields(statement) if _is_block(value)}
        head = [f"{name}={_dump(v)}" for name, v in ast.iter_fields(statement) if name not in blocks]
        yield f"{type(statement).__name__}({', '.join(head)})"


def list_statements(node: ast.AST, *, nested: bool = True) -> Iterator[ast.stmt]:
    """Every statement inside ``node``; without ``nested`` none inside a class or function in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # no statement is inside an expression
        if isinstance(child, ast.stmt):
            yield child
        if nested or not isinstance(child, _DEFINITIONS):
            yield from list_statements(child, nested=nested)


def _is_block(value: object) -> bool:
    kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return isinstance(value, list) and bool(value) and isinstance(value[0], kinds)


def _dump(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_dump(item) for item in value) + "]"
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)
