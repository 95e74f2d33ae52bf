"""Models with tables under `fit`: the numbers of Keras, all kinds of models, modes, faults."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from typing import Any

import keras
import numpy as np
import pytest

from ps import rules
from ps.errors import IdError, RequestTimeout
from tests.support.keras_training import serving, together
from tests.support.summed_gradients import SummedGradients
from tfos import serving as serving_of_files
from tfos.errors import NotDistributed, SettingsError, UnsupportedModel
from tfos.keras import Embedding
from tfos.keras.embedding.plain import plain_copy
from tfos.keras.embedding.sources import LoadedRows
from tfos.keras.fit.distribute import distribute
from tfos.keras.fit.table_export import export_with_tables
from tfos.keras.fit.tensorboard_scalars import ids_per_batch
from tfos.keras.step.table_specs import embeddings_of
from tfos.keras.step.tables import IdCounts, ServerRows

tf = pytest.importorskip("tensorflow")

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]

STEPS = 50
BATCH = 32
IDS = 200
DIM = 8


@pytest.fixture(scope="module", autouse=True)
def as_written():
    """Without the rewrite of x / sqrt(y) to x * rsqrt(y), which rounds otherwise."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True} | before)


def data(num_rows=STEPS * BATCH, width=3, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(0, IDS, (num_rows, width))
    return x, (random.normal(size=IDS)[x].sum(1) > 0).astype("float32")


def make_model(embedding, optimizer, kind=keras.Model, **compiling):
    keras.utils.set_random_seed(7)
    ids = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Dense(8, "relu")(keras.layers.Flatten()(embedding(ids)))
    model = kind(ids, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(optimizer, "binary_crossentropy", **{"jit_compile": False} | compiling)
    return model


def initial_rows(cluster, table="user", count=IDS):
    return cluster.contexts[0].client.tables.lookup({table: np.arange(count)})[table]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 5, 0.9)
    ),
}
EACH_ONCE = (("adagrad", 1), ("schedule", 2))
"""Each number of servers; all pairs are long."""


@pytest.mark.parametrize(
    ("name", "num_servers"),
    [
        pytest.param(*pair, marks=[pytest.mark.long] * (pair not in EACH_ONCE))
        for pair in itertools.product(OPTIMIZERS, (1, 2))
    ],
)
def test_one_sync_worker_equals_kerass_embedding_bit_for_bit(name, num_servers):
    optimizer, (x, y) = OPTIMIZERS[name], data()
    with serving(num_servers=num_servers) as cluster:
        model = make_model(Embedding(DIM, table="user"), optimizer())
        distribute(model, cluster.contexts[0], consistency="sync")
        weights = initial_rows(cluster)
        plain = make_model(
            keras.layers.Embedding(IDS, DIM, weights=weights), optimizer(), SummedGradients
        )
        for each in (model, plain):
            each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        np.testing.assert_array_equal(initial_rows(cluster), plain.layers[1].get_weights()[0])
        for mine, keras_own in zip(model.weights[1:], plain.weights[1:], strict=True):
            np.testing.assert_array_equal(mine.numpy(), keras_own.numpy())
        np.testing.assert_array_equal(
            model.predict(x[:64], verbose=0), plain.predict(x[:64], verbose=0)
        )


def lazy_adam(rows, batches, rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """Adam on the rows of each batch alone; t counts the batches. Yields nothing of other rows."""
    m, v = np.zeros_like(rows), np.zeros_like(rows)
    for t, (ids, gradient) in enumerate(batches, 1):
        powers = [
            np.float32(tf.pow(tf.constant(b, tf.float32), tf.constant(float(t))))
            for b in (beta_1, beta_2)
        ]
        one = np.float32(1)
        alpha = np.float32(rate) * np.sqrt(one - powers[1]) / (one - powers[0])
        g = gradient
        m[ids] = m[ids] + (g - m[ids]) * np.float32(1 - beta_1)
        v[ids] = v[ids] + (g * g - v[ids]) * np.float32(1 - beta_2)
        rows[ids] = rows[ids] - (m[ids] * alpha) / (np.sqrt(v[ids]) + np.float32(epsilon))
    return rows


def test_adam_is_the_lazy_rule_written_out_at_the_tables_rate():
    """A model whose row gradients are known: the loss is the sum of c times the rows."""
    x, _ = data(STEPS * BATCH, width=1)
    c = np.random.default_rng(1).normal(size=(len(x), 1)).astype("float32")

    class Linear(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self):
            super().__init__()
            self.rows = Embedding(DIM, table="user", combiner="sum", learning_rate_multiplier=0.5)
            self.scale = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)

        def call(self, x):
            return self.scale(self.rows(x))

        def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
            return tf.reduce_sum(y * y_pred)

    with serving() as cluster:
        model = Linear()
        model.compile(keras.optimizers.Adam(0.02), jit_compile=False)
        model(x[:2])
        distribute(model, cluster.contexts[0], consistency="sync")
        rows = initial_rows(cluster)
        model.fit(x, c, batch_size=BATCH, shuffle=False, verbose=0)
        batches = []
        for start in range(0, len(x), BATCH):
            ids, places = np.unique(x[start : start + BATCH, 0], return_inverse=True)
            g = np.zeros((ids.size, DIM), "float32")
            for place, value in zip(places, c[start : start + BATCH], strict=True):
                g[place] += value
            batches.append((ids, g))
        np.testing.assert_array_equal(initial_rows(cluster), lazy_adam(rows, batches))


def test_two_sync_workers_equal_one_process_that_reduces_in_rank_order():
    shards = [data(10 * BATCH, seed=rank) for rank in range(2)]
    with serving(num_workers=2) as cluster:
        models = [
            make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.5)) for _ in range(2)
        ]

        def train(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            if rank == 0:
                first.append(initial_rows(cluster))
            model.fit(*shards[rank], batch_size=BATCH, shuffle=False, verbose=0)

        first: list[np.ndarray] = []
        together(train, 2)
        plain = make_model(keras.layers.Embedding(IDS, DIM), keras.optimizers.SGD(0.5))
        plain.layers[1].set_weights(first)
        plain.optimizer.build(plain.trainable_variables)

        @tf.function(autograph=False, jit_compile=False)
        def gradient(x, y):
            with tf.GradientTape() as tape:
                loss = plain.compute_loss(x, y[:, None], plain(x, training=True))
            return [tf.convert_to_tensor(g) for g in tape.gradient(loss, plain.trainable_variables)]

        for step in range(10):
            own = slice(step * BATCH, (step + 1) * BATCH)
            parts = [gradient(tf.constant(x[own]), tf.constant(y[own])) for x, y in shards]
            mean = [a * 0.5 + b * 0.5 for a, b in zip(*parts, strict=True)]
            plain.optimizer.apply(mean, plain.trainable_variables)
        np.testing.assert_array_equal(initial_rows(cluster), plain.layers[1].get_weights()[0])
        for mine, keras_own in zip(models[0].weights[1:], plain.weights[1:], strict=True):
            np.testing.assert_array_equal(mine.numpy(), keras_own.numpy())


MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "pipeline": {"pipeline": 2},
    "ssp": {"staleness_bound": 2},
    "hybrid": {},
    "sync": {},
}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode == "hybrid" else pytest.mark.long) for mode in MODES],
)
def test_every_mode_learns_with_two_workers(mode):
    x, y = data(2048)
    consistency: Any = "async" if mode == "pipeline" else mode
    with serving(num_workers=2, num_servers=2) as cluster:

        def train(rank):
            model = make_model(
                Embedding(DIM, table="user"), keras.optimizers.Adagrad(0.3), metrics=["accuracy"]
            )
            distribute(model, cluster.contexts[rank], consistency=consistency, **MODES[mode])
            history = model.fit(x[rank::2], y[rank::2], batch_size=BATCH, epochs=8, verbose=0)
            return history.history["accuracy"][-1]

        assert min(together(train, 2)) > 0.85
        stats = [server.stats() for server in cluster.servers]
        assert sum(table.rows for each in stats for table in each.tables) == IDS
        assert cluster.pushes == 2 * 8 * 1024 // BATCH


