"""Slots that estimators share: fits of several threads wait until their nodes fit together.

Spark counts running tasks, and the nodes of a fed cluster hold none once they run. So fits that run
at once, as those of a CrossValidator do, would start more nodes than there are cores.

Covers: the queue of one SparkContext.      Does not: count slots (tfos.spark.facts).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from tfos.spark.facts import read_facts, read_offer

_LOOK_S = 1.0
"""Executors may come; so a waiting fit counts slots again."""


class SlotQueue:
    """Fits of one SparkContext in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = 0

    @contextlib.contextmanager
    def take(self, count: int, total: Any) -> Iterator[None]:
        """Hold `count` slots; wait while other fits hold too many.

        Args:
            count: slots. More than there are is no reason to wait: the cluster refuses it.
            total: called for the number of all slots.
        """
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while not self._fits(me, count, total):
                    self._changed.wait(_LOOK_S)
                self._taken += count
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= count
                self._changed.notify_all()

    def _fits(self, me: object, count: int, total: Any) -> bool:
        if self._waiting[0] is not me:
            return False
        return not self._taken or self._taken + count <= total()


_queues: weakref.WeakKeyDictionary[Any, SlotQueue] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def slots_for(sc: Any, count: int) -> Iterator[None]:
    """Hold slots of a SparkContext for one fit.

    Args:
        sc: the SparkContext.
        count: nodes of the fit's cluster.
    """
    with _lock:
        queue = _queues.setdefault(sc, SlotQueue())
    facts = read_facts(sc)
    with queue.take(count, lambda: read_offer(sc, facts).total):
        yield
