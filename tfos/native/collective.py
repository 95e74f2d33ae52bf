"""Collective group: whether TensorFlow here joins other processes in calls that need all of them.

Covers: the notice before TensorFlow joins them, errors that the end of a peer may have caused.
Does not: import TensorFlow, end anything (tfos.control decides).
Threads: the notice comes on the thread that builds the strategy.

MultiWorkerMirroredStrategy joins the others when it is built, and waits for all of them with
Python's lock held: nothing in this process could report it afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfos.failure import TENSORFLOW_ERRORS
from tfos.native.at_import import at_import
from tfos.topology import TRAINING_ROLES

_CONTEXT = "tensorflow.python.eager.context"


def before_collective(tell: Callable[[int], object]) -> None:
    """Call `tell` before TensorFlow in this process joins others in collective calls.

    Args:
        tell: called with the number of workers each time a strategy with several is built.
    """
    at_import(_CONTEXT, lambda module: _tell_first(module, tell))


def _tell_first(module: ModuleType, tell: Callable[[int], object]) -> None:
    plain = getattr(module.Context, "enable_collective_ops", None)
    if plain is None:  # another TensorFlow version: the workers count as independent
        return

    @functools.wraps(plain)
    def enable_collective_ops(self: Any, server_def: Any) -> Any:
        jobs = server_def.cluster.job if server_def else ()
        num_workers = sum(len(job.tasks) for job in jobs if job.name in TRAINING_ROLES)
        if num_workers > 1:
            tell(num_workers)
        return plain(self, server_def)

    module.Context.enable_collective_ops = enable_collective_ops


def may_follow_from_peer(error: BaseException) -> bool:
    """Whether an error of main_fun may follow from the end of another worker.

    Args:
        error: error of main_fun, in a worker of such a group.
    """
    return type(error).__module__ == TENSORFLOW_ERRORS
