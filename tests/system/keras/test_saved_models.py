"""SavedModels with Keras 2's names."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfos.errors import UnsupportedError
from tfos.predict.loading import read_signature
from tfos.predict.signature import ModelSource, TensorInfo
from tfos.tensorflowonspark import compat

pytestmark = pytest.mark.tf


@pytest.fixture
def linear(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    model.layers[0].set_weights([np.array([[1.0], [10.0]]), np.array([0.5])])
    compat.export_saved_model(model, str(tmp_path / "m"), is_chief=True)
    return read_signature(ModelSource(path=str(tmp_path / "m")))


@pytest.mark.long
def test_a_sequential_model_has_the_names_of_its_layers(linear):
    assert linear.inputs == {"dense_input": TensorInfo("float32", (2,))}
    assert linear.outputs == {"dense": TensorInfo("float32", (1,))}


def test_named_inputs_and_several_outputs_keep_their_names(tmp_path):
    a, b = keras.Input((3,), name="a"), keras.Input((2, 2), name="b")
    outputs = [keras.layers.Dense(1, name="p")(a), keras.layers.Flatten(name="q")(b)]
    compat.export_saved_model(keras.Model([a, b], outputs), str(tmp_path / "m"), True)
    found = read_signature(ModelSource(path=str(tmp_path / "m")))
    assert (sorted(found.inputs), sorted(found.outputs)) == (["a", "b"], ["p", "q"])
    by_name = keras.Model({"a": a, "b": b}, {"one": outputs[0], "two": outputs[1]})
    compat.export_saved_model(by_name, str(tmp_path / "n"), True)
    named = read_signature(ModelSource(path=str(tmp_path / "n")))
    assert (sorted(named.inputs), sorted(named.outputs)) == (["a", "b"], ["one", "two"])


def test_a_model_without_fixed_inputs_is_refused(tmp_path):
    class Free(keras.Model):  # type: ignore[misc]  # Keras is not checked
        def call(self, x):
            return x

    with pytest.raises(UnsupportedError, match="Free has no fixed inputs"):
        compat.export_saved_model(Free(), str(tmp_path / "f"), True)


def test_a_worker_that_is_not_the_chief_leaves_nothing(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    compat.export_saved_model(model, str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())


def test_sharding_of_a_dataset_is_turned_off():
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF
