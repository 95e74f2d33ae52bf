"""An estimator's program in its workers: what several of them see of a dataset that shuffles."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from types import SimpleNamespace
from typing import Any

import cloudpickle
import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.sql.types import DoubleType

from tests.support.full_disk import file_limit
from tests.support.keras_training import serving
from tfos.errors import NonFiniteGradient, NotCompiled, SettingsError, UnsupportedModel
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.fitted_inputs import map_fn_of
from tfos.estimators.program import EvaluateProgram, FedData, FitProgram, MadeData
from tfos.estimators.recipe import ModelRecipe, content_of, model_of, recipe_of
from tfos.estimators.training import FitSettings
from tfos.keras import Embedding
from tfos.keras.data import dataset_order
from tfos.keras.data.columns import ColumnRoles, RowMapper
from tfos.keras.fit.distribute import distribute
from tfos.keras.fit.epoch_report import LoneEpochReporter
from tfos.ml import KerasModel
from tfos.orca import Estimator
from tfos.predict import loading
from tfos.predict.predictor import predictor_of
from tfos.predict.signature import ModelSource

NUM_ROWS, EPOCHS = 64, 2
SEEN: list[list[int]] = [[] for _ in range(EPOCHS)]
VALIDATED: list[list[int]] = []
GIVEN: list[list[str]] = []
DENSE = pytest.param(functools.partial(keras.layers.Embedding, 5), marks=pytest.mark.long)


def rows_of(dataset):
    """Return the rows of all batches."""
    return [int(row) for batch in dataset.as_numpy_iterator() for row in batch]


@keras.saving.register_keras_serializable(__name__)
class Recording(keras.Sequential):  # type: ignore[misc]  # keras is not checked
    """A model whose fit only reads."""

    def fit(self, x, validation_data=None, callbacks=(), **_):
        """Keep the rows of each epoch, those that validate, and the kinds of callbacks."""
        GIVEN.append([type(each).__name__ for each in callbacks])
        for epoch in SEEN:
            epoch.extend(rows_of(x))
        VALIDATED.append(rows_of(validation_data))


def recording():
    """Return a compiled model."""
    model = Recording([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def shuffled():
    """Return rows in batches, in an order of TensorFlow's random numbers."""
    return tf.data.Dataset.range(NUM_ROWS).shuffle(NUM_ROWS).batch(4)


def context(rank: int) -> SimpleNamespace:
    """Return what the program asks of a worker's context."""
    feed = SimpleNamespace(terminate=lambda: None, should_stop=lambda: True)
    return SimpleNamespace(
        trained_feeds=SimpleNamespace(),
        rank=rank,
        num_workers=2,
        callbacks=list,
        distribute=lambda *_, **__: None,
        get_data_feed=lambda *_, **__: feed,
    )


