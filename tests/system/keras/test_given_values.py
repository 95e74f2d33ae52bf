"""GivenValues alone: which frozen weights were written, and what it costs to find out."""

from __future__ import annotations

from typing import Any, cast

import keras
import pytest

from tfos.errors import UnsupportedModel
from tfos.keras.step import variables
from tfos.keras.step.exchange import held_weights
from tfos.keras.step.exchange.exchange import ParameterExchange
from tfos.keras.step.exchange.given_values import GivenValues
from tfos.keras.step.step_clock import StepClock
from tfos.keras.step.tables import TableTraining

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

NO_SERVERS, NO_TABLES = None, cast(TableTraining, None)


@pytest.fixture
def backbone(request):
    dtype = getattr(request, "param", "float32")
    return keras.layers.Dense(2, trainable=False, dtype=dtype)


@pytest.fixture
def given(backbone):
    model = keras.Sequential([keras.Input((2,)), backbone, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = variables.collect(model, model.optimizer)
    exchange = ParameterExchange(NO_SERVERS, model, found, StepClock())
    return GivenValues(found, exchange, NO_TABLES, since="ctx.distribute(model)")


@pytest.mark.parametrize("backbone", ["float32", "bfloat16"], indirect=True)
def test_frozen_weights_are_compared_only_where_something_was_written(given, backbone, monkeypatch):
    read = []

    def noting(values: Any) -> Any:
        read.append(values)
        return variables.raw_bytes(values)

    monkeypatch.setattr(held_weights, "raw_bytes", noting)
    for _ in range(3):
        given.check()
    assert not read, "the cost of predict does not grow with the weights"
    backbone.set_weights(backbone.get_weights())
    for _ in range(3):
        given.check()
    assert len(read) == 2 * len(backbone.weights), "both values of each, once"


@pytest.mark.parametrize(
    "write",
    [
        lambda value: value.assign(value + 1),
        lambda value: value.assign_add(tf.ones_like(value)),
        lambda value: value[0].assign(value[0] + 1),
        lambda value: tf.function(value.assign_sub, jit_compile=False)(tf.ones_like(value)),
        lambda value: tf.function(value.assign_sub, jit_compile=True)(tf.ones_like(value)),
        lambda value: value.scatter_sub(tf.IndexedSlices(value[:1] + 1, [0])),
    ],
)
def test_frozen_weights_that_were_written_are_refused_until_they_are_back(given, backbone, write):
    before = backbone.get_weights()
    write(backbone.kernel.value)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=f"{backbone.kernel.path!r}, which"):
            given.check()
    backbone.set_weights(before)
    given.check()
    write(backbone.kernel.value)
    with pytest.raises(UnsupportedModel, match="which is not trained, was changed"):
        given.check()
