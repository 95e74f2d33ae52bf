"""A feed as data for `fit`: every batch in its own epoch, no warning, any number of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from keras.callbacks import EarlyStopping

from feeding.errors import FeedClosed
from feeding.receiver.channel import FeedChannel
from feeding.receiver.feed_queue import FeedStats
from ps.errors import StaleGeneration
from tests.support.keras_training import (
    Context,
    Servers,
    blobs,
    feed_epochs,
    offer,
    rows_of,
    serving,
    together,
)
from tests.support.waiting import WAIT_S, wait_until
from tfos.control.messages import BatchReport, EpochTrained, FitReading, LeaveBatch, TrainBatch
from tfos.errors import (
    FeedEndedWarning,
    NotDistributed,
    RowsReadAheadWarning,
    SettingsError,
    SortedRowsWarning,
)
from tfos.fit_place import FitPlace
from tfos.keras.data.columns import ColumnRoles
from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute
from tfos.worker.trained.feeds import TrainedFeeds

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

BATCH = 8
X, Y = blobs(200)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """How many batches and rows each epoch had, as callbacks see it."""

    def __init__(self, ctx=None):
        super().__init__()
        self.ctx = ctx
        self.seen = []
        self.rows = []
        self.metrics = {}

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.seen[-1] = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs |= self.metrics
        if self.ctx is not None:
            self.rows.append(self.model._tfos_trainer.rows)


def make_model(*, built=True, **options):
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential(([keras.Input((20,))] if built else []) + layers)
    model.compile("adam", LOSS, **options)
    return model


def batches(*counts):
    """Rows for epochs of so many batches; the last batch of an epoch is short."""
    sizes = [count * BATCH - 3 if count else 0 for count in counts]
    return [rows_of(X[:size], Y[:size]) for size in sizes]


def stats(ctx: Context) -> FeedStats:
    return ctx.feed_channel.stats("input")


@pytest.mark.fault("F34")
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("built", [True, False])
def test_each_epoch_trains_its_own_batches(steps_per_execution, built):
    epochs = batches(0, 5, 2, 7)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, epochs, finish=True)
        model = make_model(built=built, steps_per_execution=steps_per_execution)
        distribute(model, ctx)
        watch = Epochs(ctx)
        model.fit(FeedDataset(ctx, BATCH), epochs=4, verbose=0, callbacks=[watch])
        assert watch.rows == [0, 37, 37 + 13, 37 + 13 + 53]
        assert cluster.pushes == 14
        rounded = [-(-n // steps_per_execution) * steps_per_execution for n in (0, 5, 2, 7)]
        assert watch.seen == rounded
        assert stats(ctx).taken_rows == sum(map(len, epochs))


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_model_that_is_not_distributed_trains_all_batches_too(steps_per_execution, capsys):
    epochs = batches(0, 5, 2, 7)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, epochs, finish=True)
        model = make_model(steps_per_execution=steps_per_execution)
        watch = Epochs()
        model.fit(FeedDataset(ctx, BATCH), epochs=4, verbose=2, callbacks=[watch])
        assert int(model.optimizer.iterations) == 14
    printed = capsys.readouterr().out
    assert "7/7" in printed or steps_per_execution == 4
    assert str(2**63 - 1) not in printed


def test_a_feed_that_is_sorted_by_label_is_told():
    order = np.argsort(Y[:400], kind="stable")
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows_of(X[:400][order], Y[:400][order])], finish=True)
        with pytest.warns(SortedRowsWarning, match=r"sorted.*orderBy\(rand\(7\)\).*\.cache"):
            make_model().fit(FeedDataset(ctx, 4), epochs=1, verbose=0)


def test_the_feed_that_a_fit_trains_is_not_measured_inside_of_it():
    """Each of its epochs would be one that is not trained."""
    with serving() as cluster:
        ctx, watch = cluster.contexts[0], Epochs()
        feed_epochs(ctx.feed_channel, batches(3, 3, 2), finish=True)
        rows = FeedDataset(ctx, BATCH)
        with pytest.raises(
            SettingsError, match=r"an epoch of a feed comes only once.*its own dataset"
        ):
            make_model().fit(rows, validation_data=rows, epochs=3, verbose=0, callbacks=[watch])
    assert not watch.seen


def test_forgotten_label_cols_are_named_before_the_first_step():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows_of(X[:40], Y[:40])], finish=True)
        with pytest.raises(SettingsError, match=r"has no labels.*label_cols='…'"):
            make_model().fit(FeedDataset(ctx, 4, ColumnRoles(feature_cols=0)), verbose=0)


LOOPS: dict[str, Callable[[keras.Model, FeedDataset], Any]] = {
    "fit": lambda model, rows: model.fit(rows, verbose=0),
    "validation": lambda model, rows: model.fit(
        dict.fromkeys(("user", "price"), X[:8, :1]), X[:8, 1], validation_data=rows, verbose=0
    ),
    "evaluate": lambda model, rows: model.evaluate(rows, verbose=0),
    "predict": lambda model, rows: model.predict(rows, verbose=0),
}


@pytest.mark.parametrize("distributed", [False, True], ids=["lone", "distributed"])
@pytest.mark.parametrize("loop", list(LOOPS))
def test_features_that_keras_would_give_to_each_others_inputs_are_refused(
    loop: str, distributed: bool
):
    """Evaluation and prediction took them, and gave wrong numbers."""
    rows = [{"user": float(at), "price": 0.5, "label": 1.0} for at in range(8)]
    columns = ColumnRoles(feature_cols={"user": "user", "price": "price"}, label_cols="label")
    for kind, refused in ((OrderedDict, True), (dict, False)):
        inputs = kind((name, keras.Input((1,), name=name)) for name in ("user", "price"))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs["user"] + 0 * inputs["price"]))
        model.compile("sgd", "mse")
        with serving() as cluster:
            ctx = cluster.contexts[0]
            if distributed:
                distribute(model, ctx)
            feed_epochs(ctx.feed_channel, [rows], finish=True)
            expected = (
                pytest.raises(SettingsError, match=r"order \['user', 'price'\].*each OrderedDict")
                if refused
                else contextlib.nullcontext()
            )
            with expected:
                LOOPS[loop](model, FeedDataset(ctx, 4, columns))


def test_an_evaluation_refuses_labels_that_its_loss_would_broadcast():
    rows = [{"x": 1.0, "y": 1.0, "z": 3.0} for _ in range(4)]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for labels, text in ((["y", "z"], "would compare all 2 labels"), (None, "has no labels")):
        with serving() as cluster:
            ctx = cluster.contexts[0]
            feed_epochs(ctx.feed_channel, [rows], finish=True)
            dataset = FeedDataset(ctx, 4, ColumnRoles(feature_cols=["x"], label_cols=labels))
            with pytest.raises(SettingsError, match=text):
                model.evaluate(dataset, verbose=0)


def test_a_refused_evaluation_leaves_a_loop_of_the_programs_own_alone():
    rows = [{"x": 1.0, "y": 1.0, "z": 3.0} for _ in range(4)]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows, rows], finish=True)
        columns = ColumnRoles(feature_cols=["x"], label_cols=["y", "z"])
        dataset = FeedDataset(ctx, 2, columns)
        with pytest.raises(SettingsError, match="would compare all 2 labels"):
            model.evaluate(dataset, verbose=0)
        assert [len(y) for _, y in dataset] == [2]  # the rest of that epoch
        assert [len(y) for _, y in dataset] == [2, 2]


def test_progress_bar_and_evaluation_know_what_is_known(capsys):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(3, 3, 2), finish=True)
        model = make_model()
        dataset = FeedDataset(ctx, BATCH)
        model.fit(dataset, epochs=1, verbose=1)
        seen = [(each["epoch"], each["steps"], each["rows"]) for each in ctx.seen]
        assert list(dict.fromkeys(seen))[-1] == (1, 3, 3 * BATCH - 3)
        loss = model.evaluate(dataset, verbose=0)
        assert loss > 0
        predicted = model.predict(FeedDataset(ctx, BATCH), verbose=0)
        assert predicted.shape == (13, 2)
        assert len(ctx.seen) == len(seen), "neither evaluation nor prediction is progress"
    printed = capsys.readouterr().out
    assert "/Unknown" in printed
    assert "3/3" in printed


@pytest.mark.parametrize("own", [(), (EarlyStopping("loss", patience=9),)])
def test_a_fit_without_our_callbacks_reports_and_its_bar_has_this_epochs_steps(own, capsys):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(3, 6, 2), finish=True)
        model = distribute(make_model(), ctx)
        history = model.fit(FeedDataset(ctx, BATCH), epochs=3, verbose=2, callbacks=list(own))
        printed = capsys.readouterr().out
    assert [f"{n}/{n} " in printed for n in (3, 6, 2)] == [True] * 3
    assert ctx.progress[0] == (0, 0, None)  # fit runs and has no step yet
    told = zip(ctx.progress, ctx.numbers, strict=True)
    steps = [report for report, values in told if values["epoch"] == 2]
    assert [step for step, _, _ in steps] == [4, 5, 6, 7, 8, 9, 9]
    assert steps[-1][2] == pytest.approx(history.history["loss"][1])
    assert steps[-2][2] == pytest.approx(history.history["loss"][1])  # told with the last batch
    assert ctx.numbers[-1]["epochs"] == 3
    assert [n["epoch"] for n in ctx.numbers] == sorted(n["epoch"] for n in ctx.numbers)


class DecidesAll(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """A fit of its own that decides what Keras' fit gets."""

    own_callback = None
    """That it adds to those that it was given."""
    epochs_after = None
    """Known behind Keras' fit."""

    def fit(self, x, epochs=None, verbose=0, callbacks=None, **more):
        history = super().fit(
            x,
            epochs=epochs or 2,
            verbose=2,
            callbacks=[*(callbacks or []), self.own_callback],
            **more,
        )
        self.epochs_after = history.epoch
        return history


