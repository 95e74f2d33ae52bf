"""Columns as inputs of a model, without a model: dtypes, shapes, and refusals that name the row."""

from __future__ import annotations

import dataclasses

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pyarrow as pa
import pytest

from feeding.arrow import encoder, spark_vectors
from feeding.columnar.batch import Ragged
from feeding.errors import RowError
from tfos.errors import SettingsError
from tfos.predict import predictor as predictor_module
from tfos.predict.fitting import Misfit, fitted
from tfos.predict.loading import LoadedModel
from tfos.predict.predictor import OutputColumn, Predictor, predictor_of
from tfos.predict.signature import ModelSignature, ModelSource, TensorInfo
from tfos.predict.tensors import Inputs, arrow_column, column_type

FLOATS = TensorInfo("float32", (2,))


def given(info, *arrays):
    names = ["a", "b", "c"][: len(arrays)]
    inputs = Inputs(names, [("x", tuple(range(len(arrays))))], [info], 3)
    return inputs.of(pa.RecordBatch.from_arrays(list(arrays), names))[0]


def lists(*rows, kind="float64"):
    return pa.array(rows, pa.list_(pa.type_for_alias(kind)))


def test_numbers_of_several_columns_are_put_side_by_side():
    found = given(TensorInfo("float32", (3,)), pa.array([1, 2]), lists([3.0, 4.0], [5.0, 6.0]))
    assert found.dtype == np.float32
    assert found.tolist() == [[1, 3, 4], [2, 5, 6]]


def test_a_list_is_an_image_where_the_model_takes_one():
    info = TensorInfo("float32", (2, 2, 1))
    assert given(info, lists([1.0, 2.0, 3.0, 4.0])).shape == (1, 2, 2, 1)


def test_whole_floats_below_the_size_at_which_they_are_rounded_are_integers():
    found = given(TensorInfo("int64", ()), pa.array([2.0**24 - 1], pa.float32()))
    assert found.tolist() == [2**24 - 1]
    assert given(TensorInfo("int64", ()), pa.array([2.0**53 - 1])).tolist() == [2**53 - 1]
    with pytest.raises(RowError, match="float64 rounds integers"):
        given(TensorInfo("int64", ()), pa.array([2.0**53]))


@pytest.mark.parametrize(
    "column",
    [pa.array([1.0]), lists([1.0]), pa.array([1]).cast(pa.decimal128(20, 0))],
    ids=["floats", "a list of floats", "decimals"],
)
def test_no_ids_are_made_of_floats(column):
    info = TensorInfo("int64", (), is_id=True)
    text = "column 'a': float64 numbers, .*uses them as ids: make a long column"
    with pytest.raises(RowError, match=text):
        given(info, column)
    assert given(info, pa.array([5])).tolist() == [5]


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.list_(pa.timestamp("us"))]
)
def test_no_floats_are_made_of_timestamps(kind):
    item = 1_700_000_000_000_001
    column = pa.array([[item] if pa.types.is_list(kind) else item], kind)
    with pytest.raises(RowError, match=r"row 0, column 'a': a timestamp; .* rounds .*F\.hour"):
        given(TensorInfo("float32", ()), column)
    assert given(TensorInfo("int64", ()), column).tolist() == [item]


