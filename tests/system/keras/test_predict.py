"""Saved models of every kind over record batches: the numbers of Keras itself, in order."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import secrets
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfos.keras
from feeding.filesystem.location import parse
from ps.errors import IdError
from tests.support.exports import write_export
from tfos import serving
from tfos.errors import RowError, SettingsError, UnsupportedModel
from tfos.files import transfer
from tfos.keras.embedding.sources import LoadedRows
from tfos.predict import loading
from tfos.predict.predictor import OutputColumn, predictor_of
from tfos.predict.signature import ModelSource, TensorInfo
from tfos.serving import served_model

pytestmark = [
    pytest.mark.tf,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def predictor(signature, *inputs, batch_size=4):
    """One column per input, all outputs under their names."""
    names = inputs or tuple(signature.inputs)
    outputs = (OutputColumn(name, name) for name in signature.outputs)
    found = predictor_of(signature, names, outputs, batch_size, names)
    return pickle.loads(cloudpickle.dumps(found))


def predicted(signature, *batches, **options):
    return pa.Table.from_batches(list(predictor(signature, **options).results(0, iter(batches))))


def mlp():
    layers = [keras.Input((3,), name="f"), keras.layers.Dense(4), keras.layers.Dense(2, name="y")]
    return keras.Sequential(layers)


def save(model, path):
    if path.suffix == ".keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    return str(path)


def rows(values):
    return pa.RecordBatch.from_arrays([pa.array(values.tolist(), pa.list_(pa.float32()))], ["f"])


def key_of(signature):
    return loading._key(signature.source, signature.digest)


@pytest.mark.parametrize("name", ["m.keras", "m"])
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.long), 4, 100])
def test_batches_cross_record_batches_and_rows_keep_their_order(tmp_path, name, batch_size):
    model = mlp()
    signature = loading.read_signature(ModelSource(path=save(model, tmp_path / name)))
    values = np.random.default_rng(0).random((9, 3), np.float32)
    batches = [rows(values[a:b]) for a, b in ((0, 3), (3, 3), (3, 8), (8, 9))]
    table = predicted(signature, *batches, batch_size=batch_size)
    (found,) = table.columns
    np.testing.assert_allclose(found.to_pylist(), model(values), rtol=1e-5)
    assert list(predictor(signature).results(0, iter([]))) == []


def test_every_batch_but_the_last_has_the_same_number_of_rows(tmp_path, monkeypatch):
    signature = loading.read_signature(ModelSource(path=save(mlp(), tmp_path / "m.keras")))
    model = loading.loaded(signature)
    sizes = []

    def counted(tensors):
        sizes.append(int(tensors[0].shape[0]))
        return model.call(tensors)

    counting = dataclasses.replace(model, call=counted)
    monkeypatch.setitem(loading._loaded, key_of(signature), counting)
    predicted(signature, rows(np.ones((3, 3))), rows(np.ones((10, 3))), batch_size=4)
    assert sizes == [4, 4, 4, 1]


def test_a_model_is_read_once_and_another_one_at_its_path_is_refused(tmp_path, monkeypatch):
    path = save(mlp(), tmp_path / "m.keras")
    signature = loading.read_signature(ModelSource(path=path))
    monkeypatch.setattr(loading, "_read", None)
    predicted(signature, rows(np.ones((1, 3))))
    monkeypatch.undo()
    loading._loaded.clear()
    save(mlp(), tmp_path / "m.keras")
    with pytest.raises(SettingsError, match=r"m\.keras has changed since its names and types"):
        predicted(signature, rows(np.ones((1, 3))))


@pytest.mark.long
def test_a_process_keeps_no_bytes_of_a_models_file(tmp_path):
    """They would double the memory of a large model in each Python worker."""
    content = Path(save(mlp(), tmp_path / "m.keras")).read_bytes()
    held = sys.getrefcount(content)
    signature = loading.read_signature(ModelSource(content=content))
    loading._loaded.clear()
    model = loading.loaded(signature)
    assert loading._loaded[key_of(signature)] is model
    del signature
    gc.collect()
    assert sys.getrefcount(content) == held


def test_a_process_keeps_a_few_models(tmp_path):
    signatures = [
        loading.read_signature(ModelSource(path=save(mlp(), tmp_path / f"{n}.keras")))
        for n in range(loading.KEPT + 1)
    ]
    kept = [key_of(each) in loading._loaded for each in signatures]
    assert kept == [False] + [True] * loading.KEPT


@pytest.mark.parametrize("name", ["m.keras", "m"])
def test_a_model_at_a_url_is_fetched(tmp_path, name):
    model = mlp()
    target = f"memory://{secrets.token_hex(4)}/{name}"
    transfer.upload(Path(save(model, tmp_path / name)), parse(target))
    signature = loading.read_signature(ModelSource(path=target))
    (found,) = predicted(signature, rows(np.ones((2, 3)))).columns
    np.testing.assert_allclose(found.to_pylist(), model(np.ones((2, 3))), rtol=1e-5)


def test_the_bytes_of_a_file_are_a_model(tmp_path):
    model = mlp()
    save(model, tmp_path / "m.keras")
    source = ModelSource(content=(tmp_path / "m.keras").read_bytes())
    table = predicted(loading.read_signature(source), rows(np.ones((2, 3))))
    np.testing.assert_allclose(table["y"].to_pylist(), model(np.ones((2, 3))), rtol=1e-5)


def test_the_same_file_with_other_custom_objects_is_another_model(tmp_path):
    def times(factor):
        def scaled(x):
            return x * factor

        return scaled

    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Activation(times(1.0), name="y")(x))
    save(model, tmp_path / "m.keras")
    content = (tmp_path / "m.keras").read_bytes()
    signatures = []
    for factor in (2.0, 3.0):
        source = ModelSource(content=content, custom_objects={"scaled": times(factor)})
        source = cloudpickle.loads(cloudpickle.dumps(source))  # as it reaches an executor
        signatures.append(loading.read_signature(source))
    found = [predicted(each, rows(np.ones((1, 3))))["y"].to_pylist() for each in signatures]
    assert found == [[[2.0] * 3], [[3.0] * 3]]


def test_savedmodels_with_other_vocabularies_are_other_models(tmp_path):
    class Lookup(tf.Module):  # type: ignore[misc]  # TensorFlow is not checked
        def __init__(self, path):
            file = tf.lookup.TextFileInitializer(
                path, tf.string, 0, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
            )
            self.table = tf.lookup.StaticHashTable(file, -1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="x")])
        def serve(self, x):
            return {"y": self.table.lookup(x)}

    (tmp_path / "words").write_text("a\nb\n")
    module = Lookup(str(tmp_path / "words"))
    tf.saved_model.save(module, str(tmp_path / "m"), {"serving_default": module.serve})
    source = ModelSource(path=str(tmp_path / "m"))
    signatures = [loading.read_signature(source)]
    (tmp_path / "m" / "assets" / "words").write_text("b\na\n")
    signatures.append(loading.read_signature(source))
    batch = pa.RecordBatch.from_pydict({"x": ["a", "b"]})
    found = [predicted(each, batch)["y"].to_pylist() for each in signatures]
    assert found == [[0, 1], [1, 0]]


@keras.saving.register_keras_serializable(__name__)
class RowSum(keras.layers.Layer):  # type: ignore[misc]  # Keras is not checked
    def call(self, x):
        return tf.reduce_sum(x, axis=1)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape[:1], x.dtype)


class Sums(tf.Module):  # type: ignore[misc]  # TensorFlow is not checked
    """Not of Keras, whose exports have dense inputs."""

    @tf.function(
        input_signature=[
            tf.RaggedTensorSpec((None, None), tf.int64, 1),
            tf.TensorSpec((None,), tf.int64),
            tf.RaggedTensorSpec((None, None), tf.string, 1, row_splits_dtype=tf.int32),
        ]
    )
    def sums(self, words, factor, texts):
        longest = tf.reduce_max(tf.strings.length(texts), axis=1)
        return {"sum": factor * tf.reduce_sum(words, axis=1), "longest": longest}


def test_ragged_inputs_of_a_saved_model_have_the_names_that_its_function_gave_them(tmp_path):
    module = Sums()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.sums)
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    assert list(signature.inputs.items()) == [
        ("words", TensorInfo("int64", (None,), is_ragged=True)),
        ("factor", TensorInfo("int64", ())),
        ("texts", TensorInfo("object", (None,), is_ragged=True)),
    ]
    batch = pa.RecordBatch.from_pydict(
        {
            "words": [[1, 2], [], [3]],
            "factor": [2, 1, 10],
            "texts": [["ab"], ["a", "abc"], ["x"]],
        }
    )
    table = predicted(signature, batch, batch.slice(1), batch_size=2)
    assert table.to_pydict() == {"longest": [2, 3, 1, 3, 1], "sum": [6, 0, 30, 0, 30]}


@pytest.mark.parametrize("kind", [dict, list])
def test_ragged_inputs_beside_others_of_a_saved_model_with_tables(tmp_path, kind):
    """TensorFlow calls them inputs_0 and inputs_0_1, as two inputs; a dict has their own names."""
    inputs = {
        "user": keras.Input((), dtype="string", name="user"),
        "tags": keras.Input((None,), dtype="string", ragged=True, name="tags"),
        "more": keras.Input((None,), dtype="string", ragged=True, name="more"),
    }
    rows = [
        tfos.keras.Embedding(1, table=name, combiner=None if name == "user" else "sum")(x)
        for name, x in inputs.items()
    ]
    given = inputs if kind is dict else [*inputs.values()]
    model = keras.Model(given, keras.layers.Concatenate(name="y")(rows))
    model.compile("sgd", "mse")
    columns = {"user": ["a", "b"], "tags": [["x", "y"], []], "more": [[], ["z"]]}
    x = {name: tf.ragged.constant(value) for name, value in columns.items()}
    x["user"] = tf.constant(columns["user"])
    model.fit(x if kind is dict else [*x.values()], tf.ones((2, 3)), verbose=0)
    signature = loading.read_signature(ModelSource(path=save(model, tmp_path / "m")))
    names = ["more", "tags", "user"] if kind is dict else ["user", "inputs_0", "inputs_0_2"]
    assert [*signature.inputs] == names
    order = names if kind is dict else [*inputs]
    batch = pa.RecordBatch.from_arrays([pa.array(columns[each]) for each in order], names)
    (found,) = predicted(signature, batch).to_pydict().values()
    np.testing.assert_array_equal(found, model.predict(x if kind is dict else [*x.values()]))


class Digits(tf.Module):  # type: ignore[misc]  # as Sums
    """Six inputs and outputs of one kind: whose order is mixed up answers other numbers."""

    @tf.function(input_signature=[tf.TensorSpec((None,), name=name) for name in "zebfac"])
    def digits(self, z, e, b, f, a, c):
        return {"out_c": c, "out_z": z, "out_a": a, "out_f": f, "out_b": b, "out_e": e}


def answered_by(signature, inputs=None) -> list[float]:
    """Return what six columns of 0.0 to 5.0 come out as, in the order of the outputs' names."""
    columns = {f"column_{number}": [float(number)] for number in range(6)}
    outputs = [OutputColumn(name, name) for name in sorted(signature.outputs)]
    predictor = predictor_of(signature, list(columns), outputs, 4, inputs)
    (found,) = predictor.results(0, iter([pa.RecordBatch.from_pydict(columns)]))
    return [value for (value,) in found.to_pydict().values()]


