"""Saves by the chief: the checkpoint that a run resumes from, then saves while main_fun trains.

Covers: the plan, resuming from an earlier run, a separate client.
Does not: choose when to save (ps.client.saving.periodic_saver), save (ps.client), decide what a
dead server does (tfos.node.supervisor.restart_policy).
Runs in: the chief's process.
Threads: the public calls come from the main thread; ps.client.saving.periodic_saver has its own.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from ps.checkpoint.choice import best, latest, steps_on_disk
from ps.checkpoint.format import Checkpoint, step_name
from ps.checkpoint.score import Score
from ps.checkpoint.storage import OpenStorage, Storage, storage_at, typed_errors
from ps.client.saving.periodic_saver import ASKED_TRIES, Period, PeriodicSaver
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError, ServerRestoring
from ps.protocol.permissions import ServerPhase
from tfos.config import Checkpoints

if TYPE_CHECKING:
    from ps.client.client import PSClient


class ChiefSaver:
    """Saves by a plan until it is closed.

    Args:
        plan: the user's settings.
        make_client: function that creates a separate client of the servers.
        open_storage: function that opens the plan's directory or URL.
        joins: whether the chief was lost and started again in the run that saves there.
    """

    def __init__(
        self,
        plan: Checkpoints,
        make_client: Callable[[], PSClient],
        open_storage: OpenStorage = storage_at,
        *,
        joins: bool = False,
    ) -> None:
        self._plan = plan
        self._joins = joins
        self._open_storage = open_storage
        self._client = make_client()
        self._restored_step: int | None = None
        period = Period(
            directory=plan.directory,
            every_s=plan.every_s,
            every_steps=plan.every_steps,
            options=SaveOptions(keep=plan.keep, full_every=plan.full_every),
            timeout_s=plan.timeout_s,
        )
        self._saver = PeriodicSaver(period, lambda: self._client)

    def start(self) -> None:
        """Restore the servers if this run resumes an earlier one, then save while main_fun runs.

        Raises:
            CheckpointError: no checkpoint is complete, the directory belongs to another run, or it
                is not writable.
        """
        directory, step = self._plan.directory, -1
        storage = self._open_storage(directory)
        if self._joins and self._client.is_filled():
            # The servers go on with what they hold, and the directory belongs to this run.
            self._restored_step = latest(storage) if steps_on_disk(storage) else None
            step = -1 if self._restored_step is None else self._restored_step
        elif steps_on_disk(storage):
            if not self._plan.resume:
                raise CheckpointError(
                    f"{directory} holds checkpoints of another run, newest step "
                    f"{latest(storage)}; pass Checkpoints(..., resume=True) to resume from it, or "
                    "name an empty directory"
                )
            step = self._restored_step = self._client.restore(
                directory, timeout_s=self._plan.timeout_s
            )
            logging.getLogger("tfos").info("going on from step %d in %s", step, directory)
        if not self._joins:
            _check_writable(storage)
        self._saver.start(saved_step=step)

    @property
    def restored_step(self) -> int | None:
        """Step that this run resumes from; None: it begins from the start."""
        return self._restored_step

    def restored_metadata(self) -> dict[str, Any]:
        """Return the metadata of the checkpoint that this run resumes from; empty for a new run."""
        return {} if self._restored_step is None else dict(self._client.metadata())

    def hold(self, holder: Hashable) -> None:
        """Prevent periodic saves until this holder calls `release`; wait for a running one."""
        self._saver.hold(holder)

    def release(self, holder: Hashable) -> None:
        """Allow periodic saves again once no other holder is left."""
        self._saver.release(holder)

    def save_now(
        self, score: Score | None = None, generations: tuple[int, ...] | None = None
    ) -> str:
        """Save changes since the last save; return the reason of a failure, or an empty string.

        Args:
            score: score of the parameters; with one they are saved even if nothing has changed.
            generations: generation of each server when the score was measured; None: any.
        """
        return self._saver.save_now(score, generations=generations)

    def save_once(self) -> str:
        """Save like `save_now`, with one try: the caller waits for at most one save."""
        return self._saver.save_now(tries=1)

    def save_between(self) -> str:
        """Save unless a micro-batch is in progress; return why not, or an empty string."""
        return self._saver.save_between()

    def server_generations(self) -> tuple[int, ...]:
        """Return each server's generation, which says which start of it answers now."""
        return self._client.server_generations()

    @property
    def saved_generations(self) -> tuple[int, ...]:
        """Return each server's generation in the save that `save_now` has just made.

        These servers gave the save its parts. A server that was replaced just before, or one that
        replaces it before the commit, does not count: a save does not ask it.
        """
        return self._client.saved_generations

    @property
    def saved_step(self) -> int:
        """Step of the last save; -1: there was none."""
        return self._saver.saved_step

    def restored_steps(self) -> tuple[int, ...]:
        """Return the step that each server was filled from; -1: it was seeded.

        Raises:
            ServerRestoring: a server has no parameters yet.
        """
        servers = self._client.stats()
        for each in servers:
            if each.phase != ServerPhase.SERVING:
                raise ServerRestoring(f"ps:{each.server} is {each.phase}")
        return tuple(each.restored_step for each in servers)

    def place(self, step: int | None = None) -> tuple[str, int]:
        """Return the path or URL of a checkpoint, and its step.

        Args:
            step: step of the checkpoint; None: the last save.
        """
        step = self.saved_step if step is None else step
        return self._open_storage(self._plan.directory).where(step_name(step)), step

    def best(self, metric: str, *, higher_is_better: bool) -> Checkpoint | None:
        """Return the best checkpoint of the run that this one resumes, by a metric; None: none.

        Args:
            metric: name of the metric.
            higher_is_better: whether a larger value is better.
        """
        storage = self._open_storage(self._plan.directory)
        up_to = self._restored_step
        if up_to is None:
            return None
        return best(storage, metric, higher_is_better=higher_is_better, up_to=up_to)

    @property
    def num_begun(self) -> int:
        """Number of saves that have begun so far, failed ones included."""
        return self._saver.num_begun

    def watch(self, saved: Callable[[int, int, tuple[int, ...]], object]) -> None:
        """Call a function after each save, ordered or not, before the next one may begin.

        Args:
            saved: function that takes the save's number among all that have begun, its step, and
                each server's generation in it.
        """
        self._saver.on_saved = lambda number, step: saved(number, step, self.saved_generations)

    def on_unsaved(self, told: Callable[[str], object]) -> None:
        """Call this with the reason once periodic saves fail again and again, or none is possible.

        Args:
            told: called in the saver's thread, once until a save succeeds.
        """
        self._saver.on_unsaved = told

    def close(self) -> str:
        """Save changes since the last save, and end; return why that save failed. Idempotent."""
        error = self._saver.close(tries=ASKED_TRIES)
        self._client.close()
        return error


def _check_writable(storage: Storage) -> None:
    """Refuse a directory in which every save would fail: a warning in a log is easily missed."""
    name = f"probe-{secrets.token_hex(8)}"
    try:
        with typed_errors(storage, name, "write"):
            storage.put(name, b"", overwrite=False)
            storage.remove(name)
    except CheckpointError as error:
        raise CheckpointError(
            f"no checkpoint can be saved in {storage.where()}: {error}; name a directory to "
            "which every host of the cluster can write"
        ) from error
