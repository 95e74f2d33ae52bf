"""Fixtures of tests that run several of our processes together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node_bed import NodeBed


@pytest.fixture
def bed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeBed]:
    tmp_path_factory.getbasetemp()  # made on first use, which must not be in the bed's directory
    node_bed = NodeBed(monkeypatch)
    yield node_bed
    node_bed.close()