def test_evaluation_and_inference_create_no_rows_and_read_one_vector():
    x, y = data(256)
    layer = Embedding(DIM, table="user", unseen=0.25)
    with serving() as cluster:
        model = make_model(layer, keras.optimizers.SGD(0.1))
        distribute(model, cluster.contexts[0])
        x = x % 50
        model.fit(x, y, batch_size=BATCH, verbose=0, validation_data=(x + 100, y))
        model.evaluate(x + 100, y, verbose=0)
        model.predict(x + 100, verbose=0)
        (table,) = cluster.servers[0].stats().tables
        assert table.rows == 50
        counts = model._tfos_trainer.id_counts["user"]
        assert (counts.batches, counts.ids) == (256 // BATCH, x.size)
        scalars = dict(ids_per_batch("user", counts, IdCounts()))
        assert scalars["chief/ids_per_batch/user"] == x.size * BATCH / 256
        assert 0 < scalars["chief/distinct_ids_per_batch/user"] <= 50
        shown: list[str] = []
        model.summary(print_fn=shown.append)
        assert "Total params" in shown[0]
        assert shown[-1] == "  user: 50 rows, dim 8, 32 bytes per row with slots, SGD"
        np.testing.assert_array_equal(layer(tf.constant([150])), np.full((1, DIM), 0.25))
        trained = initial_rows(cluster, count=50)
        np.testing.assert_array_equal(layer(tf.constant([7])), trained[[7]])


def test_gradient_accumulation_pushes_the_mean_of_its_batches():
    x, y = data(8 * BATCH)
    with serving() as cluster:
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
        model = make_model(Embedding(DIM, table="user"), optimizer)
        distribute(model, cluster.contexts[0], consistency="sync")
        weights = initial_rows(cluster)
        plain = make_model(
            keras.layers.Embedding(IDS, DIM, weights=weights),
            keras.optimizers.SGD(0.5),
            SummedGradients,
        )
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        plain.fit(x, y, batch_size=4 * BATCH, shuffle=False, verbose=0)
        assert cluster.pushes == 2
        np.testing.assert_allclose(
            initial_rows(cluster), plain.layers[1].get_weights()[0], rtol=0, atol=1e-6
        )


class OfEither(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its batches have users, items or both."""

    def __init__(self):
        super().__init__()
        self.user, self.item = (Embedding(DIM, table=name) for name in ("user", "item"))

    def call(self, x):
        return sum(keras.ops.sum(getattr(self, name)(ids), (1, 2)) for name, ids in x.items())


@pytest.mark.parametrize("names", [("user", "item"), ("item", "user")])
def test_an_accumulated_push_has_the_tables_of_each_of_its_batches(names):
    ids = np.arange(BATCH)[:, None]
    with serving() as cluster:
        model = OfEither()
        model(dict.fromkeys(names, ids))
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        model.compile(optimizer, lambda _, found: found, jit_compile=False)
        distribute(model, cluster.contexts[0], consistency="sync")
        expected = {name: initial_rows(cluster, name) for name in names}
        for name in names:
            model.train_on_batch({name: ids}, np.zeros(BATCH))
            expected[name][:BATCH] -= 0.5 / BATCH / 2
        assert cluster.pushes == 1
        for name in names:
            np.testing.assert_allclose(
                initial_rows(cluster, name), expected[name], rtol=0, atol=1e-6
            )


def test_a_short_last_batch_and_changing_numbers_of_ids_trace_once():
    x, y = data(5 * BATCH + 9)
    x[BATCH : 2 * BATCH] = 7
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
        distribute(model, cluster.contexts[0])
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        trainer = model._tfos_trainer
        assert len(trainer._attached.step._traces._found) == 1
        assert trainer.steps == 12


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long)]
)
def test_mixed_precision(policy):
    x, y = data(1024)
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model(
            Embedding(DIM, table="user"), keras.optimizers.Adagrad(0.3), metrics=["accuracy"]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        history = model.fit(x, y, batch_size=BATCH, epochs=8, verbose=0)
        assert history.history["accuracy"][-1] > 0.85
        assert initial_rows(cluster).dtype == np.float32


def test_jit_compile_pads_to_few_shapes():
    x, y = data(1024)
    with serving() as cluster:
        model = make_model(
            Embedding(DIM, table="user"),
            keras.optimizers.Adagrad(0.3),
            metrics=["accuracy"],
            jit_compile=True,
        )
        distribute(model, cluster.contexts[0])
        history = model.fit(x, y, batch_size=BATCH, epochs=6, verbose=0, validation_data=(x, y))
        assert history.history["val_accuracy"][-1] > 0.85


class Tower(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A subclassed model that calls one layer twice and has a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.rows = Embedding(DIM, table="user", combiner="mean")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.rows(x[:, :2]) * self.rows(x[:, 1:]))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss += 0.1 * self.compute_loss(x=x, y=y, y_pred=self(x[::-1], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"total": loss}


def functional_with_dicts():
    user = keras.Input((), dtype="string", name="user")
    items = keras.Input((None,), dtype="int64", name="items")
    tower = keras.Sequential([keras.Input((DIM,)), keras.layers.Dense(4)])
    joined = keras.layers.Concatenate()(
        [
            tower(Embedding(DIM, table="user")(user)),
            tower(Embedding(DIM, table="item", combiner="mean", pad_id=0)(items)),
            Embedding(1, table="item_bias", combiner="sum", pad_id=0)(items),
        ]
    )
    return keras.Model(
        {"user": user, "items": items}, {"a": keras.layers.Dense(1, name="a")(joined)}
    )


def sequential_over_time():
    return keras.Sequential(
        [
            keras.Input((4, 2), dtype="int64"),
            keras.layers.TimeDistributed(Embedding(DIM, table="user", combiner="sum")),
            keras.layers.LSTM(4),
            keras.layers.Dense(1),
        ]
    )


def ragged():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    return keras.Model(ids, keras.layers.Dense(1)(Embedding(DIM, table="u", combiner="sqrtn")(ids)))


def batches_for(model, name, random):
    x = random.integers(1, 40, (64, 4, 2))
    y = random.normal(size=(64, 1)).astype("float32")
    if name == "dicts":
        texts = np.array([f"u{n % 7}" for n in range(64)])
        return {"user": texts, "items": x[:, :, 0]}, {"a": y}
    if name == "ragged":
        lists = [list(range(n % 5)) for n in range(64)]
        return tf.ragged.constant(lists, dtype="int64"), y
    return (x if name == "time" else x[:, :, 0]), y


MODELS = {
    "subclass": Tower,
    "dicts": functional_with_dicts,
    "time": sequential_over_time,
    "ragged": ragged,
}


KINDS_ONCE = (("dicts", 3),)
"""All pairs are long."""


@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    [
        pytest.param(*pair, marks=[pytest.mark.long] * (pair not in KINDS_ONCE))
        for pair in itertools.product(MODELS, (1, 3))
    ],
)
def test_kinds_of_models(name, steps_per_execution):
    model = MODELS[name]()
    x, y = batches_for(model, name, np.random.default_rng(0))
    model.compile(
        keras.optimizers.Adagrad(0.2),
        "mse",
        steps_per_execution=steps_per_execution,
        jit_compile=False,
    )
    with serving() as cluster:
        distribute(model, cluster.contexts[0], consistency="sync")
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        history = model.fit(rows, epochs=15, shuffle=False, verbose=0)
        losses = history.history["total" if name == "subclass" else "loss"]
        assert losses[-1] < (0.99 if name == "subclass" else 0.9) * losses[0]
        assert np.isfinite(model.evaluate(rows, verbose=0)).all()
        assert cluster.servers[0].stats().tables[0].rows > 0


class FromTheMiddle(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Ids that depend on what the model computes."""

    def __init__(self):
        super().__init__()
        self.first = Embedding(DIM, table="first", name="early")
        self.second = Embedding(DIM, table="second", name="late")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        found = self.first(x)
        chosen = keras.ops.cast(keras.ops.argmax(found, -1), "int64")
        return self.out(keras.ops.sum(found + self.second(chosen), 1))


def test_ids_from_the_middle_of_a_model_are_looked_up_inside_the_step_and_said_once(caplog):
    x, y = data(512)
    with serving() as cluster, caplog.at_level(logging.WARNING):
        model = FromTheMiddle()
        model.compile(keras.optimizers.Adagrad(0.3), "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
        assert history.history["loss"][-1] < history.history["loss"][0]
        tables = {each.name: each.rows for each in cluster.servers[0].stats().tables}
        assert tables["first"] > 150
        assert 1 < tables["second"] <= DIM
    said = [each for each in caplog.messages if "inside the step" in each]
    assert len(said) == 1
    assert "layer 'late'" in said[0]


class CalledTwice(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Calls one layer with a feature's ids, and with ids that the step makes of their rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.out = keras.layers.Dense(1)

    def call(self, x):
        found = self.rows(x)
        chosen = keras.ops.cast(keras.ops.argmax(found, -1), "int64")
        return self.out(keras.ops.sum(found + self.rows(chosen), 1))


def test_a_layer_that_is_called_before_and_inside_of_the_step_trains_as_in_keras():
    """Where calls of one table name their gradients' rows in two ways, other rows are trained."""
    x, y = data(8 * BATCH)
    with serving() as cluster:
        model = CalledTwice(Embedding(DIM, table="user"))
        plain = CalledTwice(keras.layers.Embedding(IDS, DIM))
        for each in (model, plain):
            each.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
            each(x[:2])
        distribute(model, cluster.contexts[0], consistency="sync")
        plain.rows.set_weights([initial_rows(cluster)])
        plain.out.set_weights(model.out.get_weights())
        for each in (model, plain):
            each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        np.testing.assert_allclose(
            initial_rows(cluster), plain.rows.get_weights()[0], rtol=0, atol=1e-5
        )


def test_eager_steps_look_rows_up_inside():
    x, y = data(128)
    with serving() as cluster:
        model = make_model(
            Embedding(DIM, table="user"), keras.optimizers.SGD(0.1), run_eagerly=True
        )
        distribute(model, cluster.contexts[0])
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert cluster.servers[0].stats().tables[0].rows == len(np.unique(x))


@pytest.mark.parametrize("pad_id", [0, -1])
def test_padding_trains_nothing_wherever_rows_are_looked_up(pad_id):
    x, y = data(4 * BATCH)
    x[:, 2] = x[BATCH : 2 * BATCH] = pad_id
    predicted = []
    for eagerly in (False, True):
        embedding = Embedding(DIM, table="user", pad_id=pad_id)
        optimizer = keras.optimizers.SGD(0.5, clipnorm=0.01)
        model = make_model(embedding, optimizer, run_eagerly=eagerly)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        rows = embedding.source.dump("user", 1 << 20)
        assert rows is not None
        assert [*rows[0]] == [*np.setdiff1d(x, pad_id)]
        predicted.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(predicted[0], predicted[1], rtol=1e-4)


@pytest.mark.parametrize("mode", ["async", "hybrid"])
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_frozen_layer_only_looks_up_and_a_step_sees_what_predict_sees(eagerly, mode):
    x, y = data(128)
    with serving() as cluster:
        frozen = Embedding(DIM, table="user", trainable=False, unseen=0.5)
        frozen.bind(LoadedRows(np.arange(9), np.ones((9, DIM), "float32"), frozen.settings))
        model = make_model(frozen, keras.optimizers.SGD(0.0), run_eagerly=eagerly)
        expected = model.evaluate(x, y, verbose=0)
        distribute(model, cluster.contexts[0], consistency=mode)
        found = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert cluster.servers[0].stats().tables[0].rows == 9


def test_a_frozen_tables_lookup_that_fails_ends_its_own_step_and_is_not_waited_for_twice():
    x, y = data(128)
    with serving() as cluster:
        frozen = Embedding(DIM, table="user", trainable=False)
        model = make_model(frozen, keras.optimizers.SGD(0.0))
        distribute(model, cluster.contexts[0])
        tables, calls = cluster.contexts[0].client.tables, []
        look = tables.lookup_into

        def failing(into, *, training):
            calls.append(training)
            if len(calls) == 2:
                raise RequestTimeout("ps:0 does not answer")
            return look(into, training=training)

        vars(tables)["lookup_into"] = failing
        with pytest.raises(RequestTimeout):
            model.fit(x, y, batch_size=BATCH, verbose=0)
        assert calls == [False, False]
        assert model._tfos_trainer.steps == 1


def test_two_layers_of_one_table_share_rows_and_settings():
    ids = keras.Input((2,), dtype="int64")
    pair = [Embedding(DIM, table="x", seed=seed)(ids) for seed in (1, 2)]
    model = keras.Model(ids, keras.layers.Dense(1)(pair[0] + pair[1]))
    model.compile("sgd", "mse")
    with serving() as cluster, pytest.raises(UnsupportedModel, match="differ in seed 1 and 2"):
        distribute(model, cluster.contexts[0])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), r"global_clipnorm=1.0\) needs"),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True), r"use_ema=True\) updates the averages"),
    ],
)
def test_what_rows_alone_cannot_follow_is_refused_by_name(optimizer, message):
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), optimizer())
        with pytest.raises(UnsupportedModel, match=message):
            distribute(model, cluster.contexts[0])
        own = make_model(Embedding(DIM, table="user", rule=rules.Adagrad()), optimizer())
        distribute(own, cluster.contexts[0])