def as_older_tensorflow_saved(path):
    """A function did not have its traces as children, which tell what a signature calls them."""
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    nodes = saved.meta_graphs[0].object_graph_def.nodes
    for function in [node for node in nodes if node.HasField("function")]:
        for trace in function.children:
            nodes[trace.node_id].user_object.identifier = "_generic_user_object"
            nodes[trace.node_id].user_object.version.producer = 1
        del function.children[:]
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())


@pytest.mark.parametrize("is_old", [False, True])
def test_inputs_of_a_saved_model_are_in_the_order_of_its_arguments(tmp_path, is_old):
    """TensorFlow has another order in each process, so columns filled other inputs in each run."""
    module = Digits()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.digits)
    if is_old:
        as_older_tensorflow_saved(tmp_path / "m")
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    assert "".join(signature.inputs) == "zebfac"
    assert list(signature.outputs) == [f"out_{name}" for name in "abcefz"]
    assert answered_by(signature) == [float("zebfac".index(name)) for name in "abcefz"]


class Odd(tf.Module):  # type: ignore[misc]  # as Sums
    @tf.function(input_signature=[tf.TensorSpec((None,), name=name) for name in ("a/z", "Z", "9")])
    def odd(self, first, second, third):
        return {"y": first + 10 * second + 100 * third}


