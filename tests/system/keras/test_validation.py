"""Validation by a feed: each epoch's own rows, metrics over all workers, and nobody who waits."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.support.keras_training import (
    DEADLINE_S,
    blobs,
    feed_epochs,
    offer,
    rows_of,
    serving,
    together,
)
from tests.support.waiting import wait_until
from tfos.control.messages import FitReading
from tfos.errors import SettingsError
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

BATCH = 8
X, Y = blobs(120)
VAL_X, VAL_Y = blobs(90, seed=1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(**options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"], **options)
    return model


def drive(contexts, num_epochs, train, validation):
    """Feed as the driver does: `train(rank, epoch)` rows, then `validation(rank, epoch)`."""
    channels = [context.feed_channel for context in contexts]
    for epoch in range(num_epochs):
        for feed, rows, with_it in (
            ("input", train, ("validation", epoch)),
            ("validation", validation, None),
        ):
            for rank, channel in enumerate(channels):
                offer(channel, rows(rank, epoch), epoch=epoch, feed=feed)
                channel.flush(feed, epoch, with_it)
            for channel in channels:
                assert channel.wait_flushed(feed, epoch, DEADLINE_S), (feed, epoch)
    for channel in channels:
        for feed in ("input", "validation"):
            channel.finish(feed)


def run(cluster, work, num_epochs, validation, train=None):
    """Run `work(rank)` of every worker beside a driver; return what the workers gave."""
    contexts = cluster.contexts
    train = train or (lambda rank, _: rows_of(X, Y)[rank::2])

    def both(rank):
        if rank < len(contexts):
            try:
                return work(rank)
            finally:
                contexts[rank].feed_channel.drain()  # as the process does when main_fun returns
        return drive(contexts, num_epochs, train, validation)

    return together(both, len(contexts) + 1)[:-1]


class Weights(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.get_weights())


def evaluated(weights, x, y):
    model = make_model()
    model.set_weights(weights)
    return model.evaluate(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("consistency", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_each_epoch_validates_its_own_rows_of_all_workers_on_its_last_parameters(consistency):
    """Worker 1 has one row to validate in the first epoch, and none in the second."""
    share = [
        {0: slice(0, 40), 1: slice(41, 71), 2: slice(71, 80)},
        {0: slice(40, 41), 2: slice(80, 90)},
    ]
    union = [(0, 41), (41, 71), (71, 90)]
    parts = rows_of(VAL_X, VAL_Y)
    with serving(num_workers=2) as cluster:
        models = [make_model() for _ in range(2)]
        watches = [Weights() for _ in range(2)]

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx, consistency=consistency)
            return model.fit(
                FeedDataset(ctx, BATCH),
                epochs=3,
                verbose=0,
                validation_data=FeedDataset(ctx, BATCH, feed="validation"),
                callbacks=[watches[rank]],
            ).history

        histories = run(
            cluster, work, 3, lambda rank, epoch: parts[share[rank].get(epoch, slice(0, 0))]
        )
        assert histories[0] == histories[1]
        for epoch, (start, stop) in enumerate(union):
            expected = evaluated(watches[0].seen[epoch], VAL_X[start:stop], VAL_Y[start:stop])
            got = [histories[0]["val_loss"][epoch], histories[0]["val_accuracy"][epoch]]
            np.testing.assert_allclose(got, expected, rtol=1e-5)
        stats = [context.feed_channel.stats("validation") for context in cluster.contexts]
        assert [(each.taken_rows, each.dropped_rows) for each in stats] == [(79, 0), (11, 0)]
        begin, *epochs, end = cluster.contexts[0].reported
        assert begin == FitReading("input", number=0)
        assert end == FitReading("input", is_over=True, number=0, fed_epoch=3)
        assert [(each.feed, each.fed_epoch, each.rows) for each in epochs] == [
            ("input", epoch, 120) for epoch in range(3)
        ]
        columns = {name: [each.metrics[name] for each in epochs] for name in histories[0]}
        assert columns == histories[0]
        assert cluster.contexts[1].reported == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "is_distributed"),
    [
        ({"validation_freq": 2}, True),
        pytest.param({"validation_steps": 2}, False, marks=pytest.mark.long),
        pytest.param({"validation_freq": 2}, False, marks=pytest.mark.long),
        pytest.param({"validation_steps": 2}, True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_epochs_and_rows_that_keras_does_not_validate_are_passed_over(options, is_distributed):
    sizes = [30, 90, 20, 60]
    with serving() as cluster:
        ctx = cluster.contexts[0]
        watch = Weights()

        def work(_):
            model = make_model()
            if is_distributed:
                distribute(model, ctx)
            return model.fit(
                FeedDataset(ctx, BATCH),
                epochs=4,
                verbose=0,
                validation_data=FeedDataset(ctx, BATCH, feed="validation"),
                callbacks=[watch],
                **options,
            ).history

        (history,) = run(cluster, work, 4, lambda _, epoch: rows_of(VAL_X, VAL_Y)[: sizes[epoch]])
        if "validation_freq" in options:
            expected = [
                evaluated(watch.seen[n], VAL_X[: sizes[n]], VAL_Y[: sizes[n]]) for n in (1, 3)
            ]
            read = 90 + 60
        else:
            expected = [evaluated(seen, VAL_X[:16], VAL_Y[:16]) for seen in watch.seen]
            read = 4 * 16
        np.testing.assert_allclose(history["val_loss"], [loss for loss, _ in expected], rtol=1e-5)
        stats = ctx.feed_channel.stats("validation")
        assert (stats.fed_rows, stats.trained_rows) == (sum(sizes), read)
        assert stats.dropped_rows == sum(sizes) - read


def test_rows_that_nobody_validates_are_dropped_and_counted():
    with serving(num_workers=2) as cluster:

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(make_model(), ctx)
            return len(model.fit(FeedDataset(ctx, BATCH), epochs=3, verbose=0).epoch)

        assert run(cluster, work, 3, lambda *_: rows_of(VAL_X, VAL_Y)) == [3, 3]
        for context in cluster.contexts:
            stats = context.feed_channel.stats("validation")
            assert (stats.fed_rows, stats.taken_rows, stats.dropped_rows) == (270, 0, 270)


def test_early_stopping_follows_the_metrics_of_all_workers_everywhere():
    """Worker 0, the chief, has no rows to validate; those of worker 1 get harder in each epoch."""

    def validation(rank, epoch):
        labels = np.where(np.arange(len(VAL_Y)) < 30 * epoch, 1 - VAL_Y, VAL_Y)
        return rows_of(VAL_X, labels) if rank else []

    with serving(num_workers=2) as cluster:

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(make_model(), ctx, consistency="sync")
            stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
            fitted = model.fit(
                FeedDataset(ctx, BATCH),
                epochs=4,
                verbose=0,
                validation_data=FeedDataset(ctx, BATCH, feed="validation"),
                callbacks=[stop],
            )
            return fitted.history["val_loss"], model.get_weights()

        (losses, weights), (same_losses, same_weights) = run(cluster, work, 4, validation)
        assert losses == same_losses
        assert 2 <= len(losses) < 4
        assert losses[-1] > losses[-2], "it stopped after the first epoch that was worse"
        assert all(np.diff(losses[:-1]) < 0)
        for one, two in zip(weights, same_weights, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("how", ["by its call", "by a call of its own", "later"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_validation_that_the_drivers_call_does_not_feed_is_told(how, epoch, caplog):
    """In epoch 1 behind another fit, whose validation was fed."""
    told = "'validation')) waits for rows, and the call of the driver that feeds 'input' has none"
    with serving() as cluster:
        ctx = cluster.contexts[0]
        model = distribute(make_model(), ctx)
        trained, validating = (
            FeedDataset(ctx, BATCH, feed=name) for name in ("input", "validation")
        )

        def feed(name, number, validation=None):
            offer(ctx.feed_channel, rows_of(X, Y), epoch=number, feed=name)
            ctx.feed_channel.flush(name, number, validation)

        def work(rank):
            if rank:
                wait_until(lambda: told in caplog.text, "the warning")
                feed("validation", epoch)
                return
            model.fit(trained, verbose=0, validation_data=validating)

        for before in range(epoch):
            feed("validation", before)
            feed("input", before, ("validation", before))
            work(0)
        if how != "later":
            feed("validation", epoch)
        feed("input", epoch, ("validation", epoch) if how == "by its call" else None)
        together(work, 2 if how == "later" else 1)
    assert (told in caplog.text) is (how == "later")


def test_epochs_cut_by_steps_do_not_go_with_a_fed_validation():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        model = distribute(make_model(), ctx)
        with pytest.raises(SettingsError, match=r"fit\(steps_per_epoch=...\) ends an epoch before"):
            model.fit(
                FeedDataset(ctx, BATCH),
                steps_per_epoch=2,
                validation_data=FeedDataset(ctx, BATCH, feed="validation"),
            )


def counting_model(*more):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, "sigmoid")])
    metrics = [keras.metrics.FalsePositives(name="wrong"), "accuracy", *more]
    loss = "binary_crossentropy"
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=metrics, jit_compile=False)
    return model


def validated_by_two(given, *more):
    """Return the chief's logs of a fit of two workers, each with `given(rank)`."""
    models = [counting_model(*(make() for make in more)) for _ in range(2)]
    with serving(num_workers=2) as cluster:

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            return model.fit(batch_size=BATCH, epochs=2, verbose=0, **given(rank)).history

        return together(work, 2)[0]


