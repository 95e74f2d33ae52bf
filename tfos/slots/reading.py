"""What Spark offers now: executors, their slots and the scheduler's free resources on each.

Covers: read_offer, the few reads of Spark's scheduler.
Does not: judge the offer (tfos.slots.wait), read settings (tfos.spark.facts).
Threads: any; py4j gives each Python thread its own JVM thread.
"""

from __future__ import annotations

from typing import Any

from tfos.slots.offer import ExecutorSlots, Offer
from tfos.spark.facts import SparkFacts, check_running, running_tasks
from tfos.spark.shares import NodeShare

_WHOLE_GPU = 10**16
"""One GPU in the units of Spark's scheduler, which counts fractions of it."""
_COMMON = 0
"""Spark's profile id of the common executors."""


def read_offer(sc: Any, facts: SparkFacts, gpu_resource: str | None = "gpu") -> Offer:
    """Return the common executors, with their free resources.

    The status store knows cores, but its counts of active tasks lag (measured: 0 while two tasks
    ran); the scheduler's are exact.

    Args:
        sc: the SparkContext.
        facts: Spark's settings, read before the cluster started.
        gpu_resource: the cluster's setting.
    """
    check_running(sc)
    spark = sc._jsc.sc()
    task, resource = facts.task_share(gpu_resource), facts.counted_resource(gpu_resource)
    executors = []
    summaries = spark.statusStore().executorList(True).iterator()
    running = running_tasks(spark)
    while summaries.hasNext():
        summary = summaries.next()
        slots = int(summary.maxTasks())
        if not slots or int(summary.resourceProfileId()) != _COMMON:
            continue
        name = str(summary.id())
        host = str(summary.hostPort()).rpartition(":")[0]
        if facts.is_in_driver:
            executors.append(ExecutorSlots(name, host, slots, running.get(name, 0)))
            continue
        backend = spark.taskScheduler().backend()
        free = _free(backend, name, resource)
        if free is None or not backend.isExecutorActive(name):  # unknown, or decommissioned
            continue
        if summary.isExcluded():  # after failed tasks: Spark starts none there
            executors.append(ExecutorSlots(name, host, slots=0))
            continue
        # Free cores do not show tasks that hold something else, nor tasks that use more cores.
        busy = max(running.get(name, 0), slots - free.tasks(task))
        capacity = NodeShare(int(summary.totalCores()), _num_gpus(summary, resource))
        is_launching = _is_launching(free, running.get(name, 0))
        executors.append(ExecutorSlots(name, host, slots, busy, capacity, free, is_launching))
    expected, allowed = facts.expected_executors, facts.allowed_slots
    if facts.may_have_more and len(executors) >= (expected or 0):
        expected = None
    is_open = facts.takes_all_cores
    return Offer(tuple(executors), expected, task=task, allowed=allowed, is_open=is_open)


def _is_launching(free: NodeShare, num_running: int) -> bool:
    """Whether an executor has registered but gets no task until it has set itself up.

    That takes seconds on a busy host. Until then Spark counts none of its cores as free.
    """
    return not free.cores and not num_running


def _num_gpus(summary: Any, name: str) -> int:
    resources = summary.resources()
    return len(resources.apply(name).addresses()) if resources.contains(name) else 0


def _free(backend: Any, executor_id: str, name: str) -> NodeShare | None:
    """Return what the scheduler can still give to tasks of an executor; None: unknown executor."""
    # As text: an Int or, from Spark 4.1 on, a decimal of Scala's, which py4j takes for an int.
    cores = backend.getExecutorAvailableCpus(executor_id).iterator().mkString()
    if not cores:
        return None
    resources = backend.getExecutorAvailableResources(executor_id)
    gpus = 0
    if resources.contains(name):
        amounts = resources.apply(name).resourcesAmounts().valuesIterator()
        while amounts.hasNext():
            gpus += int(amounts.next())
    return NodeShare(int(float(cores)), gpus / _WHOLE_GPU)
