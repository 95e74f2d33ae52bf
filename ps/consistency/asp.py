"""Asynchronous parallel (async): every push is applied on arrival.

Does not: hold gradients, wait, or answer anybody (ps.consistency.gate). Pure: no locks, clock or
I/O.
"""

from __future__ import annotations

from ps.consistency.policy import Action, PushDecision, Release, refuse_finished
from ps.manifest.manifest import WorkerRank


class ASP:
    """Each push is applied when it arrives; nobody waits for anybody."""

    def __init__(self, *, clock: int = 0) -> None:
        self.clock = clock
        """Pushes applied so far."""
        self._finished: set[WorkerRank] = set()

    @property
    def outlives_workers(self) -> bool:
        """Always: nobody waits for a lost worker."""
        return True

    def admit(self, worker: WorkerRank) -> PushDecision:
        """Apply on arrival."""
        refuse_finished(worker, self._finished)
        return PushDecision.APPLY

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:  # noqa: ARG002 - rows weigh in sync only
        """Count the push and answer it. See Policy for the arguments."""
        if not null:
            self.clock += 1
        return [Release((worker,), self.clock)]

    def clock_of(self, worker: WorkerRank) -> int:  # noqa: ARG002
        """The server's."""
        return self.clock

    def on_join(self, worker: WorkerRank, at_least: int = 0) -> list[Action]:  # noqa: ARG002 - no clock of its own
        """Nothing waits for members. See Policy for the arguments."""
        refuse_finished(worker, self._finished)
        return []

    def on_leave(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002
        """Nothing waits for members."""
        return []

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """Refuse later pushes of this worker."""
        self._finished.add(worker)
        return []

    def on_lost(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002 - its generation is fenced by ps.exactly_once
        """The others continue."""
        return []

    def on_replaced(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002
        """Nothing waits."""
        return []

    def missing(self) -> tuple[WorkerRank, ...]:
        """Nobody, ever."""
        return ()
