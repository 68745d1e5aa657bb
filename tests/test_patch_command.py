"""``nox -s patch``: a patch is made and refreshed from an edited tree, dropped with its locks, and listed by pin."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rebase_lab import HEADER, Lab

from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.partials import remove_tree
from msa_vendored.vendoring.pin_series import read_pin_series

SOURCE = b"".join(b"line %d\n" % number for number in range(12))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scratch trees go below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "msa_vendored"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Two pins with two patches on one file; for the second pin they are four lines further down."""
    lab = Lab(tmp_path, {"x.txt": SOURCE, "y.txt": SOURCE})
    lab.add_patch("first", {"x.txt": (b"line 2\n", b"2\nand more\n")})
    lab.add_patch("second", {"x.txt": (b"line 7\n", b"7\n")})
    assert lab.upgrade(SECOND).code == 0
    return lab


SECOND = {"x.txt": b"a\nb\nc\nd\n" + SOURCE, "y.txt": SOURCE}


def desk(lab: Lab, name: str) -> Path:
    """The folder that holds ``tree/`` and ``HEADER``."""
    return Path(json.loads((lab.root / f"build/rebase/{name}.patch.json").read_text())["folder"])


def names(lab: Lab, pin: str) -> list[str]:
    """The series of a pin."""
    return [patch.name.removesuffix(".patch") for patch in read_pin_series(lab.root, lab.lock.pin(pin))]


def verified(lab: Lab) -> bool:
    """Whether every pin verifies, trees included."""
    return all(verify_checkout(lab.root, pin.id)[1] == [] for pin in lab.lock.pins)


def make_new(lab: Lab, *options: str) -> None:
    """Make the patch third, which changes line 10 of x.txt."""
    assert lab.run("patch", "new", "third", *options).code == 0
    tree = desk(lab, "third") / "tree/x.txt"
    tree.write_bytes(tree.read_bytes().replace(b"line 10\n", b"10\n"))
    (desk(lab, "third") / "HEADER").write_text(HEADER.format(subject="third"))


def test_a_patch_is_made_from_an_edited_tree_for_one_pin(lab: Lab, own_cache: Path) -> None:
    """Guards new --only: on top of the other patches, in the pin's own list, locked, and nothing left behind."""
    before = lab.snapshot()
    make_new(lab, "--pin", "vllm-2.0", "--only")
    assert lab.snapshot() == before, "the first run lays out the tree and writes nothing"
    (desk(lab, "third") / "tree/__pycache__").mkdir()
    (desk(lab, "third") / "tree/__pycache__/x.pyc").write_bytes(b"")
    assert lab.run("patch", "new", "third", "--pin", "vllm-2.0", "--only").code == 0
    assert (names(lab, "vllm-1.0"), names(lab, "vllm-2.0")) == (["first", "second"], ["first", "second", "third"])
    assert verified(lab)
    (*_, third) = read_pin_series(lab.root, lab.lock.pin("vllm-2.0"))
    assert [file.path for file in third.files] == ["x.txt"]
    assert third.files[0].hunks[0].context == (1, 0, 1)
    assert list(own_cache.iterdir()) == []


def test_a_patch_for_all_pins_must_apply_to_all(lab: Lab) -> None:
    """Guards a new common patch: exact lines on every pin, or nothing is written and the way out is named."""
    make_new(lab)
    before = lab.snapshot()
    run = lab.run("patch", "new", "third")
    assert run.code == 12
    assert "on pin vllm-2.0 a patch does not apply any more" in run.err
    assert "--pin ID --only" in run.err
    assert lab.snapshot() == before
    assert (desk(lab, "third") / "tree/x.txt").read_bytes().count(b"\n10\n") == 1, "the edit is not lost"


def test_a_common_patch_reaches_every_pin(lab: Lab) -> None:
    """Guards a new common patch on a file that the pins share: one file, a line in the series, locks for both."""
    assert lab.run("patch", "new", "third").code == 0
    (desk(lab, "third") / "tree/y.txt").write_bytes(SOURCE.replace(b"line 3", b"3"))
    (desk(lab, "third") / "HEADER").write_text(HEADER.format(subject="third"))
    assert lab.run("patch", "new", "third").code == 0
    assert names(lab, "vllm-1.0") == names(lab, "vllm-2.0") == ["first", "second", "third"]
    assert (lab.root / "patches/series").read_text() == "# the patches\nfirst.patch\nsecond.patch\nthird.patch\n"
    assert verified(lab)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("header", "the header is not filled in"),
        ("nothing", "the tree was not edited"),
        ("bad-header", "the patch header is refused"),
    ],
)
def test_an_unfinished_patch_is_not_written(lab: Lab, edit: str, message: str) -> None:
    """Guards against half a patch: without header or change nothing is written, and the desk stays."""
    before = lab.snapshot()
    lab.run("patch", "new", "third")
    folder = desk(lab, "third")
    if edit != "header":
        (folder / "HEADER").write_text("Description: x\n" if edit == "bad-header" else HEADER.format(subject="x"))
    if edit != "nothing":
        (folder / "tree/y.txt").write_bytes(b"other\n")
    run = lab.run("patch", "new", "third")
    assert run.code in (2, 12)
    assert message in run.err
    assert lab.snapshot() == before
    assert lab.run("patch", "new", "third", "--abort").code == 0
    assert not folder.exists()


