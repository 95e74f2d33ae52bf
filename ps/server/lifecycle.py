"""Lifecycle of a shard from EMPTY to CLOSED: phases, fences, lost workers.

Covers: settings, legal moves, waiting until it is filled, fencing and losing workers in any phase.
While there is no shard, this is the record of generations; then its gate has it.
Does not: answer requests (ps.server.handlers), move gradients (ps.server.shard).
Runs in: PS processes.
Threads: any; `_changed` guards everything. It is never held while the gate's lock is taken, because
a shard that fails comes here with the gate's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ps.config import ServerSettings
from ps.consistency.waits import wait_until
from ps.errors import ServerPhaseError, ServerRestoring
from ps.exactly_once import replaced
from ps.manifest.manifest import WorkerRank
from ps.protocol.messages import Description
from ps.protocol.permissions import ServerPhase, check_move
from ps.server.request import Attempt
from ps.server.shard import ServingShard

_logger = logging.getLogger(__name__)

RESTORE_LOOK_S = 2.0
"""How long a request waits at a server that restores before it is told so; its payload is not read
meanwhile. Shorter than any client's deadline."""
_UNFILLED = frozenset({ServerPhase.EMPTY, ServerPhase.RESTORING})


class Lifecycle:
    """ServerPhase and shard of one server, changed together."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.stopping = threading.Event()
        """Set once the shard drains and whoever asked for it is answered: the process may end."""
        self._changed = threading.Condition()
        self.phase = ServerPhase.EMPTY
        """Where the shard is in its life; changed here alone."""
        self.reason = ""
        """Why it is DRAINING, CLOSED or FAILED; empty before."""
        self.shard: ServingShard | None = None
        """The shard once it was seeded or restored."""
        self._fences: dict[WorkerRank, int] = {}
        self._lost: dict[WorkerRank, int] = {}
        self._finished: set[WorkerRank] = set()
        self._restoring_since_s = 0.0

    def loaded(self) -> ServingShard:
        """The shard.

        Raises:
            ServerPhaseError: there is none yet.
        """
        if self.shard is None:
            raise ServerPhaseError(
                f"ps:{self.settings.rank} is {self.phase.value} and holds no values"
            )
        return self.shard

    def describe(self) -> Description:
        """This server as it is now."""
        with self._changed:
            settings, shard = self.settings, self.shard
            description = Description(
                settings.rank,
                settings.num_servers,
                settings.num_workers,
                self.phase.value,
                reason=self.reason,
            )
            if shard is None:
                return description
            return msgspec.structs.replace(
                description,
                manifest_hash=shard.manifest_hash,
                clock=shard.gate.clock,
                num_buckets=len(shard.dense.buckets),
                seed_id=shard.seed_id,
            )

    def begin_restore(self) -> None:
        """Let whoever needs the parameters wait until they are read from a checkpoint."""
        with self._changed:
            self._restoring_since_s = time.monotonic()
            self._move(ServerPhase.RESTORING)

    def wait_restored(self, is_gone: Callable[[], bool]) -> None:
        """Wait a while for the end of a restore.

        Args:
            is_gone: whether the caller's connection has ended.

        Raises:
            ServerRestoring: it goes on: the caller is to ask again.
        """
        with self._changed:
            wait_until(
                self._changed,
                lambda: self.phase is not ServerPhase.RESTORING,
                time.monotonic() + RESTORE_LOOK_S,
                is_gone,
            )
            if self.phase is ServerPhase.RESTORING:
                took_s = time.monotonic() - self._restoring_since_s
                raise ServerRestoring(
                    f"ps:{self.settings.rank} was started again and has been restoring its "
                    f"parameters from a checkpoint for {took_s:.0f} s. It compiles kernels that "
                    "are not kept, and reads its part, or all files if started by hand"
                )

    def wait_until_filled(self, deadline_s: float, is_gone: Callable[[], bool]) -> None:
        """Wait while the shard has no values, at the latest until `deadline_s` (monotonic).

        Args:
            deadline_s: monotonic seconds.
            is_gone: whether the caller's connection has ended.
        """
        with self._changed:
            wait_until(self._changed, lambda: self.phase not in _UNFILLED, deadline_s, is_gone)

    def install(self, shard: ServingShard, by: Attempt | None = None) -> bool:
        """Serve this shard from now on; False when another one was faster, or an order to stop.

        What is known of workers comes first, so no fenced one finds a shard that would take its
        push. The gate is called without `_changed`: what is heard meanwhile takes another round.

        Args:
            shard: with its values.
            by: the worker that brought them; None: no worker.

        Raises:
            StaleGeneration: that process was replaced or lost while it brought them.
        """
        done: set[tuple[str, WorkerRank, int | None]] = set()
        while True:
            with self._changed:
                if self.shard is not None:
                    return False
                if by is not None:
                    self._hear_unfilled(by)
                known: list[tuple[str, WorkerRank, int | None]] = [
                    *(("fence", *each) for each in self._fences.items()),
                    # Before the losses: a process that was done has ended since.
                    *(("finish", worker, None) for worker in self._finished),
                    *(("lose", *each) for each in self._lost.items()),
                ]
                news = [each for each in known if each not in done]
                if not news:
                    if self.stopping.is_set() or self.phase is ServerPhase.DRAINING:
                        return False  # while it was restored
                    self.shard = shard  # before the phase, which others read without the lock
                    self._move(ServerPhase.SERVING)
                    return True
            for kind, worker, generation in news:
                if kind == "fence":
                    shard.gate.fence(worker, generation or 0)
                elif kind == "finish":
                    shard.gate.finished(worker)
                else:
                    shard.gate.lose(worker, generation)
            done.update(news)

    def fence(self, worker: WorkerRank, generation: int) -> None:
        """Refuse the worker's generations below this one from now on.

        Args:
            worker: rank.
            generation: the oldest that is not refused.
        """
        with self._changed:
            self._fences[worker] = max(generation, self._fences.get(worker, 0))
            shard = self.shard
        if shard is not None:
            shard.gate.fence(worker, generation)

    def finish_unfilled(self, worker: WorkerRank, generation: int | None = None) -> None:
        """The worker is done for good: if there is no shard yet, tell it when there is one.

        Args:
            worker: rank.
            generation: generation of the process that says so; None: others know it.

        Raises:
            StaleGeneration: that process was replaced or lost.
        """
        with self._changed:
            if self.shard is None:
                if generation is not None:
                    self._hear_unfilled(Attempt(worker, generation))
                self._finished.add(worker)

    def finish(self, worker: WorkerRank) -> None:
        """The worker is done for good, as others know."""
        self.finish_unfilled(worker)
        shard = self.shard
        if shard is not None:
            shard.gate.finished(worker)

    def lose(self, worker: WorkerRank, generation: int | None) -> bool:
        """Wait for the worker no longer and refuse that generation; None: the newest known.

        Args:
            worker: rank.
            generation: generation of the lost process; None: the newest known.

        Returns:
            False when a newer generation is at work, so nobody was lost.
        """
        with self._changed:
            shard = self.shard
            if shard is None:
                least = self._least_generation(worker)
                lost = least if generation is None else generation
                self._lost[worker] = max(lost, self._lost.get(worker, lost))
                return lost >= least
        return shard.gate.lose(worker, generation)

    def hear(self, attempt: Attempt) -> None:
        """Note that this process of a worker is at work: the older ones are replaced.

        Raises:
            StaleGeneration: it was replaced or lost itself.
        """
        with self._changed:
            shard = self.shard
            if shard is None:
                self._hear_unfilled(attempt)
        if shard is not None:
            shard.gate.hear(*attempt)

    def _hear_unfilled(self, attempt: Attempt) -> None:
        worker, generation = attempt
        least = self._least_generation(worker)
        if generation < least:
            raise replaced(worker, generation, least)
        if generation:  # a first attempt replaces nobody
            self._fences[worker] = generation

    def _least_generation(self, worker: WorkerRank) -> int:
        """The oldest generation of the worker that may act, while there is no shard."""
        return max(self._fences.get(worker, 0), self._lost.get(worker, -1) + 1)

    def stop(self, reason: str) -> None:
        """Drain, and let the process end."""
        self.drain(reason)
        self.stopping.set()

    def drain(self, reason: str) -> None:
        """End all waits and refuse what changes anything; the values can still be pulled."""
        with self._changed:
            if self.phase in (ServerPhase.DRAINING, ServerPhase.CLOSED):
                return
            self._move(ServerPhase.DRAINING, reason or "stopped")
            shard = self.shard
        if shard is not None:
            where = f"ps:{self.settings.rank} is {ServerPhase.DRAINING.value}"
            shard.gate.close(ServerPhaseError(f"{where} ({reason}); nothing was changed"))

    def close(self) -> None:
        """Nothing is answered any more. Idempotent."""
        self.stop("closed")
        with self._changed:
            if self.phase is not ServerPhase.CLOSED:
                self._move(ServerPhase.CLOSED, self.reason)

    def fail(self, reason: str) -> None:
        """The shard cannot go on."""
        with self._changed:
            if self.phase not in (ServerPhase.DRAINING, ServerPhase.CLOSED):
                self._move(ServerPhase.FAILED, reason)

    def _move(self, to: ServerPhase, reason: str = "") -> None:
        check_move(self.settings.rank, self.phase, to)
        before, self.phase, self.reason = self.phase, to, reason
        because = f": {reason}" if reason else ""
        _logger.info("ps:%d %s -> %s%s", self.settings.rank, before.value, to.value, because)
        self._changed.notify_all()
