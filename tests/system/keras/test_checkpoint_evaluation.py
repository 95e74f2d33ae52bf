"""The evaluator's work: each checkpoint of a training gets the metrics that its model had."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ps.checkpoint.storage import storage_at
from ps.client.saving.saver import SaveOptions
from tests.support.keras_training import DEADLINE_S, serving
from tests.support.waiting import wait_until
from tests.system.keras.test_file_dataset import rows_of, write
from tfos.errors import SettingsError, UnsupportedModel
from tfos.estimators.recipe import recipe_of
from tfos.keras import Embedding
from tfos.keras.export import check_exportable
from tfos.keras.fit.checkpoint_evaluation import LAST_TRIES, CheckpointEvaluation
from tfos.keras.fit.distribute import distribute
from tfos.keras.fit.saved_parameters import SavedParameters
from tfos.worker.reports.epoch_reports import EpochReports

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]

RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 40, (48, 3))
NUMBERS = RANDOM.normal(size=(48, 4)).astype("float32")
Y = RANDOM.normal(size=(48, 1)).astype("float32")
DATA = {"x": [IDS, NUMBERS], "y": Y}


def build(dim: int = 5) -> keras.Model:
    ids, numbers = keras.Input((3,), dtype="int64"), keras.Input((4,))
    rows = Embedding(dim, table="user", combiner="mean")(ids)
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()([rows, numbers]))
    frozen = keras.layers.Dense(6, trainable=False)(hidden)
    model = keras.Model([ids, numbers], keras.layers.Dense(1)(frozen))
    model.compile("adam", "mse", metrics=["mae"])
    return model


@dataclass
class Evaluator:
    """The evaluator's context."""

    log_dir: str
    stop_asked: bool = False
    told: list[Any] = field(default_factory=list)
    progress: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def epochs(self) -> EpochReports:
        return EpochReports(self.told.append)

    def report_numbers(self, numbers) -> None:
        """No `fit` runs here."""

    def report_progress(self, step, rows, loss=None, metrics=None) -> None:
        self.progress.append((step, rows, loss, metrics))


class Training:
    """A model that is trained, and saved, on two servers."""

    def __init__(self, servers: Any, directory: Path) -> None:
        self.client = servers.contexts[0].client
        self.model = distribute(build(), servers.contexts[0], consistency="async")
        self.directory = str(directory)

    def save(self, *, keep: int = 3) -> dict[str, float]:
        """Train, save, and return the saved model's metrics."""
        self.model.fit(**DATA, batch_size=16, verbose=0)
        self.client.save(self.directory, None, options=SaveOptions(keep=keep, full_every=2))
        found = self.model.evaluate(**DATA, verbose=0, return_dict=True)
        return {f"val_{name}": value for name, value in found.items()}


def evaluation(training: Training, tmp_path: Path, model: keras.Model | None = None) -> Any:
    context = Evaluator(str(tmp_path / "events"))
    saved = SavedParameters(model or build(), training.directory, storage_at)
    return context, CheckpointEvaluation(saved, context, DATA, poll_s=0.01)


def test_each_checkpoint_has_the_metrics_of_the_model_that_was_saved(tmp_path):
    with serving(num_servers=2) as servers:
        training = Training(servers, tmp_path / "saves")
        context, evaluating = evaluation(training, tmp_path)
        found: list[dict[int, dict[str, float]]] = []
        thread = threading.Thread(target=lambda: found.append(evaluating.run()))
        thread.start()
        expected = []
        for number in (1, 2):
            expected.append(training.save())

            def is_told(wanted: int = number) -> bool:
                assert thread.is_alive()
                return len(context.told) >= wanted

            wait_until(is_told, "its evaluation", DEADLINE_S)
        context.stop_asked = True
        thread.join(DEADLINE_S)
        assert list(found[0].values()) == expected
        assert [each.metrics for each in context.told] == expected
        assert [step for step, *_ in context.progress] == list(found[0])
        assert context.progress[-1][1:] == (0, expected[-1]["val_loss"], expected[-1])
        (events,) = (tmp_path / "events").glob("events*")
        assert b"val_mae" in events.read_bytes()


@pytest.mark.long
def test_what_was_saved_last_is_evaluated_after_the_training(tmp_path):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        context, evaluating = evaluation(training, tmp_path)
        training.save()
        expected = training.save()
        context.stop_asked = True
        assert list(evaluating.run().values()) == [expected]


