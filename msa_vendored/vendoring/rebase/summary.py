"""What changed upstream between two pins, as a maintainer wants to read it in a pull request."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath

from msa_vendored.vendoring.lock import Pin
from msa_vendored.vendoring.rebase.content import Content
from msa_vendored.vendoring.rebase.syntax import list_parameters, list_statements, parse_python

LAUNCHERS = {
    "build_k2q_csr": "cute/sparse_index_utils.py",
    "sparse_atten_func": "cute/interface.py",
    "fmha_sm100": "api.py",
    "fmha_sm100_plan": "api.py",
}
"""The four official launchers and where the default pin defines them."""

_TARGET = re.compile(rb"-gencode=arch=[\w,=]+|-arch=sm_\w+")
_SPDX = re.compile(rb"SPDX-License-Identifier:\s*([^\n\r*]+)")
_HOLDER = re.compile(rb"Copyright \((?:c|C)\)(?: |-|,|\d)*(?:by )?([^\n\r]+)")
_LICENCE_FILE = re.compile(r"(LICEN[SC]E|COPYING|NOTICE)[^/]*", re.IGNORECASE)
_REQUIREMENT_FILES = ("requirements.txt", "pyproject.toml", "setup.py", "setup.cfg")
_HEADERS = "cutlass/"
"""CUTLASS headers: hundreds of files that are counted, not listed."""

_MANY_FILES = 5
"""Of so many added or removed files in one folder, the folder alone is named."""

_UNSTATED = "(no SPDX header)"


@dataclass(frozen=True, slots=True)
class Summary:
    """Differences between two pristine trees.

    Attributes:
        old: id of the old pin.
        new: id of the new pin.
        added: files that are new.
        removed: files that are gone.
        changed: files with other bytes or another mode.
        imports: top-level module -> files that import it, of modules that no file imported before and that neither
            the tree nor the standard library has.
        signatures: lines about parameters of the launchers; empty if none has changed.
        targets: lines about nvcc's target flags.
        requirements: lines about versions that the pins and their requirement files name.
        licences: lines about SPDX headers, copyright holders and licence files.
    """

    old: str
    new: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    imports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    signatures: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """The summary to paste into a pull request."""
        parts = [f"### MSA: {self.old} to {self.new}\n"]
        for title, paths in (("added", self.added), ("removed", self.removed), ("changed", self.changed)):
            own = [path for path in paths if not path.startswith(_HEADERS)]
            headers = len(paths) - len(own)
            rows = _group_by_folder(own) if title != "changed" else [_code(path) for path in own]
            parts.append(_section(f"{len(paths)} files {title} ({headers} of them CUTLASS headers)", rows))
        imports = [f"`{module}` in {', '.join(map(_code, files))}" for module, files in self.imports.items()]
        parts.append(_section("New top-level imports", imports))
        parts.append(_section("Signatures of the launchers", self.signatures))
        parts.append(_section("Targets that nvcc compiles for", self.targets))
        parts.append(_section("Dependency pins", self.requirements))
        parts.append(_section("Licences", self.licences))
        return "\n".join(parts)


def summarise(old: Content, new: Content, old_pin: Pin, new_pin: Pin) -> Summary:
    """Compare two pristine trees and their pins."""
    both = [path for path in old.files if path in new.files]
    is_changed = {p for p in both if old.files[p] != new.files[p] or old.modes[p] != new.modes[p]}
    return Summary(
        old=old_pin.id,
        new=new_pin.id,
        added=tuple(sorted(set(new.files) - set(old.files))),
        removed=tuple(sorted(set(old.files) - set(new.files))),
        changed=tuple(sorted(is_changed)),
        imports=_compare_imports(old.files, new.files),
        signatures=tuple(_compare_signatures(old.files, new.files)),
        targets=tuple(_compare_targets(old.files, new.files)),
        requirements=tuple(_compare_requirements(old.files, new.files, old_pin, new_pin)),
        licences=tuple(_compare_licences(old.files, new.files, new_pin)),
    )


def _section(title: str, lines: Iterable[str]) -> str:
    items = [f"- {line}\n" for line in lines]
    return f"**{title}**\n\n" + ("".join(items) or "- none\n")


def _group_by_folder(paths: Sequence[str]) -> list[str]:
    """Files one by one, unless a top-level folder or one below it has more than five of them."""
    folders = Counter("/".join(path.split("/")[:-1][:2]) for path in paths)
    rows: dict[str, None] = {}
    for path in paths:
        folder = "/".join(path.split("/")[:-1][:2])
        many = folder and folders[folder] > _MANY_FILES
        rows[f"`{folder}/`: {folders[folder]} files" if many else _code(path)] = None
    return list(rows)


def _code(path: str) -> str:
    return f"`{path}`"


def _compare_imports(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> dict[str, tuple[str, ...]]:
    before, after = _list_imports(old), _list_imports(new)
    local = {PurePosixPath(path).stem for path in new} | {part for path in new for part in path.split("/")[:-1]}
    known = local | set(sys.stdlib_module_names) | set(before)
    return {module: tuple(files) for module, files in sorted(after.items()) if module not in known}


def _list_imports(files: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Top-level module -> files that import it absolutely, anywhere in them."""
    found: dict[str, list[str]] = {}
    for path, data in sorted(files.items()):
        for module in _modules_of(data) if path.endswith(".py") else ():
            found.setdefault(module, []).append(path)
    return found


