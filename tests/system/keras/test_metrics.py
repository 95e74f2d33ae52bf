"""Metrics of several workers: an epoch's logs have the value over all rows, also of no means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import msgspec
import numpy as np
import pytest
from keras.src.trainers.compile_utils import CompileMetrics

from ps.protocol.messages import MAX_OPEN_BYTES
from tests.support.keras_training import blobs, rows_of, serving
from tests.system.keras.test_validation import run
from tfos.keras.data.columns import ColumnRoles
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute
from tfos.keras.fit.metric_states import (
    EpochMetrics,
    MetricStates,
    inexact,
    measure,
    uncommon,
)

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

X, Y = blobs(150)
VAL_X, VAL_Y = blobs(70, seed=1)
Y, VAL_Y = Y[:, None], VAL_Y[:, None]
SHARES = (slice(0, 23), slice(23, 150))
VAL_SHARES = (slice(0, 0), slice(0, 70))


@keras.saving.register_keras_serializable(__name__)
class Misses(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
    """Root of the number of wrong answers: no mean, of a count that may be added."""

    state_is_additive = True

    def __init__(self, name="misses", **options):
        super().__init__(name=name, **options)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        wrong = keras.ops.not_equal(keras.ops.cast(y_pred > 0.5, "int64"), y_true)
        self.count.assign_add(keras.ops.sum(keras.ops.cast(wrong, "float32")))

    def result(self):
        return keras.ops.sqrt(self.count)


class Largest(Misses):
    """The largest answer: two workers' values must not be added."""

    state_is_additive = None  # type: ignore[assignment]  # as if nothing was said

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(keras.ops.maximum(self.count, keras.ops.max(y_pred)))

    def result(self):
        return self.count


def make_model(*more):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, "sigmoid")])
    metrics = [
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.F1Score(threshold=0.5, average=None, name="f1"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.FalsePositives(name="false_positives"),
        Misses(),
        *more,
    ]
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=metrics)
    return model


def test_logs_of_unequal_shares_are_the_values_over_all_rows(caplog):
    """Worker 0, the chief, has no rows to validate."""
    parts, val_parts = list(zip(X, Y, strict=True)), list(zip(VAL_X, VAL_Y, strict=True))
    with serving(num_workers=2) as cluster:
        models = [make_model(Largest("largest")) for _ in range(2)]

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx)

            return model.fit(
                FeedDataset(ctx, 8),
                epochs=2,
                verbose=0,
                validation_data=FeedDataset(ctx, 8, feed="validation"),
            ).history

        histories = run(
            cluster,
            work,
            2,
            lambda rank, _: val_parts[VAL_SHARES[rank]],
            lambda rank, _: parts[SHARES[rank]],
        )
    for name in histories[0]:
        np.testing.assert_array_equal(histories[0][name], histories[1][name], name)
    model = make_model()
    alone = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    validated = model.evaluate(VAL_X, VAL_Y, batch_size=8, verbose=0, return_dict=True)
    expected = alone | {f"val_{name}": value for name, value in validated.items()}
    for name, value in expected.items():
        for epoch in range(2):
            np.testing.assert_allclose(
                histories[0][name][epoch], value, rtol=0, atol=1e-6, err_msg=name
            )
    (warning,) = [each for each in caplog.messages if "'largest'" in each]
    assert "mean of the workers' own values, weighted by their rows" in warning
    assert "set state_is_additive = True in the class" in warning
    told = [each for each in caplog.messages if "left out at the driver" not in each]
    assert not any(f"'{name}'" in each for name in expected for each in told)


def test_metrics_that_keras_has_numbered_apart_are_told(caplog):
    """The chief has made a metric more than worker 1, as for a model of its own."""
    parts = list(zip(X, Y, strict=True))
    with serving(num_workers=2) as cluster:
        counts = [keras.metrics.TruePositives() for _ in range(2)]
        models = [make_model(each) for each in counts]
        names = [each.name for each in counts]
        assert names[0] != names[1]

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx)
            return model.fit(FeedDataset(ctx, 8), epochs=2, verbose=0).history

        history, _ = run(cluster, work, 2, lambda *_: [], lambda rank, _: parts[SHARES[rank]])
    assert set(names) < set(history)
    (warning,) = [each for each in caplog.messages if "other names" in each]
    assert f"(worker 0: {names[0]}; worker 1: {names[1]})" in warning
    assert "steps and rows" not in caplog.text


def test_a_worker_without_a_batch_has_no_other_names(caplog):
    """It knows the sum of the losses, and not yet those of the outputs."""
    rows, columns = rows_of(*blobs(60)), ColumnRoles(map_fn=lambda x, y: (x, [y, y]))

    def two_outputs():
        given = keras.Input((20,))
        outputs = [keras.layers.Dense(1, name=name)(given) for name in ("a", "b")]
        model = keras.Model(given, outputs)
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
        return model

    with serving(num_workers=2) as cluster:
        models = [two_outputs() for _ in range(2)]

        def work(rank):
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx)
            return model.fit(FeedDataset(ctx, 8, columns), epochs=1, verbose=0).history

        history, _ = run(cluster, work, 1, lambda *_: [], lambda rank, _: [] if rank else rows)
    assert set(history) == {"loss", "a_loss", "b_loss"}
    assert "other names" not in caplog.text


def test_names_that_not_all_workers_have_are_told_by_rank():
    assert uncommon({0: ("loss", "auc"), 2: ("auc", "loss")}) == {}
    assert uncommon({0: ("loss", "auc"), 1: ("loss", "auc_1")}) == {0: ["auc"], 1: ["auc_1"]}


