"""Server of the job's page: one thread with uvicorn, connections bounded in number and time.

Covers: the port, the page's URL, the end.
Does not: know routes (tfos.watch.page_app), decide who may (tfos.watch.page_access).
Runs in: the driver.      Threads: `tfos-page` serves; `start` and `close` from any.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rpc.endpoint import advertised_host, bracketed, is_wildcard
from rpc.errors import RpcError
from rpc.limits import DEFAULT_LIMITS
from rpc.transport.listen import bound_tcp
from tfos.control.coordinator import FOLLOWED_S, LAST_LOOK_S
from tfos.errors import SettingsError
from tfos.watch.job import SAVE_S
from tfos.watch.page_access import PageAccess
from tfos.watch.page_app import make_app

MOST_CONNECTIONS = 32
"""One more closes the oldest that has sent no request; if all have, it is refused."""
REQUEST_S = 10.0
"""Seconds until a connection has sent its request."""
CONNECTION_S = SAVE_S + 30.0
"""Seconds until it is closed whatever it does; above the longest answer's time."""
MOST_HEAD_BYTES = 16 << 10
_CLOSE_S = 3.0
_LOG = logging.getLogger(__name__)
_LOG.setLevel(logging.ERROR)  # uvicorn warns of each malformed request, also of a stranger's


class BoundedConnection(H11Protocol):
    """A connection that sends one request in time, or is closed."""

    _numbers = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; one too many closes the oldest that has sent no request."""
        self.logger = _LOG  # uvicorn's own is the user's too
        self._timers: list[asyncio.TimerHandle] = []
        self._number = next(self._numbers)
        if len(self.connections) >= MOST_CONNECTIONS and not self._evict_oldest():
            transport.abort()
            return
        super().connection_made(transport)
        self._timers = [
            self.loop.call_later(REQUEST_S, self._close_without_request),
            self.loop.call_later(CONNECTION_S, transport.abort),
        ]

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if not self._timers:  # it was refused
            return
        for timer in self._timers:
            timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_silent(self) -> bool:
        return getattr(self, "cycle", None) is None  # no request began

    def _evict_oldest(self) -> bool:
        # A client without a token is answered and closed at once: none stays in a request.
        bounded = [each for each in self.connections if isinstance(each, BoundedConnection)]
        silent = [each for each in bounded if each._is_silent]
        if silent:
            oldest = min(silent, key=lambda each: each._number)
            self.connections.discard(oldest)
            oldest.transport.abort()
        return bool(silent)

    def _close_without_request(self) -> None:
        if self._is_silent:
            self.transport.abort()


class JobPage:
    """The page of one job until it is closed.

    Args:
        job: what it shows; see tfos.watch.job.
        metrics: returns Prometheus' text.
    """

    def __init__(self, job: Any, metrics: Any) -> None:
        self._job = job
        self._metrics = metrics
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._looked = threading.Event()
        self._looked_s = -math.inf
        self._last_look_s = math.inf
        """Time until which a reader's last look is awaited; set when the job ends."""
        self.url = ""
        """URL of the page, with the token."""

    def start(self, host: str, port: int, hosts: Iterable[str] = ()) -> None:
        """Listen and serve.

        Args:
            host: address to bind.
            port: 0: the system chooses.
            hosts: further names under which the page is reached, such as a proxy's.

        Raises:
            SettingsError: the port is in use, or the address is not one of this host.
        """
        try:
            listener = bound_tcp(host, port, DEFAULT_LIMITS)
        except (RpcError, OSError) as error:
            raise SettingsError(
                f"page_host={host!r}, page_port={port}: the page cannot be served: {error}"
            ) from error
        shown = advertised_host() if is_wildcard(host) else host
        access = PageAccess(frozenset(each.lower() for each in (shown, *hosts)))
        config = uvicorn.Config(
            make_app(self._job, access, self._metrics, self._note_look),
            http=BoundedConnection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # URLs have the token
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="tfos-page", daemon=True
        )
        self._thread.start()
        bound = listener.getsockname()[1]
        self.url = f"http://{bracketed(shown)}:{bound}/?token={access.token}"

    def note_end(self) -> None:
        """Take a look from now on for a reader's last: the job shows its end."""
        now_s = time.monotonic()
        self._looked.clear()
        is_watched = now_s - self._looked_s < FOLLOWED_S
        self._last_look_s = now_s + (LAST_LOOK_S if is_watched else 0.0)

    def close(self) -> None:
        """Stop listening and close all connections, after a reader's last look. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        if self._last_look_s == math.inf:
            self.note_end()
        self._looked.wait(max(0.0, self._last_look_s - time.monotonic()))
        server.should_exit = True
        self._thread.join(_CLOSE_S)

    def _note_look(self) -> None:
        self._looked_s = time.monotonic()
        self._looked.set()