def deciding(ctx, own):
    model = DecidesAll([keras.Input((20,)), keras.layers.Dense(2)])
    model.compile("adam", LOSS)
    model.own_callback = own
    return distribute(model, ctx)


def test_a_fit_of_the_class_decides_epochs_lines_and_callbacks_of_a_feed(capsys):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(3, 6), finish=True)
        watch = Epochs(ctx)
        watch.metrics = {"mine": 1.0}
        model = deciding(ctx, watch)
        assert model.fit(FeedDataset(ctx, BATCH)).epoch == [0, 1] == model.epochs_after
        assert watch.seen == [3, 6]
        assert watch.params["steps"] is None, "as in each fit on a feed"
        assert cluster.pushes == 9
        told = [each.metrics.get("mine") for each in ctx.reported if isinstance(each, EpochTrained)]
        assert told == [1.0, 1.0], "by a callback of tfos, behind that of the class"
    printed = capsys.readouterr().out
    assert "Epoch 2/2" in printed
    assert [f"{n}/{n} " in printed for n in (3, 6)] == [True] * 2


class Calls(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """What Keras has called, in order."""

    def __init__(self):
        super().__init__()
        self.calls, self.logs, self.stops = [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("end", epoch))

    def on_train_end(self, logs=None):
        self.calls.append("over")
        self.logs.append(logs)
        self.stops.append(self.model.stop_training)


@pytest.mark.filterwarnings("error::tfos.errors.FeedEndedWarning")
def test_a_fit_of_the_class_goes_on_behind_all_epochs_of_the_feed(caplog, monkeypatch):
    caplog.set_level("INFO", logger="tfos.keras.fit.fit_call")
    with serving() as cluster:
        ctx = cluster.contexts[0]
        stopped = []
        monkeypatch.setattr(ctx.trained_feeds, "fit_stopped", lambda *fit: stopped.append(fit))
        feed_epochs(ctx.feed_channel, batches(2, 3), finish=True)
        calls = Calls()
        model = deciding(ctx, calls)
        history = model.fit(FeedDataset(ctx, BATCH), epochs=AllEpochs())
        assert history.epoch == [0, 1] == model.epochs_after
        assert cluster.pushes == 5
        assert calls.calls == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1), "over"]
        assert [logs["loss"] for logs in calls.logs] == [history.history["loss"][-1]]
        assert calls.stops == [False]
        assert not stopped, "a run that resumes goes on behind these epochs"
    assert not caplog.records


def test_a_fit_of_the_class_that_asks_for_more_than_is_fed_goes_on_and_is_told():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 3), finish=True)
        calls = Calls()
        model = deciding(ctx, calls)
        with pytest.warns(FeedEndedWarning) as caught:
            history = model.fit(FeedDataset(ctx, BATCH), epochs=3)
        (told,) = (str(each.message) for each in caught)
        assert "after 2 epochs, but fit(epochs=3) asked for more" in told
        assert history.epoch == [0, 1] == model.epochs_after
        assert calls.calls == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1), "over"]


def test_a_fit_that_ends_before_its_feed_does_not_wait_for_the_next_epoch():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 3), finish=False)
        model = deciding(ctx, Calls())
        rows = FeedDataset(ctx, BATCH)
        assert model.fit(rows, epochs=2).epoch == [0, 1]
        ctx.feed_channel.finish("input")


