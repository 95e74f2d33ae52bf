"""Saves by the chief: the checkpoint that a run resumes from, then saves while main_fun trains.

Covers: the plan, going on from an earlier run, a client that nobody else uses.
Does not: choose when (ps.client.periodic_saver), save (ps.client), decide what a dead server does
(tfos.node.supervisor.restart_policy).
Runs in: the chief's process.
Threads: the public calls come from the main thread; ps.client.periodic_saver has one of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ps.checkpoint.reader import latest, steps_on_disk
from ps.checkpoint.storage import OpenStorage, storage_at
from ps.client.periodic_saver import Period, PeriodicSaver
from ps.client.saver import SaveOptions
from ps.errors import CheckpointError
from tfos.config import Checkpoints

if TYPE_CHECKING:
    from ps.client.client import PSClient

_logger = logging.getLogger(__name__)


class ChiefSaver:
    """Saves by a plan until it is closed.

    Args:
        plan: what the user asked for.
        make_client: makes a connection to the servers that nobody else uses.
        open_storage: opens the plan's directory.
    """

    def __init__(
        self,
        plan: Checkpoints,
        make_client: Callable[[], PSClient],
        open_storage: OpenStorage = storage_at,
    ) -> None:
        self._plan = plan
        self._open_storage = open_storage
        self._client = make_client()
        self._is_restored = False
        period = Period(
            directory=plan.directory,
            every_s=plan.every_s,
            every_steps=plan.every_steps,
            options=SaveOptions(keep=plan.keep, full_every=plan.full_every),
        )
        self._saver = PeriodicSaver(period, lambda: self._client)

    def start(self) -> None:
        """Fill the servers if this run goes on from an earlier one, then save beside main_fun.

        Raises:
            CheckpointError: no checkpoint there is whole, or the directory is another run's.
        """
        directory, step = self._plan.directory, -1
        storage = self._open_storage(directory)
        if steps_on_disk(storage):
            if not self._plan.resume:
                raise CheckpointError(
                    f"{directory} holds checkpoints of another run, newest step "
                    f"{latest(storage)}; pass Checkpoints(..., resume=True) to go on from it, or "
                    "name an empty directory"
                )
            step = self._client.restore(directory)
            self._is_restored = True
            _logger.info("going on from step %d in %s", step, directory)
        self._saver.start(saved_step=step)

    def restored_notes(self) -> dict[str, Any]:
        """Return the notes that came with what this run goes on from; none for a new run."""
        return dict(self._client.notes()) if self._is_restored else {}

    def hold(self) -> None:
        """Let no save begin by itself until `release`; waits for one that runs."""
        self._saver.hold()

    def release(self) -> None:
        """Save by time and steps again."""
        self._saver.release()

    def save_now(self) -> str:
        """Save what was trained since the last save; returns why it failed, or nothing."""
        return self._saver.save_now()

    def close(self) -> None:
        """Save what was trained since the last save, and end. Idempotent."""
        self._saver.close()
        self._client.close()
