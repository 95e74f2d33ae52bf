"""reservation: what programs use from it: stop requests to a stream, counting of reservations.

Covers: Client(addr).request_stop(); Reservations.
Does not: reserve nodes: tfos.driver.reservation does, over an authenticated control plane.
Runs in: any process of the user who runs the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from tfos.errors import SettingsError, UnsupportedError
from tfos.watch.operator import end_streams

_NO_ROSTER = (
    "nodes register by themselves, over a socket that needs the cluster's own keys. "
    "cluster.cluster_info has them at the driver, ctx.cluster_spec on a worker"
)


class Reservations:
    """Counts additions until all are there. Threads: any.

    Args:
        required: number of reservations to wait for.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self._lock = threading.Lock()
        self._added: list[Any] = []

    def add(self, meta: Any) -> None:
        """Add one."""
        with self._lock:
            self._added.append(meta)

    def done(self) -> bool:
        """Return whether all reservations are there."""
        return self.remaining() <= 0

    def get(self) -> list[Any]:
        """Return the reservations that are there."""
        with self._lock:
            return list(self._added)

    def remaining(self) -> int:
        """Return the number of missing reservations."""
        with self._lock:
            return self.required - len(self._added)


class Client:
    """Asks the driver of a cluster, as the same user.

    Args:
        server_addr: host and port of the driver, `cluster.cluster_meta["server_addr"]`.

    Raises:
        SettingsError: it is not a pair of host and port.
    """

    def __init__(self, server_addr: Sequence[Any]) -> None:
        try:
            host, port = server_addr
            self.server_addr = (str(host), int(port))
        except (TypeError, ValueError) as error:
            raise SettingsError(f"server_addr must be (host, port), got {server_addr!r}") from error

    def request_stop(self) -> None:
        """Ask for the stop of the stream; `shutdown(ssc)` at the driver then returns.

        Raises:
            SettingsError: this user has no ticket for a cluster at this address.
            ControlError: the driver does not answer, or refuses.
        """
        end_streams(*self.server_addr)

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def register(self, reservation: Any) -> NoReturn:
        """Refuse. Raises UnsupportedError."""
        raise UnsupportedError(f"Client.register({reservation!r}): {_NO_ROSTER}")

    def get_reservations(self) -> NoReturn:
        """Refuse. Raises UnsupportedError."""
        raise UnsupportedError(f"Client.get_reservations(): {_NO_ROSTER}")

    def await_reservations(self) -> NoReturn:
        """Refuse. Raises UnsupportedError."""
        raise UnsupportedError(f"Client.await_reservations(): {_NO_ROSTER}")


def Server(count: int) -> NoReturn:
    """Refuse: a cluster's own server is the only one. Raises UnsupportedError."""
    raise UnsupportedError(
        f"reservation.Server({count}): TFCluster.run() opens the server of a cluster; "
        "cluster.server is it"
    )