class FitsTwice(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """A fit of its own that goes on with other data behind the feed."""

    stops_after = None
    """Of the second fit: whether a callback's stop has reached its end."""

    def fit(self, x, epochs=1, callbacks=None, **more):
        super().fit(x, epochs=epochs, verbose=0, callbacks=callbacks)
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(self, "stop_training", epoch == 1)
        )
        added = [*(callbacks or []), stop]
        history = super().fit(X[:16], Y[:16], epochs=5, verbose=0, callbacks=added)
        self.stops_after = self.stop_training
        return history


def test_a_second_fit_inside_of_a_fit_of_the_class_is_stopped_by_its_callbacks():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 3), finish=True)
        model = FitsTwice([keras.Input((20,)), keras.layers.Dense(2)])
        model.compile("adam", LOSS)
        distribute(model, ctx)
        with pytest.warns(FeedEndedWarning) as caught:
            history = model.fit(FeedDataset(ctx, BATCH), epochs=9)
        texts = [str(each.message) for each in caught]
        (told,) = [each for each in texts if "the feed ended" in each]
        assert "after 2 epochs, but fit(epochs=9) asked for more" in told
        assert history.epoch == [0, 1]
        assert model.stops_after


def test_a_stop_while_the_worker_waits_for_the_next_fed_epoch_ends_the_fit():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        model = distribute(make_model(), ctx)
        feed_epochs(ctx.feed_channel, batches(2), finish=False)
        rows, calls = FeedDataset(ctx, BATCH), Calls()
        start_epoch, waits = rows.start_epoch, threading.Event()

        def noted(*args):
            if calls.calls[-1:] == [("end", 0)]:
                waits.set()
            return start_epoch(*args)

        rows.start_epoch = noted  # type: ignore[method-assign]

        def work(rank):
            if rank == 0:
                return model.fit(rows, epochs=AllEpochs(), verbose=0, callbacks=[calls])
            assert waits.wait(60)
            model.stop_training = True
            offer(ctx.feed_channel, rows_of(X[:32], Y[:32]), epoch=1)
            ctx.feed_channel.flush("input", 1)
            offer(ctx.feed_channel, rows_of(X[:8], Y[:8]), epoch=2)
            ctx.feed_channel.finish("input")
            return None

        history, _ = together(work, 2)
        assert history.epoch == [0, 1]
        assert cluster.pushes == 2 + 1, "workers stop together, at the end of an epoch"
        assert calls.stops == [True]


def test_a_fit_of_the_class_without_a_fed_epoch_is_told_of_code_that_does_not_run():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [], finish=True)
        calls = Calls()
        model = deciding(ctx, calls)
        with pytest.warns(FeedEndedWarning) as caught:
            model.fit(FeedDataset(ctx, BATCH), epochs=3)
        epochs, code = (str(each.message) for each in caught)
        assert "after 0 epochs, but fit(epochs=3) asked for more" in epochs
        assert "inside DecidesAll.fit, so its code after the epochs does not run" in code
        assert model.epochs_after is None
        assert calls.calls == ["over"]


def test_a_worker_that_joins_behind_the_last_fed_epoch_tells_of_code_that_the_others_run():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        ctx.fit_place = FitPlace(0, 2)
        feed_epochs(ctx.feed_channel, [], finish=True)
        model = deciding(ctx, Calls())
        with pytest.warns(FeedEndedWarning, match="The other workers do run that code"):
            model.fit(FeedDataset(ctx, BATCH), epochs=AllEpochs())
        assert model.epochs_after is None


class OwnLoop(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """A fit of its own that does not call Keras'."""

    ends_anyway = False
    """Whether it ends its callbacks where the feed ends, too."""

    def fit(self, x, epochs=1, callbacks=None, **more):
        running = keras.callbacks.CallbackList(callbacks, model=self)
        running.on_train_begin()
        logs = {"mine": 1.0}
        try:
            for epoch in range(epochs):
                running.on_epoch_begin(epoch)
                for batch in x:
                    self.train_on_batch(*batch)
                running.on_epoch_end(epoch, logs)
        except Exception:
            if self.ends_anyway:
                running.on_train_end(logs)
            raise
        running.on_train_end(logs)


def looping(ctx):
    model = OwnLoop([keras.Input((20,)), keras.layers.Dense(2)])
    model.compile("adam", LOSS)
    return distribute(model, ctx)


@pytest.mark.parametrize(
    ("hands_a_list", "ends_anyway"), [(True, False), (False, False), (True, True)]
)
def test_the_end_of_the_feed_ends_the_callbacks_of_a_loop_of_the_class_once(
    hands_a_list, ends_anyway, monkeypatch
):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 3), finish=True)
        ended: list[dict[str, float]] = []
        model = looping(ctx)
        model.ends_anyway = ends_anyway
        workers = model._tfos_trainer.workers
        rendezvous, keys = workers.rendezvous, []

        def noted(key, value):
            keys.append(key)
            return rendezvous(key, value)

        monkeypatch.setattr(workers, "rendezvous", noted)
        own = [keras.callbacks.LambdaCallback(on_train_end=ended.append)]
        given = own if hands_a_list else keras.callbacks.CallbackList(own, model=model)
        with pytest.warns(FeedEndedWarning) as caught:
            assert model.fit(FeedDataset(ctx, BATCH), epochs=3, callbacks=given) is None
        epochs, code = (str(each.message) for each in caught)
        assert "after 2 epochs, but fit(epochs=3)" in epochs
        assert "inside OwnLoop.fit, so its code after the epochs" in code
        assert ended == [{"mine": 1.0}]
        assert keys.count("fit/0/end") == 1, "by the last callback of tfos"
        assert cluster.pushes == 5


@pytest.mark.parametrize("is_own_loop", [True, False])
def test_a_feed_without_a_further_epoch_ends_callbacks_that_know_no_number_of_epochs(is_own_loop):
    """Keras tells it only to the lists that it makes itself."""
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [], finish=True)
        model = looping(ctx) if is_own_loop else distribute(make_model(), ctx)
        ended: list[dict[str, float]] = []
        own = keras.callbacks.LambdaCallback(on_train_end=ended.append)
        given = keras.callbacks.CallbackList([own], model=model)
        with pytest.warns(FeedEndedWarning) as caught:
            model.fit(FeedDataset(ctx, BATCH), epochs=3, callbacks=given)
        assert "after 0 epochs" in str(caught[0].message)
        assert len(ended) == 1
        assert given.callbacks == [own]


def test_a_loop_of_the_class_inside_of_another_fit_ends_its_own_callbacks_alone():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2), finish=True)
        ended = []

        def train_inside(epoch, logs):
            inner = looping(ctx)
            own = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append("inner"))
            with pytest.warns(FeedEndedWarning) as caught:
                inner.fit(FeedDataset(ctx, BATCH), epochs=3, callbacks=[own])
            assert "after 1 epochs, but fit(epochs=3)" in str(caught[0].message)
            ended.append("called")

        around = keras.callbacks.LambdaCallback(
            on_epoch_end=train_inside, on_train_end=lambda logs: ended.append("outer")
        )
        make_model().fit(X[:32], Y[:32], epochs=1, verbose=0, callbacks=[around])
        assert ended == ["inner", "called", "outer"]