def alone() -> SimpleNamespace:
    """Return what it asks of the context of the only worker."""
    only = context(0)
    only.num_workers = 1
    return only


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_full_disk_for_the_model_of_a_fit_is_named(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    content = content_of(model)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with file_limit(99), pytest.raises(OSError, match=f"'{tmp_path}/tfos-model-.*model.keras'"):
        model_of(content)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_workers_see_each_row_of_a_shuffled_dataset_once_an_epoch():
    seen = seen_by_two(of_two(shuffled))
    assert [sorted(epoch) for epoch in seen] == [list(range(NUM_ROWS))] * EPOCHS
    assert seen[0] not in (seen[1], sorted(seen[0]))
    # Their metrics are taken for those of the same rows.
    assert [list(range(6))] * 2 == VALIDATED


def seen_by_two(program):
    """Return the rows of each epoch that two workers have read."""
    VALIDATED.clear()
    for kept in SEEN:
        kept.clear()
    for rank in range(2):
        program(None, context(rank))
    return SEEN


def test_files_of_callbacks_are_written_by_the_first_worker_alone():
    def made():
        saves = keras.callbacks.ModelCheckpoint("best.keras")
        return [saves, keras.callbacks.CSVLogger("epochs.csv"), keras.callbacks.TerminateOnNaN()]

    for callbacks in (made, made()):
        GIVEN.clear()
        seen_by_two(dataclasses.replace(of_two(shuffled), callbacks=callbacks))
        assert GIVEN == [["ModelCheckpoint", "CSVLogger", "TerminateOnNaN"], ["TerminateOnNaN"]]


def of_two(make):
    """Return the program of workers that take turns in the batches of a function."""
    return FitProgram(
        recipe=ModelRecipe(model_fn=recording),
        data=MadeData(make),
        validation=MadeData(lambda: tf.data.Dataset.range(6).batch(4)),
        epochs=EPOCHS,
        consistency="async",
        seed=5,
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_workers_draw_numbers_of_their_own():
    """The data's seed, which all of them have, is not the one of their layers."""
    drawn = []

    def drawing():
        drawn.append([float(keras.random.uniform(())), np.random.random(), random.random()])
        return recording()

    seen_by_two(dataclasses.replace(of_two(shuffled), recipe=ModelRecipe(model_fn=drawing)))
    assert not set(drawn[0]) & set(drawn[1])


def test_a_layer_with_a_seed_drops_other_units_in_each_fit():
    """Keras' file has the layer's seed, and not how often it has drawn."""
    model = Recording([keras.Input((1,)), keras.layers.Dropout(0.5, seed=7)])
    model.compile("sgd", "mse")
    states = []
    only = context(0)
    only.distribute = lambda model, **_: states.append(
        tuple(np.asarray(model.layers[0].seed_generator.state))
    )
    for seed, has_trained in ((2, False), (2, True), (4, True)):
        recipe = ModelRecipe(content=content_of(model), has_trained=has_trained)
        dataclasses.replace(of_two(shuffled), recipe=recipe, seed=seed)(None, only)
    assert states[0] == (7, 0)
    assert len(set(states)) == 3


def permuted_by_numpy():
    """Yield the rows in an order that is drawn when they are read."""
    yield from np.random.permutation(NUM_ROWS)


def permuted_by_python():
    """Yield the rows in an order that Python draws."""
    yield from random.sample(range(NUM_ROWS), NUM_ROWS)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("rows", [permuted_by_numpy, permuted_by_python])
def test_workers_see_each_row_of_a_generator_that_shuffles_once_an_epoch(rows, caplog):
    """It draws while it is read, after each worker has had a seed of its own."""
    spec = tf.TensorSpec((), tf.int64)
    program = of_two(lambda: tf.data.Dataset.from_generator(rows, output_signature=spec).batch(4))
    seen = seen_by_two(program)
    assert [sorted(epoch) for epoch in seen] == [list(range(NUM_ROWS))] * EPOCHS
    assert seen[0] not in (seen[1], sorted(seen[0]))
    told = [each.getMessage() for each in caplog.records if each.name == dataset_order.__name__]
    assert len(told) == 2  # by each worker
    assert "default_rng(seed)" in told[0]


def unordered():
    """Return rows in the order in which threads have them."""
    options = tf.data.Options()
    options.deterministic = False
    return shuffled().with_options(options)


def interleaved():
    """Return rows of whichever part is ready first."""
    return tf.data.Dataset.range(NUM_ROWS).interleave(
        lambda row: tf.data.Dataset.from_tensors(row).batch(4),
        num_parallel_calls=2,
        deterministic=False,
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("make", [unordered, interleaved])
def test_a_dataset_without_an_order_is_no_data_of_several_workers(make):
    with pytest.raises(
        SettingsError, match=r"deterministic=False .* trained twice and others never"
    ):
        seen_by_two(of_two(make))
    for kept in SEEN:
        kept.clear()
    of_two(make)(None, alone())
    assert [sorted(epoch) for epoch in SEEN] == [list(range(NUM_ROWS))] * EPOCHS


def every(dataset):
    """Return all of it, of a number that TensorFlow does not know."""
    return dataset.filter(lambda row: row[0] >= 0)


def at_most(dataset, count):
    """Return its first batches."""
    return every(dataset).take(count)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows,
        lambda rows: rows.shuffle(2).prefetch(1),
        every,
        lambda rows: every(rows).shuffle(2).unbatch().batch(3),
        lambda rows: rows.flat_map(tf.data.Dataset.from_tensors).cache(),
    ],
)
def test_a_dataset_without_an_end_is_refused_before_it_trains_for_ever(change):
    """Keras takes an infinite number of batches for an unknown one."""
    made = MadeData(lambda: change(tf.data.Dataset.range(4).batch(2).repeat()))
    for read in (made.held, made.dataset):
        with pytest.raises(SettingsError, match=r"without an end.*Leave out repeat\(\)"):
            read(context(0), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.take(3),
        lambda rows: at_most(rows, 3),
        lambda rows: rows.take_while(lambda row: row[0] < 2),
        lambda rows: tf.data.Dataset.zip(every(rows), tf.data.Dataset.range(3)),
    ],
)
def test_a_part_of_a_dataset_without_an_end_is_data(change):
    dataset = change(tf.data.Dataset.range(4).batch(2).repeat())
    assert MadeData(lambda: dataset).held(context(0), None) is dataset


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_an_input_trains_on_numbers_of_its_own_dtype():
    """A float32 in between would make 1700000000 and 16777216 of them."""
    stack = keras.Sequential([keras.Input((), dtype="float64"), keras.layers.Rescaling(1.0)])
    at, code = keras.Input((1,), dtype="float64"), keras.Input((), dtype="int64")
    pair = keras.Model([at, code], [at, keras.layers.Identity()(code)])
    columns = {"at": np.array([1_700_000_001.0]), "code": np.array([16777217.0])}

    def dataset(batch_size, feed, **given):
        return RowMapper(ColumnRoles(**given), "float32")(columns)

    ctx: Any = SimpleNamespace(dataset=dataset)
    x, y = FedData(ColumnPlan(features=("at",), labels=("code",)), 2).dataset(ctx, stack)
    assert (x.dtype, x.tolist(), y.dtype) == ("float64", [1_700_000_001], "float32")
    plan = ColumnPlan(features=("at", "code"), labels=("at", "code"))
    x, _ = FedData(plan, 2).dataset(ctx, pair)
    assert [each.dtype.name for each in x.values()] == ["float64", "int64"]
    assert [each.item() for each in x.values()] == [1_700_000_001, 16777217]


