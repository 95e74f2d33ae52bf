"""Results that survive the driver: whole files, and a refusal of another run's."""

from __future__ import annotations

import math

import pytest

from tfos.errors import SettingsError
from tfos.many.results import ResultHead, ResultsDirectory


@pytest.fixture
def results(tmp_path):
    made = ResultsDirectory(f"file://{tmp_path}/results/")
    made.claim("train", "f1", "i1", 3)
    return made


def test_what_is_written_is_found_with_its_value(results):
    head = ResultHead(item="b", seconds=1.5, metrics={"loss": 0.5})
    results.write(2, head, b"pickle\nwith lines")
    assert list(results.done()) == [(2, head)]
    assert results.value(2) == b"pickle\nwith lines"
    assert results.head(2) == head
    assert results.head(1) is None


def test_the_same_run_goes_on_and_another_is_refused(results):
    results.claim("train", "f1", "i1", 3)
    with pytest.raises(SettingsError, match=r"another version of it \(train\).*delete only .*run"):
        results.claim("train", "f2", "i1", 3)
    with pytest.raises(SettingsError, match=r"of other items \(3 then, 4 now\)"):
        results.claim("train", "f1", "i2", 4)


def test_files_that_are_no_results_are_named(results, tmp_path):
    directory = tmp_path / "results"
    (directory / "notes.txt").write_text("not ours")
    assert list(results.done()) == []
    (directory / "item-0000001.result").write_bytes(b"cut")
    with pytest.raises(SettingsError, match=r"item-0000001.result is no result of map_train"):
        list(results.done())
    (directory / "run.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"run.json is no mark of map_train"):
        results.claim("train", "f1", "i1", 3)


def test_numbers_of_a_training_that_diverged_do_not_stop_the_next_run(results):
    metrics = {"loss": math.nan, "best": -math.inf, "worst": math.inf, "rate": 0.1}
    results.write(1, ResultHead(item="b", seconds=1.5, metrics=metrics), b"pickle")
    ((item, head),) = results.done()
    assert (item, head.item, str(head.metrics)) == (1, "b", str(metrics))


def test_a_place_that_takes_no_results_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for path in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/results"):
        with pytest.raises(SettingsError, match=r"takes no results: .* Pass a directory in which"):
            ResultsDirectory(f"file://{path}").claim("train", "f1", "i1", 3)
