"""Models of a directory: the newest fit, what is no model, paths that are refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import DoubleType, StructType

from ps.errors import CheckpointError
from ps.manifest.manifest import SGD, TableSpec
from tests.support.full_disk import file_limit
from tests.support.model_files import keras_file
from tests.support.saved_tables import SavedTables
from tfos.errors import SettingsError
from tfos.estimators import model_files, recipe, training
from tfos.estimators.model_files import SavedFit
from tfos.estimators.recipe import ModelRecipe
from tfos.estimators.training import FitResult, FitSettings
from tfos.ml import KerasEstimator
from tfos.orca import estimator as estimator_module
from tfos.orca.estimator import Estimator
from tfos.predict import loading
from tfos.predict.signature import ModelSource


def test_the_newest_fit_is_that_with_the_highest_number(tmp_path):
    runs = str(tmp_path / "runs")
    for number in (2, 10):
        model_files.write_model(model_files.fit_file(runs, number), b"%d" % number)
    (tmp_path / "runs" / "model-00011.keras.tmp").write_bytes(b"")
    assert model_files.newest_state(runs) == SavedFit(10, None)
    assert model_files.read_model(model_files.fit_file(runs, 10)) == b"10"


def test_a_full_disk_for_temporary_files_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    content = keras_file(None)
    model = SimpleNamespace(save=lambda file: file.write_bytes(content))
    with file_limit(99), pytest.raises(OSError, match=f"'{tmp_path}/tfos-model-.*model.keras'"):
        recipe.content_of(model)
    with file_limit(99), pytest.raises(OSError, match=f"'{tmp_path}/tfos-model-.*model.keras'"):
        loading.read_signature(ModelSource(content=content))
    assert list(tmp_path.iterdir()) == []


def test_a_state_is_a_model_with_its_servers_or_servers_alone(tmp_path):
    runs = str(tmp_path / "runs")
    with pytest.raises(SettingsError, match="has no model and no checkpoint of a fit"):
        model_files.newest_state(runs)
    assert model_files.take_number(runs) == 1
    saved(tmp_path / "runs" / "servers-00001")
    assert model_files.newest_state(runs) == SavedFit(0, 1, is_behind=True)
    assert model_files.take_number(runs) == 2
    model_files.write_fit(runs, 2, b"two", None)
    assert model_files.newest_state(runs) == SavedFit(2, None)
    model_files.write_fit(runs, 3, b"three", 1)
    assert model_files.newest_state(runs) == SavedFit(3, 1)
    saved(tmp_path / "runs" / "servers-00004")
    assert model_files.newest_state(runs) == SavedFit(3, 4, is_behind=True)


def saved(directory, step=40, clock=40):
    """Let servers save a step there."""
    SavedTables(TableSpec(name="t", dim=2, rule=SGD()), 1).save(directory, step, clock=clock)


def test_a_directory_in_which_no_server_has_saved_is_no_state(tmp_path):
    """Its fit ended after it was made, and before the first commit."""
    runs = str(tmp_path)
    (tmp_path / "servers-00001").mkdir()
    (tmp_path / "servers-00002").mkdir()
    with pytest.raises(SettingsError, match="has no model and no checkpoint of a fit"):
        model_files.newest_state(runs)
    saved(tmp_path / "servers-00001")
    assert model_files.newest_state(runs) == SavedFit(0, 1, is_behind=True)
    model_files.write_fit(runs, 3, b"three", 1)
    (tmp_path / "servers-00004").mkdir()
    assert model_files.newest_state(runs) == SavedFit(3, 1)
    saved(tmp_path / "servers-00005")
    (tmp_path / "servers-00006").mkdir()
    assert model_files.newest_state(runs) == SavedFit(3, 5, is_behind=True)
    saved(tmp_path / "servers-00006")
    assert model_files.newest_state(runs) == SavedFit(3, 6, is_behind=True)


def test_a_directory_that_cannot_be_read_now_is_not_passed_over(tmp_path, monkeypatch):
    """It may have the newest state: an older one in its place would be one without a word."""
    model_files.write_fit(str(tmp_path), 1, b"one", None)
    saved(tmp_path / "servers-00002")

    def refused(*_: object, is_told: bool) -> int:
        raise CheckpointError("the directory cannot be listed")

    monkeypatch.setattr(model_files, "_newest_step", refused)
    assert model_files.newest_state(str(tmp_path)) == SavedFit(1, 2, is_behind=True)


def test_fits_that_begin_at_once_get_numbers_of_their_own(tmp_path):
    runs = str(tmp_path / "runs")
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: model_files.take_number(runs), range(40)))
    assert sorted(taken) == list(range(1, 41))
    with pytest.raises(SettingsError, match="has no model and no checkpoint of a fit"):
        model_files.newest_state(runs)


@pytest.fixture
def fits(monkeypatch):
    """Fits that only keep what they are asked for."""
    asked: list[tuple[bytes, FitSettings]] = []

    def fit_made(sc, make, recipe, settings, held):
        settings.check()
        asked.append((recipe.content, settings))
        if settings.checkpoint_dir:
            Path(settings.checkpoint_dir).mkdir(exist_ok=True)
        return FitResult(b"model %d" % len(asked), {"loss": [1.0]})

    monkeypatch.setattr(estimator_module, "fit_made", fit_made)
    monkeypatch.setattr(estimator_module, "active_context", lambda: None)
    return asked


def untrained(model_dir, cluster_size=3):
    """Return an estimator that has no model of this directory yet."""
    settings = FitSettings(cluster_size=cluster_size)
    return Estimator(ModelRecipe(content=b"first"), {}, settings, str(model_dir))


def made(config, batch_size):
    """Stand for a function of data."""


def told_of_epochs(epochs=1):
    """Expect to be told that a fit on what a function makes leaves out no epoch."""
    text = rf"continues from .*servers-00001 and would train all epochs={epochs}"
    return pytest.warns(UserWarning, match=text)


def test_a_fit_goes_on_from_the_state_that_was_asked_for(tmp_path, fits):
    (tmp_path / "runs").mkdir()
    runs = tmp_path / "runs"
    estimator = untrained(runs)
    estimator.fit(made, callbacks=None)
    estimator.fit(made)
    model_files.write_model(str(tmp_path / "m.keras"), loaded := keras_file(None))
    estimator.load(str(tmp_path / "m.keras"))
    estimator.fit(made)
    other = untrained(runs)
    other.load_latest_checkpoint()
    other.fit(made)
    found = [(content, Path(each.checkpoint_dir).name, each.resume) for content, each in fits]
    assert found == [
        (b"first", "servers-00001", False),
        (b"model 1", "servers-00001", True),
        (loaded, "servers-00003", False),
        (b"model 3", "servers-00003", True),
    ]
    alone = untrained(runs, 1)
    with pytest.raises(SettingsError, match="has the state of parameter servers; continue with"):
        alone.load_latest_checkpoint()


def test_a_state_without_a_model_asks_for_that_of_the_fit_that_was_interrupted(tmp_path, fits):
    """load() was named, which has no file there and would leave the state."""
    saved(tmp_path / "servers-00001")
    estimator = Estimator(ModelRecipe(), {}, FitSettings(cluster_size=3), str(tmp_path))
    estimator.load_latest_checkpoint()
    for ask in (lambda: estimator.fit(made), lambda: estimator.evaluate(made)):
        with pytest.raises(SettingsError, match=r"no fit there has left a model.*from_keras\(mod"):
            ask()
    assert not fits


def test_a_state_that_is_in_no_model_yet_answers_nothing(tmp_path, fits):
    saved(tmp_path / "servers-00001")
    estimator = untrained(tmp_path)
    estimator.load_latest_checkpoint()
    for ask in (
        lambda: estimator.evaluate(made),
        estimator.get_model,
        lambda: estimator.save(str(tmp_path / "m.keras")),
    ):
        with pytest.raises(SettingsError, match="is a checkpoint of servers, from a fit that did"):
            ask()
    with told_of_epochs():
        estimator.fit(made)
    assert [each.resume for _, each in fits] == [True]
    estimator.save(str(tmp_path / "m.keras"))


def test_a_state_that_cannot_be_read_for_a_moment_is_not_one_of_a_fit_that_did_not_end(
    tmp_path, fits, monkeypatch
):
    estimator = untrained(tmp_path)
    saved(tmp_path / "servers-00001")

    def refused(*_: object) -> int:
        raise CheckpointError("the directory cannot be listed")

    with monkeypatch.context() as patch:
        patch.setattr(model_files, "_newest_step", refused)
        estimator.fit(made)
    estimator.load_latest_checkpoint()
    assert estimator._trained().content == b"model 1"


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "not saved"])
def test_a_model_behind_its_servers_answers_nothing(tmp_path, fits, is_saved):
    """A second fit went on in the servers' directory of the first, and was interrupted."""
    estimator = untrained(tmp_path)
    servers = SavedTables(TableSpec(name="t", dim=2, rule=SGD()), 1)
    estimator.fit(made)
    if is_saved:
        servers.save(tmp_path / "servers-00001", 40)
        model_files.write_fit(str(tmp_path), 1, b"model 1", 1)
    estimator.load_latest_checkpoint()
    assert estimator._trained().content == b"model 1"
    model_files.take_number(str(tmp_path))
    servers.save(tmp_path / "servers-00001", 41)
    other = untrained(tmp_path)
    other.load_latest_checkpoint()
    with pytest.raises(SettingsError, match="is a checkpoint of servers, from a fit that did"):
        other._trained()
    with told_of_epochs():
        other.fit(made)
    assert (fits[-1][0], fits[-1][1].resume) == (b"model 1", True)
    other.load_latest_checkpoint()
    assert other._trained().content == b"model 2"


