"""SavedModels with Keras 2's names."""

from __future__ import annotations

import secrets
from collections import OrderedDict

import keras
import numpy as np
import pytest
import tensorflow as tf

from feeding.filesystem.registry import filesystem_for
from tests.support.keras_training import serving
from tfos.errors import SettingsError, UnsupportedError, UnsupportedModel
from tfos.keras import Embedding
from tfos.keras.fit.distribute import distribute
from tfos.predict.loading import read_signature
from tfos.predict.signature import ModelSource, TensorInfo
from tfos.tensorflowonspark import compat

pytestmark = [
    pytest.mark.tf,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

IDS = np.arange(6)


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


def test_results_keep_their_names_whatever_the_order_of_an_ordered_dict(tmp_path):
    given = keras.Input((2,), name="given")
    outputs = OrderedDict(z=given + 1, a=keras.layers.Flatten(name="double")(given * 2))
    compat.export_saved_model(keras.Model(given, outputs), str(tmp_path / "m"), True)
    serve = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    found = serve(given=tf.constant([[1.0, 2.0]]))
    np.testing.assert_array_equal(found["z"], [[2, 3]])
    np.testing.assert_array_equal(found["a"], [[2, 4]])


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


def test_only_the_chief_reads_the_rows_of_all_tables(tmp_path, monkeypatch):
    """Each worker read all rows from the servers, wrote them to its disk and dropped them."""
    model = with_rows()
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        model.train_on_batch(IDS[:4], np.ones((4, 1)))
        (layer,) = (each for each in model.layers if isinstance(each, Embedding))
        read = []
        real = layer.source.dump

        def dump(*given):
            read.append(given)
            return real(*given)

        monkeypatch.setattr(layer.source, "dump", dump, raising=False)
        compat.export_saved_model(model, str(tmp_path / "m"), is_chief=False)
        assert (read, list(tmp_path.iterdir())) == ([], [])
        compat.export_saved_model(model, str(tmp_path / "m"), is_chief=True)
        assert len(read) == 1


@pytest.mark.parametrize("beside", ["checkpoint/x", "saved_model.pb"])
def test_an_export_to_a_url_removes_nothing_else(beside):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    root = f"memory://runs/{secrets.token_hex(4)}"
    files = filesystem_for(root)
    files.write(f"{root}/{beside}", b"mine")
    files.write(f"{root}/logs/1", b"mine")
    with pytest.raises(SettingsError, match=rf"'?{root}.*name a path below it"):
        compat.export_saved_model(model, root, is_chief=True)
    for each in (beside, "logs/1"):
        with files.open(f"{root}/{each}") as file:
            assert file.read_range(0, 9) == b"mine"
    for _ in range(2):
        compat.export_saved_model(model, f"{root}/model", is_chief=True)
    assert files.exists(f"{root}/model/saved_model.pb")


def with_rows():
    keras.utils.set_random_seed(1)
    ids = keras.Input((), dtype="int64", name="ids")
    layer = Embedding(1, table="user", unseen=0.25)
    model = keras.Model(ids, keras.layers.Dense(1, use_bias=False)(layer(ids)))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def answers_of(directory):
    """Return what a SavedModel answers, which has no function of the process that wrote it."""
    assert b"PyFunc" not in (directory / "saved_model.pb").read_bytes()
    answer = tf.saved_model.load(str(directory)).signatures["serving_default"]
    ((name, spec),) = answer.structured_input_signature[1].items()
    (found,) = answer(**{name: tf.constant(IDS, spec.dtype)}).values()
    return found.numpy()


@pytest.mark.parametrize("way", ["compat", "model.export"])
def test_a_model_with_tables_is_written_with_its_rows(tmp_path, way):
    """The lookup was a function of this process: no other one could call what was written."""
    model = with_rows()
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        model.train_on_batch(IDS[:4], np.ones((4, 1)))
        if way == "compat":
            compat.export_saved_model(model, str(tmp_path / "m"), is_chief=True)
        else:
            model.export(tmp_path / "m", verbose=False)
        expected = model.predict_on_batch(IDS)
        (layer,) = (each for each in model.layers if isinstance(each, Embedding))
        assert layer.source.rows("user", IDS[:1]) is not None  # the servers' again
    assert len(set(expected[:, 0].tolist())) == 5  # two ids have no row
    np.testing.assert_array_equal(answers_of(tmp_path / "m"), expected)


@pytest.mark.filterwarnings("ignore:.*unbuilt state")
@pytest.mark.parametrize("has_table", [False, True])
def test_a_layer_that_no_call_has_built_is_left_out(tmp_path, has_table):
    @keras.saving.register_keras_serializable("test_saved_models")
    class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def __init__(self, **fields):
            super().__init__(**fields)
            self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(2)

        def build(self, shape):
            self.used.build(shape)

        def call(self, x):
            return self.used(x)

    ids = keras.Input((), dtype="int64", name="user")
    first = Embedding(2, table="user") if has_table else keras.layers.Embedding(6, 2)
    model = keras.Model(ids, Block()(first(ids)))
    compat.export_saved_model(model, str(tmp_path / "m"), is_chief=True)
    np.testing.assert_array_equal(answers_of(tmp_path / "m"), model.predict_on_batch(IDS))


def test_values_that_others_pushed_are_exported(tmp_path):
    model = with_rows()
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        model.train_on_batch(IDS, np.ones((6, 1)))
        client = cluster.contexts[0].client
        (group,) = client.manifest.groups
        client.assign({group.name: np.full(group.num_elements, 7, group.dtype)})
        compat.export_saved_model(model, str(tmp_path / "m"), is_chief=True)
    assert model.get_weights()[-1].tolist() == [[7.0]]


class Own(keras.Model):  # type: ignore[misc]  # Keras is not checked
    """Has no fixed inputs."""

    def __init__(self):
        super().__init__()
        self.rows = Embedding(1, unseen=0.25)

    def call(self, ids):
        return self.rows(ids)


def test_a_model_class_with_tables_is_exported_once_its_inputs_are_known(tmp_path):
    model = Own()
    with pytest.raises(ValueError, match="not yet been built"):
        model.export(tmp_path / "m")
    model(IDS)
    with pytest.raises(UnsupportedModel, match=r"Own .* input_signature=.*beside"):
        model.export(tmp_path / "m")
    with pytest.raises(UnsupportedModel, match=r"format='onnx'\) .*leave format out"):
        model.export(tmp_path / "m", format="onnx")
    assert not (tmp_path / "m").exists()
    spec = keras.InputSpec(shape=(None,), dtype="int64")
    model.export(tmp_path / "m", verbose=False, input_signature=[spec])
    saved = tf.saved_model.load(str(tmp_path / "m"))
    assert b"PyFunc" not in (tmp_path / "m" / "saved_model.pb").read_bytes()
    assert saved.serve(tf.constant(IDS)).numpy().tolist() == [[0.25]] * 6


def test_an_output_of_unknown_rank_is_known_as_such(tmp_path):
    class Twice(tf.Module):  # type: ignore[misc]  # TensorFlow is not checked
        @tf.function(input_signature=[tf.TensorSpec((None, 2), name="x")])
        def twice(self, x):
            unknown = tf.reshape(x, tf.cast(tf.shape(tf.where(x > 0))[:1], "int32") * 0 - 1)
            return {"flat": unknown, "any": tf.reshape(x, tf.where(x[0] > 0)[:, 0])}

    module = Twice()
    tf.saved_model.save(module, str(tmp_path / "m"), {"serving_default": module.twice})
    found = read_signature(ModelSource(path=str(tmp_path / "m")))
    assert found.outputs["any"] == TensorInfo("float32", (), has_rank=False)
    assert found.outputs["flat"] == TensorInfo("float32", ())


def test_sharding_of_a_dataset_is_turned_off():
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def by_archive(model, path):
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, input_signature=[tf.TensorSpec((None,), tf.int64)])
    archive.write_out(path, verbose=False)


