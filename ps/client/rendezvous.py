"""Rendezvous of a worker: keys that are used again, and what a long wait for one says.

Covers: probing the other servers meanwhile, bringing passed ones to a ps:0 that is new.
Does not: say who comes (ps.server.rendezvous), keep the answers (ps.protocol.passed).
Threads: one at a time; ps.client.client holds its lock around `rendezvous`. `bring` any.
"""

from __future__ import annotations

import logging
import threading
import time

from ps.client.channel import OutgoingCall, check_is_number
from ps.client.metadata import MetadataClient
from ps.client.retry import check_reached
from ps.client.server_group import PROBE_PERIOD_S, PROBE_TIMEOUT_S, ServerGroup
from ps.errors import PSError, PSSettingsError, RequestTimeout
from ps.protocol import messages
from ps.protocol.passed import PassedRendezvous
from rpc.client.connection import Connection, Reply
from rpc.errors import RemoteError, RpcError

_logger = logging.getLogger(__name__)

TELL_PERIOD_S = 60.0
"""How often a worker that waits at a rendezvous logs for whom."""
LONGEST_KEY = messages.MAX_KEY_LENGTH - 16
"""Length of a rendezvous's key as its users name it; a later use appends its count."""
BRING_TIMEOUT_S = 30.0
"""For what a worker keeps of passed rendezvous: far more than ps:0 needs to take it in."""


class RendezvousClient:
    """The rendezvous of one worker; belongs to a PSClient.

    Args:
        servers: the links to the servers.
        metadata: metadata of the same client.
    """

    def __init__(self, servers: ServerGroup, metadata: MetadataClient) -> None:
        self._servers = servers
        self._metadata = metadata
        self._uses: dict[str, int] = {}
        self._passed = PassedRendezvous()
        self._lock = threading.Lock()
        """Guards `_passed`: another thread may bring what this one adds to."""
        self._bringing = threading.Lock()
        """Held by the one thread that uses the connection for that."""
        servers.links[0].greet = self._bring

    def rendezvous(self, key: str, value: bytes, timeout_s: float) -> dict[int, bytes]:
        """Bring a value and get those of all live workers. Raises as PSClient.rendezvous.

        Args:
            key: name of the rendezvous.
            value: at most 1 MiB.
            timeout_s: seconds until RequestTimeout; less than PROBE_TIMEOUT_S counts as that.
        """
        check_is_number(timeout_s)
        uses = self._uses.get(key, 0)
        # A key may end like a count: with its own # doubled, no two uses have one name.
        escaped = key.replace("#", "##")
        if not 0 < len(escaped) <= LONGEST_KEY:
            raise PSSettingsError(
                f"a rendezvous key has 1 to {LONGEST_KEY} characters, a # counting twice, got "
                f"{len(escaped)}: {key[:40]!r}; a shorter one names it as well"
            )
        name = escaped + (f"#{uses}" if uses else "")
        reply = self._wait(name, value, timeout_s)
        self._uses[key] = uses + 1
        answer = messages.decode_reply(reply.meta, messages.RendezvousValues)
        with self._lock:
            self._passed.add(name, answer, bytes(reply.payload))
        return answer.values(reply.payload)

    def _bring(self, connection: Connection, timeout_s: float) -> None:
        """Bring what this worker has passed: ps:0 may have been started again, with none of it.

        On each connection, as a server may have the same generation before and after. It comes
        before all other requests, so before a push that waits for a worker that waits for this.
        """
        passed = self._request()
        if passed is None:
            return
        meta, payload = messages.encode(passed[0]), passed[1]
        try:
            connection.call(meta, payload, timeout_s=min(timeout_s, BRING_TIMEOUT_S))
        except RemoteError as error:  # the next request is refused for the same reason, if for any
            _logger.warning("ps:0 refused the answers of past rendezvous: %s", error)

    def bring(self) -> None:
        """Bring it now, on another connection: this worker may ask ps:0 for nothing for long.

        Threads: any.
        """
        passed = self._request()
        if passed is None:
            return
        try:
            with self._bringing:
                servers = self._servers.separate("answers")
                servers.send([OutgoingCall(servers.links[0], *passed)], timeout_s=BRING_TIMEOUT_S)
                servers.links[0].close()  # a server has room for few connections of each worker
        except (PSError, RpcError) as error:  # the next request brings it, or the next new ps:0
            _logger.info("ps:0 did not get the answers of past rendezvous: %s", error)

    def _request(self) -> tuple[messages.BringAnswers, list[bytes]] | None:
        with self._lock:
            return self._passed.request()

    def _wait(self, name: str, value: bytes, timeout_s: float) -> Reply:
        begun_s = time.monotonic()
        deadline_s, tell_s = begun_s + timeout_s, begun_s + TELL_PERIOD_S
        while True:
            self._set_notes_again()
            # With less the answer, which names who is missing, would come too late.
            left_s = max(PROBE_TIMEOUT_S, deadline_s - time.monotonic())
            is_last = left_s < 2 * PROBE_PERIOD_S
            call = OutgoingCall(
                self._servers.links[0],
                messages.JoinRendezvous(name, 0.0),
                [value] if value else [],
                waits=True,
            )
            try:
                limit_s = left_s if is_last else PROBE_PERIOD_S
                return self._servers.send([call], timeout_s=limit_s)[0]
            except RequestTimeout as error:
                check_reached(call, begun_s, self._servers.times.reconnect_s)
                if is_last:
                    raise
                if (now_s := time.monotonic()) >= tell_s:
                    _tell_wait(name, error, now_s - begun_s, deadline_s - now_s)
                    tell_s = now_s + TELL_PERIOD_S
            self._servers.probe_restarts(timeout_s=PROBE_TIMEOUT_S)

    def _set_notes_again(self) -> None:
        try:
            self._metadata.set_again(timeout_s=PROBE_TIMEOUT_S)
        except (PSError, RpcError) as error:  # left to the next look
            _logger.info("ps:0 lacks the run's metadata of this worker: %s", error)


def _tell_wait(name: str, error: RequestTimeout, waited_s: float, left_s: float) -> None:
    missing = error.details.get("missing")
    _logger.warning(
        "rendezvous %r: this worker has waited %.0f s for %s, and waits at most %.0f s longer. "
        "Look at the log and the phase of what it waits for. If neither goes on, each may wait for "
        "the other: stop the training and resume it from its last checkpoint",
        name,
        waited_s,
        f"worker {missing}" if missing else "an answer of ps:0",
        left_s,
    )
