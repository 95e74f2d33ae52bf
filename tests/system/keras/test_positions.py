"""Training that stops anywhere and goes on from a checkpoint: the parameters count every row.

The model is `w[n]` per row n, and the loss's gradient is -1 for each row that is trained: so `w[n]`
is how often row n is part of the parameters. With a table the row of id n counts the same.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from feeding.errors import FeedSettingsError, FileChanged
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.reading import splits
from tests.support.counting_loss import Count
from tests.support.keras_training import DEADLINE_S, Context, serving, together
from tfos.errors import SettingsError, UnsupportedError
from tfos.keras import Embedding
from tfos.keras.fit.distribute import distribute
from tfos.reading.file_rows import FileRows
from tfos.reading.reading import Reading

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

NUM_ROWS, EPOCHS, BATCH = 90, 3, 4


@pytest.fixture
def files(tmp_path: Path, monkeypatch) -> Path:
    root = tmp_path / "rows"
    root.mkdir()
    for name, numbers in (("a", range(50)), ("b.gz", range(50, 60)), ("c", range(60, NUM_ROWS))):
        file = io.BytesIO()
        records = RecordWriter(file, gzip=name.endswith("gz"))
        for n in numbers:
            records.write(encode_example({"x": np.eye(NUM_ROWS, dtype=np.float32)[n], "y": 0.0}))
        records.close()
        (root / name).write_bytes(file.getvalue())
    monkeypatch.setattr(splits, "PIECE_BYTES", 3000)
    return root


def rows_of(ctx: Context, files: Path) -> FileRows:
    columns = {"x": Feature("float32", (NUM_ROWS,)), "y": Feature("float32")}
    return Reading(ctx).tfrecord(files, columns)  # type: ignore[arg-type]


def make_model(*, has_table: bool) -> keras.Model:
    given = keras.Input((NUM_ROWS,))
    found = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="w")(given)
    if has_table:
        number = keras.ops.argmax(given, -1)
        found += Embedding(1, table="row", initializer="zeros", name="row")(number)
    model = keras.Model(given, found, name="count")
    model.compile(keras.optimizers.SGD(1.0), Count())
    return model


class Abandoned(Exception):
    """The run is killed here."""


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Say when a step of an epoch is reached; some steps later wait for the save, then fail."""

    def __init__(self, at: tuple[int, int], reached: threading.Event, saved: threading.Event):
        super().__init__()
        self._at = at
        self._reached, self._saved = reached, saved
        self._epoch, self._left = 0, 3

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) >= self._at:
            self._reached.set()
            self._left -= 1
            if not self._left:
                assert self._saved.wait(DEADLINE_S)
                raise Abandoned


def run(cluster, files: Path, options: dict, make_callbacks=list):
    """Train in one thread per worker; returns each worker's histories."""
    num_workers = len(cluster.contexts)
    options = dict(options)
    has_table = options.pop("has_table", False)
    models = [make_model(has_table=has_table) for _ in range(num_workers)]

    def work(rank: int):
        ctx = cluster.contexts[rank]
        rows = rows_of(ctx, files).shuffled(7, 10).resumable()
        model = distribute(models[rank], ctx, **options)
        data = rows.dataset(BATCH, feature_cols="x", label_cols="y")
        callbacks = make_callbacks()
        first = rows.first_epoch
        with contextlib.closing(data):
            return model.fit(
                data, epochs=EPOCHS, initial_epoch=first, verbose=0, callbacks=callbacks
            ).history

    return together(work, num_workers)


def stop_and_save(files: Path, directory: Path, options: dict, num_workers: int, stop) -> None:
    """Run until a step; save meanwhile, go on for two steps, and fail."""
    reached, saved = threading.Event(), threading.Event()
    with serving(num_workers) as cluster:
        if directory.exists():
            cluster.contexts[0].client.restore(directory)
        saver = cluster.contexts[0].new_ps_client()

        def save() -> None:
            if reached.wait(DEADLINE_S):
                saver.attach()
                saver.save(directory, None)
                saved.set()

        saving = threading.Thread(target=save)
        saving.start()
        with pytest.raises(Abandoned):
            run(cluster, files, options, lambda: [Stop(stop, reached, saved)])
        saving.join(DEADLINE_S)
        saver.close()
    assert saved.is_set()


