"""What a worker says that it does before its first step."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tfos.worker.reports import activity
from tfos.worker.reports.activity import WorkerActivity, running_import


@pytest.fixture
def told(tmp_path, monkeypatch) -> list[str]:
    """What is told, while a module called `tensorflow` is imported, and after it."""
    told: list[str] = []
    (tmp_path / "tensorflow.py").write_text(
        textwrap.dedent(
            """
            from tests.tfos.worker import test_activity
            test_activity.during_import()
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in activity.SLOW_IMPORTS:
        monkeypatch.setitem(sys.modules, name, None)  # undone also where it was not there
        monkeypatch.delitem(sys.modules, name)
    return told


def test_a_slow_import_is_named_within_the_phase(told, monkeypatch):
    numbers: dict[str, float] = {"at_s": 1.0}
    worker = WorkerActivity(told.append, lambda: numbers)
    monkeypatch.setattr(sys.modules[__name__], "during_import", worker.look, raising=False)
    monkeypatch.setitem(sys.modules, "tests.tfos.worker.test_activity", sys.modules[__name__])
    worker.enter("main_fun")
    worker.look()
    import tensorflow  # noqa: F401 - the test's own, four lines long

    worker.look()
    assert told == ["main_fun", "main_fun: import tensorflow", "main_fun"]
    assert running_import() == ""


def test_a_fit_without_a_step_is_named_and_each_phase_is_told_once(told):
    numbers: dict[str, float] = {"at_s": 1.0}
    worker = WorkerActivity(told.append, lambda: numbers)
    worker.look()
    worker.enter("main_fun")
    numbers["steps"] = 0.0
    worker.look()
    worker.look()
    numbers["steps"] = 1.0
    worker.look()
    worker.enter("finishing")
    numbers["steps"] = 0.0  # a fit without rows
    worker.look()
    assert told == ["main_fun", "main_fun: first step", "main_fun", "finishing"]
