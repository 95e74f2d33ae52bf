"""Faults under `fit` of a model with tables: parameters and rows count every batch exactly.

The gradient of a row is -1 for each of its ids, and that of the one dense parameter -1 for each
row of the batch, at rate 1: so both are how often they were trained.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ps.client import row_exchange
from ps.errors import (
    IdError,
    PSSettingsError,
    ServerPhaseError,
    ShapeError,
    StaleGeneration,
    TableFull,
    WorkerLost,
)
from tests.support.channel_proxy import Fault
from tests.support.keras_training import Context, feed_epochs, serving, together
from tests.support.proxied_cluster import ProxiedCluster, proxied
from tests.support.ps_cluster import WAIT_S, Cluster, cluster
from tests.support.waiting import wait_until
from tests.system.keras.test_embedding import BATCH, DIM, data, make_model
from tfos.errors import UnsupportedModel
from tfos.keras import Embedding
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

__all__ = ["proxied"]

pytestmark = [pytest.mark.tf, pytest.mark.socket, pytest.mark.timeout(230)]

STEPS = 12
IDS = 40
MODES: dict[str, dict[str, Any]] = {
    "async": {"consistency": "async", "staleness_aware": False},
    "pipeline": {"consistency": "async", "staleness_aware": False, "pipeline": 2},
    "sync": {"consistency": "sync", "reduction": "sum"},
    "hybrid": {"consistency": "hybrid"},
}
MOSTLY_HYBRID: list[Any] = [
    *(pytest.param(each, marks=pytest.mark.long) for each in ("async", "pipeline", "sync")),
    "hybrid",  # which has a barrier, rows on arrival and permits
]
SYNC_OR_HYBRID: list[Any] = [pytest.param("sync", marks=pytest.mark.long), "hybrid"]
ALL_BUT_PIPELINE: list[Any] = [pytest.param("async", marks=pytest.mark.long), *SYNC_OR_HYBRID]


class Count(keras.Model):  # type: ignore[misc]  # Keras has no types
    """How often each row, and how many rows of batches, are trained."""

    def __init__(self):
        super().__init__(name="count")
        self.rows = Embedding(1, table="user", combiner="sum", initializer="zeros", name="who")
        self.total = self.add_weight(shape=(1,), initializer="zeros", name="total")

    def build(self, shape):
        self.rows.build(shape)

    def call(self, x):
        return self.rows(x) + self.total

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        return -tf.reduce_sum(y_pred)


def counting(
    client: Any, mode: str | dict[str, Any], num_workers: int = 1, rank: int = 0
) -> keras.Model:
    model = Count()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    model(np.zeros((2, 2), "int64"))
    settings = MODES[mode] if isinstance(mode, str) else mode
    return distribute(model, Context(client, num_workers, rank), **settings)


def ids(seed: int = 0, num_steps: int = STEPS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, IDS, (num_steps * BATCH, 2))


def counted(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = Counter(x.ravel().tolist())
    return np.array([found[number] for number in range(IDS)], "float32")


def values(client: Any) -> tuple[float, np.ndarray[Any, Any]]:
    """What the servers have: the dense parameter, and the rows."""
    into = {group.name: np.empty(1, group.dtype) for group in client.manifest.pushed_groups}
    client.pull(into)
    rows = client.tables.lookup({"user": np.arange(IDS)})["user"]
    return float(into["trainable"][0]), rows[:, 0]


def fit(model: keras.Model, x: np.ndarray[Any, Any], at_step: Callable[[int], None]) -> None:
    """Train in order; `at_step(n)` is called after step n, from 0."""
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: at_step(step))
    model.fit(x, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])


FAULTS = [
    *(("cut", "up", offset) for offset in (0, 60, 300, 500)),
    *(("cut", "down", offset) for offset in (0, 60, 120, 200)),
    ("delay", "up", 200),
    ("drip", "down", 100),
    ("repeat", "up", 0),
]


@pytest.mark.fault("F24")
@pytest.mark.fault("F28")
@pytest.mark.fault("F29")
@pytest.mark.parametrize("mode", MOSTLY_HYBRID)
def test_a_push_harmed_anywhere_is_trained_once_and_brings_the_next_rows(
    proxied: Callable[..., ProxiedCluster], mode: str
):
    made = proxied()
    x = ids(num_steps=4 * len(FAULTS))
    model = counting(made.client(), mode)
    trainer = model._tfos_trainer
    armed: list[Fault] = []
    seen: list[bool] = []

    def harm(_: int) -> None:
        if len(armed) < len(FAULTS) and all(fault.fired.is_set() for fault in armed):
            kind, direction, offset = FAULTS[len(armed)]
            fault = Fault(direction, offset, kind, num_bytes=40, lasts_s=0.05)  # type: ignore[arg-type]
            armed.extend(made.proxy.arm(fault))

    rows_of = trainer._attached.tables.rows_of

    def noting(batch: Any) -> Any:
        rows = rows_of(batch)
        keys, given = rows.into()["user"]
        step = len(seen)
        lag = 2 if mode == "pipeline" else 0
        bounds = [counted(x[: max(0, step - late) * BATCH]) for late in (lag + 1, 0)]
        low, high = (bound[keys.unique] for bound in (bounds if lag else bounds[1:] * 2))
        seen.append(bool((low <= given[:, 0]).all() and (given[:, 0] <= high).all()))
        return rows

    vars(trainer._attached.tables)["rows_of"] = noting
    fit(model, x, harm)
    assert sum(fault.fired.is_set() for fault in armed) == len(FAULTS)
    assert seen == [True] * (4 * len(FAULTS))
    total, rows = values(made.bed.clients[0])
    assert total == len(x)
    np.testing.assert_array_equal(rows, counted(x))


@contextmanager
def two_servers(num_workers: int = 1, **settings: Any) -> Iterator[Cluster]:
    with cluster("tcp", num_servers=2, num_workers=num_workers, **settings) as bed:
        yield bed


@pytest.mark.fault("F08")
@pytest.mark.fault("F12")
@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("mode", "restarted"),
    [
        *(pytest.param(each, [1], marks=pytest.mark.long) for each in ("async", "hybrid")),
        ("sync", [1]),
        ("hybrid", [0, 1]),
    ],
)
def test_restarted_servers_lack_exactly_the_updates_that_they_tell(
    tmp_path: Path, mode: str, restarted: list[int]
):
    x = ids()
    saved, died = 3, 7  # steps
    with two_servers() as bed:
        client = bed.client()
        model = counting(client, mode)

        def harm(step: int) -> None:
            if step + 1 == saved:
                client.save(tmp_path, step)
            if step + 1 == died:
                for rank in restarted:
                    bed.restart(rank, tmp_path)

        fit(model, x, harm)
        lost = [died - saved if rank in restarted else 0 for rank in range(2)]
        assert [stats.lost_updates for stats in client.stats()] == lost
        everything, kept = counted(x), counted(np.delete(x, range(3 * BATCH, 7 * BATCH), 0))
        expected = [kept if rank in restarted else everything for rank in range(2)]
        total, rows = values(client)
        routed = client.tables.route({"user": np.arange(IDS)})["user"]
        for rank in range(2):
            own = routed.unique[routed.own(rank)]
            np.testing.assert_array_equal(rows[own], expected[rank][own])
            if any(piece.stop > piece.start for piece in client._dense.pieces[rank]):
                assert total == (STEPS - lost[rank]) * BATCH


@contextmanager
def frozen_in_a_step(
    model: keras.Model, x: Any, step: int, errors: list[BaseException]
) -> Iterator[None]:
    """Run `fit` in a thread that stands still after a step, until the block has ended."""
    stands, thaws = threading.Event(), threading.Event()

    def at_step(number: int) -> None:
        if number == step:
            stands.set()
            assert thaws.wait(WAIT_S)

    def run() -> None:
        try:
            fit(model, x, at_step)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thaws.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.fault("F06")
@pytest.mark.parametrize("mode", ALL_BUT_PIPELINE)
def test_a_frozen_worker_with_rows_ahead_is_replaced_and_what_it_pushes_later_is_refused(
    mode: str,
):
    """Its successor has all permits, and trains the rest of its rows; nothing counts twice."""
    x, done = ids(), 4
    with two_servers() as bed:
        old = counting(bed.client(0), mode)
        errors: list[BaseException] = []
        with frozen_in_a_step(old, x, done - 1, errors):
            wait_until(lambda: old._tfos_trainer.steps == done, "the worker's steps")
            bed.driver().fence(0, 1)
            newer = bed.client(0, generation=1)
            fit(counting(newer, mode), x[done * BATCH :], lambda _: None)
            total, rows = values(newer)
            assert total == len(x)
            np.testing.assert_array_equal(rows, counted(x))
        assert isinstance(errors[0], StaleGeneration)
        assert values(newer)[0] == len(x)
        np.testing.assert_array_equal(values(newer)[1], counted(x))


@pytest.mark.fault("F02")
@pytest.mark.fault("F06")
@pytest.mark.parametrize("on_lost", ["fail", "continue"])
@pytest.mark.parametrize("mode", SYNC_OR_HYBRID)
def test_a_worker_that_is_lost_with_rows_ahead_ends_the_others_steps_or_lets_them_go_on(
    mode: str, on_lost: Any
):
    x, done = [ids(rank) for rank in range(2)], 4
    with two_servers(num_workers=2, on_lost=on_lost) as bed:
        models = [counting(bed.client(rank), mode, 2, rank) for rank in range(2)]
        trained: list[int] = []
        watched = bed.driver()

        def lose(_: Any) -> None:
            wait_until(lambda: len(trained) == done, "the other worker's step")
            watched.worker_lost(1)

        results: list[Any] = []
        with frozen_in_a_step(models[1], x[1], done - 1, results):
            losing = threading.Thread(target=lose, args=(None,), daemon=True)
            losing.start()
            if on_lost == "fail":
                with pytest.raises(WorkerLost, match="worker 1 was lost"):
                    fit(models[0], x[0], trained.append)
                assert len(trained) == done
            else:
                fit(models[0], x[0], trained.append)
                total, rows = values(bed.clients[0])
                np.testing.assert_array_equal(rows, counted(x[0]) + counted(x[1][: done * BATCH]))
                if mode == "sync":  # hybrid takes the workers' mean
                    assert total == (STEPS + done) * BATCH
            losing.join(WAIT_S)
        assert isinstance(results[0], WorkerLost | StaleGeneration | ServerPhaseError)


@pytest.mark.fault("F32")
@pytest.mark.parametrize("bound", [None, 3], ids=["async", "ssp"])
def test_a_worker_that_stands_with_rows_ahead_holds_up_nobody_or_as_the_bound_says(
    bound: int | None,
):
    x, done = [ids(rank) for rank in range(2)], 4
    mode: dict[str, Any] = {"consistency": "async" if bound is None else "ssp"}
    with two_servers(num_workers=2) as bed:
        clients = [bed.client(rank) for rank in range(2)]
        models = [
            counting(client, mode | {"staleness_aware": False, "staleness_bound": bound}, 2, rank)
            for rank, client in enumerate(clients)
        ]
        trained: list[int] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                fit(models[0], x[0], trained.append)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        free = threading.Thread(target=run, daemon=True)
        with frozen_in_a_step(models[1], x[1], done - 1, errors):
            free.start()
            most = STEPS if bound is None else done + bound
            wait_until(lambda: len(trained) >= most, "the steps that need not wait")
        free.join(WAIT_S)
        assert not errors
        assert len(trained) == STEPS
        total, rows = values(clients[0])
        assert total == 2 * STEPS * BATCH
        np.testing.assert_array_equal(rows, counted(np.concatenate(x)))


@pytest.mark.fault("F34")
@pytest.mark.fault("F50")
@pytest.mark.parametrize("mode", ALL_BUT_PIPELINE)
def test_a_worker_without_rows_and_one_with_few_hold_up_nobody(mode: str):
    x, y = data(6 * BATCH)
    parts = [slice(0), slice(2 * BATCH), slice(6 * BATCH)]
    with serving(num_workers=3) as cluster:

        def train(rank: int) -> None:
            ctx = cluster.contexts[rank]
            rows = list(zip(x[parts[rank]], y[parts[rank]], strict=True))
            feed_epochs(ctx.feed_channel, [rows, rows[::-1]], finish=True)
            model = make_model(Embedding(DIM, table="user"), keras.optimizers.Adagrad(0.1))
            distribute(model, ctx, consistency=mode)
            model.fit(FeedDataset(ctx, BATCH), epochs=2, verbose=0)

        together(train, 3)
        assert cluster.pushes == 2 * (0 + 2 + 6)
        assert cluster.servers[0].stats().tables[0].rows == len(np.unique(x))


@pytest.mark.parametrize(
    ("mode", "when_full"),
    [
        *(
            pytest.param(mode, "refuse", marks=[pytest.mark.long] * (mode != "hybrid"))
            for mode in MODES
        ),
        ("hybrid", "lru"),
    ],
)
def test_a_full_table_names_feature_table_limit_and_next_step_or_drops_its_oldest_rows(
    mode: str, when_full: Any
):
    x, y = data(6 * BATCH)
    with serving() as cluster:
        layer = Embedding(DIM, table="user", name="who", max_rows=60, when_full=when_full)
        model = make_model(layer, keras.optimizers.SGD(0.1))
        distribute(model, cluster.contexts[0], **MODES[mode])
        if when_full == "lru":
            model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            assert cluster.servers[0].stats().tables[0].rows <= 60
            return
        message = (
            r"'user' is full: ps:0 holds \d+ of at most 60 rows .*max_rows=60.* \d+ new ids .*"
            r"raise the limit, or set when_full='lru'\. A run that resumes takes .*layers \['who'\]"
        )
        with pytest.raises(TableFull, match=message):
            model.fit(x, y, batch_size=BATCH, verbose=0)
        model.fit(x % 10, y, batch_size=BATCH, verbose=0)  # known ids and few new ones


@pytest.mark.fault("F51")
def test_row_gradients_above_the_limit_of_a_sync_push_are_refused_and_the_next_fit_trains(
    monkeypatch: pytest.MonkeyPatch,
):
    x, y = data(2 * BATCH)
    with serving() as cluster:
        model = make_model(Embedding(DIM, table="user"), keras.optimizers.SGD(0.1))
        distribute(model, cluster.contexts[0], consistency="sync")
        monkeypatch.setattr(row_exchange, "MAX_STAGED_BYTES", 1000)
        with pytest.raises(ShapeError, match=r"the limit is 1000: push fewer ids .*use hybrid"):
            model.fit(x, y, batch_size=BATCH, verbose=0)
        monkeypatch.undo()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert cluster.pushes == 2


@pytest.mark.fault("F49")
@pytest.mark.parametrize(
    ("bad", "settings", "message"),
    [
        (-1, {}, r"'user' takes int64 ids 0\.\.9223372036854775807, got -1 at position 16"),
        (500, {"max_id": 300}, r"'user' takes int64 ids 0\.\.300, got 500 at position 16"),
        (2**63, {}, r"got (-)?9223372036854775808 at position 16.*id_kind='uint64'"),
        (2**63, {"id_kind": "uint64"}, ""),
    ],
)
def test_an_id_that_the_table_does_not_take_names_value_position_and_feature(
    bad: int, settings: dict[str, Any], message: str
):
    x, y = data(2 * BATCH)
    dtype = "uint64" if bad >= 2**63 else "int64"
    x = x.astype(dtype)
    x[5, 1] = bad
    given = keras.Input((3,), dtype=dtype)
    rows = Embedding(DIM, table="user", name="who", combiner="sum", **settings)(given)
    model = keras.Model(given, keras.layers.Dense(1)(rows))
    model.compile("sgd", "mse", jit_compile=False)
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        if message:
            with pytest.raises(IdError, match=rf"{message}.*layer 'who' gets\. Correct it"):
                model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            assert cluster.pushes == 0
        else:
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            client = cluster.contexts[0].client
            assert bad in np.concatenate([ids for ids, _ in client.tables.scan("user")])


@pytest.mark.fault("F49")
@pytest.mark.parametrize(
    "shape",
    [
        "array",
        "ragged",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("dict", "list", "sequential")),
    ],
)
def test_floats_that_keras_would_round_to_ids_are_refused(shape: str):
    numbers = np.ones((BATCH, 1), "float32")
    given = keras.Input((None,) if shape == "ragged" else (3,), dtype="int64", name="user")
    other = keras.Input((1,), name="number")
    layers = [Embedding(DIM, table="user", combiner="sum"), keras.layers.Dense(1)]

    def batch(dtype: str) -> Any:
        ids = np.array([[2**24 + 1, 3, 5]] * BATCH, dtype)
        if shape == "ragged":
            return [tf.RaggedTensor.from_row_lengths(ids.ravel(), [3] * BATCH), numbers]
        return {
            "dict": {"number": numbers, "user": ids},
            "list": [ids, numbers],
        }.get(shape, ids)

    if shape == "sequential":
        model = keras.Sequential([given, *layers])
    else:
        rows = layers[0](given)
        if shape != "array":
            rows = keras.layers.Concatenate()([other, rows])
        inputs = {
            "array": given,
            "dict": {"user": given, "number": other},
        }.get(shape, [given, other])
        model = keras.Model(inputs, layers[1](rows))
    model.compile("sgd", "mse")
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        with pytest.raises(UnsupportedModel, match=r"'user' has float32 .* the int64 of"):
            model.fit(batch("float32"), numbers, batch_size=BATCH, verbose=0)
        assert cluster.pushes == 0
        model.fit(batch("int64"), numbers, batch_size=BATCH, verbose=0)
        assert cluster.pushes == 1


@pytest.mark.fault("F50")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of Keras, for generators
@pytest.mark.parametrize("mode", ALL_BUT_PIPELINE)
def test_batches_of_one_row_train_and_one_of_none_is_refused_by_name(mode: str):
    x = ids(num_steps=1)

    def batches(*sizes: int) -> Any:
        ends = np.cumsum(sizes)

        def parts() -> Iterator[Any]:
            for size, end in zip(sizes, ends, strict=True):
                yield (x[end - size : end],)

        signature = (tf.TensorSpec((None, 2), tf.int64),)
        return tf.data.Dataset.from_generator(parts, output_signature=signature)

    with cluster() as bed:
        client = bed.client()
        model = counting(client, mode)
        model.fit(batches(1, 7, 1), shuffle=False, verbose=0)
        with pytest.raises(PSSettingsError, match="a push needs at least 1 row, got 0"):
            model.fit(batches(2, 0, 3), shuffle=False, verbose=0)
        model.fit(batches(5), shuffle=False, verbose=0)
        total, rows = values(client)
        assert total == 9 + 2 + 5
        np.testing.assert_array_equal(rows, counted(x[:9]) + counted(x[:2]) + counted(x[:5]))