SYNC = {"consistency": "sync", "reduction": "sum"}
ASYNC = {"consistency": "async", "staleness_aware": False}


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        pytest.param(SYNC, (2, 2), marks=pytest.mark.long, id="sync, the same"),
        pytest.param(SYNC, (2, 1, 3), id="sync, others twice"),
        pytest.param(ASYNC, (2, 3), marks=pytest.mark.long, id="async, others"),
        pytest.param({**ASYNC, "pipeline": 2}, (1, 2), marks=pytest.mark.long, id="pipelined"),
        pytest.param(
            {**SYNC, "has_table": True}, (2, 1), marks=pytest.mark.long, id="sync, with a table"
        ),
        pytest.param({**ASYNC, "pipeline": 2, "has_table": True}, (1, 2), id="rows 2 steps ahead"),
        pytest.param(
            {"consistency": "hybrid", "has_table": True},
            (1, 2),
            marks=pytest.mark.long,
            id="hybrid",
        ),
    ],
)
def test_every_row_is_in_the_parameters_once_per_epoch(files, tmp_path, caplog, options, workers):
    caplog.set_level(logging.INFO)
    directory = tmp_path / "saves"
    stops = [(1, 3), (1, 7)]  # epoch and step
    for num_workers, stop in zip(workers[:-1], stops, strict=False):
        stop_and_save(files, directory, options, num_workers, stop)
    with serving(workers[-1]) as cluster:
        cluster.contexts[0].client.restore(directory)
        histories = run(cluster, files, options)
        (counts,) = cluster.values().values()
        if options["consistency"] != "hybrid":  # which takes the workers' mean
            assert counts[:, 0].tolist() == [EPOCHS] * NUM_ROWS
        if "has_table" in options:
            rows = cluster.contexts[0].client.tables.lookup({"row": np.arange(NUM_ROWS)})["row"]
            assert rows[:, 0].tolist() == [EPOCHS] * NUM_ROWS
    assert [len(history["loss"]) for history in histories] == [EPOCHS - 1] * workers[-1]
    assert "rows 'train': reading resumes in epoch 2, where" in caplog.text


def test_a_run_that_was_done_reads_nothing(files, tmp_path):
    with serving(2) as cluster:
        run(cluster, files, SYNC)
        cluster.contexts[0].client.save(tmp_path / "saves", None)
    with serving(1) as cluster:
        client = cluster.contexts[0].client
        client.restore(tmp_path / "saves")
        rows = rows_of(cluster.contexts[0], files).shuffled(7, 10).resumable()
        assert rows.first_epoch == EPOCHS
        assert sum(1 for _ in rows.batches(50)) == 2
        assert {name.rpartition("/")[0] for name in client.metadata()} == {"reading/train"}


def test_what_cannot_go_on_is_refused(files, tmp_path, caplog):
    stop_and_save(files, tmp_path / "saves", SYNC, 1, (0, 2))
    with serving(1) as cluster:
        ctx = cluster.contexts[0]
        ctx.client.restore(tmp_path / "saves")
        with pytest.raises(FeedSettingsError, match="it had seed=7, now 8"):
            rows_of(ctx, files).shuffled(8, 10).resumable()
        with pytest.raises(SettingsError, match=r"a name of rows has .* got 'a b'"):
            rows_of(ctx, files).resumable("a b")
        assert rows_of(ctx, files).resumable("other").first_epoch == 0
        (files / "c").write_bytes((files / "a").read_bytes())
        (files / "b.gz").rename(files / "d.gz")
        with pytest.raises(
            FileChanged, match=r"c had \d+ bytes, now \d+; .*b.gz is gone; .*d.gz is"
        ):
            rows_of(ctx, files).shuffled(7, 10).resumable()
        rows = rows_of(ctx, files).resumable("other")
        with pytest.raises(UnsupportedError, match=r"tf\.data does not say how far"):
            rows.tf_dataset(5)
        with pytest.raises(SettingsError, match=r"shuffled\(...\) before resumable"):
            rows.shuffled(1)
