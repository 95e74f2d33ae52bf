"""Workers that attach wait for all that the chief may wait for before it seeds."""

from __future__ import annotations

import pytest

from ps.client.compile_wait import LOOK_S
from ps.client.retry import READY_TIMEOUT_S
from tfos.keras.step import attach

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

CHIEF_READY_S = 600.0
"""For the chief's imports, data and first batch, which come before it asks for the kernels."""


def test_a_worker_waits_longer_than_the_chief_for_the_compiler():
    assert attach.ATTACH_TIMEOUT_S >= CHIEF_READY_S + READY_TIMEOUT_S > READY_TIMEOUT_S + LOOK_S
