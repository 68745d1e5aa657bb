"""Any diff on any bytes: it is read back, applied exactly, or refused; and git agrees."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from msa_vendored.vendoring.errors import PatchError
from msa_vendored.vendoring.udiff import (
    apply_file_patch,
    format_file_patch,
    make_udiff,
    parse_udiff,
    reverse,
)

# Few distinct lines make repeated context likely, which is where a lenient applier goes wrong.
LINES = st.sampled_from([b"a\n", b"b\n", b"\n", b"\r\n", b"a\r\n", b"-- a\n", b"++ b\n", b"\\ x\n", b"\xe9\x00\n"])
TEXTS = st.builds(
    lambda lines, tail: b"".join(lines) + tail,
    st.lists(LINES, max_size=12),
    st.sampled_from([b"", b"a", b"\r", b"\xff"]),
)
CONTENTS = st.one_of(TEXTS, st.binary(max_size=40))
FILES = st.one_of(st.none(), CONTENTS)


@given(old=FILES, new=FILES)
def test_made_diff_is_read_back_and_gives_the_new_bytes(old: bytes | None, new: bytes | None) -> None:
    """Guards: bytes that the writer and the reader treat differently (CR, NUL, Latin-1, no newline at the end)."""
    assume(old != new)
    (patch,) = parse_udiff(make_udiff("f", old, new), "x.patch").files
    assert apply_file_patch(patch, old, "x.patch") == new
    assert format_file_patch(patch) == make_udiff("f", old, new)


@given(old=FILES, new=FILES)
def test_reverse_undoes_a_patch(old: bytes | None, new: bytes | None) -> None:
    """Guards: reverse loses a line, a newline or the file itself; or writes a diff that is refused."""
    assume(old != new)
    (patch,) = parse_udiff(make_udiff("f", old, new), "x.patch").files
    assert apply_file_patch(reverse(patch), new, "x.patch") == old
    assert reverse(reverse(patch)) == patch
    assert parse_udiff(format_file_patch(reverse(patch)), "x.patch").files == (reverse(patch),)


@given(old=CONTENTS, new=CONTENTS, data=st.data())
def test_one_changed_byte_in_quoted_lines_is_refused(old: bytes, new: bytes, data: st.DataObject) -> None:
    """Guards: a hunk applies to lines that are not its own. Bytes outside hunks are the digests' business."""
    assume(old != new)
    (patch,) = parse_udiff(make_udiff("f", old, new), "x.patch").files
    quoted = [(hunk.old_index, b"".join(hunk.old_lines)) for hunk in patch.hunks if hunk.old_lines]
    assume(quoted)
    index, text = data.draw(st.sampled_from(quoted))
    start = sum(len(line) + 1 for line in old.split(b"\n")[:index])
    position = start + data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.integers(1, 255))
    mutated = old[:position] + bytes([old[position] ^ other]) + old[position + 1 :]
    with pytest.raises(PatchError, match="the hunk does not match"):
        apply_file_patch(patch, mutated, "x.patch")


@st.composite
def damaged_diffs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Old bytes, and a diff of them of which up to two lines were removed, repeated, swapped or altered."""
    old = draw(TEXTS)
    lines = make_udiff("f", old, draw(TEXTS)).split(b"\n")
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(lines) - 1))
        other = draw(
            st.sampled_from(lines) | st.sampled_from([b" a", b"-a", b"+a", b"@@ -1 +1 @@", b"@@ -2,2 +2,3 @@"])
        )
        edit = draw(st.sampled_from([[], [lines[index], other], [other], [lines[index][1:]]]))
        lines[index : index + 1] = edit
        assume(lines)
    return old, b"\n".join(lines)


@given(diff=st.one_of(st.binary(max_size=80), damaged_diffs().map(lambda pair: pair[1])))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(diff: bytes) -> None:
    """Guards: the reader dies with another error than its own, or reads something that it cannot write."""
    try:
        files = parse_udiff(diff, "x.patch").files
    except PatchError:
        return
    written = b"".join(format_file_patch(file) for file in files)
    assert parse_udiff(written, "x.patch").files == files


def run_git(folder: Path, *arguments: str, ok: tuple[int, ...] = (0,)) -> bytes:
    """Run git away from any repository and any configuration of the user (pitfalls 1 and 10)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env |= {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    result = subprocess.run(["git", *arguments], cwd=folder, env=env, capture_output=True, check=False)
    assert result.returncode in ok, result.stderr
    return result.stdout


def apply_with_git(diff: bytes, old: bytes | None) -> bytes | None:
    """What ``git apply`` makes of the file ``f``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if old is not None:
            (folder / "f").write_bytes(old)
        (folder / "x.patch").write_bytes(diff)
        run_git(folder, "apply", "--whitespace=nowarn", "x.patch")
        return (folder / "f").read_bytes() if (folder / "f").exists() else None


@given(old=FILES, new=FILES)
@settings(max_examples=25, deadline=None)
def test_git_applies_our_diffs_alike(old: bytes | None, new: bytes | None) -> None:
    """Guards: our writer's dialect differs from the one that everybody's tools read."""
    assume(old != new)
    assert apply_with_git(make_udiff("f", old, new), old) == new


@given(pair=damaged_diffs())
@settings(max_examples=500, deadline=None)
def test_git_agrees_on_whatever_we_accept(pair: tuple[bytes, bytes]) -> None:
    """Guards: our reader accepts a diff that git refuses, or takes it to mean something else."""
    old, diff = pair
    try:
        (patch,) = parse_udiff(diff, "x.patch").files
        new = apply_file_patch(patch, old, "x.patch")
    except PatchError:
        return
    assert apply_with_git(diff, old) == new


@given(old=CONTENTS, new=CONTENTS)
@settings(max_examples=25, deadline=None)
def test_diffs_written_by_git_are_accepted(old: bytes, new: bytes) -> None:
    """Guards: a maintainer's ``git diff -U1`` is refused or read differently."""
    assume(old != new)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, content in (("a", old), ("b", new)):
            (folder / side).mkdir()
            (folder / side / "f").write_bytes(content)
        diff = run_git(folder, "diff", "--no-index", "--no-prefix", "--text", "-U1", "a/f", "b/f", ok=(1,))
    (patch,) = parse_udiff(diff, "x.patch").files
    assert apply_file_patch(patch, old, "x.patch") == new


def launcher(name: str, limit: int) -> bytes:
    return b"def launch_%b(grid):\n    if grid > %d:\n        refuse()\n    run(grid)\n\n" % (name.encode(), limit)


def test_hunk_never_lands_in_a_twin_of_its_function() -> None:
    """Guards pitfall 2: git moves the hunk to a twin of the function when a third one is inserted above."""
    old = launcher("fwd", 4) + launcher("bwd", 4)
    diff = make_udiff("f", old, old[: len(old) // 2] + old[len(old) // 2 :].replace(b"run(grid)", b"run(grid + 1)"))
    upstream = launcher("pre", 4) + old
    by_git = apply_with_git(diff, upstream)
    assert by_git == launcher("pre", 4) + launcher("fwd", 4).replace(b"run(grid)", b"run(grid + 1)") + launcher(
        "bwd", 4
    )
    (patch,) = parse_udiff(diff, "x.patch").files
    with pytest.raises(PatchError, match="the hunk does not match"):
        apply_file_patch(patch, b"# one line\n" + old, "x.patch")
