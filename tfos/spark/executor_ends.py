"""Why Spark says an executor ended, put into the failure of the node that was on it.

Covers: one read of Spark's status store; which failures it explains, and how.
Does not: find out that a node has failed (tfos.control.state).
Threads: any.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import msgspec

from tfos.failure import EXECUTOR_LOST, NODE_SILENT, NodeFailure

_logger = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""Spark asks the cluster manager for the reason: on YARN it was there after 1 s."""
_POLL_S = 0.1
_SHOWN = 400
_IN_CONTAINER = re.compile(r"/container_\w+")


class ExecutorEnds:
    """Explains failures of nodes by the ends of their executors.

    Args:
        sc: the SparkContext.
        patience_s: seconds to wait for the reason of one failure at most.
    """

    def __init__(self, sc: Any, patience_s: float = PATIENCE_S) -> None:
        self._sc = sc
        self._patience_s = patience_s
        self._known: dict[str, str] = {}

    def explain(self, failure: NodeFailure, waits: bool = True) -> NodeFailure:
        """Return the failure with Spark's reason, or as it is where that explains nothing.

        Args:
            failure: a node's failure.
            waits: whether to wait for a reason that Spark does not have yet.
        """
        if not failure.executor_id or not may_be_lost_executor(failure):
            return failure
        patience_s = self._patience_s if waits else 0.0
        reason = self._known.get(failure.executor_id)
        reason = reason or self._await(failure.executor_id, patience_s)
        if not reason:
            return failure
        self._known[failure.executor_id] = reason
        app = self._sc.applicationId if self._sc.master == "yarn" else ""
        return explained(failure, reason, app)

    def _await(self, executor_id: str, patience_s: float) -> str:
        deadline_s = time.monotonic() + patience_s
        while not (reason := self._read(executor_id)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return reason

    def _read(self, executor_id: str) -> str:
        java = self._sc._jsc
        if java is None:  # the SparkContext is stopped
            return ""
        try:
            summaries = java.sc().statusStore().executorList(False).iterator()
            while summaries.hasNext():
                summary = summaries.next()
                if str(summary.id()) == executor_id and summary.removeReason().isDefined():
                    return str(summary.removeReason().get())
        except Exception as error:  # noqa: BLE001 - as py4j has it: the JVM stops, or is gone
            _logger.debug("no reason for the end of executor %s: %s", executor_id, error)
        return ""


def may_be_lost_executor(failure: NodeFailure) -> bool:
    """Whether the end of its executor can be the cause.

    YARN removes a container's directory at once, so what goes on there may see FileNotFoundError.
    """
    if failure.error_type in (EXECUTOR_LOST, NODE_SILENT):
        return True
    is_missing = failure.error_type.rpartition(".")[2] == "FileNotFoundError"
    return is_missing and bool(_IN_CONTAINER.search(failure.message))


def explained(failure: NodeFailure, reason: str, yarn_application: str) -> NodeFailure:
    """Return the failure as the loss of its executor, with Spark's reason.

    Args:
        failure: failure of a node on that executor.
        reason: Spark's reason, of several lines.
        yarn_application: its id; "": not on YARN.
    """
    line = " ".join(reason.split()).rstrip(".")
    shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
    text = f"{failure.message}. Spark's reason: {shown}"
    if yarn_application:
        text += f". Its logs, once YARN has moved them: yarn logs -applicationId {yarn_application}"
    return msgspec.structs.replace(failure, error_type=EXECUTOR_LOST, message=text)
