"""Features of a fit have the shapes that a prediction gives them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from feeding.columnar.batch import Ragged
from tfos.errors import SettingsError
from tfos.estimators.input_shapes import InputShapes, map_fn_of
from tfos.keras.data.columns import RowMapper
from tfos.predict.signature import TensorInfo
from tfos.predict.tensors import Inputs

COLUMNS = {
    "number": np.array([1.0, 2.0, 3.0, 4.0]),
    "other": np.array([5, 6, 7, 8]),
    "pair": np.arange(8.0).reshape(4, 2),
    "square": np.arange(16.0).reshape(4, 2, 2),
    "text": np.array(["a", "b", "c", "d"], object),
}


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (["pair"], (2,)),
        (["pair", "number"], (3,)),
        (["number", "square", "other"], (6,)),
        (["number", "other"], (2,)),
        (["pair", "number", "other"], (2, 2)),
        (["square"], (4,)),
        (["square"], (None, 2)),
        (["number"], (1,)),
    ],
)
def test_columns_are_side_by_side_as_in_a_prediction(names, shape):
    places = tuple(range(len(names)))
    infos = [TensorInfo("float32", shape)]
    (predicted,) = Inputs(names, [("x", places)], infos, 0).of(
        pa.RecordBatch.from_arrays([pa.array(COLUMNS[name].tolist()) for name in names], names)
    )
    selected = names if len(names) > 1 else names[0]
    mapper = RowMapper(selected, "number", map_fn=InputShapes((("x", shape),), 1))
    x, y = mapper(COLUMNS)
    assert isinstance(predicted, np.ndarray)
    assert x.dtype == predicted.dtype
    np.testing.assert_array_equal(x, predicted)
    np.testing.assert_array_equal(y, COLUMNS["number"])


def test_each_input_has_its_shape_and_labels_are_side_by_side():
    shapes = InputShapes((("a", (2, 1)), ("b", (1,))), 1)
    mapper = RowMapper({"a": "pair", "b": "text"}, ["pair", "number"], map_fn=shapes)
    x, y = mapper(COLUMNS)
    assert (x["a"].shape, x["b"].shape, y.shape) == ((4, 2, 1), (4, 1), (4, 3))


def test_what_fits_no_input_is_left_to_keras_and_lists_of_several_lengths_to_the_user():
    ragged = Ragged(np.arange(3.0), np.array([0, 1, 1, 2, 3]))
    shapes = InputShapes((("x", (5,)),), 1)
    assert shapes(COLUMNS["pair"])[0].shape == (4, 2)
    assert shapes(ragged) == (ragged,)
    with pytest.raises(SettingsError, match=r"lists of several lengths .* side by side: pad"):
        shapes((ragged, COLUMNS["pair"]))


def test_a_model_whose_inputs_are_not_fixed_takes_what_is_fed():
    assert map_fn_of(SimpleNamespace(inputs=None)) is None
