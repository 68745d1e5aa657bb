"""The rebase as a maintainer lives it: conflicts, decisions, giving up, a second pin, wrong arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rebase_lab import SOURCE, UPSTREAM, Lab, make_lab, resolve

from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.lock import read_manifest
from msa_vendored.vendoring.locks import hold_lock
from msa_vendored.vendoring.pin_series import read_pin_series
from msa_vendored.vendoring.rebase.content import read_content


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scratch repositories go below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "msa_vendored"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """See ``make_lab``."""
    return make_lab(tmp_path)


def test_a_conflict_is_shown_resolved_in_ordinary_git_and_landed(lab: Lab, own_cache: Path) -> None:
    """Guards the whole path: both sides shown, nothing written before the end, the hand-made result in the patch."""
    before = lab.snapshot()
    run = lab.upgrade(UPSTREAM)
    assert (run.code, run.verdicts) == (13, {"fix": "conflict", "other": "moved"})
    assert run.patch("fix")["conflicts"] == [
        {"path": "x.txt", "line": 2, "upstream": "zwei\n", "base": "two \n", "patch": "2\n"}
    ]
    assert run.document["tag"] == "MSAV13"
    assert f"edit x.txt in {lab.scratch}; git -C {lab.scratch} add x.txt; nox -s rebase -- --continue" in run.err
    assert lab.snapshot() == before
    resolve(lab)
    done = lab.rebase("--continue")
    assert (done.code, done.verdicts) == (0, {"fix": "merged", "other": "moved"}), done.err
    assert done.patch("fix")["details"][0] == "resolved by hand"
    patched = lab.patched("vllm-2.0", UPSTREAM)
    assert patched == {"x.txt": b"one\nZwei \nthree\nfour\nfive\n", "y.txt": UPSTREAM["y.txt"].replace(b"four", b"4")}
    for pin in lab.lock.pins:
        assert verify_checkout(lab.root, pin.id)[1] == []
    written = {path for path, data in lab.snapshot().items() if before.get(path) != data}
    assert written == {
        "patches/vllm-2.0/fix.patch",
        "patches/vllm-2.0/other.patch",
        "third_party/msa.lock.toml",
        "third_party/vllm-2.0.manifest.tsv",
    }
    assert list(own_cache.iterdir()) == [], "the scratch repository stays behind"
    pin = lab.lock.pin("vllm-2.0")
    tree = read_content(lab.root / "third_party/msa/vllm-2.0", read_manifest(pin, lab.root / "third_party"))
    assert dict(tree.files) == UPSTREAM, "the new pin is vendored, so that the build need not fetch it"


def test_git_rebase_continue_by_hand_is_as_good(lab: Lab) -> None:
    """Guards maintainers who finish in git and amend the header there: the commit's message is the header."""
    assert lab.upgrade(UPSTREAM).code == 13
    resolve(lab)
    lab.git("-c", "core.editor=true", "rebase", "--continue")
    message = lab.git("log", "-1", "--format=%B").replace("The test wants it.", "Upstream renamed it.")
    lab.git("commit", "--quiet", "--amend", "-m", message.strip())
    assert lab.rebase("--continue").code == 0
    (fix, _) = read_pin_series(lab.root, lab.lock.pin("vllm-2.0"))
    assert fix.header.description == "fix\nUpstream renamed it."


def resolve_and_leave(lab: Lab, name: str) -> None:
    """Resolve the conflict, and then write a file that is not added."""
    resolve(lab)
    (lab.scratch / name).write_bytes(b"later\n")


UNRESOLVED: dict[str, tuple[Callable[[Lab], None], str]] = {
    "nothing-done": (lambda lab: None, "x.txt still has a conflict"),
    "markers-left": (lambda lab: resolve(lab, (lab.scratch / "x.txt").read_bytes()), "x.txt has conflict markers"),
    "edited-after-add": (lambda lab: resolve_and_leave(lab, "x.txt"), "x.txt is changed but not added"),
    "new-file-not-added": (lambda lab: resolve_and_leave(lab, "z.txt"), "z.txt is new and not added"),
}


@pytest.mark.parametrize("case", UNRESOLVED)
def test_what_is_not_resolved_is_not_taken(lab: Lab, case: str) -> None:
    """Guards against losing an edit that was not added, and against conflict markers in a patch."""
    act, expected = UNRESOLVED[case]
    before = lab.snapshot()
    lab.upgrade(UPSTREAM)
    act(lab)
    run = lab.rebase("--continue")
    assert run.code == 13
    assert expected in run.err
    assert lab.snapshot() == before
    resolve(lab)
    (lab.scratch / "z.txt").unlink(missing_ok=True)
    assert lab.rebase("--continue").code == 0