@pytest.mark.parametrize("damaged", ["step-*41", "step-*"])
def test_a_model_whose_servers_state_is_damaged_is_not_taken_for_an_interrupted_fit(
    tmp_path, fits, damaged
):
    """Going on from the older checkpoint would undo what the model has learnt since."""
    servers = SavedTables(TableSpec(name="t", dim=2, rule=SGD()), 1)
    for step in (40, 41):
        servers.save(tmp_path / "servers-00001", step, full=True)
    model_files.write_fit(str(tmp_path), 1, b"model", 1)
    for data in (tmp_path / "servers-00001").glob(f"{damaged}/ps-0.data"):
        data.write_bytes(data.read_bytes()[:-1])
    estimator = untrained(tmp_path)
    with pytest.warns(UserWarning, match=r"servers-00001 .* step 41 .*fresh servers"):
        estimator.load_latest_checkpoint()
    assert estimator._trained().content == b"model"
    model_files.take_number(str(tmp_path))
    estimator.fit(made)
    ((content, last),) = fits
    assert (content, Path(last.checkpoint_dir).name, last.resume) == (
        b"model",
        "servers-00003",
        False,
    )


def test_a_fit_that_failed_behind_a_damaged_state_is_begun_again_with_the_model(
    tmp_path, fits, monkeypatch
):
    servers = SavedTables(TableSpec(name="t", dim=2, rule=SGD()), 1)
    estimator = untrained(tmp_path)
    estimator.fit(made)
    for step in (40, 41):
        servers.save(tmp_path / "servers-00001", step, full=True)
    model_files.write_fit(str(tmp_path), 1, b"model 1", 1)

    def failed(*_: object) -> FitResult:
        (data,) = (tmp_path / "servers-00001").glob("step-*41/ps-0.data")
        data.write_bytes(data.read_bytes()[:-1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(estimator_module, "fit_made", failed)
        with (
            pytest.warns(UserWarning, match="the model and fresh servers"),
            pytest.raises(KeyboardInterrupt),
        ):
            estimator.fit(made)
    estimator.fit(made)
    content, last = fits[-1]
    assert (content, Path(last.checkpoint_dir).name, last.resume) == (
        b"model 1",
        "servers-00003",
        False,
    )


def test_a_fit_that_went_on_from_an_older_checkpoint_than_the_models_was_interrupted(tmp_path):
    servers = SavedTables(TableSpec(name="t", dim=2, rule=SGD()), 1)
    for step in (40, 50):
        servers.save(tmp_path / "servers-00001", step, full=True)
    model_files.write_fit(str(tmp_path), 1, b"model", 1)
    servers.save(tmp_path / "servers-00001", 45, full=True, passed_over=(50,))
    with warnings.catch_warnings(action="ignore"):
        found = model_files.newest_state(str(tmp_path))
    assert found == SavedFit(1, 1, is_behind=True)


@pytest.mark.parametrize("is_asked_for", [True, False], ids=["asked for", "not asked for"])
@pytest.mark.parametrize("is_loaded", [True, False], ids=["model loaded", "model trained here"])
def test_a_fit_behind_one_that_failed_trains_all_its_epochs_unless_told_to_go_on(
    tmp_path, fits, monkeypatch, is_loaded, is_asked_for
):
    """Its rows are other ones, for all that is known."""
    estimator = untrained(tmp_path)
    servers = SavedTables(TableSpec(name="t", dim=2, rule=SGD()), 1)
    estimator.fit(made)
    servers.save(tmp_path / "servers-00001", 40)
    model_files.write_fit(str(tmp_path), 1, b"model 1", 1)
    if is_loaded:
        estimator = untrained(tmp_path)
        estimator.load_latest_checkpoint()

    def interrupted(*_: object) -> FitResult:
        servers.save(tmp_path / "servers-00001", 41)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(estimator_module, "fit_made", interrupted)
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(made)
    with pytest.raises(SettingsError, match="is a checkpoint of servers, from a fit that did"):
        estimator._trained()
    if is_asked_for:
        estimator.load_latest_checkpoint()
    with pytest.raises(SettingsError, match="data must be a DataFrame"):
        estimator.fit([1])
    with told_of_epochs() if is_asked_for else contextlib.nullcontext():
        estimator.fit(made)
    last = fits[-1][1]
    assert (Path(last.checkpoint_dir).name, last.resume) == ("servers-00001", True)
    assert resumes_epochs(last) == is_asked_for
    assert estimator._trained().content == b"model 2"
    estimator.fit(made)
    assert not resumes_epochs(fits[-1][1])


@pytest.mark.parametrize("has_directory", [True, False])
def test_each_fit_draws_its_own_numbers(tmp_path, fits, has_directory):
    """The seed of every worker of a program's fits is another one, up to the largest."""
    where = tmp_path if has_directory else None
    settings = FitSettings(cluster_size=3, seed=training.LAST_SEED - 3)
    for _ in range(2):  # programs, one after the other, in one directory
        estimator = Estimator(ModelRecipe(content=b"first"), {}, settings, where and str(where))
        for _ in range(3):
            estimator.fit(made, batch_size=2)
    seeds = [training.LAST_SEED - 3, training.LAST_SEED - 1, 1]
    assert [each.seed for _, each in fits] == seeds * 2


def test_a_fit_that_resumes_one_has_its_seed_and_a_fit_of_another_program_a_new_one(
    tmp_path, fits, monkeypatch
):
    estimator = untrained(tmp_path)
    estimator.fit(made, batch_size=2)
    given: list[FitSettings] = []

    def interrupted(*asked: Any) -> FitResult:
        given.append(asked[3])
        saved(Path(given[-1].checkpoint_dir or ""))
        raise KeyboardInterrupt

    monkeypatch.setattr(estimator_module, "fit_made", interrupted)
    for told_now in (contextlib.nullcontext(), told_of_epochs()):
        other = untrained(tmp_path)
        other.load_latest_checkpoint()
        with told_now, pytest.raises(KeyboardInterrupt):
            other.fit(made, batch_size=2)
    assert fits[0][1].seed == 0
    assert [each.seed for each in given] == [2, 2]


def test_rows_in_their_own_order_stay_so_in_each_fit(tmp_path, fits):
    estimator = Estimator(ModelRecipe(content=b"first"), {}, FitSettings(seed=None), None)
    for _ in range(2):
        estimator.fit(made)
    assert [each.seed for _, each in fits] == [None, None]


def test_a_first_fit_that_failed_is_begun_again_unless_told_to_go_on(tmp_path, fits, monkeypatch):
    estimator = untrained(tmp_path)

    def interrupted(*_: object) -> FitResult:
        saved(tmp_path / "servers-00001")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(estimator_module, "fit_made", interrupted)
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(made)
    other = copy.copy(estimator)
    estimator.fit(made)
    (tmp_path / "model-00002.keras").unlink()
    other.load_latest_checkpoint()
    with told_of_epochs(3):
        other.fit(made, epochs=3)
    found = [(Path(each.checkpoint_dir).name, each.resume) for _, each in fits]
    assert found == [("servers-00002", False), ("servers-00001", True)]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("sql.streaming.queryId", r"fit\(\) within foreachBatch: .*cluster\.stream\("),
        ("spark.streaming.internal.batchTime", r"fit\(\) within foreachRDD: .*cluster\.train\("),
        ("spark.scheduler.pool", None),
    ],
)
def test_a_batch_of_a_stream_that_may_come_twice_is_not_fitted_on_what_servers_saved(
    tmp_path, monkeypatch, name, instead
):
    """Whether or not the fit leaves out epochs."""
    refused, as_it_is = functools.partial(pytest.raises, SettingsError), contextlib.nullcontext
    for check in ("check_fed", "chosen", "_check_rows"):
        monkeypatch.setattr(training, check, lambda frame, *_: frame)
    monkeypatch.setattr(
        training, "divided", lambda frame, *_: contextlib.nullcontext((frame, None))
    )
    monkeypatch.setattr(training, "_trained", lambda *_: FitResult(b"model", {"loss": [1.0]}))
    context = SimpleNamespace(getLocalProperty={name: "7"}.get)
    frame = SimpleNamespace(
        sparkSession=SimpleNamespace(sparkContext=context),
        mapInArrow=None,
        schema=StructType().add("x", DoubleType()).add("y", DoubleType()),
        columns=["x", "y"],
    )
    asked = functools.partial(Estimator, ModelRecipe(model_fn=object), {})
    words = estimator_module._WORDS
    kept = asked(FitSettings(cluster_size=3, words=words), str(tmp_path / "a"))
    saved(tmp_path / "b" / "servers-00001")
    behind = asked(FitSettings(cluster_size=3, words=words), str(tmp_path / "b"))
    behind.load_latest_checkpoint()
    for each in (kept, behind):
        with refused(match=f"{instead}.*or leave out model_dir") if instead else as_it_is():
            each.fit(frame, feature_cols="x", label_cols="y")
    stage = KerasEstimator(
        model_fn=object, featuresCol="x", labelCol="y", clusterSize=2, checkpointDir=str(tmp_path)
    )
    with refused(match=f"{instead}.*or leave out checkpointDir") if instead else as_it_is():
        stage.fit(frame)
    for each in (asked(FitSettings(), str(tmp_path)), asked(FitSettings(cluster_size=3), None)):
        each.fit(frame, feature_cols="x", label_cols="y")