def test_inputs_are_in_order_if_a_signature_changes_their_names(tmp_path):
    module = Odd()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.odd)
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    assert [*signature.inputs] == ["a_z", "Z", "arg_9"]
    model = loading.loaded(signature)
    assert model.is_ordered
    assert model.call([tf.constant([n]) for n in (1.0, 2.0, 3.0)])[0].numpy() == [321.0]


def test_inputs_of_a_dict_without_names_are_in_the_order_of_its_keys(tmp_path):
    """The graph numbers them as the first call did: columns filled the inputs b, c, a."""

    class Digits(keras.Model):  # type: ignore[misc]  # Keras is not checked
        def call(self, x):
            return x["a"] + 10 * x["b"] + 100 * x["c"]

    model = Digits()
    model({name: np.ones((1, 1), np.float32) for name in "cab"})
    path = save(model, tmp_path / "m")
    found = loading.loaded(loading.read_signature(ModelSource(path=path)))
    assert found.is_ordered
    assert found.call([tf.constant([[n]]) for n in (1.0, 2.0, 3.0)])[0].numpy() == [[321.0]]


class Twins(tf.Module):  # type: ignore[misc]  # as Sums
    @tf.function(
        input_signature=[{key: {"x": tf.RaggedTensorSpec((None, None))} for key in ("a", "b")}]
    )
    def twins(self, given):
        sums = (tf.reduce_sum(given[key]["x"], axis=1) for key in ("a", "b"))
        return {"y": next(sums) + 10 * next(sums)}