def shared_score():
    """Return a model of which one layer makes two outputs, compiled by their order."""
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    score = keras.layers.Dense(1, kernel_initializer="zeros", name="score")
    model = keras.Model(
        [a, b], [score(a), score(b), keras.layers.Dense(1, "sigmoid", name="aux")(a)]
    )
    model.compile("sgd", ["mse", "mae", "binary_crossentropy"])
    return model


def named_losses():
    """Return a model of a list of outputs, compiled by their names."""
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    zeros = {"kernel_initializer": "zeros"}
    sides = [keras.layers.Dense(1, name=name, **zeros) for name in ("z", "y")]
    model = keras.Model([a, b], [sides[0](a), sides[1](b), keras.layers.Dense(1, name="x")(a)])
    model.compile("sgd", {"x": "mse", "y": "mae", "z": "mse"})
    return model


def dict_of_outputs():
    """Return a model whose outputs are a dict: columns go by its sorted keys."""
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    zeros = {"kernel_initializer": "zeros"}
    outputs = {
        "r": keras.layers.Dense(1, name="second", **zeros)(b),
        "q": keras.layers.Dense(1, name="first", **zeros)(a),
        "s": keras.layers.Dense(1, name="third")(a),
    }
    model = keras.Model([a, b], outputs)
    model.compile("sgd", {"q": "mse", "r": "mae", "s": "mse"})
    return model


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        dict_of_outputs,
        *(pytest.param(each, marks=pytest.mark.long) for each in (shared_score, named_losses)),
    ],
)
def test_each_label_column_goes_to_the_output_of_its_place(make):
    """Both outputs answer 0: their losses are those of 3 and of -5."""
    columns = {
        "a": np.zeros((4, 1)),
        "b": np.zeros((4, 1)),
        "first": np.full(4, 3.0),
        "second": np.full(4, -5.0),
        "third": np.ones(4),
    }

    def dataset(batch_size, feed, **given):
        rows = RowMapper(ColumnRoles(**given), "float32")(columns)
        return tf.data.Dataset.from_tensors(rows)

    history = keras.callbacks.History()
    ctx = context(0)
    ctx.dataset = dataset
    plan = ColumnPlan(features=("a", "b"), labels=("first", "second", "third"))
    program = FitProgram(
        recipe=ModelRecipe(model_fn=make),
        data=FedData(plan, 4),
        validation=None,
        epochs=1,
        consistency=None,
        callbacks=lambda: [history],
        seed=3,
    )
    program(None, ctx)
    (loss,) = history.history["loss"]
    assert 14 < loss < 15.5  # the other way round: 28