@pytest.mark.long
def test_rows_of_files_and_metrics_with_many_values_are_evaluated(tmp_path):
    write(tmp_path / "rows", range(40))
    rows = rows_of(tmp_path / "rows", 0, 1)

    def build_small() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        many = keras.metrics.F1Score(average=None)
        model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae", many])
        return model

    def mapped(x: Any, n: Any) -> Any:
        return x, np.eye(3, dtype=np.float32)[n % 3]

    def data() -> Any:
        return rows.dataset(8, feature_cols="x", label_cols="n", map_fn=mapped)

    with serving() as servers:
        client = servers.contexts[0].client
        model = distribute(build_small(), servers.contexts[0])
        context = Evaluator(str(tmp_path / "events"), stop_asked=True)
        directory = str(tmp_path / "saves")
        for arguments in ({"x": data()}, {"x": data(), "steps": 2}):
            model.fit(data(), verbose=0)
            client.save(directory, None, options=SaveOptions())
            saved = SavedParameters(build_small(), directory, storage_at)
            (found,) = CheckpointEvaluation(saved, context, arguments, 0.01).run().values()
            steps = arguments.get("steps")
            expected = model.evaluate(data(), steps=steps, verbose=0, return_dict=True)
            assert found == {f"val_{name}": expected[name] for name in ("loss", "mae")}


@pytest.mark.long
@pytest.mark.parametrize("is_over", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_evaluated_later(
    tmp_path, monkeypatch, is_over
):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        expected = training.save()
        context, evaluating = evaluation(training, tmp_path)
        context.stop_asked = is_over
        load, errors = evaluating._saved.load, [OSError("stale handle"), OSError("stale handle")]

        def failing() -> int:
            if errors:
                raise errors.pop()
            context.stop_asked = True
            return load()

        monkeypatch.setattr(evaluating._saved, "load", failing)
        assert list(evaluating.run().values()) == [expected]


def failing_to_list(evaluating: Any, monkeypatch: Any, times: int) -> list[str]:
    """Let so many looks at the directory fail; return those that were made."""
    looks: list[str] = []

    def opened(directory: str) -> Any:
        storage = storage_at(directory)

        def names(below: str = "") -> list[str]:
            looks.append(below)
            if len(looks) <= times:
                raise OSError("stale handle")
            return type(storage).names(storage, below)

        monkeypatch.setattr(storage, "names", names)
        return storage

    monkeypatch.setattr(evaluating._saved, "_open_storage", opened)
    return looks


@pytest.mark.long
def test_a_directory_that_cannot_be_listed_for_a_moment_is_looked_at_again(tmp_path, monkeypatch):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        expected = training.save()
        context, evaluating = evaluation(training, tmp_path)
        context.stop_asked = True
        failing_to_list(evaluating, monkeypatch, times=2)
        assert list(evaluating.run().values()) == [expected]


@pytest.mark.long
def test_a_directory_that_stays_unreadable_does_not_hold_up_the_end(tmp_path, monkeypatch):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        training.save()
        context, evaluating = evaluation(training, tmp_path)
        context.stop_asked = True
        looks = failing_to_list(evaluating, monkeypatch, times=1000)
        assert evaluating.run() == {}
    assert len(looks) == LAST_TRIES


@pytest.mark.long
def test_a_checkpoint_that_stays_unreadable_does_not_hold_up_the_end(tmp_path, monkeypatch, caplog):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        training.save()
        context, evaluating = evaluation(training, tmp_path)
        context.stop_asked = True

        def failing() -> int:
            raise OSError("no disk")

        monkeypatch.setattr(evaluating._saved, "load", failing)
        assert evaluating.run() == {}
    assert caplog.text.count("was not evaluated: no disk") == LAST_TRIES


def test_without_any_checkpoint_there_is_no_evaluation(tmp_path):
    with serving() as servers:
        context, evaluating = evaluation(Training(servers, tmp_path / "saves"), tmp_path)
        context.stop_asked = True
        assert evaluating.run() == {}


@pytest.mark.fault("F41")
def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(tmp_path, caplog):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        expected = training.save()
        training.save()
        newest = max((tmp_path / "saves").glob("step-*"), key=lambda path: path.stat().st_mtime)
        largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1])
        context, evaluating = evaluation(training, tmp_path)
        context.stop_asked = True
        assert list(evaluating.run().values()) == [expected]
        told = caplog.text.count("is skipped")
        for _ in range(3):  # the next looks, for as long as the training saves nothing
            evaluating._saved.newest()
    assert told == caplog.text.count("is skipped") > 0


