"""Fixtures of tests that run several of our processes together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node_bed import NodeBed


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeBed]:
    node_bed = NodeBed(monkeypatch)
    yield node_bed
    node_bed.close()
