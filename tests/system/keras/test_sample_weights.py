"""Sample and class weights of fed rows: one worker trains and validates as plain Keras does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest

from feeding.arrow.packer import ArrowPacker
from feeding.config import FeedConfig
from tests.support.keras_training import DEADLINE_S, blobs, serving, together
from tfos.keras.data.columns import ColumnRoles
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.usefixtures("deterministic"),
]

BATCH = 16
EPOCHS = 3
COLUMNS: dict[str, Any] = {
    "feature_cols": ["delay", "x"],
    "label_cols": "late",
    "weight_col": "weight",
}


def table(num_rows, seed):
    """Rows as a DataFrame's Arrow batch, and as the (x, y, weight) that plain Keras takes."""
    x, y = blobs(num_rows, 2, seed)
    weight = np.random.default_rng(seed).uniform(0, 3, num_rows)
    weight[::5] = 0.0
    columns = {"late": y, "weight": weight, "x": x[:, 1], "delay": x[:, 0]}
    return pa.RecordBatch.from_pydict(columns), (x, y, weight.astype("float32"))


ROWS, PLAIN = table(200, 1)
VAL_ROWS, VAL_PLAIN = table(90, 2)


def make_model(reduction):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(
        keras.optimizers.SGD(0.1),
        loss,
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
        jit_compile=False,
    )
    return model


def drive(channel):
    """Feed each epoch and then its validation, as the driver does."""
    for epoch in range(EPOCHS):
        for feed, batch, with_it in (
            ("input", ROWS, ("validation", epoch)),
            ("validation", VAL_ROWS, None),
        ):
            packer = ArrowPacker(FeedConfig(chunk_rows=37), feed=feed, epoch=epoch)
            with channel._state.changed:
                for chunk in packer.chunks(iter([batch])):
                    channel._state.queue(feed).offer(chunk)
                channel._state.changed.notify_all()
            channel.flush(feed, epoch, with_it)
            assert channel.wait_flushed(feed, epoch, DEADLINE_S), (feed, epoch)
    for feed in ("input", "validation"):
        channel.finish(feed)


@pytest.mark.parametrize(
    ("consistency", "reduction"),
    [
        ("sync", "sum_over_batch_size"),
        pytest.param("async", "mean_with_sample_weight", marks=pytest.mark.long),
    ],
)
def test_weighted_rows_train_and_validate_as_in_plain_keras_bit_for_bit(consistency, reduction):
    x, y, weight = PLAIN
    plain = make_model(reduction)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    expected = plain.fit(x, y, sample_weight=weight, validation_data=VAL_PLAIN, **options).history
    with serving() as cluster:
        ctx = cluster.contexts[0]

        def work(rank):
            if rank:
                return drive(ctx.feed_channel)
            model = distribute(make_model(reduction), ctx, consistency=consistency)
            validation = FeedDataset(ctx, BATCH, ColumnRoles(**COLUMNS), feed="validation")
            data = FeedDataset(ctx, BATCH, ColumnRoles(**COLUMNS))
            fitted = model.fit(data, epochs=EPOCHS, verbose=0, validation_data=validation)
            return fitted.history, model.get_weights()

        history, weights = together(work, 2)[0]
    for ours, wanted in zip(weights, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    assert set(history) == set(expected)
    for name, wanted in expected.items():
        np.testing.assert_allclose(history[name], wanted, rtol=1e-6, err_msg=name)
    assert history["val_weighted"] != history["val_accuracy"], "the weights are heeded"


@pytest.mark.long
def test_class_weights_beside_sample_weights_train_as_their_product_in_plain_keras():
    """Keras refuses the two together; tests/tfos/keras/data has its own numbers for one alone."""
    x, y, weight = PLAIN
    plain = make_model("sum_over_batch_size")
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    product = weight * np.where(y == 1, 3.0, 0.5).astype("float32")
    fitted = plain.fit(x, y, sample_weight=product, validation_data=VAL_PLAIN, **options)
    with serving() as cluster:
        ctx = cluster.contexts[0]

        def work(rank):
            if rank:
                return drive(ctx.feed_channel)
            model = distribute(make_model("sum_over_batch_size"), ctx, consistency="sync")
            validation = FeedDataset(ctx, BATCH, ColumnRoles(**COLUMNS), feed="validation")
            data = FeedDataset(ctx, BATCH, ColumnRoles(**COLUMNS))
            ours = model.fit(
                data,
                epochs=EPOCHS,
                verbose=0,
                validation_data=validation,
                class_weight={0: 0.5, 1: 3.0},
            )
            return ours.history, model.get_weights()

        history, weights = together(work, 2)[0]
    for ours, wanted in zip(weights, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    for name, wanted in fitted.history.items():
        np.testing.assert_allclose(history[name], wanted, rtol=1e-6, err_msg=name)
