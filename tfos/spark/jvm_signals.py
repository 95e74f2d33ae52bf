"""Signals of the driver's JVM: who hears Ctrl-C.

Covers: a JVM that leaves SIGINT to the program.
Does not: handle SIGINT (pyspark, tfos.spark.interruptible).
Runs in: the driver.
Threads: any.
"""

from __future__ import annotations

import logging
import os
from typing import Any

_logger = logging.getLogger(__name__)


def leave_interrupts_to_python(sc: Any) -> None:
    """Have the JVM ignore SIGINT in a terminal, as one that pyspark has started does.

    A terminal sends Ctrl-C to spark-submit's JVM, too. It would end Spark, and with Spark the
    nodes, while the program is still to stop them in order and to save. Without a terminal SIGINT
    is sent to one process, and spark-submit's JVM may be the one.

    Args:
        sc: the SparkContext. A JVM that takes no such order keeps its handler.
    """
    if not _has_terminal():
        return
    try:
        misc = sc._jvm.sun.misc
        misc.Signal.handle(misc.Signal("INT"), misc.SignalHandler.SIG_IGN)
    except Exception:  # another JVM, or one that has ended, which the next call of Spark tells
        _logger.debug("the driver's JVM keeps its own handler of SIGINT", exc_info=True)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
