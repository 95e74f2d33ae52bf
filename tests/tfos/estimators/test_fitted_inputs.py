"""Features of a fit have the dtypes and shapes that a prediction gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from feeding.columnar.batch import Ragged
from feeding.errors import RowError
from tfos.errors import SettingsError
from tfos.estimators import program
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.fitted_inputs import FittedInputs, map_fn_of
from tfos.feed.dataframe_columns import Leaf
from tfos.keras.data.columns import ColumnRoles, RowMapper
from tfos.predict.signature import TensorInfo
from tfos.predict.tensors import Inputs

COLUMNS = {
    "number": np.array([1.0, 2.0, 3.0, 4.0]),
    "other": np.array([5, 6, 7, 8]),
    "pair": np.arange(8.0).reshape(4, 2),
    "square": np.arange(16.0).reshape(4, 2, 2),
    "text": np.array(["a", "b", "c", "d"], object),
}


def mapper_of(features: Any, labels: Any, map_fn: Any, dtypes: Any = (None,)) -> RowMapper:
    roles = ColumnRoles(feature_cols=features, label_cols=labels, dtypes=dtypes, map_fn=map_fn)
    return RowMapper(roles, "float32")


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
    plan = ColumnPlan(features=tuple(names), labels=("number",))
    selected = plan.selectors(["x"], ["y"])["feature_cols"]
    shapes = FittedInputs((("x", infos[0]),), 1)
    x, y = mapper_of(selected, "number", shapes)(COLUMNS)
    assert isinstance(predicted, np.ndarray)
    assert x.dtype == predicted.dtype
    np.testing.assert_array_equal(x, predicted)
    np.testing.assert_array_equal(y, COLUMNS["number"])


def test_each_input_has_its_shape_and_labels_are_side_by_side():
    infos = {"a": TensorInfo("float32", (2, 1)), "b": TensorInfo("object", (1,))}
    shapes = FittedInputs(tuple(infos.items()), 1)
    mapper = mapper_of({"a": "pair", "b": "text"}, ["pair", "number"], shapes, None)
    x, y = mapper(COLUMNS)
    assert (x["a"].shape, x["b"].shape, y.shape) == ((4, 2, 1), (4, 1), (4, 3))


def test_what_fits_no_input_is_left_to_keras_and_lists_of_several_lengths_to_the_user():
    ragged = Ragged(np.arange(3.0), np.array([0, 1, 1, 2, 3]))
    shapes = FittedInputs((("x", TensorInfo("float64", (5,))),), 1)
    assert shapes(COLUMNS["pair"])[0].shape == (4, 2)
    (found,) = shapes(ragged)
    assert (found.values.tolist(), found.offsets.tolist()) == ([0, 1, 2], [0, 1, 1, 2, 3])
    with pytest.raises(SettingsError, match=r"lists of several lengths .* side by side. Pad"):
        shapes({"a": ragged, "pair": COLUMNS["pair"]})


def test_a_model_whose_inputs_are_not_fixed_takes_what_is_fed():
    assert map_fn_of(SimpleNamespace(inputs=None), ("a",)) is None


def both(info, column):
    """Return what a fit trains on, and what a prediction asks for; or why not, of each."""
    mapper = mapper_of("a", "a", FittedInputs((("x", info),), 1, ("a",)))
    inputs = Inputs(["a"], [("x", (0,))], [info], 0)
    batch = pa.record_batch({"a": pa.array(column)})
    return outcomes(lambda: mapper({"a": column})[0], lambda: inputs.of(batch)[0])


def outcomes(*asked):
    """Return what each function returns, or the text of its refusal."""
    found: list[Any] = []
    for ask in asked:
        try:
            found.append(ask())
        except (SettingsError, RowError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("dtype", "column"),
    [
        ("int64", [16777217.0]),
        ("float64", [1_700_000_001.0]),
        ("float16", [1.0 + 2**-11 + 2**-30]),  # rounded twice it is 1.0
        ("int32", [1, 2]),
        ("float32", [2**24 + 1]),
        ("float32", [float("inf"), -float("inf"), 3.4e38]),
    ],
)
def test_a_fit_trains_on_the_numbers_that_a_prediction_asks_for(dtype, column):
    trained, asked = both(TensorInfo(dtype, ()), np.array(column))
    assert trained.dtype.name == asked.dtype.name == dtype
    assert trained.tolist() == asked.tolist()
    if dtype in ("int64", "float64"):
        assert trained.tolist() == column


@pytest.mark.parametrize(
    ("info", "column"),
    [
        (TensorInfo("int32", ()), [2.0, 2.7]),
        (TensorInfo("int32", ()), [2.0, float("nan")]),
        (TensorInfo("int32", ()), [5, 2**32 + 5]),
        (TensorInfo("int64", ()), [1.0, 2.0**53]),
        (TensorInfo("int64", (), is_id=True), [1.0, 2.0]),
        (TensorInfo("float32", ()), [float("inf"), 1e39]),
        (TensorInfo("float16", ()), [1.0, -7e4]),
        (TensorInfo("float16", ()), [1, 70_000]),
    ],
)
def test_a_fit_refuses_the_numbers_that_a_prediction_refuses(info, column):
    trained, asked = both(info, np.array(column))
    row = 0 if info.is_id else 1
    text = str(asked).removeprefix(f"partition 0, row {row}, column 'a': ")
    assert isinstance(asked, str)
    assert str(trained) == f"feature column 'a', row {row} of a batch: {text}"


@pytest.mark.parametrize(
    ("dtype", "numbers"), [("int64", [2**53 + 1, 2**53 + 3]), ("float32", [1, 2])]
)
def test_integers_beside_a_double_are_trained_as_a_prediction_asks_for_them(dtype, numbers):
    trained, asked = both_of_two(dtype, numbers)
    assert isinstance(trained, np.ndarray), trained
    assert trained.tolist() == asked.tolist() == [[each, 4] for each in numbers]
    assert trained.dtype == asked.dtype == dtype


def test_integers_beside_a_double_are_refused_where_floats_would_round_them():
    trained, asked = both_of_two("float32", [5, 2**53 + 1])
    text = str(asked).removeprefix("partition 0, row 1, column 'n': ")
    assert "integers of this size share one double" in text
    assert trained == f"feature column 'n', row 1 of a batch: {text}"


def both_of_two(dtype, numbers):
    """Return what `both` does, for integers and a double that fill one input."""
    info, features = TensorInfo(dtype, (2,)), ("n", "x")
    columns = {"n": np.array(numbers), "x": np.full(len(numbers), 4.0)}
    plan = ColumnPlan(features=features, labels=("x",))
    selected = plan.selectors(["in"], ["out"])
    fit = FittedInputs((("in", info),), 1, features)
    mapper = mapper_of(selected["feature_cols"], "x", fit)
    inputs = Inputs(features, [("in", (0, 1))], [info], 0)
    return outcomes(lambda: mapper(columns)[0], lambda: inputs.of(pa.record_batch(columns))[0])


def test_items_of_lists_of_any_length_are_refused_by_their_row():
    info = TensorInfo("int32", (None,), is_ragged=True)
    ragged = Ragged(np.array([1.0, 2.0, 2.5]), np.array([0, 0, 2, 2, 3]))
    with pytest.raises(SettingsError, match=r"feature column 'b', row 3 of a batch: value 2\.5"):
        FittedInputs((("a", info), ("b", info)), 1, ("a", "b"))({"b": ragged})
    rows = pa.array([[], [1.0, 2.0], [], [2.5]])
    with pytest.raises(RowError, match=r"row 3, column 'a': value 2\.5"):
        Inputs(["a"], [("x", (0,))], [info], 0).of(pa.record_batch({"a": rows}))


def test_timestamps_that_model_fn_would_round_are_refused_by_the_worker_before_it_trains(
    monkeypatch,
):
    """The driver knows no dtypes of model_fn=, and workers get timestamps as integers."""
    times = (Leaf("at", "timestamp"), Leaf("seen", "timestamp_ntz", is_list=True))
    read: list[Any] = []
    ctx = SimpleNamespace(dataset=lambda *_, **given: read.append(given))

    def begin(*dtypes: str, features: tuple[str, ...]) -> None:
        infos = tuple((f"in{n}", TensorInfo(dtype, (1,))) for n, dtype in enumerate(dtypes))
        names = tuple(name for name, _ in infos)
        monkeypatch.setattr(program, "tensors_of", lambda model: (names, ("out",)))
        monkeypatch.setattr(
            program, "map_fn_of", lambda model, columns: FittedInputs(infos, 1, columns)
        )
        plan = ColumnPlan(features=features, labels=("y",))
        program.FedData(plan, 8, times=times).dataset(ctx, None)

    for dtypes, features, column in (
        (("float32",), ("n", "at"), "at: timestamp"),
        (("int64", "float16"), ("at", "seen"), r"seen: array<timestamp_ntz>"),
    ):
        with pytest.raises(SettingsError, match=f"column {column}.*rounds the microseconds"):
            begin(*dtypes, features=features)
    assert not read
    begin("int64", "float32", features=("at", "n"))
    assert len(read) == 1
