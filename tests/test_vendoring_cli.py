"""The command line of the build-time tools: exit codes, tags, and all drift at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from msa_vendored.vendoring.__main__ import main
from msa_vendored.vendoring.checks import verify_checkout
from msa_vendored.vendoring.pipeline import read_checkout

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout's lock, manifests and patches, with no tree fetched."""
    root = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("msa")
    shutil.copytree(ROOT / "third_party", root / "third_party", ignore=ignored)
    shutil.copytree(ROOT / "patches", root / "patches")
    return root


def test_a_folder_that_is_no_checkout_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the exit code and the tag, which is all that nox lets through."""
    assert main(["--root", str(tmp_path), "verify"]) == 10
    assert "not a checkout of msa_vendored" in capsys.readouterr().err
    assert main(["--root", str(tmp_path), "vendor"]) == 2
    assert capsys.readouterr().err == (
        "error[MSAV2]: not a checkout of msa_vendored\n"
        f"  where:    {tmp_path}\n"
        "  expected: a folder with third_party/msa.lock.toml\n"
    )


def test_an_unknown_pin_names_the_known_ones(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the message for a mistyped id."""
    assert main(["--root", str(checkout), "vendor", "--pin", "vllm-9"]) == 18
    error = capsys.readouterr().err
    assert error.startswith("error[MSAV18]: no such pin\n")
    assert "vllm-0.24.0, minimax-e2ebe765" in error


def test_offline_without_a_tree_says_how_to_go_on(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards --offline: it must not touch the network, and must name the alternative."""
    assert main(["--root", str(checkout), "build", "--offline"]) == 16
    assert "--from" in capsys.readouterr().err
    assert not (checkout / "build").exists()


def test_verify_reports_absent_trees_without_calling_them_drift(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a fresh clone: nothing fetched yet is not an error."""
    assert main(["--root", str(checkout), "verify"]) == 0
    assert "pristine tree third_party/msa/vllm-0.24.0: absent (nox -s vendor fetches it)" in capsys.readouterr().out


def test_verify_reports_all_drift_at_once(checkout: Path) -> None:
    """Guards against fixing one difference a run: every kind of drift shows in one report."""
    (checkout / "patches/fmax.patch").write_bytes(
        (checkout / "patches/fmax.patch").read_bytes().replace(b"MSA", b"Msa")
    )
    pristine = checkout / "third_party/msa/vllm-0.24.0"
    for entry in read_checkout(checkout).manifest:
        (pristine / entry.path).parent.mkdir(parents=True, exist_ok=True)
        (pristine / entry.path).write_bytes(b"")
    (pristine / "jit.py").unlink()
    (pristine / "added.py").write_bytes(b"")
    broken = checkout / "build/trees/0123"
    broken.mkdir(parents=True)
    _, findings = verify_checkout(checkout)
    subjects = {finding.subject for finding in findings}
    problems = {finding.problem for finding in findings}
    assert subjects == {"patches/fmax.patch", "pristine tree vllm-0.24.0", "built tree build/trees/0123"}
    assert {"missing: jit.py", "extra: added.py", "changed: api.py"} <= problems


@pytest.mark.parametrize("harm", ["unlisted", "not-locked", "not-in-series"])
def test_series_and_lock_must_name_the_same_patches(checkout: Path, harm: str) -> None:
    """Guards both directions: a patch that is not applied, and one that nobody reviewed into the lock."""
    series = checkout / "patches/series"
    if harm == "unlisted":
        shutil.copy(checkout / "patches/fmax.patch", checkout / "patches/more.patch")
    elif harm == "not-locked":
        shutil.copy(checkout / "patches/fmax.patch", checkout / "patches/more.patch")
        series.write_text(series.read_text() + "more.patch\n")
    else:
        series.write_text(series.read_text().replace("fmax.patch\n", ""))
        (checkout / "patches/fmax.patch").unlink()
    _, findings = verify_checkout(checkout)
    text = "\n".join(f"{f.subject}: {f.problem}" for f in findings)
    expected = {
        "unlisted": "more.patch is not listed",
        "not-locked": "patches/more.patch: in the series but not in the lock",
        "not-in-series": "patches/fmax.patch: in the lock but not in the series",
    }
    assert expected[harm] in text


def test_a_pins_own_patch_replaces_the_common_one(checkout: Path) -> None:
    """Guards the folder of a pin: it must decide for that pin alone, and for no name that the series lacks."""
    own = {p.name: p.sha256 for p in read_checkout(checkout, "minimax-e2ebe765").patches}
    common = {p.name: p.sha256 for p in read_checkout(checkout, "vllm-0.24.0").patches}
    assert list(own) == list(common)
    different = {name for name in own if own[name] != common[name]}
    assert different == {"private-registration.patch"}
    folder = checkout / "patches/minimax-e2ebe765"
    shutil.copy(checkout / "patches/fmax.patch", folder / "other.patch")
    _, findings = verify_checkout(checkout, "minimax-e2ebe765")
    assert "a pin replaces a patch that the series does not have" in findings[0].problem
