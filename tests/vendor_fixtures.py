"""A source of the small pin, and a place to vendor it into."""

from __future__ import annotations

from pathlib import Path

import pytest
from vendor_cases import FILES, write_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The package as a folder, with the wrong modes on purpose: modes come from the manifest."""
    root = write_files(tmp_path / "source", FILES)
    (root / "jit.py").chmod(0o777)
    (root / "run.sh").chmod(0o600)
    return root


@pytest.fixture
def third_party(tmp_path: Path) -> Path:
    folder = tmp_path / "third_party"
    folder.mkdir()
    return folder
