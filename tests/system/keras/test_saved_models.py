"""SavedModels with Keras 2's names, and the outputs of their signatures as Arrow columns."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from tfos.errors import RowError, SettingsError, UnsupportedError
from tfos.tensorflowonspark import compat
from tfos.tensorflowonspark.saved_model import PredictTask, TensorInfo, read_signature

pytestmark = pytest.mark.tf


def predicted(signature, inputs, outputs, batch_size, *batches):
    task = PredictTask(signature=signature, inputs=inputs, outputs=outputs, batch_size=batch_size)
    return pa.Table.from_batches(list(task(iter(batches))))


@pytest.fixture
def linear(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    model.layers[0].set_weights([np.array([[1.0], [10.0]]), np.array([0.5])])
    compat.export_saved_model(model, str(tmp_path / "m"), is_chief=True)
    return read_signature(str(tmp_path / "m"))


def rows_of(count, start=0):
    lists = [[float(n), 1.0] for n in range(start, start + count)]
    return pa.RecordBatch.from_arrays([pa.array(lists, pa.list_(pa.float64()))], ["x"])


def test_a_sequential_model_has_the_names_of_its_layers(linear):
    assert linear.inputs == {"dense_input": TensorInfo("float32", (2,))}
    assert linear.outputs == {"dense": TensorInfo("float32", (1,))}


def test_named_inputs_and_several_outputs_keep_their_names(tmp_path):
    a, b = keras.Input((3,), name="a"), keras.Input((2, 2), name="b")
    outputs = [keras.layers.Dense(1, name="p")(a), keras.layers.Flatten(name="q")(b)]
    compat.export_saved_model(keras.Model([a, b], outputs), str(tmp_path / "m"), True)
    found = read_signature(str(tmp_path / "m"))
    assert (sorted(found.inputs), sorted(found.outputs)) == (["a", "b"], ["p", "q"])
    by_name = keras.Model({"a": a, "b": b}, {"one": outputs[0], "two": outputs[1]})
    compat.export_saved_model(by_name, str(tmp_path / "n"), True)
    named = read_signature(str(tmp_path / "n"))
    assert (sorted(named.inputs), sorted(named.outputs)) == (["a", "b"], ["one", "two"])
    batch = pa.RecordBatch.from_pydict({"u": [[1.0, 2.0, 3.0]], "v": [[[1.0, 2.0], [3.0, 4.0]]]})
    for signature, output in ((found, "q"), (named, "two")):
        table = predicted(signature, ("a", "b"), ((output, "o"),), 4, batch)
        assert table.to_pydict() == {"o": [[1.0, 2.0, 3.0, 4.0]]}


@pytest.mark.parametrize("value", [1.5, float("nan"), 1e300, 2**40])
def test_no_value_is_rounded_to_an_integer_in_silence(tmp_path, value):
    ids = keras.Input((), dtype="int32", name="ids")
    model = keras.Model(ids, keras.layers.Rescaling(1.0)(ids))
    compat.export_saved_model(model, str(tmp_path / "m"), True)
    signature = read_signature(str(tmp_path / "m"))
    (output,) = signature.outputs
    for given, expected in ((7.0, [7.0]), (value, None)):
        batch = pa.RecordBatch.from_pydict({"ids": [given]})
        if expected is None:
            with pytest.raises(RowError, match=r"value .* does not fit int32\[\]; cast"):
                predicted(signature, ("ids",), ((output, "y"),), 4, batch)
        else:
            table = predicted(signature, ("ids",), ((output, "y"),), 4, batch)
            assert table.to_pydict() == {"y": expected}


def test_batches_cross_record_batches_and_rows_keep_their_order(linear):
    batches = (rows_of(3), rows_of(0), rows_of(5, 3), rows_of(1, 8))
    for batch_size in (1, 4, 100):
        table = predicted(linear, ("dense_input",), (("dense", "y"),), batch_size, *batches)
        assert table["y"].to_pylist() == [[n + 10.5] for n in range(9)]
    assert list(PredictTask(signature=linear, inputs=(), outputs=(), batch_size=1)(iter([]))) == []


def test_values_that_do_not_fit_are_named(linear):
    def one(array):
        batch = pa.RecordBatch.from_arrays([array], ["x"])
        return predicted(linear, ("dense_input",), (("dense", "y"),), 2, batch)

    with pytest.raises(RowError, match=r"column 'x', input 'dense_input': rows of shape \(3,\)"):
        one(pa.array([[1.0, 2.0, 3.0]]))
    with pytest.raises(RowError, match="lists of several lengths; input dense_input is float32"):
        one(pa.array([[1.0, 2.0], [1.0]]))
    with pytest.raises(RowError, match="object does not fit float32"):
        one(pa.array(["a"]))
    with pytest.raises(RowError, match="null"):
        one(pa.array([None, [1.0, 2.0]]))


def test_text_goes_in_and_comes_out(tmp_path):
    class Upper(tf.Module):  # type: ignore[misc]  # TensorFlow is not checked
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
        def serve(self, text):
            return {"upper": tf.strings.upper(text), "length": tf.strings.length(text)}

    module = Upper()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"serving_default": module.serve})
    signature = read_signature(str(tmp_path / "m"))
    batch = pa.RecordBatch.from_pydict({"t": ["ab", "cde"]})
    table = predicted(signature, ("text",), (("length", "n"), ("upper", "u")), 1, batch)
    assert table.to_pydict() == {"n": [2, 3], "u": [b"AB", b"CDE"]}


def test_unknown_names_and_models_are_refused(linear, tmp_path):
    with pytest.raises(SettingsError, match=r"has dense float32\[1\]"):
        linear.check(["dense_input"], ["other"])
    with pytest.raises(SettingsError, match=r"has dense_input float32\[2\]"):
        linear.check([], ["dense"])
    with pytest.raises(SettingsError, match="has no signature 'other', it has"):
        read_signature(linear.path, name="other")
    with pytest.raises(SettingsError, match="no SavedModel with tags 'serve'"):
        read_signature(str(tmp_path))

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