def test_a_resolution_that_leaves_nothing_needs_a_decision(lab: Lab) -> None:
    """Guards against an empty patch: taking upstream's side is to do without the patch, and must be said."""
    lab.upgrade(UPSTREAM)
    resolve(lab, UPSTREAM["x.txt"])
    run = lab.rebase("--continue")
    assert run.code == 14
    assert "fix.patch seems to be upstream in vllm-2.0" in run.err
    assert lab.rebase("--skip", "fix").code == 0
    assert [patch.name for patch in read_pin_series(lab.root, lab.lock.pin("vllm-2.0"))] == ["other.patch"]


def test_other_commits_in_the_scratch_repository_are_refused(lab: Lab) -> None:
    """Guards the correspondence of commits and patches."""
    lab.upgrade(UPSTREAM)
    resolve(lab)
    lab.git("-c", "core.editor=true", "rebase", "--continue")
    lab.git("commit", "--quiet", "--allow-empty", "-m", "one more")
    run = lab.rebase("--continue")
    assert run.code == 21
    assert "other commits than the patch on top of those before it" in run.err


def test_skip_leaves_the_patch_to_the_old_pin_alone(lab: Lab) -> None:
    """Guards --skip: the new pin gets a list of its own, the old pin keeps its patch."""
    lab.upgrade(UPSTREAM)
    assert lab.rebase("--skip", "fix.patch").code == 0
    series = (lab.root / "patches/vllm-2.0/series").read_text()
    assert series.splitlines()[1:] == ["other.patch"]
    assert [patch.name for patch in read_pin_series(lab.root, lab.lock.pins[0])] == ["fix.patch", "other.patch"]


def test_abort_half_way_leaves_no_trace(lab: Lab, own_cache: Path) -> None:
    """Guards --abort: the checkout as before, no scratch repository, and a new rebase may begin."""
    before = lab.snapshot()
    lab.upgrade(UPSTREAM)
    resolve(lab)
    assert lab.rebase("--abort").code == 0
    assert lab.snapshot() == before
    assert list(own_cache.iterdir()) == []
    assert lab.rebase("--abort").code == 2
    assert lab.upgrade(UPSTREAM, "--skip", "fix").code == 0


def test_a_dry_run_says_the_same_and_writes_nothing(lab: Lab, own_cache: Path) -> None:
    """Guards --dry-run: the same verdicts and exit code, and no state to continue from."""
    before = lab.snapshot()
    run = lab.upgrade(UPSTREAM, "--dry-run")
    assert (run.code, run.verdicts) == (13, {"fix": "conflict", "other": "moved"})
    through = lab.upgrade(UPSTREAM, "--dry-run", "--skip", "fix")
    assert (through.code, through.document["written"][-1]) == (0, "third_party/msa.lock.toml")
    assert lab.snapshot() == before
    assert list(own_cache.iterdir()) == []
    assert lab.rebase("--continue").code == 2


def test_patches_that_come_out_equal_stay_shared(tmp_path: Path) -> None:
    """Guards one file a patch: a pin gets a folder of its own only for what differs, not for how a diff is written."""
    lab = make_lab(tmp_path)
    path = lab.root / "patches/fix.patch"
    path.write_bytes(path.read_bytes().replace(b"--- a/x.txt", b"index 1234567..89abcde 100644\n--- a/x.txt"))
    assert lab.run("lock").code == 0
    before = lab.snapshot()
    assert lab.upgrade({"x.txt": SOURCE, "y.txt": SOURCE, "z.txt": b"new\n"}).code == 0
    assert not (lab.root / "patches/vllm-2.0").exists()
    assert {path: data for path, data in lab.snapshot().items() if path.startswith("patches/")} == {
        path: data for path, data in before.items() if path.startswith("patches/")
    }


def test_moving_to_a_pin_of_the_lock_replaces_its_patches(lab: Lab) -> None:
    """Guards a second rebase onto the same pin: what is no longer needed in its folder goes."""
    lab.upgrade(UPSTREAM, "--skip", "fix")
    lab.add_patch("third", {"x.txt": (b"five\n", b"5\n")})
    arguments = ["--to", "vllm-2.0", "--skip", "fix", "--skip", "other"]
    refused = lab.rebase(*arguments)
    assert (refused.code, refused.err.splitlines()[0]) == (
        2,
        "error[MSAV2]: pin vllm-2.0 has patches already, which the rebase would replace",
    )
    run = lab.rebase(*arguments, "--replace")
    assert run.code == 0, run.err
    folder = lab.root / "patches/vllm-2.0"
    assert sorted(path.name for path in folder.iterdir()) == ["series"]
    assert [patch.name for patch in read_pin_series(lab.root, lab.lock.pin("vllm-2.0"))] == ["third.patch"]


def test_an_edit_of_the_checkout_meanwhile_is_not_overwritten(lab: Lab) -> None:
    """Guards the maintainer's own work: lock or patches that change during a rebase end it."""
    lab.upgrade(UPSTREAM)
    resolve(lab)
    with (lab.root / "patches/series").open("a") as series:
        series.write("# a comment\n")
    run = lab.rebase("--continue")
    assert run.code == 21
    assert "lock or patches of the checkout have changed since the rebase began" in run.err


def test_two_rebases_at_once_are_refused(lab: Lab) -> None:
    """Guards the state: a second process must not work in the same scratch repository, nor begin beside it."""
    lab.upgrade(UPSTREAM)
    with hold_lock(lab.root / "build/rebase/.lock", timeout_s=0, purpose="testing"):
        for arguments in (["--continue"], ["--abort"], ["--to", "vllm==2.0"]):
            run = lab.rebase(*arguments)
            assert (run.code, run.err.partition("\n")[0]) == (
                15,
                "error[MSAV15]: another process is rebasing the patches",
            )
    run = lab.upgrade(UPSTREAM)
    assert (run.code, run.err.partition("\n")[0]) == (2, "error[MSAV2]: a rebase is in progress")


USAGE = {
    "no-mode": ([], "one of --to, --continue, --skip, --keep, --abort and --check says"),
    "two-modes": (["--to", "vllm==2.0", "--continue"], "one of --to, --continue, --skip, --keep, --abort and --check"),
    "dry-continue": (["--continue", "--dry-run"], "--dry-run goes with --to"),
    "nowhere": (["--to", "HEAD"], "--to names nothing to move to"),
    "same-pin": (["--to", "vllm==1.0"], "--to names the pin that the patches are on"),
    "other-project": (["--to", "torch==2.0"], "no pin is a wheel of that project"),
    "no-git-pin": (["--to", "a" * 40], "no pin is a git repository that could have this commit"),
    "no-such-patch": (["--to", "vllm==2.0", "--skip", "nothing"], "no such patch"),
    "no-such-version": (["--to", "vllm==2.0", "--tested-with", "torch=2"], "unknown distribution in --tested-with"),
    "bad-version": (["--to", "vllm==2.0", "--tested-with", "quack-kernels"], "--tested-with wants NAME=VERSION"),
    "no-wheel-there": (["--to", "vllm==2.0", "--from-source", "."], "--from-source has no wheel of vllm 2.0"),
    "nothing-in-progress": (["--continue"], "no rebase is in progress"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_arguments_are_refused_before_anything_is_done(lab: Lab, own_cache: Path, case: str) -> None:
    """Guards exit code 2 and its message; nothing is fetched, written or left behind."""
    arguments, message = USAGE[case]
    before = lab.snapshot()
    run = lab.rebase(*arguments)
    assert run.code == 2
    assert message in run.err
    assert lab.snapshot() == before
    assert not own_cache.exists() or list(own_cache.iterdir()) == []


def test_the_table_says_the_same_as_the_document(lab: Lab) -> None:
    """Guards the output for people: verdicts, what the wheel asks for, the summary and the written files."""
    wheel = lab.make_wheel("2.0", UPSTREAM)
    run = lab.run("rebase", "--to", "vllm==2.0", "--from-source", str(wheel), "--skip", "fix", "--no-checks")
    assert run.code == 0
    for line in (
        "vllm-1.0 to vllm-2.0",
        "  nvidia-cutlass-dsl 4.8.0: the wheel requires nvidia-cutlass-dsl[cu13]==4.8.0",
        "  quack-kernels 0.6.4: as vllm-1.0; the wheel requires quack-kernels>=0.6",
        "  apache-tvm-ffi 0.1.11: as vllm-1.0; the wheel does not require it",
        "fix.patch    conflict, left out",
        "other.patch  moved",
        "### MSA: vllm-1.0 to vllm-2.0",
        "- `x.txt`",
        "wrote patches/vllm-2.0/other.patch",
    ):
        assert line in run.out.splitlines(), line


def test_a_state_that_cannot_be_read_can_be_aborted(lab: Lab) -> None:
    """Guards a damaged state file: it must say so, and --abort must get rid of it."""
    lab.upgrade(UPSTREAM)
    path = lab.root / "build/rebase/state.json"
    path.write_text(json.dumps({"schema": 0}))
    assert lab.rebase("--continue").code == 21
    assert lab.rebase("--abort").code == 0
    assert not path.exists()
