"""`fit` in stale synchronous mode: uneven workers, skipped steps, and settings that are refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.support.keras_training import blobs, serving, together
from tfos.errors import RequestTimeout, SettingsError, UnsupportedModel, UnsupportedOptimizer
from tfos.keras.fit.distribute import distribute
from tfos.keras.step import trainer

pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

X, Y = blobs(320)
BATCH = 16


def make_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(8, "relu")])
    model.add(keras.layers.Dense(2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.fault("F34")
def test_uneven_workers_train_within_the_bound_and_end_with_the_same_parameters():
    rows = (320, 96)  # 20 and 6 steps an epoch; the second skips one of its steps
    spoiled = X.copy()
    spoiled[40] = np.inf
    data = [(X, Y), (spoiled[: rows[1]], Y[: rows[1]])]
    models = [make_model() for _ in rows]
    with serving(num_workers=2, num_servers=2) as cluster:
        leads = []

        def watch(rank):
            def look(batch, logs):
                done = [cluster.rows(0) // BATCH, cluster.rows(1) // BATCH]
                done[1] += cluster.null_pushes()
                leads.append(done[rank] - done[1 - rank])

            return keras.callbacks.LambdaCallback(on_train_batch_end=look)

        def work(rank):
            distribute(
                models[rank],
                cluster.contexts[rank],
                consistency="ssp",
                staleness_bound=2,
                staleness_aware=True,
                on_nonfinite="skip",
            )
            x, y = data[rank]
            return models[rank].fit(
                x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[watch(rank)]
            )

        first, second = together(work, 2)
        assert [cluster.rows(0), cluster.rows(1)] == [320, 80]
        assert cluster.null_pushes() == 1
        np.testing.assert_array_equal(first.history["loss"], second.history["loss"])  # maybe NaN
        assert max(leads[:12]) <= 3, "a step that was counted, and two ahead of the slowest"
        held = cluster.values()
        for model in models:
            for weight, value in zip(model.trainable_weights, held.values(), strict=True):
                np.testing.assert_array_equal(weight.numpy(), value)
        assert models[0].evaluate(X, Y, verbose=0)[1] > 0.6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"consistency": "ssp"}, "ssp needs the bound"),
        ({"staleness_bound": 2}, "other modes have none"),
        ({"consistency": "sync", "staleness_bound": 0}, "other modes have none"),
        ({"consistency": "ssp", "staleness_bound": -1}, "at least 0, got -1"),
        ({"consistency": "ssp", "staleness_bound": 1.5}, "got 1.5"),
        (
            {"consistency": "sync", "staleness_aware": True},
            "no gradient of dense parameters is stale",
        ),
        ({"consistency": "hybrid"}, "has no tables; use 'sync'"),
        ({"consistency": "hybrid", "staleness_bound": 0}, "from 1 to .*, got 0"),
        ({"consistency": "bsp"}, "must be one of"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(options, text):
    with serving() as cluster, pytest.raises(SettingsError, match=text):
        distribute(make_model(), cluster.contexts[0], **options)


@pytest.mark.parametrize("options", [{"consistency": "sync"}, {"consistency": "ssp"}])
def test_a_step_that_waits_too_long_names_the_worker_and_the_limit(options, monkeypatch):
    monkeypatch.setattr(trainer, "BARRIER_TIMEOUT_S", 1.0)
    bound = 0 if options["consistency"] == "ssp" else None
    models = [make_model(), make_model()]
    with serving(num_workers=2) as cluster:
        for context in cluster.contexts:
            context.client.timeout_s = 1.0

        def begin(rank):
            distribute(models[rank], cluster.contexts[rank], **options, staleness_bound=bound)

        def train_alone():
            for _ in range(3):
                models[0].train_on_batch(X[:BATCH], Y[:BATCH])

        together(begin, 2)
        said = r"waited for that of worker 1 for 1 s.*ctx.ps_client\(\).timeout_s = 7200"
        with pytest.raises(RequestTimeout, match=said):
            train_alone()


def test_ftrl_refuses_rates_that_are_divided_by_staleness():
    x, y = X[:BATCH], Y[:BATCH]
    with serving() as cluster:
        model = make_model()
        model.compile(keras.optimizers.Ftrl(0.1), model.loss, jit_compile=False)
        with pytest.raises(UnsupportedOptimizer, match=r"staleness_aware=True with Ftrl"):
            distribute(model, cluster.contexts[0], staleness_aware=True)
        distribute(model, cluster.contexts[0]).fit(x, y, verbose=0)
        assert not cluster.manifest.staleness_aware


def test_workers_with_different_bounds_are_refused():
    with serving(num_workers=2) as cluster:
        distribute(make_model(), cluster.contexts[0], consistency="ssp", staleness_bound=2)
        with pytest.raises(UnsupportedModel, match=r"staleness_bound=3.*run 2"):
            distribute(make_model(), cluster.contexts[1], consistency="ssp", staleness_bound=3)
