"""Which failures Spark's reason explains, and what their headline then says."""

from __future__ import annotations

import types

import pytest

from tfos.errors import describe_failures
from tfos.failure import EXECUTOR_LOST, NODE_SILENT, NodeFailure, NodeId
from tfos.spark.executor_ends import ExecutorEnds

OVER = (
    "Container killed by YARN for exceeding physical memory limits.\n1.1 GB of 1 GB physical memory"
)
MISSING = "[Errno 2] No such file or directory: '/nm/container_1_0002_01_000003/data.csv'"


class FakeStore:
    """A SparkContext whose status store tells the reason when it is asked for the n-th time."""

    master = "yarn"
    applicationId = "application_1_0002"

    def __init__(self, reason: str, asked_before: int = 0) -> None:
        self._reason = reason
        self._left = asked_before
        self._jsc: FakeStore | None = self

    def sc(self) -> FakeStore:
        return self

    statusStore = sc

    def executorList(self, only_active: bool) -> FakeStore:
        assert not only_active
        is_known = bool(self._reason) and self._left <= 0
        self._left -= 1
        option = types.SimpleNamespace(isDefined=lambda: is_known, get=lambda: self._reason)
        entry = types.SimpleNamespace(id=lambda: "3", removeReason=lambda: option)
        self._entries = [entry]
        return self

    def iterator(self) -> FakeStore:
        return self

    def hasNext(self) -> bool:
        return bool(self._entries)

    def next(self) -> types.SimpleNamespace:
        return self._entries.pop()


def _failure(error_type: str, message: str = "gone", executor_id: str = "3") -> NodeFailure:
    return NodeFailure(
        NodeId("worker", 1), "h", 7, executor_id, error_type=error_type, message=message
    )


@pytest.mark.parametrize("asked_before", [0, 1])
@pytest.mark.parametrize(
    ("error_type", "message"),
    [(EXECUTOR_LOST, "ended"), (NODE_SILENT, "silent"), ("FileNotFoundError", MISSING)],
)
def test_sparks_reason_is_in_the_headline_of_a_lost_executor(error_type, message, asked_before):
    ends = ExecutorEnds(FakeStore(OVER, asked_before))
    found = describe_failures([ends.explain(_failure(error_type, message))]).splitlines()[0]
    assert found.startswith(
        f"ExecutorLost: {message}. Spark's reason: Container killed by YARN for"
    )
    assert "physical memory limits. 1.1 GB of 1 GB physical memory" in found
    assert "yarn logs -applicationId application_1_0002" in found


@pytest.mark.parametrize(
    "failure",
    [
        _failure("ValueError"),
        _failure("FileNotFoundError", "No such file: '/data/x'"),
        _failure(EXECUTOR_LOST, executor_id=""),
        _failure(EXECUTOR_LOST, executor_id="4"),
    ],
)
def test_what_the_executors_end_does_not_explain_stays_as_it_is(failure):
    assert ExecutorEnds(FakeStore(OVER), patience_s=0.0).explain(failure) is failure


def test_without_a_reason_or_a_context_the_failure_stays_as_it_is():
    lost = _failure(EXECUTOR_LOST)
    assert ExecutorEnds(FakeStore(""), patience_s=0.0).explain(lost) is lost
    stopped = FakeStore(OVER)
    stopped._jsc = None
    assert ExecutorEnds(stopped, patience_s=0.0).explain(lost) is lost


def test_a_reason_that_is_not_known_yet_is_not_waited_for_where_nobody_asks_for_that():
    ends = ExecutorEnds(FakeStore(OVER, asked_before=1), patience_s=60.0)
    lost = _failure(EXECUTOR_LOST)
    assert ends.explain(lost, waits=False) is lost
    assert "physical memory" in ends.explain(lost, waits=False).message


def test_a_spark_that_is_gone_explains_nothing():
    class Gone(FakeStore):
        def executorList(self, only_active: bool) -> FakeStore:
            raise ConnectionRefusedError("the JVM has ended")

    lost = _failure(EXECUTOR_LOST)
    assert ExecutorEnds(Gone(OVER), patience_s=0.0).explain(lost) is lost
