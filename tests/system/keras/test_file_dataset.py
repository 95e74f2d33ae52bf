"""Files that workers read by themselves: fit with uneven shares, tf.data, epochs that are left."""

from __future__ import annotations

import io
import os
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from tests.support.keras_training import serving, together
from tests.support.waiting import wait_until
from tfos.control.epoch_log import EpochLog
from tfos.errors import NotDistributed, SettingsError, SortedRowsWarning
from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.data.lone_progress import LoneProgress
from tfos.keras.data.running_fit import RunningFit
from tfos.keras.fit.distribute import distribute
from tfos.reading.file_rows import FileRows
from tfos.reading.reading import Reading
from tfos.worker.reports.seen_progress import SeenProgress

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

COLUMNS = {"x": Feature("float32", (4,)), "n": Feature("int64")}


class Place(NamedTuple):
    """What ctx.read asks of a context."""

    rank: int
    num_workers: int
    told: list[dict[str, float]] = []  # noqa: RUF012 - each test that looks gives its own

    @property
    def seen_progress(self) -> SeenProgress:
        return SeenProgress(self.told.append)

    def absolute_path(self, path: str) -> str:
        return path

    def check_servers_used(self, what: str) -> None:
        """These tests train without servers, too."""


class PlaceWithServers(Place):
    """The context of a worker that has not asked for its servers."""

    def check_servers_used(self, what: str) -> None:
        raise NotDistributed(what)


def write(path: Path, numbers: range) -> Path:
    file = io.BytesIO()
    records = RecordWriter(file)
    for n in numbers:
        row = {"x": np.full(4, n / 100, np.float32), "n": n, "some": [n] * (n % 3), "s": [f"{n}"]}
        records.write(encode_example(row))
    path.write_bytes(file.getvalue())
    return path


def rows_of(path: Path, rank: int, num_workers: int, columns=COLUMNS) -> FileRows:
    return Reading(Place(rank, num_workers)).tfrecord(path, columns)  # type: ignore[arg-type]


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@pytest.mark.parametrize("zipped", [pytest.param(False, marks=pytest.mark.long), True])
def test_sync_workers_train_on_uneven_shares_also_of_no_rows(tmp_path, zipped):
    """A file that cannot be cut leaves the second worker without any row, in every epoch."""
    path = write(tmp_path / ("rows.gz" if zipped else "rows"), range(50))  # gzip by name alone
    with serving(num_workers=2) as cluster:
        models = [make_model() for _ in range(2)]

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            rows = rows_of(path, rank, 2).shuffled(1, 20)
            data = rows.dataset(4, feature_cols="x", label_cols="n")
            return model.fit(data, epochs=3, verbose=0).history

        histories = together(work, 2)
        assert histories[0] == histories[1]
        assert cluster.rows(0) + cluster.rows(1) == 150
        assert (cluster.rows(1) == 0) is zipped
        for one, two in zip(models[0].weights, models[1].weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_a_worker_that_joins_reads_the_epoch_of_the_files_that_the_others_read(tmp_path):
    """Keras counts as `fit` is told, and the files' epochs decide who reads which rows."""
    path = write(tmp_path / "rows", range(40))
    own_epochs = list(rows_of(path, 0, 1).shuffled(1).batches(40, epochs=4))

    def joined_by(reported: list[Any]) -> tuple[int, list[int]]:
        log = EpochLog()
        for event in reported:
            log.note(event)
        place = log.place
        assert place is not None
        data = rows_of(path, 0, 1).shuffled(1).dataset(40, feature_cols="x", label_cols="n")
        data.begin_at(place.files_epoch)
        return place.epoch, [int(n) for n in next(data)[1]]

    with serving() as cluster:
        ctx, found = cluster.contexts[0], []
        model = distribute(make_model(), ctx)
        join = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: found.append(joined_by(ctx.reported))
        )
        data = rows_of(path, 0, 1).shuffled(1).dataset(4, feature_cols="x", label_cols="n")
        for initial in (10, 0):
            model.fit(data, initial_epoch=initial, epochs=initial + 2, verbose=0, callbacks=[join])
            found.append(joined_by(ctx.reported))
    assert [epoch for epoch, _ in found] == [10, 11, -1, 0, 1, -1]
    expected = [np.asarray(own_epochs[number]["n"]).tolist() for number in (0, 1, 2, 2, 3)]
    assert [numbers for _, numbers in found[:5]] == expected


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.long), 1])
def test_a_pass_of_fewer_steps_measures_the_same_rows_each_time(tmp_path, seed):
    path = write(tmp_path / "rows", range(50))
    rows = rows_of(path, 0, 1)
    rows = rows if seed is None else rows.shuffled(seed)
    first = np.asarray(next(rows.batches(20))["n"])
    x = np.repeat(first.astype(np.float32)[:, None] / 100, 4, axis=1)
    model = make_model()
    expected = model.evaluate(x, first, batch_size=4, verbose=0)
    data = rows.dataset(4, feature_cols="x", label_cols="n")
    for _ in range(4):
        assert model.evaluate(data, steps=5, verbose=0) == pytest.approx(expected)
    assert model.evaluate(data, steps=5, verbose=0) != pytest.approx(
        model.evaluate(data, verbose=0)
    )
    data = rows.dataset(4, feature_cols="x", label_cols="n")
    model.compile(keras.optimizers.SGD(0.0), "mse")
    fitted = model.fit(x, first, epochs=3, validation_data=data, validation_steps=5, verbose=0)
    assert fitted.history["val_loss"] == pytest.approx([expected] * 3)