def resumes_epochs(settings):
    """Say whether the cluster of a fit leaves out epochs that one before it had trained."""
    checkpoints = training._config(settings).checkpoints
    assert checkpoints is not None
    return checkpoints.resumes_epochs


def test_a_fit_that_ends_before_its_servers_saved_again_keeps_its_model(tmp_path, fits):
    """Nothing was trained behind it."""
    estimator = untrained(tmp_path)
    estimator.fit(made)
    saved(tmp_path / "servers-00001")
    model_files.write_fit(str(tmp_path), 1, b"model 1", 1, 40)
    with pytest.raises(SettingsError, match="data must be a DataFrame"):
        estimator.fit([1])
    assert estimator._trained().content == b"model 1"


@pytest.mark.parametrize("cluster_size", [1, 3])
def test_a_fit_whose_model_cannot_be_written_keeps_it_and_goes_on_from_it(
    tmp_path, fits, cluster_size
):
    """A bare OSError left a user who called again to train for nothing."""
    runs = tmp_path / "runs"
    estimator = untrained(runs, cluster_size)
    estimator.fit(made)
    (runs / "model-00002.json").mkdir()
    text = r"the fit has ended and .* has its model, but model_dir=.*runs took none: .*save\(path\)"
    with pytest.raises(SettingsError, match=text):
        estimator.fit(made)
    estimator.save(str(tmp_path / "m.keras"))
    assert (tmp_path / "m.keras").read_bytes() == b"model 2"
    estimator.fit(made)
    assert (fits[-1][0], fits[-1][1].resume) == (b"model 2", False)
    assert (runs / "model-00003.keras").read_bytes() == b"model 3"


