"""One short Spark job per executor: one that hangs or fails takes no other's answer with it.

Covers: placing a task on an executor, waiting for all of them at once, what the two clocks show.
Does not: know what is collected (tfos.doctor.collection).
Runs in: the driver.
Threads: one per job, 64 at most.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfos.doctor import collection
from tfos.doctor.collection import PLACE, CollectRequest, Facts
from tfos.slots.offer import ExecutorSlots
from tfos.spark.jobs import SparkJob, reason_of
from tfos.spark.node_rdd import node_rdd, task_location

_IN_FLIGHT = 64


@dataclass(slots=True)
class Visit:
    """Result of asking one executor."""

    executor: ExecutorSlots
    facts: Facts | None = None
    reason: str = ""
    """Why there are no facts."""
    was_asked: bool = True
    """Whether its turn came in time."""


def ask(rows: Any, request: CollectRequest) -> Facts:
    """Run the jobs of one executor and return its facts, with what its clock can be ahead by.

    Args:
        rows: see `rows_at`.
        request: what to collect.
    """
    [facts] = rows.mapPartitions(functools.partial(collection.visit, request)).collect()
    # The first job has started Python there; this one's few moments bound the difference.
    asked_unix_s = collection.unix_s()
    [there_unix_s] = rows.mapPartitions(collection.look_at_clock).collect()
    facts["clock"] = {
        "ahead_at_least_s": there_unix_s - collection.unix_s(),
        "ahead_at_most_s": there_unix_s - asked_unix_s,
    }
    return dict(facts)


def visit_all(
    sc: Any,
    executors: Sequence[ExecutorSlots],
    request_to: Callable[[str], CollectRequest],
    timeout_s: float,
) -> list[Visit]:
    """Collect the facts of each executor on it.

    Args:
        sc: the SparkContext, used by nobody else.
        executors: all of them.
        request_to: what to collect, by the executor's id.
        timeout_s: seconds for all of them together.
    """
    from pyspark import cloudpickle

    deadline_s = time.monotonic() + timeout_s
    free = threading.Semaphore(_IN_FLIGHT)
    visits = [Visit(executor) for executor in executors]
    jobs: dict[str, SparkJob[Facts]] = {}
    # An executor without tfos, or with another release, still gets the driver's functions.
    cloudpickle.register_pickle_by_value(collection)
    try:
        for visit in visits:
            if not free.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                break
            executor_id = visit.executor.executor_id
            job = jobs[executor_id] = _job(sc, visit.executor, request_to(executor_id), free)
            job.start()
        for visit in visits:
            _settle(visit, jobs.get(visit.executor.executor_id), deadline_s, timeout_s)
    finally:
        cloudpickle.unregister_pickle_by_value(collection)
    if any(not job.is_ended for job in jobs.values()):
        sc.cancelAllJobs()
    return visits


def _job(
    sc: Any, executor: ExecutorSlots, request: CollectRequest, free: threading.Semaphore
) -> SparkJob[Facts]:
    rows = rows_at(sc, executor)
    return SparkJob(
        sc,
        tag=f"tfos-doctor-{executor.executor_id}-{secrets.token_hex(4)}",
        description=f"tfos doctor: executor {executor.executor_id}",
        action=lambda: ask(rows, request),
        on_end=lambda _: free.release(),
    )


def rows_at(sc: Any, executor: ExecutorSlots) -> Any:
    """Return an RDD of one row whose task prefers an executor, as one with cached rows does.

    Spark waits `spark.locality.wait` for the executor before it takes another one.

    Args:
        sc: the SparkContext.
        executor: where.
    """
    return node_rdd(sc, [None], [task_location(executor.host, executor.executor_id)])


def _settle(visit: Visit, job: SparkJob[Facts] | None, deadline_s: float, timeout_s: float) -> None:
    asked = visit.executor.executor_id
    if job is None:
        visit.was_asked = False
        visit.reason = (
            f"not asked: {_IN_FLIGHT} others at a time did not answer within {timeout_s:g} s"
        )
        return
    if not job.join(max(0.0, deadline_s - time.monotonic())):
        visit.reason = f"no answer within {timeout_s:g} s"
        return
    if job.error is not None:
        visit.reason = f"its task failed: {reason_of(job.error)}"
        return
    facts = job.result()
    ran_on = facts.get(PLACE, {}).get("executor_id", asked)
    if ran_on != asked:
        visit.reason = f"it is busy or lost: Spark ran its task on executor {ran_on}"
        return
    visit.facts = facts