def keyed():
    """Return a model whose inputs and outputs are dicts, in another order than their keys'."""
    zeros = {"kernel_initializer": "zeros", "use_bias": False}
    user, item = keras.Input((1,), name="user"), keras.Input((1,), name="item")
    outputs = {
        "z": keras.layers.Dense(1, name="of_user", **zeros)(user),
        "a": keras.layers.Dense(1, name="of_item", **zeros)(item),
    }
    model = keras.Model({"user": user, "item": item}, outputs)
    model.compile(keras.optimizers.SGD(0.1), {"z": "mse", "a": "mse"})
    return model


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_columns_that_are_called_as_keys_of_a_dict_train_and_predict_these():
    """Of a dict the order is that of its sorted keys: each column went to the other key."""
    columns = {"user": [1.0, 2.0], "item": [1.0, -1.0], "z": [10.0, 20.0], "a": [-3.0, 3.0]}
    plan = ColumnPlan(features=("user", "item"), labels=("z", "a"))
    recipe = recipe_of(keyed(), None)
    plan.check_model([(name, DoubleType()) for name in columns], recipe.inputs, recipe.outputs)
    model = keyed()
    ctx: Any = SimpleNamespace(dataset=lambda size, feed, **given: fed(columns, given))
    model.fit(FedData(plan, 2).dataset(ctx, model), epochs=60, verbose=0)

    signature = loading.read_signature(ModelSource(content=content_of(model)))
    params = KerasModel(b"").setPredictionCols(["z", "a"])
    outputs = params._outputs(signature, ["user", "item"])
    asked = predictor_of(signature, plan.features, outputs, 2)
    batch = pa.RecordBatch.from_pydict({name: columns[name] for name in plan.features})
    (found,) = asked.results(0, iter([batch]))
    assert [value for (value,) in found["z"].to_pylist()] == pytest.approx(columns["z"], rel=0.01)
    assert [value for (value,) in found["a"].to_pylist()] == pytest.approx(columns["a"], rel=0.01)


def fed(columns, given):
    """Return a dataset of one batch, as ctx.dataset makes one of these columns."""
    mapper = RowMapper(ColumnRoles(**{"dtypes": (None,), **given}), "float32")
    arrays = {name: np.array(values, np.float32) for name, values in columns.items()}
    return tf.data.Dataset.from_tensors(mapper(arrays))


@keras.saving.register_keras_serializable(__name__)
class Free(keras.Model):  # type: ignore[misc]  # keras is not checked
    """A model of which no file tells the inputs."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        """Return three numbers per row."""
        return self.dense(x)


def free():
    """Return such a model, which has weights."""
    model = Free()
    model.compile("sgd", "mse")
    model(np.ones((1, 1), "float32"))
    return model


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
# Keras builds a loaded model by running it once, and warns where that fails; nothing here needs it.
@pytest.mark.filterwarnings("ignore:Model 'free:UserWarning")
def test_a_model_that_no_transform_can_ask_is_told_before_it_trains_with_what_does(tmp_path):
    text = r"a Free without fixed inputs: .*keras_model\(\).* predict_column\('directory'\)"
    with pytest.warns(UserWarning, match=text):
        recipe = recipe_of(free(), None)
    program = FitProgram(
        recipe=ModelRecipe(model_fn=free),
        data=MadeData(ones),
        validation=None,
        epochs=1,
        consistency=None,
        seed=3,
    )
    with pytest.warns(UserWarning, match=text):
        program(None, context(0))
    trained = model_of(recipe.content)
    path = str(tmp_path / "directory")
    trained(np.ones((1, 1), "float32"))
    trained.export(path, verbose=False)
    (info,) = loading.read_signature(ModelSource(path=path)).inputs.values()
    assert (info.dtype, info.shape) == ("float32", (1,))


def scored():
    """Return a compiled model with a metric of one value per class."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.F1Score(average=None)])
    return model


