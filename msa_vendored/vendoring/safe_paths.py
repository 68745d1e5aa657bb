"""Which relative paths may be written below a folder, and which sets of paths can live in one tree everywhere.

Paths come from archives, git trees, manifests and the lock file. A path that passes here names a place below the
root on every file system, and a set of paths that passes has one file per path on case-insensitive ones too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MAX_PATH_BYTES = 1024
"""The longest path of a pin has 124 bytes; Linux stops at 4,096. Bounds the work that one hostile name can cause."""

MAX_DEPTH = 32
"""The deepest path of a pin has 10 components; with it, checking every folder of every path stays linear."""

_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def find_path_problem(path: str) -> str | None:
    """Why ``path`` is not a plain relative POSIX path, in words that follow "the path"; None if it is one."""
    if not path:
        return "is empty"
    if _CONTROL.search(path):
        return "has a control character or is not UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES:,} bytes"
    if "\\" in path:
        return "has a backslash"
    if path.startswith("/") or _DRIVE.match(path):
        return "is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "leaves its folder with '..'"
    if "" in parts or "." in parts:
        return "has an empty or '.' component"
    if len(parts) > MAX_DEPTH:
        return f"has more than {MAX_DEPTH} components"
    return None


def find_collision(files: Iterable[str]) -> tuple[str, str] | None:
    """The first two paths that some file system takes for one, or of which one is a file and a folder at once.

    Folders count too: ``A/x`` and ``a/y`` share a folder on a case-insensitive file system. Compared after
    Unicode NFC and case folding. ``files`` are distinct paths without a problem.
    """
    spelled: dict[str, tuple[str, bool]] = {}
    for file in files:
        parts = file.split("/")
        for depth in range(1, len(parts) + 1):
            found = ("/".join(parts[:depth]), depth == len(parts))
            key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", found[0]).casefold())
            known = spelled.setdefault(key, found)
            if known != found:
                return known[0], found[0]
    return None