@pytest.mark.parametrize("step", [39, 41, None])
def test_servers_without_a_last_save_are_left_for_the_model(tmp_path, fits, monkeypatch, step):
    """They would go back behind it. A save's number may be above its updates."""
    estimator = untrained(tmp_path)

    def trained(*_: object) -> FitResult:
        if step:
            saved(tmp_path / "servers-00001", step, clock=39)
        return FitResult(b"model 1", {}, updates=40)

    with monkeypatch.context() as patch:
        patch.setattr(estimator_module, "fit_made", trained)
        estimator.fit(made)
    other = untrained(tmp_path)
    other.load_latest_checkpoint()
    for each, number in ((estimator, 2), (other, 3)):
        each.fit(made)
        content, asked = fits[-1]
        assert (content, asked.resume) == (b"model 1", False)
        assert Path(asked.checkpoint_dir).name == f"servers-{number:05d}"


def test_a_record_whose_step_could_not_be_read_knows_none(tmp_path):
    model_files.write_fit(str(tmp_path), 1, b"model", 1)
    (tmp_path / "model-00001.json").write_text('{"servers": 1}')
    saved(tmp_path / "servers-00001")
    assert model_files.newest_state(str(tmp_path)) == SavedFit(1, 1)


def test_an_untrained_model_of_workers_is_not_scored():
    estimator = Estimator(ModelRecipe(model_fn=object), {}, FitSettings(), None)
    with pytest.raises(SettingsError, match=r"exists only in workers. Call fit\(\) or load"):
        estimator.evaluate(made)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"no model is at .*none\.keras; save"):
        model_files.read_model(str(tmp_path / "none.keras"))
    with pytest.raises(SettingsError, match="the model: a URL with a user or a password") as found:
        model_files.write_model("hdfs://a:secret@b/c", b"")
    assert "secret" not in str(found.value)


