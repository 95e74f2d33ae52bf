"""Server group: sends the same request to every server of a cluster and collects the answers.

Covers: sequence numbers, what follows from a request without an answer, the cluster's size; telling
servers that are started again of a worker that is away, also while that asks nothing.
Does not: know tensors (ps.client), reconnect (ps.client.channel).
Threads: one at a time; ps.client holds its lock around every call. `separate` and `link_stats` any.
An `AwayProbe` has a thread of its own, which takes that lock.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import msgspec

from ps.client.channel import Channel, OutgoingCall, check_is_number
from ps.client.channel_stats import LinkStats
from ps.client.retry import ExchangeTimes, exchange
from ps.errors import (
    ManifestMismatch,
    PSError,
    PSSettingsError,
    ServerPhaseError,
    ServerUnavailable,
    StaleGeneration,
    WorkerLost,
    client_closed,
)
from ps.manifest.manifest import Manifest
from ps.protocol import messages
from ps.protocol.messages import MAX_WAIT_S, Ack, Description, Number
from ps.stats.server_stats import ServerStats
from rpc.auth.handshake import Credentials, Identity
from rpc.client.connection import Buffer, Reply
from rpc.endpoint import Endpoint
from rpc.errors import RpcError

_logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
ChangingRequest = Callable[[Number], messages.Changing]
"""Makes a request from its number."""
Buffers = Sequence[Buffer]
Purpose = Literal["answers", "lookups", "saves"]
"""What has connections of its own, so that it holds up no push."""


_FINAL = (ServerPhaseError, StaleGeneration, WorkerLost)
"""Refusals after which a server takes no push of this worker's process."""
PROBE_PERIOD_S = 15.0
"""How often a worker that waits at a rendezvous asks for whom, and one that has left probes the
servers for restarts."""
PROBE_TIMEOUT_S = 1.0
"""How long a look after a server that may have been started again waits for it."""
INTERRUPT_S = 5.0
"""Seconds for which an interrupt waits for the answers of servers in this process."""


