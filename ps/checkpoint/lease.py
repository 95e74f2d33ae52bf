"""Lease of a checkpoint directory: one job at a time saves there.

Covers: creating, renewing and giving back the lease; when one of an ended owner is taken over.
Does not: save (ps.client.saving.saver), know file systems (ps.checkpoint.storage).
Runs in: the process that commits checkpoints; a server while it claims its generation.
Threads: `ps-lease` renews while the lease is held; the public calls from any, one at a time.

The process that creates the file exclusively has the lease; nothing overwrites it. The holder
renews by another file, its *beat*, so a holder that was frozen cannot undo a take-over when it
wakes up; it reads the lease before it commits. A take-over renames the lease aside and creates a
new one: of many processes one succeeds in each. If the renamed lease is newer than the one that was
judged, the process puts it back. Every process of the job that saves has a beat; those beside the
holder's tell whose staging directories may go (ps.checkpoint.staging).

An owner is a job, not a process: chief and driver of one cluster share a lease. Another job's is
taken over when all of its processes that beat have ended: on the same host by pid and start time;
on any other host when its beat is removed, or has not changed for `silent_s` of our own monotonic
clock, of which only the time counts in which the file system answered. No wall clock is compared
with another one. A process that gives the directory back takes the lease away also where the one
that has created it ended before.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from ps import codec
from ps.checkpoint.storage import Storage, read_small, typed_errors
from ps.errors import CheckpointError
from rpc.errors import UNREADABLE
from rpc.process_id import ProcessId

_logger = logging.getLogger(__name__)

LEASE_NAME = "lease.json"
UNREADABLE_S = 5.0
"""A lease that nobody can read is half written for at most this long."""
ONE_JOB = "does not save there; give each job a directory of its own, or end the other one"
_LOOK_S = 0.5
_MAX_ATTEMPTS = 20
"""To create a file that others create and remove at the same time."""


class Holder(ProcessId, frozen=True, kw_only=True):
    """The content of a lease: the job, and the process that created the lease."""

    owner: str
    host: str
    token: str
    """Names this lease among all, and its beat."""

    def __str__(self) -> str:
        return f"job {self.owner!r} (host {self.host}, pid {self.pid})"


class Beat(Holder, frozen=True, kw_only=True):
    """The content of a beat: who lives."""

    beat: int
    """How often it was renewed."""


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """How often a lease is renewed, and for how long it may not be."""

    renew_s: float = 15.0
    silent_s: float = 60.0
    """Four missed renewals; only a lease of another host is waited for."""


DEFAULT_TIMING = LeaseTiming()


def this_holder(owner: str, token: str = "") -> Holder:
    """Return the holder that this process is.

    Args:
        owner: name of the job, for messages.
        token: tells two leases of one process apart.
    """
    return Holder.of_this(owner=owner, host=socket.gethostname(), token=token)


def read_holder(data: bytes | None) -> Holder | None:
    """Return the holder that a lease file names; None for no file, or for one that is damaged."""
    if data is None:
        return None
    try:
        return codec.json(data, Holder)
    except UNREADABLE as error:
        _logger.warning("a lease is not readable: %s", error)
        return None


class Silence:
    """How long what is seen has been the same, over repeated looks.

    A look counts for as much as a few polls at most: a file system that was away has shown nothing
    meanwhile, and a holder could not write.
    """

    def __init__(self, longest_look_s: float) -> None:
        self._longest_look_s = longest_look_s
        self._seen: bytes | None = None
        self._looked_s = 0.0
        self.silent_s = 0.0
        """What the last look has returned."""
        self.has_changed = False
        """Whether a look has shown anything else than the first one."""

    def look(self, seen: bytes, now_s: float) -> float:
        """Return for how many seconds this was seen.

        Args:
            seen: the content as it was read now.
            now_s: monotonic seconds.
        """
        if seen != self._seen:
            self.has_changed = self._seen is not None
            self._seen, self.silent_s = seen, 0.0
        else:
            self.silent_s += min(now_s - self._looked_s, self._longest_look_s)
        self._looked_s = now_s
        return self.silent_s


class JobLife:
    """Whether the job that holds a lease lives, as its processes show look by look.

    One that is started elsewhere instead of the lease's creator leaves the lease as it is and
    beats beside it. The directory is listed when the looks begin, and again before the job is found
    over: others may have begun meanwhile.

    Args:
        read: returns the beat with a token; None if there is none.
        tokens: lists those of all beats.
        silent_s: how long a process that cannot be seen from here shows nothing once it has ended.
    """

    def __init__(
        self, read: Callable[[str], bytes | None], tokens: Callable[[], set[str]], silent_s: float
    ) -> None:
        self._read = read
        self._list_tokens = tokens
        self._limit_s = silent_s
        self._tokens: set[str] | None = None
        """The tokens as last listed; None: not listed yet."""
        self._silences: dict[str | None, Silence] = {}
        """Silences by token of what is unseen here; None: the lease and its creator's beat."""
        self.process: Holder | None = None
        """The one that lives, or that may; None: the lease was not readable."""
        self.silent_s = 0.0
        """How long that one was silent."""

    def look(self, found: bytes, holder: Holder | None) -> bool | None:
        """Return whether the job lives; None: it is to be looked at again.

        Args:
            found: the lease.
            holder: what it says; None: nothing that can be read.
        """
        was_listed = self._tokens is not None
        waiting: list[tuple[float, Holder | None]] = []
        for token, process, sign in self._signs(found, holder):
            ended = process.has_ended() if process else None
            silence = self._silences.setdefault(token, Silence(3 * _LOOK_S))
            silent_s = silence.look(sign, time.monotonic())
            if ended is False or (ended is None and silence.has_changed):
                self.process = process
                return True
            if not ended and silent_s < self.limit_s(process):
                waiting.append((silent_s, process))
        if holder is not None and not waiting and was_listed and self._has_grown():
            waiting.append((0.0, holder))
        if not waiting:
            return False
        self.silent_s, self.process = min(waiting, key=lambda each: each[0])
        return None

    def limit_s(self, process: Holder | None) -> float:
        """Return after how many seconds of silence a process has ended.

        Args:
            process: None: who has written a lease that cannot be read.
        """
        return self._limit_s if process else UNREADABLE_S

    def _signs(
        self, found: bytes, holder: Holder | None
    ) -> Iterator[tuple[str | None, Holder | None, bytes]]:
        """Yield what the job's processes show: first the lease's creator, then those beside it."""
        if holder is None:
            yield None, None, found
            return
        yield None, holder, found + (self._read(holder.token) or b"")
        if self._tokens is None:
            self._tokens = self._list_tokens()
        for token in sorted(self._tokens - {holder.token}):
            beat = self._read(token)  # none: it has ended in order
            process = read_holder(beat)
            if beat is not None and process is not None and process.owner == holder.owner:
                yield token, process, beat

    def _has_grown(self) -> bool:
        """List the beats again; whether there are more."""
        before, self._tokens = self._tokens or set(), self._list_tokens()
        return not self._tokens <= before


