"""Saves by a client: lease, full or delta, every server's part, commit, retention.

Covers: one save from its beginning to what is removed after it; the clock of all snapshots;
the number of a save without one, and whether there is anything to save.
Does not: copy parameters (ps.server.save_restore), decide when
(ps.client.saving.periodic_saver, or the user).
Runs in: workers (the chief) and drivers.
Threads: any; a save waits for another one, and `close` for the one under way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from ps.checkpoint.choice import steps_on_disk
from ps.checkpoint.format import step_name
from ps.checkpoint.lease import Lease
from ps.checkpoint.reader import load_chain
from ps.checkpoint.score import Score
from ps.checkpoint.staging import Staging
from ps.checkpoint.storage import (
    OpenStorage,
    Storage,
    name_for_servers,
    storage_at,
    typed_errors,
)
from ps.checkpoint.writer import Base, Origin, abort, commit, keep_newest
from ps.client.channel import check_is_number, server_wait_s
from ps.errors import CheckpointError, PSSettingsError, RequestTimeout, client_closed
from ps.manifest.manifest import Manifest
from ps.protocol import messages
from rpc.field_texts import with_field_texts

_logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SETTLE_WAIT_S = 10.0
"""For workers between the two rounds of a clipped push: one round trip."""
IS_FINAL = "final"
"""Detail of the error of a save that fails however often it is tried."""
CLOCK_WAIT_S = 2.0
"""For a clock that some server has not reached: workers have sent its pushes, or soon will."""


class Servers(Protocol):
    """Makes a request to every server and returns their answers: `SavingServers`."""

    def ask(
        self, request: messages.Request, answer: type[Answer], *, timeout_s: float
    ) -> list[Answer]:
        """Raise PSError if one of them refuses, or does not answer within `timeout_s`.

        Args:
            request: sent to every server.
            answer: type of the reply.
            timeout_s: seconds for all of them together.
        """

    def fetch_manifest(self, *, timeout_s: float) -> Manifest:
        """Return what ps:0 serves.

        Args:
            timeout_s: seconds.
        """

    @property
    def generations(self) -> tuple[int, ...]:
        """Which start of each server gave the last answer, by rank."""


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a save holds, and what happens to earlier ones."""

    keep: int | None = None
    """Newest complete checkpoints to keep, with what they need; None: all."""
    full_every: int = 1
    """One save in this many holds all buckets, the others only what has changed since the last. 1:
    all are full. Larger: smaller saves, more files to read at a restore."""
    nobody_trains: bool = False
    """Whether the workers are gone and their last steps stay incomplete: servers that are a clock
    apart are saved as they are, and a clipped gradient that waits for its norms is left out."""
    score: Score | None = None
    """Score of the parameters. With it a checkpoint is made even if nothing has changed since the
    last one, and `keep` never counts the best one of a metric."""
    generations: tuple[int, ...] | None = None
    """Which start of each server has the parameters that are to be saved, by rank; None: any. A
    server that was started again has older ones."""

    def __post_init__(self) -> None:
        for name in ("keep", "full_every"):
            value = getattr(self, name)
            if value is None and name == "keep":
                continue
            if type(value) is not int or value < 1:
                raise PSSettingsError(f"{name} must be an int of at least 1, got {value!r}")
        if not isinstance(self.nobody_trains, bool):
            raise PSSettingsError(
                f"nobody_trains must be True or False, got {self.nobody_trains!r}"
            )
        if not isinstance(self.score, Score | None):
            raise PSSettingsError(f"score must be a ps.Score or None, got {self.score!r}")
        starts = () if self.generations is None else self.generations
        if type(starts) is not tuple or any(type(each) is not int for each in starts):
            raise PSSettingsError(
                f"generations must be a tuple of ints or None, got {self.generations!r}"
            )


DEFAULT_OPTIONS = SaveOptions()
DEFAULT_SAVE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class _Place:
    """One directory that this client saves into."""

    lease: Lease
    staging: Staging
    base: Base | None = None
    """The last checkpoint that was committed here."""
    manifest: Manifest | None = None
    """Manifest of that checkpoint."""
    num_deltas: int = 0
    """Number of deltas since the last full checkpoint."""