def test_what_a_fit_of_the_class_adds_runs_between_the_workers_agreements():
    with serving(num_workers=2) as cluster:
        for rank, epochs in enumerate((batches(2, 2, 2), batches(3, 1, 1))):
            feed_epochs(cluster.contexts[rank].feed_channel, epochs, finish=True)

        def work(rank):
            ctx = cluster.contexts[rank]
            losses: list[float] = []

            def stop_in_the_second(epoch, logs):
                losses.append(logs["loss"])
                if ctx.is_chief:
                    model.stop_training = epoch == 1

            own = keras.callbacks.LambdaCallback(on_epoch_end=stop_in_the_second)
            model = deciding(ctx, own)
            return model.fit(FeedDataset(ctx, BATCH), epochs=3).epoch, losses

        (chief, losses), (other, others_losses) = together(work, 2)
        assert chief == other == [0, 1]
        assert losses == others_losses, "those of all workers"


@pytest.mark.parametrize("built", [True, False])
def test_fewer_epochs_fed_than_fitted_ends_with_a_warning(built):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 3), finish=True)
        model = distribute(make_model(built=built), ctx)
        ended: list[dict[str, float]] = []
        stop = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        end = keras.callbacks.LambdaCallback(on_train_end=ended.append)
        with pytest.warns(FeedEndedWarning, match=r"after 2 epochs, but fit\(epochs=5\)"):
            history = model.fit(FeedDataset(ctx, BATCH), epochs=5, verbose=0, callbacks=[stop, end])
        assert history.epoch == [0, 1]
        assert ended[0]["loss"] == history.history["loss"][-1]
        assert cluster.pushes == 5


def test_more_epochs_fed_than_fitted_are_dropped_and_counted():
    epochs = batches(2, 3, 4)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, epochs, finish=True)
        model = distribute(make_model(), ctx)
        model.fit(FeedDataset(ctx, BATCH), epochs=1, verbose=0)
        ctx.feed_channel.drain()
        found = stats(ctx)
        assert found.taken_rows == len(epochs[0])
        assert found.dropped_rows == len(epochs[1]) + len(epochs[2])


def test_a_second_fit_goes_on_with_the_next_epoch():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 3, 4), finish=True)
        model = distribute(make_model(), ctx)
        seen = []
        for make in (lambda: FeedDataset(ctx, BATCH), lambda: FeedDataset(ctx, BATCH)):
            watch = Epochs()
            model.fit(make(), epochs=1, verbose=0, callbacks=[watch])
            seen += watch.seen
        assert seen == [2, 3]


def test_rows_that_another_dataset_of_the_feed_has_read_ahead_are_told_and_counted():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(9, 2), finish=True)
        model = distribute(make_model(), ctx)
        first, second = FeedDataset(ctx, BATCH), FeedDataset(ctx, BATCH)
        stop = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 1)
        )
        model.fit(first, verbose=0, callbacks=[stop])
        wait_until(lambda: ctx.feed_channel.stats("input").taken_rows == 6 * BATCH, "reading ahead")
        with pytest.warns(RowsReadAheadWarning, match=rf"at least {4 * BATCH} rows ahead"):
            model.fit(second, verbose=0)
        model.fit(second, verbose=0)
        found = ctx.feed_channel.stats("input")
        rows = [len(epoch) for epoch in batches(9, 2)]
        assert found.dropped_rows == 4 * BATCH + 1, "and the rest of a chunk of 7 rows"
        assert found.trained_rows == cluster.rows(0) == sum(rows) - found.dropped_rows


@pytest.mark.fault("F34")
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("consistency", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_two_workers_of_which_one_gets_no_rows(consistency, built):
    with serving(num_workers=2) as cluster:
        models = [make_model(built=built) for _ in range(2)]
        for rank, epochs in enumerate((batches(0, 0, 4), batches(3, 0, 2))):
            feed_epochs(cluster.contexts[rank].feed_channel, epochs, finish=True)

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx, consistency=consistency)
            dataset = FeedDataset(ctx, BATCH)
            return model.fit(dataset, epochs=3, verbose=0).history

        histories = together(work, 2)
        assert histories[0] == histories[1]
        assert len(histories[0]["loss"]) == 2, "nobody had rows in the second epoch"
        assert (cluster.rows(0), cluster.rows(1)) == (29, 21 + 13)


def test_rows_that_arrive_while_training_and_in_parts():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        model = distribute(make_model(), ctx)

        def work(rank):
            if rank == 0:
                return model.fit(FeedDataset(ctx, BATCH), epochs=2, verbose=0).history
            for epoch, parts in enumerate(((3, 11, 30), (9, 9))):
                for size in parts:
                    offer(ctx.feed_channel, rows_of(X[:size], Y[:size]), epoch=epoch)
                ctx.feed_channel.flush("input", epoch)
            return None

        together(work, 2)
        assert cluster.pushes == 6 + 3, "batches are full across partitions"
        assert cluster.rows(0) == 44 + 18


def test_steps_per_epoch_cut_a_fed_epoch_into_several():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(5, 1), finish=True)
        model = distribute(make_model(), ctx)
        watch = Epochs()
        with pytest.warns(UserWarning, match="ran out of data"):
            model.fit(
                FeedDataset(ctx, BATCH), epochs=3, steps_per_epoch=2, verbose=0, callbacks=[watch]
            )
        assert watch.seen == [2, 2, 1]


@pytest.mark.parametrize("consistency", ["sync", "ssp"])
def test_steps_per_epoch_of_a_feed_are_refused_where_workers_wait_for_each_other(consistency):
    """A worker with fewer batches would wait for rows, and the others' pushes for that worker."""
    bound = None if consistency == "sync" else 1
    with serving(num_workers=2) as cluster:
        models = [make_model(), make_model()]
        for ctx, epoch in zip(cluster.contexts, (batches(4), batches(2)), strict=True):
            feed_epochs(ctx.feed_channel, epoch, finish=False)

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx, consistency=consistency, staleness_bound=bound)
            data = FeedDataset(ctx, BATCH)
            expected = rf"steps_per_epoch=2\).*{consistency}.*2 workers.*Leave steps_per_epoch out"
            with pytest.raises(SettingsError, match=expected):
                model.fit(data, epochs=2, steps_per_epoch=2, verbose=0)

        together(work, 2)


def test_steps_per_epoch_of_a_feed_are_warned_of_where_workers_do_not_wait(caplog):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(4), finish=True)
        model = distribute(make_model(), ctx)
        model.fit(FeedDataset(ctx, BATCH), epochs=2, steps_per_epoch=1, verbose=0)
        assert caplog.text.count("are not the fed epochs") == 1