def ones():
    """Return rows with a target per class."""
    return tf.data.Dataset.from_tensors((np.ones((4, 1), "float32"), np.ones((4, 3), "float32")))


def test_an_evaluation_has_every_metric_of_one_number():
    """The report of an epoch has room for a hundred, the value of main_fun for all."""

    def watched():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3)])
        names = [f"mean_{number}" for number in range(100)]
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanSquaredError(n) for n in names])
        return model

    program = EvaluateProgram(recipe=ModelRecipe(model_fn=watched), data=MadeData(ones))
    assert len(program(None, context(0))) == 101


def test_an_evaluation_leaves_out_metrics_with_a_value_per_class():
    program = EvaluateProgram(recipe=ModelRecipe(model_fn=scored), data=MadeData(ones))
    assert set(program(None, context(0))) == {"loss", "mae"}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_schedule_of_a_saved_model_is_known_without_keras():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    found = []
    for each in (rate, 0.1):
        for optimizer in (
            keras.optimizers.Adam(each),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(each)),
        ):
            model.compile(optimizer, "mse")
            found.append(recipe_of(model, None).schedule)
    assert found == ["ExponentialDecay", "ExponentialDecay", "", ""]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_recipe_knows_whose_integers_are_ids():
    ids, text = keras.Input((), dtype="int64"), keras.Input((), dtype="string")
    count = keras.Input((1,), dtype="int64")
    vectors = [Embedding(2, table="a")(ids), Embedding(2, table="b")(text)]
    x = keras.layers.Concatenate()([*vectors, keras.ops.cast(count, "float32")])
    model = keras.Model([count, ids, text], keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    assert [each.is_id for each in recipe_of(model, None).inputs.values()] == [False, True, False]
    stack = keras.Sequential([keras.Input((), dtype="int32"), Embedding(2), keras.layers.Dense(1)])
    stack.compile("sgd", "mse")
    [info] = recipe_of(stack, None).inputs.values()
    assert (info.is_id, info.is_ragged, info.dtype) == (True, False, "int32")
    lists = keras.Input((None,), dtype="string", ragged=True)
    bag = keras.Model(lists, keras.layers.Dense(1)(Embedding(2, combiner="sum")(lists)))
    bag.compile("sgd", "mse")
    [info] = recipe_of(bag, None).inputs.values()
    assert (info.is_ragged, info.dtype) == (True, "object")
    with pytest.raises(SettingsError, match=r"2 columns are given for input .* lists of any"):
        map_fn_of(bag, ("a", "b"))


@pytest.mark.tf
@pytest.mark.socket
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("make", [Embedding, DENSE])
def test_a_model_that_servers_have_trained_is_trained_on_by_fresh_servers(make):
    """As by the second fit of an estimator with servers: from its weights and rows."""
    stack = keras.Sequential([keras.Input((), dtype="int32"), make(2), keras.layers.Dense(1)])
    stack.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    x, y = np.arange(4), np.ones((4, 1))
    with serving() as cluster:
        distribute(stack, cluster.contexts[0], consistency="sync")
        stack.fit(x, y, batch_size=2, verbose=0)
        answers = stack.predict(x, verbose=0)
        content = content_of(stack)
    recipe = ModelRecipe(content=content)
    assert int(recipe.build().optimizer.iterations) == 0, "as its slots, which stay on the servers"
    again = recipe.build(is_distributed=True)
    with serving() as cluster:
        distribute(again, cluster.contexts[0], consistency="sync")
        np.testing.assert_allclose(again.predict(x, verbose=0), answers, rtol=1e-6)
        again.fit(x, y, batch_size=2, verbose=0)
        assert again.optimizer.iterations.numpy() == 2
        assert float(again.optimizer.learning_rate) == pytest.approx(0.1)


class Reports:
    """The context of a callback, which keeps what it is told."""

    is_chief = True

    def __init__(self):
        self.epochs, self.metrics = self, []

    def ended(self, report, generations=None):
        """Keep the metrics."""
        self.metrics.append((report.is_distributed, sorted(report.metrics), report.steps))


@pytest.mark.long
@pytest.mark.tf
@pytest.mark.parametrize("make", [Embedding, DENSE])
def test_one_worker_reports_its_epochs_with_tables_and_without(make):
    stack = keras.Sequential([keras.Input((), dtype="int32"), make(2), keras.layers.Dense(1)])
    stack.compile("sgd", "mse")
    reports: Any = Reports()
    x, y = np.arange(4), np.ones((4, 1))
    for _ in range(2):
        stack.fit(
            x,
            y,
            batch_size=2,
            epochs=2,
            validation_data=(x, y),
            callbacks=[LoneEpochReporter(reports)],
            verbose=0,
        )
    assert reports.metrics == [(False, ["loss", "val_loss"], 2)] * 4


def test_a_model_that_has_not_trained_is_built_without_a_warning(recwarn):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    built = recipe_of(model, None).build()
    assert isinstance(built.optimizer, keras.optimizers.Adam)
    assert not [each for each in recwarn if "Skipping variable" in str(each.message)]


@pytest.mark.tf
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.nan, r"the loss is NaN after step 2 of epoch 1, .*isnan\('label'\)"),
        (np.inf, "numbers of the weight 'dense.*' are NaN or infinite at the end"),
    ],
    ids=["NaN", "infinite"],
)
def test_a_training_without_servers_does_not_end_with_a_model_of_nan(bad, text):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def made():
        rows = np.ones((3, 1)), np.array([[1.0], [1.0], [bad]])
        return tf.data.Dataset.from_tensor_slices(rows).batch(2)

    recipe = recipe_of(model, None)
    program = FitProgram(
        recipe=recipe, data=MadeData(made), validation=None, epochs=1, consistency=None
    )
    with pytest.raises(NonFiniteGradient, match=text):
        program(None, alone())


