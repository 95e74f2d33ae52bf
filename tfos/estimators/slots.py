"""Slots that estimators share: fits of several threads wait until their nodes fit together.

Spark counts running tasks, and the nodes of a fed cluster hold none once they run. So concurrent
fits, such as a CrossValidator's, would start more nodes than there are cores. The cluster itself
waits for slots that feed tasks and predictions hold (ClusterConfig.shares_slots).

Covers: the queue of one SparkContext.      Does not: count slots (tfos.slots.reading).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tfos.config import SHARED_SLOTS_S
from tfos.errors import NotEnoughSlots
from tfos.slots.reading import read_offer
from tfos.spark.facts import read_facts

_LOOK_S = 1.0
"""Seconds between counts of slots in a waiting fit: executors may join."""
LONGEST_FIT_S = SHARED_SLOTS_S
"""Longest time that a training fit may report nothing."""


class SlotQueue:
    """Fits of one SparkContext in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = 0
        self._changed_s = time.monotonic()
        """When a fit last began or ended."""

    @contextlib.contextmanager
    def take(
        self, count: int, total: Callable[[], int], timeout_s: float = LONGEST_FIT_S
    ) -> Iterator[None]:
        """Hold `count` slots; wait while other fits hold too many.

        Args:
            count: slots. It does not wait for more than exist: the cluster refuses them.
            total: called to get the number of all slots.
            timeout_s: longest wait in which no other fit begins or ends.

        Raises:
            NotEnoughSlots: the other fits made no progress for that long.
        """
        me, began_s = object(), time.monotonic()
        with self._changed:
            self._waiting.append(me)
            try:
                while not self._fits(me, count, total):
                    if time.monotonic() - max(began_s, self._changed_s) > timeout_s:
                        raise NotEnoughSlots(
                            f"a fit needs {count} task slots, other fits hold {self._taken} of "
                            f"{total()}; none of them has ended for {timeout_s:.0f} s. Find out "
                            "what they wait for, or run fewer at once (parallelism=)"
                        )
                    self._changed.wait(_LOOK_S)
                self._count(count)
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._count(-count)
                self._changed.notify_all()

    def _count(self, count: int) -> None:
        self._taken += count
        self._changed_s = time.monotonic()

    def _fits(self, me: object, count: int, total: Callable[[], int]) -> bool:
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

    Raises:
        NotEnoughSlots: other fits held too many for three days, in which none of them ended.
    """
    with _lock:
        queue = _queues.setdefault(sc, SlotQueue())
    facts = read_facts(sc)
    with queue.take(count, lambda: read_offer(sc, facts).total):
        yield
