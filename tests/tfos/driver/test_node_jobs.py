"""The end of the nodes' jobs: which are waited for, and which are cancelled at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster_states import node_id, report_to, running
from tfos.config import ClusterConfig, Restarts
from tfos.console.console import Console
from tfos.control import messages
from tfos.control.coordinator import Coordinator
from tfos.control.state.actions import Replace
from tfos.driver.node_jobs import NodeJobs
from tfos.failure import EXECUTOR_LOST, NodeFailure
from tfos.topology import plan


class Job:
    """A job that ends when its nodes have stopped, or when it is cancelled."""

    def __init__(self, calls: list[str], name: str, *, has_task: bool | None = True) -> None:
        self._calls, self._name, self._has_task = calls, name, has_task
        self.is_ended = False

    def has_active_task(self) -> bool | None:
        return self._has_task

    def join(self, timeout_s: float) -> bool:
        if not self.is_ended:
            self._calls.append(f"join {self._name}")
        self.is_ended = True
        return True

    def cancel(self, timeout_s: float) -> bool:
        self._calls.append(f"cancel {self._name}")
        self.is_ended = True
        return True


@pytest.mark.parametrize(
    ("has_task", "has_come"), [(False, False), (True, False), (None, False), (True, True)]
)
def test_a_job_that_waits_for_a_slot_for_a_new_attempt_is_not_waited_for(
    has_task: bool | None, has_come: bool
):
    coordinator = Coordinator(plan(3, 1), ClusterConfig(), Console(enabled=False))
    config = ClusterConfig(restarts=Restarts(workers=1))
    coordinator._state = state = running(plan(3, 1), config=config)
    nothing: Any = None
    jobs = NodeJobs(nothing, coordinator, nothing, nothing, places=nothing, on_cancel=print)
    wanted: list[Replace] = []
    coordinator.replace_by(wanted.append)
    lost = NodeFailure(node_id("worker:1"), "h", 7, error_type=EXECUTOR_LOST)
    report_to(coordinator, lost.node, messages.Failed(lost))
    (replace,) = wanted
    if has_come:
        again = node_id("worker:1", replace.first_attempt)
        state.on_register(messages.Register(again, "1", "h", 8), 0.0)
    calls: list[str] = []
    workers: Any = Job(calls, "workers")
    restart: Any = Job(calls, "worker:1", has_task=has_task)
    jobs._jobs = {workers: (), restart: (replace.node,)}
    jobs._replacing = {restart: replace}
    assert jobs.end(10.0)
    first = ["cancel worker:1"] if has_task is False else []
    last = [] if has_task is False else ["join worker:1"]
    assert calls == [*first, "join workers", *last]
