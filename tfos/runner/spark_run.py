"""run: a function as N ranks on Spark's executors, and their return values.

Covers: the arguments, the cluster of the ranks, the values in rank order.
Does not: start nodes (tfos.cluster), run a rank (rank_process).
Runs in: the driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos.cluster import TFCluster
from tfos.config import ClusterConfig, config_of
from tfos.driver.preflight import check_timeout
from tfos.errors import NoResultError, SettingsError, ShutdownTimeout
from tfos.runner.rank_process import RankWork, run_rank
from tfos.spark import pickling
from tfos.spark.facts import active_context
from tfos.topology import ServersOf

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from tfos.worker.context import NodeContext


def run(  # noqa: PLR0913 - Horovod's arguments, and ours by keyword
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    sc: SparkContext | SparkSession | None = None,
    timeout_s: float | None = None,
    config: ClusterConfig | None = None,
) -> list[Any]:
    """Call a function in `num_proc` processes on the executors; return their values in rank order.

    Inside, `tfos.runner` has `rank()`, `size()`, `barrier()`, `broadcast()`, `allreduce()` and
    `allgather()`, and TF_CONFIG names all ranks. The run ends with the first rank that fails.

    Args:
        fn: called as `fn(*args, **kwargs)` on every rank; may return anything that pickles.
        args: anything that pickles.
        kwargs: anything that pickles.
        num_proc: number of ranks, one task slot each; None: as many as Spark's default parallelism,
            which without a setting of its own is the cores, over spark.task.cpus.
        sc: SparkContext or classic SparkSession; None: the one that runs in this process.
        timeout_s: seconds that fn may take once all ranks run; None: no limit.
        config: timeouts and limits. A lost rank always fails the run.

    Raises:
        SettingsError: the arguments are invalid.
        NotPicklable: fn or its arguments cannot be pickled; the text names the object.
        NotEnoughSlots: Spark cannot run all ranks at once; the text has both numbers.
        NodeFailedError: a rank failed; its own traceback is the cause.
        NoResultError: a rank ended without a value.
        ShutdownTimeout: fn did not return within timeout_s.
    """
    check_time(timeout_s)
    work = checked_work(fn, args, kwargs or {})
    context = sc if sc is not None else active_context()
    count = _count(num_proc, context)
    return run_work(run_rank, work, count, context, config, timeout_s=timeout_s)


def run_work(  # noqa: PLR0913 - what the runners have, by keyword
    main_fun: Callable[[RankWork, NodeContext], None],
    work: RankWork,
    count: int,
    context: Any,
    config: ClusterConfig | None,
    *,
    timeout_s: float | None,
    ps: ServersOf = "tfos",
) -> list[Any]:
    """Run a main_fun that hands over a value on each of `count` ranks; return them in rank order.

    Args:
        main_fun: main_fun of every rank.
        work: its argument.
        count: number of ranks.
        context: SparkContext or classic SparkSession.
        config: as in `run`.
        timeout_s: as in `run`.
        ps: "tensorflow": ranks train with a TensorFlow strategy.

    Raises:
        NotEnoughSlots, NodeFailedError, NoResultError, ShutdownTimeout: as in `run`.
    """
    given = config_of(config)
    every_rank = dataclasses.replace(
        given,
        tolerate_lost_workers=False,
        restarts=dataclasses.replace(given.restarts, workers=0),
    )
    with TFCluster.reserve(context, count, 0, ps=ps, config=every_rank) as cluster:
        cluster.start(main_fun, work)
        try:
            cluster.shutdown(timeout=timeout_s)
        except ShutdownTimeout as late:
            raise late_ranks(late.nodes, timeout_s) from None
    return in_rank_order(cluster.handed_over(), count)


def checked_work(fn: object, args: object, kwargs: object) -> RankWork:
    """Check and return the call that every rank makes.

    Args:
        fn: must be a function.
        args: must be a sequence.
        kwargs: must be a mapping with text keys.

    Raises:
        SettingsError: one of them is of another type.
        NotPicklable: they cannot be pickled.
    """
    if not callable(fn):
        raise SettingsError(f"fn must be a function, got {type(fn).__qualname__}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise SettingsError(f"args must be a tuple or list, got {args!r}; for one write (x,)")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise SettingsError(f"kwargs must be a dict with text keys, got {kwargs!r}")
    pickling.pickle_main_fun(fn, (tuple(args), dict(kwargs)), called="fn")
    return RankWork(fn, tuple(args), dict(kwargs))


def check_time(timeout_s: float | None) -> None:
    """Refuse a value that is neither None nor a valid time.

    Raises:
        SettingsError: names the value.
    """
    if timeout_s is not None:
        check_timeout("timeout_s", timeout_s)


def late_ranks(ranks: str, timeout_s: float | None) -> ShutdownTimeout:
    """Return the error of ranks that did not end in time.

    Args:
        ranks: their names.
        timeout_s: limit of the run.
    """
    return ShutdownTimeout(
        f"the function did not return within timeout_s={timeout_s:.10g} on {ranks}; all ranks were "
        "stopped by force. Pass more seconds, or leave timeout_s out for no limit",
        ranks,
    )


def in_rank_order(values: Mapping[int, bytes], count: int) -> list[Any]:
    """Return what the function returned on each rank.

    Args:
        values: pickles of the values, by rank.
        count: number of ranks.

    Raises:
        NoResultError: a rank has none, or the driver cannot read it.
    """
    missing = [rank for rank in range(count) if rank not in values]
    if missing:
        raise NoResultError(
            f"ranks {', '.join(map(str, missing))} of {count} ended without a value: fn called "
            "sys.exit(0), or, on executors, their Spark task was killed after they had ended"
        )
    return [
        pickling.unpickle_value(values[rank], f"rank {rank}", NoResultError)
        for rank in range(count)
    ]


def _count(num_proc: object, context: Any) -> int:
    if num_proc is None:
        sc = getattr(context, "sparkContext", context)
        conf, count = sc.getConf(), int(sc.defaultParallelism)
        if conf.contains("spark.default.parallelism"):
            return count
        return max(1, count // int(conf.get("spark.task.cpus", "1")))  # Spark has counted cores
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise SettingsError(f"num_proc must be a whole number from 1, got {num_proc!r}")
    return num_proc