def test_ragged_inputs_of_one_name_in_two_dicts_are_two_inputs(tmp_path):
    module = Twins()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.twins)
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    assert [*signature.inputs] == ["given", "given_2"]
    batch = pa.RecordBatch.from_pydict({"given": [[1.0, 2.0]], "given_2": [[4.0]]})
    assert predicted(signature, batch).to_pydict() == {"y": [43.0]}


@pytest.mark.parametrize("names", [["user", "item"], [None] * 12])
def test_an_exported_keras_model_has_its_inputs_in_the_order_of_its_file(tmp_path, names):
    inputs = [keras.Input((1,), name=name) for name in names]
    scaled = [number * each for number, each in enumerate(inputs)]
    model = keras.Model(inputs, keras.layers.Add()(scaled))
    model.save(tmp_path / "m.keras")
    model.export(tmp_path / "m", verbose=False)
    x = [np.full((1, 1), 10.0**place, np.float32) for place in range(len(names))]
    expected = np.asarray(model(x))
    for path in (tmp_path / "m.keras", tmp_path / "m"):
        model = loading.loaded(loading.read_signature(ModelSource(path=str(path))))
        (found,) = model.call(list(map(tf.constant, x)))
        np.testing.assert_allclose(found, expected)


def test_inputs_in_an_ordered_dict_are_those_of_their_names_and_of_the_models_file(tmp_path):
    inputs = OrderedDict(
        user=keras.Input((1,), name="user"), item=keras.Input((2,), name="item", dtype="int32")
    )
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["user"]) * inputs["item"][:, :1])
    model.save(tmp_path / "m.keras")
    found = loading.input_infos(model)
    assert found == {"item": TensorInfo("int32", (2,)), "user": TensorInfo("float32", (1,))}
    saved = loading.read_signature(ModelSource(path=str(tmp_path / "m.keras"))).inputs
    assert list(saved.items()) == list(found.items())


