"""The YARN of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import local_yarn


@pytest.fixture
def yarn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalYarn]:
    """A YARN of this test's own, with an HDFS; of another class by an indirect parameter."""
    kind: type[LocalYarn] = getattr(request, "param", LocalYarn)
    with local_yarn(tmp_path / "run", kind) as running:
        yield running
