"""Task process: Spark's Python process, which collects garbage after each task.

Covers: the task's partition; exempting what stays there, as imports do, from these collections.
Does not: collect while a task runs.
Runs in: Spark's tasks.

Such a collection looks at 80,000 objects of pyarrow, pandas and tfos, for 25 to 45 ms of processor
time, which is as long as a small partition takes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Run a task of a feed; objects there at the end of the first successful one stay for ever."""
    yield
    _exempt_once()


def exempt_objects() -> None:
    """Exempt the objects that there are now; in another process than a Spark task's nothing."""
    if _is_spark_task():
        gc.collect()
        gc.freeze()


_exempt_once = functools.cache(exempt_objects)


def partition_id() -> int:
    """Return the number of the task's partition; 0 outside of a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _is_spark_task() -> bool:
    from pyspark import TaskContext

    return TaskContext.get() is not None
