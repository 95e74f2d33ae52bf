"""Retries: one exchange with several servers at once, sent again over cut connections.

Covers: connecting to several servers together, sending again with the same numbers, waiting for
whichever server answers first, deadlines; scans that a restart cuts, begun again.
Does not: make a connection (ps.client.channel), know what the requests mean (ps.client).
Threads: one at a time; ps.client holds its lock around every exchange. A thread per server connects
when several have to, and ends before the exchange goes on.

A cut connection is no error yet: the request is sent again, with the same sequence number, until
the deadline. A server that cannot be reached for `reconnect_s` is gone. One that answers that it
restores its parameters is waited for longer than for any other answer, up to `restore_s`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ps.client.channel import Channel, OutgoingCall
from ps.errors import (
    ClosedError,
    PSError,
    PSSettingsError,
    RequestTimeout,
    ServerGone,
    ServerPhaseError,
    ServerRestoring,
    client_closed,
    from_remote,
)
from rpc.client.connection import PendingCall, Reply, wait_any
from rpc.client.deadline import Deadline
from rpc.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    IntegrityError,
    PeerGone,
    RemoteError,
    RpcError,
    TransportError,
)

READY_TIMEOUT_S = 600.0
"""For a server that compiles its kernels, or restores, which begins with that. Ten times what the
kernels of a model with a table took on two cores that others kept busy."""
LOOK_S = 1.0
"""How often a call that waits looks whether its server was replaced, and a push that waits for some
servers whether those that answered still live."""

MAX_SCANS = 3
"""Scans of the same rows, each after their server was started again."""
T = TypeVar("T")

_logger = logging.getLogger(__name__)


def retry_scan(read: Callable[[], T]) -> T:
    """Return what a read of scans gives; begin it again where a server was started again meanwhile.

    Args:
        read: scans, and keeps nothing of a call that raises.

    Raises:
        ServerPhaseError: that happened to each of MAX_SCANS reads.
    """
    for _ in range(MAX_SCANS - 1):
        try:
            return read()
        except ServerPhaseError as error:
            _logger.warning("rows are read again from the start: %s", error)
    return read()


def connect_together(links: Sequence[Channel], left_s: float) -> dict[int, RpcError | PSError]:
    """Connect those links that have no connection and may try now; bounded as one attempt is.

    Args:
        links: to the servers.
        left_s: seconds to the deadline.

    Returns:
        By the server's rank why no attempt will ever succeed. A link that only has to try again
        later is not among them, nor one that is connected now.
    """
    due = [link for link in links if link.is_due()]
    if len(due) < 2:
        return {}  # the caller's own thread can do that
    failures: dict[int, RpcError | PSError] = {}

    def connect(link: Channel) -> None:
        try:
            link.open_connection(left_s)
        except (RpcError, PSError) as error:
            failures[link.server] = error

    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # Python 3.12 starts none at exit: the caller connects
        for link in due:
            name = f"ps-connect-{link.server}"
            # A daemon: after an interrupt here nobody joins it, and it must not keep the process.
            thread = threading.Thread(target=connect, args=(link,), name=name, daemon=True)
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join()
    return failures


class ExchangeTimes(NamedTuple):
    """How long one exchange takes at most."""

    timeout_s: float
    """Limit of all its calls together; starts again when a server answers that it restores."""
    reconnect_s: float
    """A server that cannot be reached for this long is gone."""
    restore_s: float
    """How long a server that restores is asked again."""

    @property
    def longest_s(self) -> float:
        """Seconds that it takes at most, whatever the servers answer."""
        return max(self.timeout_s, self.restore_s)

    def deadline_s(self, calls: Sequence[OutgoingCall], begun_s: float) -> float:
        """Return when to give up, as is known by now.

        Args:
            calls: calls of the exchange.
            begun_s: when it began.
        """
        heard_s = max(begun_s, *(call.restoring_s for call in calls))
        return min(heard_s + self.timeout_s, begun_s + self.longest_s)


def exchange(calls: Sequence[OutgoingCall], times: ExchangeTimes) -> list[Reply]:
    """Send all requests at once and return all replies, in order.

    A request that was cut is sent again while others still wait for their replies: at a barrier
    those come only when every server has got its part from everybody. Every server gets its chance
    to answer even when another one refuses, so that all of them agree on what was pushed.

    Args:
        calls: at most one per server.
        times: times of this exchange.

    Raises:
        PSError: the first server's refusal, as the server raised it.
        ServerGone: a server could not be reached for `reconnect_s`.
        RequestTimeout: no answer within `timeout_s`.
        RpcError: a server has another secret or version, or breaks the protocol; see rpc.errors.
    """
    begun_s = time.monotonic()
    for call in calls:
        call.begun_s = begun_s
    under_way: dict[int, PendingCall] = {}
    connection = calls[0].link.connection if len(calls) == 1 else None
    if connection is not None and not connection.closed and not calls[0].link.has_moved:
        call = calls[0]  # the usual case, without lists
        try:
            pending = connection.begin(call.meta(times.timeout_s), call.payload, into=call.into)
            wait_any([pending], min(times.timeout_s, LOOK_S))
            if not pending.settled:
                under_way[0] = pending
            else:
                reply = pending.result(0.0)
                call.succeed(reply)
                return [reply]
        except RpcError as error:
            _settle(call, error)
        except BaseException:
            connection.close()  # a later call must not meet the reply of this one
            raise
    _drive(calls, under_way, begun_s, times)
    for call in calls:
        if call.error is not None:
            raise call.error
    return [call.reply for call in calls if call.reply is not None]


def _drive(
    calls: Sequence[OutgoingCall],
    under_way: dict[int, PendingCall],
    begun_s: float,
    times: ExchangeTimes,
) -> None:
    """Give every call its reply or its final error.

    Args:
        calls: at most one per server.
        under_way: those that were sent already, by index.
        begun_s: when the exchange began (monotonic).
        times: times of the exchange.
    """
    look_s = begun_s + LOOK_S
    deadline = Deadline(begun_s, begun_s)
    try:
        while waiting := [call for call in calls if call.is_open]:
            if time.monotonic() >= look_s:
                _reopen_forgotten(calls)
                _leave_replaced(calls, under_way)
                look_s = time.monotonic() + LOOK_S
            deadline.at_s = times.deadline_s(calls, begun_s)
            if deadline.left_s() <= 0:
                _give_up(calls, under_way, times.timeout_s)
                return
            _advance(calls, under_way, deadline)
            for call in waiting:
                if call.is_open:
                    check_reached(call, call.begun_s, times.reconnect_s)
    finally:
        for call in calls:
            if call.is_open:  # may have begun, although an interrupt has kept it from `under_way`
                call.link.close()  # a later call must not meet the reply of this one


def _give_up(
    calls: Sequence[OutgoingCall], under_way: dict[int, PendingCall], timeout_s: float
) -> None:
    """Give every open call that was sent its error, as time is over; raise for the others."""
    for index, pending in under_way.items():
        pending.fail_if_overdue(calls[index].left_s)
        _settle(calls[index], _outcome(pending))
    under_way.clear()
    if unsent := [call for call in calls if call.is_open]:
        raise _timeout(unsent, timeout_s)


def _reopen_forgotten(calls: Sequence[OutgoingCall]) -> None:
    """Send a push again to a server that has answered it and was lost, while others have not yet.

    Started again it does not know this worker's clock, and other workers wait there for it. Those
    may be whom this push waits for at another server that was started again. A refused gradient
    counts as present too.
    """
    for call in calls:
        connection = call.link.connection
        if not call.waits or not call.counts or connection is None:
            continue
        if call.link.has_moved or connection.peer_closed():
            connection.close()
            call.reopen()


def _leave_replaced(calls: Sequence[OutgoingCall], under_way: dict[int, PendingCall]) -> None:
    """Send calls again, elsewhere, that wait at servers which were replaced.

    A server that stands still answers nothing and closes nothing: its kernel takes what is sent.
    """
    for index, pending in tuple(under_way.items()):
        link = calls[index].link
        if link.has_moved and not pending.settled:
            del under_way[index]
            link.close()
            calls[index].disconnected(PeerGone(f"it was replaced: {link.name} serves now"))


def _advance(
    calls: Sequence[OutgoingCall], under_way: dict[int, PendingCall], deadline: Deadline
) -> None:
    """Send what can be sent now, and take the next outcomes."""
    idle = [call for index, call in enumerate(calls) if call.is_open and index not in under_way]
    failures = connect_together([call.link for call in idle], deadline.left_s())
    for index, call in enumerate(calls):
        if call.is_open and index not in under_way:
            if call.link.server in failures:
                _settle(call, failures[call.link.server])
                continue
            pending = _begin(call, deadline)
            if pending is not None:
                under_way[index] = pending
    _wait(calls, under_way, deadline)
    for index in [index for index, pending in under_way.items() if pending.settled]:
        _settle(calls[index], _outcome(under_way.pop(index)))


def _begin(call: OutgoingCall, deadline: Deadline) -> PendingCall | None:
    """Begin a call if its connection is there or can be made now."""
    left_s = deadline.left_s()
    if left_s <= 0:
        return None  # connecting took all the time
    try:
        connection = call.link.open_connection(left_s)
        if connection is None:
            return None
        return connection.begin(call.meta(left_s), call.payload, into=call.into)
    except (
        RpcError,
        ClosedError,
        PSSettingsError,
    ) as error:  # too large, closed by another thread, refused
        _settle(call, error)
    return None


def _wait(
    calls: Sequence[OutgoingCall], under_way: Mapping[int, PendingCall], deadline: Deadline
) -> None:
    """Wait until a call has its outcome or another one may be tried again, or time is over."""
    left_s = deadline.left_s()
    paused = [call for index, call in enumerate(calls) if call.is_open and index not in under_way]
    pause_s = min((call.link.wait_s() for call in paused), default=left_s)
    if under_way:
        wait_any(list(under_way.values()), max(0.0, min(left_s, pause_s, LOOK_S)))
    elif paused:
        time.sleep(max(0.0, min(left_s, pause_s)))


def _outcome(pending: PendingCall) -> Reply | RpcError:
    try:
        return pending.result(0.0)
    except RpcError as error:
        return error


def _settle(call: OutgoingCall, outcome: Reply | RpcError | PSError) -> None:
    if isinstance(outcome, Reply):
        call.succeed(outcome)
    elif isinstance(outcome, RemoteError):
        _take_refusal(call, named(from_remote(outcome), call.link))
    elif isinstance(outcome, DeadlineExceeded):
        call.fail(_overdue(call, outcome))
    elif isinstance(outcome, ConnectionClosed):
        call.fail(client_closed())
    elif isinstance(outcome, (TransportError, IntegrityError)):
        call.disconnected(outcome)
    else:
        call.fail(outcome)


def _overdue(call: OutgoingCall, error: DeadlineExceeded) -> RequestTimeout:
    if call.restoring is not None:
        return _still_restoring(call, call.restoring)
    lossy, cut = "", call.last_disconnect
    if cut is not None:  # a frozen server breaks no connection
        lossy = f", or the network loses packets: an earlier try ended with: {cut}"
    text = (
        f"{call.link.name} gave no answer within {call.left_s:.1f} s ({error}); it is frozen or "
        f"overloaded, or the network is slow: look at its log, or raise timeout_s{lossy}"
    )
    return RequestTimeout(text, {"server": str(call.link.server)})


def _still_restoring(call: OutgoingCall, told: PSError) -> RequestTimeout:
    waited_s = time.monotonic() - call.begun_s
    text = f"{told.message}; this call waited {waited_s:.0f} s for it. Look at the server's log"
    return RequestTimeout(text, {"server": str(call.link.server)})


def _take_refusal(call: OutgoingCall, error: PSError) -> None:
    if not isinstance(error, ServerRestoring):
        call.refuse(error)
        return
    if call.restoring is None:
        _logger.warning("%s; this worker waits for it", error)
    call.postpone(error)


def named(error: PSError, link: Channel) -> PSError:
    """Return an error that says which server it is of.

    Args:
        error: as the server raised it.
        link: to the server.
    """
    error.details.setdefault("server", str(link.server))
    return error


def _timeout(calls: Sequence[OutgoingCall], timeout_s: float) -> RequestTimeout:
    for call in calls:
        if call.restoring is not None:
            return _still_restoring(call, call.restoring)
    names = ", ".join(call.link.name for call in calls)
    failures = [call.last_disconnect or call.link.last_failure for call in calls]
    cut = next((failure for failure in failures if failure is not None), None)
    why = f"; last failure: {cut}" if cut is not None else ""
    return RequestTimeout(f"no answer from {names} within {timeout_s:g} s{why}")


def check_reached(call: OutgoingCall, begun_s: float, reconnect_s: float) -> None:
    """Give up a server that could not be reached for too long.

    Args:
        call: the call without an answer.
        begun_s: since when it is tried (monotonic).
        reconnect_s: seconds for which it may be.

    Raises:
        ServerGone: it was tried longer.
    """
    # Between two calls nobody tries: that time is no reason to give up.
    if min(call.link.unreachable_s(), time.monotonic() - begun_s) <= reconnect_s:
        return
    why = (
        f"; the connection ended with: {call.last_disconnect}"
        if call.last_disconnect is not None
        else ""
    )
    raise ServerGone(
        f"{call.link.name} could not be reached for {reconnect_s:g} s{why}; the last attempt: "
        f"{call.link.last_failure}; is the process alive, and does this host reach that port?",
        {"server": str(call.link.server)},
    )
