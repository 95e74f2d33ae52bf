"""Reserved port: the port that TF_CONFIG names, for a server that main_fun starts.

Covers: holding a TCP port that only a server of this user can bind, with SO_REUSEPORT; the port
that TENSORFLOW_PORT asks for.
Does not: listen; a connection to the port is refused until main_fun's server listens.
Threads: any.

TensorFlow binds the port of its gRPC server itself. Until then the bound socket here keeps the
port, so that no other process can take it between the roster and that server.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from tfos.errors import SettingsError

PORT_VARIABLE = "TENSORFLOW_PORT"
"""Environment variable of the executors with the port to reserve, as in TensorFlowOnSpark."""


def wanted_port(environment: Mapping[str, str]) -> int:
    """Return the port that the environment asks for, 0 for any.

    Raises:
        SettingsError: the variable is not a port.
    """
    text = environment.get(PORT_VARIABLE, "").strip() or "0"
    if not text.isdecimal() or not 0 <= int(text) < 1 << 16:
        raise SettingsError(f"{PORT_VARIABLE}={text!r} is not a port from 0 to 65535; unset it")
    return int(text)


class ReservedPort:
    """A TCP port of all addresses of this host; TensorFlow's servers bind all of them.

    Args:
        port: port to reserve; 0: any free one.

    Raises:
        SettingsError: another process has the port.
    """

    def __init__(self, port: int = 0) -> None:
        self.socket: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self.socket.bind(("", port))  # never listens, so the wildcard address exposes nothing
        except OSError as error:
            self.socket.close()
            raise SettingsError(
                f"{PORT_VARIABLE}={port}: the port is taken on this host ({error}). Workers on one "
                "host need a port each. Unset the variable, or run one worker per host"
            ) from error
        # After the bind: two reservations of one port must not share it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port: int = self.socket.getsockname()[1]

    def release(self) -> None:
        """Release the port, for a server that binds without SO_REUSEPORT. Idempotent."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.close()
            self.socket = None