def test_a_refresh_keeps_the_header_and_moves_what_comes_after(lab: Lab) -> None:
    """Guards headers, and the later patches of the series: their lines shift with an edit above them."""
    header = (lab.root / "patches/first.patch").read_bytes().partition(b"diff --git")[0]
    assert lab.run("patch", "refresh", "first", "--only").code == 0
    tree = desk(lab, "first") / "tree/x.txt"
    assert b"and more\n" in tree.read_bytes(), "the patch is applied, those after it are not"
    assert b"\n7\n" not in tree.read_bytes()
    tree.write_bytes(tree.read_bytes().replace(b"and more\n", b"and more\nand more\n"))
    run = lab.run("patch", "refresh", "first", "--only")
    assert run.code == 0, run.err
    own = lab.root / "patches/vllm-1.0"
    assert (own / "first.patch").read_bytes().partition(b"diff --git")[0] == header
    assert verified(lab)
    assert lab.patched("vllm-1.0")["x.txt"] == SOURCE.replace(b"line 2\n", b"2\nand more\nand more\n").replace(
        b"line 7\n", b"7\n"
    )


def test_a_refresh_of_a_pin_s_own_patch_leaves_the_others_alone(lab: Lab) -> None:
    """Guards the common patch: the edited file is the one that the pin uses."""
    before = lab.snapshot()
    lab.run("patch", "refresh", "second", "--pin", "vllm-2.0")
    tree = desk(lab, "second") / "tree/x.txt"
    tree.write_bytes(tree.read_bytes().replace(b"\n7\n", b"\nseven\n"))
    run = lab.run("patch", "refresh", "second", "--pin", "vllm-2.0")
    assert run.code == 0, run.err
    changed = {path for path, data in lab.snapshot().items() if before.get(path) != data}
    assert changed == {"patches/vllm-2.0/second.patch", "third_party/msa.lock.toml"}
    assert verified(lab)


def test_a_refresh_that_later_patches_cannot_follow_is_refused(lab: Lab) -> None:
    """Guards the rest of the series: a conflict with a later patch is named, and neither is written."""
    before = lab.snapshot()
    lab.run("patch", "refresh", "first", "--only")
    tree = desk(lab, "first") / "tree/x.txt"
    tree.write_bytes(tree.read_bytes().replace(b"line 7\n", b"seven\n"))
    run = lab.run("patch", "refresh", "first", "--only")
    assert run.code == 13
    assert "second.patch" in run.err
    assert lab.snapshot() == before
    assert tree.read_bytes() == SOURCE.replace(b"line 2\n", b"2\nand more\n").replace(b"line 7\n", b"seven\n")
    tree.write_bytes(tree.read_bytes().replace(b"seven\n", b"line 7\n").replace(b"and more", b"and"))
    assert lab.run("patch", "refresh", "first", "--only").code == 0, "the desk serves for another try"
    assert verified(lab)


def test_a_drop_takes_file_series_and_locks_of_every_pin(lab: Lab) -> None:
    """Guards drop: no trace in any pin, and the patches after it move up on each pin by its own lines."""
    run = lab.run("patch", "drop", "first")
    assert run.code == 0, run.err
    assert names(lab, "vllm-1.0") == names(lab, "vllm-2.0") == ["second"]
    assert sorted(path.name for path in (lab.root / "patches").rglob("*.patch")) == ["second.patch", "second.patch"]
    assert "first.patch" not in (lab.root / "third_party/msa.lock.toml").read_text()
    assert "first.patch" not in (lab.root / "patches/series").read_text()
    assert verified(lab)
    assert lab.patched("vllm-2.0", SECOND)["x.txt"] == SECOND["x.txt"].replace(b"line 7\n", b"7\n")


def test_a_drop_for_one_pin_leaves_the_others(lab: Lab) -> None:
    """Guards drop --pin: a list of its own for that pin, the common files untouched."""
    before = lab.snapshot()
    assert lab.run("patch", "drop", "first", "--pin", "vllm-1.0").code == 0
    assert (names(lab, "vllm-1.0"), names(lab, "vllm-2.0")) == (["second"], ["first", "second"])
    assert {path: data for path, data in lab.snapshot().items() if "patches" in path and "1.0" not in path} == {
        path: data for path, data in before.items() if "patches" in path
    }
    assert verified(lab)