def test_steps_per_epoch_go_on_where_the_epoch_before_ended(tmp_path, monkeypatch):
    path = write(tmp_path / "rows", range(40))
    data, seen = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n"), []
    monkeypatch.setattr(data, "_hand", lambda ready: seen.extend(ready.values[1].tolist()))
    make_model().fit(data, epochs=2, steps_per_epoch=5, verbose=0)
    assert seen == list(range(40))


def test_the_rows_of_a_running_fit_are_evaluated_between_its_epochs_alone(tmp_path):
    path = write(tmp_path / "rows", range(24))

    def rows():
        return rows_of(path, 0, 1).shuffled(1).dataset(8, feature_cols="x", label_cols="n")

    def fitted(validates=False, **options):
        model, data = make_model(), rows()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        calls = {name: at(model, data) for name, at in options.pop("at", {}).items()}
        callback = keras.callbacks.LambdaCallback(**calls)
        given = {"validation_data": data} if validates else {}
        return model.fit(data, verbose=0, callbacks=[callback], **given, **options).history

    def evaluating(model, data, steps=None):
        return lambda number, logs: measured.append(model.evaluate(data, steps=steps, verbose=0))

    def in_part(model, data):
        return evaluating(model, data, 2)

    def training(model, data):
        return lambda number, logs: trained.append(number)

    def predicting(model, data):
        return lambda number, logs: model.predict(data, verbose=0)

    def stopping(model, data):
        return lambda number, logs: setattr(model, "stop_training", True)

    measured: list[float] = []
    trained: list[int] = []
    history = fitted(validates=True, epochs=2, at={"on_epoch_end": evaluating})
    assert [*history["val_loss"], *measured] == pytest.approx([history["loss"][0]] * 4)
    weights = dict.fromkeys(range(24), 10.0)
    before = {"validates": True, "at": {"on_train_batch_end": training}}
    for options, text in (
        (before | {"class_weight": weights}, "fit has class_weight"),
        (before | {"validation_steps": 2, "epochs": 2}, "after 2 steps of a pass"),
        ({"at": {"on_epoch_end": in_part}, "epochs": 2}, "after 2 steps of a pass"),
        ({"class_weight": weights, "at": {"on_epoch_end": evaluating}}, "fit has class_weight"),
        ({"at": {"on_train_batch_end": evaluating}}, "are in the middle of an epoch"),
        ({"at": {"on_train_batch_begin": predicting}}, "are in the middle of an epoch"),
    ):
        with pytest.raises(SettingsError, match=f"{text}.*its own dataset"):
            fitted(**options)
    assert not trained, "what fit is given is checked before it trains"
    fitted(class_weight=weights, at={"on_epoch_end": predicting})
    fitted(validates=True, validation_steps=2)
    fitted(at={"on_epoch_end": in_part})  # no later epoch has the other rows
    stopped = fitted(validates=True, at={"on_train_batch_end": stopping})
    assert stopped["val_loss"], "nothing trains the rows that are left"


