"""Reference of P26: what plain sockets allow for an all-reduce along a ring, without the sums."""

from __future__ import annotations

import socket
import threading


class SocketRing:
    """One rank: a TCP connection to the next rank and one from the rank before.

    Args:
        listener: this rank's listener.
        next_port: where the next rank listens, on loopback.
    """

    def __init__(self, listener: socket.socket, next_port: int) -> None:
        self._next = socket.create_connection(("127.0.0.1", next_port))
        self._before, _ = listener.accept()
        for each in (self._next, self._before):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, data: memoryview, size: int) -> None:
        """Send and receive what a ring all-reduce of `data` does: 2 (size - 1) slices each way."""
        count = len(data) // size
        for _ in range(2 * (size - 1)):
            sender = threading.Thread(target=self._next.sendall, args=(data[:count],))
            sender.start()
            self._receive(data[count : 2 * count])
            sender.join()

    def close(self) -> None:
        """Close both."""
        self._next.close()
        self._before.close()

    def _receive(self, into: memoryview) -> None:
        while into:
            into = into[self._before.recv_into(into) :]
