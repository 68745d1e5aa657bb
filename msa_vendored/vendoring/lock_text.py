"""The text of a lock: the same for the same values, so that refreshed digests show up as small diffs."""

from __future__ import annotations

import json
from dataclasses import asdict

from msa_vendored.vendoring.lock import TESTED_WITH, GitSource, Lock, Pin
from msa_vendored.vendoring.series import PatchLock

_HEADER = """\
# The pinned sources of MSA and the patches that the build applies to them.
# Read by msa_vendored/vendoring/lock.py: a key that it does not know is an error. Rewritten by the lock command,
# which computes the digests of the patches; comments other than this one do not survive that.
# Every file of a pin, with its mode, size and SHA-256, stands in the pin's manifest in this folder; tree_digest is
# the SHA-256 of the manifest. In touches, pre and post are the SHA-256 of a file before and after the patch; a file
# that the patch adds has no pre, one that it deletes has no post.
"""


def dump_lock(lock: Lock) -> str:
    """The text of the lock file; ``read_lock`` reads the same lock back, and the same lock gives the same text."""
    parts = [_HEADER, _pairs({"schema": lock.schema, "default_pin": lock.default_pin})]
    for pin in lock.pins:
        parts += ["[[pins]]\n" + _pairs(_scalars(pin))]
        submodules = pin.source.submodules if isinstance(pin.source, GitSource) else ()
        fields = {key: value for key, value in pin.source.to_dict().items() if key != "submodules"}
        parts += ["[pins.source]\n" + _pairs(fields)]
        parts += ["[[pins.source.submodules]]\n" + _pairs(asdict(submodule)) for submodule in submodules]
        parts += ["[pins.tested_with]\n" + _pairs({name: pin.tested_with[name] for name in TESTED_WITH})]
        parts += ["[[pins.patches]]\n" + _dump_patch(patch) for patch in pin.patches]
    return "\n".join(parts)


def _scalars(pin: Pin) -> dict[str, object]:
    names = ("id", "kind", "spdx", "license_files", "manifest", "tree_digest", "series", "source_date_epoch")
    return {name: value for name in names if (value := getattr(pin, name)) is not None}


def _dump_patch(patch: PatchLock) -> str:
    rows = [{"path": touch.path, "pre": touch.pre, "post": touch.post} for touch in patch.touches]
    tables = [", ".join(f"{key} = {_value(value)}" for key, value in row.items() if value is not None) for row in rows]
    lines = "".join(f"    {{ {table} }},\n" for table in tables)
    return _pairs({"file": patch.file, "sha256": patch.sha256}) + f"touches = [\n{lines}]\n"


def _pairs(values: dict[str, object]) -> str:
    lines = {key: f"{key} = {_value(value)}\n" for key, value in values.items()}
    return "".join(_wrap(key, values[key]) if len(line) > 121 else line for key, line in lines.items())


def _wrap(key: str, value: object) -> str:
    """The same pair with each item of an array on a line of its own, for arrays that are long."""
    if not isinstance(value, tuple):
        return f"{key} = {_value(value)}\n"
    return f"{key} = [\n{''.join(f'    {_value(item)},{chr(10)}' for item in value)}]\n"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    # JSON's strings and integers are TOML's: the forms above admit no control character that JSON leaves raw.
    return json.dumps(value, ensure_ascii=False)
