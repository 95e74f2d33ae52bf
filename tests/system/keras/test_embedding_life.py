"""Models with tables around a step: errors, interrupts, several fits, changes, copies, threads."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from typing import Any

import keras
import numpy as np
import pytest

from ps.client import server_group
from ps.client.retry import exchange
from ps.errors import IdError, NonFiniteGradient, TableFull
from ps.manifest.manifest import Hyper
from ps.manifest.table_spec import Admission
from ps.protocol import messages
from ps.tables.eviction import TtlClock
from tests.support.keras_training import feed_epochs, serving
from tests.system.keras.test_embedding import BATCH, DIM, FromTheMiddle, data, make_model
from tfos.errors import UnsupportedModel, VariablesChanged
from tfos.keras import Embedding
from tfos.keras.data.columns import ColumnRoles
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.embedding import layer
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(230),  # tracing in a process that also runs the servers may stall
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]

MODES: list[Any] = ["async", pytest.param("sync", marks=pytest.mark.long), "hybrid"]
ONLY_HYBRID: list[Any] = [pytest.param(each, marks=pytest.mark.long) for each in ("async", "sync")]
ONLY_HYBRID += ["hybrid"]  # which alone has permits


def user_model(optimizer=None, **settings):
    layer = Embedding(DIM, table="user", name="who", **settings)
    return make_model(layer, optimizer or keras.optimizers.Adagrad(0.3))


def tables_of(cluster):
    return {each.name: each for each in cluster.servers[0].stats().tables}


@pytest.fixture
def clock(monkeypatch):
    """The seconds by which tables of this process age, in a list."""
    now, begun = [0.0], TtlClock.__init__
    monkeypatch.setattr(
        TtlClock, "__init__", lambda ages, ttl_s, _: begun(ages, ttl_s, lambda: now[0])
    )
    return now


def test_validation_counts_no_id_keeps_no_row_young_and_drops_none(clock):
    x, y = np.arange(12).reshape(4, 3), np.ones(4, "float32")
    with serving() as cluster:
        model = user_model(admission=Admission(min_count=2), ttl_s=64.0)
        distribute(model, cluster.contexts[0])

        def look(ids):
            model.evaluate(ids, y, verbose=0)
            model.predict(ids, verbose=0)
            return tables_of(cluster)["user"].rows

        def fit(ids):
            model.fit(ids, y, batch_size=4, verbose=0, validation_data=(x, y))

        fit(x)
        assert look(x) == 0
        fit(x)
        assert look(x) == 12
        clock[0] += 60.0
        assert look(x) == 12
        clock[0] += 6.0
        assert look(x + 100) == 12
        for _ in range(2):
            fit(x + 100)
        assert look(x) == 12
        found = cluster.contexts[0].client.tables.scan("user")
        assert sorted(np.concatenate([ids for ids, _ in found])) == list(range(100, 112))


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_expires_between_its_lookup_and_its_push_begins_anew(clock, mode):
    """Each push adds 1 to each of its rows, which begin with 0."""

    class Wait(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_begin(self, batch, logs=None):
            clock[0] += 66.0 * (batch == 2)  # its rows came with the push before

    x = np.zeros((8, 1), "int64")
    with serving() as cluster:
        ids = keras.Input((1,), dtype="int64")
        layer = Embedding(1, table="user", combiner="sum", initializer="zeros", ttl_s=64.0)
        model = keras.Model(ids, layer(ids))
        model.compile(
            keras.optimizers.SGD(1.0), lambda _, found: -tf.reduce_mean(found), jit_compile=False
        )
        distribute(model, cluster.contexts[0], consistency=mode)
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0, callbacks=[Wait()])
        found = cluster.contexts[0].client.tables.scan("user")
        values = [row for _, rows in found for row in rows.ravel().tolist()]
    assert values == [2.0]  # the two pushes before are gone with its row


# -- changes of the model


@pytest.mark.parametrize("is_local", [False, pytest.param(True, marks=pytest.mark.long)])
def test_freezing_or_freeing_an_embedding_between_fits_is_refused(is_local):
    x, y = data(2 * BATCH)
    since = "the first fit" if is_local else r"ctx\.distribute"
    with serving() as cluster:
        for before in (True, False):
            model = user_model(trainable=before)
            if not is_local:
                distribute(model, cluster.contexts[0])
            model.fit(x, y, batch_size=BATCH, verbose=0)
            model.get_layer("who").trainable = not before
            which = r"no longer trainable \['who'\]" if before else r"new \['who'\]"
            with pytest.raises(VariablesChanged, match=f"changed after {since}.*{which}"):
                model.fit(x, y, batch_size=BATCH, verbose=0)
            model.get_layer("who").trainable = before
            model.fit(x, y, batch_size=BATCH, verbose=0)
            if not is_local:
                break  # the servers have the first model's manifest


def test_a_model_of_this_process_that_is_compiled_again_is_told_what_may_change():
    x, y = data(2 * BATCH)
    model = user_model()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.optimizer.learning_rate = 0.1
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.compile("adagrad", "binary_crossentropy", jit_compile=False)
    with pytest.raises(UnsupportedModel, match=r"again after the first fit.*learning_rate may be"):
        model.fit(x, y, batch_size=BATCH, verbose=0)


def test_a_layers_values_of_a_model_of_this_process_are_told_of_its_fit_and_not_of_a_cluster():
    x, y = data(2 * BATCH)
    model = user_model()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    head = model.layers[-1]
    head.set_weights([value + 1 for value in head.get_weights()])
    told = r"' was changed after the first fit.*Set weights before the first fit"
    with pytest.raises(UnsupportedModel, match=told) as refused:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert "ctx" not in str(refused.value)


class SomeLayers(keras.Model):  # type: ignore[misc]  # Keras has no types
    """`often` twice a step, `rare` and `other` if the batch has their feature, `never` never."""

    def __init__(self):
        super().__init__()
        self.often, self.rare, self.never = (
            Embedding(DIM, table=name, combiner="sum") for name in ("often", "rare", "never")
        )
        self.other = Embedding(DIM, table="often", combiner="sum")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        found = self.often(x["a"]) + self.often(x["a"][:, :1]) - self.often(x["a"][:, 1:])
        if "b" in x:
            found += self.rare(x["b"]) + self.other(x["b"])
        return self.out(found)


@pytest.mark.long
@pytest.mark.parametrize("mode", ONLY_HYBRID)
@pytest.mark.filterwarnings("ignore:.build.*it looks like it has unbuilt state")
def test_layers_that_some_batches_or_no_batches_call(mode):
    x, y = data(4 * BATCH)
    few, all_of_them = {"a": x % 50}, {"a": x % 50, "b": x + 1000}
    with serving() as cluster:
        model = SomeLayers()
        model.compile(keras.optimizers.Adagrad(0.3), "mse", jit_compile=False)
        model({"a": x[:2], "b": x[:2]})
        distribute(model, cluster.contexts[0], consistency=mode)
        model.fit(few, y, batch_size=BATCH, verbose=0)
        tables = tables_of(cluster)
        assert (tables["often"].rows, tables["rare"].rows) == (50, 0)
        for features in (all_of_them, few, all_of_them):
            model.fit(features, y, batch_size=BATCH, verbose=0)
        tables, seen = tables_of(cluster), len(np.unique(x))
        assert tables["often"].rows == 50 + seen
        assert (tables["rare"].rows, tables["never"].rows) == (seen, 0)
        assert cluster.pushes == 16


# -- errors in the middle of a fit


def poisoned(y, at):
    bad = y.copy()
    bad[at] = np.nan
    return bad


def interrupting(cluster, number):
    """Let the push of this number be interrupted before it is sent."""
    client = cluster.contexts[0].client
    original, begun = client.push_pull, []

    def push_pull(*args: Any, **options: Any) -> Any:
        begun.append(1)
        if len(begun) == number:
            raise KeyboardInterrupt
        return original(*args, **options)

    vars(client)["push_pull"] = push_pull


@pytest.mark.fault("F48")
@pytest.mark.fault("F49")
@pytest.mark.parametrize(
    "kind", ["nan", *(pytest.param(each, marks=pytest.mark.long) for each in ("id", "interrupt"))]
)
@pytest.mark.parametrize("mode", ONLY_HYBRID)
def test_a_kept_error_of_a_step_keeps_no_permit_and_the_next_fit_trains(mode, kind):
    """As a notebook keeps the last traceback, and with it the frames that know the batch."""
    x, y = data(6 * BATCH)
    with serving() as cluster:
        model = distribute(user_model(), cluster.contexts[0], consistency=mode, pipeline=None)
        bad, targets = x.copy(), y
        if kind == "nan":
            targets = poisoned(y, 2 * BATCH + 3)
        elif kind == "id":
            bad[2 * BATCH + 3] = -3
        else:
            interrupting(cluster, 3)
        expected = {"nan": NonFiniteGradient, "id": IdError, "interrupt": KeyboardInterrupt}[kind]
        with pytest.raises(expected) as kept:
            model.fit(bad, targets, batch_size=BATCH, shuffle=False, verbose=0)
        assert cluster.pushes == 2
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert cluster.pushes == 2 + 6
        del kept


@pytest.mark.fault("F15")
def test_a_model_without_a_cluster_trains_on_after_an_interrupted_push(monkeypatch):
    x, y = data(4 * BATCH)
    model = user_model()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    pushed: list[str] = []

    def interrupted(calls: Any, times: Any) -> Any:
        if isinstance(calls[0].request, messages.Push):
            pushed.append("")
            if len(pushed) == 2:
                raise KeyboardInterrupt
        return exchange(calls, times)

    with monkeypatch.context() as patched:
        patched.setattr(server_group, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(pushed) == 3  # the second one was asked for again
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert model.optimizer.iterations == 4 + 2 + 4


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_cannot_be_prepared_or_read_loses_no_batch_before_it(mode):
    x, y = data(4 * BATCH)
    bad = x.copy()
    bad[3 * BATCH + 1] = -3

    def failing():
        for start in range(0, 3 * BATCH, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]
        raise ValueError("the user's generator")

    signature = (tf.TensorSpec((None, 3), tf.int64), tf.TensorSpec((None,), tf.float32))
    generated = tf.data.Dataset.from_generator(failing, output_signature=signature)
    with serving() as cluster:
        model = distribute(user_model(), cluster.contexts[0], consistency=mode)
        with pytest.raises(IdError, match="got -3"):
            model.fit(bad, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert cluster.pushes == 3
        with pytest.raises(tf.errors.InvalidArgumentError, match="the user's generator"):
            model.fit(generated, shuffle=False, verbose=0)
        assert cluster.pushes == 6


def test_an_error_of_the_thread_that_reads_ahead_loses_no_batch_before_it():
    x, y = data(4 * BATCH)
    mapped: list[int] = []
    has_failed = threading.Event()

    def map_fn(ids: Any, label: Any) -> Any:
        mapped.append(len(ids))
        if len(mapped) == 4:
            has_failed.set()
            raise ValueError("the user's map_fn")
        return ids, label

    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [list(zip(x, y, strict=True))], finish=True)
        model = distribute(user_model(), ctx)
        wait = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: has_failed.wait(20)  # all is read ahead
        )
        rows = FeedDataset(ctx, BATCH, ColumnRoles(map_fn=map_fn))
        with pytest.raises(ValueError, match="the user's map_fn"):
            model.fit(rows, verbose=0, callbacks=[wait])
        assert (len(mapped), cluster.pushes) == (4, 3)


def test_rows_asked_for_ahead_are_no_older_than_the_parameters_of_an_epochs_first_step():
    x, y = data(4 * BATCH)
    seen: list[bool] = []
    with serving() as cluster:
        model = distribute(user_model(), cluster.contexts[0])
        client, trainer = cluster.contexts[0].client, model._tfos_trainer

        def change(epoch: int, logs: Any) -> None:
            """As other workers, which have more batches in the epoch."""
            batch = client.tables.batch({"user": np.arange(200)})
            batch.push({"user": np.ones((200, DIM), "float32")}, hyper=Hyper(1.0))

        def look(step: int, logs: Any) -> None:
            if step == 0 and trainer.attached:
                rows_of = trainer._attached.tables.rows_of

                def noting(batch: Any) -> Any:
                    rows = rows_of(batch)
                    ids, given = rows.into()["user"]
                    now = client.tables.lookup({"user": ids.unique})["user"]
                    seen.append(np.array_equal(given, now))
                    del vars(trainer._attached.tables)["rows_of"]
                    return rows

                vars(trainer._attached.tables)["rows_of"] = noting

        watch = keras.callbacks.LambdaCallback(on_epoch_end=change, on_train_batch_begin=look)
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        model.fit(rows, epochs=3, steps_per_epoch=2, shuffle=False, verbose=0, callbacks=[watch])
    assert seen == [True] * 3


@pytest.mark.parametrize("mode", ONLY_HYBRID)
def test_lookups_inside_a_step_belong_to_its_batch(mode):
    x, y = data(4 * BATCH)
    with serving() as cluster:
        model = FromTheMiddle()
        model.compile(keras.optimizers.Adagrad(0.3), "mse", jit_compile=False)
        distribute(model, cluster.contexts[0], consistency=mode)
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert cluster.pushes == 4


@pytest.mark.fault("F48")
@pytest.mark.parametrize("mode", ONLY_HYBRID)
def test_steps_that_search_a_loss_scale_push_neither_rows_nor_parameters(mode):
    x, y = data(8 * BATCH)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inner = keras.optimizers.Adagrad(0.3)
        model = user_model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20))
    finally:
        keras.config.set_dtype_policy("float32")
    skipped, rows = [0], [0]  # before the first step and behind each
    with serving() as cluster:
        distribute(model, cluster.contexts[0], consistency=mode)
        trainer = model._tfos_trainer

        def watch(step: int, logs: Any) -> None:
            skipped.append(trainer.skipped_steps)
            rows.append(tables_of(cluster)["user"].rows)

        seen = keras.callbacks.LambdaCallback(on_train_batch_end=watch)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[seen])
        trained = np.diff(skipped) == 0  # a pipeline's older values can overflow later, too
        first = int(np.argmax(trained))
        assert first > 0
        assert rows[: first + 1] == [0] * (first + 1)
        assert cluster.pushes == trainer.steps == np.count_nonzero(trained)
        of_batches = x.reshape(8, BATCH, -1)
        assert tables_of(cluster)["user"].rows == len(np.unique(of_batches[trained]))


@pytest.mark.fault("F50")
@pytest.mark.parametrize("mode", ONLY_HYBRID)
def test_batches_of_padding_or_of_empty_lists_train_the_rest(mode):
    lists = tf.RaggedTensor.from_row_lengths(tf.range(1, 9, dtype=tf.int64), [0] * 8 + [2, 6] * 1)
    y = np.ones((10, 1), "float32")
    ids = keras.Input((None,), dtype="int64", ragged=True)
    ragged = keras.Model(ids, keras.layers.Dense(1)(Embedding(DIM, table="u", combiner="sum")(ids)))
    padded = keras.Input((3,), dtype="int64")
    dense = keras.Model(
        padded, keras.layers.Dense(1)(Embedding(DIM, table="u", combiner="mean", pad_id=0)(padded))
    )
    for model, x, rows in ((ragged, lists, 8), (dense, np.eye(10, 3, -7, dtype="int64") * 5, 1)):
        model.compile("adagrad", "mse", jit_compile=False)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        with serving() as cluster:
            distribute(model, cluster.contexts[0], consistency=mode)
            model.fit(batches, epochs=2, shuffle=False, verbose=0)
            assert cluster.pushes == 6
            assert tables_of(cluster)["u"].rows == rows
            assert np.isfinite(model.predict(batches, verbose=0)).all()


# -- other threads, copies, the end


def test_predict_beside_fit_leaves_the_variables_of_the_step_alone():
    x, y = data(4 * BATCH)
    pulled_by: set[str] = set()
    with serving() as cluster:
        model = distribute(user_model(), cluster.contexts[0])
        client = cluster.contexts[0].client
        pull = client.pull

        def noting(*args: Any, **options: Any) -> Any:
            pulled_by.add(threading.current_thread().name)
            return pull(*args, **options)

        vars(client)["pull"] = noting
        found: list[Any] = []

        def beside(batch: int, logs: Any) -> None:
            look = threading.Thread(
                target=lambda: found.append(model.predict(x, verbose=0)), name="beside"
            )
            look.start()
            look.join()

        watch = keras.callbacks.LambdaCallback(on_train_batch_end=beside)
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[watch])
        assert len(found) == 4
        assert not np.array_equal(found[0], found[-1])
        assert pulled_by == {threading.main_thread().name}


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_local", "how"),
    [
        (False, "copy"),
        pytest.param(True, "pickle", marks=pytest.mark.long),
        pytest.param(False, "pickle", marks=pytest.mark.long),
        pytest.param(True, "copy", marks=pytest.mark.long),
    ],
)
def test_a_copy_of_a_model_predicts_with_its_rows_and_trains_nobody_elses(how, is_local):
    x, y = data(4 * BATCH)
    with serving() as cluster:
        model = user_model()
        if not is_local:
            distribute(model, cluster.contexts[0])
        model.fit(x, y, batch_size=BATCH, verbose=0)
        twin = copy.deepcopy(model) if how == "copy" else pickle.loads(pickle.dumps(model))
        expected = model.predict(x, verbose=0)
        np.testing.assert_array_equal(twin.predict(x, verbose=0), expected)
        clone = keras.models.clone_model(model)
        clone.compile("adagrad", "binary_crossentropy", jit_compile=False)
        clone.fit(x, y, batch_size=BATCH, verbose=0)
        np.testing.assert_array_equal(model.predict(x, verbose=0), expected)


def test_a_save_warns_before_the_table_is_too_large_for_a_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(layer, "MAX_SAVED_BYTES", 10 * 4 * DIM)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), Embedding(DIM, table="user")])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(1))
    model.compile("adagrad", "mse", jit_compile=False)
    for stop, warns in ((8, False), (9, True)):
        model.fit(np.arange(stop)[:, None], np.ones((stop, 1)), verbose=0)
        model.save(tmp_path / "model.keras")
        assert ("a ModelCheckpoint ends its fit" in caplog.text) is warns
    model.fit(np.arange(11)[:, None], np.ones((11, 1)), verbose=0)
    with pytest.raises(UnsupportedModel, match=r"keep checkpoints"):
        model.save(tmp_path / "model.keras")


@pytest.mark.parametrize("failed", ["", "OSError: No space left"])
def test_a_resumed_training_has_the_limits_of_its_program(tmp_path, caplog, monkeypatch, failed):
    x, y = np.arange(200)[:, None], np.ones((200, 1))

    def model(max_rows):
        ids = keras.Input((1,), dtype="int64")
        rows = Embedding(DIM, table="user", max_rows=max_rows)(ids)
        made = keras.Model(ids, keras.layers.Dense(1, name="last")(keras.layers.Flatten()(rows)))
        made.compile("adagrad", "mse", jit_compile=False)
        return made

    with serving() as cluster:
        context = cluster.contexts[0]
        distribute(model(100), context).fit(x[:100], y[:100], verbose=0)
        with pytest.raises(TableFull, match="A run that resumes takes the limits"):
            context.client.tables.load_rows("user", x[100:101, 0], np.ones((1, DIM), "float32"))
        context.client.save(tmp_path, 1)
    caplog.set_level(logging.INFO, "tfos")
    with serving(2) as cluster:
        chief, other = cluster.contexts
        chief.client.restore(tmp_path)
        saves: list[str] = []

        def save_now() -> str:
            saves.append(failed or chief.client.save(tmp_path, None))
            return failed

        monkeypatch.setattr(chief, "save_now", save_now)
        distribute(model(150), other)  # the chief's limits count, and come later
        distribute(model(300), chief)
        assert len(saves) == 1
        chief.client.tables.load_rows("user", x[100:, 0], np.ones((100, DIM), "float32"))
        assert tables_of(cluster)["user"].rows == 200
    assert "table 'user' of this run and of its checkpoint: max_rows 300 and 100" in caplog.text
    assert ("new limits of tables are not saved: OSError: No space left" in caplog.text) is bool(
        failed
    )


def test_the_servers_of_models_without_a_cluster_end_with_the_models():
    x, y = data(BATCH)
    gc.collect()
    before = threading.active_count()
    models = [user_model() for _ in range(2)]
    for model in models:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert threading.active_count() > before
    references = list(map(weakref.ref, models))
    del model, models
    gc.collect()
    assert not any(reference() for reference in references)
    assert threading.active_count() <= before


# -- what an error says


@pytest.mark.fault("F48")
def test_a_row_and_a_gradient_of_rows_that_are_not_finite_are_named():
    x, y = data(2 * BATCH)
    x[3, 1] = 777
    with serving() as cluster:
        model = distribute(user_model(), cluster.contexts[0])
        model.fit(x, y, batch_size=BATCH, verbose=0)
        tables = model._tfos_trainer._attached.tables
        original = tables.rows_of

        def with_nan(batch: Any) -> Any:
            rows = original(batch)
            rows.arrays["user"][np.flatnonzero(rows.routed["user"].unique == 777)] = np.nan
            return rows

        vars(tables)["rows_of"] = with_nan
        message = r"the row of id 777 of table 'user' \(layers \['who'\]\).*nothing was sent"
        with pytest.raises(NonFiniteGradient, match=message):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert cluster.pushes == 2
    with serving() as cluster:
        ids = keras.Input((3,), dtype="int64")
        total = keras.ops.sum(Embedding(DIM, table="user", combiner="sum")(ids), -1, keepdims=True)
        root = keras.layers.Dense(1)(keras.ops.sqrt(total * 0.0))  # whose derivative is infinite
        model = keras.Model(ids, root)
        model.compile("sgd", "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        with pytest.raises(NonFiniteGradient, match=r"gradient of the row of id \d+ of table 'us"):
            model.fit(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.fault("F49")
def test_an_error_of_a_lookup_inside_of_tensorflow_is_raised_as_it_is():
    x, y = data(2 * BATCH)
    bad = x.copy()
    bad[5, 1] = -3
    message = r"'user' takes int64 ids 0.*got -3 at position 16.*layers \['who'\]"
    with serving() as cluster:
        model = distribute(user_model(), cluster.contexts[0])
        model.fit(x, y, batch_size=BATCH, verbose=0)
        for use in (lambda: model.predict(bad, verbose=0), lambda: model.evaluate(bad, y)):
            with pytest.raises(IdError, match=message):
                use()


@pytest.mark.long
def test_an_earlier_error_of_a_lookup_does_not_stand_for_another_one():
    class Checked(FromTheMiddle):
        def call(self, x: Any) -> Any:
            small = tf.debugging.assert_less(x, tf.constant(100, x.dtype), "an id of its own")
            with tf.control_dependencies([] if small is None else [small]):
                x = tf.identity(x)
            return self.out(self.first(x) + self.second(x))

    x, y = data(2 * BATCH)
    with serving() as cluster:
        model = Checked()
        model.compile("sgd", "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        model.fit(x % 100, y, batch_size=BATCH, verbose=0)
        with pytest.raises(IdError, match="got -3"):
            model.first(tf.constant([[1, -3]]))
        with pytest.raises(Exception, match="id") as raised:
            model.predict(np.full_like(x, 200), verbose=0)
        assert "an id of its own" in str(raised.value)
        assert isinstance(raised.value, tf.errors.InvalidArgumentError)


def test_an_error_of_a_lookup_inside_a_step_is_raised_as_it_is():
    class Shifted(FromTheMiddle):
        def call(self, x: Any) -> Any:
            least = keras.ops.cast(keras.ops.min(self.first(x), -1), "int64")
            return self.out(self.first(x) + self.second(least - 3))

    x, y = data(2 * BATCH)
    with serving() as cluster:
        model = Shifted()
        model.compile(keras.optimizers.Adagrad(0.3), "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        with pytest.raises(IdError, match=r"'second' takes int64 ids 0.*got -3 .*\['late'\]"):
            model.fit(x, y, batch_size=BATCH, verbose=0)
