"""Strict, typed access to the tables of a TOML file; every refusal names the key path, such as ``pins[1].id``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msa_vendored.vendoring.errors import LockError
from msa_vendored.vendoring.safe_paths import find_path_problem

_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class Form:
    """What a string must look like: in words, and as a test."""

    words: str
    accepts: Callable[[str], object]


def pattern(words: str, regex: str) -> Form:
    """The form of strings that match ``regex`` from end to end."""
    return Form(words, re.compile(regex).fullmatch)


PATH = Form("a plain relative path with '/' between its parts", lambda text: find_path_problem(text) is None)


@dataclass(frozen=True, slots=True)
class Table:
    """A TOML table whose keys have been checked.

    Attributes:
        data: the parsed table.
        file: the file's name, for errors.
        key_path: where the table is in the file; empty for the file itself.
    """

    data: dict[str, Any]
    file: str
    key_path: str = ""

    def require(self, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> Table:
        """Check the keys; returns itself.

        Raises:
            LockError: a key is not among ``keys`` and ``optional``, or one of ``keys`` is missing.
        """
        accepted = ", ".join(sorted({*keys, *optional}))
        if unknown := sorted(set(self.data) - {*keys, *optional}):
            raise self.refuse(unknown[0], "unknown key in the lock file", f"one of: {accepted}")
        if missing := [key for key in keys if key not in self.data]:
            raise self.refuse(missing[0], "missing key in the lock file", f"all of: {', '.join(keys)}")
        return self

    def text(self, key: str, form: Form) -> str:
        """The string at ``key``, which must have ``form``."""
        return self._check_text(key, self._typed(key, str, form.words), form)

    def texts(self, key: str, form: Form) -> tuple[str, ...]:
        """The strings of the array at ``key``: at least one, none twice, each of ``form``."""
        words = f"an array of one or more different strings, each {form.words}"
        items = self._typed(key, list, words)
        for index, item in enumerate(items):
            if type(item) is not str:
                raise self.refuse(f"{key}[{index}]", "wrong type in the lock file", form.words, type_name(item))
            self._check_text(f"{key}[{index}]", item, form)
        if not items or len(set(items)) != len(items):
            raise self.refuse(key, "wrong value in the lock file", words, repr(items))
        return tuple(items)

    def integer(self, key: str) -> int:
        """The integer at ``key``, which must not be negative."""
        value: int = self._typed(key, int, "an integer, 0 or more")
        if value < 0:
            raise self.refuse(key, "wrong value in the lock file", "an integer, 0 or more", repr(value))
        return value

    def table(self, key: str) -> Table:
        """The table at ``key``, its keys not checked yet."""
        return Table(self._typed(key, dict, "a table"), self.file, self._path_of(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """The tables of the array at ``key``; none if there is no such key."""
        items = self._typed(key, list, "an array of tables") if key in self.data else []
        for index, item in enumerate(items):
            if type(item) is not dict:
                raise self.refuse(f"{key}[{index}]", "wrong type in the lock file", "a table", type_name(item))
        return tuple(Table(item, self.file, self._path_of(f"{key}[{index}]")) for index, item in enumerate(items))

    def refuse(self, key: str, what: str, expected: str, got: str | None = None) -> LockError:
        """The error about ``key`` of this table."""
        where = f"{self.file}: {self._path_of(key)}"
        return LockError(what, where=where, expected=expected, got=got, next_command=f"edit {self.file}")

    def _path_of(self, key: str) -> str:
        return f"{self.key_path}.{key}" if self.key_path else key

    def _typed(self, key: str, kind: type, words: str) -> Any:
        value = self.data[key]
        # type() and not isinstance: True is an int in Python, and not in a lock file.
        if type(value) is not kind:
            raise self.refuse(key, "wrong type in the lock file", words, type_name(value))
        return value

    def _check_text(self, key: str, value: str, form: Form) -> str:
        if not form.accepts(value):
            raise self.refuse(key, "wrong value in the lock file", form.words, repr(value))
        return value


def type_name(value: object) -> str:
    """The TOML name of a parsed value's type."""
    return _TYPE_NAMES.get(type(value), "a date or time")
