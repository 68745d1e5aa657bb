"""Which patches a pin has: the common series, unless the pin's own folder says otherwise.

``patches/series`` lists the common patches. A patch of the same name in ``patches/<pin id>/`` replaces the common one
for that pin alone. If the pin needs another list, ``patches/<pin id>/series`` is that list; each name in it is looked
for in the pin's folder first and then among the common ones.
"""

from __future__ import annotations

from pathlib import Path

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.lock import Pin
from msa_vendored.vendoring.series import Patch, parse_patch, read_series


def read_pin_series(root: Path, pin: Pin) -> tuple[Patch, ...]:
    """The patches of ``pin`` in the checkout ``root``, in order.

    Raises:
        PatchError: see ``read_series``; or the pin's folder has a patch that no list names, or its list names a patch
            that is in neither folder or twice.
    """
    common = {patch.name: patch for patch in read_series(root / pin.series)}
    folder = root / pin.series / pin.id
    own = {path.name: path for path in sorted(folder.glob("*.patch"))}
    names = list_own_names(folder) if (folder / "series").is_file() else list(common)
    _check_names(root / pin.series, folder, names, own, common)
    return tuple(
        parse_patch(name, own[name].read_bytes(), str(own[name])) if name in own else common[name] for name in names
    )


def list_own_names(folder: Path) -> list[str]:
    """The names that ``folder/series`` lists; comments start with ``#``."""
    lines = (folder / "series").read_text(encoding="utf-8").split("\n")
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def _check_names(series: Path, folder: Path, names: list[str], own: dict[str, Path], common: dict[str, Patch]) -> None:
    listed = folder / "series" if (folder / "series").is_file() else series / "series"
    if unlisted := [name for name in own if name not in names]:
        raise PatchError(
            "a pin replaces a patch that the series does not have",
            where=str(folder),
            expected=f"names of {listed}",
            got=", ".join(unlisted),
            next_command=f"rename or delete it, or list it in {listed}",
        )
    wrong = [f"{name} is in neither folder" for name in names if name not in own and name not in common]
    wrong += [f"{name} is listed twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if wrong:
        raise PatchError(
            "the series of a pin is refused",
            where=str(listed),
            expected=f"each patch of {folder} and any of {series}, once, one a line",
            got="; ".join(wrong),
            next_command=f"edit {listed}",
        )