class CutsEpochs(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """A fit of its own that decides how many steps an epoch has."""

    def fit(self, x, callbacks=None, **more):
        return super().fit(x, callbacks=callbacks, steps_per_epoch=2, **more)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_steps_per_epoch_that_a_fit_of_the_class_sets_are_told_like_those_of_the_call(
    num_workers, caplog
):
    with serving(num_workers=num_workers) as cluster:
        models = [CutsEpochs([keras.Input((20,)), keras.layers.Dense(2)]) for _ in range(2)]
        for ctx in cluster.contexts:
            feed_epochs(ctx.feed_channel, batches(4), finish=num_workers == 1)

        def work(rank):
            ctx = cluster.contexts[rank]
            models[rank].compile("adam", LOSS)
            model = distribute(models[rank], ctx, consistency="sync")
            data, given = FeedDataset(ctx, BATCH), {"epochs": 2, "verbose": 0}
            if num_workers == 1:
                model.fit(data, **given)
                return
            with pytest.raises(SettingsError, match=r"steps_per_epoch=2\).*sync.*2 workers"):
                model.fit(data, **given)
            validated = FeedDataset(ctx, BATCH, feed="validation")
            with pytest.raises(SettingsError, match=r"steps_per_epoch=...\) ends an epoch before"):
                model.fit(data, **given, validation_data=validated)

        together(work, num_workers)
        assert caplog.text.count("are not the fed epochs") == int(num_workers == 1)
        assert cluster.pushes == (4 if num_workers == 1 else 0)
        told = [each for each in cluster.contexts[0].reported if isinstance(each, FitReading)]
        feeds = {each.feed for each in told}
        assert feeds == ({""} if num_workers == 1 else set()), "epochs may wait for later rows"


def test_a_feed_that_ends_early_is_said_without_distribution_too():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2), finish=True)
        model = make_model()
        with pytest.warns(FeedEndedWarning, match="the feed has ended"):
            history = model.fit(FeedDataset(ctx, BATCH), epochs=3, verbose=0).history
        assert int(model.optimizer.iterations) == 2
        assert len(history["loss"]) == 1


@pytest.mark.filterwarnings("error::tfos.errors.FeedEndedWarning")
def test_all_epochs_of_a_feed_end_a_fit_without_distribution_too():
    """And an epoch without rows has no metrics, which would be the best ones."""
    with serving() as cluster:
        ctx, model, watch = cluster.contexts[0], make_model(), Epochs()
        feed_epochs(ctx.feed_channel, batches(0, 2, 0, 2), finish=True)
        feed_epochs(ctx.feed_channel, batches(1, 1, 0, 1), finish=True, feed="validation")
        history = model.fit(
            FeedDataset(ctx, BATCH),
            epochs=AllEpochs(),
            verbose=0,
            callbacks=[watch],
            validation_data=FeedDataset(ctx, BATCH, feed="validation"),
        ).history
        assert watch.seen == [0, 2, 0, 2]
        assert (len(history["loss"]), len(history["val_loss"])) == (2, 3)
        assert min(history["loss"] + history["val_loss"]) > 0


@pytest.mark.parametrize("is_distributed", [True, False])
def test_a_list_of_callbacks_of_an_earlier_fit_waits_for_no_epoch_of_the_next(is_distributed):
    """Which may not be fed before this fit has returned."""
    with serving() as cluster:
        ctx, model = cluster.contexts[0], make_model()
        if is_distributed:
            distribute(model, ctx)
        feed_epochs(ctx.feed_channel, batches(1, 1, 1), finish=False)
        dataset = FeedDataset(ctx, BATCH)
        given = keras.callbacks.CallbackList(model=model, add_history=True)
        for epochs in (2, 1):
            model.fit(dataset, epochs=epochs, verbose=0, callbacks=given)
        assert dataset.ended_epoch == 2
        assert len(given.callbacks) == 1
        told = [each for each in ctx.reported if isinstance(each, EpochTrained)]
        assert len(told) == (3 if is_distributed else 0), "each epoch once"


def test_a_loop_of_the_programs_own_goes_on_behind_a_fit_that_was_stopped():
    with serving() as cluster:
        ctx, model = cluster.contexts[0], make_model()
        feed_epochs(ctx.feed_channel, batches(3, 2), finish=True)
        dataset = FeedDataset(ctx, BATCH)

        def stop(batch, logs):
            model.stop_training = True

        stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        model.fit(dataset, verbose=0, callbacks=[stops])
        assert [[len(x) for x, y in dataset] for _ in range(2)] == [[8, 5], [8, 5]]


def test_an_unbuilt_worker_without_rows_validates_the_trained_model():
    with serving(num_workers=2) as cluster:
        models = [make_model(built=False) for _ in range(2)]
        for rank, epochs in enumerate((batches(0, 1), batches(3, 1))):
            feed_epochs(cluster.contexts[rank].feed_channel, epochs, finish=True)

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx, consistency="sync")
            data = FeedDataset(ctx, BATCH)
            return model.fit(data, epochs=2, verbose=0, validation_data=(X, Y)).history

        histories = together(work, 2)
        assert histories[0] == histories[1]
        for one, two in zip(models[0].weights, models[1].weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_labels_in_the_row_dtypes_and_map_fn():
    flat = [[int(label), *map(float, row)] for row, label in zip(X[:20], Y[:20], strict=True)]
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [flat], finish=True)
        dataset = FeedDataset(
            ctx,
            BATCH,
            ColumnRoles(
                label_cols=0,
                feature_cols=slice(1, None),
                dtypes=("float32", "int64"),
                map_fn=lambda x, y: (x * 2, y),
            ),
        )
        x, y = next(iter(dataset))
        np.testing.assert_allclose(x.numpy(), X[:BATCH] * 2, rtol=1e-6)
        np.testing.assert_array_equal(y.numpy(), Y[:BATCH])
        assert (x.dtype.name, y.dtype.name) == ("float32", "int64")


@pytest.mark.parametrize("consistency", ["async", "sync", None])
def test_a_batch_of_which_map_fn_keeps_no_row_is_not_trained(consistency):
    keep = np.ones(40, bool)
    keep[:BATCH] = keep[16:19] = keep[24:] = False
    fed = list(zip(rows_of(X[:40], Y[:40]), keep.tolist(), strict=True))
    flat = [(x, label, kept) for (x, label), kept in fed]
    with serving() as cluster:
        ctx, model = cluster.contexts[0], make_model()
        feed_epochs(ctx.feed_channel, [flat, flat[:BATCH], flat], finish=True)
        if consistency is not None:
            distribute(model, ctx, consistency=consistency)
        columns = ColumnRoles(map_fn=lambda x, y, kept: (x[kept], y[kept]))
        seen = []
        steps = keras.callbacks.LambdaCallback(on_train_batch_end=lambda n, logs: seen.append(n))
        data = FeedDataset(ctx, BATCH, columns)
        history = model.fit(data, epochs=3, verbose=0, callbacks=[steps]).history
        assert seen == [0, 1, 0, 1]
        assert len(history["loss"]) == 2
        assert np.isfinite(history["loss"]).all()
        trained = [rows.trained_rows for rows in stats(ctx).epochs]
        assert (trained, stats(ctx).dropped_rows) == ([40, 8, 40], 0)


