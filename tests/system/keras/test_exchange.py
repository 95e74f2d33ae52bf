"""The exchange alone: what reaches the servers with which push, and what the variables are then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from ps.manifest.manifest import Hyper
from tfos.keras.step import variables
from tfos.keras.step.exchange import replica
from tfos.keras.step.exchange.exchange import ParameterExchange
from tfos.keras.step.exchange.outgoing_push import OutgoingPush, hyper_of
from tfos.keras.step.exchange.pipeline import GRACE_S, PipelinedPush
from tfos.keras.step.step_clock import StepClock

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf


class Servers:
    """The n-th answer is n in every element."""

    timeout_s = 0.1
    longest_push_s = 20.0

    def __init__(self) -> None:
        self.pushed: list[dict[str, Any]] = []
        self.assigned: list[Any] = []
        self.clock = 0

    def push_pull(self, grads: Any, into: Any, **options: Any) -> Any:
        self.pushed.append(options)
        return self._answer(into)

    def push_null(self, *, into: Any) -> Any:
        return self._answer(into)

    def pull(self, into: Any, *, timeout_s: float | None = None) -> Any:
        return self._filled(into)

    def assign(self, values: Any) -> None:
        self.assigned.append(values)

    def _answer(self, into: Any) -> Any:
        self.clock += 1
        return self._filled(into)

    def _filled(self, into: Any) -> Any:
        for values in into.values():
            values[:] = self.clock
        return SimpleNamespace(clock=self.clock)


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def servers():
    return Servers()


@pytest.fixture
def exchange(model, servers):
    found = variables.collect(model, model.optimizer)
    exchange = ParameterExchange(servers, model, found, StepClock())
    yield exchange
    exchange.forget()


def outgoing(rows=8):
    return OutgoingPush(
        grads={"trainable": np.zeros(3, np.float32)},
        hyper=Hyper(learning_rate=0.1),
        rows=rows,
        metadata=None,
        table_grads={},
        ahead=None,
    )


def values_of(model):
    return {float(value) for weight in model.get_weights() for value in weight.ravel()}


def test_without_a_pipeline_the_variables_are_the_answer_of_each_push(model, exchange):
    for number in (1, 2):
        exchange.push(outgoing(), most_in_flight=0)
        assert values_of(model) == {number}
        assert (exchange.steps, exchange.rows, exchange.clock) == (number, 8 * number, number)
        assert int(model.optimizer.iterations) == number


def test_with_a_pipeline_the_variables_are_the_answer_of_so_many_pushes_before(
    model, exchange, servers
):
    for number in range(4):
        exchange.push(outgoing(), most_in_flight=2)
        assert int(model.optimizer.iterations) == number + 1, "pushes in flight are counted"
    assert exchange.num_in_flight == 2
    assert values_of(model) == {2}
    exchange.drain()
    assert (exchange.num_in_flight, exchange.steps, exchange.clock) == (0, 4, 4)
    assert [push["lag"] for push in servers.pushed] == [0, 1, 2, 2]
    assert values_of(model) == {2}, "a callback may have changed the variables"
    exchange.pull()
    assert values_of(model) == {4}


def test_rows_of_accumulated_batches_go_with_the_next_push_and_are_counted_once(exchange, servers):
    exchange.accumulate(5)
    exchange.accumulate(5)
    assert (exchange.rows, exchange.steps) == (10, 0)
    exchange.push(outgoing(rows=3), most_in_flight=0)
    exchange.push(outgoing(rows=3), most_in_flight=0)
    assert [push["rows"] for push in servers.pushed] == [13, 3]
    assert exchange.rows == 16


def test_a_step_without_a_gradient_takes_the_others_values_and_is_no_step(model, exchange):
    exchange.push_nothing()
    assert values_of(model) == {1}
    assert (exchange.steps, exchange.rows, exchange.clock) == (0, 0, 1)


def test_values_are_assigned_after_all_pushes(model, exchange, servers):
    exchange.push(outgoing(), most_in_flight=2)
    model.set_weights([weight * 0 + 9 for weight in model.get_weights()])
    exchange.assign()
    assert exchange.num_in_flight == 0
    (assigned,) = servers.assigned
    assert set(assigned["trainable"]) == {9}


def test_batches_are_under_way_until_a_push_with_them_is_acknowledged(exchange):
    exchange.skip()
    assert exchange.batches_under_way == 0, "no batch before it is without an answer"
    exchange.push(outgoing(), most_in_flight=3)
    exchange.push(outgoing(), most_in_flight=3)
    exchange.accumulate(5)
    exchange.skip()
    assert exchange.batches_under_way == 4
    exchange.push(outgoing(), most_in_flight=3)
    assert exchange.batches_under_way == 5
    exchange.adopt_oldest()
    assert exchange.batches_under_way == 4
    exchange.drain()
    assert exchange.batches_under_way == 0


def test_the_memory_of_an_answer_is_filled_again(exchange, monkeypatch):
    made: list[replica.Received] = []
    real = replica.Received

    def received(groups: Any) -> replica.Received:
        made.append(real(groups))
        return made[-1]

    monkeypatch.setattr(replica, "Received", received)
    takes = [
        exchange.pull,
        exchange.push_nothing,
        lambda: exchange.push(outgoing(), most_in_flight=0),
    ]
    for take in takes:
        made.clear()
        for _ in range(6):
            take()
        assert len(made) <= 2, take
    for _ in range(9):
        exchange.push(outgoing(), most_in_flight=2)
    assert len(made) <= 2 + 2


def test_a_pull_is_timed(exchange):
    exchange.pull()
    assert exchange._times.spent()["pull_s"] > 0


def test_scalars_travel_in_sync_alone(model):
    found = variables.collect(model, model.optimizer)
    output: Any = SimpleNamespace(scalars=tf.constant([0.5, 0.25], tf.float64))
    assert hyper_of(found, output, is_sync=False) == Hyper(learning_rate=0.5)
    own = hyper_of(found, output, is_sync=True)
    assert own == Hyper(learning_rate=0.5, scalars={"trainable": (0.25,)})


@pytest.mark.fault("F08")
def test_a_push_in_flight_is_waited_for_as_long_as_its_own_exchange_may_take(
    exchange, servers, monkeypatch
):
    waits = []
    wait = PipelinedPush.wait

    def noted(push, timeout_s):
        waits.append(timeout_s)
        return wait(push, timeout_s)

    monkeypatch.setattr(PipelinedPush, "wait", noted)
    exchange.push(outgoing(), most_in_flight=1)
    exchange.drain()
    assert waits == [servers.longest_push_s + GRACE_S]
