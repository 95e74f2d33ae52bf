"""Rendezvous: each worker brings a value under a key, all get all values when the last has come.

Covers: which workers a key waits for, answers that stay the same on retry, also those that a server
before this one gave, bounded memory; the threads that wait.
Does not: answer requests (ps.server.handlers).
Threads: `Rendezvous` is pure; `RendezvousBoard` may be used from any thread, `_changed` guards it.

A key is open from its first arrival and closed when every worker that is still live has arrived;
the values are frozen then. A worker that finished or was lost is not waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from ps.consistency.gate import sender_gone
from ps.consistency.waits import Waited, wait_until
from ps.errors import PSSettingsError, RequestTimeout, ServerPhaseError
from ps.manifest.manifest import WorkerRank
from ps.protocol.kept_answers import KeptAnswers
from ps.protocol.messages import MAX_OPEN_BYTES
from ps.stats.server_stats import OpenRendezvous

_logger = logging.getLogger(__name__)

MAX_OPEN_KEYS = 16
MAX_CLOSED_KEYS = 1024
MAX_CLOSED_BYTES = 64 << 20
"""Answers kept for retries, and for a worker that was started again: its program comes to the keys
of the first attempt once more. ps.protocol.kept_answers has what goes first."""
MAX_KNOWN_KEYS = 1 << 16
"""Keys that are known to be over, most of them without their answers."""


class Rendezvous:
    """All rendezvous of one cluster, by key."""

    def __init__(self, num_workers: int) -> None:
        self._live = {WorkerRank(rank) for rank in range(num_workers)}
        self._finished: set[WorkerRank] = set()
        self._open: dict[str, dict[WorkerRank, bytes]] = {}
        self._over: KeptAnswers[Mapping[WorkerRank, bytes]] = KeptAnswers(
            max_answers=MAX_CLOSED_KEYS, max_bytes=MAX_CLOSED_BYTES, max_keys=MAX_KNOWN_KEYS
        )

    def arrive(self, key: str, worker: WorkerRank, value: bytes) -> bool:
        """Bring a value; the same worker may repeat itself.

        Args:
            key: name of the rendezvous.
            worker: rank.
            value: its own, at most MAX_VALUE_BYTES as those who decode a request have checked.

        Returns:
            Whether the rendezvous is closed, so that `result` has its values.

        Raises:
            ServerPhaseError: the worker has finished; or it is a newer attempt that comes to a key
                whose answers are kept no more.
            PSSettingsError: too many rendezvous are open, or their values are too large together.
        """
        if worker in self._finished:
            raise ServerPhaseError(
                f"worker {worker} has called finish(), which is final; use rendezvous before it"
            )
        if self._over.get(key) is not None:
            return True
        self.refuse_forgotten(key, worker)
        # A newer attempt of a lost worker is live again from the first key that the others have not
        # passed: they would wait for it, and it for them at an older key.
        self._live.add(worker)
        self._check_room(key, value)
        self._open.setdefault(key, {})[worker] = value
        return key in self._close_complete()

    def result(self, key: str) -> Mapping[WorkerRank, bytes] | None:
        """The values by rank once the rendezvous is closed, else None."""
        return self._over.get(key)

    def refuse_forgotten(self, key: str, worker: WorkerRank) -> None:
        """Refuse a worker at a key that the others have passed and whose values are gone.

        Args:
            key: name of the rendezvous.
            worker: rank.

        Raises:
            ServerPhaseError: it would wait for ever.
        """
        if key in self._over and self._over.get(key) is None:
            raise ServerPhaseError(
                f"rendezvous {key!r} is over, and its values are no longer kept (ps:0 keeps those "
                f"of {MAX_CLOSED_KEYS} keys and {MAX_CLOSED_BYTES >> 20} MiB; of keys that differ "
                f"only in their numbers the oldest go first). Worker {worker} is too late, since "
                "it or ps:0 was started again, and cannot join this training. Start the training "
                "again from its last checkpoint"
            )

    def bring(self, key: str, values: Mapping[WorkerRank, bytes] | None) -> bool:
        """Take an answer that a server before this one gave to a worker.

        Args:
            key: name of the rendezvous.
            values: by rank; None: they are no longer kept.

        Returns:
            Whether it was news: workers may wait at that key.
        """
        if key in self._over:
            return False
        self._open.pop(key, None)
        if values is None:
            self._over.forget(key)
        else:
            self._keep(key, values)
        return True

    @property
    def open_keys(self) -> tuple[str, ...]:
        """The rendezvous at which workers wait."""
        return tuple(self._open)

    def missing(self, key: str) -> tuple[WorkerRank, ...]:
        """The workers that an open rendezvous waits for."""
        return tuple(sorted(self._live - self._open.get(key, {}).keys()))

    def finish(self, worker: WorkerRank) -> tuple[str, ...]:
        """The worker is done for good; returns the keys that this closes."""
        self._finished.add(worker)
        return self.lose(worker)

    def lose(self, worker: WorkerRank) -> tuple[str, ...]:
        """The worker is gone and its values with it; returns the keys that this closes."""
        self._live.discard(worker)
        for key in tuple(self._open):
            self._open[key].pop(worker, None)
            if not self._open[key]:
                del self._open[key]
        return self._close_complete()

    def _close_complete(self) -> tuple[str, ...]:
        closing = tuple(key for key, values in self._open.items() if self._live <= values.keys())
        for key in closing:
            self._keep(key, self._open.pop(key))
        return closing

    def _keep(self, key: str, values: Mapping[WorkerRank, bytes]) -> None:
        self._over.keep(key, dict(sorted(values.items())), _num_bytes(values))

    def _check_room(self, key: str, value: bytes) -> None:
        if key not in self._open and len(self._open) >= MAX_OPEN_KEYS:
            raise PSSettingsError(
                f"{len(self._open)} rendezvous are open, the limit is {MAX_OPEN_KEYS}: workers use "
                f"different keys; the oldest is {next(iter(self._open))!r}, the new one {key!r}"
            )
        total = sum(map(_num_bytes, self._open.values())) + len(value)
        if total > MAX_OPEN_BYTES:
            raise PSSettingsError(
                f"the open rendezvous would hold {total} bytes, the limit is {MAX_OPEN_BYTES}; "
                f"send smaller values than {len(value)} bytes for {key!r}"
            )


def _num_bytes(values: Mapping[WorkerRank, bytes]) -> int:
    return sum(map(len, values.values()))


class RendezvousBoard:
    """All rendezvous of one cluster's workers."""

    def __init__(self, num_workers: int) -> None:
        self._changed = threading.Condition()
        self._rendezvous = Rendezvous(num_workers)
        self._opened_s: dict[str, float] = {}
        """When the first worker came to an open key (monotonic)."""
        self._ended = ""

    def rendezvous(
        self,
        key: str,
        worker: WorkerRank,
        value: bytes,
        deadline_s: float,
        is_gone: Callable[[], bool],
        check: Callable[[], None],
    ) -> Mapping[WorkerRank, bytes]:
        """Bring a value and wait for everybody's.

        Args:
            key: name of the rendezvous.
            worker: rank.
            value: at most MAX_VALUE_BYTES.
            deadline_s: monotonic seconds.
            is_gone: whether the caller's connection has ended.
            check: raises if this process of the worker was lost; no loss comes after it and before
                the value is there.

        Raises:
            RequestTimeout: not before `deadline_s` (monotonic); names who is missing. The value
                stays, so a retry goes on waiting.
            ServerGone: the caller is gone.
            ServerPhaseError: the worker has finished, or the server is stopping; or others have
                passed this key, and its values are no longer kept.
        """
        values: Mapping[WorkerRank, bytes] | None = None

        def is_complete() -> bool:
            nonlocal values
            values = self._rendezvous.result(key)
            if values is None:
                self._rendezvous.refuse_forgotten(key, worker)
                if self._ended:
                    raise ServerPhaseError(f"rendezvous {key!r} ends: {self._ended}")
            return values is not None

        with self._changed:
            check()
            if self._rendezvous.arrive(key, worker, value):
                self._notify()
            else:
                self._opened_s.setdefault(key, time.monotonic())
            waited = wait_until(self._changed, is_complete, deadline_s, is_gone)
            if values is not None:
                return values
            if waited is Waited.GONE:
                raise sender_gone(worker)
            missing = ", ".join(str(rank) for rank in self._rendezvous.missing(key))
            raise RequestTimeout(
                f"rendezvous {key!r} still waits for worker {missing}; raise the timeout, or let "
                "workers that are done call finish()",
                {"missing": missing},
            )

    def bring(
        self,
        key: str,
        worker: WorkerRank,
        values: Mapping[int, bytes] | None,
        check: Callable[[], None],
    ) -> None:
        """Take an answer that a worker got of the server before this one; known ones stay.

        Args:
            key: name of the rendezvous.
            worker: the worker that brings it.
            values: by rank; None: they are no longer kept.
            check: see `rendezvous`.
        """
        by_rank: dict[WorkerRank, bytes] | None = None
        if values is not None:
            by_rank = {WorkerRank(rank): value for rank, value in values.items()}
        with self._changed:
            check()
            if self._rendezvous.bring(key, by_rank):
                self._notify()
                return
            kept = self._rendezvous.result(key)
        if kept is not None and by_rank is not None and kept != by_rank:
            _logger.warning(
                "worker %d has passed rendezvous %r with other values than the workers before it: "
                "those of the workers %s, here those of %s. The first ones stay. These workers do "
                "not train the same: stop the training and resume it from its last checkpoint",
                worker,
                key,
                ", ".join(map(str, by_rank)),
                ", ".join(map(str, kept)),
            )

    def open_now(self) -> tuple[OpenRendezvous, ...]:
        """Return at which rendezvous workers wait, for how long, and for whom."""
        with self._changed:
            now_s = time.monotonic()
            return tuple(
                OpenRendezvous(key, now_s - self._opened_s[key], self._rendezvous.missing(key))
                for key in self._rendezvous.open_keys
            )

    def finish(self, worker: WorkerRank) -> None:
        """The worker is done for good."""
        with self._changed:
            self._rendezvous.finish(worker)
            self._notify()

    def lose(self, worker: WorkerRank, is_lost: Callable[[], bool]) -> None:
        """The worker is gone.

        Args:
            worker: rank.
            is_lost: makes the loss known elsewhere, and returns whether no newer process of the
                worker is at work. No process of the worker arrives meanwhile.
        """
        with self._changed:
            if is_lost():
                self._rendezvous.lose(worker)
                self._notify()

    def end(self, reason: str) -> None:
        """End all waits."""
        with self._changed:
            self._ended = reason
            self._notify()

    def _notify(self) -> None:
        """Let all who wait look, as keys may be closed."""
        self._opened_s = {key: self._opened_s[key] for key in self._rendezvous.open_keys}
        self._changed.notify_all()
