"""What tasks have imported is taken out of Spark's collections once, and nowhere else."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tfos.feed import task_process


@pytest.fixture
def calls(monkeypatch):
    """What the collector was asked for."""
    made: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: made.append("freeze"))
    monkeypatch.setattr(gc, "collect", lambda: made.append("collect"))
    task_process._exempt_once.cache_clear()
    yield made
    task_process._exempt_once.cache_clear()


def test_the_first_task_that_succeeds_leaves_its_objects_to_no_later_collection(calls, monkeypatch):
    monkeypatch.setattr(task_process, "_is_spark_task", lambda: True)
    with pytest.raises(ValueError, match="a row"), task_process.lasting_imports():
        raise ValueError("a row")
    assert calls == []  # the error comes at once
    for _ in range(2):
        with task_process.lasting_imports():
            pass
    assert calls == ["collect", "freeze"]


def test_a_process_that_is_no_task_keeps_its_collector_as_it_is(calls):
    with task_process.lasting_imports():
        pass
    assert calls == []


def test_the_report_of_a_feed_task_is_made_without_pandas():
    statement = (
        "import sys\n"
        "from feeding.sender.task import FeedReport\n"
        "from tfos.feed.dataframe import ArrowTask, reports_of\n"
        "report = FeedReport(3, rows=5, accepted={0: bytes([0, 255])})\n"
        "[batch] = ArrowTask(lambda partition, batches: iter([report]))([])\n"
        "batch.validate(full=True)\n"
        "print('pandas' in sys.modules, reports_of([batch[0].to_pylist()]) == [report])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "True"]