@pytest.mark.parametrize("validates", [True, False])
def test_a_pass_that_measures_the_rows_of_a_fit_is_no_step_of_it(tmp_path, validates):
    sink = SeenProgress(lambda _: None)
    place = Mock(spec=Place(0, 1), rank=0, num_workers=1, seen_progress=sink, absolute_path=str)
    read = Reading(place).tfrecord(write(tmp_path / "rows", range(24)), COLUMNS)
    model, data = make_model(), read.shuffled(1).dataset(8, feature_cols="x", label_cols="n")
    inner = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.evaluate(data, verbose=0))
    given = {"validation_data": data} if validates else {"callbacks": [inner]}
    model.fit(data, epochs=3, verbose=0, **given)
    assert sink.so_far == (9, 72)


def test_fit_on_files_is_refused_if_the_servers_are_left_out(tmp_path):
    path = write(tmp_path / "rows", range(50))
    reading = Reading(PlaceWithServers(0, 2))  # type: ignore[arg-type]
    data = reading.tfrecord(path, COLUMNS).dataset(4, feature_cols="x", label_cols="n")
    with pytest.raises(NotDistributed, match="fit"):
        make_model().fit(data, verbose=0)


def test_a_fit_without_callbacks_of_ours_tells_its_steps_rows_epochs_and_loss(tmp_path):
    place = Place(0, 1, [])
    read = Reading(place).tfrecord(write(tmp_path / "rows", range(10)), COLUMNS)  # type: ignore[arg-type]
    data = read.dataset(4, feature_cols="x", label_cols="n")
    history = make_model().fit(data, epochs=3, initial_epoch=1, verbose=0).history
    seen = [(each["epoch"], each["steps"], each["rows"]) for each in place.told]
    first = [(0, 0, 0), (2, 1, 4), (2, 2, 8), (2, 3, 10)]
    second = [(3, 3, 10), (3, 4, 14), (3, 5, 18), (3, 6, 20)]
    assert list(dict.fromkeys(seen)) == [*first, *second]
    assert all(each["epochs"] == 3 for each in place.told)
    losses = {each["epoch"]: each["loss"] for each in place.told if "loss" in each}
    assert list(losses.values()) == pytest.approx(history["loss"])
    place.told.clear()
    validation = read.dataset(4, feature_cols="x", label_cols="n")
    make_model().fit(np.zeros((4, 4)), np.zeros(4), validation_data=validation, verbose=0)
    assert place.told == [], "nobody trains these rows"


def test_the_loss_within_an_epoch_is_looked_at_once_a_second_and_may_be_unknown():
    class Model:
        name = "m"
        looks = 0

        def get_metrics_result(self) -> dict[str, float]:
            self.looks += 1
            return {"loss": self.looks / 2} if self.looks < 3 else {"own": 1.0}

    now_s = [10.0]
    told: list[dict[str, float]] = []
    fit = RunningFit(Model(), True, None, None, 0, 1, None, None, True)
    progress = LoneProgress(fit, Mock(), SeenProgress(told.append), lambda: now_s[0])
    for batch in range(1, 8):
        now_s[0] += 0.4
        progress.trained(batch, batch, is_over=False)
    progress.trained(7, 7, is_over=True)
    assert fit.model.looks == 3
    assert [each.get("loss") for each in told] == [*[None] * 3, *[0.5] * 3, *[1.0] * 3]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_all_epochs_of_files_end_by_a_callback_alone_and_are_told(tmp_path, is_distributed, caplog):
    path = write(tmp_path / "rows", range(10))
    data = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    with serving() as cluster:
        model = make_model()
        if is_distributed:
            distribute(model, cluster.contexts[0])

        def stop(epoch, logs):
            model.stop_training = epoch == 1

        stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
        history = model.fit(data, epochs=AllEpochs(), verbose=0, callbacks=[stops]).history
    assert len(history["loss"]) == 2
    assert "rows of files have no end" in caplog.text