@pytest.mark.fault("F49")
def test_an_id_out_of_range_names_table_value_position_and_layer():
    x, y = data(64)
    x[5, 1] = -3
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user", name="who"), keras.optimizers.SGD(0.1))
        distribute(model, cluster.contexts[0])
        message = r"'user' takes int64 ids 0.*got -3 at position 16.*layer 'who'.*pad_id"
        with pytest.raises(IdError, match=message):
            model.fit(x, y, batch_size=64, shuffle=False, verbose=0)


def test_strings_are_not_compiled_by_xla():
    class OfText(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self):
            super().__init__()
            self.rows, self.out = Embedding(DIM, name="of_text"), keras.layers.Dense(1)

        def call(self, text):
            return self.out(self.rows(text))

    texts, y = tf.constant(["a", "b"]), np.ones((2, 1), "float32")
    known, unknown = OfText(), OfText()
    known(texts)
    with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
        known.compile("sgd", "mse", jit_compile=True)
    known.fit(texts, y, verbose=0)
    unknown.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(UnsupportedModel, match=r"strings \['x'\], .* jit_compile=False"):
        unknown.fit(texts, y, verbose=0)
    batch = {"x": texts, "uid": texts, "number": y}
    with pytest.raises(UnsupportedModel, match=r"strings \['x/uid', 'x/x'\], .* map\(\)"):
        unknown.fit(batch, y, verbose=0)


