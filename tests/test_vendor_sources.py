"""Sources and manifests that are not the pin's: refused with every difference, and nothing is left."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from vendor_cases import FILES, MANIFEST, PIN, visible, write_files

from msa_vendored.trees import FileEntry, Manifest
from msa_vendored.vendoring.errors import ArchiveError, BadHashError, DriftError, LockError
from msa_vendored.vendoring.vendor import vendor_pin

pytest_plugins = ["vendor_fixtures"]  # fixtures source, third_party


# Sources that are not the pin ----------------------------------------------------------------------------------------


def test_missing_and_extra_files_of_a_source_are_listed(source: Path, third_party: Path) -> None:
    """Guards against a tree of whatever a source holds."""
    (source / "jit.py").unlink()
    write_files(source, {"evil.py": b"", "cut/include/evil.hpp": b"", "cut/examples/unused.cu": b""})
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    assert str(caught.value) == (
        "the source is not pin sample-1: it has not exactly the pin's files\n"
        f"  where:    {source}\n"
        "  expected: the 4 files of third_party/sample.manifest.tsv\n"
        "  got:      3 differences\n"
        "    missing: jit.py\n"
        "    extra: cut/include/evil.hpp\n"
        "    extra: evil.py\n"
        "  next:     pass another --from"
    )
    assert visible(third_party) == []


def test_changed_files_of_a_source_are_listed(source: Path, third_party: Path) -> None:
    """Guards against other bytes under the right names; a conversion to CR LF is named as the cause."""
    (source / "jit.py").write_bytes(b"a\r\nb\r\n")
    (source / "run.sh").write_bytes(b"")
    (source / "csrc/deep/a.cu").write_bytes(b"\xfe")
    with pytest.raises(BadHashError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(source))
    empty, old = FileEntry.from_bytes("x", b"").sha256, MANIFEST.by_path["run.sh"].sha256
    other, deep = FileEntry.from_bytes("x", b"\xfe").sha256, MANIFEST.by_path["csrc/deep/a.cu"].sha256
    assert str(caught.value) == (
        "the source is not pin sample-1: files have other bytes\n"
        f"  where:    {source}\n"
        "  expected: the sha256 of each file in third_party/sample.manifest.tsv\n"
        "  got:      3 differences\n"
        f"    csrc/deep/a.cu: sha256 {other} instead of {deep}\n"
        "    jit.py: its line endings were converted to CRLF\n"
        f"    run.sh: sha256 {empty} instead of {old}\n"
        "  next:     pass another --from, such as a checkout made with git -c core.autocrlf=false clone"
    )
    assert visible(third_party) == []


def test_missing_submodule_of_a_checkout_is_named(tmp_path: Path, third_party: Path) -> None:
    """Guards against a bare list of missing headers where a clone lacks --recurse-submodules."""
    root = tmp_path / "checkout/python/pkg"
    write_files(root, {path: data for path, data in FILES.items() if not path.startswith("cut/")})
    (root / "cut").mkdir()
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(tmp_path / "checkout"))
    error = caught.value
    assert error.what == "the source is not pin sample-1: the submodule cut is not in it"
    assert error.got == "1 difference\n    missing: cut/include/x.hpp"
    assert error.next_command == f"git -C {root} submodule update --init cut"


def test_missing_submodule_of_an_archive_is_named(tmp_path: Path, third_party: Path) -> None:
    """Guards against the archives of git hosts, which hold no submodules."""
    folder = write_files(tmp_path / "msa-1/python/pkg", {p: d for p, d in FILES.items() if not p.startswith("cut/")})
    with tarfile.open(tmp_path / "msa.tar.gz", "w:gz") as target:
        target.add(folder, "msa-1/python/pkg")
    with pytest.raises(DriftError) as caught:
        vendor_pin(PIN, MANIFEST, third_party, source=str(tmp_path / "msa.tar.gz"))
    error = caught.value
    assert error.what == "the source is not pin sample-1: the submodule cut is not in it"
    assert error.next_command == (
        f"git clone --no-checkout https://example.org/msa.git msa && git -C msa checkout {'a' * 40} && "
        "git -C msa submodule update --init python/pkg/cut; then pass --from msa"
    )


def test_hostile_archive_leaves_nothing(tmp_path: Path, third_party: Path, source: Path) -> None:
    """Guards the whole path: an archive with a link beside the right files is refused before anything is written."""
    (source / "evil").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "a.tar", "w") as target:
        target.add(source, "pkg")
    with pytest.raises(ArchiveError):
        vendor_pin(PIN, MANIFEST, third_party, source=str(tmp_path / "a.tar"))
    assert visible(third_party) == []


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["../evil"], "a path in the manifest leaves its folder with '..'"),
        (["/evil"], "a path in the manifest is absolute"),
        (["a", "A"], "two paths in the manifest are one file on some file systems"),
    ],
    ids=["escape", "absolute", "collision"],
)
def test_manifest_that_cannot_be_written_safely_is_refused(third_party: Path, paths: list[str], message: str) -> None:
    """Guards against a manifest that was changed together with its digest, to write outside the tree."""
    manifest = Manifest(tuple(FileEntry.from_bytes(path, b"x") for path in paths))
    with pytest.raises(LockError) as caught:
        vendor_pin(replace(PIN, tree_digest=manifest.digest), manifest, third_party)
    assert caught.value.what == message
    assert list(third_party.iterdir()) == []


def test_manifest_of_another_pin_is_refused(third_party: Path) -> None:
    """Guards against verifying a tree by the wrong list."""
    with pytest.raises(LockError, match="the manifest is not the one that pin sample-1 names by tree_digest"):
        vendor_pin(replace(PIN, tree_digest="sha256:" + "0" * 64), MANIFEST, third_party)