def test_a_batch_that_was_looked_at_is_trained_and_counted_once():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows_of(X[:20], Y[:20])], finish=True)
        dataset = FeedDataset(ctx, BATCH)
        model = distribute(make_model(), ctx)
        model(next(iter(dataset))[0])
        assert ctx.feed_channel._state.queue("input").rows(0).done[0] == 0
        model.fit(dataset, verbose=0)
        assert cluster.rows(0) == 20
        assert ctx.feed_channel._state.queue("input").rows(0).done[0] == 20


def test_a_batch_that_is_looked_at_behind_a_fit_that_was_stopped_is_trained_by_the_next():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows_of(X[:40], Y[:40])], finish=True)
        dataset = FeedDataset(ctx, BATCH)
        model = distribute(make_model(), ctx)

        def stop(batch, logs):
            model.stop_training = batch == 1

        stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        model.fit(dataset, verbose=0, callbacks=[stops])
        next(dataset)
        next(iter(dataset))
        model.fit(dataset, verbose=0)
        assert cluster.rows(0) == 40


@pytest.mark.parametrize("is_distributed", [True, False])
def test_a_callback_that_looks_at_a_batch_inside_of_an_epoch_takes_none(is_distributed):
    """The rows that it looked at were not trained, and counted as trained."""
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(3, 3), finish=True)
        dataset = FeedDataset(ctx, BATCH)
        model = distribute(make_model(), ctx) if is_distributed else make_model()
        steps: list[int] = []
        seen: list[np.ndarray] = []

        def look(batch, logs):
            steps.append(batch)
            seen.extend(x.numpy() for x, _ in itertools.islice(dataset, 1))
            if batch == 0:
                with pytest.raises(SettingsError, match="and has taken 1 in this epoch, so a loop"):
                    list(dataset)

        looks = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        model.fit(dataset, epochs=2, verbose=0, callbacks=[looks])
        assert steps == [0, 1, 2] * 2
        assert [each.trained_rows for each in stats(ctx).epochs] == [21, 21]
        assert cluster.rows(0) == 42 * is_distributed
        np.testing.assert_array_equal(np.concatenate(seen[:2]), X[8:21])


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_loop_behind_one_that_an_error_broke_off_has_the_rest(call):
    """It was taken for one inside of the call that had ended, and was refused."""
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(3), finish=True)
        dataset = FeedDataset(ctx, BATCH)
        event = "on_train_batch_end" if call == "fit" else "on_test_batch_end"
        fails = keras.callbacks.LambdaCallback(**{event: lambda batch, logs: 1 / 0})
        with pytest.raises(ZeroDivisionError):
            getattr(make_model(), call)(dataset, verbose=0, callbacks=[fails])
        np.testing.assert_array_equal(np.concatenate([x for x, _ in dataset]), X[8:21])


def test_each_loop_of_the_programs_own_is_an_epoch_and_a_look_takes_nothing():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(2, 1, 3, 2), finish=True)
        dataset = FeedDataset(ctx, BATCH)
        firsts = [next(iter(dataset))[0].numpy() for _ in range(2)]
        np.testing.assert_array_equal(*firsts)
        assert [[len(x) for x, y in dataset] for _ in range(2)] == [[8, 5], [5]]
        watch = Epochs(ctx)
        model = distribute(make_model(), ctx)
        model.fit(dataset, verbose=0, callbacks=[watch])
        assert watch.rows == [21]
        assert sum(len(x) for x, y in dataset) == 13
        with pytest.warns(FeedEndedWarning):
            assert not list(dataset)
        assert [rows.trained_rows for rows in stats(ctx).epochs] == [13, 5, 21, 13]


def test_a_loop_of_the_programs_own_that_is_broken_off_goes_on_behind_its_last_batch():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(4), finish=True)
        dataset = FeedDataset(ctx, BATCH)
        some = [x.numpy() for _, (x, _) in zip(range(2), dataset, strict=False)]
        (x, _), *others = dataset
        np.testing.assert_array_equal(np.concatenate([*some, x.numpy()]), X[:24])
        assert len(others) == 1


def test_errors_of_feed_and_arguments_reach_fit():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        for wrong in (0, -1, 1.5, "32", True):
            with pytest.raises(SettingsError, match="batch_size must be an int >= 1, got "):
                FeedDataset(ctx, wrong)  # type: ignore[arg-type]  # on purpose
        FeedDataset(ctx, np.int64(32))  # type: ignore[arg-type]  # of a grid of numpy's
        model = distribute(make_model(), ctx)
        with pytest.raises(SettingsError, match="contain their targets"):
            model.fit(FeedDataset(ctx, BATCH), sample_weight=Y)
        with pytest.raises(SettingsError, match="a dict from class to weight"):
            model.fit(FeedDataset(ctx, BATCH), class_weight="balanced")
        offer(ctx.feed_channel, rows_of(X[:20], Y[:20]), epoch=0)
        dataset = FeedDataset(ctx, BATCH, ColumnRoles(feature_cols="pixels", label_cols="digit"))
        with pytest.raises(
            SettingsError, match="feature_cols='pixels', but the rows have 2 values"
        ):
            next(dataset)
        waiting = FeedDataset(ctx, BATCH, feed="other")
        ctx.feed_channel.close()
        with pytest.raises(FeedClosed):
            next(waiting)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_that_was_read_ahead_comes_in_its_batch_s_turn(error):
    readers: list[threading.Thread] = []

    def map_fn(x, y):
        if readers:
            raise error("of the second batch")
        readers.append(threading.current_thread())
        return x, y

    with serving() as cluster:
        ctx = cluster.contexts[0]
        offer(ctx.feed_channel, rows_of(X[: 2 * BATCH], Y[: 2 * BATCH]), epoch=0)
        dataset = FeedDataset(ctx, BATCH, ColumnRoles(map_fn=map_fn))
        assert dataset.start_epoch()
        readers[0].join(WAIT_S)
        assert dataset.upcoming(1) is None
        next(dataset)
        with pytest.raises(error, match="of the second batch"):
            next(dataset)


