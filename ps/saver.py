"""A client's saves: the lease, full or delta, every server's part, the commit, retention.

Covers: one save from its beginning to what is removed after it.
Does not: copy parameters (ps.shard_saving), decide when (ps.periodic, or the user).
Runs in: workers (the chief) and drivers.      Threads: one at a time; ps.client holds its lock.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps import messages
from ps.checkpoint import Base, Origin, abort, commit, keep_newest
from ps.checkpoint_format import STAGING_PREFIX
from ps.checkpoint_lease import Lease
from ps.errors import CheckpointError, SettingsError
from ps.params import Manifest
from ps.storage import Storage, storage_at, typed_errors

_logger = logging.getLogger(__name__)

Ask = Callable[[messages.Save], Sequence[messages.Saved]]
"""Makes a request to every server and returns their answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What becomes of a save, and of those before it."""

    keep: int | None = None
    """Newest complete checkpoints to keep, with what they need; None: all."""
    full_every: int = 1
    """Every so many saves one holds all buckets, those between only what has changed since the
    last. 1: all are full. Larger: smaller saves, more files to read at a restore."""

    def __post_init__(self) -> None:
        for name in ("keep", "full_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} must be at least 1, got {value!r}")


DEFAULT_OPTIONS = SaveOptions()
_MAX_FAILED = 16
"""Failed saves whose late files are looked for."""


@dataclass(slots=True)
class _Place:
    """One directory that this client saves into."""

    lease: Lease
    base: Base | None = None
    """The last checkpoint that was committed here."""
    num_deltas: int = 0
    """Since the last full one."""
    is_clean: bool = True
    """Nothing is staged here that belongs to nobody."""
    failed: list[str] = field(default_factory=list)
    """Ids of saves that failed here."""


class Saver:
    """The saves of one client.

    Args:
        owner: the job's name in the leases.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._places: dict[str, _Place] = {}

    def save(
        self,
        directory: str | Path,
        step: int,
        *,
        manifest: Manifest,
        ask: Ask,
        options: SaveOptions = DEFAULT_OPTIONS,
    ) -> Path:
        """Make a checkpoint; returns its directory. Raises as PSClient.save."""
        if step < 0:
            raise CheckpointError(f"a checkpoint's step is 0 or more, got {step}")
        storage = storage_at(directory)
        place = self._place(directory)
        with typed_errors(storage, "", "save into"):
            self._clean(storage, place)
            base = self._base_for(place, step, options)
            save_id = uuid.uuid4().hex
            request = messages.Save(str(directory), save_id, base.save_id if base else "")
            try:
                shards = [answer.shard for answer in ask(request)]
                with place.lease.held():
                    origin = Origin(self._owner, base)
                    path = commit(
                        storage, save_id, step=step, manifest=manifest, shards=shards, origin=origin
                    )
                    _forget_older(storage, options)
            except BaseException:
                abort(storage, save_id)
                place.base = None
                place.failed.append(save_id)
                raise
        place.base = Base(step, save_id)
        place.num_deltas = place.num_deltas + 1 if base else 0
        return Path(path)

    def close(self) -> None:
        """Give the directories back to other jobs. Idempotent."""
        for place in self._places.values():
            place.lease.release()

    def _clean(self, storage: Storage, place: _Place) -> None:
        """Take the lease; remove what failed saves left, the job's own or those of a dead one."""
        if place.lease.take():
            place.is_clean, place.base = False, None
        if not place.is_clean:
            for name in storage.names():
                if name.startswith(STAGING_PREFIX):
                    storage.remove(name)
            place.is_clean = True
        for save_id in place.failed:
            abort(storage, save_id)  # again: a server that was late has written its file since
        del place.failed[:-_MAX_FAILED]

    def _place(self, directory: str | Path) -> _Place:
        name = str(directory)
        if name not in self._places:
            self._places[name] = _Place(Lease(storage_at(directory), self._owner))
        return self._places[name]

    def _base_for(self, place: _Place, step: int, options: SaveOptions) -> Base | None:
        base = place.base
        if base is None or place.num_deltas + 1 >= options.full_every or step <= base.step:
            return None
        return base


def _forget_older(storage: Storage, options: SaveOptions) -> None:
    """Remove what is not to be kept; the checkpoint is committed, whatever comes of this."""
    if options.keep is None:
        return
    try:
        keep_newest(storage, options.keep)
    except (CheckpointError, OSError) as error:
        _logger.warning("older checkpoints in %s were not removed: %s", storage.where(), error)
