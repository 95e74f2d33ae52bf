"""Log of a child process: each line has its time, in the node's log file and at the driver.

Covers: the format; which of its lines are tfos's own details.
Does not: carry lines (tfos.node.supervisor.log_buffer).
Runs in: parameter servers and workers, before anything logs.
"""

from __future__ import annotations

import logging
import re

DETAIL = re.compile(rb"[-0-9]{10} [:0-9]{8},\d{3} (DEBUG|INFO) (tfos|ps|feeding|rpc)\.")
"""Lines of tfos itself. Its logger `tfos`, without a module, is for what users want to know."""


def start_log() -> None:
    """Send log lines to standard error, which the supervisor reads."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
