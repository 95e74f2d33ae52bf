"""The plainest way to move bytes between two processes: one buffer over one TCP socket.

A child process serves three requests of 9 bytes (operation, length): `P` receive that many bytes
and acknowledge with one byte, `G` send that many, `E` receive and send them back. `sendall` and
`recv_into` a buffer that exists already; nothing is authenticated or checked.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from types import TracebackType

from tfos.bench.reference.child_line import child_line

_START_S = 120.0
REQUEST = struct.Struct("<cQ")


def receive(connection: socket.socket, view: memoryview) -> None:
    """Fill `view` from the socket.

    Args:
        connection: a connected socket.
        view: flat bytes; filled.
    """
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the peer closed the socket")
        view = view[count:]


def tune(connection: socket.socket) -> None:
    """Send small messages at once; leave the buffers to the kernel's own tuning."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class RawPeer:
    """The client's side and the child that serves it; timings are the caller's."""

    def __init__(self, max_bytes: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(max_bytes)], stdout=subprocess.PIPE, text=True
        )
        try:
            port = int(child_line(self._child, "a plain socket's server to listen", _START_S))
        except BaseException:
            self._child.kill()
            self._child.communicate()
            raise
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        tune(self._socket)
        self._ack = memoryview(bytearray(1))

    def push(self, data: memoryview) -> None:
        """Send `data`; returns when the peer has all of it."""
        self._socket.sendall(REQUEST.pack(b"P", data.nbytes))
        self._socket.sendall(data)
        receive(self._socket, self._ack)

    def pull(self, into: memoryview) -> None:
        """Receive as many bytes as `into` holds."""
        self._socket.sendall(REQUEST.pack(b"G", into.nbytes))
        receive(self._socket, into)

    def echo(self, data: memoryview, into: memoryview) -> None:
        """Send `data` and receive it back.

        Args:
            data: flat bytes.
            into: buffer of the same size; filled.
        """
        self._socket.sendall(REQUEST.pack(b"E", data.nbytes))
        self._socket.sendall(data)
        receive(self._socket, into)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._child.wait(timeout=10)
        if self._child.stdout is not None:
            self._child.stdout.close()


def serve(max_bytes: int) -> None:
    """Answer one connection until it is closed."""
    buffer = memoryview(bytearray(max_bytes))
    request = memoryview(bytearray(REQUEST.size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = server.accept()
    tune(connection)
    with connection:
        while True:
            try:
                receive(connection, request)
            except ConnectionError:
                return
            operation, length = REQUEST.unpack(request)
            if operation in (b"P", b"E"):
                receive(connection, buffer[:length])
            if operation in (b"G", b"E"):
                connection.sendall(buffer[:length])
            else:
                connection.sendall(b"+")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