def test_all_epochs_of_a_stream_are_trained_and_each_is_told_of_once_every_worker_has_it():
    said: list[BatchReport] = []
    with serving(2) as cluster:
        chief, other = cluster.contexts

        def answer(report):
            said.append(report)
            if report.feed and report.is_done:
                expect(report.number + 1)

        chief.trained_feeds = TrainedFeeds(answer)
        chief.trained_feeds.begin(None, chief.ps_client)
        noted: list[tuple[int, int]] = []

        def expect(epoch):
            chief.trained_feeds.expect(
                TrainBatch("input", epoch, epoch, "q", epoch + 10, holds=True, saves=False)
            )

        def set_metadata(name, value, *, of_run=False):
            noted.append((value["q"], cluster.rows(0) + cluster.rows(1)))

        chief.client.set_metadata = set_metadata  # type: ignore[method-assign]
        expect(0)
        feed_epochs(chief.feed_channel, batches(2, 0, 3), finish=True)
        feed_epochs(other.feed_channel, batches(1, 4, 0), finish=True)

        def train(rank):
            ctx = cluster.contexts[rank]
            model = make_model()
            distribute(model, ctx)
            history = model.fit(FeedDataset(ctx, BATCH), epochs=AllEpochs(), verbose=0)
            assert history.epoch == [0, 1, 2]

        together(train, 2)
        sizes = [13 + 5, 29, 21]
        assert noted == [(10, sizes[0]), (11, sum(sizes[:2])), (12, sum(sizes))]


class Trained(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Rows that count as trained whenever a batch has just been computed."""

    def __init__(self, ctx):
        super().__init__()
        self._ctx = ctx
        self.rows = []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append(stats(self._ctx).trained_rows)


@pytest.mark.fault("F01")
@pytest.mark.parametrize(
    ("pipeline", "per_push", "trained"),
    [
        (0, 1, [[0, 1, 2, 3, 4], [0, 1, 2]]),
        (2, 1, [[0, 0, 0, 1, 2], [0, 0, 0]]),
        (0, 2, [[0, 0, 2, 2, 4], [0, 1, 1]]),  # the second epoch's first batch completes a sum
        (1, 2, [[0, 0, 0, 0, 2], [0, 0, 0]]),
    ],
)  # batches of each epoch, when one more was trained
def test_rows_are_trained_when_fit_comes_back_and_the_servers_have_acknowledged(
    pipeline, per_push, trained
):
    epochs = batches(5, 3)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, epochs, finish=True)
        model = make_model()
        steps = None if per_push == 1 else per_push
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps), LOSS)
        distribute(model, ctx, pipeline=pipeline)
        watch = Trained(ctx)
        model.fit(FeedDataset(ctx, BATCH), epochs=2, verbose=0, callbacks=[watch])
        first, second = len(epochs[0]), len(epochs[1])
        # Read ahead are all batches of the epoch by then.
        assert watch.rows[:5] == [each * BATCH for each in trained[0]]
        assert watch.rows[5:] == [first + each * BATCH for each in trained[1]]
        found = stats(ctx)
        assert (found.trained_rows, found.in_flight_rows) == (first + second, 0)
        assert ctx.feed_channel.wait_flushed("input", 1, 1.0)
        assert [each.trained_rows for each in found.epochs] == [first, second]


@pytest.mark.fault("F01")
@pytest.mark.parametrize(
    ("pipeline", "per_push", "under_way"),
    [(0, None, [0, 0, 0, 0, 0]), (1, None, [1, 2, 2, 1, 2]), (0, 2, [1, 2, 0, 1, 2])],
)  # of batches 0 to 4, of which 1 and 4 are skipped
def test_skipped_batches_do_not_count_those_before_them_as_trained(pipeline, per_push, under_way):
    rows = [
        (np.full_like(x, np.nan) if place // BATCH in (1, 4) else x, y)
        for place, (x, y) in enumerate(batches(5)[0])
    ]
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows], finish=True)
        model = make_model()
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=per_push)
        model.compile(sgd, LOSS, jit_compile=False)
        distribute(model, ctx, pipeline=pipeline, on_nonfinite="skip")
        watch = Trained(ctx)
        model.fit(FeedDataset(ctx, BATCH), verbose=0, callbacks=[watch])
        behind = [done - number for done, number in enumerate([0, *under_way[:4]])]
        assert watch.rows == [each * BATCH for each in behind]
        assert stats(ctx).trained_rows == len(rows)


def test_fit_on_a_feed_is_refused_if_the_servers_are_left_out(monkeypatch):
    def refuse(what):
        raise NotDistributed(what)

    with serving() as cluster:
        ctx = cluster.contexts[0]
        monkeypatch.setattr(ctx, "check_servers_used", refuse)
        feed_epochs(ctx.feed_channel, batches(2, 2), finish=True)
        model = make_model()
        rows = FeedDataset(ctx, BATCH)
        assert model.evaluate(rows, verbose=0) > 0, "evaluation trains nothing"
        with pytest.raises(NotDistributed, match="fit"):
            model.fit(rows, verbose=0)
        distribute(model, ctx)
        assert model.fit(rows, verbose=0).history["loss"], "no row is lost by the refusal"
        assert ctx.seen == [], "a distributed model reports its progress itself"


@pytest.mark.parametrize("is_distributed", [True, False])
def test_fed_labels_that_keras_would_broadcast_over_one_unit_are_refused(is_distributed):
    rows = [(row, np.zeros(2, np.float32)) for row in X[: 3 * BATCH]]
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows], finish=True)
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, name="price")])
        model.compile("sgd", "mse")
        if is_distributed:
            distribute(model, ctx)
        text = r"'price' have the shape \[batch, 2\] and the output has \[batch, 1\]"
        with pytest.raises(SettingsError, match=text):
            model.fit(FeedDataset(ctx, BATCH), verbose=0)
        assert not cluster.pushes


def test_a_list_of_columns_for_a_model_with_one_input_is_refused_where_keras_drops_one():
    rows = [(np.zeros(2, np.float32), 1.0, 0.0) for _ in range(BATCH)]
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows], finish=True)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        distribute(model, ctx)
        columns = ColumnRoles(feature_cols=[0, 1], label_cols=2)
        with pytest.raises(SettingsError, match=r"has 2 inputs.* and the model has one"):
            model.fit(FeedDataset(ctx, BATCH, columns), verbose=0)
        assert not cluster.pushes


def test_an_epoch_without_rows_before_the_first_batch_has_no_metrics():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, batches(0, 2), finish=True)
        model = distribute(make_model(metrics=["accuracy"]), ctx)
        history = model.fit(FeedDataset(ctx, BATCH), epochs=2, verbose=0).history
    assert {name: len(values) for name, values in history.items()} == {"loss": 1, "accuracy": 1}


@pytest.mark.fault("F01")
def test_a_worker_that_waits_for_rows_holds_up_nobody_who_trains_lost_ones_again():
    """In sync, worker 0 has ended epoch 0, and its next rows come only after worker 1's."""
    with serving(num_workers=2) as cluster:
        channels = [context.feed_channel for context in cluster.contexts]
        for channel in channels:
            feed_epochs(channel, [rows_of(X[:16], Y[:16])], finish=False)

        def work(rank: int) -> int:
            if rank == 2:
                return drive()
            context = cluster.contexts[rank]
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), LOSS)
            distribute(model, context, consistency="sync")
            model.fit(FeedDataset(context, BATCH), epochs=2, verbose=0)
            return model._tfos_trainer.steps

        def drive() -> int:
            wait_until(lambda: cluster.rows(0) == cluster.rows(1) == 16, "epoch 0")
            offer(channels[1], rows_of(X[:16], Y[:16]), epoch=1)
            channels[0].feed_again("input", 0)
            wait_until(lambda: cluster.rows(1) == 32, "the rows of worker 1")
            assert cluster.rows(0) == 16
            offer(channels[0], rows_of(X[:16], Y[:16]), epoch=1)
            for channel in channels:
                channel.flush("input", 1)
                channel.finish("input")
            return 0

        assert together(work, 3) == [4, 4, 0]