class Regularised(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its loss has the squares of all trainable variables."""

    def compute_loss(self, *args, **kwargs):
        squares = [tf.nn.l2_loss(v) for v in self.trainable_variables]
        return super().compute_loss(*args, **kwargs) + 1e-4 * tf.add_n(squares)


class WithoutNaN(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its step changes the gradients."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        changed = [tf.where(tf.math.is_nan(g), tf.zeros_like(g), g) for g in gradients]
        self.optimizer.apply(changed, self.trainable_variables)
        return {"loss": loss}


class InALoop(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its Embedding is called for one id after the other."""

    def __init__(self):
        super().__init__()
        self.who, self.head = Embedding(DIM, table="user", name="who"), keras.layers.Dense(1)

    def call(self, x):
        def add(i, total):
            return i + 1, total + self.who(x[:, i])

        nothing = tf.zeros((tf.shape(x)[0], DIM))
        return self.head(tf.while_loop(lambda i, _: i < x.shape[1], add, (0, nothing))[1])


class OneTowerOfTwo(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its second Embedding is not called, and its gradient is zeros of no row."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = Embedding(DIM, table="used"), Embedding(DIM, table="idle")
        self.head = keras.layers.Dense(1)

    def build(self, shape):
        self.used.build(shape)
        self.idle.build(shape)
        self.head.build((None, DIM))

    def call(self, x):
        return self.head(tf.reduce_sum(self.used(x), 1))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
        variables = [v.value for v in self.trainable_variables]
        gradients = tape.gradient(
            loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [Regularised, WithoutNaN])
@pytest.mark.parametrize("jit", [False, True])
def test_a_step_that_makes_the_gradient_of_rows_dense_is_refused(kind, jit):
    x, y = data(64)
    model = make_model(Embedding(DIM, table="user", name="who"), "sgd", kind, jit_compile=jit)
    message = r"gradient of layer 'who' a dense tensor.*shape \(0, 8\) out of such a sum"
    with pytest.raises(UnsupportedModel, match=message):
        model.fit(x, y, verbose=0)


def test_a_layer_that_trains_inside_a_loop_is_refused_with_what_to_call():
    x, y = data(64)
    model = InALoop()
    model.compile("sgd", "mse", jit_compile=False)
    message = r"'in_a_loop/who' a dense.* inside a loop, .* Call the layer once, on all ids, before"
    with pytest.raises(UnsupportedModel, match=message):
        model.fit(x, y, verbose=0)


def test_a_layer_that_the_step_does_not_call_may_have_a_dense_gradient_of_no_row():
    x, y = data(64)
    model = OneTowerOfTwo()
    model.build((None, 3))
    model.compile("sgd", "mse", jit_compile=False)
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        model.fit(x, y, verbose=0)


@pytest.mark.fault("F49")
def test_a_feature_of_another_kind_or_missing_is_said_through_fit():
    x, y = data(64)
    with serving() as cluster:
        model = Tower()
        model.compile("sgd", "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        with pytest.raises(UnsupportedModel, match=r"layer '.*' got ids of dtype float32.*Declare"):
            model.fit(x.astype("float32"), y, verbose=0)
    with serving() as cluster:
        model = functional_with_dicts()
        model.compile("sgd", "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        with pytest.raises(ValueError, match=r'Missing data for input "user"'):
            model.fit({"items": x}, {"a": y}, verbose=0)
        message = r"feature 'items' has string values, and the model makes ids of int64"
        texts = {"items": tf.strings.as_string(x), "user": tf.strings.as_string(x[:, 0])}
        with pytest.raises(UnsupportedModel, match=message):
            model.fit(texts, {"a": y}, verbose=0)
    with serving() as cluster:
        text = keras.Input((), dtype="string", name="text")
        model = keras.Model(text, keras.layers.Dense(1)(Embedding(DIM, name="of_text")(text)))
        model.compile("sgd", "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        with pytest.raises(UnsupportedModel, match=r"strings where .* \['of_text'\].*'int64'"):
            model.fit(x[:, 0], y, verbose=0)


def test_large_stock_embeddings_are_warned_of_once(caplog):
    def embedding(rows, name, **settings):
        return keras.layers.Embedding(rows, DIM, name=name, **settings)

    ids = keras.Input((3,), dtype="int64")
    layers = [
        embedding(1 << 15, "large"),
        embedding(1 << 16, "larger"),
        embedding(1 << 14, "small"),
        embedding(1 << 16, "frozen", trainable=False),
    ]
    model = keras.Model(ids, keras.layers.Add()([layer(ids) for layer in layers]))
    model.compile("sgd", "mse")
    with serving() as cluster, caplog.at_level(logging.WARNING, "tfos"):
        distribute(model, cluster.contexts[0])
    (said,) = [each for each in caplog.messages if "table=" in each]
    assert "tfos.keras.Embedding(8, table='large') instead of keras.layers.Embedding" in said
    assert "(32768, 8), layer 'large', 1048576 bytes" in said
    assert "'larger', 2097152 bytes" in said
    assert "small" not in said
    assert "frozen" not in said


@pytest.mark.fault("F47")
def test_another_workers_tables_are_compared_in_words():
    with serving(num_workers=2) as cluster:
        first = make_model(Embedding(DIM, table="user", seed=1), keras.optimizers.SGD(0.1))
        distribute(first, cluster.contexts[0])
        second = make_model(Embedding(DIM, table="user", seed=2), keras.optimizers.SGD(0.1))
        with pytest.raises(UnsupportedModel, match=r"table 'user' .* differ: seed 2 and 1"):
            distribute(second, cluster.contexts[1])
        third = make_model(Embedding(DIM, table="item"), keras.optimizers.SGD(0.1))
        with pytest.raises(
            UnsupportedModel, match=r"\['item'\], .* \['user'\]\. .* name the tables"
        ):
            distribute(third, cluster.contexts[1])


def test_without_a_cluster_the_numbers_are_those_of_one_sync_worker():
    x, y = data(512)
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), keras.optimizers.Adam(0.01))
        distribute(model, cluster.contexts[0], consistency="sync")
        alone = make_model(Embedding(DIM, table="user"), keras.optimizers.Adam(0.01))
        for each in (model, alone):
            each.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        for mine, its in zip(alone.weights, model.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), its.numpy())
        np.testing.assert_array_equal(alone.predict(x, verbose=0), model.predict(x, verbose=0))
        with pytest.raises(UnsupportedModel, match="was trained in this process"):
            distribute(alone, cluster.contexts[0])


def test_fit_without_distribute_on_a_cluster_is_still_refused():
    from tfos.keras.data.running_fit import running_fit

    x, y = data(64)
    seen = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_begin(self, epoch, logs=None):
            fit = running_fit()
            assert fit is not None
            seen.append(fit.is_lone)

    model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
    for _ in range(2):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Look()])
    assert seen == [True, True]
    assert issubclass(NotDistributed, Exception)


