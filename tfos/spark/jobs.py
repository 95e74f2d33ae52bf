"""Spark jobs, each on its own thread and under its own tag.

Covers: running an action on its own thread, cancelling exactly it, short reasons; the scheduler
pool and other local properties of the thread that starts it; jobs in waves, between which another
job gets a slot.
Does not: know nodes or feeds; the action is a function.
Runs in: the driver.
Threads: one per job. py4j gives each its own Java thread, without the local properties of the
thread that started it. pyspark's InheritableThread copies those of the active SparkContext, which
may not be the job's.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

from tfos.spark.facts import check_running, num_free_slots

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_CANCEL_AGAIN_S = 0.5
"""Delay before a job is cancelled again, in case it was not submitted at the first time."""
_COUNT_S = 1.0
_SHORTEST_S = 0.001
_PYTHON_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|[A-Z]\w+|error|timeout)): "
    r".+(?:\n(?!\tat | SQLSTATE: ).+)*",
    re.M,
)
"""A Python error with the lines that follow, up to a blank one: a message may hold a table.

Spark 4.2 ends the text with the line of its own error's class.
"""
_BARE_ERROR = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?:    .*\n)*'
    r"(?P<name>[A-Za-z_][\w.]*)$",
    re.M,
)
"""A Python error without a message, as of an assert, below the last call of its traceback."""
_MAX_REASON_CHARS = 2000
MAX_RESULT_SIZE = "spark.driver.maxResultSize"
"""Spark's setting that bounds what one job brings to the driver."""
JVM_ENDED = (
    "the driver's JVM ended, and with it the Spark application: see its log (hs_err_pid*.log of a "
    "crash); if memory was short raise spark.driver.memory"
)
JOB_GROUP = "spark.jobGroup.id"
"""Spark's local property: the job group of a thread; on that of a query the id of its run."""
QUERY_ID = "sql.streaming.queryId"
"""Spark's local property on the thread of a query; the id is in its checkpoint, so it lasts."""
_FAILED_TASK = re.compile(r"\bTask (\d+) in stage [\d.]+ failed \d+ times")
_NOTED_TASK = re.compile(r"\nin task (\d+)$", re.M)
"""What a node's task adds to its error: from Spark 4.2 on a Python error has no other number."""
_CANCELLED = re.compile(r"\bJob \d+ cancelled\b")


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """Tasks of a job."""

    total: int
    ended: int
    active: int

    @property
    def fraction(self) -> float | None:
        """Share of the tasks that have ended."""
        return self.ended / self.total if self.total else None


class SparkJob(Generic[Result]):
    """One action on its own thread.

    Args:
        sc: the SparkContext.
        tag: unique; the job is cancelled and found by it.
        description: what Spark's UI shows.
        action: runs the job and returns its result.
        on_end: called on the job's thread once it has ended, however it did.
        waves: waves in which the action submits its tasks; None: it does so in one job.
    """

    def __init__(
        self,
        sc: Any,
        tag: str,
        description: str,
        action: Callable[[], Result],
        on_end: Callable[[SparkJob[Result]], None],
        waves: Waves | None = None,
    ) -> None:
        self._sc = sc
        self.tag = tag
        self._description = description
        self._action = action
        self._on_end = on_end
        self._waves = waves
        self._cancelled = False
        self._ended = threading.Event()
        self._result: Result | None = None
        self.error: BaseException | None = None
        """Why it failed; None while it runs and when it succeeded."""
        self.tasks: TaskCounts | None = None
        """Its tasks a moment ago; None if they were not counted."""

    def start(self, *, count_tasks: bool = False) -> None:
        """Submit the job, and keep `tasks` fresh if wanted."""
        act = inheriting(self._sc, self._act)
        threading.Thread(target=self._run, args=(act,), name=self.tag, daemon=True).start()
        if count_tasks:
            name = f"{self.tag}-tasks"
            threading.Thread(target=self._count_tasks, name=name, daemon=True).start()

    @property
    def is_ended(self) -> bool:
        """Whether the job is over."""
        return self._ended.is_set()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def result(self) -> Result:
        """Return the action's result, or raise its error."""
        if self.error is not None:
            raise self.error
        if not self.is_ended:
            raise RuntimeError(f"{self.tag} has not ended")
        return self._result  # type: ignore[return-value]  # it has ended without an error

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the job; return whether it ended in time."""
        return self._ended.wait(timeout_s)

    def cancel(self, timeout_s: float) -> None:
        """Cancel this job and no other; wait for its end, at most `timeout_s`."""
        self._cancelled = True
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ended and time.monotonic() < deadline_s:
            try:
                self._sc.cancelJobsWithTag(self.tag)
            except Exception:  # noqa: BLE001  # py4j's many errors: the context stops, or has
                self.join(max(0.0, deadline_s - time.monotonic()))
            else:
                self.join(_CANCEL_AGAIN_S)

    def has_active_task(self) -> bool | None:
        """Ask Spark whether a task of it runs now; None: it is not known."""
        counts = _tasks_of(self._sc, self.tag)
        return counts.active > 0 if counts is not None else None

    def _count_tasks(self) -> None:
        while not self._ended.wait(_COUNT_S):
            if self._waves is not None and self._waves.num_tasks:
                self.tasks = self._waves.tasks_with(_last_tasks_of(self._sc, self.tag))
            else:
                self.tasks = _tasks_of(self._sc, self.tag)

    def _run(self, act: Callable[[], Result | None]) -> None:
        try:
            self._result = act()
        except BaseException as error:  # noqa: BLE001  # reported to the thread that waits
            self.error = error
        finally:
            self._ended.set()
            self._on_end(self)

    def _act(self) -> Result | None:
        group = self._sc.getLocalProperty(JOB_GROUP)  # a notebook's cell, which it cancels by that
        if group is None or self._sc.getLocalProperty(QUERY_ID):  # a stream's batch ends in order
            group = self.tag
        self._sc.setJobGroup(group, self._description, interruptOnCancel=True)
        self._sc.addJobTag(self.tag)  # beside those of the user's thread
        return None if self._cancelled else self._action()


def inheriting(spark: Any, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function as one that runs with this thread's local properties on any thread.

    Args:
        spark: the SparkContext.
        function: the function to call.
    """
    check_running(spark)
    properties = spark._jsc.sc().getLocalProperties().clone()

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_running(spark)
        spark._jsc.sc().setLocalProperties(properties)
        return function(*args, **kwargs)

    return run