class Lease:
    """A job's right to commit in one directory.

    Args:
        storage: the checkpoint root.
        owner: the job's name; all its processes use the same.
        name: the lease's file.
        refusal: what the owner does not do while another one has the lease, and what to do about
            it; for the error's text.
        timing: seconds between renewals, and until a silent lease is taken over.
    """

    def __init__(
        self,
        storage: Storage,
        owner: str,
        *,
        name: str = LEASE_NAME,
        refusal: str = ONE_JOB,
        timing: LeaseTiming = DEFAULT_TIMING,
    ) -> None:
        self.timing = timing
        self._storage = storage
        self._name = name
        self._me = this_holder(owner, secrets.token_hex(8))
        self._refusal = refusal
        self.waited_s = 0.0
        """How long the last `take` has waited for another job's lease to be over."""
        self.at_renewal: Callable[[], object] = lambda: None
        """Called after each renewal, in the thread that renews."""
        self.ended_tokens: set[str] = set()
        """Tokens of processes of this job that had ended when `take` removed their lease."""
        self._failed_attempts = 0
        self._other = self._new_life()
        """The job that `take` waits for; kept when its time is up, so the next one goes on."""
        self._creator = Silence(2 * timing.renew_s)
        """The process that has created the lease, if it is another one."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def owner(self) -> str:
        """The job."""
        return self._me.owner

    @property
    def token(self) -> str:
        """Names this object among all that take the lease: hex digits."""
        return self._me.token

    def beat_of(self, token: str) -> bytes | None:
        """Return what the process with this token has written last; None if there is nothing.

        Raises:
            CheckpointError: the file system fails.
        """
        name = self._beat_name(token)
        with typed_errors(self._storage, name, "read"):
            return self._read(name)

    def take(self, *, timeout_s: float = math.inf) -> bool:
        """Make sure that this job holds the directory.

        May wait `silent_s` for a lease of another host, in one call or in several.

        Args:
            timeout_s: for that wait.

        Returns:
            Whether no process of this job held it before.

        Raises:
            CheckpointError: another job that lives, or may live, saves here; names it.
        """
        self._ended.clear()
        self.waited_s = 0.0
        deadline_s = time.monotonic() + timeout_s
        was_ours = False
        with typed_errors(self._storage, self._name, "take"):
            while True:
                found = self._read(self._name)
                holder = read_holder(found)
                is_ours = holder is not None and holder.owner == self._me.owner
                if holder is not None and is_ours:
                    if not holder.has_ended():
                        self._begin_to_beat()
                        return False
                    was_ours = True
                    self.ended_tokens.add(holder.token)  # its beat goes too: nothing else tells it
                if found is None:
                    if self._create():
                        self._begin_to_beat()
                        self._remove_remains()
                        return not was_ours
                elif is_ours or self._is_over(found, holder):  # other processes of the job may live
                    self._take_away(found)
                else:
                    self._wait(deadline_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do something that no other job may do meanwhile: commit.

        Raises:
            CheckpointError: another job has taken over since `take`.
        """
        with typed_errors(self._storage, self._name, "read"):
            found = self._read(self._name)
            while found is None:
                if self._create():
                    self._begin_to_beat()
                    break
                found = self._read(self._name)  # another process was faster
        holder = read_holder(found)
        if found is not None and (holder is None or holder.owner != self._me.owner):
            self._ended.set()
            raise self._refused(holder)
        yield

    def release(self) -> None:
        """Give the directory back if this process holds it. Idempotent, raises nothing."""
        self._ended.set()
        if self._thread is None:
            return
        if self._thread.ident is not None:
            self._thread.join()
        self._thread = None
        with (
            contextlib.suppress(CheckpointError),
            typed_errors(self._storage, self._name, "give back"),
        ):
            found = self._look_at_creator()
            if found is not None and self._is_left(read_holder(found)):
                self._take_away(found)
        self._storage.remove(self._beat_name(self.token))

    def _is_left(self, holder: Holder | None) -> bool:
        """Whether a lease is this process's own, or its job's and nobody else gives it back."""
        if holder is None or holder.owner != self.owner:
            return False
        if holder.token == self.token:
            return True
        has_ended = holder.has_ended()
        return self._creator.silent_s >= self.timing.silent_s if has_ended is None else has_ended

    def _wait(self, deadline_s: float) -> None:
        """Wait until the next look at a lease of which nobody knows whether it is over."""
        other, process = self._other, self._other.process
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise CheckpointError(
                f"{self._storage.where()} is used by {_named(process)}, and this host cannot see "
                f"whether that has ended: it was silent for {other.silent_s:.1f} s, its lease is "
                f"over after {other.limit_s(process):g} s. Try again to wait longer, or raise "
                "timeout_s"
            )
        wait_s = min(_LOOK_S, self.timing.silent_s, left_s)
        self.waited_s += wait_s
        if self._ended.wait(wait_s):
            raise self._refused(process)

    def _is_over(self, found: bytes, holder: Holder | None) -> bool:
        """Whether nobody holds another job's lease any more; False: it is to be looked at again.

        Raises:
            CheckpointError: a process of that job lives.
        """
        other = self._other
        lives = other.look(found, holder)
        if lives is None:
            return False
        self._other = self._new_life()
        if lives:
            raise self._refused(other.process)
        where = self._storage.where()
        _logger.warning("%s: taking over from %s, which is gone", where, _named(holder))
        return True

    def _new_life(self) -> JobLife:
        def read(token: str) -> bytes | None:
            return self._read(self._beat_name(token))

        return JobLife(read, self._tokens, self.timing.silent_s)

    def _tokens(self) -> set[str]:
        """List the tokens of all beats."""
        prefix, suffix = self._beat_name("\0").split("\0")
        beats = [name for name in self._storage.names() if name.endswith(suffix)]
        return {name[len(prefix) : -len(suffix)] for name in beats if name.startswith(prefix)}

    def _create(self) -> bool:
        """Create the lease; False: there is one."""
        try:
            self._storage.put(self._name, msgspec.json.encode(self._me), overwrite=False)
        except (FileExistsError, FileNotFoundError) as error:  # the latter: see _remove_remains
            self._failed_attempts += 1
            if self._failed_attempts > _MAX_ATTEMPTS:
                where = self._storage.where(self._name)
                raise CheckpointError(
                    f"{where} is neither there nor can be made: {error}"
                ) from None
            return False
        self._failed_attempts = 0
        return True

    def _begin_to_beat(self) -> None:
        """Show that this process lives, from now until `release`."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._renew, name="ps-lease", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            # Python 3.12 starts no thread at exit; the last save there is short. If a host has no
            # room for threads, `held` refuses a late commit.
            _logger.info("the lease is not renewed: %s", error)
        for _ in range(_MAX_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):  # see _remove_remains
                self._beat(0)
                break

    def _beat(self, number: int) -> None:
        beat = Beat(**msgspec.structs.asdict(self._me), beat=number)
        self._storage.put(self._beat_name(self.token), msgspec.json.encode(beat), overwrite=True)

    def _take_away(self, found: bytes) -> None:
        """Remove the lease if its content is `found`; of many who try this, one renames it."""
        aside = f".{self._name}.{secrets.token_hex(8)}.old"
        try:
            self._storage.move(self._name, aside)
        except FileNotFoundError:
            return
        moved = self._read(aside)
        if moved is not None and moved != found:
            # Another one's, created meanwhile: back to its place, unless a third one has that now.
            with contextlib.suppress(FileExistsError):
                self._storage.put(self._name, moved, overwrite=False)
        self._storage.remove(aside)

    def _remove_remains(self) -> None:
        """Remove what holders and takers have left beside the lease that were killed.

        One that is just creating a lease or a beat may lose its attempt, and makes another.
        """
        for name in self._storage.names():
            is_own = name == self._beat_name(self.token)
            if name.lstrip(".").startswith(f"{self._name}.") and not is_own:
                self._storage.remove(name)

    def _renew(self) -> None:
        for number in itertools.count(1):
            if self._ended.wait(self.timing.renew_s):
                return
            try:
                with typed_errors(self._storage, self._beat_name(self.token), "write"):
                    self._beat(number)
                    self._look_at_creator()
            except CheckpointError as error:
                _logger.warning("the lease was not renewed: %s", error)
            self.at_renewal()

    def _look_at_creator(self) -> bytes | None:
        """Return the lease; note whether the process that has created it still renews it."""
        found = self._read(self._name)
        holder = read_holder(found)
        if found is not None and holder is not None and holder.token != self.token:
            beat = self._read(self._beat_name(holder.token)) or b""
            self._creator.look(found + beat, time.monotonic())
        return found

    def _read(self, name: str) -> bytes | None:
        return read_small(self._storage, name)

    def _beat_name(self, token: str) -> str:
        return f".{self._name}.{token}.beat"

    def _refused(self, holder: Holder | None) -> CheckpointError:
        return CheckpointError(
            f"{self._storage.where()} is used by {_named(holder)}, so job {self._me.owner!r} (host "
            f"{self._me.host}, pid {self._me.pid}) {self._refusal}"
        )


def _named(holder: Holder | None) -> str:
    return str(holder) if holder else "a job whose lease cannot be read"