class CallTimes:
    """How long the calls of one client take; shared by all of its connections.

    Args:
        timeout_s: timeout of each call that does not set its own, in (0, MAX_WAIT_S].
        reconnect_s: a server that cannot be reached for this long is gone.
        restore_s: for how long a server that restores is asked again.
    """

    def __init__(self, timeout_s: float, reconnect_s: float, restore_s: float) -> None:
        if not reconnect_s > 0:
            raise PSSettingsError(f"reconnect_s must be above 0, got {reconnect_s}")
        self.timeout_s = timeout_s
        self.reconnect_s = reconnect_s
        self.restore_s = restore_s

    @property
    def timeout_s(self) -> float:
        """Seconds of each call that does not say otherwise; may be assigned."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        if not 0 < timeout_s <= MAX_WAIT_S:
            raise PSSettingsError(f"timeout_s must be in (0, {MAX_WAIT_S:g}], got {timeout_s}")
        self._timeout_s = timeout_s

    def of_call(
        self, timeout_s: float | None = None, restore_s: float | None = None
    ) -> ExchangeTimes:
        """Return the times of one exchange; None: as always.

        Args:
            timeout_s: seconds for all its answers.
            restore_s: for how long a server that restores is asked again.

        Raises:
            PSSettingsError: `timeout_s` is NaN.
        """
        if timeout_s is not None:
            check_is_number(timeout_s)
        return ExchangeTimes(
            self.timeout_s if timeout_s is None else timeout_s,
            self.reconnect_s,
            self.restore_s if restore_s is None else restore_s,
        )


class ServerGroup:
    """The links to all servers, in the order of their ranks.

    Args:
        endpoints: all servers.
        credentials: the cluster's secret.
        identity: who this client is.
        num_workers: number of workers in the cluster; compared with the servers' own setting.
        times: times of its calls.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        credentials: Credentials,
        identity: Identity,
        *,
        num_workers: int,
        times: CallTimes,
    ) -> None:
        if not endpoints:
            raise PSSettingsError("a client needs at least one server's endpoint, got none")
        self.links = tuple(
            Channel(rank, endpoint, credentials, identity)
            for rank, endpoint in enumerate(endpoints)
        )
        self._credentials = credentials
        self._identity = identity
        self._num_workers = num_workers
        self.times = times
        self.session = secrets.randbits(63)
        """Names this client in the servers' records."""
        self._unknown = ""
        """What came of an earlier changing request, if the servers may differ in it."""
        self.has_barrier = False
        """Whether all servers have to count a push for the same clock."""
        self._inactive_request: ChangingRequest | None = None
        self._num_declared: list[int] = []
        self._closed = False
        self._separate: dict[Purpose, ServerGroup] = {}
        self._separate_lock = threading.Lock()
        """Guards both, so that no connection is made behind a `close`."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def generations(self) -> tuple[int, ...]:
        """Which start of each server gave the last answer, by rank; sends no request."""
        return tuple(link.generation for link in self.links)

    def num_applied(self) -> Sequence[int]:
        """How many changes of parameters each server has acknowledged, by rank."""
        return [link.acked_updates for link in self.links]

    def ask(
        self, request: messages.Request, answer: type[Answer], *, timeout_s: float | None = None
    ) -> list[Answer]:
        """Make the same request to every server.

        Args:
            request: sent to every server.
            answer: type of the reply.
            timeout_s: seconds for all of them together; None: the client's.
        """
        calls = [OutgoingCall(link, request) for link in self.links]
        return self.answers(calls, answer, timeout_s=timeout_s)

    def stats(self) -> list[ServerStats]:
        """Ask every server for its counters, which come as payload: they may be many."""
        calls = [OutgoingCall(link, messages.FetchStats()) for link in self.links]
        return [messages.decode_reply(each.payload, ServerStats) for each in self.send(calls)]

    def fetch_manifest(self, *, timeout_s: float) -> Manifest:
        """Ask ps:0 for what it serves. Raises as `send`, and ManifestMismatch.

        Args:
            timeout_s: seconds.
        """
        call = OutgoingCall(self.links[0], messages.FetchManifest())
        (reply,) = self.send([call], timeout_s=timeout_s)
        return Manifest.decode(reply.payload)

    def answers(
        self,
        calls: Sequence[OutgoingCall],
        answer: type[Answer],
        *,
        timeout_s: float | None = None,
        restore_s: float | None = None,
    ) -> list[Answer]:
        """Make these requests and decode their replies' meta. Raises as `send`.

        Args:
            calls: at most one per server.
            answer: type of the replies.
            timeout_s: seconds for all of them together; None: the client's.
            restore_s: see `change`.
        """
        replies = self.send(calls, timeout_s=timeout_s, restore_s=restore_s)
        return [messages.decode_reply(reply.meta, answer) for reply in replies]

    def send(
        self,
        calls: Sequence[OutgoingCall],
        *,
        timeout_s: float | None = None,
        restore_s: float | None = None,
    ) -> list[Reply]:
        """Make these requests.

        Args:
            calls: at most one per server.
            timeout_s: seconds for all of them together; None: the client's.
            restore_s: see `change`.

        Raises:
            ClosedError: after close().
            PSError: see ps.client.retry.exchange.
        """
        if self._closed:
            raise client_closed()
        return exchange(calls, self.times.of_call(timeout_s, restore_s))

    def change(
        self,
        request: ChangingRequest | Sequence[ChangingRequest],
        *,
        timeout_s: float | None = None,
        payloads: Sequence[Buffers] = (),
        intos: Sequence[Sequence[memoryview]] = (),
        links: Sequence[Channel] | None = None,
        restore_s: float | None = None,
    ) -> list[Ack]:
        """Make one changing request, under the next sequence number of each server.

        Args:
            request: made once per server; or one per server, by rank.
            timeout_s: for all answers; the servers may let a push wait for most of it. None: the
                client's.
            payloads: one per server, by rank; none without it.
            intos: where the answers' payloads go, as `payloads`.
            links: the servers that it is for; None: all.
            restore_s: for how long a server that restores is asked again; None: as always.

        Raises:
            ClosedError: after close().
            ServerPhaseError: an earlier one got no answer, so the numbers of both sides may differ;
                or only some servers have counted it, so their clocks do.
        """
        if self._unknown:
            is_here = all(link.endpoint.inproc for link in self.links)  # as without a cluster
            then = (
                "build the model again" if is_here else "restart the worker with a new generation"
            )
            raise ServerPhaseError(f"an earlier request of this worker {self._unknown}; {then}")
        if self._closed:
            raise client_closed()
        asked = self.links if links is None else links
        calls = [self._numbered(request, link, payloads, intos) for link in asked]
        acks: list[Ack] = []
        try:
            exchange(calls, self.times.of_call(timeout_s, restore_s))
        except BaseException as error:
            cause = self._cause(error, calls)
            # An interrupt too may come between two servers: then their clocks differ.
            if isinstance(cause, ServerUnavailable) or any(call.is_open for call in calls):
                why = str(cause) or type(cause).__name__
                self._unknown = f"got no answer ({why}): whether it was applied is unknown"
            elif self.has_barrier and _is_torn(calls):
                self._unknown = (
                    f"was counted only by some servers ({cause}), so their clocks differ"
                )
            raise
        finally:
            for call in calls:
                link = call.link
                if call.reply is not None:
                    ack = messages.decode_reply(call.reply.meta, Ack)
                    link.acked(ack, is_update=messages.is_update(call.request))
                    acks.append(ack)
        return acks

    def _cause(self, error: BaseException, calls: Sequence[OutgoingCall]) -> BaseException:
        """Return why a change failed: what is raised, or what became of its second try.

        Where a server has given no answer, that is the cause, though another's refusal is raised.

        Args:
            error: what is raised.
            calls: calls of the change.
        """
        if isinstance(error, KeyboardInterrupt):
            error = self._finish_here(calls) or error
        silent = (each.error for each in calls if isinstance(each.error, ServerUnavailable))
        return next(silent, error)

    def _finish_here(self, calls: Sequence[OutgoingCall]) -> BaseException | None:
        """Send again, to servers in this process, the requests that an interrupt has cut.

        The servers apply each change once, by its number. Then this client may send others, as in a
        notebook's next fit. Servers elsewhere are not asked: they may wait for other workers.

        Returns:
            Why that failed, which may be a second interrupt; None: it succeeded, or was not tried.
        """
        cut = [call for call in calls if call.is_open]
        if not cut or not all(call.link.endpoint.inproc for call in cut):
            return None
        try:
            exchange(cut, self.times.of_call(INTERRUPT_S, restore_s=0.0))
        except (PSError, RpcError, KeyboardInterrupt) as error:
            return error
        return None

    def _numbered(
        self,
        request: ChangingRequest | Sequence[ChangingRequest],
        link: Channel,
        payloads: Sequence[Buffers],
        intos: Sequence[Sequence[memoryview]],
    ) -> OutgoingCall:
        link.sequence += 1
        acked = (link.acknowledged, link.acked_clock, link.acked_updates)
        make = request if callable(request) else request[link.server]
        numbered = make(Number(self.session, link.sequence, *acked))
        payload = payloads[link.server] if payloads else ()
        into = intos[link.server] if intos else None
        return OutgoingCall(link, numbered, payload, into, isinstance(numbered, messages.Push))

    def align_clocks(self, acks: Sequence[Ack], manifest: Manifest) -> list[Ack]:
        """Raise the clock of a worker that has joined to the largest of all servers.

        Args:
            acks: every server's answer to the join.
            manifest: what they hold.

        Returns:
            The answers from which the common clock is seen.
        """
        newest = max(ack.worker_clock for ack in acks)
        pairs = zip(self.links, acks, strict=True)
        behind = [link for link, ack in pairs if ack.worker_clock < newest]
        if not behind:
            return list(acks)
        digest = manifest.hash()

        def catch_up(number: Number) -> messages.Changing:
            if manifest.has_barrier:  # at most one clock behind: the open one
                number = msgspec.structs.replace(number, acked_clock=newest - 1)
                return messages.Push(digest, number, 0, null=True)
            return messages.Join(number, newest)

        return [*acks, *self.change(catch_up, links=behind)]

    def declare_inactive(self, request: ChangingRequest | None) -> None:
        """Note what this worker is beside a member: away or done, in the words of this request.

        A server that is started again from a checkpoint takes it for a member, as all are at first.
        """
        self._inactive_request = request
        self._num_declared = [link.num_connections for link in self.links]

    @property
    def may_differ(self) -> bool:
        """Whether nobody knows what the servers have applied, so that no change is sent."""
        return bool(self._unknown)

    @property
    def is_inactive(self) -> bool:
        """Whether nobody waits for this worker's pushes."""
        return self._inactive_request is not None

    def probe_restarts(self, *, timeout_s: float) -> None:
        """Find servers that were started again, and repeat to them that this worker is inactive.

        What fails is logged and left to the next look: nothing hangs on it for this worker.

        Args:
            timeout_s: for each server.
        """
        for rank in range(len(self.links)):
            self.probe_restart(rank, timeout_s=timeout_s)

    def probe_restart(self, rank: int, *, timeout_s: float) -> None:
        """Like `probe_restarts`, for one server.

        Args:
            rank: rank of the server.
            timeout_s: for each of its two requests.
        """
        request, link, unknown = self._inactive_request, self.links[rank], self._unknown
        if request is None:
            return
        try:
            link.probe_restarts(timeout_s)
            count = link.num_connections
            if count != self._num_declared[rank]:
                self.change(request, timeout_s=timeout_s, links=[link], restore_s=0.0)
                self._num_declared[rank] = count
        except (PSError, RpcError) as error:
            _logger.info("%s does not know that this worker is inactive: %s", link.name, error)
        finally:
            self._unknown = unknown  # it is sent again, under another number

    def check_size(self, described: Sequence[Description]) -> None:
        """Refuse servers that were started for another number of servers or workers."""
        ours = (len(self.links), self._num_workers)
        for server in described:
            theirs = (server.num_servers, server.num_workers)
            if theirs != ours:
                raise ManifestMismatch(
                    f"ps:{server.server} belongs to {theirs[0]} servers and {theirs[1]} workers, "
                    f"this client to {ours[0]} and {ours[1]}; start both with the same numbers"
                )

    def move(self, rank: int, endpoint: Endpoint) -> None:
        """Reach a server at another place from now on, by the separate connections too.

        Args:
            rank: rank of the server.
            endpoint: where it listens.
        """
        with self._separate_lock:
            for group in (self, *self._separate.values()):
                group.links[rank].move(endpoint)

    def separate(self, purpose: Purpose) -> ServerGroup:
        """Return connections of their own to the same servers, which close with these.

        Args:
            purpose: one group for each, made when it is first asked for.

        Raises:
            ClosedError: after `close`.
        """
        with self._separate_lock:
            if self._closed:
                raise client_closed()
            if purpose not in self._separate:
                self._separate[purpose] = ServerGroup(
                    [link.endpoint for link in self.links],
                    self._credentials,
                    self._identity,
                    num_workers=self._num_workers,
                    times=self.times,
                )
            return self._separate[purpose]

    def link_stats(self) -> list[LinkStats]:
        """Return what was counted for each server, separate connections included."""
        counted = [link.stats() for link in self.links]
        for group in tuple(self._separate.values()):
            pairs = zip(counted, group.link_stats(), strict=True)
            counted = [one.added(other) for one, other in pairs]
        return counted

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._separate_lock:
            self._closed = True
        for group in self._separate.values():
            group.close()
        for link in self.links:
            link.retire()


