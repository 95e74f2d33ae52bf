"""Several fits of one model with tables: every row is trained once, with its own weight.

Parameters and rows count: the gradient of a row is -weight for each of its ids, that of the dense
parameter -weight for each row of the batch, at rate 1.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import keras
import msgspec
import numpy as np
import pytest
import tensorflow as tf

from tests.support.keras_training import Servers, feed_epochs, offer, serving, together
from tests.system.keras.test_embedding_faults import MODES, MOSTLY_HYBRID
from tfos.errors import FeedEndedWarning
from tfos.fit_place import METADATA_NAME, FedEpochs, FitPlace, fed_epochs
from tfos.keras import Embedding
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

BATCH = 8
IDS = 40
BY_MODE: dict[str, dict[str, Any] | None] = {"no cluster": None, **MODES}
ALONE_OR_MOSTLY_HYBRID: list[Any] = ["no cluster", *MOSTLY_HYBRID]
Data = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]
FIRST, SECOND = {0: 1.0, 1: 3.0}, {0: 2.0, 1: 5.0}


class Weights(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The summed weights of the rows that were trained, and by id."""

    def __init__(self):
        super().__init__(name="counted")  # a second model is that of another process
        self.rows = Embedding(1, table="user", combiner="sum", initializer="zeros", name="who")
        self.total = self.add_weight(shape=(1,), initializer="zeros", name="total")

    def build(self, shape):
        self.rows.build(shape)

    def call(self, x):
        return self.rows(x) + self.total

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return -tf.reduce_sum(y_pred[:, 0] * tf.cast(tf.reshape(sample_weight, [-1]), tf.float32))


def make_model(cluster: Servers, mode: str) -> keras.Model:
    model = Weights()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    model(np.zeros((2, 2), "int64"))
    settings = BY_MODE[mode]
    return model if settings is None else distribute(model, cluster.contexts[0], **settings)


def data(num_batches: int, seed: int = 0) -> Data:
    """Ids, labels and sample weights."""
    random = np.random.default_rng(seed)
    x = random.integers(0, IDS, (num_batches * BATCH, 2))
    y = random.integers(0, 2, len(x)).astype("float32")
    return x, y, random.integers(1, 5, len(x)).astype("float32")


def by_class(y: np.ndarray[Any, Any], weights: dict[int, float]) -> np.ndarray[Any, Any]:
    return np.where(y == 1, weights[1], weights[0]).astype("float32")


def check(model: keras.Model, *trained: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    """Compare with the ids and the weight of each row that should have been trained."""
    trainer = model._tfos_trainer
    trainer.pull()
    rows = trainer.client.tables.lookup({"user": np.arange(IDS)})["user"][:, 0]
    expected = np.zeros(IDS, "float32")
    for x, weights in trained:
        np.add.at(expected, x, weights[:, None])
    assert float(model.total.numpy()[0]) == sum(weights.sum() for _, weights in trained)
    np.testing.assert_array_equal(rows, expected)


def stopping(model: keras.Model, batch: int) -> keras.callbacks.Callback:
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda number, logs: setattr(model, "stop_training", number == batch)
    )


@pytest.mark.parametrize("mode", ALONE_OR_MOSTLY_HYBRID)
def test_a_fit_of_arrays_that_is_stopped_and_a_second_one(mode: str):
    x, y, weights = data(8)
    with serving() as cluster:
        model = make_model(cluster, mode)
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        stop = stopping(model, 2)
        model.fit(x, y, sample_weight=weights, epochs=3, callbacks=[stop], **options)
        model.fit(x, y, class_weight=SECOND, **options)
        done = slice(3 * BATCH)
        check(model, (x[done], weights[done]), (x, by_class(y, SECOND)))


@pytest.mark.parametrize("consistency", [pytest.param("async", marks=pytest.mark.long), "sync"])
def test_only_the_chiefs_callbacks_end_an_epoch_in_its_middle(consistency: Any, caplog):
    """Another worker that stopped there would begin the next epoch out of step."""
    x, y, weights = data(4)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "sample_weight": weights}
    with serving(num_workers=2) as cluster:
        models = []
        for _ in range(2):
            models.append(Weights())
            models[-1].compile(keras.optimizers.SGD(1.0), jit_compile=False)
            models[-1](np.zeros((2, 2), "int64"))

        def work(rank: int) -> list[int]:
            model = distribute(models[rank], cluster.contexts[rank], consistency=consistency)
            callbacks = [stopping(model, 1)] if rank else []
            return list(model.fit(x, y, epochs=2, callbacks=callbacks, **options).epoch)

        assert together(work, 2) == [[0, 1], [0, 1]]
        assert cluster.rows(0) == cluster.rows(1) == 2 * len(x)
        assert caplog.text.count("the chief's callbacks decide") == 1