def test_lists_of_any_length_are_ragged_where_the_model_takes_them():
    info = TensorInfo("int64", (None,), is_ragged=True)
    found = given(info, lists([1, 2], [], [3], kind="int64"))
    assert isinstance(found, Ragged)
    assert (found.values.tolist(), found.offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    even = given(info, lists([1, 2], [3, 4], kind="int64"))
    assert (even.values.tolist(), even.offsets.tolist()) == ([1, 2, 3, 4], [0, 2, 4])


def test_lists_of_texts_are_the_texts():
    rows = pa.array([["a"], [], ["bü", "zz"], ["a", "a"]])
    found = given(TensorInfo("object", (None,), is_ragged=True), rows)
    assert isinstance(found, Ragged)
    assert found.values.tolist() == [b"a", "bü".encode(), b"zz", b"a", b"a"]
    assert found.offsets.tolist() == [0, 1, 1, 3, 5]
    empty = given(TensorInfo("object", (None,), is_ragged=True), rows.slice(1, 1))
    assert (empty.values.tolist(), empty.offsets.tolist()) == ([], [0, 0])
    even = given(TensorInfo("object", (2,)), rows.slice(2))
    assert even.tolist() == [["bü".encode(), b"zz"], [b"a", b"a"]]
    with pytest.raises(RowError, match=r"row 0, column 'a': 1 values; input 'x' is string\[2\]"):
        given(TensorInfo("object", (2,)), rows)
    with pytest.raises(RowError, match="text does not fit input 'x', float32"):
        given(TensorInfo("float32", (2,)), rows.slice(2))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_texts_are_bytes(kind):
    found = given(TensorInfo("object", ()), pa.array(["ab", "", "ü"]).cast(kind))
    assert found.tolist() == [b"ab", b"", "ü".encode()]


@pytest.mark.parametrize(
    ("info", "array", "text"),
    [
        (FLOATS, lists([1.0, 2.0], None), "partition 3, row 3, column 'a': null; F.coalesce"),
        (FLOATS, lists([1.0, 2.0], [1.0, None]), "row 3, column 'a': null inside a list"),
        (
            FLOATS,
            lists([1.0, 2.0], [1.0]),
            r"row 3, column 'a': 1 values; input 'x' is float32\[2\]",
        ),
        (
            FLOATS,
            lists([1.0] * 3, [1.0] * 3),
            r"row 2, column 'a': rows of shape \(3,\); input 'x'",
        ),
        (FLOATS, pa.array([1.0]), "row 2, column 'a': a number; input 'x' is float32"),
        (FLOATS, pa.array(["a"]), "row 2, column 'a': text does not fit input 'x', float32"),
        (
            TensorInfo("object", ()),
            pa.array([1]),
            r"int64 does not fit input 'x', string\[\]; cast",
        ),
        (
            TensorInfo("int32", ()),
            pa.array([1, 2**40]),
            f"row 3, column 'a': value {2**40} does not",
        ),
        (TensorInfo("int32", ()), pa.array([1.0, 1.5]), "row 3, column 'a': value 1.5 does not"),
        (
            TensorInfo("int32", ()),
            pa.array([1.0, 2.0**24], pa.float32()),
            "row 3, column 'a': value 16777216.0 does not .*float32 rounds integers of this size",
        ),
        (
            TensorInfo("int32", (2,)),
            lists([1.0, 1.0], [1.0, 9e99]),
            "row 3, .*: value 9e.99 does not",
        ),
        (
            TensorInfo("float32", (None,)),
            lists([1.0], [1.0, 2.0]),
            "row 3, .* 2 values, 1 in the rows",
        ),
        (FLOATS, pa.array([{"f": 1.0, "g": 2.0}]), "row 2, column 'a': a struct; name its fields"),
    ],
)
def test_what_does_not_fit_is_refused_by_partition_row_and_column(info, array, text):
    inputs = Inputs(("a",), [("x", (0,))], [info], 3)
    fits = {"object": pa.array(["a", "b"]), "int32": pa.array([1, 2])}
    first = fits[info.dtype] if info.shape == () else lists([1.0, 2.0], [1.0, 2.0])
    inputs.of(pa.RecordBatch.from_arrays([first], ["a"]))
    with pytest.raises(RowError, match=text):
        inputs.of(pa.RecordBatch.from_arrays([array], ["a"]))


def test_outputs_are_columns_of_their_types():
    assert column_type("y", TensorInfo("float32", (3, None))) == "array<array<float>>"
    assert column_type("y", TensorInfo("uint8", ())) == "smallint"
    with pytest.raises(SettingsError, match=r"output 'y' is uint64\[\], which no column holds"):
        column_type("y", TensorInfo("uint64", ()))
    wide = arrow_column(np.array([1, 255], np.uint8), TensorInfo("uint8", ()))
    assert (wide.type, wide.to_pylist()) == (pa.int16(), [1, 255])
    nested = arrow_column(np.arange(12.0).reshape(2, 3, 2), TensorInfo("float64", (3, 2)))
    assert nested.to_pylist() == np.arange(12.0).reshape(2, 3, 2).tolist()


class Answer:
    """A tensor of zeros of any size, which takes no memory."""

    def __init__(self, *shape):
        self._shape = shape

    def numpy(self):
        return np.broadcast_to(np.zeros(1, np.float32), self._shape)


def wide(monkeypatch, width, batch_size):
    """Return a predictor of a model with `width` numbers a row, and the sizes of its calls."""
    infos = TensorInfo("float32", ()), TensorInfo("float32", (width,))
    signature = ModelSignature(
        source=ModelSource(path="/m"), digest="", inputs={"x": infos[0]}, outputs={"y": infos[1]}
    )
    calls: list[int] = []

    def call(tensors):
        calls.append(len(tensors[0]))
        return [Answer(len(tensors[0]), width)]

    model = LoadedModel(signature.digest, signature.inputs, signature.outputs, call=call)
    monkeypatch.setattr(predictor_module, "loaded", lambda _: model)
    monkeypatch.setattr(predictor_module, "_tensor", lambda column: column)
    made = predictor_of(signature, ["x"], [OutputColumn("y", "y")], batch_size)
    return made, calls


@pytest.mark.parametrize("batch_size", [-1, 0, None])
def test_a_batch_of_no_rows_is_refused_at_the_driver(monkeypatch, batch_size):
    """It was taken for ever in each task, or an IndexError there."""
    with pytest.raises(SettingsError, match=f"batch_size must be an int >= 1, got {batch_size}"):
        wide(monkeypatch, 1, batch_size)


def test_large_answers_do_not_wait_for_the_other_rows_of_their_batch(monkeypatch):
    """A decoder of images makes 8 GB of 10,000 rows."""
    predictor, calls = wide(monkeypatch, 16, batch_size=2)
    monkeypatch.setattr(predictor_module, "ANSWER_BYTES", 4 * 16 * 4)
    batch = pa.record_batch({"x": np.zeros(11)})
    seen = [(found.num_rows, len(calls)) for found in predictor.results(0, [batch])]
    assert seen == [(4, 2), (4, 4), (2, 5), (1, 6)]  # the last rows come with the partition's end


VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def test_sparse_vectors_become_dense_one_batch_of_the_model_at_a_time(monkeypatch):
    """10,000 rows of a HashingTF are 21 GB as one dense matrix."""
    predictor, calls = wide(monkeypatch, 1, batch_size=16)
    signature = dataclasses.replace(
        predictor.signature, inputs={"x": TensorInfo("float32", (4096,))}
    )
    sums: list[float] = []
    made: list[int] = []
    spread = spark_vectors.spread

    def noted(array):
        values, offsets = spread(array)
        made.append(int(offsets[-1]))
        return values, offsets

    def call(tensors):
        calls.append(len(tensors[0]))
        sums.extend(tensors[0].sum(axis=1))
        return [Answer(len(tensors[0]), 1)]

    monkeypatch.setattr(encoder, "spread", noted)
    model = LoadedModel(signature.digest, signature.inputs, signature.outputs, call=call)
    monkeypatch.setattr(predictor_module, "loaded", lambda _: model)
    predictor = dataclasses.replace(predictor, signature=signature)
    rows = [
        {"type": 0, "size": 4096, "indices": [row % 4096], "values": [float(row)]}
        for row in range(1000)
    ]
    whole = pa.record_batch({"x": pa.array(rows, VECTOR)})
    # The first batch is no multiple of 16, so the second fills the model's batch before it.
    found = predictor.results(0, [whole.slice(0, 9), whole.slice(9)])
    assert [each.num_rows for each in found] == [992, 8]
    assert max(made) <= 16 * 4096
    assert calls == [16] * 62 + [8]
    assert sums == list(range(1000))
    assert len(made) == 64  # no rows are cut smaller than the model's batch asks for


def test_dense_vectors_are_read_as_one_view(monkeypatch):
    predictor, _ = wide(monkeypatch, 1, batch_size=2)
    signature = dataclasses.replace(predictor.signature, inputs={"x": TensorInfo("float64", (2,))})
    reads: list[int] = []
    of = Inputs.of

    def noted(self, batch):
        reads.append(batch.num_rows)
        return of(self, batch)

    monkeypatch.setattr(Inputs, "of", noted)
    batch = pa.record_batch({"x": pa.array([{"type": 1, "values": [1.0, 2.0]}] * 7, VECTOR)})
    predictor = dataclasses.replace(predictor, signature=signature)
    assert sum(each.num_rows for each in predictor.results(0, [batch])) == 7
    assert reads == [7]


def test_more_values_than_an_array_column_holds_are_refused(monkeypatch):
    predictor, _ = wide(monkeypatch, 2**30, batch_size=2)
    text = r"output 'y': 2 rows of \(1073741824,\) are 2147483648 values, .* fewer than 2 rows"
    with pytest.raises(SettingsError, match=text):
        list(predictor.results(0, [pa.record_batch({"x": np.zeros(2)})]))


def test_several_columns_for_lists_of_any_length_are_refused():
    signature = ModelSignature(
        source=ModelSource(path="/m.keras"),
        digest="",
        inputs={"x": TensorInfo("int64", (None,), is_ragged=True)},
        outputs={"y": FLOATS},
    )
    predictor_of(signature, ["a"], [], 1)
    with pytest.raises(SettingsError, match=r"2 columns are given for input 'x'.*F\.array\(a, b\)"):
        predictor_of(signature, ["a", "b"], [], 1)


def test_names_that_the_model_lacks_are_refused_with_those_it_has():
    signature = ModelSignature(
        source=ModelSource(path="/m.keras"), digest="", inputs={"x": FLOATS}, outputs={"y": FLOATS}
    )
    signature.check(["x"], ["y"])
    for inputs, outputs in (([], ["y"]), (["x", "z"], ["y"]), (["x"], ["y", "y"]), (["x"], [])):
        with pytest.raises(SettingsError, match=r"/m.keras has (x|y) float32\[2\]; name"):
            signature.check(inputs, outputs)
    pair = OutputColumn("y", "p", "number")
    predictor = Predictor(
        signature=signature, columns=("a",), inputs=(("x", (0,)),), outputs=(pair,), batch_size=1
    )
    with pytest.raises(SettingsError, match="not one number per row; read it as an array"):
        predictor.schema()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.array([7, 2**53 + 1]), "9007199254740993"),
        (np.array([7, -(2**53) - 1]), "-9007199254740993"),
        (np.array([7, 2**63 + 1025], np.uint64), "9223372036854776833"),
    ],
)
def test_integers_that_share_one_double_do_not_fit_a_float_input(given, text, dtype):
    """They are ids or times: the model answered for another one, without a word."""
    found = fitted(given, "x", TensorInfo(dtype, ()))
    assert isinstance(found, Misfit)
    assert found.place == 1
    assert f"value {text} does not fit input 'x', {dtype}" in found.text
    assert "keras.Input" in found.text


def test_a_number_just_above_those_of_bfloat16_does_not_become_infinite():
    found = fitted(np.array([1.0, np.inf, 3.4e38], np.float32), "x", TensorInfo("bfloat16", ()))
    assert isinstance(found, Misfit)
    assert found.place == 2
    values = fitted(np.array([1.0, np.inf, 3.3e38], np.float32), "x", TensorInfo("bfloat16", ()))
    assert isinstance(values, np.ndarray)
    assert values.dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_integers_that_a_double_holds_fit_a_float_input(kind):
    given = np.array([0, 2**53], kind)
    found = fitted(given, "x", TensorInfo("float64", ()))
    assert not isinstance(found, Misfit)
    assert found.astype(kind).tolist() == given.tolist()
