"""Staging directories of a root: naming them by their savers, removing those of ended savers.

A save's id names its job and its saver, so the name of a staging directory tells who may still
commit it. Only the job that holds the lease commits; each of its processes that save has a beat
(ps.checkpoint.lease), which tells whether it lives.

    another job's            removed: that job has no lease, or will be refused at its commit
    this saver's own         removed before its next save: a server that was late has written there
    another of this job's    removed once its process has certainly ended, or shows no sign of life
                             for as long as a lease of another host

Covers: ids of saves, which staging directories are removed.
Does not: save (ps.client.saving.saver), write (ps.checkpoint.writer).
Runs in: processes that save.
Threads: any; a sweep during another one does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
import threading
import time

from ps.checkpoint.digest import digest
from ps.checkpoint.format import STAGING_PREFIX
from ps.checkpoint.lease import Lease, Silence, read_holder
from ps.checkpoint.storage import Storage, typed_errors
from ps.errors import CheckpointError

_logger = logging.getLogger(__name__)

_JOB_LENGTH = 8
_REMOVED = f"{STAGING_PREFIX}removed-"


def saver_of(save_id: str) -> str:
    """Return what all saves of one saver have in common, and no two savers."""
    return save_id.rpartition("-")[0] or save_id


class Staging:
    """The staging directories of one root, seen by one saver.

    Args:
        storage: the checkpoint root.
        lease: lease of this saver.
    """

    def __init__(self, storage: Storage, lease: Lease) -> None:
        self._storage = storage
        self._lease = lease
        job = digest(lease.owner.encode())[:_JOB_LENGTH]
        self._own = f"{job}-{lease.token}-"
        self._of_job = re.compile(rf"{re.escape(STAGING_PREFIX)}{job}-([0-9a-f]+)-")
        self._numbers = itertools.count(1)
        self._sweeping = threading.Lock()
        self._silences: dict[str, Silence] = {}
        lease.at_renewal = self.sweep_beside_save

    def new_save_id(self) -> str:
        """Return the id of a new save, which names job and saver."""
        return f"{self._own}{next(self._numbers)}"

    def sweep_before_save(self) -> None:
        """Remove what nobody will commit, this saver's own failed saves included.

        Raises:
            CheckpointError: another job has the lease by now, or the directory cannot be listed.
        """
        self._sweep(spared="")

    def sweep_beside_save(self) -> None:
        """Like `sweep_before_save`, but this saver's own are left: one may be under way."""
        try:
            self._sweep(spared=STAGING_PREFIX + self._own)
        except (CheckpointError, OSError) as error:
            where = self._storage.where()
            _logger.warning("staging directories in %s were not removed: %s", where, error)

    def _sweep(self, spared: str) -> None:
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            with typed_errors(self._storage, "", "list"):
                names = [each for each in self._storage.names() if each.startswith(STAGING_PREFIX)]
            staged = [each for each in names if not (spared and each.startswith(spared))]
            if not staged:
                return
            # After the listing: a job that has followed this one since is not in it.
            with self._lease.held():
                over = [each for each in staged if self._is_over(each)]
            for name in over:
                self._remove(name)
        finally:
            self._sweeping.release()

    def _is_over(self, name: str) -> bool:
        found = self._of_job.match(name)
        if found is None:
            return True
        token = found[1]
        if token == self._lease.token or token in self._lease.ended_tokens:
            return True
        beat = self._lease.beat_of(token)
        holder = read_holder(beat)
        has_ended = holder.has_ended() if holder else None
        if has_ended is None:
            timing = self._lease.timing
            silence = self._silences.setdefault(token, Silence(2 * timing.renew_s))
            has_ended = silence.look(beat or b"", time.monotonic()) >= timing.silent_s
        return has_ended

    def _remove(self, name: str) -> None:
        """Remove a directory; its commit, if there is one after all, finds all of it or nothing."""
        if self._storage.is_exclusive and not name.startswith(_REMOVED):
            aside = f"{_REMOVED}{secrets.token_hex(8)}"
            with contextlib.suppress(OSError):
                self._storage.move(name, aside)
                name = aside
        self._storage.remove(name)
