"""Metadata of a client: values that it sets on ps:0 and reads there.

Covers: those that hold for the run, which are set again on a ps:0 that is new.
Does not: check names and values (ps.metadata), keep them (ps.server).
Threads: one at a time; ps.client.client holds its lock around every call. `RunNotes` any.
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

from ps import metadata
from ps.client.channel import OutgoingCall
from ps.client.server_group import ServerGroup
from ps.errors import PSSettingsError
from ps.protocol import messages
from ps.protocol.messages import Description, Number

_logger = logging.getLogger(__name__)


class RunNotes:
    """The texts that hold for the run, whatever happens to the parameters; see PSClient.

    Whichever client of a process finds ps:0 started again sets them once more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while one is sent: an older text must not come behind a newer one."""
        self.texts: dict[str, bytes] = {}
        """Texts by name."""


class MetadataClient:
    """The metadata that one client sets and reads; belongs to a PSClient.

    Args:
        servers: the links to the servers.
        notes: notes of this process, for all of its clients.
    """

    def __init__(self, servers: ServerGroup, notes: RunNotes) -> None:
        self._servers = servers
        self._notes = notes
        self._numbers = itertools.count(1)
        self._num_connections = 0
        """Number of connections to ps:0 when it last had all of these."""

    def set(self, name: str, text: bytes, *, of_run: bool) -> None:
        """Keep a text on ps:0. Raises as PSClient.set_metadata.

        Args:
            name: name of the value.
            text: its JSON.
            of_run: whether this process sets it again where ps:0 has lost it.
        """
        self.set_again()
        with self._notes.lock:
            self._send(name, text)
            self._notes.texts.pop(name, None)
            if of_run:
                self._notes.texts[name] = text

    def get(self) -> dict[str, Any]:
        """Return all values by name."""
        while True:
            self.set_again()
            call = OutgoingCall(self._servers.links[0], messages.FetchMetadata())
            (reply,) = self._servers.send([call])
            if not self.is_behind:
                return metadata.decode(reply.payload)

    def set_again(self, *, timeout_s: float | None = None) -> None:
        """Set what holds for the run once more, if ps:0 may have been started again since.

        Args:
            timeout_s: for each name; None: the client's.
        """
        if not self.is_behind:
            return
        with self._notes.lock:
            num_connections = self._servers.links[0].num_connections
            for name, text in list(self._notes.texts.items()):
                try:
                    self._send(name, text, timeout_s)
                except PSSettingsError as error:
                    if metadata.NO_ROOM not in error.details:
                        raise
                    # Others have taken its room; no push fails for that.
                    del self._notes.texts[name]
                    _logger.warning("%r was not set again on the restarted ps:0: %s", name, error)
            self._num_connections = num_connections

    def bring(self, timeout_s: float) -> None:
        """Find out whether ps:0 was started again, and set what holds for the run if so.

        Args:
            timeout_s: for each request.
        """
        while self._notes.texts:
            ask = OutgoingCall(self._servers.links[0], messages.Describe())
            self._servers.send([ask], timeout_s=timeout_s)
            if not self.is_behind:
                return
            self.set_again(timeout_s=timeout_s)

    @property
    def is_behind(self) -> bool:
        """Whether ps:0 may have been started again since it had all that holds for the run."""
        num_connections = self._servers.links[0].num_connections
        return bool(self._notes.texts) and num_connections > self._num_connections

    def _send(self, name: str, text: bytes, timeout_s: float | None = None) -> None:
        number = Number(self._servers.session, next(self._numbers))
        call = OutgoingCall(self._servers.links[0], messages.SetMetadata(number, name), [text])
        self._servers.answers([call], Description, timeout_s=timeout_s)
