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
_PAUSE_S = 0.05
"""Seconds to wait after a failed accept: without a free descriptor all fail for a while."""


@contextlib.contextmanager
def open_door(host: str) -> Iterator[int]:
    """Listen for the time of a `with`, and yield the port.

    Args:
        host: address of this host.

    Raises:
        OSError: it is not an address of this host.
    """
    with bound_tcp(host, 0, Limits()) as door:
        is_over = threading.Event()
        greeter = threading.Thread(target=_greet, args=(door, is_over), name="tfos-doctor-door")
        greeter.start()
        try:
            yield int(door.getsockname()[1])
        finally:
            is_over.set()
            door.shutdown(socket.SHUT_RDWR)  # ends the accept, which a close alone does not
            greeter.join(_END_S)


def _greet(door: socket.socket, is_over: threading.Event) -> None:
    while not is_over.is_set():
        try:
            door.accept()[0].close()
        except OSError:  # a visitor that went again, no free descriptor, or the end
            is_over.wait(_PAUSE_S)
