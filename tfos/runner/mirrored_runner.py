"""MirroredStrategyRunner: plain Keras code on N tasks, with spark-tensorflow-distributor's API.

Covers: the arguments, the GPUs of the tasks, a run beside the driver.
Does not: distribute `fit` (mirrored_rank), start ranks (spark_run, local_run).
Runs in: the driver.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfos.config import ClusterConfig, check_flag, config_of
from tfos.errors import SettingsError
from tfos.runner.local_run import run_local
from tfos.runner.mirrored_rank import run_mirrored
from tfos.runner.rank_process import run_rank
from tfos.runner.spark_run import check_time, checked_work, run_work
from tfos.spark.facts import active_context

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


class MirroredStrategyRunner:
    """Runs a function with a plain `model.fit` on Spark's tasks, which train one model together.

    Each step takes one batch of the function's batch size; every slot computes its part, and the
    optimizer applies their mean once. The parameters live in the slots' processes.

    Args:
        num_slots: Spark tasks that train, with one GPU each. With use_custom_strategy=True and
            several GPUs per task, the number of GPUs.
        local_mode: whether to run beside the driver, in one process without Spark; num_slots is
            then 1.
        use_gpu: whether each task sees the GPUs that Spark gave it, or none.
        gpu_resource_name: Spark's name of the GPUs.
        use_custom_strategy: whether train_fn builds TensorFlow's MultiWorkerMirroredStrategy
            itself, from TF_CONFIG; tfos then distributes nothing.
        sc: SparkContext or classic SparkSession; None: the one that runs in this process.
        timeout_s: seconds that train_fn may take once all slots run; None: no limit.
        config: timeouts and limits of a run on the executors. use_gpu and gpu_resource_name replace
            its gpu_resource.

    Raises:
        SettingsError: the arguments cannot work together.
    """

    def __init__(  # noqa: PLR0913  # the distributor's arguments, by keyword
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
        sc: SparkContext | SparkSession | None = None,
        timeout_s: float | None = None,
        config: ClusterConfig | None = None,
    ) -> None:
        check_time(timeout_s)
        _check(
            num_slots,
            local_mode=local_mode,
            use_gpu=use_gpu,
            use_custom_strategy=use_custom_strategy,
        )
        self._has_own_strategy = use_custom_strategy
        self._num_slots = num_slots
        self._local_mode = local_mode
        self._timeout_s = timeout_s
        self._sc = sc
        resource = gpu_resource_name if use_gpu else None
        given = config_of(config)
        if given.gpu_resource not in (ClusterConfig().gpu_resource, resource):
            raise SettingsError(
                f"config=ClusterConfig(gpu_resource={given.gpu_resource!r}) with use_gpu={use_gpu} "
                f"and gpu_resource_name={gpu_resource_name!r}, which say {resource!r}: name the "
                "GPUs by these two arguments, and leave gpu_resource out of config"
            )
        self._config = dataclasses.replace(given, gpu_resource=resource)

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `train_fn(**kwargs)` on every slot and return what the first one returned.

        Args:
            train_fn: builds, compiles and fits one Keras model; its data are the same on all slots,
                arrays or a `tf.data.Dataset`. With use_custom_strategy it may train in any way.
            **kwargs: arguments of train_fn.

        Raises:
            SettingsError: use_gpu is set, but Spark gives tasks no GPU; or the data cannot be
                divided.
            NotPicklable, NotEnoughSlots, NodeFailedError, NoResultError, ShutdownTimeout: as in
                tfos.run. If train_fn trains no model with all slots, NotDistributed is the cause.
        """
        work = checked_work(train_fn, (), kwargs)
        resource = self._config.gpu_resource
        if self._local_mode:
            args = (train_fn, kwargs, resource is not None)
            return run_local(_beside_driver, args, {}, 1, timeout_s=self._timeout_s)[0]
        context = self._sc if self._sc is not None else active_context()
        num_tasks = self._num_slots
        if resource is not None:
            num_gpus = _gpus_of_task(context, resource)
            has_own = self._has_own_strategy
            num_tasks = _tasks(num_tasks, num_gpus, resource, has_own_strategy=has_own)
        given = (work, num_tasks, context, self._config)
        if self._has_own_strategy:
            return run_work(run_rank, *given, timeout_s=self._timeout_s, ps="tensorflow")[0]
        return run_work(run_mirrored, *given, timeout_s=self._timeout_s)[0]


def _beside_driver(train_fn: Callable[..., Any], kwargs: dict[str, Any], use_gpu: bool) -> Any:
    if not use_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    return train_fn(**kwargs)


def _check(num_slots: object, *, local_mode: object, **switches: object) -> None:
    if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
        raise SettingsError(f"num_slots must be a whole number from 1, got {num_slots!r}")
    for name, value in {"local_mode": local_mode, **switches}.items():
        check_flag(name, value)
    if local_mode and num_slots > 1:
        raise SettingsError(
            f"local_mode=True trains in one process beside the driver, got num_slots={num_slots}: "
            "use num_slots=1, or local_mode=False with Spark's master local[N] to try N slots on "
            "this host"
        )


def _gpus_of_task(context: Any, resource: str) -> float:
    """Return the number of GPUs that Spark gives a task, above 0.

    Raises:
        SettingsError: Spark gives none.
    """
    spark = getattr(context, "sparkContext", context)
    setting = _amount_of(resource)
    amount = spark.getConf().get(setting)
    try:
        num_gpus = float(amount or 0)
    except ValueError:
        num_gpus = 0.0
    if not num_gpus > 0:
        raise SettingsError(
            f"use_gpu=True, and {setting} is {amount!r}: Spark gives no {resource!r} to a task. "
            f"Set it to 1 beside spark.executor.resource.{resource}.amount, name Spark's resource "
            "by gpu_resource_name, or pass use_gpu=False"
        )
    return num_gpus


def _tasks(num_slots: int, num_gpus: float, resource: str, *, has_own_strategy: bool) -> int:
    """Return the number of tasks that train.

    Args:
        num_slots: the user's num_slots.
        num_gpus: GPUs per task.
        resource: Spark's name of the GPUs.
        has_own_strategy: whether train_fn's strategy takes all GPUs of a task; tfos' `fit` trains
            on one.

    Raises:
        SettingsError: the result is not an integer.
    """
    if num_gpus <= 1:
        return num_slots
    found = f"{_amount_of(resource)} is {num_gpus:g}, and num_slots={num_slots}"
    if not has_own_strategy:
        warnings.warn(
            f"{found}: fit trains on one GPU of each task. Unless train_fn uses the others, set "
            "the former to 1; num_slots is then the number of GPUs that train",
            stacklevel=3,
        )
        return num_slots
    if num_slots % num_gpus:
        raise SettingsError(
            f"{found}, which counts GPUs and is no multiple of it: the strategy takes all GPUs of "
            "a task. Give a multiple, or set the former to 1"
        )
    return int(num_slots // num_gpus)


def _amount_of(resource: str) -> str:
    return f"spark.task.resource.{resource}.amount"
