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
        self.sent.fit_reports(numbers)


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