def by_traced_function(model, path):
    """Keras tracks the variables by itself, and meets no layer."""

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int64)])
    def inner(ids):
        return model(ids)

    function = tf.function(lambda ids: inner(ids) + 1, input_signature=inner.input_signature)
    function.get_concrete_function()
    archive = keras.export.ExportArchive()
    archive.add_endpoint("serve", function)
    archive.write_out(path, verbose=False)


def by_module(model, path):
    module = tf.Module()
    module.model = model
    module.serve = tf.function(model.call, input_signature=[tf.TensorSpec((None,), tf.int64)])
    tf.saved_model.save(module, path)


@pytest.mark.parametrize(
    "way",
    [by_archive, by_traced_function, by_module, lambda *given: tf.saved_model.save(*given)],
    ids=["by_archive", "by_traced_function", "by_module", "as_it_is"],
)
@pytest.mark.parametrize("trains", [True, False])
def test_a_saved_model_that_only_this_process_could_call_is_refused(tmp_path, way, trains):
    """One whose layer trains failed with a text about gradients; another one was written."""
    model = with_rows()
    model.layers[1].trainable = trains
    with pytest.raises(
        UnsupportedModel, match=r"rows up in this process.*ctx\.export\(model, path"
    ):
        way(model, str(tmp_path / "m"))
    assert not list(tmp_path.glob("m/saved_model.pb"))


def test_an_archive_of_a_model_without_tables_is_as_it_was(tmp_path):
    model = keras.Sequential([keras.Input((), dtype="int64"), keras.layers.Embedding(3, 2)])
    by_archive(model, str(tmp_path / "m"))
    assert tf.saved_model.load(str(tmp_path / "m")).serve(tf.constant([1], tf.int64)).shape == (
        1,
        2,
    )