def collect_in_order(rdd: Any, order: Callable[[int], list[int]]) -> list[Any]:
    """Collect some or all partitions of an RDD; Spark starts their tasks in the order named.

    Args:
        rdd: a DataFrame's, or what a function made of one; not a JVM's of text or pairs (textFile,
            cartesian): runJob takes only rows that are pickled.
        order: returns the partitions to run, given the number of partitions.
    """
    return _collect(rdd, order(rdd.getNumPartitions()))


def _collect(rdd: Any, partitions: Sequence[int]) -> list[Any]:
    """Collect partitions of an RDD in this order."""
    return list(rdd.ctx.runJob(_Collected(rdd), iter, partitions))


@dataclass(frozen=True)
class _Collected:
    """An RDD as SparkContext.runJob takes it, which runs no function on its rows.

    On the rows of a DataFrame the function would run in a second Python process beside each task's.
    """

    rdd: Any

    def mapPartitions(self, _function: object) -> Any:
        return self.rdd


class Waves:
    """Runs the partitions of an RDD as Spark jobs that follow each other, each about `wave_s` long.

    Spark gives a free slot to the job that was submitted first as long as that has tasks to start.
    A job that is submitted meanwhile, such as that of a node's new attempt, gets a slot once the
    tasks of the wave have started, and not at the end of all.

    Args:
        wave_s: seconds of a wave. Shorter: others wait less; longer: fewer pauses between waves.
    """

    def __init__(self, wave_s: float) -> None:
        self._wave_s = wave_s
        self.num_tasks = 0
        """Tasks of all waves; 0 until the first begins."""
        self._num_ended = 0
        """Tasks of the waves that have ended."""

    def collect(self, rdd: Any, order: Callable[[int], list[int]]) -> list[Any]:
        """See collect_in_order."""
        partitions = order(rdd.getNumPartitions())
        found: list[Any] = []
        size, begin = 1, 0
        self.num_tasks = len(partitions)
        while begin < len(partitions):
            size = max(size, num_free_slots(rdd.ctx))
            wave: Sequence[int] = partitions[begin : begin + size]
            self._num_ended = begin
            begin += len(wave)
            started_s = time.monotonic()
            found += _collect(rdd, wave)
            size = next_size(size, time.monotonic() - started_s, self._wave_s)
        return found

    def tasks_with(self, wave: TaskCounts | None) -> TaskCounts | None:
        """Return the tasks of all waves, given those of the one that runs; None: not counted."""
        if wave is None:
            return None
        ended = min(self.num_tasks, self._num_ended + wave.ended)
        return replace(wave, total=self.num_tasks, ended=ended)