@lru_cache(maxsize=512)
def _modules_of(data: bytes) -> frozenset[str]:
    """Kept for both trees, most of whose files are equal."""
    tree = parse_python(data)
    modules = set()
    for node in list_statements(tree) if tree else ():
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.split(".")[0])
    return frozenset(modules)


def _compare_signatures(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    lines = []
    for name, home in LAUNCHERS.items():
        before, after = _find_parameters(old, name, home), _find_parameters(new, name, home)
        if before == after:
            continue
        if before is None or after is None:
            lines.append(f"`{name}`: {'not defined before' if before is None else 'no longer defined'}")
            continue
        diff = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        lines += [f"`{name}`: {'added' if line[0] == '+' else 'removed'} `{line[2:]}`" for line in diff]
    return lines


def _find_parameters(files: Mapping[str, bytes], name: str, home: str) -> list[str] | None:
    """Names, kinds and defaults of the parameters, in order; None if no file outside of tests defines the function."""
    others = [path for path in sorted(files) if path.endswith(".py") and "test" not in path and path != home]
    for path in [home, *others]:
        if b"def " + name.encode() + b"(" not in files.get(path, b""):
            continue
        tree = parse_python(files[path])
        for node in tree.body if tree else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return list_parameters(node)
    return None


def _compare_targets(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    lines = []
    for path in sorted({*old, *new}):
        if path.startswith(_HEADERS) or not path.endswith((".py", ".txt", ".cmake", "Makefile")):
            continue
        before, after = (sorted(set(_TARGET.findall(files.get(path, b"")))) for files in (old, new))
        lines += [f"`{path}`: added `{flag.decode()}`" for flag in after if flag not in before]
        lines += [f"`{path}`: removed `{flag.decode()}`" for flag in before if flag not in after]
    return lines


def _compare_requirements(old: Mapping[str, bytes], new: Mapping[str, bytes], old_pin: Pin, new_pin: Pin) -> list[str]:
    lines = [
        f"tested with: {name} {old_pin.tested_with[name]} to {version}"
        for name, version in new_pin.tested_with.items()
        if old_pin.tested_with[name] != version
    ]
    for path in sorted({*old, *new}):
        if path.startswith(_HEADERS) or path.rpartition("/")[2] not in _REQUIREMENT_FILES:
            continue
        before, after = (files.get(path, b"").decode("utf-8", "replace").splitlines() for files in (old, new))
        diff = [line for line in difflib.unified_diff(before, after, n=0) if line[:3] not in ("+++", "---")]
        lines += [f"`{path}`: `{line}`" for line in diff if line[:1] in "+-" and line[1:].strip()]
    return lines


def _compare_licences(old: Mapping[str, bytes], new: Mapping[str, bytes], pin: Pin) -> list[str]:
    before, after = {p: _spdx_of(d) for p, d in old.items()}, {p: _spdx_of(d) for p, d in new.items()}
    lines = [f"`{p}`: {before[p]} became {after[p]}" for p in sorted(after) if p in before and before[p] != after[p]]
    fresh = Counter(after[p] for p in after if p not in before)
    lines += [f"{count} new files: {licence}" for licence, count in sorted(fresh.items())]
    covered = set(re.findall(r"[A-Za-z0-9.-]+", pin.spdx))
    foreign = {i for licence in set(after.values()) - {_UNSTATED} for i in re.findall(r"[A-Za-z0-9.-]+", licence)}
    foreign -= covered | {"AND", "OR", "WITH"}
    lines += [f"**{licence} is not in the pin's licence expression {pin.spdx}**" for licence in sorted(foreign)]
    holders = _list_holders(new) - _list_holders(old)
    lines += [f"new copyright holder: {holder}" for holder in sorted(holders)]
    for path in sorted({*old, *new}):
        if _LICENCE_FILE.fullmatch(path.rpartition("/")[2]) and old.get(path) != new.get(path):
            lines.append(f"`{path}` {'added' if path not in old else 'removed' if path not in new else 'changed'}")
    return lines


def _spdx_of(data: bytes) -> str:
    match = _SPDX.search(data[:4096])
    return match[1].decode("utf-8", "replace").strip() if match else _UNSTATED


def _list_holders(files: Mapping[str, bytes]) -> set[str]:
    found = {match for data in files.values() for match in _HOLDER.findall(data[:4096])}
    return {re.sub(r"[.\s]*(All rights reserved.*)?$", "", name.decode("utf-8", "replace")).strip() for name in found}
