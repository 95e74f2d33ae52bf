"""Fixtures of tests that run several of our processes together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.fault.node_places import DriverLine, FakeExecutor
from tests.node_bed import NodeBed
from tfos.node.bundle import NodeBundle


@pytest.fixture
def bed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeBed]:
    tmp_path_factory.getbasetemp()  # made on first use, which must not be in the bed's directory
    node_bed = NodeBed(monkeypatch)
    yield node_bed
    node_bed.close()


@pytest.fixture
def executors(bed: NodeBed) -> Iterator[Callable[..., FakeExecutor]]:
    """Make stand-ins for executors that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(bundle: NodeBundle, *, hold_slot: bool = True) -> FakeExecutor:
            executor = FakeExecutor(bed, bundle, hold_slot=hold_slot)
            stack.callback(executor.close)
            return executor

        yield make


@pytest.fixture
def line(bed: NodeBed) -> Iterator[DriverLine]:
    driver_line = DriverLine(bed.control.port)
    yield driver_line
    driver_line.close()
