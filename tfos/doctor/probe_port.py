"""The probe port of the driver, at which executors show that they reach it.

Covers: listening, accepting and closing each connection.
Does not: read or write a byte.
Threads: one accepts; without it the queue of connections would be full after somaxconn of them.
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
"""After a connection that was not accepted: without a free descriptor none is for a while."""


@contextlib.contextmanager
def open_probe_port(host: str) -> Iterator[int]:
    """Listen for the time of a `with`, and yield the port.

    Args:
        host: address of this host.

    Raises:
        OSError: it is no address of this host.
    """
    with bound_tcp(host, 0, Limits()) as listener:
        is_over = threading.Event()
        acceptor = threading.Thread(
            target=_accept, args=(listener, is_over), name="tfos-doctor-probe-port"
        )
        acceptor.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept, which a close alone does not
            acceptor.join(_END_S)


def _accept(listener: socket.socket, is_over: threading.Event) -> None:
    while not is_over.is_set():
        try:
            listener.accept()[0].close()
        except OSError:  # a connection that has ended, no free descriptor, or the end
            is_over.wait(_PAUSE_S)
