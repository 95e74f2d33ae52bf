"""The waits of a rendezvous: threads that have arrived and are answered when the last one comes.

Covers: waiting with a deadline, waking.      Does not: decide who is waited for
(ps.server.rendezvous).
Threads: any; `_changed` guards the rendezvous.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from ps.errors import PeerGone, PhaseError, RequestTimeout
from ps.manifest.manifest import WorkerRank
from ps.server.rendezvous import Rendezvous

_CHECK_PEER_S = 0.25


class Meetings:
    """All meetings of one cluster's workers."""

    def __init__(self, num_workers: int) -> None:
        self._changed = threading.Condition()
        self._rendezvous = Rendezvous(num_workers)
        self._ended = ""

    def meet(
        self,
        key: str,
        worker: WorkerRank,
        value: bytes,
        deadline_s: float,
        is_gone: Callable[[], bool],
    ) -> Mapping[WorkerRank, bytes]:
        """Bring a value and wait for everybody's.

        Raises:
            RequestTimeout: not before `deadline_s` (monotonic); names who is missing. The value
                stays, so a retry goes on waiting.
            PeerGone: the caller is gone.
            PhaseError: the worker has finished, or the server is stopping.
        """
        with self._changed:
            if self._rendezvous.arrive(key, worker, value):
                self._changed.notify_all()
            while (values := self._rendezvous.result(key)) is None:
                if self._ended:
                    raise PhaseError(f"meeting {key!r} ends: {self._ended}")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    missing = ", ".join(str(rank) for rank in self._rendezvous.missing(key))
                    raise RequestTimeout(
                        f"meeting {key!r} still waits for worker {missing}; raise the timeout, or "
                        "let workers that are done call finish()",
                        {"missing": missing},
                    )
                if is_gone():
                    raise PeerGone(f"worker {worker} closed its connection while waiting")
                self._changed.wait(min(left_s, _CHECK_PEER_S))
            return values

    def finish(self, worker: WorkerRank) -> None:
        """The worker is done for good."""
        with self._changed:
            self._rendezvous.finish(worker)
            self._changed.notify_all()

    def lose(self, worker: WorkerRank) -> None:
        """The worker is gone."""
        with self._changed:
            self._rendezvous.lose(worker)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """End all waits."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()
