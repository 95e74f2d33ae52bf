"""Locality wait: how long Spark leaves a slot idle for tasks whose data are near other slots.

Covers: jobs beside nodes, which do not wait for slots that nodes hold.
Does not: choose executors (tfos.slots.placing) or submit the jobs.
Runs in: the driver.
Threads: any; the setting is the application's, so its users are counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

WAIT = "spark.locality.wait"
_SETTINGS = (WAIT, f"{WAIT}.process", f"{WAIT}.node", f"{WAIT}.rack")

_users: Counter[str] = Counter()
"""How many of each application's jobs do not wait."""
_users_lock = threading.Lock()


@contextlib.contextmanager
def no_locality_wait(sc: Any) -> Iterator[None]:
    """Let the tasks of the jobs inside start in any free slot, though first in one near their data.

    Spark would leave free slots idle for 3 s once all remaining tasks have their data near others.
    It waits in vain where nodes hold those. Spark reads the setting when a stage begins: stages of
    other jobs that begin meanwhile do not wait either. A wait that the user has set stays.

    Args:
        sc: the SparkContext.
    """
    application, settings = sc.applicationId, sc._jsc.sc().conf()
    if not _enter(application, settings):
        yield
        return
    try:
        yield
    finally:
        _leave(application, settings)


def _enter(application: str, settings: Any) -> bool:
    """Set no wait, unless the user has set one; return whether there is none."""
    with _users_lock:
        if not _users[application] and any(map(settings.contains, _SETTINGS)):
            return False
        settings.set(WAIT, "0s")
        _users[application] += 1
        return True


def _leave(application: str, settings: Any) -> None:
    with _users_lock:
        _users[application] -= 1
        if not _users[application]:
            with contextlib.suppress(Exception):  # py4j's many errors: the JVM has ended
                settings.remove(WAIT)
