"""Plain `model.fit` in a slot: its part of the data, and what is not distributed."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from tests.support.keras_training import blobs, serving, together
from tfos.errors import NotDistributed, SettingsError, UnsupportedModel
from tfos.keras.data import dataset_order
from tfos.keras.fit.callbacks import of_rank
from tfos.keras.fit.distribute import distribute
from tfos.runner.batch_rows import refusal_in
from tfos.runner.mirrored_rank import (
    distributed_fits,
    part_of_batches,
    take_part,
)

tf = pytest.importorskip("tensorflow")
pandas = pytest.importorskip("pandas")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_all_slots_are_the_batches_of_one_process(size):
    x, y = np.arange(70).reshape(35, 2), np.arange(35)
    dataset = tf.data.Dataset.from_tensor_slices(({"a": x}, y)).batch(8)
    parts = [list(part_of_batches(dataset, rank, size)) for rank in range(size)]
    for number, (_, expected) in enumerate(dataset):
        found = [part[number] for part in parts if number < len(part)]
        rows = np.concatenate([each[1].numpy() for each in found])
        np.testing.assert_array_equal(rows, expected.numpy())
        np.testing.assert_array_equal(np.concatenate([each[0]["a"] for each in found]), x[rows])


def rows_of_range(count, batch_size):
    return tf.data.Dataset.range(count).batch(batch_size)


@pytest.mark.parametrize(
    ("dataset", "size", "text"),
    [
        (rows_of_range(8, 1), 2, "the first 8 batches have at most 1 rows for 2 slots"),
        (rows_of_range(8, 1).repeat(), 2, "the first 100 batches have at most 1 rows for 2 slots"),
        (rows_of_range(9, 3).shuffle(4), 4, "the first 3 batches have at most 3 rows for 4 slots"),
        (rows_of_range(1, 8), 2, "the first 1 batches have at most 1 rows for 2 slots"),
    ],
)
def test_batches_without_a_row_for_the_first_slot_are_refused(dataset, size, text):
    for rank in range(size):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text) as caught:
            list(part_of_batches(dataset, rank, size))
        assert str(refusal_in(caught.value)).endswith(
            "train none. Use larger batches, or fewer slots"
        )
    assert refusal_in(ValueError("other")) is None


def short_first():
    rows = tf.data.Dataset.range(7)
    return rows.filter(lambda row: row < 3).batch(1).concatenate(rows.batch(4))


@pytest.mark.parametrize(
    "make",
    [
        short_first,
        lambda: rows_of_range(9, 2).repeat(2).shuffle(10, seed=3),
        lambda: tf.data.Dataset.range(4).flat_map(lambda row: rows_of_range(row + 1, 2)),
        lambda: rows_of_range(0, 2),
    ],
)
def test_short_batches_anywhere_cost_no_row_while_the_first_slot_has_some(make):
    def rows(dataset):
        try:
            return sorted(int(row) for batch in dataset for row in batch)
        except tf.errors.InvalidArgumentError as error:
            return [str(error)]

    parts = [rows(part_of_batches(make(), rank, 2)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == rows(make())


def test_parts_have_the_structure_of_the_batches():
    ragged, texts = tf.ragged.constant([[1], [2, 3], []]), tf.constant(["a", "b", "c"])
    for given in (
        ({"a": ragged, "b": texts}, texts),
        {"a": texts},
        texts,
        ((texts, ragged), {"y": texts}, texts),
    ):
        dataset = tf.data.Dataset.from_tensor_slices(given).batch(3)
        assert part_of_batches(dataset, 1, 2).element_spec == dataset.element_spec
        assert len(list(part_of_batches(dataset, 1, 2))) == 1


class Labelled(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def test_rows_that_are_named_tuples_are_parted():
    rows = Labelled(np.arange(8), np.arange(8) * 2)
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    assert keras.tree.flatten(dataset.element_spec)[0].shape[0] is None
    for rank in range(2):
        part = part_of_batches(dataset, rank, 2)
        assert part.element_spec == dataset.element_spec
        found = Labelled(*map(np.concatenate, zip(*part.as_numpy_iterator(), strict=True)))
        own = slice(rank * 2, rank * 2 + 2)
        np.testing.assert_array_equal(found.x, np.concatenate([rows.x[:4][own], rows.x[4:][own]]))
        np.testing.assert_array_equal(found.y, found.x * 2)


def one(row):
    return tf.data.Dataset.from_tensors(row)


def always(dataset, _row):
    return dataset


def mapped_at_once(dataset):
    return dataset.map(lambda row: row, num_parallel_calls=2, deterministic=False)


def unordered(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options).map(lambda row: row)


@pytest.mark.parametrize(
    "change",
    [
        unordered,
        lambda rows: mapped_at_once(rows).repeat(2),
        lambda rows: rows.interleave(
            lambda row: tf.data.Dataset.from_tensors(row), num_parallel_calls=2, deterministic=False
        ),
        lambda rows: rows.zip(rows, unordered(rows)).map(lambda row, _: row),
        lambda rows: rows.flat_map(lambda row: mapped_at_once(one(row))),
        lambda rows: rows.interleave(lambda row: mapped_at_once(one(row))),
        lambda rows: rows.interleave(lambda row: mapped_at_once(one(row)), num_parallel_calls=2),
        lambda rows: rows.flat_map(lambda row: unordered(one(row))),
        lambda rows: rows.flat_map(functools.partial(always, mapped_at_once(rows))),
        lambda rows: rows.map(lambda row: mapped_at_once(one(row))).flat_map(lambda each: each),
        lambda rows: rows.group_by_window(
            lambda row: row % 2, lambda _, window: mapped_at_once(window), window_size=4
        ),
        lambda rows: rows.map(lambda row: mapped_at_once(one(row)).reduce(row, lambda _, x: x)),
    ],
)
def test_datasets_without_an_order_are_refused(change):
    rows = change(tf.data.Dataset.range(32))
    with pytest.raises(SettingsError, match=r"deterministic.*False.*Set it to True"):
        part_of_batches(rows.batch(8), 0, 2)


def too_large(*_args, **_kwargs):
    raise tf.errors.ResourceExhaustedError(None, None, "too large")


@pytest.mark.parametrize("written", [too_large, lambda *_args, **_kwargs: tf.constant(b"")])
def test_a_dataset_whose_functions_cannot_be_read_is_parted_with_a_warning(
    monkeypatch, caplog, written
):
    """TensorFlow writes a dataset of more than 2 GiB in memory as nothing."""
    rows = tf.data.Dataset.range(32).flat_map(one)
    monkeypatch.setattr(tf.data.Dataset, "_as_serialized_graph", written)
    assert len(list(part_of_batches(rows.batch(8), 0, 2))) == 4
    told = [each.getMessage() for each in caplog.records if each.name == dataset_order.__name__]
    assert len(told) == 1
    assert "deterministic=False" in told[0]
    assert "flat_map" in told[0]


def test_datasets_with_an_order_are_parted_whatever_computes_them_at_once():
    rows = tf.data.Dataset.range(32).map(lambda row: row, num_parallel_calls=2)
    rows = rows.map(lambda row: tf.numpy_function(np.copy, [row], tf.int64)).shuffle(8)
    rows = rows.interleave(one, num_parallel_calls=2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0], [1]), 0)
    rows = rows.flat_map(lambda row: one(row + tf.cast(table.lookup(tf.constant(0)), row.dtype)))
    rows = rows.window(2).flat_map(lambda window: window.batch(2)).unbatch()
    options = tf.data.Options()
    options.deterministic = True
    dataset = rows.shuffle(4, seed=1).with_options(options).batch(8)
    assert len(list(part_of_batches(dataset, 0, 2))) == 4


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "of", [np.asarray, tf.constant, lambda y: pandas.Series(y, index=y[::-1] + 0.5)]
)
def test_the_parts_of_arrays_are_the_batches_of_one_process(size, of):
    x, y = np.arange(70).reshape(35, 2), np.arange(35)
    given = of(y)
    found: list[list[int]] = [[] for _ in range(5)]
    for rank in range(size):
        arguments: dict[str, Any] = {"x": [x, x], "y": given, "batch_size": 8}
        take_part(arguments, rank, size)
        rows = np.asarray(arguments["y"])
        assert type(arguments["y"]) is type(given)
        np.testing.assert_array_equal(arguments["x"][1], x[rows])
        for number, first in enumerate(range(0, len(rows), arguments["batch_size"])):
            found[number] += rows[first : first + arguments["batch_size"]].tolist()
    assert [sorted(batch) for batch in found] == [y[at : at + 8].tolist() for at in range(0, 35, 8)]


@pytest.mark.parametrize(
    "of", [np.asarray, tf.constant, lambda y: pandas.Series(y, index=y[::-1] + 0.5)]
)
def test_rows_held_back_for_validation_are_those_of_one_process_on_each_slot(of):
    x, y = np.arange(20).reshape(10, 2), np.arange(10)
    for rank, trained in ((0, [0, 2, 4, 6]), (1, [1, 3, 5])):
        given: dict[str, Any] = {"x": {"a": x}, "y": of(y), "batch_size": 4}
        given["validation_split"] = 0.25
        take_part(given, rank, 2)
        np.testing.assert_array_equal(given["y"], trained)
        np.testing.assert_array_equal(given["x"]["a"], x[trained])
        held_x, held_y, held_weight = given["validation_data"]
        np.testing.assert_array_equal(held_y, [7, 8, 9])
        np.testing.assert_array_equal(held_x["a"], x[7:])
        assert held_weight is None
        assert not given.get("validation_split")


def test_validation_data_leave_all_rows_to_training_whatever_the_split():
    own = (np.zeros((3, 2)), np.zeros(3))
    given = {
        "x": np.zeros((10, 2)),
        "y": np.arange(10),
        "validation_data": own,
        "validation_split": 0.5,
    }
    take_part(given, 1, 2)
    assert given["validation_data"] is own
    np.testing.assert_array_equal(given["y"], [1, 3, 5, 7, 9])


def test_counts_over_rows_held_back_for_validation_are_those_of_one_process(caplog):
    x, y = blobs(101)

    def make():
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, "sigmoid")])
        count = keras.metrics.FalsePositives(name="wrong")
        loss = "binary_crossentropy"
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=[count], jit_compile=False)
        return model

    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    given = {"x": x, "y": y[:, None], "batch_size": 20, "validation_split": 0.25, **options}
    expected = make().fit(**given).history
    assert expected["val_wrong"][0] > 1
    models = [make() for _ in range(2)]
    with serving(num_workers=2) as cluster:

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            own = dict(given)
            take_part(own, rank, 2)
            return model.fit(**own).history

        for history in together(work, 2):
            for name, values in expected.items():
                np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    assert "different rows" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x": iter([1])}, r"fit\(x=list_iterator\): 3 slots share arrays or a tf.data.Dataset"),
        ({"x": np.ones((9, 1)), "batch_size": 2}, "batch_size of 2 for 3 slots"),
        ({"x": np.ones((2, 1))}, "rows of 2 for 3 slots"),
        ({"x": np.ones((9, 1)), "y": [0.0] * 9}, r"fit\(y=list\): 3 slots share arrays"),
        ({"x": np.float32(1)}, r"fit\(x=float32\): 3 slots share arrays"),
        *(
            (
                {"x": np.ones((100, 1)), "batch_size": batch_size, **beside},
                r"different numbers of rows \(x: 100; .*150\)",
            )
            for batch_size in (32, 33)  # parted by indices, and by a slice
            for beside in (
                {"y": np.ones(150)},
                {"y": [np.ones(100), np.ones(150)]},
                {"y": np.ones(100), "sample_weight": np.ones(150)},
            )
        ),
    ],
)
def test_data_that_slots_cannot_share_are_refused(arguments, text):
    with pytest.raises(SettingsError, match=text):
        take_part(arguments, 0, 3)


def test_every_fit_is_distributed_and_what_trains_beside_it_is_refused():
    x, y = blobs(64)
    importlib.import_module("tfos.keras.fit.local")  # it has a fit of its own
    plain_fit = keras.Model.fit

    class OwnFit(keras.Sequential):  # type: ignore[misc]  # keras has no types
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    def make(kind=keras.Sequential):
        model = kind([keras.Input((20,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        return model

    with serving(num_workers=1) as cluster:
        context = cluster.contexts[0]
        ctx: Any = SimpleNamespace(
            rank=0,
            num_workers=2,  # so that this slot takes half; its servers wait for it alone
            distribute=lambda model, consistency: distribute(
                model, context, consistency=consistency
            ),
        )
        with distributed_fits(ctx) as models:
            with pytest.raises(NotDistributed, match=r"train_on_batch\(\) trains this slot's"):
                make().train_on_batch(x, y)
            with pytest.raises(UnsupportedModel, match=r"OwnFit overrides fit\(\)"):
                make(OwnFit).fit(x, y)
            model = make()
            for _ in range(2):
                model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            assert models == [model]
            one_each = tf.data.Dataset.from_tensor_slices((x, y)).batch(1)
            with pytest.raises(SettingsError, match=r"^the first 64 batches have at most 1 rows"):
                model.fit(one_each, shuffle=False, verbose=0)
        assert cluster.rows(0) == 2 * 2 * 32
        assert cluster.pushes == 2 * 2 * 4
    assert keras.Model.fit is plain_fit


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_files_of_callbacks_are_written_by_the_first_slot_alone(rank, tmp_path):
    x, y = blobs(32)
    seen: list[int] = []
    writing = [
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"),
        keras.callbacks.CSVLogger(tmp_path / "epochs.csv"),
        keras.callbacks.TensorBoard(tmp_path / "logs"),
    ]
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: seen.append(epoch))
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with serving(num_workers=1) as cluster:
        ctx: Any = SimpleNamespace(rank=rank, num_workers=2)
        ctx.distribute = functools.partial(distribute, ctx=cluster.contexts[0])
        with distributed_fits(ctx):
            model.fit(x, y, batch_size=16, verbose=0, callbacks=[*writing, own])
    assert seen == [0]
    written = sorted(each.name for each in tmp_path.iterdir())
    assert written == ([] if rank else ["best.keras", "epochs.csv", "logs"])


@pytest.mark.parametrize("rank", [0, 1])
def test_callbacks_in_any_shape_lose_those_that_write_files(rank):
    saves = keras.callbacks.ModelCheckpoint("best.keras")
    stops = keras.callbacks.EarlyStopping("loss")
    ready = keras.callbacks.CallbackList([saves, stops])
    orbax = object.__new__(keras.callbacks.OrbaxCheckpoint)  # whose packages are not here
    assert of_rank(None, rank) is None
    assert of_rank([orbax, stops], rank) == ([stops] if rank else [orbax, stops])
    assert of_rank(saves, rank) == ([] if rank else saves)
    assert list(of_rank((saves, stops), rank)) == ([stops] if rank else [saves, stops])
    assert of_rank([[saves], stops], rank) == ([stops] if rank else [[saves], stops])
    assert of_rank(ready, rank) is ready
    assert (saves in ready.callbacks, stops in ready.callbacks) == (not rank, True)


SUM = keras.losses.MeanSquaredError(reduction="sum")


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (SUM, r"MeanSquaredError\(reduction='sum'\)"),
        ([SUM, "mse"], r"with MeanSquaredError\(reduction='sum'\), and"),
        ({"a": "mse", "b": keras.losses.MeanSquaredError(reduction=None)}, "reduction=None"),
        (["mse", keras.losses.mean_squared_error], None),
        ({"a": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}, None),
    ],
)
def test_a_loss_that_sums_over_the_batch_of_a_slot_is_refused(loss, named, caplog):
    def make():
        data = keras.Input((2,))
        outputs = {name: keras.layers.Dense(1, name=name)(data) for name in "ab"}
        made = keras.Model(data, outputs if isinstance(loss, dict) else [*outputs.values()])
        made.compile("sgd", loss, jit_compile=False)
        return made

    trained: list[Any] = []

    def ctx(size) -> Any:
        return SimpleNamespace(rank=0, num_workers=size, distribute=distributing)

    def distributing(model, consistency):
        trained.append(model)
        raise InterruptedError

    with distributed_fits(ctx(2)):
        told = ""
        try:
            make().fit(np.ones((4, 2)), verbose=0)
        except (UnsupportedModel, InterruptedError) as error:
            told = str(error)
    assert re.search(named, told) if named else not told
    with distributed_fits(ctx(1)), pytest.raises(InterruptedError):
        make().fit(np.ones((4, 2)), verbose=0)
    assert len(trained) == 1 + (not named)
    with serving(num_workers=2) as cluster:
        distribute(make(), cluster.contexts[0], consistency="sync")
        assert ("pass reduction='sum'" in caplog.text.lower()) is bool(named)


class OwnStep(keras.Model):  # type: ignore[misc]
    def train_step(self, data):
        raise NotImplementedError


class OwnLoss(keras.Model):  # type: ignore[misc]
    def compute_loss(self, *args, **kwargs):
        raise NotImplementedError


class MeanLoss(keras.losses.Loss):  # type: ignore[misc]
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2)


@pytest.mark.parametrize(
    ("kind", "loss", "optimizer"),
    [
        (OwnStep, keras.losses.MeanSquaredError(reduction=None), "sgd"),
        (OwnLoss, SUM, "sgd"),
        (keras.Model, MeanLoss(reduction="none"), "sgd"),
        (keras.Model, SUM, "adam"),
    ],
)
def test_a_loss_that_may_be_right_is_trained_with_a_warning(kind, loss, optimizer, caplog):
    def make():
        data = keras.Input((2,))
        made = kind(data, keras.layers.Dense(1)(data))
        made.compile(optimizer, loss, jit_compile=False)
        return made

    def distributing(model, consistency):
        raise InterruptedError

    ctx: Any = SimpleNamespace(rank=0, num_workers=2, distribute=distributing)
    with distributed_fits(ctx), pytest.raises((InterruptedError, UnsupportedModel)) as ended:
        make().fit(np.ones((4, 2)), verbose=0)
    assert ended.type is InterruptedError
    with serving(num_workers=2) as cluster:
        distribute(make(), cluster.contexts[0], consistency="sync")
    assert "unless your own step or loss takes the mean" in caplog.text


FIRST_IMPORT = """
from types import SimpleNamespace
import keras
from tfos.runner.mirrored_rank import distributed_fits