def held_back(rank):
    own = slice(60 * rank, 60 * rank + 60)
    return {"x": X[own], "y": Y[own, None], "validation_split": 0.5}


def sharded(rank):
    rows = tf.data.Dataset.from_tensor_slices((VAL_X, VAL_Y[:, None]))
    return {"x": X, "y": Y[:, None], "validation_data": rows.shard(2, rank).batch(BATCH)}


def by_the_chief(rank):
    data = {"x": X, "y": Y[:, None]}
    return data if rank else data | {"validation_data": (VAL_X, VAL_Y[:, None])}


def shared(_rank):
    return {"x": X, "y": Y[:, None], "validation_split": 0.5}


@pytest.mark.parametrize("given", [held_back, pytest.param(sharded, marks=pytest.mark.long)])
def test_counts_of_rows_that_workers_do_not_share_are_told(given, caplog):
    """The log has their mean, which is a count of rows that all of them share."""
    history = validated_by_two(given)
    model = counting_model()
    if given is held_back:
        rows = np.r_[30:60, 90:120]
        x, y = X[rows], Y[rows]
    else:
        x, y = VAL_X, VAL_Y
    counted = model.evaluate(x, y[:, None], verbose=0, return_dict=True)
    assert counted["wrong"] > 1
    warned = [each for each in caplog.messages if "different rows" in each]
    assert len(warned) == 1
    mean, total = counted["wrong"] / 2, counted["wrong"]
    assert history["val_wrong"] == [mean] * 2
    assert (
        f"val_wrong is {mean}, the mean of the workers' counts, whose sum is {total}" in warned[0]
    )
    assert "accuracy" not in warned[0]
    np.testing.assert_allclose(history["val_accuracy"], counted["accuracy"], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("given", [shared, pytest.param(by_the_chief, marks=pytest.mark.long)])
def test_counts_of_rows_that_workers_share_are_no_matter_for_a_warning(given, caplog):
    history = validated_by_two(given)
    x, y = (X[60:], Y[60:]) if given is shared else (VAL_X, VAL_Y)
    counted = counting_model().evaluate(x, y[:, None], verbose=0, return_dict=True)
    assert history["val_wrong"] == [counted["wrong"]] * 2
    assert "different rows" not in caplog.text


class Share(keras.metrics.MeanMetricWrapper):  # type: ignore[misc]  # Keras has no types
    """The share of positive rows, of which nobody says that its variables may be added."""

    state_is_additive = False

    def __init__(self):
        super().__init__(lambda y_true, _: y_true, name="share")


@pytest.mark.long
def test_what_workers_measured_on_unequal_shares_is_weighted_by_their_rows(caplog):
    """Worker 0 validates 80 rows, worker 1 the other 10."""
    parts = (slice(0, 80), slice(80, 90))

    def given(rank):
        own = (VAL_X[parts[rank]], VAL_Y[parts[rank], None])
        return {"x": X, "y": Y[:, None], "validation_data": own}

    history = validated_by_two(given, Share)
    np.testing.assert_allclose(history["val_share"], [VAL_Y.mean()] * 2, rtol=1e-5)
    assert any("'share'" in each and "weighted by their rows" in each for each in caplog.messages)


def test_a_callback_may_read_on_in_a_validation_that_it_has_ended():
    """Keras has left that loop, so the rows are the program's: they are not a running loop's."""

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

        def on_epoch_end(self, epoch, logs=None):
            left.append(len(list(validation)))

    left: list[int] = []
    with serving() as cluster:
        channel = cluster.contexts[0].feed_channel
        for feed, rows in (("input", rows_of(X, Y)), ("validation", rows_of(VAL_X, VAL_Y))):
            feed_epochs(channel, [rows], finish=True, feed=feed)
        dataset, validation = (
            FeedDataset(cluster.contexts[0], BATCH, feed=feed) for feed in ("input", "validation")
        )
        make_model().fit(dataset, validation_data=validation, callbacks=[Stops()], verbose=0)
    assert left == [-(-len(VAL_X) // BATCH) - 1]