def trained(context, **settings):
    x, y = data(256)
    model = make_model(Embedding(DIM, table="user", **settings), keras.optimizers.Adagrad(0.3))
    distribute(model, context)
    model.fit(x % 50, y, batch_size=BATCH, verbose=0)
    return model, x  # three quarters of x have no row


@pytest.mark.parametrize("name", ["model.keras", "saved"])
def test_rows_inside_an_export_need_no_tfos_and_give_the_same_numbers(tmp_path, name):
    with serving(num_servers=2) as cluster:
        model, x = trained(cluster.contexts[0], unseen=0.125)
        path = export_with_tables(model, tmp_path / name, cluster.contexts[0])
        expected = model.predict_on_batch(x)
    if name == "saved":
        saved = tf.saved_model.load(path)
        found = saved.serve(tf.constant(x)).numpy()
    else:
        plain = keras.models.load_model(path)
        assert not any(isinstance(layer, Embedding) for layer in plain._flatten_layers())
        found = plain.predict_on_batch(x)
    np.testing.assert_array_equal(found, expected)


def test_a_part_of_a_distributed_model_is_exported_in_the_memory_of_a_batch(tmp_path, monkeypatch):
    """All rows of a table were read into memory first."""

    def refuse(*_: object) -> None:
        raise AssertionError("a table was read as a whole")

    with serving(num_servers=2) as cluster:
        context = cluster.contexts[0]
        model, x = trained(context, unseen=0.125)
        whole = export_with_tables(model, tmp_path / "whole", context, tables="beside")
        layer = embeddings_of(model)[0]
        part = keras.Model(model.inputs, layer(model.inputs[0]))
        expected = part.predict_on_batch(x)
        monkeypatch.setattr(ServerRows, "dump", refuse)
        found = export_with_tables(part, tmp_path / "part", context, tables="beside")
    served = [
        serving_of_files.load(each, tmp_path / "cache", progress=False) for each in (whole, found)
    ]
    ids = np.arange(100)
    expected_rows, rows = (each.lookup("user", ids) for each in served)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(served[1].predict(x), expected)
    for each in served:
        with pytest.raises(IdError, match="integers as ids, got the text '7'"):
            each.lookup("user", ["7"])


def test_rows_beside_an_export_are_served_and_refreshed_with_the_same_numbers(tmp_path):
    with serving(num_servers=2) as cluster:
        context = cluster.contexts[0]
        model, x = trained(context, unseen=0.125)
        whole = export_with_tables(model, tmp_path / "whole", context, tables="beside")
        served = serving_of_files.load(whole, tmp_path / "cache", progress=False)
        # TensorFlow rounds a row by its place in the batch, so both have the same batches.
        np.testing.assert_array_equal(served.predict(x), model.predict_on_batch(x))
        assert served.num_rows("user") == 50
        with pytest.raises(UnsupportedModel, match=r"has float32 numbers.* int64 of the model"):
            served.predict(x.astype("float32"))
        model.fit(x[:BATCH], x[:BATCH, :1] % 2, batch_size=BATCH, verbose=0)
        delta = export_with_tables(model, tmp_path / "delta", context, tables="beside", since=whole)
        served.refresh(delta)
        np.testing.assert_array_equal(served.predict(x), model.predict_on_batch(x))
        served.model.save(tmp_path / "served.keras")
        again = keras.models.load_model(tmp_path / "served.keras")
        np.testing.assert_array_equal(again.predict_on_batch(x), model.predict_on_batch(x))
        tuned = copy.deepcopy(served.model)
        tuned.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        few = x[:BATCH]
        tuned.fit(few, few[:, :1] % 2, verbose=0)  # begins with the served rows
        np.testing.assert_array_equal(tuned.predict_on_batch(few), model.predict_on_batch(few))
        with pytest.raises(UnsupportedModel, match=r"bytes of rows or more, .* is 100\."):
            served.dump("user", 100)