@keras.saving.register_keras_serializable("test_predict")
class Ordered(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its file has no inputs, so it has its OrderedDicts again when it is read."""

    def __init__(self, **options):
        given = OrderedDict((name, keras.Input((1,), name=name)) for name in ("user", "item"))
        outputs = OrderedDict(z=given["user"] + 100 * given["item"], a=1 * given["user"])
        super().__init__(given, outputs, **options)

    def get_config(self):
        return {}


def test_a_model_that_makes_ordered_dicts_predicts_by_their_names(tmp_path):
    Ordered().save(tmp_path / "m.keras")
    model = loading._read(ModelSource(path=str(tmp_path / "m.keras")))
    given = {"user": tf.constant([[1.0]]), "item": tf.constant([[2.0]])}
    found = model.call([given[name] for name in model.inputs])
    numbers = [each.numpy().item() for each in found]
    assert dict(zip(model.outputs, numbers, strict=True)) == {"a": 1, "z": 201}


def test_a_saved_model_that_does_not_tell_the_order_of_its_inputs_takes_named_ones_alone(tmp_path):
    digits = Digits().digits
    tf.saved_model.save(tf.Module(), str(tmp_path / "m"), signatures=digits)
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    with pytest.raises(SettingsError, match=r"order of its inputs a, b, c, e, f, z\. Name"):
        answered_by(signature)
    assert answered_by(signature, "bacfez") == [float("bacfez".index(name)) for name in "abcefz"]


class Nested(tf.Module):  # type: ignore[misc]  # as Sums
    @tf.function(input_signature=[tf.RaggedTensorSpec((None, None, None), tf.int64, 2)])
    def count(self, words):
        return {"count": words.nrows() + tf.zeros(words.nrows(), tf.int64)}


def test_an_input_of_lists_of_lists_is_refused(tmp_path):
    module = Nested()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.count)
    with pytest.raises(UnsupportedModel, match="input 'words' takes lists of lists in each row"):
        loading.read_signature(ModelSource(path=str(tmp_path / "m")))


def test_several_inputs_of_all_kinds_and_several_outputs(tmp_path):
    word = keras.Input((), dtype="string", name="word")
    number = keras.Input((), dtype="int32", name="number")
    some = keras.Input((None,), dtype="int64", ragged=True, name="some")
    known = keras.layers.StringLookup(vocabulary=["a", "b"])(word)
    model = keras.Model(
        {"word": word, "number": number, "some": some},
        {"place": known, "both": keras.layers.Add()([number, number]), "sum": RowSum()(some)},
    )
    signature = loading.read_signature(ModelSource(path=save(model, tmp_path / "m.keras")))
    assert signature.inputs["some"] == TensorInfo("int64", (None,), is_ragged=True)
    batch = pa.RecordBatch.from_pydict(
        {"number": [1.0, 2.0, 3.0], "some": [[1], [], [2, 3]], "word": ["b", "x", "a"]}
    )
    table = predicted(signature, batch, batch.slice(1), batch_size=2)
    assert table.to_pydict() == {
        "both": [2, 4, 6, 4, 6],
        "place": [2, 0, 1, 0, 1],
        "sum": [1, 0, 5, 0, 5],
    }


def test_an_output_has_a_name_that_no_layer_has(tmp_path):
    """One layer makes two outputs, and another is called as the second of them would be."""
    a, b = keras.Input((), name="a"), keras.Input((), name="b")
    tens = keras.layers.Rescaling(10.0, name="dense")
    ones = keras.layers.Rescaling(1.0, name="dense_1")
    model = keras.Model([a, b], [tens(a), tens(b), ones(b)])
    signature = loading.read_signature(ModelSource(path=save(model, tmp_path / "m.keras")))
    batch = pa.RecordBatch.from_pydict({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    found = predicted(signature, batch, batch_size=2).to_pydict()
    assert found == {"dense": [10, 20], "dense_2": [30, 40], "dense_1": [3, 4]}


def test_lists_of_another_length_go_into_the_next_batch(tmp_path):
    class Total(tf.Module):  # type: ignore[misc]  # TensorFlow is not checked
        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32, name="x")])
        def serve(self, x):
            return {"total": tf.reduce_sum(x, axis=1), "text": tf.strings.as_string(x[:, 0])}

    module = Total()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"serving_default": module.serve})
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    table = predicted(signature, rows(np.ones((3, 2))), rows(np.ones((2, 3))), batch_size=2)
    assert table["total"].to_pylist() == [2, 2, 2, 3, 3]
    assert table["text"].to_pylist() == [b"1.000000"] * 5


def test_the_dense_model_of_an_export_finds_its_rows(tmp_path, monkeypatch):
    class Doubled(keras.layers.Layer):  # type: ignore[misc]  # Keras is not checked
        def call(self, x):
            return 2 * x

    monkeypatch.setenv("TFOS_SERVING_CACHE", str(tmp_path / "cache"))
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows_of = tfos.keras.Embedding(4, table="user", combiner="sum")
    keras.Model(ids, Doubled()(rows_of(ids))).save(tmp_path / "m.keras")
    own = {"Doubled": Doubled}
    write_export(tmp_path / "e", {1: 1.0, 2: 10.0}, model=tmp_path / "m.keras")
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "e"), custom_objects=own))
    batch = pa.RecordBatch.from_pydict({"ids": [[1, 2], [1, 3]]})
    (found,) = predicted(signature, batch).columns
    assert [row[0] for row in found.to_pylist()] == [22.0, 2.0]
    served = serving.load(tmp_path / "e", progress=False, custom_objects=own, safe_mode=False)
    assert served.predict(np.array([[1, 2]]))[0, 0] == 22.0
    again = keras.layers.Lambda(lambda x: x + 1)(Doubled()(rows_of(ids)))
    keras.Model(ids, again).save(tmp_path / "newer.keras")
    write_export(tmp_path / "newer", {1: 4.0}, model=tmp_path / "newer.keras", state="second")
    served.refresh(tmp_path / "newer")
    assert served.predict(np.array([[1, 2]]))[0, 0] == 9.0


class Doubled(keras.layers.Layer):  # type: ignore[misc]  # Keras is not checked
    def call(self, x: Any) -> Any:
        return 2 * x


@pytest.mark.parametrize("name", ["m.keras", "e"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Doubled, r"Could not locate class 'Doubled'[^{]*"),
        (lambda: keras.layers.Lambda(lambda x: 2 * x), "deserialization of a `Lambda` layer.*"),
    ],
)
def test_a_class_that_is_not_known_is_told_with_the_way_out(tmp_path, kind, reason, name):
    """That of an export came as a Spark task's trace, that of a file as "no .keras file is at"."""
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows_of = tfos.keras.Embedding(4, table="user", combiner="sum")
    keras.Model(ids, kind()(rows_of(ids))).save(tmp_path / "m.keras")
    write_export(tmp_path / "e", {1: 1.0}, model=tmp_path / "m.keras")
    text = rf"cannot make the model of .*{reason}\. A SavedModel needs no code"
    with pytest.raises(SettingsError, match=text):
        loading.read_signature(ModelSource(path=str(tmp_path / name)))


def test_what_is_no_model_is_refused_with_what_would_be(tmp_path):
    class Free(keras.Model):  # type: ignore[misc]  # Keras is not checked
        def call(self, x):
            return x

    free = Free()
    free(np.ones((1, 1)))
    (tmp_path / "damaged.keras").write_bytes(b"x")
    for path, text in (
        (tmp_path, "no SavedModel with tags 'serve', no .keras file and no export is at"),
        (tmp_path / "none.keras", "no .keras file and no export is at"),
        (tmp_path / "damaged.keras", "no .keras file and no export is at"),
        ("hdfs://a:word@b/x", "the model: a URL with a user or a password is refused"),
    ):
        with pytest.raises(SettingsError, match=text) as found:
            loading.read_signature(ModelSource(path=str(path)))
        assert "a:word" not in str(found.value)
    path = save(mlp(), tmp_path / "m")
    with pytest.raises(SettingsError, match=r"has no signature 'other', only \['serv"):
        loading.read_signature(ModelSource(path=path, name="other"))
    with pytest.raises(SettingsError, match=r"no SavedModel with tags 'gpu', .* tags \['serve'\]"):
        loading.read_signature(ModelSource(path=path, tags="gpu"))
    keras.saving.register_keras_serializable(f"{__name__}.damaged")(Free)
    with pytest.raises(UnsupportedModel, match="a Free without fixed inputs"):
        loading.read_signature(ModelSource(path=save(free, tmp_path / "f.keras")))


def test_outputs_without_a_row_per_row_are_refused(tmp_path):
    class Mean(tf.Module):  # type: ignore[misc]  # TensorFlow is not checked
        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
        def serve(self, x):
            return {"mean": tf.reduce_mean(x, axis=0)}

    module = Mean()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"serving_default": module.serve})
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    with pytest.raises(SettingsError, match=r"output 'mean' has shape \(3,\) for 2 rows"):
        predicted(signature, rows(np.ones((2, 3))))


