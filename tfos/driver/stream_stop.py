"""Stop of a stream from another process: writes the ticket, removes it at the end.

Covers: publishing it once a DStream is trained.
Does not: ask or answer (tfos.control).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib

from tfos.control import stop_ticket
from tfos.control.identity import STOPPER_NAME
from tfos.driver.reservation import Reservation
from tfos.errors import SettingsError


def publish(reserved: Reservation) -> None:
    """Let this user's other processes stop the cluster's streams; a failure is a warning.

    Args:
        reserved: the cluster.
    """
    host, _, port = reserved.settings.driver_address.rpartition(":")
    try:
        path = stop_ticket.write(
            reserved.settings.cluster_id,
            int(port),
            reserved.keys.authority.node(STOPPER_NAME),
        )
    except (OSError, SettingsError) as error:
        reserved.console.warn(
            f"no other process can stop this stream ({error}); cluster.server.stop() does"
        )
        return

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    reserved.coordinator.at_close(remove)
    reserved.console.line(
        f"the stream can be stopped by tensorflowonspark.reservation.Client(({host!r}, {port}))"
        ".request_stop() of the same user"
    )
