"""Any series on any tree: it leads to the wanted files, or is refused."""

from __future__ import annotations

from itertools import permutations

from hypothesis import assume, given
from hypothesis import strategies as st
from series_cases import make_patch, refused

from msa_vendored.vendoring.series import (
    Patch,
    apply_series,
    compute_locks,
)

CONTENTS = st.lists(st.sampled_from([b"a\n", b"b\n", b"\r\n", b"\xe9\n"]), max_size=8).map(b"".join) | st.binary(
    max_size=20
)
FILE_STATES = st.none() | CONTENTS


@st.composite
def stacks(draw: st.DrawFn) -> tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]]:
    """A tree, a series over it of up to four patches of up to three files, and all files afterwards."""
    tree: dict[str, bytes | None] = {path: draw(FILE_STATES) for path in ("a", "b", "d/c")}
    files = {path: data for path, data in tree.items() if data is not None}
    patches = []
    for number in range(draw(st.integers(1, 4))):
        new = {path: draw(FILE_STATES) for path in draw(st.sets(st.sampled_from(sorted(tree)), min_size=1))}
        changes = {path: (tree[path], data) for path, data in new.items() if data != tree[path]}
        if changes:
            patches.append(make_patch(f"{number}.patch", changes))
            tree.update(new)
    return files, tuple(patches), tree


@given(stack=stacks())
def test_locked_series_leads_to_the_wanted_files(
    stack: tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]],
) -> None:
    """Guards: patches of the same file, additions and deletions in a row give other bytes than intended."""
    files, patches, after = stack
    changed = apply_series(files, patches, compute_locks(files, patches), pin="p1")
    assert changed == {path: data for path, data in after.items() if data != files.get(path)}


@given(stack=stacks(), data=st.data())
def test_one_changed_byte_in_any_touched_file_is_refused(
    stack: tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]], data: st.DataObject
) -> None:
    """Guards: a pre-image that is almost the pinned one is patched."""
    files, patches, _ = stack
    touched = {file.path for patch in patches for file in patch.files}
    candidates = sorted(path for path in touched if files.get(path))
    assume(candidates)
    path = data.draw(st.sampled_from(candidates))
    position = data.draw(st.integers(0, len(files[path]) - 1))
    mutated = bytearray(files[path])
    mutated[position] ^= data.draw(st.integers(1, 255))
    message = refused({**files, path: bytes(mutated)}, patches, compute_locks(files, patches))
    assert message.startswith(("the file is neither pristine nor already patched\n", "the file is already patched\n"))


@given(stack=stacks())
def test_applying_twice_is_refused_as_already_patched(
    stack: tuple[dict[str, bytes], tuple[Patch, ...], dict[str, bytes | None]],
) -> None:
    """Guards pitfall 4: a second run changes the tree again."""
    files, patches, _ = stack
    locks = compute_locks(files, patches)
    changed = apply_series(files, patches, locks, pin="p1")
    first = {file.path for file in patches[0].files} if patches else set()
    assume(first and first <= changed.keys())  # a file that the series changes back is pristine after it
    again = {path: data for path, data in {**files, **changed}.items() if data is not None}
    assert refused(again, patches, locks).startswith("the file is already patched\n")


@given(
    contents=st.lists(
        st.tuples(FILE_STATES, FILE_STATES).filter(lambda pair: pair[0] != pair[1]), min_size=2, max_size=3
    )
)
def test_independent_patches_commute(contents: list[tuple[bytes | None, bytes | None]]) -> None:
    """Guards: state carried from one patch to the next."""
    changes = {f"f{number}": pair for number, pair in enumerate(contents)}
    files = {path: old for path, (old, _) in changes.items() if old is not None}
    patches = [make_patch(f"{path}.patch", {path: pair}) for path, pair in changes.items()]
    for order in permutations(patches):
        changed = apply_series(files, order, compute_locks(files, order), pin="p1")
        assert changed == {path: new for path, (_, new) in changes.items()}
