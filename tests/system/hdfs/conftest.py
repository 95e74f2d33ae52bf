"""Fixtures of tests that need a real HDFS and whole nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.local_hdfs.cluster import LocalHdfs
from scripts.local_hdfs.errors import MissingTool
from tests.support.nodes import bed as bed


@pytest.fixture(scope="session")
def secure_hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHdfs]:
    """A real HDFS with two DataNodes and a KDC, one for all tests; who breaks it mends it."""
    directory = tmp_path_factory.mktemp("secure-hdfs") / "run"
    try:
        running = LocalHdfs.started(directory, with_parent=True, kerberos=True)
    except MissingTool as missing:
        pytest.skip(str(missing))
    with running:
        yield running
