"""Spark without a JVM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_spark import FakeSpark


@pytest.fixture
def spark() -> Iterator[FakeSpark]:
    made = FakeSpark()
    yield made
    made.close()