def test_a_fit_by_a_dataset_warns_of_no_shuffle_that_its_user_has_not_asked_for(recwarn):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = MadeData(lambda: tf.data.Dataset.from_tensors((np.ones((3, 1)), np.ones((3, 1)))))
    recipe = recipe_of(model, None)
    FitProgram(recipe=recipe, data=data, validation=None, epochs=1, consistency=None)(None, alone())
    assert not [str(each.message) for each in recwarn if "shuffle" in str(each.message)]


@pytest.mark.tf
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
def test_the_history_of_one_worker_has_what_callbacks_add_as_of_keras_fit():
    """`learning_rate` was in a history of Keras, and of several workers, but not of one worker."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    reports: Any = Reports()
    only = alone()
    only.callbacks = lambda: [LoneEpochReporter(reports)]
    program = FitProgram(
        recipe=recipe_of(model, None),
        data=MadeData(lambda: tf.data.Dataset.from_tensors((np.ones((3, 1)), np.ones((3, 1))))),
        validation=None,
        epochs=1,
        consistency=None,
        callbacks=[keras.callbacks.LearningRateScheduler(lambda _, rate: rate)],
    )
    program(None, only)
    assert reports.metrics == [(False, ["learning_rate", "loss"], 1)]


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # as above
    """Keras' own kind of data."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return np.ones((3, 1)), np.ones((3, 1))


@pytest.mark.parametrize("made", [None, (np.ones((3, 1)), np.ones((3, 1)))], ids=["none", "arrays"])
@pytest.mark.parametrize("make_context", [alone, functools.partial(context, 0)])
def test_a_function_of_data_that_returns_no_dataset_is_told_so(made, make_context):
    """A forgotten `return` was `KeyError: pop from an empty set` of Keras."""
    data = MadeData(lambda: made).begun()
    with pytest.raises(SettingsError, match=rf"returned a {type(made).__name__}; .*batch_size"):
        data.dataset(make_context(), None)


def test_a_pydataset_is_read_by_one_worker_and_refused_with_several():
    """Workers that take turns in its batches need `shard` of tf.data."""
    made = Batches()
    data = MadeData(lambda: made).begun()
    assert data.dataset(alone(), None) is made
    assert data.held(context(0), None) is made
    with pytest.raises(SettingsError, match=r"returned a Batches; with several workers it must"):
        data.dataset(context(0), None)