def test_class_weights_reach_a_model_that_is_not_distributed(tmp_path):
    path = write(tmp_path / "rows", range(40))
    x = np.repeat(np.arange(40, dtype=np.float32)[:, None] / 100, 4, axis=1)
    plain, ours = make_model(), make_model()
    weights = {n: n / 10 for n in range(20)}
    plain.fit(
        x, np.arange(40), class_weight=weights, batch_size=4, shuffle=False, epochs=2, verbose=0
    )
    data = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    ours.fit(data, class_weight=weights, epochs=1, verbose=0)
    ours.fit(data, class_weight=weights, epochs=1, verbose=0)
    np.testing.assert_allclose(ours.get_weights()[0], plain.get_weights()[0], rtol=1e-6)
    loss = ours.evaluate(
        rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n"), verbose=0
    )
    assert loss == pytest.approx(plain.evaluate(x, np.arange(40), batch_size=4, verbose=0))


def test_sorted_rows_are_told_once_and_mixed_ones_never(tmp_path):
    for month in range(1, 5):
        (tmp_path / f"month={month}").mkdir()
        write(tmp_path / f"month={month}" / "rows", range(month * 100, month * 100 + 80))
    rows, model = rows_of(tmp_path, 0, 1), make_model()
    columns: dict[str, Any] = {"feature_cols": "x", "label_cols": "n"}
    with pytest.warns(SortedRowsWarning) as said:
        model.fit(rows.dataset(4, **columns), epochs=2, verbose=0)
    first, second = (str(each.message) for each in said)
    assert first.startswith("the rows are trained sorted by month, which trains a worse model; mix")
    assert second.startswith("the labels look sorted")
    assert "shuffled(seed=1)" in second
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = rows.shuffled(1).dataset(4, **columns)
        model.fit(data, epochs=2, verbose=0)
        model.evaluate(rows.dataset(4, **columns), verbose=0)
    with pytest.warns(SortedRowsWarning, match="mix them better"):
        model.fit(rows.shuffled(1, 1, interleave=1).dataset(4, **columns), verbose=0)


def test_each_iteration_over_a_tf_dataset_is_an_epoch(tmp_path):
    columns = {**COLUMNS, "some": Feature("int64", None), "s": Feature("bytes")}
    path = write(tmp_path / "rows", range(50))
    data = rows_of(path, 0, 1, columns).tf_dataset(8)
    for _ in data.take(1):  # a look at the first batch takes nothing away
        pass
    for _ in range(2):
        batches = list(data)
        assert [int(n) for batch in batches for n in batch["n"]] == list(range(50))
        assert [s for batch in batches for s in batch["s"].numpy().tolist()] == [
            f"{n}".encode() for n in range(50)
        ]
        assert [each for batch in batches for each in batch["some"].to_list()] == [
            [n] * (n % 3) for n in range(50)
        ]
    pairs = list(tf.data.Dataset.zip((data, data)))
    assert all(bool(tf.reduce_all(one["n"] == two["n"])) for one, two in pairs)
    assert len(pairs) == 7


def test_lists_of_bytes_and_of_texts_are_tensors_of_tf_data(tmp_path):
    lists = [[b"a"], [b"b", b"c"], [], []]
    with open(tmp_path / "rows", "wb") as file:
        records = RecordWriter(file)
        for some in lists:
            records.write(encode_example({"two": [b"p", b"q"], "some": some}))
    features = {"two": Feature("bytes", (2,)), "some": Feature("bytes", None)}
    reading = Reading(Place(0, 1))  # type: ignore[arg-type]  # it asks for nothing else
    batches = list(reading.tfrecord(str(tmp_path / "rows"), features).tf_dataset(2))
    assert [batch["two"].numpy().tolist() for batch in batches] == [[[b"p", b"q"]] * 2] * 2
    assert [some for batch in batches for some in batch["some"].to_list()] == lists
    texts = pa.table({"t": [[item.decode() for item in some] for some in lists]})
    pq.write_table(texts, tmp_path / "texts.parquet")
    batches = list(reading.parquet(str(tmp_path / "texts.parquet")).tf_dataset(2))
    assert [some for batch in batches for some in batch["t"].to_list()] == lists