class Distributed(Exception):
    pass

def distribute(model, consistency):
    raise Distributed

with distributed_fits(SimpleNamespace(rank=0, num_workers=2, distribute=distribute)):
    from tfos.keras import Embedding
    model = keras.Sequential([keras.Input((), dtype="int64"), Embedding(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        model.fit(keras.ops.zeros((4,), "int64"), keras.ops.zeros((4, 1)), verbose=0)
    except Distributed:
        print("distributed")
"""


KERAS_2 = """
import os
from types import SimpleNamespace
os.environ["TF_USE_LEGACY_KERAS"] = "1"
from tfos.errors import UnsupportedModel
from tfos.runner.mirrored_rank import run_mirrored
from tfos.runner.rank_process import RankWork

def train(name):
    import numpy
    import tensorflow as tf
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    model.compile("sgd", "mse")
    getattr(model, name)(numpy.ones((8, 2)), numpy.ones(8))

for size, name in ((1, "fit"), (2, "fit"), (2, "train_on_batch")):
    group = SimpleNamespace(rank=0, size=size, broadcast=lambda seed: seed)
    ctx = SimpleNamespace(rank=0, local_rank=0, num_workers=group.size, hand_over=lambda _: None)
    ctx.rank_group = lambda: group
    try:
        run_mirrored(RankWork(train, (name,), {}), ctx)
        print("\\ntold:", name, "trained")
    except UnsupportedModel as error:
        print("\\ntold:", error)
"""


@pytest.mark.long
def test_keras_2_is_refused_by_the_first_fit_of_several_slots():
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf-keras is not installed")
    found = subprocess.run(
        [sys.executable, "-c", KERAS_2], stdout=subprocess.PIPE, text=True, timeout=100
    )
    kind = "tf_keras.src.engine.sequential.Sequential"
    advice = "tf.keras is Keras 2 here; set TF_USE_LEGACY_KERAS=0 at the driver, or import keras"
    told = [each for each in found.stdout.splitlines() if each.startswith("told: ")]
    assert told == ["told: fit trained"] + [
        f"told: {name}() on 2 slots takes a Keras 3 model, got {kind}. {advice}"
        for name in ("fit", "train_on_batch")
    ]


@pytest.mark.long
def test_a_train_fn_that_imports_tables_does_not_train_them_alone():
    found = subprocess.run(
        [sys.executable, "-c", FIRST_IMPORT], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert found.stdout == "distributed\n"