def test_fits_keep_their_numbers_where_a_restarted_chief_skips_one():
    x, y, weights = data(1)
    options = {"batch_size": BATCH, "verbose": 0, "sample_weight": weights}

    def numbers(place: FitPlace | None) -> list[int]:
        with serving() as cluster:
            cluster.contexts[0].fit_place = place
            model = make_model(cluster, "sync")
            for _ in range(2):
                model.fit(x, y, **options)
            return [each.fit for each in cluster.contexts[0].reported if hasattr(each, "fit")]

    (_, before), (number,) = numbers(None), numbers(FitPlace(1, 0))
    assert number == before + 2


def test_a_fit_that_is_asked_to_stop_ends_with_its_epoch():
    x, y, weights = data(8)
    with serving() as cluster:
        model = make_model(cluster, "sync")
        ask = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda number, logs: setattr(cluster.contexts[0], "stop_asked", True)
        )
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(x, y, sample_weight=weights, epochs=3, callbacks=[ask], **options)
        check(model, (x, weights))


@pytest.mark.parametrize("mode", ALONE_OR_MOSTLY_HYBRID)
def test_fits_of_two_feeds_by_turns_with_class_and_sample_weights(mode: str):
    """Batches that are prepared under one fit's class weights may be trained under another's."""
    one, other = data(8), data(5, seed=1)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        for feed, part in (("input", one), ("other", other)):
            offer(ctx.feed_channel, list(zip(*part, strict=True)), epoch=0, feed=feed)
            ctx.feed_channel.flush(feed, 0)
            ctx.feed_channel.finish(feed)
        model = make_model(cluster, mode)
        first, second = FeedDataset(ctx, BATCH), FeedDataset(ctx, BATCH, feed="other")
        model.fit(first, epochs=2, verbose=0, callbacks=[stopping(model, 2)], class_weight=FIRST)
        model.fit(second, verbose=0, callbacks=[stopping(model, 1)])
        model.fit(first, verbose=0, class_weight=SECOND)
        model.fit(second, verbose=0, class_weight=FIRST)
        (x, y, weights), done = one, np.arange(len(one[0])) < 3 * BATCH
        factors = np.where(done, by_class(y, FIRST), by_class(y, SECOND))
        x_2, y_2, weights_2 = other
        factors_2 = np.where(np.arange(len(x_2)) < 2 * BATCH, 1, by_class(y_2, FIRST))
        check(model, (x, weights * factors), (x_2, weights_2 * factors_2))


@pytest.mark.parametrize("mode", ALONE_OR_MOSTLY_HYBRID)
def test_a_callback_that_trains_a_batch_of_its_own_takes_none_away_from_fit(mode: str):
    x, y, weights = data(8)
    own = data(1, seed=1)

    def replay(batch: int, logs: Any) -> None:
        if batch in (2, 4):
            model.train_on_batch(own[0], own[1], sample_weight=own[2])

    with serving() as cluster:
        model = make_model(cluster, mode)
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=replay)
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(x, y, sample_weight=weights, callbacks=[watch], **options)
        check(model, (x, weights), *[(own[0], own[2])] * 2)


def test_a_run_that_resumes_begins_in_the_epoch_that_was_interrupted():
    """Of two fits the first was over, and one of the second's three epochs was trained."""
    with serving() as cluster:
        context, model = cluster.contexts[0], make_model(cluster, "sync")
        context.resumes_epochs = True
        x, y, weights = data(2)
        rows = [(ids, label, weight) for ids, label, weight in zip(x, y, weights, strict=True)]
        left = {"input": FedEpochs(4, 0, FitPlace(1, 1), run="the one before")}
        context.client.set_metadata(METADATA_NAME, msgspec.to_builtins(left))
        saver: Any = SimpleNamespace(
            restored_metadata=context.client.metadata, watch=lambda _: None, num_begun=0
        )
        context.trained_feeds.begin(saver, lambda: context.client, resumes=True)
        for epoch in range(2):
            context.trained_feeds.count("input", epoch, epoch + 1)
        feed_epochs(context.feed_channel, [rows] * 2, finish=False)

        def fed() -> FeedDataset:
            return FeedDataset(context, BATCH)

        assert model.fit(fed(), epochs=3, verbose=0).history == {}
        assert model.fit(fed(), epochs=3, verbose=0).epoch == [1, 2]
        check(model, (x, weights), (x, weights))
        kept = fed_epochs(context.client.metadata())
        assert kept == {"input": FedEpochs(6, 4, FitPlace(1, 3))}


