"""The door of the driver: a port at which executors show that they reach it.

Covers: listening, accepting and closing each connection.
Does not: read or write a byte.
Threads: one accepts; without it the queue of connections would be full after somaxconn visitors.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from rpc.limits import Limits
from rpc.transport.listen import bound_tcp

_END_S = 5.0


@contextlib.contextmanager
def open_door(host: str) -> Iterator[int]:
    """Listen for the time of a `with`, and yield the port.

    Args:
        host: address of this host.

    Raises:
        OSError: it is no address of this host.
    """
    with bound_tcp(host, 0, Limits()) as door:
        greeter = threading.Thread(target=_greet, args=(door,), name="tfos-doctor-door")
        greeter.start()
        try:
            yield int(door.getsockname()[1])
        finally:
            door.shutdown(socket.SHUT_RDWR)  # ends the accept, which a close alone does not
            greeter.join(_END_S)


def _greet(door: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the end
        while True:
            with contextlib.suppress(ConnectionAbortedError):  # a visitor that went again
                door.accept()[0].close()
