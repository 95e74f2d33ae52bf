"""TFParallel: one independent run of a function on each of some executors.

Covers: run.      Does not: start processes: it is a cluster without servers and feeds.
Runs in: the driver; `_alone` in each worker.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tfos.cluster import TFCluster
from tfos.errors import NodeFailedError


def run(
    sc: Any,
    map_fn: Callable[[Any, Any], Any],
    tf_args: Any,
    num_executors: int,
    use_barrier: bool = True,
) -> None:
    """Run `map_fn(tf_args, ctx)` in that many processes and return once all have ended.

    `ctx.worker_num` and `ctx.num_workers` define a process's share of the work. TF_CONFIG is not
    set, so TensorFlow does not treat a process as part of a cluster.

    Args:
        sc: SparkContext or classic SparkSession.
        map_fn: what each process runs.
        tf_args: anything that pickles; a list becomes sys.argv.
        num_executors: processes, one task slot each.
        use_barrier: no effect: all slots are taken at once, as with a barrier.

    Raises:
        NotEnoughSlots: Spark cannot run all processes at once.
        NodeFailedError: a process failed; its own traceback is the cause.
    """
    del use_barrier
    cluster = TFCluster.run(sc, functools.partial(_alone, map_fn), tf_args, num_executors, 0)
    try:
        cluster.shutdown(timeout=None)
    except BaseException:
        cluster.abort("TFParallel.run failed")
        raise
    if cluster.failures:  # a lost worker ends no training, but here its share is missing
        raise NodeFailedError(cluster.failures)


def _alone(map_fn: Callable[[Any, Any], Any], args: Any, ctx: Any) -> Any:
    os.environ.pop("TF_CONFIG", None)
    return map_fn(args, ctx)