class Twice(tf.Module):  # type: ignore[misc]  # as Sums
    @tf.function(input_signature=[tf.TensorSpec((None, None), name="f")])
    def twice(self, f):
        return {"y": 2 * f}


@pytest.mark.parametrize("batch_size", [2, 4])
def test_answers_whose_lists_have_another_length_are_not_joined(tmp_path, batch_size):
    """What was left was numpy's own error of arrays that it cannot concatenate."""
    module = Twice()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.twice)
    signature = loading.read_signature(ModelSource(path=str(tmp_path / "m")))
    batches = [rows(np.ones((3, 2))), rows(np.ones((5, 3))), rows(np.ones((1, 2)))]
    table = predicted(signature, *batches, batch_size=batch_size)
    assert table["y"].to_pylist() == [[2.0] * 2] * 3 + [[2.0] * 3] * 5 + [[2.0] * 2]


class Repeats(tf.Module):  # type: ignore[misc]  # as Sums
    @tf.function(input_signature=[tf.TensorSpec((None, 3), name="f")])
    def repeat(self, f):
        counts = tf.cast(f[:, 1], tf.int64)
        repeated = tf.RaggedTensor.from_row_lengths(tf.repeat(f[:, 0], counts), counts)
        return {"ragged": repeated, "first": f[:, 0]}