def test_an_estimator_needs_data_that_it_knows_and_a_directory_to_go_on_from():
    estimator = Estimator(ModelRecipe(content=b"x"), {}, FitSettings(cluster_size=3), None)
    with pytest.raises(SettingsError, match=r"needs from_keras\(model_dir=\.\.\.\)"):
        estimator.load_latest_checkpoint()
    with pytest.raises(SettingsError, match="data must be a DataFrame, a path or a function"):
        estimator.fit([1])
    assert estimator._of_fit(0, 1, 64, (), None).batch_size == 32
    assert not estimator._of_fit(0, 1, 64, (), None).resume
    with pytest.raises(ValueError, match="batch_size must be an int >= 1, got -32"):
        estimator.fit([1], batch_size=-32)
    bounded = Estimator.from_keras(
        model_creator=lambda config: None, cluster_size=3, consistency="ssp", staleness_bound=2
    )
    assert bounded._of_fit(0, 1, 64, (), None).staleness_bound == 2


def test_a_model_dir_that_takes_no_models_is_refused_before_a_fit(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a directory")
    for path in (str(file), f"{file}/below", "/proc/models"):
        with pytest.raises(SettingsError, match=r"takes no models: .* Pass a directory that"):
            model_files.take_number(path)
    with pytest.raises(SettingsError, match=r"model_dir=.*file cannot be read"):
        model_files.newest_state(str(file))


def test_a_record_that_is_none_leaves_the_model_to_load(tmp_path):
    (tmp_path / "servers-00001").mkdir()
    model_files.write_fit(str(tmp_path), 1, b"model", 1)
    for damage in ("", "{}", "[]"):
        (tmp_path / "model-00001.json").write_text(damage)
        with pytest.raises(SettingsError, match=r"not a fit's record.*load\('.*00001\.keras'\)"):
            model_files.newest_state(str(tmp_path))
