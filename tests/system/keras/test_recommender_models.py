"""The models of the recommenders without a cluster, and their made-up rows."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.deepfm_model import auc
from tests.support.fake_spark import FakeSpark
from tests.support.spark_submit import ROOT

pytestmark = pytest.mark.tf

PROGRAMS = ROOT / "examples" / "recommender"


@pytest.fixture
def example(monkeypatch):
    """Imports a program's module, as it stands beside the others."""
    for directory in (PROGRAMS, *(ROOT / "examples" / name for name in ("flights", "mnist"))):
        monkeypatch.syspath_prepend(directory)
    yield importlib.import_module
    for name in [
        name
        for name, module in sys.modules.items()
        if Path(getattr(module, "__file__", None) or "/").parent.parent == PROGRAMS.parent
    ]:
        monkeypatch.delitem(sys.modules, name)


def test_any_range_of_made_up_rows_is_the_same_rows(example):
    rows = example("criteo_rows").CriteoRows(num_ids=2600, seed=3)
    every = rows.rows(0, 20_000)
    for first, stop in ((0, 10), (8000, 9000), (16_384, 20_000)):
        part = rows.rows(first, stop)
        assert {name: column.shape[0] for name, column in part.items()} == dict.fromkeys(
            every, stop - first
        )
        for name, column in part.items():
            np.testing.assert_array_equal(column, every[name][first:stop])
    columns = np.arange(26) * 100
    assert (every["ids"] >= columns).all()
    assert (every["ids"] < columns + 100).all()
    assert 0.15 < every["label"].mean() < 0.35


def test_parts_of_an_earlier_run_are_no_rows_of_this_one(example, tmp_path):
    """Their rows may be those that are held out."""
    program = example("criteo_synth")
    names = ["_SUCCESS", "part-00000.tfrecord", "part-00006.tfrecord", "part-00010.tfrecord"]
    for name in names:
        (tmp_path / name).touch()
    program.remove_others(str(tmp_path), 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:2]


@pytest.mark.parametrize("name", ["criteo_synth", "digits"])
def test_a_plain_path_is_written_where_the_cluster_reads(example, name, monkeypatch, tmp_path):
    program, spark = example(name), FakeSpark()
    monkeypatch.chdir(tmp_path)
    for default, root in (("file:///", ""), ("hdfs://nn:8020", "hdfs://nn:8020")):
        monkeypatch.setattr(
            spark._jsc, "hadoopConfiguration", lambda fs=default: {"fs.defaultFS": fs}
        )
        assert program.located(spark, "rows") == f"{root}{tmp_path}/rows"
        assert program.located(spark, "file:///rows") == "file:///rows"


@pytest.mark.long
def test_made_up_clicks_are_learned_with_rows_in_this_process(example):
    program, made, recommender = map(example, ("criteo_synth", "criteo_rows", "recommender"))
    columns = made.CriteoRows(num_ids=2600, seed=3).rows(0, 30_000)
    inputs = {name: columns[name] for name in ("ids", "numbers")}
    train, test = ({name: x[at] for name, x in inputs.items()} for at in _halves(24_000))
    model = program.build_model(recommender.distributed)
    model.fit(train, columns["label"][:24_000], batch_size=256, verbose=0)
    scores = model.predict(test, batch_size=2000, verbose=0)[:, 0]
    del model
    gc.collect()  # its tables end with it
    assert auc(columns["label"][24_000:], scores) > 0.66


def test_two_towers_find_more_liked_films_than_a_guess(example):
    program = example("two_tower")
    users, films, liked = program.ratings()
    assert (len(users), int(users.max()), int(films.max())) == (1501, 29, 99)
    shape, is_held_out = (30, 100), np.arange(len(users)) % 5 == 0
    rows = [column[~is_held_out] for column in (users, films, liked)]
    to_find = is_held_out & (liked == 1)
    grid = np.indices(shape).reshape(2, -1)
    pairs = {"user": grid[0], "film": grid[1]}
    args = types.SimpleNamespace(seed=1, batch_size=64, epochs=10, every_pair=pairs)
    scores = program.baseline(args, rows, shape).reshape(shape)
    found = program.recall(scores, (rows[0], rows[1]), (users[to_find], films[to_find]))
    assert found > 0.33  # a guess finds 0.3


def _halves(middle):
    return slice(middle), slice(middle, None)