def _is_torn(calls: Sequence[OutgoingCall]) -> bool:
    """Whether a push counts at some servers, and others would take the next one in its place.

    A server that stops or has failed, or that refuses this worker, takes none.
    """
    refusals = [call.error for call in calls if not call.counts]
    is_part = 0 < len(refusals) < len(calls)
    takes_next = any(not isinstance(error, _FINAL) for error in refusals)
    return is_part and takes_next and isinstance(calls[0].request, messages.Push)


class AwayProbe:
    """Looks after the servers while the worker of these links is away and asks nothing.

    A server that is started again takes it for a member, and all others' pushes would wait there:
    a worker that validates, or waits for its feed, may ask nothing for minutes. It looks at one
    server at a time, so a call waits for one that is away, not for all; and it ends with a client
    that nobody has any more, closed or not.

    Args:
        servers: the links.
        lock: held around every call; a call that takes long looks itself.
        period_s: seconds between two looks at the same server.
    """

    def __init__(
        self, servers: ServerGroup, lock: AbstractContextManager[Any], period_s: float
    ) -> None:
        self._servers = servers
        self._lock = lock
        self._period_s = period_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The worker is away, now or again; hold the lock."""
        if self._thread is None:
            wait_s = self._period_s / len(self._servers.links)
            self._thread = threading.Thread(
                target=_look_in_turn,
                args=(weakref.ref(self), self._closed, wait_s),
                name="ps-away",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread; do not hold the lock. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def look(self, turn: int) -> None:
        """Look after the server whose turn it is; its thread calls it."""
        with self._lock:
            if not self._closed.is_set():
                rank = turn % len(self._servers.links)
                self._servers.probe_restart(rank, timeout_s=PROBE_TIMEOUT_S)


def _look_in_turn(found: weakref.ref[AwayProbe], closed: threading.Event, wait_s: float) -> None:
    for turn in itertools.count():
        if closed.wait(wait_s) or (probe := found()) is None:
            return
        probe.look(turn)
        del probe  # only its client keeps it


def joined(acks: Sequence[Ack]) -> Ack:
    """Return one answer for all servers."""
    if len(acks) == 1:
        return acks[0]
    return Ack(
        clock=max(ack.clock for ack in acks),
        applied=any(ack.applied for ack in acks),
        staleness=max(ack.staleness for ack in acks),
    )
