"""log_to_driver: show lines in the driver's output from inside a run.

Covers: the call.      Does not: carry lines; the control plane carries a node's output.
Runs in: a rank's process.
"""

from __future__ import annotations

import sys


def log_to_driver(message: str) -> None:
    """Show a message in the driver's output, with the rank's name before it.

    The rest of a rank's output is also shown there, unless ClusterConfig(verbose=False).

    Args:
        message: of a line, the driver shows the first 2,000 characters, and how many follow.
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()
