"""What the workers of one fit must have in common: its epochs, the files, which epoch of them."""

from __future__ import annotations

import io
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from ps.errors import NonFiniteGradient
from tests.support.keras_training import DEADLINE_S, Context, Servers, serving, together
from tfos.control.epoch_log import EpochLog
from tfos.errors import SettingsError, UnsupportedModel
from tfos.keras.data.file_dataset import FileDataset
from tfos.keras.fit.distribute import distribute
from tfos.reading.reading import Reading

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

NUM_FILES, ROWS = 6, 4
ALL = set(range(NUM_FILES * ROWS))
COLUMNS = {"x": Feature("float32", (1,)), "n": Feature("int64")}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return written(tmp_path / "rows")


def written(directory: Path) -> Path:
    directory.mkdir()
    for number in range(NUM_FILES):
        write(directory / f"part-{number}", range(number * ROWS, (number + 1) * ROWS))
    return directory


def write(path: Path, numbers: range) -> None:
    file = io.BytesIO()
    records = RecordWriter(file)
    for n in numbers:
        records.write(encode_example({"x": np.ones(1, np.float32), "n": n}))
    path.write_bytes(file.getvalue())


def make_models(number: int, *, built: bool = True) -> list[keras.Model]:
    models = []
    for _ in range(number):
        inputs = [keras.Input((1,))] if built else []
        models.append(keras.Sequential([*inputs, keras.layers.Dense(1)]))
        models[-1].compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    return models


def data_of(ctx: Context, files: Path) -> FileDataset:
    rows = Reading(ctx).tfrecord(files, COLUMNS).shuffled(1)  # type: ignore[arg-type]
    return rows.dataset(ROWS, feature_cols="x", label_cols="n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            [{"initial_epoch": 0}, {"initial_epoch": 1}],
            r"worker 1 calls fit\(initial_epoch=1, epochs=3\), worker 0 fit\(initial_epoch=0, epo",
        ),
        ([{}, {"epochs": 4}], r"fit number 1: worker 1 calls fit\(initial_epoch=0, epochs=4\)"),
    ],
)
def test_workers_that_ask_for_other_epochs_are_refused(arguments: Any, text: str):
    x = np.ones((4, 1), "float32")
    with serving(num_workers=2) as cluster:
        models, errors = make_models(2), []

        def work(rank: int) -> None:
            model = distribute(models[rank], cluster.contexts[rank])
            with pytest.raises(SettingsError, match="would wait for each other") as caught:
                model.fit(x, x, verbose=0, **{"epochs": 3, **arguments[rank]})
            errors.append((rank, caught))

        together(work, 2)
        assert dict(errors)[0].match(text)
        assert not cluster.pushes


def test_a_fit_that_was_refused_on_one_worker_is_called_again_there():
    x = np.ones((4, 1), "float32")
    with serving(num_workers=2) as cluster:
        models = make_models(2)

        def work(rank: int) -> list[int]:
            model = distribute(models[rank], cluster.contexts[rank])
            if rank == 1:
                values = model.get_weights()
                model.layers[0].set_weights([value + 1 for value in values])
                with pytest.raises(UnsupportedModel, match="was changed after ctx"):
                    model.fit(x, x, verbose=0)
                model.set_weights(values)
                loss, model._compile_loss = model._compile_loss, None  # as of another compile
                with pytest.raises(UnsupportedModel, match="was compiled again"):
                    model.fit(x, x, verbose=0)
                model._compile_loss = loss
            epochs: list[int] = model.fit(x, x, epochs=2, verbose=0).epoch
            return epochs

        assert together(work, 2) == [[0, 1], [0, 1]]


