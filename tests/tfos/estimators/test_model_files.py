"""Models of a directory: the newest fit, what is no model, paths that are refused."""

from __future__ import annotations

import pytest

from tfos.errors import SettingsError
from tfos.estimators import model_files
from tfos.estimators.recipe import ModelRecipe
from tfos.estimators.training import FitSettings
from tfos.orca.estimator import Estimator


def test_the_newest_fit_is_that_with_the_highest_number(tmp_path):
    runs = str(tmp_path / "runs")
    assert model_files.newest_fit(runs) == 0
    for number in (2, 10):
        model_files.write_model(model_files.fit_file(runs, number), b"%d" % number)
    (tmp_path / "runs" / "model-00011.keras.tmp").write_bytes(b"")
    assert model_files.newest_fit(runs) == 10
    assert model_files.read_model(model_files.fit_file(runs, 10)) == b"10"
    assert not model_files.has_servers(runs)
    (tmp_path / "runs" / "servers").mkdir()
    assert model_files.has_servers(runs)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"no model is at .*none\.keras; save"):
        model_files.read_model(str(tmp_path / "none.keras"))
    with pytest.raises(SettingsError, match="no model can be at 'hdfs://a@b/c'"):
        model_files.write_model("hdfs://a@b/c", b"")


def test_an_estimator_needs_data_that_it_knows_and_a_directory_to_go_on_from():
    estimator = Estimator(ModelRecipe(content=b"x"), {}, FitSettings(cluster_size=3), None)
    with pytest.raises(SettingsError, match=r"needs from_keras\(model_dir=\.\.\.\)"):
        estimator.load_latest_checkpoint()
    with pytest.raises(SettingsError, match="data must be a DataFrame, a path or a function"):
        estimator.fit([1])
    assert estimator._of_fit(1, 64, (), None).batch_size == 32
    assert not estimator._of_fit(1, 64, (), None).resume
