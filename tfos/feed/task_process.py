"""Task process: Spark's Python process, which collects garbage after each task.

Covers: exempting what tasks of feeds have imported from these collections.
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
    if _is_spark_task():
        _leave_to_collector()


def _is_spark_task() -> bool:
    from pyspark import TaskContext

    return TaskContext.get() is not None


@functools.cache
def _leave_to_collector() -> None:
    gc.collect()
    gc.freeze()
