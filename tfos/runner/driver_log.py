"""log_to_driver: lines for the driver from inside a run.

Covers: the call.      Does not: carry lines; the control plane brings a node's output.
Runs in: a rank's process.
"""

from __future__ import annotations

import sys


def log_to_driver(message: str) -> None:
    """Show a message at the driver, with the rank's name before it.

    The rest of a rank's output is shown there, too, unless ClusterConfig(verbose=False).

    Args:
        message: of a line, the driver shows the first 2,000 characters, and how many follow.
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()