def test_a_saved_model_has_its_rows_and_predicts_anywhere(tmp_path):
    with serving() as cluster:
        model, x = trained(cluster.contexts[0], unseen=0.125)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "only.weights.h5")
        expected = model.predict(x, verbose=0)
    with serving() as cluster:
        untrained = make_model(Embedding(DIM, table="user"), keras.optimizers.Adagrad(0.3))
        distribute(untrained, cluster.contexts[0])
        with pytest.raises(ValueError, match=r"rows of layer .* are on parameter servers"):
            untrained.load_weights(tmp_path / "only.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)


@keras.saving.register_keras_serializable("test_embedding")
class OfOwnCall(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Its file has the shapes of the inputs, but no dtypes."""

    def __init__(self, pad_id=None, has_tower=False, **fields):
        super().__init__(**fields)
        self.fields = {"pad_id": pad_id, "has_tower": has_tower}
        self.rows = Embedding(DIM, table="user", combiner="mean", pad_id=pad_id)
        if has_tower:
            self.rows = keras.Sequential([keras.Input((3,), dtype="int64"), self.rows])
        self.out = keras.layers.Dense(1)

    def get_config(self):
        return super().get_config() | self.fields

    def call(self, x):
        return self.out(self.rows(x["ids"]) + x["more"])


@pytest.mark.parametrize(("pad_id", "has_tower"), [(3, False), ("3", False), (None, True)])
def test_a_saved_model_of_an_own_class_has_its_dense_weights_too(tmp_path, pad_id, has_tower):
    """Keras builds it with floats. The layer refused them, so it kept random dense weights."""
    ids, y = data(BATCH)
    x = {"ids": tf.constant(ids.astype(str) if pad_id == "3" else ids), "more": tf.ones((BATCH, 1))}
    model = OfOwnCall(pad_id, has_tower)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(x, y, verbose=0)
    expected = model.predict_on_batch(x)
    model.save(tmp_path / "model.keras")
    for loaded in (keras.models.load_model(tmp_path / "model.keras"), copy.deepcopy(model)):
        np.testing.assert_array_equal(loaded.predict_on_batch(x), expected)
        with pytest.raises(UnsupportedModel, match=r"float32 numbers|ids of dtype float32"):
            loaded(x | {"ids": tf.ones((BATCH, 3))})


def test_a_layer_of_several_nested_models_keeps_its_rows_in_a_file(tmp_path):
    """Keras makes one layer for each nested model, and loads the first: others had no rows."""
    rows, outer = Embedding(DIM, table="user"), keras.Input((3,), dtype="int64")
    parts = []
    for _ in range(2):
        ids = keras.Input((3,), dtype="int64")
        flat = keras.layers.Flatten()(rows(ids))
        parts.append(keras.Model(ids, keras.layers.Dense(1)(flat))(outer))
    model = keras.Model(outer, keras.layers.Add()(parts))
    model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    x, y = data(BATCH)
    model.fit(x, y, verbose=0)
    files = [tmp_path / name for name in ("model.keras", "directory", "newer.weights.h5")]
    model.save(files[0])
    model.save(files[1], zipped=False)
    for loaded in (*map(keras.models.load_model, files[:2]), copy.deepcopy(model)):
        np.testing.assert_array_equal(loaded.predict_on_batch(x), model.predict_on_batch(x))
    model.fit(x, y, verbose=0)
    model.save_weights(files[2])
    loaded.load_weights(files[2])
    np.testing.assert_array_equal(loaded.predict_on_batch(x), model.predict_on_batch(x))


@pytest.mark.parametrize("of_text", [False, True])
def test_a_loaded_model_of_an_own_class_takes_ids_of_its_rows_kind_alone(tmp_path, of_text):
    """It looked texts up among rows of integers, found none, and predicted from zeros."""
    ids, y = data(BATCH)
    kinds = [tf.constant(ids), tf.constant(ids.astype(str))]
    more = tf.ones((BATCH, 1))
    model = OfOwnCall()
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit({"ids": kinds[of_text], "more": more}, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(UnsupportedModel, match="have different rows"):
        loaded.predict_on_batch({"ids": kinds[not of_text], "more": more})
    with serving() as cluster:
        distribute(loaded, cluster.contexts[0])
        assert cluster.manifest.tables[0].id_source == ("strings" if of_text else "integers")


@keras.saving.register_keras_serializable("test_embedding")
class Calls(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model of an own class that adds what some layers return."""

    def __init__(self, parts=(), **options):
        super().__init__(**options)
        self.parts = list(parts)

    def call(self, ids):
        return sum(part(ids) for part in self.parts)

    def get_config(self):
        parts = [keras.saving.serialize_keras_object(part) for part in self.parts]
        return super().get_config() | {"parts": parts}

    @classmethod
    def from_config(cls, config):
        parts = [keras.saving.deserialize_keras_object(part) for part in config.pop("parts")]
        return cls(parts, **config)


def test_a_layer_of_several_models_of_own_classes_takes_ids_of_its_rows_kind_alone(tmp_path):
    rows = Embedding(DIM, table="user")
    model = Calls([Calls([rows]), Calls([rows])])
    model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    ids, _ = data(BATCH)
    model.fit(ids, np.ones((BATCH, 3, DIM)), verbose=0)
    model.save(tmp_path / "model.keras")
    for part in keras.models.load_model(tmp_path / "model.keras").parts:
        with pytest.raises(UnsupportedModel, match="have different rows"):
            part(tf.constant(ids.astype(str)))


def test_too_many_rows_for_one_file_are_refused_with_both_numbers(tmp_path):
    with serving() as cluster:
        model, _ = trained(cluster.contexts[0])
        with pytest.raises(
            UnsupportedModel, match=r"\d+ bytes of rows or more, .* is 1000\. .*bes"
        ):
            export_with_tables(model, tmp_path / "m.keras", cluster.contexts[0], limit_bytes=1000)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_distributed", [True, False])
@pytest.mark.parametrize("form", ["list", "alone", "CallbackList"])
def test_early_stopping_that_restores_dense_weights_alone_is_refused(is_distributed, form):
    x, y = data(64)
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
        if is_distributed:
            distribute(model, cluster.contexts[0])
        stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
        forms = {"list": [stop], "alone": stop}
        given = forms.get(form) or keras.callbacks.CallbackList([stop], model=model)
        with pytest.raises(SettingsError, match=r"rows of the last one; .*keep_best"):
            model.fit(x, y, verbose=0, callbacks=given)


def test_a_checkpoint_callback_whose_file_holds_no_rows_is_refused_before_the_first_step(tmp_path):
    x, y = data(64)
    model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
    save = keras.callbacks.ModelCheckpoint(tmp_path / "m.h5")
    with pytest.raises(UnsupportedModel, match=r"m\.h5 would lack the rows .*\['user'\].*\.keras"):
        model.fit(x, y, verbose=0, callbacks=[save])
    assert model._tfos_trainer.steps == 0
    save = keras.callbacks.ModelCheckpoint(tmp_path / "m.weights.h5", save_weights_only=True)
    model.fit(x, y, verbose=0, callbacks=[save])


@pytest.mark.parametrize("is_distributed", [True, False])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (keras.callbacks.BackupAndRestore, r"no later fit could restore .*last\.keras"),
        (
            lambda path: keras.callbacks.TensorBoard(path, histogram_freq=1, write_images=True),
            "0 rows, .*drop write_images",
        ),
    ],
)
def test_callbacks_that_cannot_restore_or_draw_rows_are_refused(
    tmp_path, is_distributed, make, text
):
    x, y = data(64)
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
        if is_distributed:
            distribute(model, cluster.contexts[0])
        with pytest.raises(SettingsError, match=text):
            model.fit(x, y, verbose=0, callbacks=[make(tmp_path / "files")])
        histograms = keras.callbacks.TensorBoard(tmp_path / "files", histogram_freq=1)
        model.fit(x, y, verbose=0, callbacks=[histograms])


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_embedding_that_keras_does_not_find_is_refused_by_name(eagerly):
    x, y = data(BATCH)
    hidden = Embedding(DIM, name="hidden")
    own = keras.layers.Lambda(lambda ids: hidden(ids), output_shape=(3, DIM))
    tracked = Embedding(DIM, table="user")
    both = keras.layers.Lambda(lambda rows: rows + hidden(tf.ones_like(rows[..., 0], "int64")))
    for embedding in (own, lambda ids: both(tracked(ids))):
        model = make_model(embedding, keras.optimizers.SGD(0.1), run_eagerly=eagerly)
        with serving() as cluster:
            distribute(model, cluster.contexts[0])
            with pytest.raises(UnsupportedModel, match="layer 'hidden' is not part of the model"):
                model.fit(x, y, batch_size=BATCH, verbose=0)
            assert cluster.pushes == 0
    model = make_model(own, keras.optimizers.SGD(0.1), run_eagerly=eagerly)
    with pytest.raises(UnsupportedModel, match="Keras finds no layer inside a Lambda"):
        model.fit(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_call_with_training_false_trains_as_in_keras_and_another_model_may_be_asked(eagerly):
    teacher = Embedding(DIM, table="teacher", unseen=0.5, trainable=False)

    class Tuned(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self, training):
            super().__init__()
            self.base = Embedding(DIM, table="user")
            self.out = keras.layers.Dense(1)
            self.how = training

        def call(self, x):
            rows = self.base(x, training=self.how) + teacher(x, training=False)
            return self.out(keras.ops.sum(rows, 1))

    x, y = data(4 * BATCH)
    losses = []
    for training in (None, False):
        keras.utils.set_random_seed(7)
        model = Tuned(training)
        model.compile("adagrad", "mse", jit_compile=False, run_eagerly=eagerly)
        found = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        losses.append(found.history["loss"])
        assert model._tfos_trainer.client.manifest.tables[0].name == "user"
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]