class DecidesEpochs(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def fit(self, x: Any, y: Any = None, epochs: Any = None, callbacks: Any = None, **more: Any):
        return super().fit(x, y, epochs=epochs or 2, callbacks=callbacks, verbose=0, **more)


class BeginsWithTheFirst(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def fit(self, x: Any, y: Any = None, epochs: Any = None, callbacks: Any = None):
        return super().fit(x, y, epochs=epochs or 2, callbacks=callbacks, verbose=0)


def test_a_fit_behind_one_that_all_workers_have_left_trains_on_and_is_told(caplog):
    x = np.ones((8, 1), "float32")
    with serving(num_workers=2) as cluster:
        models = make_models(2)

        def leave(batch: int, logs: Any) -> None:
            raise KeyboardInterrupt

        def work(rank: int) -> list[int]:
            model = distribute(models[rank], cluster.contexts[rank])
            leaving = keras.callbacks.LambdaCallback(on_train_batch_end=leave)
            with pytest.raises(KeyboardInterrupt):
                model.fit(x, x, batch_size=4, verbose=0, callbacks=[leaving])
            assert model.evaluate(x, x, verbose=0) >= 0, "which takes the servers' values"
            return list(model.fit(x, x, batch_size=4, verbose=0).epoch)

        assert together(work, 2) == [[0], [0]]
    told = sorted(each.getMessage() for each in caplog.records if "was aborted on" in each.msg)
    assert [f"worker:{rank}. The other" in text for rank, text in enumerate(told)] == [True] * 2


def test_a_fit_behind_a_step_that_was_broken_off_alone_is_not_told(caplog):
    x = np.ones((8, 1), "float32")
    with serving(num_workers=2) as cluster:
        models = make_models(2)

        def work(rank: int) -> list[int]:
            model = distribute(models[rank], cluster.contexts[rank])
            with pytest.raises(NonFiniteGradient):
                model.train_on_batch(x * np.nan, x)
            return list(model.fit(x, x, batch_size=4, verbose=0).epoch)

        assert together(work, 2) == [[0], [0]]
    assert "was aborted on" not in caplog.text, "nobody waits in a fit"


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_fit_of_the_class_decides_its_epochs_and_can_begin_in_any(num_workers: int):
    x = np.ones((4, 1), "float32")
    with serving(num_workers=num_workers) as cluster:

        def work(rank: int) -> list[int]:
            model = DecidesEpochs([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
            distribute(model, cluster.contexts[rank])
            epochs: list[int] = model.fit(x, x).epoch
            return epochs

        assert together(work, num_workers) == [[0, 1]] * num_workers
    with serving(num_workers=num_workers) as cluster:
        model = BeginsWithTheFirst([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        if num_workers == 1:
            assert model.fit(x, x).epoch == [0, 1]
            return
        with pytest.raises(UnsupportedModel, match=r"First\.fit has no parameter initial_epoch"):
            model.fit(x, x)
        assert not cluster.pushes


def test_a_backup_of_each_worker_is_refused(tmp_path: Path):
    x = np.ones((4, 1), "float32")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with serving(num_workers=2) as cluster:
        model = distribute(make_models(1)[0], cluster.contexts[0])
        with pytest.raises(SettingsError, match=r"on 2 workers: .*Checkpoints\(.*resume=True\)"):
            model.fit(x, x, verbose=0, callbacks=[backup])


@pytest.mark.parametrize("found_by", ["x", "validation_data"])
def test_workers_that_have_found_other_files_do_not_train(files: Path, found_by: str):
    same = written(files.parent / "same")
    with serving(num_workers=2) as cluster:
        models, data, errors = make_models(2), [data_of(cluster.contexts[0], files)], []
        write(files / "part-2b", range(1))
        data.append(data_of(cluster.contexts[1], files))

        def work(rank: int) -> None:
            ctx = cluster.contexts[rank]
            model = distribute(models[rank], ctx)
            read = {"x": data_of(ctx, same), found_by: data[rank]}
            what = "trained" if found_by == "x" else "validated"
            with pytest.raises(SettingsError, match=f"{what} twice or never") as caught:
                model.fit(**read, verbose=0)
            errors.append((rank, str(caught.value)))

        together(work, 2)
        assert "worker 1 has found 7 files of" in dict(errors)[0]
        assert f"the first that differs is here {files}/part-2b of" in dict(errors)[1]
        assert not cluster.pushes


class Abandoned(Exception):
    """The process of the worker ends here."""


class TwoWorkers:
    """Three fits of three epochs each, on files A, B and A; worker 1 is lost in one of them."""

    def __init__(
        self,
        cluster: Servers,
        files: Path,
        lost_in: int,
        *,
        built: bool = True,
        validated: Path | None = None,
    ) -> None:
        self._cluster = cluster
        self._files = files
        self._validated = validated or files
        self._lost_in = lost_in
        self._holds, self._joined = threading.Event(), threading.Event()
        self.models = make_models(3, built=built)
        self.seen: dict[tuple[int, int], list[int]] = defaultdict(list)
        """By fit and epoch, the rows of both workers."""
        self.validated: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.late_file: Path | None = None
        self.trains_again = False

    def train(self, ctx: Context, model: keras.Model) -> None:
        """Be one process of one worker."""
        distribute(model, ctx)
        one, other, validation = (
            data_of(ctx, path) for path in (self._files, self._files, self._validated)
        )
        at = [0, 0]
        is_first = ctx.fit_place is None

        def note(data: FileDataset, into: dict[tuple[int, int], list[int]]) -> None:
            hand = data._hand

            def handed(ready: Any) -> None:
                into[at[0], at[1]].extend(ready.values[1].tolist())
                hand(ready)

            data._hand = handed  # type: ignore[method-assign]

        def begin(epoch: int, logs: Any) -> None:
            at[1] = epoch
            if at[0] != self._lost_in:
                return
            if ctx.is_chief and epoch == 2:
                self._holds.set()
                assert self._joined.wait(DEADLINE_S)
            elif not ctx.is_chief and is_first and epoch == 1:
                raise Abandoned
            elif not ctx.is_chief and not is_first:
                self.trains_again = True
                self._joined.set()

        for each in (one, other):
            note(each, self.seen)
        note(validation, self.validated)
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
        for number, data in enumerate((one, other, one)):
            at[0] = number
            model.fit(data, epochs=3, verbose=0, callbacks=[callback], validation_data=validation)

    def start_again(self) -> Context:
        """Return the context of another process of worker 1, once worker 0 is in the last epoch."""
        (server,), (chief, lost) = self._cluster.servers, self._cluster.contexts
        server.worker_lost(1)
        assert self._holds.wait(DEADLINE_S)
        log = EpochLog()
        for event in chief.reported:
            log.note(event)
        return replace(lost, client=lost.make_client(100), fit_place=log.place)

    def work(self, rank: int) -> None:
        """Be one worker."""
        if rank == 0:
            return self.train(self._cluster.contexts[0], self.models[0])
        with pytest.raises(Abandoned):
            self.train(self._cluster.contexts[1], self.models[1])
        if self.late_file is not None:
            write(self.late_file, range(1))
        ctx = self.start_again()
        try:
            return self.train(ctx, self.models[2])
        finally:
            ctx.client.close()
            self._joined.set()


@pytest.mark.parametrize(
    ("lost_in", "built"),
    [
        (0, True),
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(0, False, marks=pytest.mark.long),
    ],
)
def test_a_worker_that_is_started_again_reads_all_files_in_the_others_epochs(
    files: Path, lost_in: int, *, built: bool
):
    with serving(num_workers=2) as cluster:
        both = TwoWorkers(cluster, files, lost_in, built=built)
        together(both.work, 2)
    for found in (both.seen, both.validated):
        uncut = {at: rows for at, rows in found.items() if at != (lost_in, 1)}
        assert len(uncut) == 8
        assert {at: sorted(rows) for at, rows in uncut.items()} == dict.fromkeys(uncut, sorted(ALL))


@pytest.mark.parametrize("late", ["rows", "validated"])
def test_a_worker_that_is_started_again_and_finds_one_more_file_does_not_train(
    files: Path, late: str
):
    validated = written(files.parent / "validated")
    with serving(num_workers=2) as cluster:
        both = TwoWorkers(cluster, files, 0, validated=validated)
        both.late_file = files.parent / late / "part-2b"
        with pytest.raises(
            SettingsError, match=r"worker 0 has found 6 files of .*, worker 1 7 files"
        ):
            together(both.work, 2)
        assert not both.trains_again
