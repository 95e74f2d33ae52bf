"""The watch of a server for its successor: looks in a thread of its own, beside the requests.

A request is answered only if a look has begun shortly before: the server may have been frozen, and
replaced meanwhile. So requests wait for a look, but not for a file system that hangs: then nothing
is known of a successor, as where the file system refuses, and the server goes on and says so.

Covers: the looks, how long a request waits for one, what is said of a directory that is away.
Does not: read or write the numbers (ps.checkpoint.fencing), end the process (ps.cli.serve).
Runs in: PS processes that are started by hand.
Threads: any; `_changed` guards everything. `ps-successor` looks.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time

from ps.checkpoint.fencing import LOOK_S, Generation, GenerationFence
from ps.errors import CheckpointError

_logger = logging.getLogger(__name__)

HANG_S = 5.0
"""Requests wait for a look this long, and for none after it until the directory answers again. The
failover of a server for files takes seconds; clients wait a minute for an answer."""
_PERIOD_S = 0.2
"""Seconds between two looks; shorter than LOOK_S, so that few requests wait for one."""
_SLICE_S = 0.1
"""One wait of a request for a look; a longer one was a suspended process."""


class SuccessorWatch:
    """Whether another process has taken a server's place, as the last looks have shown.

    Args:
        fence: fence of this server.
    """

    def __init__(self, fence: GenerationFence) -> None:
        self.fence = fence
        self._changed = threading.Condition()
        self._looked_s = -math.inf
        """When the last look began that has found no successor."""
        self._newer: Generation | None = None
        self._is_away = False
        """Whether the directory has given no answer, so that nobody waits for one."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ps-successor", daemon=True)

    def start(self) -> None:
        """Begin to look, once the fence has claimed its number."""
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """End the looks; one that hangs is left to itself. Idempotent.

        Args:
            timeout_s: for the look under way.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def successor(self) -> Generation | None:
        """Return who has replaced this process, as a look says that began within LOOK_S.

        Waits for one if there is none; while the directory is away, nobody is known.
        """
        since_s = time.monotonic() - LOOK_S
        if self._newer is None and self._looked_s <= since_s:
            self._wait_for_look(since_s)
        return self._newer

    def _wait_for_look(self, since_s: float) -> None:
        waited_s = 0.0
        with self._changed:
            while not (self._looked_s > since_s or self._newer or self._is_away or self._is_closed):
                begun_s = time.monotonic()
                self._changed.wait(_SLICE_S)
                waited_s += min(time.monotonic() - begun_s, 2 * _SLICE_S)
                if waited_s >= HANG_S:
                    self._lose_sight(f"has not answered for {HANG_S:g} s")

    def _run(self) -> None:
        while True:
            begun_s = time.monotonic()
            newer, failure = None, ""
            try:
                newer = self.fence.successor()
            except (OSError, CheckpointError) as error:
                failure = f"cannot be read ({error})"
            with self._changed:
                self._note(begun_s, newer, failure)
            if newer is None and not failure:
                self.fence.repair()
            with self._changed:
                if newer is not None or self._is_closed:
                    return
                self._changed.wait(_PERIOD_S)

    def _note(self, begun_s: float, newer: Generation | None, failure: str) -> None:
        """Note what a look has shown, under the lock; wakes those who wait for it."""
        if failure:
            self._lose_sight(failure)
        else:
            if self._is_away:
                _logger.warning("%s answers again", self.fence.directory)
            self._is_away = False
            self._newer = newer
            if newer is None:
                # Not its end: another process may have claimed since it was read.
                self._looked_s = begun_s
        self._changed.notify_all()

    def _lose_sight(self, why: str) -> None:
        if not self._is_away:
            _logger.warning(
                "%s %s: %s continues to serve, and cannot see whether another process has "
                "replaced it. End this one (pid %d) before you start another one instead",
                self.fence.directory,
                why,
                self.fence.server,
                os.getpid(),
            )
        self._is_away = True
        self._changed.notify_all()
