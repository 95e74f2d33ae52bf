"""A worker's side of meetings: bring a value to ps:0, get everybody's.

Covers: keys that are used again, looking after the other servers during a long wait.
Does not: wait for others (ps.server.meetings does, at the server).
Runs in: worker processes.
Threads: one at a time; ps.client holds its lock around every call.
"""

from __future__ import annotations

import time

from ps.client.channel import Outgoing
from ps.client.server_group import Fleet
from ps.errors import RequestTimeout
from ps.protocol import messages
from rpc.client.connection import Reply

LOOK_AFTER_S = 15.0
"""How often a worker that has left looks whether a server was started again, while it meets."""
LOOK_S = 1.0
"""How long a look may wait for one server."""


class MeetingClient:
    """The meetings of one worker; belongs to a PSClient.

    Args:
        fleet: the links to the servers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._uses: dict[str, int] = {}

    def meet(self, key: str, value: bytes, timeout_s: float) -> dict[int, bytes]:
        """Bring a value and get those of all live workers. Raises as PSClient.rendezvous."""
        uses = self._uses.get(key, 0)
        reply = self._wait(f"{key}#{uses}" if uses else key, value, timeout_s)
        self._uses[key] = uses + 1
        return messages.decode_reply(reply.meta, messages.Met).values(reply.payload)

    def _wait(self, name: str, value: bytes, timeout_s: float) -> Reply:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            is_last = left_s < 2 * LOOK_AFTER_S or not self._fleet.stands_by
            call = Outgoing(
                self._fleet.links[0],
                lambda wait_s: messages.Meet(name, wait_s),
                [value] if value else [],
            )
            try:
                return self._fleet.send([call], timeout_s=left_s if is_last else LOOK_AFTER_S)[0]
            except RequestTimeout:
                if is_last:
                    raise
            self._fleet.look_after(timeout_s=LOOK_S)
