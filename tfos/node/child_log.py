"""Log of a child process: each line has its time, in the node's log file and at the driver.

Covers: the format.      Does not: carry lines (tfos.node.supervisor.log_buffer).
Runs in: parameter servers and workers, before anything logs.
"""

from __future__ import annotations

import logging


def start_log() -> None:
    """Send log lines to standard error, which the supervisor reads."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
