"""Steps and rows of a model that is not distributed: those of all fits of the process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import keras
import pytest

from tests.support.keras_training import Context, blobs, feed_epochs, rows_of, serving
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.callbacks import callbacks
from tfos.keras.fit.distribute import distribute
from tfos.worker.reports.progress_meter import ProgressMeter
from tfos.worker.reports.seen_progress import SeenProgress

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

X, Y = blobs(198)
BATCH, STEPS = 10, 20


@dataclass
class Told(Context):
    """A context that sends as a worker's process does."""

    meter: ProgressMeter = field(default_factory=ProgressMeter)
    told: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        def tell(numbers: dict[str, float]) -> None:
            self.told.append(numbers)
            self.meter.note(numbers)

        self.sent = SeenProgress(tell)

    @property
    def seen_progress(self) -> SeenProgress:
        return self.sent

    def report_numbers(self, numbers: Any) -> None:
        self.sent.report(numbers)


def make_model(steps_per_execution: int = 1) -> keras.Model:
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return model


@pytest.mark.parametrize("per_execution", [1, 6])  # of 20 steps, the last execution has two
@pytest.mark.parametrize("has_callbacks", [(), (0, 1, 2), (1,), (0, 2)])
def test_steps_and_rows_are_those_of_all_fits(has_callbacks, per_execution):
    with serving() as cluster:
        ctx = Told(cluster.contexts[0].client)
        feed_epochs(ctx.feed_channel, [rows_of(X, Y)] * 4, finish=True)
        model, rows = make_model(per_execution), FeedDataset(ctx, BATCH)
        seen = []
        for number, epochs in enumerate((2, 1, 1)):
            given = callbacks(ctx) if number in has_callbacks else []
            model.fit(rows, epochs=epochs, verbose=0, callbacks=given)
            found = ctx.meter.read()
            seen.append(
                [found[name] for name in ("steps", "rows", "epochs_begun", "rows_per_epoch")]
            )
    assert seen == [[STEPS * n, 198 * n, n, 198] for n in (2, 3, 4)]
    for name in ("steps", "rows"):
        values = [each[name] for each in ctx.told]
        assert all(before <= after for before, after in itertools.pairwise(values)), name
    assert [each.steps for each in ctx.reported] == [STEPS] * len(ctx.reported)


def test_steps_of_arrays_go_on_with_new_callbacks():
    with serving() as cluster:
        ctx = Told(cluster.contexts[0].client)
        model = make_model(6)
        for n in (1, 2):
            model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks(ctx))
            assert ctx.told[-1]["steps"] == STEPS * n


def test_batches_on_a_distributed_model_between_its_fits_count_too():
    with serving() as cluster:
        ctx = Told(cluster.contexts[0].client)
        model, lone = distribute(make_model(), ctx), make_model()
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        seen = [ctx.sent.so_far]
        lone.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks(ctx))
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        seen.append(ctx.sent.so_far)
    # Nobody counts the rows of arrays that a model alone trains.
    assert seen == [(2 * STEPS + 1, 2 * 198 + BATCH), (4 * STEPS + 1, 3 * 198 + BATCH)]


def test_a_fit_inside_of_another_one_does_not_count_the_outer_one_twice():
    """As a callback that trains a small model on what the large one has learned."""
    with serving() as cluster:
        ctx = Told(cluster.contexts[0].client)
        model = distribute(make_model(), ctx)

        def probe(*_: Any) -> None:
            make_model().fit(X[:50], Y[:50], batch_size=BATCH, verbose=0, callbacks=callbacks(ctx))

        inner = keras.callbacks.LambdaCallback(on_epoch_begin=probe)
        model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[inner])
        assert ctx.sent.so_far == (3 * STEPS, 3 * 198)


def test_what_main_fun_reports_meanwhile_does_not_stay_in_the_counts():
    with serving() as cluster:
        ctx = Told(cluster.contexts[0].client)
        model = distribute(make_model(), ctx)

        def report(*_: Any) -> None:
            ctx.report_progress(1000, 10_000)

        own = keras.callbacks.LambdaCallback(on_epoch_begin=report)
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[own])
        assert ctx.sent.so_far == (2 * STEPS, 2 * 198)
