"""Runner: runs a function as N ranks on Spark's executors; results come back in rank order.

Public names: run, Runner and MirroredStrategyRunner in the driver; rank, size, local_rank, barrier,
broadcast, allreduce, allgather, log_to_driver and LogCallback inside the function.

Ranks are the workers of a TFCluster without servers: the same processes, failures and limits. A
rank's return value is the result of its node's Spark task. Collective calls: tfos.collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from tfos.runner.driver_log import log_to_driver
    from tfos.runner.horovod_runner import Runner
    from tfos.runner.log_callback import LogCallback
    from tfos.runner.mirrored_runner import MirroredStrategyRunner
    from tfos.runner.ranks import (
        allgather,
        allreduce,
        barrier,
        broadcast,
        local_rank,
        rank,
        size,
    )
    from tfos.runner.spark_run import run

__all__ = [
    "LogCallback",
    "MirroredStrategyRunner",
    "Runner",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "local_rank",
    "log_to_driver",
    "rank",
    "run",
    "size",
]

_HOMES = {
    **dict.fromkeys(
        ("allgather", "allreduce", "barrier", "broadcast", "local_rank", "rank", "size"),
        "tfos.runner.ranks",
    ),
    "LogCallback": "tfos.runner.log_callback",
    "MirroredStrategyRunner": "tfos.runner.mirrored_runner",
    "Runner": "tfos.runner.horovod_runner",
    "log_to_driver": "tfos.runner.driver_log",
    "run": "tfos.runner.spark_run",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