def saved_repeats(path):
    module = Repeats()
    tf.saved_model.save(module, str(path), signatures=module.repeat)
    return "ragged", "first"


def saved_keras_repeats(path):
    ids = keras.Input((None,), dtype="int64", ragged=True, name="f")
    model = keras.Model(
        ids, [tfos.keras.Embedding(2, name="ragged")(ids), RowSum(name="first")(ids)]
    )
    model.save(path)
    return "ragged", "first"


@pytest.mark.parametrize(("make", "name"), [(saved_repeats, "m"), (saved_keras_repeats, "m.keras")])
@pytest.mark.parametrize("form", ["tensor", "python", "class"])
def test_a_ragged_output_is_refused_by_name_and_the_others_are_columns(tmp_path, make, name, form):
    """It was a column as long as the rows of a batch were of one length."""
    ragged, other = make(tmp_path / name)
    signature = loading.read_signature(ModelSource(path=str(tmp_path / name)))
    refused = predictor_of(signature, ["f"], [OutputColumn(ragged, "found", form)], 4)
    with pytest.raises(SettingsError, match=rf"output '{ragged}' has lists of .*\(ragged\), which"):
        refused.schema()
    found = predictor_of(signature, ["f"], [OutputColumn(other, "found")], 4)
    assert found.schema()
    batch = pa.RecordBatch.from_pydict({"f": [[3, 1, 0], [4, 0, 0]]})
    (answered,) = found.results(0, [batch])
    assert answered.column(0).to_pylist() == ([3, 4] if make is saved_repeats else [4, 4])