ENDS = (FeedClosed, StaleGeneration)
"""How a worker ends that was lost while it read rows."""


def awaited(cluster: Servers, *endings: str) -> list[tuple[int, ...]]:
    """Return for whom others wait at the rendezvous whose names end so."""
    opened = cluster.servers[0].stats().open_rendezvous
    return [each.missing for each in opened if each.key.endswith(endings)]


class Looks(threading.Event):
    """Says whether somebody who waits for more than this event has looked at it."""

    has_looked = False

    def is_set(self):
        self.has_looked = True
        return super().is_set()


@pytest.mark.fault("F01")
@pytest.mark.parametrize("is_whole", [True, False], ids=["fed again", "revoked"])
def test_a_micro_batch_is_not_noted_while_rows_of_a_lost_worker_are_left(is_whole):
    """The chief waits for worker 1 alone, and its loss lets the chief go on at once."""
    noted, told, stopped = list[int](), list[list[int]](), Looks()
    with serving(num_workers=2) as cluster:
        chief, other = cluster.contexts
        feeds = chief.trained_feeds = TrainedFeeds(lambda _: None, stopped)
        feeds.begin(None, chief.ps_client)
        feeds.expect(TrainBatch("input", 1, 0, "q", 7, holds=True, saves=False))
        stopped.has_looked = False
        chief.client.set_metadata = lambda _, value: noted.append(value["q"])  # type: ignore[method-assign,assignment,misc]
        feed_epochs(chief.feed_channel, [rows_of(X[:16], Y[:16])], finish=True)
        offer(other.feed_channel, rows_of(X[:16], Y[:16]), epoch=0)

        def work(rank):
            if rank == 2:
                drive()
                return
            context = cluster.contexts[rank]
            model = distribute(make_model(), context)
            ends = contextlib.nullcontext() if rank == 0 else pytest.raises(ENDS)
            with ends:
                model.fit(FeedDataset(context, BATCH), epochs=1, verbose=0)

        def drive():
            wait_until(
                lambda: awaited(cluster, "/metrics") == [(1,)], "the chief at the end of the epoch"
            )
            cluster.servers[0].worker_lost(1)
            wait_until(lambda: bool(noted) or stopped.has_looked, "what the chief does then")
            told.append([*noted])
            if is_whole:
                feeds.come_to("input", 1)
            else:
                feeds.leave(LeaveBatch("input", 1, in_part=True))
            other.feed_channel.close()

        together(work, 3)
    assert told == [[]]
    assert noted == [7] * is_whole


@pytest.mark.fault("F01")
@pytest.mark.parametrize("consistency", ["sync", pytest.param("ssp", marks=pytest.mark.long)])
def test_rows_lost_at_the_end_of_a_recorded_epoch_are_trained_outside_of_the_others_barrier(
    consistency,
):
    """Worker 2 is lost in epoch 0, and its next attempt trains the rest while 0 and 1 wait."""
    noted: list[tuple[int, int]] = []
    held = {}
    with serving(num_workers=3, on_lost="continue") as cluster:
        chief, _, lost = cluster.contexts
        feeds = chief.trained_feeds = TrainedFeeds(lambda _: None)
        feeds.begin(None, chief.ps_client)
        feeds.expect(TrainBatch("input", 1, 0, "q", 7, holds=True, saves=False))

        def set_metadata(name, value, *, of_run=False):
            noted.append((value["q"], sum(map(cluster.rows, range(3)))))

        chief.client.set_metadata = set_metadata  # type: ignore[method-assign]
        for context in cluster.contexts[:2]:
            feed_epochs(context.feed_channel, batches(1), finish=True)
        offer(lost.feed_channel, rows_of(X[:BATCH], Y[:BATCH]), epoch=0)
        again = replace(
            lost,
            client=lost.make_client(100),
            feed_channel=FeedChannel(),
            fit_place=FitPlace(0, 0),
        )
        feed_epochs(again.feed_channel, [rows_of(X[: 4 * BATCH], Y[: 4 * BATCH])], finish=True)

        def fit(context):
            model = distribute(
                make_model(),
                context,
                consistency=consistency,
                staleness_bound=1 if consistency == "ssp" else None,
            )
            weights = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: held.update({context.rank: model.get_weights()})
            )
            dataset = FeedDataset(context, BATCH)
            model.fit(dataset, epochs=1, verbose=0, callbacks=[weights])

        def work(rank):
            if rank == 3:
                drive()
            elif rank < 2:
                fit(cluster.contexts[rank])
            else:
                with pytest.raises(ENDS):
                    fit(lost)
                fit(again)

        def drive():
            wait_until(lambda: awaited(cluster, "/metrics") == [(2,)], "the end of the epoch")
            wait_until(lambda: cluster.rows(2) == BATCH, "the first batch of worker 2")
            cluster.servers[0].worker_lost(2)
            behind = ("/decided", "/decision")
            wait_until(lambda: awaited(cluster, *behind) == [(0,)], "worker 1 behind it")
            lost.feed_channel.close()
            try:
                is_trained = again.feed_channel.wait_flushed("input", 0, 15.0)
                assert is_trained, "the pushes of the next attempt wait for worker 1"
                assert not noted
            finally:
                feeds.come_to("input", 1)

        try:
            together(work, 4)
            newest = [*cluster.values().values()]
        finally:
            again.feed_channel.close()
            again.client.close()
    assert noted == [(7, 2 * (BATCH - 3) + 5 * BATCH)]
    for rank in range(3):
        for weight, value in zip(held[rank], newest, strict=True):
            np.testing.assert_array_equal(weight, value, err_msg=f"worker {rank}'s callbacks")
