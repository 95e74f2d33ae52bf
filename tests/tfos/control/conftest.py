"""Fixtures of the tfos room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.control import ControlBed


@pytest.fixture
def control() -> Iterator[ControlBed]:
    bed = ControlBed()
    yield bed
    bed.close()