def test_an_id_out_of_range_is_the_error_of_its_table(tmp_path):
    """It was TensorFlow's, with a page of frames before its reason."""
    ids = keras.Input((2,), dtype="int64", name="f")
    model = keras.Model(ids, tfos.keras.Embedding(2, max_id=10, name="items")(ids))
    signature = loading.read_signature(ModelSource(path=save(model, tmp_path / "m.keras")))
    batch = pa.RecordBatch.from_pydict({"f": [[1, 2], [3, 99]]})
    with pytest.raises(IdError, match=r"^table 'items' takes int64 ids 0\.\.10, got 99"):
        predicted(signature, batch)


def test_ids_of_64_bits_are_those_that_the_model_was_trained_on(tmp_path):
    """Spark has no unsigned numbers: what it reads of an id above 2^63 - 1 is negative."""
    ids = keras.Input((), dtype="uint64", name="f")
    layer = tfos.keras.Embedding(1, id_kind="uint64", name="items")
    model = keras.Model(ids, layer(ids))
    spec = layer.settings.spec(None)
    keys = np.array([-5, 7], np.int64)
    layer.bind(LoadedRows(keys, np.array([[0.5], [0.25]], np.float32), layer.settings))
    signature = loading.read_signature(ModelSource(path=save(model, tmp_path / "m.keras")))
    batch = pa.RecordBatch.from_pydict({"f": [7, -5]})
    assert spec.id_kind == "uint64"
    assert predicted(signature, batch)["items"].to_pylist() == [[0.25], [0.5]]


def test_a_bad_row_names_partition_row_and_column(tmp_path):
    signature = loading.read_signature(ModelSource(path=save(mlp(), tmp_path / "m.keras")))
    batches = [rows(np.ones((5, 3))), rows(np.ones((2, 2)))]
    with pytest.raises(RowError, match=r"partition 7, row 5, column 'f': rows of shape \(2,\)"):
        list(predictor(signature).results(7, iter(batches)))


@keras.saving.register_keras_serializable(__name__)
class Free(keras.Model):  # type: ignore[misc]  # Keras is not checked
    """A model without fixed inputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.user = tfos.keras.Embedding(4, table="user")

    def call(self, ids):
        return self.user(ids)


@pytest.mark.filterwarnings("ignore:Model 'free.*' had a build config")
def test_an_export_of_a_model_without_fixed_inputs_is_refused_before_its_index_is_built(
    tmp_path, monkeypatch
):
    """The index of all rows took minutes, and then came the refusal."""

    def build(*_, **__):
        raise AssertionError("an index was built")

    model = Free()
    model(np.arange(3))
    model.save(tmp_path / "m.keras")
    write_export(tmp_path / "e", {1: 1.0}, model=tmp_path / "m.keras")
    monkeypatch.setattr("tfos.serving.load", build)
    with pytest.raises(UnsupportedModel, match="a Free without fixed inputs"):
        loading.read_signature(ModelSource(path=str(tmp_path / "e")))


def test_an_export_that_is_replaced_between_its_model_and_its_rows_is_refused(
    tmp_path, monkeypatch
):
    ids = keras.Input((), dtype="int64", name="ids")
    keras.Model(ids, tfos.keras.Embedding(4, table="user")(ids)).save(tmp_path / "m.keras")
    write_export(tmp_path / "e", {1: 1.0}, model=tmp_path / "m.keras")
    real = served_model.dense_model

    def replaced(files, custom_objects):
        found = real(files, custom_objects)
        write_export(tmp_path / "e", {1: 2.0}, model=tmp_path / "m.keras", state="second")
        return found

    monkeypatch.setattr(served_model, "dense_model", replaced)
    monkeypatch.setenv("TFOS_SERVING_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SettingsError, match=r"now has the state second, .* the state first\. Call"):
        loading.read_signature(ModelSource(path=str(tmp_path / "e")))