def test_a_function_of_validation_data_may_return_what_keras_takes():
    made = np.ones((3, 1)), np.ones((3, 1))
    assert MadeData(lambda: made).begun().held(alone(), None) is made
    with pytest.raises(SettingsError, match="returned a NoneType; it must"):
        MadeData(lambda: None).begun().held(alone(), None)


class Halving(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # as above
    """Known by `custom_objects` alone."""

    def __call__(self, step):
        return 0.5**step

    def get_config(self):
        return {}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_trained_model_with_a_schedule_of_the_user_is_built_for_servers():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(Halving()), "mse")
    model.fit(np.ones((4, 1)), np.ones(4), verbose=0)
    recipe = recipe_of(model, None, {"Halving": Halving})
    built = recipe.build(is_distributed=True)
    assert int(built.optimizer.iterations) == 0
    assert isinstance(built.optimizer._learning_rate, Halving)


class Doubling(keras.layers.Layer):  # type: ignore[misc]  # as above
    """Keras can name it, but not make it: it has no get_config()."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return x * self.factor


def lambdas():
    """Return a compiled model with a function that has no name."""
    layers = [keras.Input((1,)), keras.layers.Lambda(lambda x: x), keras.layers.Dense(1)]
    return compiled(keras.Sequential(layers))


def doubling():
    """Return a compiled model with a layer that cannot be saved."""
    return compiled(keras.Sequential([keras.Input((1,)), Doubling(2), keras.layers.Dense(1)]))


class Halved(keras.layers.Layer):  # type: ignore[misc]  # as above
    """Known by `custom_objects` alone, as classes of a notebook are."""

    __module__ = "__main__"

    def call(self, x):
        return x / 2


def halved():
    """Return a compiled model of the layer of a notebook."""
    return compiled(keras.Sequential([keras.Input((1,)), Halved(), keras.layers.Dense(1)]))


def compiled(model):
    """Return the model, compiled; its fit only counts."""
    model.compile("sgd", "mse")
    model.fit = lambda *_, **__: FITS.append(model)
    return model


FITS: list[Any] = []


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("make", [lambdas, doubling, halved])
def test_a_model_that_cannot_be_loaded_again_is_refused_before_it_trains(make):
    recipe = ModelRecipe(model_fn=make)
    program = FitProgram(
        recipe=recipe, data=MadeData(ones), validation=None, epochs=1, consistency=None, seed=3
    )
    text = "its training would be lost: .*register_keras_serializable.*custom_objects="
    with pytest.raises(UnsupportedModel, match=re.compile(text, re.DOTALL)):
        program(None, context(0))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_model_that_is_loaded_by_its_custom_objects_trains():
    found = []
    for make, custom in ((halved, {"Halved": Halved}), (scored_alone, {}), (own_loss, {})):
        recipe = ModelRecipe(model_fn=make, custom_objects=custom)
        program = FitProgram(
            recipe=recipe, data=MadeData(ones), validation=None, epochs=1, consistency=None, seed=3
        )
        FITS.clear()
        program(None, alone())
        assert len(FITS) == 1
        found.append(random.random())
    expected = [drawn(halved), drawn(scored_alone), drawn(own_loss)]
    assert found == expected  # the copy draws no seed that the fit would have drawn


def scored_alone():
    """Return another compiled model."""
    return compiled(scored())


def unnamed_loss(y, predicted):
    """Return a loss that no file can name, as those of a notebook."""
    return keras.ops.mean(keras.ops.square(y - predicted))


def own_loss():
    """Return a compiled model whose loss its file cannot name."""
    unnamed_loss.__module__ = "__main__"
    model = scored_alone()
    model.compile("sgd", unnamed_loss)
    return model


def drawn(make):
    """Return the number after the seeds of a model."""
    keras.utils.set_random_seed(3)
    make()
    return random.random()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_function_without_a_name_is_refused_at_the_driver():
    with pytest.raises(
        UnsupportedModel, match=r"a function without a name.*Lambda.*a registered name: @keras"
    ):
        recipe_of(lambdas(), None)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("num_ps", [0, 1])
def test_a_file_of_a_model_that_was_never_compiled_is_no_fit_before_a_node_starts(
    tmp_path, num_ps, monkeypatch
):
    """The workers would find it: one without an optimizer has no count of steps to look at."""
    monkeypatch.setattr("tfos.orca.estimator.active_context", lambda: None)
    keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]).save(tmp_path / "m.keras")
    estimator = Estimator(ModelRecipe(), {}, FitSettings(cluster_size=1 + 2 * num_ps), None)
    estimator.load(str(tmp_path / "m.keras"))
    frame: Any = SimpleNamespace(sparkSession=None, mapInArrow=None, schema=None)
    for ask in (
        lambda: estimator.fit(made),
        lambda: estimator.fit(frame, feature_cols="x", label_cols="y"),
        lambda: estimator.evaluate(made),
        lambda: estimator.evaluate(frame, feature_cols="x", label_cols="y"),
    ):
        with pytest.raises(NotCompiled, match=r"never compiled.*get_model\(\).*compile\(optimizer"):
            ask()
    assert not estimator.get_model().compiled


def doubled(true, guess):
    """Return twice the error."""
    return 2 * keras.ops.abs(true - guess)


def only_scored():
    """Return a model that is compiled to be evaluated."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=None, loss=doubled, metrics=["mae"])
    return model


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_model_without_an_optimizer_is_evaluated_and_refused_by_a_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("tfos.orca.estimator.active_context", lambda: None)
    recipe = recipe_of(only_scored(), None, {"doubled": doubled})
    data = MadeData(lambda: tf.data.Dataset.from_tensors((np.ones((4, 1)), np.ones((4, 1)))))
    for each in (recipe, ModelRecipe(model_fn=only_scored)):
        found = EvaluateProgram(recipe=each, data=data)(None, context(0))
        assert found["loss"] == pytest.approx(2 * found["mae"])
        with pytest.raises(
            NotCompiled, match=r"without an optimizer\..* evaluate\(\), not for fit\(\)"
        ):
            each.build()
    (tmp_path / "m.keras").write_bytes(recipe.content)
    monkeypatch.setattr("tfos.estimators.training._trained", lambda *_: pytest.fail("nodes start"))
    estimator = Estimator(ModelRecipe(), {}, FitSettings(), None)
    estimator.load(str(tmp_path / "m.keras"))
    with pytest.raises(NotCompiled, match=r"without an optimizer.*compile\(optimizer="):
        estimator.fit(made)