KERAS_METRICS = {
    name: kind
    for name, kind in vars(keras.metrics).items()
    if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    **{name: {"num_classes": 3} for name in ("MeanIoU", "OneHotMeanIoU")},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "MeanRelativeError": {"normalizer": [1.0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


@pytest.mark.parametrize("name", sorted(set(KERAS_METRICS) - {"Metric"}))
def test_the_states_of_every_metric_of_keras_may_be_added(name):
    """A new one of Keras whose state is not additive fails here."""
    random = np.random.default_rng(0)
    y = np.eye(3, dtype="float32")[random.integers(0, 3, 60)]
    guesses = random.dirichlet(np.ones(3), 60).astype("float32")
    if name.startswith("Sparse") or name in ("IoU", "MeanIoU"):
        y = y.argmax(1)
    if name in ("IoU", "MeanIoU"):
        guesses = guesses.argmax(1)

    def measured(rows):
        metric = KERAS_METRICS[name](**ARGUMENTS.get(name, {}))
        if name in ("Sum", "Mean"):
            metric.update_state(guesses[rows])
        else:
            metric.update_state(y[rows], guesses[rows])
        own = epoch_metrics(metric)
        return metric, own, own.states({metric.name: metric.result()})

    whole, *_ = measured(slice(0, 60))
    metric, own, first = measured(slice(0, 11))
    *_, second = measured(slice(11, 60))
    second = msgspec.structs.replace(
        second, states=tuple(msgspec.structs.replace(s, name=metric.name) for s in second.states)
    )
    (value,) = own.values([first, second]).values()
    np.testing.assert_allclose(value, whole.result(), rtol=1e-5)


def epoch_metrics(*metrics, is_shared=False, num_workers=2):
    measured = measure(SimpleNamespace(metrics=list(metrics)))
    return EpochMetrics(measured, measured, is_shared=is_shared, num_workers=num_workers)


def logs_of(metric, prefix=""):
    return {prefix + metric.name: metric.result()}


def test_rows_that_all_workers_share_are_counted_once():
    metric = keras.metrics.FalseNegatives(name="missed")
    metric.update_state([1, 1, 0], [0, 0, 0])
    own = epoch_metrics(metric, is_shared=True)
    states = own.states(logs_of(metric) | logs_of(metric, "val_"))
    assert own.values([states] * 3) == {"missed": 6.0, "val_missed": 2.0}


class Counted(Misses):
    """As in Keras' documentation of custom metrics: the result is the variable itself."""

    def result(self):
        return self.count


class Named(Misses):
    def result(self):
        return {"misses": self.count}


class Compiled(Misses):
    @tf.function(jit_compile=True)
    def result(self):
        return self.count * 1


@pytest.mark.parametrize("kind", [Counted, Named, Compiled])
def test_a_result_that_is_a_variable_or_compiled_is_that_of_all_rows(kind):
    first, second = kind(), kind()
    first.update_state(np.array([[1]]), np.array([[0.0]]))
    second.update_state(np.array([[1], [0]]), np.array([[0.0], [1.0]]))
    own = epoch_metrics(first)
    states = [own.states({"misses": 1.0}), epoch_metrics(second).states({"misses": 2.0})]
    assert own.values(states) == {"misses": 3.0}
    assert float(first.count) == 1


def test_a_log_that_is_not_the_metrics_value_is_left_alone():
    """A `train_step` of the user's may return another loss than the tracker's."""
    tracker = keras.metrics.Mean(name="loss")
    own = epoch_metrics(tracker)
    assert own.states({"loss": 0.7, "text": "x"}) == MetricStates((), {}, ("loss",))


@pytest.mark.parametrize(
    ("classes", "num_workers", "num_bytes", "limit"),
    [(300, 2, 720_000, 256 << 10), (100, 1_000, 80_000, MAX_OPEN_BYTES // 2_000)],
)
def test_a_metric_of_many_variables_is_told_not_sent(classes, num_workers, num_bytes, limit):
    """All workers' together are less than a rendezvous has room for."""
    metric = keras.metrics.MeanIoU(classes, name="iou")
    metric.update_state([1], [1])
    own = epoch_metrics(metric, num_workers=num_workers)
    states = own.states(logs_of(metric))
    assert not states.states
    assert (
        f"{num_bytes} bytes, and those of earlier metrics exceed {limit} bytes"
        in (inexact([states])["iou"])
    )
    assert own.values([states]) == {}


def test_variables_of_another_size_are_not_added():
    metric, other = (keras.metrics.AUC(num_thresholds=n, name="auc") for n in (50, 60))
    for each in (metric, other):
        each.update_state([0, 1], [0.2, 0.7])
    own = epoch_metrics(metric)
    foreign = epoch_metrics(other).states(logs_of(other))
    assert own.values([own.states(logs_of(metric)), foreign]) == {}


@pytest.mark.parametrize("logged", [0.5, np.array([0.5])])
def test_a_value_of_one_class_is_added_however_numpy_lets_keras_log_it(logged):
    metric = keras.metrics.F1Score(threshold=0.5, average=None, name="f1")
    metric.update_state([[1.0], [1.0], [1.0]], [[1.0], [0.0], [0.0]])
    own = epoch_metrics(metric)
    other = keras.metrics.F1Score(threshold=0.5, average=None, name="f1")
    other.update_state([[1.0], [0.0]], [[1.0], [1.0]])
    states = [own.states({"f1": logged}), epoch_metrics(other).states({"f1": [2 / 3]})]
    np.testing.assert_allclose(own.values(states)["f1"], [4 / 7], rtol=1e-6)


def test_metrics_before_the_first_batch_are_not_asked():
    """A worker without rows; a tracker of the user's raises until it has seen a batch."""
    compiled = CompileMetrics(["accuracy"], None)
    assert measure(SimpleNamespace(metrics=[compiled, keras.metrics.R2Score()])) == []
