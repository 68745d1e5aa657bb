"""A repository to fetch from, made once a module."""

from __future__ import annotations

import pytest
from fetch_cases import Upstream


@pytest.fixture(scope="module")
def shared_upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    """Read-only for the tests: it takes 0.2 s to make."""
    return Upstream(tmp_path_factory.mktemp("upstream"))
