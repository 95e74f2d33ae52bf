"""A child's ear for its supervisor: orders arrive on one thread; without a supervisor it ends.

Covers: receiving orders in a PS or worker process.
Does not: carry them out (node.server, node.worker).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from tfos.control import messages
from tfos.node.child_link import Link
from tfos.node.errors import LinkError

_logger = logging.getLogger(__name__)


def start_obeying(
    link: Link[messages.Order], on_order: Callable[[messages.Order], None]
) -> threading.Thread:
    """Call `on_order` for each order, in order, on a daemon thread that is returned.

    When the supervisor's end of the link closes, this process exits at once: nobody would report
    for it or end it any more.
    """

    def obey() -> None:
        try:
            while (order := link.receive()) is not None:
                on_order(order)
        except LinkError:
            _logger.exception("the supervisor sent something that is no order")
        os._exit(1)

    thread = threading.Thread(target=obey, name="tfos-obey", daemon=True)
    thread.start()
    return thread
