"""A made-up compiler and linker, so that tests count compilations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Compiler:
    """A stage that counts its compilations; what it exports is text that names the symbol."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.failures = 0

    def compile_stage(self, **options: Any) -> Any:
        self.calls.append(options)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("does not compile")

        def export_to_c(path: str, *, function_name: str) -> None:
            Path(path).write_text(f"object of {options} as {function_name}")

        return SimpleNamespace(export_to_c=export_to_c)


class Linker:
    """Stands in for ``cute.runtime.load_module``: gives the object's text for the symbol that it holds."""

    def __init__(self) -> None:
        self.broken = False

    def load_module(self, path: str, *, enable_tvm_ffi: bool) -> Any:
        assert enable_tvm_ffi
        if self.broken:
            raise RuntimeError("undefined symbol")
        text = Path(path).read_bytes().partition(b'{"name')[0].decode()
        return SimpleNamespace(**{text.rpartition(" ")[2]: lambda: text.rpartition(" as ")[0]})


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("kernels/*.o"))