def rates_seen(rates: list[float], model: keras.Model, stop: int | None = None) -> Any:
    """A callback that halves the rate after each epoch; `stop`: the epoch of an interruption."""

    def begin(epoch: int, logs: Any) -> None:
        rates.append(float(model.optimizer.learning_rate.numpy()))
        if epoch == stop:
            raise KeyboardInterrupt

    def halve(epoch: int, logs: Any) -> None:
        model.optimizer.learning_rate = float(model.optimizer.learning_rate.numpy()) / 2

    return keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=halve)


def test_a_run_that_resumes_has_the_learning_rate_that_callbacks_had_made():
    x, y, weights = data(2)
    options = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
    with serving() as cluster:
        context = cluster.contexts[0]
        interrupted: list[float] = []
        resumed: list[float] = []
        after: list[float] = []
        model = make_model(cluster, "async")
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, epochs=4, callbacks=[rates_seen(interrupted, model, 2)], **options)
        context.resumes_rate = True
        model = make_model(cluster, "async")
        model.fit(x, y, epochs=2, callbacks=[rates_seen(resumed, model)], **options)
        assert (interrupted, resumed) == ([1.0, 0.5, 0.25], [0.25, 0.125])
        model = make_model(cluster, "async")
        model.fit(x, y, callbacks=[rates_seen(after, model)], **options)
        assert after == [1.0], "the run before has ended, so this one begins anew"


def test_a_rate_that_came_back_to_the_programs_own_is_the_one_that_is_resumed():
    """A callback lowers the rate, sets it back, and the run is interrupted then, twice."""
    x, y, weights = data(2)
    options = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}

    def setting(model: keras.Model, rates: dict[int, float], stop: int, seen: list[float]) -> Any:
        def begin(epoch: int, logs: Any) -> None:
            seen.append(float(model.optimizer.learning_rate.numpy()))
            if epoch == stop:
                raise KeyboardInterrupt

        def end(epoch: int, logs: Any) -> None:
            model.optimizer.learning_rate = rates[epoch]

        return keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)

    with serving() as cluster:
        seen: list[list[float]] = []
        plans = [({0: 0.5, 1: 1.0}, 2), ({0: 0.5}, 1), ({0: 1.0}, 1), ({}, 0)]
        for number, (rates, stop) in enumerate(plans):
            cluster.contexts[0].resumes_rate = number > 0
            model = make_model(cluster, "async")
            seen.append([])
            callback = setting(model, rates, stop, seen[-1])
            with pytest.raises(KeyboardInterrupt):
                model.fit(x, y, epochs=4, callbacks=[callback], **options)
        assert seen == [[1.0, 0.5, 1.0], [1.0, 0.5], [0.5, 1.0], [1.0]]


@pytest.mark.parametrize(
    ("program", "taken"), [pytest.param(0.5, 0.5, marks=pytest.mark.long), (0.125, 0.0625)]
)
def test_a_later_fit_of_a_run_that_resumes_follows_the_program(
    program: float, taken: float, caplog
):
    """The first fit ended with 1/2; the program gave the second one 1/8, which became 1/16."""
    x, y, weights = data(2)
    options = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
    with serving() as cluster:
        context = cluster.contexts[0]
        model = make_model(cluster, "async")
        model.fit(x, y, callbacks=[rates_seen([], model)], **options)
        model.optimizer.learning_rate = 0.125
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, epochs=4, callbacks=[rates_seen([], model, 1)], **options)
        context.resumes_rate = True
        model = make_model(cluster, "async")
        rates: list[float] = []
        model.fit(x, y, **options)
        model.optimizer.learning_rate = program
        model.fit(x, y, callbacks=[rates_seen(rates, model)], **options)
        assert rates == [taken]
        assert ("0.125, which had become 0.0625" in caplog.text) == (program == 0.5)


@pytest.mark.parametrize("stops", [True, False])
def test_a_run_that_resumes_does_not_go_on_in_a_fit_that_a_callback_had_stopped(*, stops: bool):
    with serving() as cluster:
        context, model = cluster.contexts[0], make_model(cluster, "sync")
        x, y, weights = data(2)
        rows = [(ids, label, weight) for ids, label, weight in zip(x, y, weights, strict=True)]
        saver: Any = SimpleNamespace(restored_metadata=dict, watch=lambda _: None, num_begun=0)
        context.trained_feeds.begin(saver, lambda: context.client, resumes=True)
        context.trained_feeds.count("input", 0, 1)
        feed_epochs(context.feed_channel, [rows], finish=not stops)

        def stop(epoch: int, logs: Any) -> None:
            model.stop_training = stops

        fed = FeedDataset(context, BATCH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FeedEndedWarning)
            model.fit(
                fed,
                epochs=9,
                verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stop)],
            )
        place = FitPlace(1, -1) if stops else FitPlace(0, 1)
        assert fed_epochs(context.client.metadata())["input"].fit == place
