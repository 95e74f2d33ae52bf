"""Stop of a stream from another process: writes the ticket, removes it at the end.

Covers: publishing it once a DStream is trained.
Does not: ask (tfos.watch.operator), answer (tfos.watch.job).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib
import time

from tfos.control.identity import OPERATOR_NAME
from tfos.driver.reservation import Reservation
from tfos.errors import SettingsError
from tfos.watch import ticket


def publish(reserved: Reservation) -> None:
    """Let this user's other processes stop the cluster's streams; a failure is a warning.

    Args:
        reserved: the cluster.
    """
    keys, settings = reserved.keys.authority.node(OPERATOR_NAME), reserved.settings
    host, _, port = settings.driver_address.rpartition(":")
    made = ticket.DriverTicket.of_this(
        cluster_id=settings.cluster_id,
        name=reserved.sc.appName,
        application_id=reserved.sc.applicationId,
        started_at=time.time(),
        address=settings.driver_address,
        cert_pem=keys.cert_pem,
        key_pem=keys.key_pem,
        ca_pem=keys.ca_pem,
    )
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
        f"the stream can be stopped by tensorflowonspark.reservation.Client(({host!r}, {port}))"
        ".request_stop() of the same user"
    )
