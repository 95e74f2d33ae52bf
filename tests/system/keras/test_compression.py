"""compression=...: models that train with packed gradients, in every mode, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.support.keras_training import blobs, serving
from tfos.errors import SettingsError, UnsupportedModel
from tfos.keras import Embedding
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

X, Y = blobs(256)


def make_model(dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((20,)),
            layers.Dense(16, "relu", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dense(2, dtype=dtype),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss, jit_compile=False)
    return model


def trained(ctx: Any, **options: Any) -> Any:
    model = make_model()
    distribute(model, ctx, **options)
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("compression", "near"), [pytest.param("fp16", 2e-4, marks=pytest.mark.long), ("int8", 1e-2)]
)
def test_a_model_learns_nearly_the_same_from_packed_gradients(compression, near):
    plain = make_model()
    plain.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    with serving(num_servers=2) as servers:
        model = trained(servers.contexts[0], compression=compression)
        kinds = {group.name: group.compression for group in servers.manifest.groups}
        assert kinds == {"trainable": compression, "statistics": "none"}
        largest = 0.0
        for ours, theirs in zip(model.weights, plain.weights, strict=True):
            largest = max(largest, float(np.abs(ours.numpy() - theirs.numpy()).max()))
    assert 0 < largest < near, "close, and not what plain gradients give"


def test_packed_gradients_go_with_a_pipeline():
    """With every mode of consistency: tests/ps/compression/test_compressed_push.py."""
    with serving() as servers:
        model = trained(servers.contexts[0], compression="int8", pipeline=2)
        assert servers.pushes == 16
        first, last = model.history.history["loss"]
        assert last < 0.8 * first


def test_what_cannot_be_packed_or_agreed_on_is_refused():
    with serving(num_workers=2) as servers:
        first, second = servers.contexts
        with pytest.raises(SettingsError, match=r"compression must be one of .*'int8'.* got 'zip'"):
            distribute(make_model(), first, compression="zip")
        with pytest.raises(UnsupportedModel, match="all trainable variables are float64"):
            distribute(make_model("float64"), first, compression="int8")
        tables_alone = keras.Sequential([keras.Input((), dtype="int64"), Embedding(1, table="t")])
        tables_alone.compile("sgd", "mse")
        with pytest.raises(UnsupportedModel, match="trains only tables"):
            distribute(tables_alone, first, compression="int8")
        distribute(make_model(), first, compression="int8")
        sentence = "compression='none', the parameter servers take 'int8'"
        with pytest.raises(UnsupportedModel, match=sentence):
            distribute(make_model(), second)
