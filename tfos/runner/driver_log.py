"""log_to_driver: show lines in the driver's output from inside a run.

Covers: the call.      Does not: carry lines; the control plane carries a node's output.
Runs in: a rank's process.
"""

from __future__ import annotations

import sys

MAX_LINE_CHARS = 4000


def log_to_driver(message: str) -> None:
    """Show a message in the driver's output, with the rank's name before it.

    The rest of a rank's output is also shown there, unless ClusterConfig(verbose=False).

    Args:
        message: text; cut after 4,000 characters.
    """
    sys.stdout.write(f"{str(message)[:MAX_LINE_CHARS]}\n")
    sys.stdout.flush()