class Saver:
    """The saves of one client.

    Args:
        owner: the job's name in the leases.
        open_storage: opens a directory as its user named it.
    """

    def __init__(self, owner: str, open_storage: OpenStorage = storage_at) -> None:
        self._owner = owner
        self._open_storage = open_storage
        self._saving = threading.Lock()
        self._is_closed = False
        self._places: dict[str, _Place] = {}

    def save(
        self,
        directory: str | Path,
        step: int | None,
        *,
        manifest: Manifest,
        servers: Servers,
        timeout_s: float,
        options: SaveOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Make a checkpoint; returns its directory. For the rest see PSClient.save.

        `manifest` is what all `servers` serve, but for frozen groups and limits of tables that they
        got since.
        """
        if step is not None and step < 0:
            raise CheckpointError(f"a checkpoint's step is 0 or more, got {step}")
        storage = self._open_storage(directory)
        with self._turn(timeout_s) as turn_ends_s, typed_errors(storage, "", "save into"):
            if step is None and options.score is None:
                found = self._unchanged_since(storage, servers, _left_s(turn_ends_s))
                if found:
                    return found
            place = self._place(directory)
            deadline_s = self._begin(place, turn_ends_s)
            base = self._base_for(place, step, options, manifest)
            save_id = place.staging.new_save_id()
            as_it_is = options.nobody_trains
            order = messages.TakeSnapshot(save_id, base.save_id if base else "", as_it_is=as_it_is)
            is_agreed = manifest.has_barrier and not as_it_is
            known_steps = steps_on_disk(storage) if step is None else ()
            try:
                clock = _snapshot(servers, order, deadline_s, is_agreed=is_agreed)
                _refuse_restarted(servers.generations, options.generations)
                left_s = _left_s(deadline_s)
                name = name_for_servers(directory, storage)
                request = messages.Save(name, save_id, server_wait_s(left_s))
                answers = servers.ask(request, messages.Saved, timeout_s=left_s)
                shards = [answer.shard for answer in answers]
                manifest = _manifest_of(answers, (manifest, place.manifest), servers, deadline_s)
                with place.lease.held():
                    passed_over = {each for answer in answers for each in answer.passed_over}
                    if step is None:
                        found_steps = steps_on_disk(storage)
                        _refuse_overtaken(storage, {*found_steps} - {*known_steps})
                        step = next_step(clock, found_steps, passed_over)
                    origin = Origin(self._owner, base, tuple(sorted(passed_over)), options.score)
                    path = commit(
                        storage, save_id, step=step, manifest=manifest, shards=shards, origin=origin
                    )
                    _forget_older(storage, options, step)
            except BaseException:
                abort(storage, save_id)
                place.base = None
                raise
            place.base, place.manifest = Base(step, save_id), manifest
            place.num_deltas = place.num_deltas + 1 if base else 0
            return path

    def _unchanged_since(self, storage: Storage, servers: Servers, timeout_s: float) -> str:
        """Return the newest step's directory if the servers are as it holds them, else nothing.

        Another job's does not count: a server of this one that is started again takes only its own.
        """
        described = servers.ask(messages.Describe(), messages.Description, timeout_s=timeout_s)
        saves = set.intersection(*(set(server.saved_as) for server in described))
        newer: list[int] = []
        for step in steps_on_disk(storage) if saves else ():
            with contextlib.suppress(CheckpointError):  # unreadable: it is not that save
                found = load_chain(storage, step)[0]
                if found.save_id in saves and found.job == self._owner:
                    is_newest = set(newer) <= {*found.passed_over}
                    return storage.where(step_name(step)) if is_newest else ""
            newer.append(step)
        return ""

    def close(self) -> None:
        """Give the directories back to other jobs, after the save under way. Idempotent."""
        with self._saving:
            self._is_closed = True
            for place in self._places.values():
                place.lease.release()

    @contextmanager
    def _turn(self, timeout_s: float) -> Iterator[float]:
        """Wait until no other thread saves; yields this save's deadline (monotonic)."""
        check_is_number(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        if not self._saving.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise RequestTimeout(
                f"another thread's save by this client was under way for {timeout_s:g} s; save "
                "less often, or raise timeout_s"
            )
        try:
            if self._is_closed:
                raise client_closed()
            yield deadline_s
        finally:
            self._saving.release()

    def _begin(self, place: _Place, turn_ends_s: float) -> float:
        """Take the lease and remove what nobody will commit; returns the servers' deadline.

        It is later than the turn's by what the file system took: a save goes on when a hanging one
        is back.
        """
        began_s = time.monotonic()
        if place.lease.take(timeout_s=_left_s(turn_ends_s)):
            place.base = None  # another job may have removed it
        place.staging.sweep_before_save()
        return turn_ends_s + time.monotonic() - began_s - place.lease.waited_s

    def _place(self, directory: str | Path) -> _Place:
        name = str(directory)
        if name not in self._places:
            storage = self._open_storage(directory)
            if not storage.is_exclusive:
                _logger.warning(
                    "%s: one job per directory is not enforced, as this store cannot create a "
                    "file exclusively; do not start two jobs there at once",
                    storage.where(),
                )
            lease = Lease(storage, self._owner)
            self._places[name] = _Place(lease, Staging(storage, lease))
        return self._places[name]

    def _base_for(
        self, place: _Place, step: int | None, options: SaveOptions, manifest: Manifest
    ) -> Base | None:
        base = place.base
        if base is None or place.num_deltas + 1 >= options.full_every:
            return None
        saved = place.manifest
        if manifest.frozen_groups and (saved is None or manifest.with_limits_of(saved) != saved):
            return None  # they came after that save
        return base if step is None or step > base.step else None


def _snapshot(
    servers: Servers, order: messages.TakeSnapshot, deadline_s: float, *, is_agreed: bool
) -> int:
    """Let every server take its snapshot, in sync mode all at one clock; returns the newest clock.

    Servers' clocks are one apart while a barrier completes. Those behind are asked for the newest
    clock; when one has passed it meanwhile, all are asked for a clock that is still to come.
    """
    margin = 0
    wait_s = SETTLE_WAIT_S
    made: list[messages.SnapshotMade] = []
    while True:
        try:
            left_s = _left_s(deadline_s)
            order = msgspec.structs.replace(order, wait_s=min(wait_s, left_s))
            made = servers.ask(order, messages.SnapshotMade, timeout_s=left_s)
        except RequestTimeout as error:
            if not made:
                raise
            raise _never_agreed(made, error) from error
        newest = max(answer.clock for answer in made)
        is_one = all(answer.is_made and answer.clock == newest for answer in made)
        if is_one or not is_agreed:
            return newest
        is_missed = order.clock is not None and newest > order.clock
        margin = 2 * margin + 1 if is_missed else 0
        order = msgspec.structs.replace(order, clock=newest + margin)
        wait_s = CLOCK_WAIT_S


def _never_agreed(made: Sequence[messages.SnapshotMade], error: RequestTimeout) -> RequestTimeout:
    """Return the error of a save whose servers have answered, but never of one clock.

    Args:
        made: their last answers, in the order of their ranks.
        error: what ended the save.
    """
    clocks = ", ".join(f"ps:{rank} at {each.clock}" for rank, each in enumerate(made))
    return RequestTimeout(
        f"{error.message}. The servers reached no common clock to save at; the last clocks were "
        f"{clocks}. If workers train, one of them is stuck between two servers; if they are gone, "
        "save with SaveOptions(nobody_trains=True)",
        error.details,
    )


def _manifest_of(
    answers: Sequence[messages.Saved],
    known: Sequence[Manifest | None],
    servers: Servers,
    deadline_s: float,
) -> Manifest:
    """Return the manifest of the shards: another client may have seeded since.

    It may have brought frozen weights, or other limits of tables.

    Args:
        answers: answers of all servers.
        known: manifests that it may be.
        servers: asked if it is not one of them.
        deadline_s: deadline of the save (monotonic).
    """
    hashes = {(answer.frozen_hash, answer.limits_hash) for answer in answers}
    for manifest in known:
        if manifest is not None and hashes == {(manifest.frozen_hash(), manifest.limits_hash())}:
            return manifest
    manifest = servers.fetch_manifest(timeout_s=_left_s(deadline_s))
    if {frozen for frozen, _ in hashes} != {manifest.frozen_hash()}:
        raise CheckpointError(
            "the frozen weights reached the servers during this save, and some shards lack them. "
            "The save is not committed; save again"
        )
    return manifest


def next_step(clock: int, on_disk: Collection[int], passed_over: Collection[int]) -> int:
    """Return the number of a save to which nobody has given one: its clock if that is above all.

    Else the next one: rows, metadata and assigned values change at one clock, and a step is
    only gone on from if none has a greater number.

    Args:
        clock: clock of the save.
        on_disk: steps that are there, whole or not.
        passed_over: see ps.checkpoint.format.Checkpoint; they count as older whatever their number.
    """
    past = {*on_disk} - {*passed_over}
    step = max(clock, max(past, default=-1) + 1)
    while step in passed_over:
        step += 1
    return step


def _refuse_overtaken(storage: Storage, steps: Collection[int]) -> None:
    """Refuse a save that would be the newest, though another saver of its job has saved meanwhile.

    That one may hold later parameters: a process that stood still between its snapshot and its
    commit was replaced, and shares the lease with its newer attempt.

    Args:
        storage: the checkpoint root.
        steps: steps that have appeared since the snapshot.
    """
    if steps:
        raise CheckpointError(
            f"another process of this job saved step {max(steps)} into {storage.where()} after the "
            "snapshot of this save, which may hold older parameters but would be the newest step. "
            "This save is not committed; save again"
        )


def _refuse_restarted(found: tuple[int, ...], wanted: tuple[int, ...] | None) -> None:
    """Refuse a save of other starts of servers than those that had what was measured.

    Right after the snapshots: only the start that has taken one writes it.
    """
    restarted = [f"ps:{i}" for i, each in enumerate(found) if wanted and each != wanted[i]]
    if restarted:
        raise CheckpointError(
            f"{', '.join(restarted)} was started again since the parameters were measured, and has "
            "older ones. They are not saved with that score",
            {IS_FINAL: "yes"},
        )


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise RequestTimeout("the save was not done in time; raise timeout_s")
    return left_s


def _forget_older(storage: Storage, options: SaveOptions, step: int) -> None:
    """Remove what is not to be kept; the checkpoint is committed, whatever comes of this."""
    if options.keep is None:
        return
    try:
        keep_newest(storage, options.keep, committed=step)
    except (CheckpointError, OSError) as error:
        _logger.warning("older checkpoints in %s were not all removed: %s", storage.where(), error)