def made(config, batch_size):
    """Stand for a function of data."""


class OwnCompile(keras.Sequential):  # type: ignore[misc]  # as above
    """Keras cannot compile it again from its file."""

    def compile(self, optimizer, loss, note):
        """Take one argument more than Keras'."""
        super().compile(optimizer, loss)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.compile... was not called as part of model loading")
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_model_that_is_not_compiled_again_from_its_file_is_told_in_the_worker(is_distributed):
    model = OwnCompile([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", "note")
    recipe = recipe_of(model, None, {"OwnCompile": OwnCompile})
    with pytest.raises(NotCompiled, match=r"not compiled.*model_fn="):
        recipe.build(is_distributed=is_distributed)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_what_a_script_registers_keeps_its_name_in_a_worker(monkeypatch):
    def bent(x):
        return keras.ops.tanh(x)

    registered = keras.saving.register_keras_serializable("script")(bent)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, registered)])
    model.compile("sgd", "mse")
    recipe = recipe_of(model, None, {"own": registered})
    monkeypatch.delitem(keras.saving.get_custom_objects(), "script>bent")
    in_worker = cloudpickle.loads(cloudpickle.dumps(recipe))  # its bent is not registered
    trained = content_of(in_worker.build())
    monkeypatch.delitem(keras.saving.get_custom_objects(), "script>bent")
    loaded = model_of(trained, recipe.custom_objects)
    assert loaded.layers[-1].activation is bent


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_functions_of_one_name_that_are_not_registered_are_not_confused():
    def times(factor):
        def scaled(x):
            return x * factor

        return scaled

    two, three = times(2), times(3)
    layers = [keras.Input((2,)), keras.layers.Dense(1, two), keras.layers.Dense(1, three)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    recipe = recipe_of(model, None, {"two": two, "three": three})
    assert recipe.custom_objects == {"two": two, "three": three}
