"""Reserved port: what TF_CONFIG names, for a server that main_fun itself starts.

Covers: holding a TCP port that only a server of this user can bind, with SO_REUSEPORT.
Does not: listen; a connection to the port is refused until main_fun's server listens.
Threads: any.

TensorFlow binds the port of its gRPC server by itself. The bound socket here keeps the port from
everybody else meanwhile, so nothing else can take it between the roster and that server.
"""

from __future__ import annotations

import contextlib
import socket


class ReservedPort:
    """A TCP port of all addresses of this host; TensorFlow's servers bind all of them."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind(("", 0))  # never listens, so the wildcard address exposes nothing
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port up, for a server that binds without SO_REUSEPORT. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()