def test_a_pin_whose_tree_is_not_here_is_locked_by_the_digests_of_another(lab: Lab) -> None:
    """Guards pins that cannot be fetched everywhere: the same patch on the same bytes leaves the same bytes."""
    add_absent_pin(lab, dict(lab.files))
    run = lab.run("patch", "drop", "first")
    assert run.code == 0, run.err
    assert names(lab, "vllm-3.0") == ["second"]
    by_id = {pin.id: pin.patches for pin in lab.lock.pins}
    assert by_id["vllm-3.0"] == by_id["vllm-1.0"]
    assert verified(lab)


def test_a_pin_that_cannot_be_locked_stops_the_change(lab: Lab) -> None:
    """Guards against locks that nobody has computed: other bytes and no tree is an error that names the pin."""
    add_absent_pin(lab, {**lab.files, "x.txt": SOURCE + b"more\n"})
    before = lab.snapshot()
    run = lab.run("patch", "drop", "first")
    assert run.code == 12
    assert "pin vllm-3.0 cannot be locked: its tree is not here" in run.err
    assert lab.snapshot() == before


def add_absent_pin(lab: Lab, files: dict[str, bytes]) -> None:
    """A third pin, locked, whose tree is then deleted."""
    pin = lab.describe("3.0", files)
    lab.write_pin(replace(pin, patches=()), files, {})
    remove_tree(lab.root / "third_party/msa/vllm-3.0")


def test_the_list_shows_how_patches_differ_by_pin(lab: Lab) -> None:
    """Guards the overview: which pins share a patch, which have it at other lines, which do without it."""
    lab.run("patch", "drop", "second", "--pin", "vllm-1.0")
    make_new(lab, "--pin", "vllm-2.0", "--only")
    assert lab.run("patch", "new", "third", "--pin", "vllm-2.0", "--only").code == 0
    rows = [line.split() for line in lab.run("patch", "list").out.splitlines()]
    assert rows == [
        ["vllm-1.0", "vllm-2.0"],
        ["first.patch", "common", "moved", "build", "first"],
        ["second.patch", "-", "moved", "build", "second"],
        ["third.patch", "-", "own", "build", "third"],
    ]


USAGE = {
    "unknown": (["drop", "nothing"], 2, "no such patch"),
    "refresh-unknown": (["refresh", "nothing"], 2, "no such patch"),
    "new-known": (["new", "first"], 2, "there is a patch of that name"),
    "unknown-pin": (["drop", "first", "--pin", "vllm-9"], 18, "no such pin"),
    "nameless": (["drop"], 2, "patch drop needs the name of a patch"),
    "list-name": (["list", "first"], 2, "patch list takes no name"),
    "abort-nothing": (["refresh", "first", "--abort"], 2, "first.patch is not being edited"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_arguments_are_refused(lab: Lab, case: str) -> None:
    """Guards exit codes and messages; nothing is written."""
    arguments, code, message = USAGE[case]
    before = lab.snapshot()
    run = lab.run("patch", *arguments)
    assert (run.code, message in run.err) == (code, True), run.err
    assert lab.snapshot() == before


def test_patches_are_not_changed_during_a_rebase(lab: Lab) -> None:
    """Guards the rebase in progress, which starts from the patches as they are."""
    wheel = lab.make_wheel("4.0", {"x.txt": SOURCE.replace(b"line 2", b"zwei"), "y.txt": SOURCE})
    assert lab.rebase("--to", "vllm==4.0", "--from-source", str(wheel)).code == 13
    for arguments in (["new", "third"], ["refresh", "first"], ["drop", "first", "--pin", "vllm-1.0"]):
        run = lab.run("patch", *arguments)
        assert (run.code, run.err.partition("\n")[0]) == (2, "error[MSAV2]: a rebase is in progress")
    assert lab.run("patch", "drop", "first", "--pin", "vllm-4.0").code == 0
    assert lab.rebase("--continue").code == 0
    assert names(lab, "vllm-4.0") == ["second"]


def test_a_desk_whose_scratch_is_gone_can_be_cleared(lab: Lab) -> None:
    """Guards a cache that was emptied: --abort works, and the next run lays out a new tree."""
    lab.run("patch", "refresh", "first")
    shutil.rmtree(desk(lab, "first"))
    assert lab.run("patch", "refresh", "first", "--abort").code == 0
    assert lab.run("patch", "refresh", "first").code == 0
    assert desk(lab, "first").is_dir()