def test_a_checkpoint_of_another_model_says_where_they_differ(tmp_path):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        training.save()
        context, evaluating = evaluation(training, tmp_path, build(dim=7))
        context.stop_asked = True
        with pytest.raises(UnsupportedModel, match=r"checkpoint of step 3 .*another model.*'user'"):
            evaluating.run()


def test_data_that_can_be_read_once_are_refused(tmp_path):
    with serving() as servers:
        training = Training(servers, tmp_path / "saves")
        saved = SavedParameters(build(), training.directory, storage_at)
        context = Evaluator("")
        with pytest.raises(SettingsError, match="x is an iterator"):
            CheckpointEvaluation(saved, context, {"x": iter([DATA])}, 1.0)
        with pytest.raises(SettingsError, match="poll_s must be > 0"):
            CheckpointEvaluation(saved, context, DATA, 0.0)


@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")
@pytest.mark.filterwarnings("ignore:the model is a OfOwnClass without fixed inputs:UserWarning")
def test_a_model_without_shapes_is_refused_until_it_was_called(tmp_path):
    for unbuilt in (keras.Sequential([keras.layers.Dense(1)]), OfOwnClass()):
        unbuilt.compile("adam", "mse")
        if isinstance(unbuilt, OfOwnClass):
            unbuilt.build((None, 3))  # Keras makes no weights of an own class
        with pytest.raises(SettingsError, match=r"is not built.* once first, model\(x\[:1\]\)"):
            SavedParameters(unbuilt, str(tmp_path), storage_at)
        with pytest.raises(SettingsError, match=r"never built.* once, model\(x\[:1\]\)"):
            check_exportable(unbuilt)
        with pytest.raises(SettingsError, match=r"no weights yet.* once, model\(x\[:1\]\)"):
            recipe_of(unbuilt, None)
        unbuilt(IDS[:1])
        assert SavedParameters(unbuilt, str(tmp_path), storage_at).newest() is None
        check_exportable(unbuilt)
        assert recipe_of(unbuilt, None).content
    rescales = keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(2.0)])
    rescales.compile("sgd", "mse")
    check_exportable(rescales)
    assert recipe_of(rescales, None).content  # which is to have no weights


@keras.saving.register_keras_serializable(package="tests")
class OfOwnClass(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self, **of_layer: Any) -> None:
        super().__init__(**of_layer)
        self.rows = Embedding(5, table="user", combiner="mean")
        self.head = keras.layers.Dense(1, name="head")

    def call(self, ids: Any) -> Any:
        return self.head(self.rows(ids))


def test_a_model_of_a_file_that_lacks_the_dtype_of_its_ids_takes_trained_parameters(tmp_path):
    """Keras builds a model of an own class from the shapes of its file alone."""
    saves, file = str(tmp_path / "saves"), tmp_path / "first.keras"
    made = OfOwnClass()
    made.compile("sgd", "mse")
    made(IDS)
    made.save(file)
    with serving() as servers:
        client = servers.contexts[0].client
        model = distribute(made, servers.contexts[0])
        model.fit(IDS, Y, batch_size=16, verbose=0)
        assert client.manifest.tables[0].id_source == "integers"
        client.save(saves, None)
        expected = model.evaluate(IDS, Y, verbose=0)
    loaded = keras.models.load_model(file)
    assert loaded.rows.takes_text is None
    saved = SavedParameters(loaded, saves, storage_at)
    saved.load()
    import tensorflow as tf

    text = tf.constant([["1", "2", "3"]])
    with pytest.raises(UnsupportedModel, match="gets strings, but got integers before"):
        loaded(text)  # whose hashes have no rows
    assert loaded.evaluate(IDS, Y, verbose=0) == expected
    saved.close()
    with serving() as servers:
        servers.contexts[0].client.restore(saves)
        resumed = distribute(keras.models.load_model(file), servers.contexts[0])
        with pytest.raises(UnsupportedModel, match="gets strings, but got integers before"):
            resumed.predict(tf.data.Dataset.from_tensors(text), verbose=0)
        assert resumed.evaluate(IDS, Y, verbose=0) == expected


def test_a_checkpoint_of_other_kinds_of_ids_is_refused(tmp_path):
    def model_of(dtype: str) -> keras.Model:
        ids = keras.Input((3,), dtype=dtype)
        rows = Embedding(5, table="user", combiner="mean")(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
        return model

    with serving() as servers:
        distribute(model_of("string"), servers.contexts[0])
        servers.contexts[0].client.save(tmp_path, None)
    saved = SavedParameters(model_of("int64"), str(tmp_path), storage_at)
    with pytest.raises(UnsupportedModel, match="id_source 'integers' and 'strings'"):
        saved.load()