def test_dense_weights_of_an_earlier_epoch_are_refused_beside_the_rows_of_the_last(tmp_path):
    x, y = data(64)
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
        distribute(model, cluster.contexts[0])
        model.set_weights(model.get_weights())  # to begin with
        model.fit(x, y, verbose=0)
        best = [weight + 1 for weight in model.get_weights()]
        with pytest.raises(
            SettingsError, match=r"^set_weights .*rows of the last one; .*keep_best"
        ):
            model.set_weights(best)
        model.save_weights(tmp_path / "first.weights.h5")
        model.fit(x, y, verbose=0)
        with pytest.raises(SettingsError, match=r"^load_weights .*rows of the last one; "):
            model.load_weights(tmp_path / "first.weights.h5")
        model.predict(x, verbose=0)  # nothing was loaded that it would have to refuse
        held = cluster.values()
        for weight in model.trainable_weights[1:]:
            np.testing.assert_array_equal(weight.numpy(), held[weight.path])


@pytest.mark.filterwarnings("ignore:You are saving a model that has not yet been built")
@pytest.mark.parametrize("tables", ["inside", "beside"])
def test_an_export_of_values_that_no_server_has_or_of_no_values_is_refused(tmp_path, tables):
    with serving() as cluster:
        context = cluster.contexts[0]
        model, _ = trained(context)
        kernel = model.layers[-1].kernel
        kernel.assign(kernel + 7)
        given = kernel.numpy()
        with pytest.raises(UnsupportedModel, match=r"kernel"):
            export_with_tables(model, tmp_path / "m.keras", context, tables=tables)
        np.testing.assert_array_equal(kernel, given)
        unbuilt = keras.Sequential([Embedding(DIM, table="user"), keras.layers.Dense(1)])
        with pytest.raises(SettingsError, match="the model was never built"):
            export_with_tables(unbuilt, tmp_path / "m.keras", context, tables=tables)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:You are saving a model that has not yet been built")
def test_a_model_whose_train_step_calls_its_layers_alone_is_exported_beside_its_rows(tmp_path):
    class Towers(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self):
            super().__init__()
            ids = keras.Input((3,), dtype="int64")
            rows = Embedding(DIM, table="user", combiner="sum")(ids)
            self.user = keras.Model(ids, keras.layers.Dense(1)(rows))

    model = Towers()
    with serving() as cluster:
        context = cluster.contexts[0]
        with pytest.raises(SettingsError, match=r"call of Towers, .* tables=\"beside\""):
            export_with_tables(model, tmp_path / "saved", context)
        with pytest.raises(UnsupportedModel, match='tables="beside"'):
            export_with_tables(model, tmp_path / "m.keras", context)
        export_with_tables(model, tmp_path / "beside", context, tables="beside")
    assert not model.built
    assert [path.name for path in tmp_path.iterdir()] == ["beside"]


def test_a_plain_copy_follows_each_call_of_a_layer(tmp_path):
    some = keras.Input((3,), dtype="int64", name="some")
    many = keras.Input((5,), dtype="int64", name="many")
    weights = keras.Input((5,), name="weights")
    layer = Embedding(DIM, table="user", combiner="mean", unseen=0.5)
    one, other = layer(some), layer(many, weights)
    model = keras.Model([some, many, weights], keras.ops.sum(one * other, axis=-1, keepdims=True))
    layer(keras.Input((7, 2), dtype="int32"))  # of another model
    batch = [np.arange(12).reshape(4, 3), np.arange(20).reshape(4, 5)]
    batch.append(np.linspace(0.1, 2, 20, dtype="float32").reshape(4, 5))
    with serving() as cluster:
        model.compile(keras.optimizers.SGD(0.5), "mse")
        distribute(model, cluster.contexts[0])
        model.fit(batch, np.ones((4, 1)), verbose=0)
        later = [batch[0], batch[1] + 8, batch[2]]
        expected = model.predict_on_batch(later)
        export_with_tables(model, tmp_path / "m.keras", cluster.contexts[0])
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict_on_batch(later), expected)
    assert sum(isinstance(each, keras.layers.Embedding) for each in loaded.layers) == 1


@pytest.mark.parametrize("keys", [[0, 2, 7], []], ids=["rows", "no rows"])
def test_a_plain_copy_masks_the_id_0(tmp_path, keys):
    given = keras.Input((4,), dtype="int64")
    layer = Embedding(DIM, table="user", mask_zero=True, unseen=0.5)
    pooled = keras.layers.GlobalAveragePooling1D()(layer(given))
    model = keras.Model(given, keras.layers.Dense(1)(pooled))
    rows = np.random.default_rng(1).random((len(keys), DIM)).astype("float32")
    layer.bind(LoadedRows(np.array(keys, np.int64), rows, layer.settings))
    x = np.array([[2, 7, 0, 0], [9, 2, 0, 1], [0, 7, 9, 7]])
    expected = model.predict_on_batch(x)
    plain_copy(model, 1 << 20).save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(loaded.predict_on_batch(x), expected, rtol=1e-6)
    assert not any(isinstance(each, Embedding) for each in loaded.layers)


