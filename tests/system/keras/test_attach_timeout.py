"""Workers that attach wait for all that the chief may wait for before it seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from ps.client import retry, server_group
from ps.client.channel import OutgoingCall
from ps.client.client import DEFAULT_TIMEOUT_S
from ps.client.compile_wait import LOOK_S
from ps.client.retry import READY_TIMEOUT_S, ExchangeTimes
from ps.protocol import messages
from rpc.client.connection import Reply
from tests.support.keras_training import serving
from tfos.keras.fit.distribute import distribute
from tfos.keras.step import attach
from tfos.keras.step.trainer import BARRIER_TIMEOUT_S

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

CHIEF_READY_S = 600.0
"""For the chief's imports, data and first batch, which come before it asks for the kernels."""


def test_a_worker_waits_longer_than_the_chief_for_the_compiler():
    assert attach.ATTACH_TIMEOUT_S >= CHIEF_READY_S + READY_TIMEOUT_S > READY_TIMEOUT_S + LOOK_S


@pytest.mark.parametrize(("mode", "longer_s"), [("async", 0.0), ("sync", 0.0), ("async", 3000.0)])
def test_the_first_values_have_as_long_as_the_chief_to_come_in_every_mode(
    monkeypatch, mode: Any, longer_s: float
):
    """All workers pull at once, from servers that have to send each of them the whole model.

    The chief may have restored them before, for as long as a restore may take.
    """
    limit_s = attach.ATTACH_TIMEOUT_S + longer_s
    waits = waits_of_a_fit(monkeypatch, mode, longer_s)
    assert waits[messages.Seed] == [limit_s]
    assert waits[messages.Pull][:2] == [limit_s] * 2, "values, and their averages"
    assert set(waits[messages.Push]) < {DEFAULT_TIMEOUT_S, BARRIER_TIMEOUT_S}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_has_as_long_as_the_values_of_all_workers_take_at_a_slow_server(monkeypatch, mode):
    """As 1 GB of 8 workers, which take 70 s at 1 Gb/s and had 60 in async."""
    monkeypatch.setattr(attach, "SLOW_BYTES_PER_S", 2**-6)  # three numbers, one worker
    assert set(waits_of_a_fit(monkeypatch, mode)[messages.Push]) == {12 * 64.0}


def waits_of_a_fit(
    monkeypatch: pytest.MonkeyPatch, mode: Any, longer_s: float = 0.0
) -> dict[type, list[float]]:
    """Train a model of three numbers; return how long each request had, by its type."""
    asked: list[tuple[type, float]] = []
    exchange = retry.exchange

    def noted(calls: Sequence[OutgoingCall], times: ExchangeTimes) -> list[Reply]:
        asked.append((type(calls[0].request), times.timeout_s))
        return exchange(calls, times)

    monkeypatch.setattr(server_group, "exchange", noted)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse", jit_compile=False)
    with serving() as cluster:
        cluster.contexts[0].client._servers.times.restore_s += longer_s
        distribute(model, cluster.contexts[0], consistency=mode)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
    return {kind: [s for each, s in asked if each is kind] for kind, _ in asked}
