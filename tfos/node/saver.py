"""The chief's saves: a thread that saves the servers' parameters while main_fun trains.

Covers: when to save, going on from an earlier run, a last save at the end.
Does not: save (ps.client), decide what a dead server does (node.restarts).
Runs in: the chief's process.
Threads: `tfos-saver` saves, with a client of its own; the public calls come from the main thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ps.checkpoint_reader import latest, steps_on_disk
from ps.errors import CheckpointError, PSError, TransportError
from ps.saver import SaveOptions
from ps.storage import storage_at
from rpc.errors import RpcError
from tfos.checkpoints import Checkpoints

if TYPE_CHECKING:
    from ps.client import PSClient

_logger = logging.getLogger(__name__)

_FAILED = (PSError, RpcError, OSError)
_RETRY_S = 1.0
"""After the first save that failed; doubled with each further one, up to the plan's period."""
_MAX_DOUBLINGS = 16
_LOOK_S = 0.5
"""How often the servers' clocks are read when saves come by steps, and the end is looked for."""


class ChiefSaver:
    """Saves by a plan until it is closed.

    Args:
        plan: what the user asked for.
        make_client: makes a connection to the servers that nobody else uses.
    """

    def __init__(self, plan: Checkpoints, make_client: Callable[[], PSClient]) -> None:
        self._plan = plan
        self._client = make_client()
        self._ended = threading.Event()
        self._saved_step = -1
        self._num_failed = 0
        """Saves, since the last that succeeded."""
        self._due_s = 0.0
        """When to save next, as monotonic time."""
        self._options = SaveOptions(keep=plan.keep, full_every=plan.full_every)
        self._thread = threading.Thread(target=self._run, name="tfos-saver", daemon=True)

    def start(self) -> None:
        """Fill the servers if this run goes on from an earlier one, then save beside main_fun.

        Raises:
            CheckpointError: no checkpoint there is whole, or the directory is another run's.
        """
        directory = self._plan.directory
        if steps_on_disk(storage_at(directory)):
            if not self._plan.resume:
                raise CheckpointError(
                    f"{directory} holds checkpoints of another run, newest step "
                    f"{latest(directory)}; pass Checkpoints(..., resume=True) to go on from it, or "
                    "name an empty directory"
                )
            self._saved_step = self._client.restore(directory)
            _logger.info("going on from step %d in %s", self._saved_step, directory)
        self._thread.start()

    def close(self) -> None:
        """Save what was trained since the last save, and end. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        if not self._wait_seeded():
            return
        # At once: a server that dies before the first period has something to go on from.
        self._save()
        while not self._ended.wait(_LOOK_S):
            if time.monotonic() >= self._due_s or self._has_grown():
                self._save()
        self._save()

    def _wait_seeded(self) -> bool:
        while not self._ended.is_set():
            try:
                self._client.attach(timeout_s=_LOOK_S)
            except TransportError:
                continue
            except PSError as error:
                _logger.warning("nothing is saved: %s", error)
                return False
            return True
        return False

    def _clock(self) -> int:
        return max(server.clock for server in self._client.describe())

    def _has_grown(self) -> bool:
        """Whether the plan's number of updates was made since the last save."""
        if not self._plan.every_steps or self._num_failed:
            return False
        try:
            return self._clock() - self._saved_step >= self._plan.every_steps
        except _FAILED:
            return False  # the next save will tell

    def _save(self) -> None:
        """Save unless that step is there already; what failed is tried again before its time.

        A server that is dead fails all saves until it is back, and what it holds is not safe then.
        """
        step: int | None = None
        try:
            step = self._clock()
            # Below the last saved one is a server that had to go on from an older one.
            if step != self._saved_step:
                self._client.save(self._plan.directory, step, options=self._options)
            self._saved_step = step
            self._num_failed = 0
            wait_s = self._plan.every_s
        except _FAILED as error:
            name = "the parameters were" if step is None else f"step {step} was"
            _logger.warning("%s not saved: %s", name, error)
            wait_s = min(self._plan.every_s, _RETRY_S * 2 ** min(self._num_failed, _MAX_DOUBLINGS))
            self._num_failed += 1
        self._due_s = time.monotonic() + wait_s