@pytest.mark.long
def test_any_model_is_a_saved_model_with_its_rows(tmp_path):
    ids = keras.Input((None,), dtype="int64", ragged=True, name="ids")
    word = keras.Input((), dtype="string", name="word")
    joined = [Embedding(DIM, table="user", unseen=0.5, combiner="mean", pad_id=3)(ids)]
    joined.append(Embedding(DIM, table="word", id_kind="uint64")(word))
    both = keras.Model([ids, word], keras.layers.Dense(1)(keras.layers.Add()(joined)))
    lists = tf.ragged.constant([[1, 2], [], [3, 9, 9, 1]], dtype="int64", row_splits_dtype="int64")
    masked = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            Embedding(DIM, mask_zero=True, table="user"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    some = np.array([[1, 2, 0], [0, 7, 7], [9, 0, 5]])
    words = [tf.constant(["a", "b", "a"]), tf.constant(["b", "?", "a"])]
    cases = [
        (both, [lists, words[0]], [lists + 1, words[1]]),
        (masked, tf.constant(some, "int32"), tf.constant(some + 2, "int32")),
        (Tower(), tf.constant(some), tf.constant(some + 2)),
    ]
    for number, (model, x, new) in enumerate(cases):
        model(x)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        with serving() as cluster:
            context = cluster.contexts[0]
            distribute(model, context)
            if isinstance(model, Tower):
                with pytest.raises(UnsupportedModel, match=r"Tower .* trained no batch .*beside"):
                    export_with_tables(model, tmp_path / "no", context)
            batch = (tuple(x) if isinstance(x, list) else x, np.ones((3, 1)))
            model.fit(tf.data.Dataset.from_tensors(batch), shuffle=False, verbose=0)
            path = export_with_tables(model, tmp_path / f"{number}", context)
            expected = model(new, training=False)
            layers = [each for each in model._flatten_layers() if isinstance(each, Embedding)]
            before = [each.source for each in layers]
            saved = tf.saved_model.load(path)
            np.testing.assert_array_equal(saved.serve(new), expected)
            assert [each.source for each in layers] == before
            with pytest.raises(UnsupportedModel, match="limit of one file is 10"):
                export_with_tables(model, tmp_path / "no", context, limit_bytes=10)


class Halved(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # not registered
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate(step) / 2

    def get_config(self):
        return {"rate": keras.saving.serialize_keras_object(self.rate)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["rate"]))


class Quartered(Halved):
    pass


def squares(y, p):  # not registered
    return keras.ops.mean((y - p) ** 2, -1)


@pytest.mark.parametrize("is_sequential", [True, False])
def test_a_plain_copy_is_compiled_with_what_the_program_defines_itself(tmp_path, is_sequential):
    ids = keras.Input((), dtype="int64")
    layers = [Embedding(2, table="t"), keras.layers.Dense(1)]
    model = keras.Sequential([ids, *layers])
    if not is_sequential:
        model = keras.Model(ids, layers[1](layers[0](ids)))
    rate = Quartered(Halved(keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)))
    model.compile(keras.optimizers.Adam(rate), loss=squares, metrics=[squares])
    model.fit(np.arange(8), np.ones((8, 1)), verbose=0)
    plain_copy(model, 1 << 20).save(tmp_path / "m.keras")
    own = {"Halved": Halved, "Quartered": Quartered, "squares": squares}
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects=own)
    assert isinstance(loaded.optimizer._learning_rate, Quartered)
    np.testing.assert_allclose(
        loaded.evaluate(np.arange(8), np.ones((8, 1)), verbose=0),
        model.evaluate(np.arange(8), np.ones((8, 1)), verbose=0),
        rtol=1e-5,
    )
    model.fit(np.arange(8), np.ones((8, 1)), verbose=0)  # it is compiled as before


def test_what_has_no_plain_copy_is_refused_with_the_other_way():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    for model, message in [
        (Tower(), "Tower is a model class of your own"),
        (keras.Model(ids, Embedding(2, combiner="sum")(ids)), "takes ragged ids"),
        (sequential_over_time(), "has an Embedding inside"),
    ]:
        with pytest.raises(UnsupportedModel, match=f"{message}.*beside"):
            plain_copy(model, 1 << 20)


def test_hybrid_has_as_many_batches_under_way_as_a_push_needs():
    x, y = data(8 * BATCH)
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
    model = make_model(Embedding(DIM, table="user"), optimizer)
    too_few = pytest.raises(SettingsError, match=r"staleness_bound=2 .*accumulation_steps=4 needs")
    with serving() as cluster, too_few:
        distribute(model, cluster.contexts[0], consistency="hybrid", staleness_bound=2)
    with serving() as cluster:
        distribute(model, cluster.contexts[0], consistency="hybrid")
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        assert cluster.pushes == 4


@pytest.mark.parametrize(
    ("optimizer", "consistency", "is_aware", "pipeline"),
    [
        (lambda: keras.optimizers.Adam(0.01), "async", True, 0),
        (lambda: keras.optimizers.Adagrad(0.01), "async", False, 1),
        (lambda: keras.optimizers.Adagrad(0.01), "ssp", False, 0),
        (lambda: keras.optimizers.SGD(0.01), "hybrid", False, 0),
    ],
)
def test_defaults_follow_mode_and_rule(optimizer, consistency, is_aware, pipeline):
    with serving() as cluster:
        bound = 2 if consistency == "ssp" else None
        model = make_model(Embedding(DIM, table="user"), optimizer())
        distribute(model, cluster.contexts[0], consistency=consistency, staleness_bound=bound)
        assert cluster.manifest.staleness_aware is is_aware
        assert model._tfos_trainer.pipeline == pipeline


def test_no_lookup_fills_rows_that_a_push_in_flight_fills():
    """A batch that is only accumulated has not waited for the push whose answer brings its rows."""
    x, y = data(16 * BATCH)
    on_their_way: set[int] = set()
    twice: list[int] = []
    a_lookup = threading.Event()

    def address(rows: Any) -> set[int]:
        return {array.ctypes.data for _, array in (rows or {}).values()}

    with serving() as cluster:
        client = cluster.contexts[0].client
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
        model = make_model(Embedding(DIM, table="user"), optimizer)
        distribute(model, cluster.contexts[0], pipeline=2)
        push, look = client.push_pull, client.tables.lookup_into

        def slow_push(*args, next_rows=None, **options):
            filled = address(next_rows)
            on_their_way.update(filled)
            if filled:
                a_lookup.wait(0.2)
            ack = push(*args, next_rows=next_rows, **options)
            on_their_way.difference_update(filled)
            return ack

        def noting_lookup(into, *, training):
            if both := address(into) & on_their_way:
                twice.extend(both)
                a_lookup.set()
            return look(into, training=training)

        vars(client)["push_pull"], vars(client.tables)["lookup_into"] = slow_push, noting_lookup
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert not twice
