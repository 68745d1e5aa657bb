"""The record of what is installed, and the check of the installed files against it."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored import installed
from msa_vendored.errors import UnavailableError
from msa_vendored.installed import (
    InstalledDriftError,
    ProvenanceError,
    find_touched_drift,
    parse_provenance,
    read_provenance,
    verify_installed,
    verify_touched,
)

if TYPE_CHECKING:
    from conftest import FakeSite

DOCUMENT: dict[str, Any] = {
    "schema": 1,
    "version": "0.1.0",
    "package": "msa_vendored._msa_0123456789ab",
    "manifest": "_msa_0123456789ab.manifest.tsv",
    "pin": {"id": "p", "kind": "git", "source": {"url": "u"}, "tree_digest": "sha256:" + "1" * 64},
    "tested_with": {"quack-kernels": "0.6.4"},
    "patches": [{"file": "f", "kind": "build", "sha256": "2" * 64, "subject": "s", "drop_when": "d", "paths": ["a"]}],
    "rewrite": {"tool": "libcst", "version": "1", "files": 1, "statements": 2},
    "built_tree_digest": "sha256:" + "3" * 64,
    "touched": [{"path": "a.py", "sha256": "4" * 64}],
}

REQUIRED_KEYS = [
    *((key,) for key in DOCUMENT if key != "rewrite"),
    *(("pin", key) for key in DOCUMENT["pin"]),
    ("patches", 0, "file"),
    ("patches", 0, "kind"),
    ("patches", 0, "sha256"),
    ("patches", 0, "subject"),
    ("patches", 0, "drop_when"),
    ("touched", 0, "path"),
    ("touched", 0, "sha256"),
]


def key_path(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def test_provenance_gives_what_the_build_wrote() -> None:
    """Guards the mapping from JSON to fields, and that the proof of a wheel can compare the whole record."""
    record = parse_provenance(json.dumps(DOCUMENT), "x")
    assert record.package == "msa_vendored._msa_0123456789ab"
    assert record.folder == "_msa_0123456789ab"
    assert record.tree12 == "333333333333"
    assert record.pin.id == "p"
    assert dict(record.tested_with) == {"quack-kernels": "0.6.4"}
    assert [(patch.file, patch.kind) for patch in record.patches] == [("f", "build")]
    assert dict(record.touched) == {"a.py": "4" * 64}
    assert record.to_dict() == DOCUMENT


def test_to_dict_is_a_copy() -> None:
    """Guards the record against a caller that changes what it was given."""
    record = parse_provenance(json.dumps(DOCUMENT), "x")
    record.to_dict()["pin"]["id"] = "other"
    assert record.to_dict() == DOCUMENT


@pytest.mark.parametrize("path", REQUIRED_KEYS, ids=key_path)
@pytest.mark.parametrize("value", [None, 7], ids=["missing", "number"])
def test_provenance_refuses_a_bad_key_by_its_path(path: tuple[str | int, ...], value: int | None) -> None:
    """Guards against a half-written or foreign record that fails later, with a KeyError, somewhere else."""
    document = copy.deepcopy(DOCUMENT)
    table: Any = document
    for part in path[:-1]:
        table = table[part]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    with pytest.raises(ProvenanceError) as caught:
        parse_provenance(json.dumps(document), "file.json")
    assert caught.value.where == f"file.json: {key_path(path)}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("schema", 2, "1"),
        ("package", "msa_vendored._msa_0123456789ab.sparse", r"msa_vendored\.(_msa_[0-9a-f]{12})"),
        ("package", "os", r"msa_vendored\.(_msa_[0-9a-f]{12})"),
        ("built_tree_digest", "3" * 64, "sha256:[0-9a-f]{64}"),
        ("manifest", "../x.tsv", r"_msa_[0-9a-f]{12}\.manifest\.tsv"),
    ],
)
def test_provenance_refuses_values_of_another_form(key: str, value: object, expected: str) -> None:
    """Guards against importing, or reading, whatever a damaged record names."""
    with pytest.raises(ProvenanceError) as caught:
        parse_provenance(json.dumps({**DOCUMENT, key: value}), "file.json")
    assert (caught.value.where, caught.value.expected) == (f"file.json: {key}", expected)


@pytest.mark.parametrize(
    ("text", "expected"), [("", "JSON"), ("{", "JSON"), ("[]", "an object"), ("7", "an object"), ("null", "an object")]
)
def test_provenance_refuses_what_is_no_json_object(text: str, expected: str) -> None:
    """Guards against an empty or cut file, which an interrupted copy leaves."""
    with pytest.raises(ProvenanceError) as caught:
        parse_provenance(text, "file.json")
    assert (caught.value.where, caught.value.expected) == ("file.json", expected)


@given(st.text())
def test_parsing_any_text_gives_a_record_or_a_provenance_error(text: str) -> None:
    """Guards against other exceptions from damaged files."""
    with pytest.raises(ProvenanceError):
        parse_provenance(text, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(value=JSON, key=st.sampled_from(sorted(DOCUMENT)))
def test_any_json_in_any_place_gives_a_record_or_a_provenance_error(value: object, key: str) -> None:
    """Guards against AttributeError and TypeError from JSON of another shape."""
    places = []
    try:
        parse_provenance(json.dumps({**DOCUMENT, key: value}), "x")
    except ProvenanceError as error:
        places.append(str(error.where))
    assert all(place.startswith(f"x: {key}") for place in places)


def test_a_checkout_says_that_nothing_is_built(tmp_path: Path) -> None:
    """Guards the first message that a new developer sees."""
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(UnavailableError) as caught:
        read_provenance(tmp_path / "msa_vendored")
    assert str(caught.value) == (
        "the patched MSA is not built here\n"
        f"  where:    {tmp_path / 'msa_vendored'}\n"
        "  expected: _provenance.json and the package that it names, which only an installed wheel has\n"
        "  got:      a source checkout\n"
        "  next:     nox -s build && pip install '.[sm100]'"
    )


def test_provenance_is_read_once_and_a_failure_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the hot path of the AOT cache, which asks for the tree at each compilation, and a repair in a notebook."""
    monkeypatch.setattr(installed, "PACKAGE_DIR", tmp_path)
    installed.provenance.cache_clear()
    try:
        with pytest.raises(UnavailableError):
            installed.provenance()
        (tmp_path / "_provenance.json").write_text(json.dumps(DOCUMENT))
        first = installed.provenance()
        (tmp_path / "_provenance.json").unlink()
        assert installed.provenance() is first
    finally:
        installed.provenance.cache_clear()


