from __future__ import annotations

import pickle
import traceback

import pytest

from tests.support.cluster_states import node_id
from tfos.errors import NodeFailedError, TFOSError
from tfos.failure import NodeFailure

TEXT = 'Traceback (most recent call last):\n  File "train.py", line 3\nZeroDivisionError: by zero'


def _failure(name: str = "worker:2", **fields: object) -> NodeFailure:
    return NodeFailure(
        node_id(name),
        "host-b",
        881,
        executor_id="5",
        phase="main_fun",
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.fault("F03")
def test_the_original_traceback_is_the_cause_and_printed_once_and_first():
    failure = _failure(
        error_type="ZeroDivisionError", message="by zero", traceback=TEXT, log_path="/var/log/w2"
    )
    shown = "".join(traceback.format_exception(error_of(failure)))
    assert shown.count('File "train.py"') == 1
    where = "raised in worker:2 (executor 5, host-b, pid 881, phase main_fun); log: /var/log/w2"
    assert shown.index('File "train.py"') < shown.index(where)
    assert "ZeroDivisionError: by zero" in str(error_of(failure)).splitlines()[0]


def error_of(*failures: NodeFailure) -> NodeFailedError:
    return NodeFailedError(list(failures))


def test_later_failures_are_counted_not_printed():
    error = error_of(
        _failure("worker:2", error_type="E", traceback="T"),
        _failure("worker:1", message="secret text"),
        _failure("ps:0", message="other"),
    )
    assert "2 more failures after it: ps:0, worker:1" in str(error)
    assert "secret text" not in str(error)
    assert [failure.node.name for failure in error.failures] == ["worker:2", "worker:1", "ps:0"]


def test_failures_before_the_headline_are_not_said_to_follow_it():
    failures = [_failure("ps:0"), _failure("worker:2"), _failure("worker:1")]
    error = NodeFailedError(failures, num_earlier=1)
    assert str(error).endswith(
        "1 more failure after it: worker:2\n1 more failure before it: worker:1"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.fault("F04")
def test_a_death_without_a_traceback_shows_the_last_lines():
    error = error_of(_failure(signal=11, message="killed by SIGSEGV", log_tail=("a", "b")))
    assert str(error).splitlines()[0] == "killed by SIGSEGV"
    assert "last lines of its output:\n    a\n    b" in str(error)
    assert error.__cause__ is None


def test_the_error_survives_pickling():
    error = error_of(_failure(error_type="E", message="m", traceback="T"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.failures == error.failures
    assert isinstance(again, TFOSError)
