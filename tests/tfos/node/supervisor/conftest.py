"""Fixtures of tests that run several of our processes together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.support.node_places import DriverLine, FakeExecutor
from tests.support.nodes import NodeBed
from tests.support.nodes import bed as bed
from tfos.node.spec import NodeBundle


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