def change_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"#")


def make_executable(path: Path) -> None:
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("file", "action", "lines"),
    [
        ("sparse.py", change_bytes, ["changed: sparse.py"]),
        ("csrc/plan.cu", Path.unlink, ["missing: csrc/plan.cu"]),
        ("csrc/new.h", Path.touch, ["extra: csrc/new.h"]),
        ("csrc/plan.cu", make_executable, ["mode: csrc/plan.cu"]),
        ("__pycache__/sparse.cpython-311.pyc", Path.touch, []),
    ],
    ids=["changed", "missing", "extra", "mode", "byte code"],
)
def test_verify_installed_sees_every_kind_of_drift(
    fake_site: FakeSite, file: str, action: Any, lines: list[str]
) -> None:
    """Guards the check of an installed wheel: each kind of difference, and none from the byte code Python writes."""
    target = fake_site.private / file
    target.parent.mkdir(exist_ok=True)
    action(target)
    assert verify_installed(fake_site.package_dir).to_lines() == lines


def test_verify_installed_lists_all_drift_at_once(fake_site: FakeSite) -> None:
    """Guards against reports that stop at the first difference."""
    change_bytes(fake_site.private / "api.py")
    (fake_site.private / "csrc/plan.cu").unlink()
    (fake_site.private / "z.py").touch()
    lines = verify_installed(fake_site.package_dir).to_lines()
    assert lines == ["missing: csrc/plan.cu", "extra: z.py", "changed: api.py"]


@pytest.mark.parametrize("damage", ["edited", "missing", "unreadable"])
def test_verify_installed_refuses_a_manifest_that_provenance_does_not_name(fake_site: FakeSite, damage: str) -> None:
    """Guards against a file and its manifest line being changed together."""
    path = fake_site.package_dir / f"{fake_site.private.name}.manifest.tsv"
    if damage == "edited":
        path.write_text(path.read_text().replace("plan.cu", "plan.cc"))
    elif damage == "missing":
        path.unlink()
    else:
        path.write_text("no tabs\n")
    with pytest.raises(InstalledDriftError) as caught:
        verify_installed(fake_site.package_dir)
    assert caught.value.where == str(path)
    assert caught.value.exit_code == 10


def test_verify_touched_names_every_file_that_is_not_as_built(fake_site: FakeSite) -> None:
    """Guards the first binding: an unpatched file under the patched package's name must not run."""
    record = read_provenance(fake_site.package_dir)
    verify_touched(record, fake_site.package_dir)
    change_bytes(fake_site.private / "api.py")
    (fake_site.private / "sparse.py").unlink()
    with pytest.raises(UnavailableError) as caught:
        verify_touched(record, fake_site.package_dir)
    assert caught.value.got == "changed or missing: api.py, sparse.py"
    assert caught.value.where == str(fake_site.private)


@given(data=st.data())
def test_any_changed_byte_of_a_touched_file_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Guards the digest comparison itself, against comparing sizes or prefixes only."""
    folder = tmp_path_factory.mktemp("tree")
    try:
        content = data.draw(st.binary(min_size=1, max_size=64))
        document = copy.deepcopy(DOCUMENT)
        digest = hashlib.sha256(content).hexdigest()
        document["touched"] = [{"path": "a.py", "sha256": digest}]
        record = parse_provenance(json.dumps(document), "x")
        (folder / record.folder).mkdir()
        target = folder / record.folder / "a.py"
        target.write_bytes(content)
        assert find_touched_drift(record, folder) == ()
        changed = bytearray(content)
        changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        target.write_bytes(changed)
        assert find_touched_drift(record, folder) == ("a.py",)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "msa_vendored"),
        ("file:///wheels/my%20wheel.whl", "/wheels/my wheel.whl"),
        ("https://example.org/m.whl", "https://example.org/m.whl"),
    ],
)
def test_reinstall_command_names_where_pip_took_the_wheel_from(
    fake_site: FakeSite, origin: str | None, source: str
) -> None:
    """Guards the advice after drift: the wheel need not be on a package index."""
    info = fake_site.root / "msa_vendored-0.1.0.dist-info"
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": origin, "archive_info": {}}))
    code = "import json; from msa_vendored.installed import reinstall_command as c; print(json.dumps(c()))"
    assert fake_site.evaluate(code) == f"pip install --force-reinstall --no-deps '{source}'"
