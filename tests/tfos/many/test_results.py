"""Results that survive the driver: whole files, and a refusal of another run's."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from feeding.filesystem import ordered_reads
from tfos.errors import SettingsError
from tfos.many.results import AHEAD, ResultHead, ResultsDirectory


@pytest.fixture
def results(tmp_path):
    made = ResultsDirectory(f"file://{tmp_path}/results/")
    made.claim("train", "f1", "i1")
    return made


def test_what_is_written_is_found_with_its_value(results):
    head = ResultHead(item="b", seconds=1.5, metrics={"loss": 0.5})
    results.write(head, b"pickle\nwith lines")
    assert list(results.done(["a", "c", "b"])) == [(2, head)]
    assert results.value("b") == (head, b"pickle\nwith lines")
    assert results.head("b") == head
    assert results.head("a") is None


def test_the_name_of_an_item_is_that_of_its_file_whatever_it_has(results, tmp_path):
    names = ["a/b", "a b", "a\x00b", "a_b", "..", "", "\udcff", "long " * 24]
    files = {results.path_of(name).removeprefix(f"{results.path}/item-") for name in names}
    assert len(files) == len(names)
    for file in files:
        assert re.fullmatch(r"[a-z_.]{0,40}-[0-9a-f]{16}\.result", file)
    results.write(ResultHead(item="a/b", seconds=1.0, metrics={}), b"")
    assert len(list((tmp_path / "results").glob("item-a_b-*.result"))) == 1


def test_the_same_run_goes_on_and_another_is_refused(results):
    assert results.claim("train", "f1", "i1")
    with pytest.raises(SettingsError, match=r"another version of it \(train\).*delete only .*run"):
        results.claim("train", "f2", "i1")
    assert not results.claim("train", "f1", "i2")


def test_results_in_another_format_cannot_be_kept(results, tmp_path):
    mark = tmp_path / "results" / "run.json"
    mark.write_text(mark.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(SettingsError, match=r"in format 2, .* has format 1.*or delete that one\.$"):
        results.claim("train", "f1", "i1")


def test_files_that_are_no_results_are_named(results, tmp_path):
    directory = tmp_path / "results"
    (directory / "notes.txt").write_text("not ours")
    assert list(results.done(["a"])) == []
    (directory / results.path_of("a").rpartition("/")[2]).write_bytes(b"cut")
    with pytest.raises(SettingsError, match=r"item-a-.*.result is no result of map_train"):
        list(results.done(["a"]))
    (directory / "run.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"run.json is no mark of map_train"):
        results.claim("train", "f1", "i1")


def test_whoever_needs_no_more_results_waits_for_no_more_to_be_read(results, monkeypatch):
    names = [f"item {number}" for number in range(100)]
    for name in names:
        results.write(ResultHead(item=name, seconds=1.0, metrics={}), b"")
    is_closing, opened = threading.Event(), []
    read = results._read_head

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_closing.set()
            super().shutdown(wait)

    def reads_the_first_one_at_once(path):
        opened.append(path)
        if len(opened) > 1:
            is_closing.wait(10)
        return read(path)

    monkeypatch.setattr(results, "_read_head", reads_the_first_one_at_once)
    monkeypatch.setattr(ordered_reads, "ThreadPoolExecutor", Pool)
    found = results.done(names)
    next(found)
    found.close()
    assert len(opened) < len(names)


def test_numbers_of_a_training_that_diverged_do_not_stop_the_next_run(results):
    metrics = {"loss": math.nan, "best": -math.inf, "worst": math.inf, "rate": 0.1}
    results.write(ResultHead(item="b", seconds=1.5, metrics=metrics), b"pickle")
    ((item, head),) = results.done(["a", "b"])
    assert (item, head.item, str(head.metrics)) == (1, "b", str(metrics))


def test_a_place_that_takes_no_results_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for path in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/results"):
        with pytest.raises(SettingsError, match=r"takes no results: .* Pass a directory in which"):
            ResultsDirectory(f"file://{path}").claim("train", "f1", "i1")


def test_large_files_are_not_read_ahead_together():
    """The driver holds the values that it builds, and few bytes beside them."""
    limits = dataclasses.replace(AHEAD, num_bytes=100)
    started: list[str] = []

    def read(name):
        started.append(name)
        return name

    names = [f"{number}" for number in range(9)]
    found = ordered_reads.read_in_order(read, names, limits, [60, 60, 200, *6 * [40]])
    assert next(found) == "0"
    assert started == ["0"]  # 60 and 60 are too many
    assert [*found] == names[1:]
    assert sorted(started) == names


def test_the_sizes_of_files_that_are_there_are_known(results):
    results.write(ResultHead(item="b", seconds=1.5, metrics={}), bytes(1000))
    none, some = results.sizes(["a", "b"])
    assert none == 0
    assert some > 1000
