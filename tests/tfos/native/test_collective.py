"""TensorFlow tells before it joins other processes in collective calls."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tfos.native import collective

MODULE = "tfos_fake_eager_context"
SOURCE = """
class Context:
    joined = 0
    def enable_collective_ops(self, server_def):
        if not server_def:
            raise ValueError("server_def is None.")
        self.joined += 1
"""


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A class of TensorFlow's shape, and the notices before it joins others."""
    monkeypatch.setattr(collective, "_CONTEXT", MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    told: list[tuple[int, int]] = []
    made: list = []
    collective.before_collective(lambda num: told.append((num, made[0].joined if made else 0)))
    made.append(importlib.import_module(MODULE).Context())
    yield made[0], told
    del sys.modules[MODULE]


def server_def(*tasks):
    jobs = [
        SimpleNamespace(name=name, tasks=dict.fromkeys(range(count), "h:1"))
        for name, count in zip(("worker", "chief", "evaluator"), tasks, strict=False)
    ]
    return SimpleNamespace(cluster=SimpleNamespace(job=jobs))


@pytest.mark.parametrize(
    ("tasks", "num_workers"), [((1,), 0), ((2,), 2), ((1, 1), 2), ((2, 1, 1), 3)]
)
def test_it_tells_before_it_joins_several(context, tasks, num_workers):
    tensorflow, told = context
    tensorflow.enable_collective_ops(server_def(*tasks))
    assert tensorflow.joined == 1
    assert told == ([(num_workers, 0)] if num_workers else [])


def test_what_it_refuses_stays_refused(context):
    tensorflow, told = context
    with pytest.raises(ValueError, match="server_def is None"):
        tensorflow.enable_collective_ops(None)
    assert told == []


def test_a_tensorflow_without_that_method_stays_as_it_is():
    bare = SimpleNamespace(Context=type("Context", (), {}))
    collective._tell_first(cast(Any, bare), lambda num_workers: None)
    assert not hasattr(bare.Context, "enable_collective_ops")


def test_only_an_error_of_tensorflow_may_follow_from_a_peer():
    module = "tensorflow.python.framework.errors_impl"
    error = type("UnavailableError", (Exception,), {"__module__": module})()
    assert collective.may_follow_from_peer(error)
    assert not collective.may_follow_from_peer(ValueError())
