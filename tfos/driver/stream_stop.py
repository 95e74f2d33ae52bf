"""Stop of a stream from another process: writes the ticket, removes it at the end.

Covers: publishing it once a DStream is trained or answered.
Does not: ask (tfos.watch.operator), answer (tfos.watch.job).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib

from tfos.control.identity import STREAMS_NAME
from tfos.driver.reservation import Reservation
from tfos.errors import SettingsError
from tfos.watch import ticket
from tfos.watch.doors import ticket_of


def publish(reserved: Reservation) -> None:
    """Let this user's other processes stop the cluster's streams; a failure is a warning.

    Args:
        reserved: the cluster.
    """
    address, keys = reserved.settings.driver_address, reserved.keys.authority.node(STREAMS_NAME)
    host, _, port = address.rpartition(":")
    made = ticket_of(reserved.job.info, address, keys)
    try:
        path = ticket.write(made, ticket.directory_of_streams())
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
        "the stream can be stopped by a process of the same user: from tfos.tensorflowonspark "
        f"import reservation; reservation.Client(({host!r}, {port})).request_stop()"
    )