def next_size(size: int, took_s: float, wave_s: float) -> int:
    """Return how many tasks the next wave has; it grows slowly: the first only fill buffers.

    Args:
        size: tasks of the wave that has ended.
        took_s: seconds that it took.
        wave_s: seconds that a wave should take.
    """
    return max(1, min(2 * size, int(size * wave_s / max(took_s, _SHORTEST_S))))


def _jobs_of(sc: Any, tag: str) -> list[int]:
    # That of Java, which pyspark's holds, knows groups alone.
    return [*sc._jsc.sc().statusTracker().getJobIdsForTag(tag)]


def _tasks_of(sc: Any, tag: str) -> TaskCounts | None:
    try:
        tracker = sc.statusTracker()
        found = [
            tracker.getStageInfo(stage)
            for job in _jobs_of(sc, tag)
            for stage in tracker.getJobInfo(job).stageIds
        ]
    except Exception:  # noqa: BLE001  # py4j's many errors; an estimate is no reason to fail
        return None
    stages = [stage for stage in found if stage is not None]
    return TaskCounts(
        sum(stage.numTasks for stage in stages),
        sum(stage.numCompletedTasks for stage in stages),
        sum(stage.numActiveTasks for stage in stages),
    )


def _last_tasks_of(sc: Any, tag: str) -> TaskCounts | None:
    """Return the tasks of the last job's last stage, whose parents other jobs list again.

    Those of a parent that runs are active ones.
    """
    try:
        tracker = sc.statusTracker()
        job = max(_jobs_of(sc, tag))
        stages = {stage: tracker.getStageInfo(stage) for stage in tracker.getJobInfo(job).stageIds}
        last = stages[max(stages)]
        active = sum(each.numActiveTasks for each in stages.values() if each is not None)
        return TaskCounts(last.numTasks, last.numCompletedTasks, active)
    except Exception:  # noqa: BLE001  # py4j's many errors; an estimate is no reason to fail
        return None


def was_cancelled(error: BaseException) -> bool:
    """Whether a job ended because it was cancelled, or because the SparkContext stopped."""
    return _CANCELLED.search(reason_of(error)) is not None


def jvm_has_ended(sc: Any, error: BaseException) -> bool:
    """Whether a job failed because the driver's JVM has ended; py4j's text does not say so.

    Args:
        sc: the SparkContext.
        error: the job's error.
    """
    if hasattr(error, "java_exception"):
        return False
    try:
        sc._jvm.java.lang.System.nanoTime()
    except Exception as silent:  # noqa: BLE001 - a job's end is reported, whatever this says
        return isinstance(silent, OSError) or type(silent).__module__ == "py4j.protocol"
    return False


def failed_task_of(error: BaseException) -> int | None:
    """Return the number of the task that a job failed with, as it or Spark tells it; None: neither.

    For a job over all partitions it is the number of the partition.
    """
    text = _text_of(error)
    found = _NOTED_TASK.search(text) or _FAILED_TASK.search(text)
    return int(found[1]) if found else None


def reason_of(error: BaseException) -> str:
    """Return the useful part of a failed Spark job's error: the Python exception of the task.

    A Py4JJavaError's text is two stack traces of a hundred lines; what the task raised is the last
    paragraph of the Python traceback inside it. An error without a message has its place instead.
    """
    text = _NOTED_TASK.sub("", _text_of(error))
    found = [m for m in _PYTHON_ERROR.finditer(text) if not m[0].startswith("org.apache")]
    bare = _BARE_ERROR.search(text, found[-1].end() if found else 0)
    if bare:
        return "{name} in {function} ({file}, line {line})".format(**bare.groupdict())
    if found:
        return str(found[-1][0])[:_MAX_REASON_CHARS]
    lines = text.strip().splitlines() or [type(error).__qualname__]
    return lines[0][:_MAX_REASON_CHARS]


def _text_of(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error)


def advised_reason_of(error: BaseException) -> str:
    """Return `reason_of` a job on the executors, with the next step where Spark's text has none."""
    reason = reason_of(error)
    if MAX_RESULT_SIZE in reason:
        return f"{reason}. Raise {MAX_RESULT_SIZE}, or save large values and return their paths"
    if not reason.startswith("ModuleNotFoundError"):
        return reason
    return (
        f"{reason}. The executors' Python lacks it: set PYSPARK_PYTHON (spark.pyspark.python) to a "
        "Python where tfos is installed, or ship an environment with --archives"
    )