@pytest.mark.parametrize("loop", ["fit", "evaluate", "predict"])
def test_a_batch_that_was_looked_at_is_in_the_loop_after_it(tmp_path, loop):
    path = write(tmp_path / "rows", range(10))
    data = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    seen: list[int] = []
    data._hand = lambda ready: seen.extend(ready.values[1].tolist())  # type: ignore[method-assign]
    assert next(iter(data))[1].numpy().tolist() == [0, 1, 2, 3]
    seen.clear()
    options = {"epochs": 2} if loop == "fit" else {}
    getattr(make_model(), loop)(data, verbose=0, **options)
    assert seen == [*range(10)] * (2 if loop == "fit" else 1)


def test_arguments_that_keras_would_ignore_beside_a_dataset_are_refused(tmp_path):
    path = write(tmp_path / "rows", range(10))
    rows = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    y = np.zeros(10)
    with serving() as cluster:
        model = distribute(make_model(), cluster.contexts[0])
        for call, arguments, text in (
            (model.evaluate, {"y": y}, "its batches have 4 rows. Drop y; "),
            (model.predict, {"batch_size": 8}, r"predict\(dataset, batch_size=...\): the rows of"),
            (model.fit, {"sample_weight": y}, r"fit\(dataset, sample_weight=...\): the rows of"),
            (
                model.fit,
                {"validation_data": (rows, y)},
                "has 2 values; pass a dataset of ctx alone",
            ),
            (
                model.fit,
                {"validation_data": rows, "validation_batch_size": 8},
                "_batch_size=...\\)",
            ),
        ):
            with pytest.raises(SettingsError, match=text):
                call(rows, **arguments)
        model.fit(y[:, None] * np.ones(4), y, batch_size=5, validation_data=rows, verbose=0)


def test_a_loop_of_the_programs_own_has_its_batches_alone(tmp_path):
    path = write(tmp_path / "rows", range(10))
    data = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    next(data)
    assert next(data)[1].numpy().tolist() == [4, 5, 6, 7]
    assert len(make_model().predict(data, verbose=0)) == 2


def test_each_loop_of_the_programs_own_reads_an_epoch_of_the_files(tmp_path):
    path = write(tmp_path / "rows", range(10))
    data = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    next(iter(data))
    for epoch in (1, 2, 3):
        assert [n for _, labels in data for n in labels.numpy().tolist()] == [*range(10)]
        assert data.next_epoch == epoch


def test_a_loop_that_was_broken_off_leaves_no_rows_to_the_next(tmp_path):
    path = write(tmp_path / "rows", range(10))
    data = rows_of(path, 0, 1).dataset(4, feature_cols="x", label_cols="n")
    model, stop = make_model(), keras.callbacks.LambdaCallback()
    stop.on_predict_batch_end = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.predict(data, verbose=0, callbacks=[stop])
    assert len(model.predict(data, verbose=0)) == 10
    with pytest.raises(ZeroDivisionError):
        model.predict(data, verbose=0, callbacks=[stop])
    batches = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(1))
    model.fit(data, verbose=0, callbacks=[count])
    assert len(batches) == 3
    stop.on_train_batch_end = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.fit(data, verbose=0, callbacks=[stop])
    assert len(model.predict(data, verbose=0)) == 10


def is_open(path: Path) -> bool:
    descriptors = Path("/proc/self/fd")
    return any(os.path.realpath(each) == str(path) for each in descriptors.iterdir())


def test_an_epoch_that_is_left_ends_its_thread_and_closes_its_file(tmp_path):
    path = write(tmp_path / "rows", range(1000))
    others = set(threading.enumerate())  # of tests before, whose workers may end later
    data = rows_of(path, 0, 1).dataset(2, feature_cols="x", label_cols="n")
    next(iter(data))
    begun = set(threading.enumerate()) - others
    (reading,) = (each for each in begun if each.name == "tfos-read-files")
    assert is_open(path)
    data.close()
    del data
    wait_until(lambda: not is_open(path))
    wait_until(lambda: not reading.is_alive())
    batches = rows_of(path, 0, 1).batches(2)
    next(batches)
    assert is_open(path)
    del batches
    assert not is_open(path)
