"""Columns of a DataFrame as inputs: text into StringLookup, sample weights, both by name."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from feeding.arrow.packer import ArrowPacker
from feeding.config import FeedConfig
from tests.support.keras_training import Context, serving
from tfos.keras.data.columns import ColumnRoles
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

CARRIERS = ["AA", "DL", "UA"]
ROWS = 120
random = np.random.default_rng(0)
CARRIER = random.choice(CARRIERS, ROWS)
DELAY = random.normal(size=ROWS)
LATE = ((CARRIER == "AA") | (DELAY > 1)).astype(np.int32)
WEIGHT = random.uniform(0, 2, ROWS)
BATCH = pa.record_batch(
    {"carrier": CARRIER, "delay": DELAY, "distance": DELAY**2, "late": LATE, "weight": WEIGHT}
)
X = {"carrier": tf.constant(CARRIER), "numbers": np.stack([DELAY, DELAY**2], 1)}


def feed(ctx: Context, epochs: int) -> None:
    channel = ctx.feed_channel
    for epoch in range(epochs):
        with channel._state.changed:
            for chunk in ArrowPacker(FeedConfig(chunk_rows=50), epoch=epoch).chunks(iter([BATCH])):
                channel._state.queue("input").offer(chunk)
        channel.flush("input", epoch)
    channel.finish("input")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    carrier = keras.Input((), dtype="string", name="carrier")
    numbers = keras.Input((2,), name="numbers")
    known = keras.layers.StringLookup(vocabulary=CARRIERS, output_mode="one_hot")(carrier)
    both = keras.layers.Concatenate()([known, numbers])
    model = keras.Model({"carrier": carrier, "numbers": numbers}, keras.layers.Dense(2)(both))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=["accuracy"])
    return model


@pytest.mark.parametrize("weight_col", [pytest.param(None, marks=pytest.mark.long), "weight"])
def test_text_and_weights_train_as_they_do_without_a_feed(weight_col):
    plain = make_model()
    weights = WEIGHT.astype("float32") if weight_col else None
    plain.fit(X, LATE, sample_weight=weights, batch_size=30, epochs=3, shuffle=False, verbose=0)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed(ctx, 4)
        model = make_model()
        distribute(model, ctx)
        data = FeedDataset(
            ctx,
            30,
            ColumnRoles(
                feature_cols={"carrier": "carrier", "numbers": ["delay", "distance"]},
                label_cols="late",
                weight_col=weight_col,
            ),
        )
        model.fit(data, epochs=3, verbose=0)
        for ours, wanted in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)
        assert model.evaluate(data, verbose=0, return_dict=True)["accuracy"] > 0.7
