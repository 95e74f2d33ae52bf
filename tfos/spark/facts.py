"""Facts about the driver's SparkContext: where it runs, its settings, its executors.

Covers: the few reads of Spark's JVM side, each in one place.
Does not: judge them (tfos.driver.preflight, slots) or run jobs (tfos.spark.jobs).
Threads: any; py4j gives each Python thread its own JVM thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfos.errors import SettingsError, UnsupportedError
from tfos.files.paths import OutputPlace
from tfos.spark.slots import ExecutorSlots, Offer

LOOPBACK = "127.0.0.1"
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,")


@dataclass(frozen=True, slots=True)
class SparkFacts:
    """Settings of the SparkContext that the cluster is built on."""

    master: str
    app_name: str
    conf: Mapping[str, str]
    default_fs: str
    application_id: str = ""
    ui_url: str = ""
    """Of Spark's own page; empty: it has none."""

    @property
    def is_local(self) -> bool:
        """Whether every executor is on the driver's host by definition."""
        return self.master.startswith("local")

    @property
    def driver_host(self) -> str:
        """The address at which nodes reach the driver."""
        return LOOPBACK if self.is_local else self.conf.get("spark.driver.host", LOOPBACK)

    @property
    def bind_host(self) -> str:
        """The address that the control server binds."""
        if self.is_local:
            return LOOPBACK
        return self.conf.get("spark.driver.bindAddress") or self.driver_host

    @property
    def loopback(self) -> bool:
        """Whether nodes may bind loopback: they all run on the driver's host."""
        return self.is_local

    @property
    def expected_executors(self) -> int | None:
        """Number of configured executors, or None if the configuration has none."""
        match = _LOCAL_CLUSTER.match(self.master)
        if match:
            return int(match.group(1))
        if self.is_local:
            return 1
        if self.master.startswith(("yarn", "k8s")):
            return int(self.conf.get("spark.executor.instances", "2"))
        return None

    @property
    def driver_in_container(self) -> bool:
        """Whether the cluster manager runs the driver, on a host of its choice."""
        return (
            self.conf.get("spark.submit.deployMode") == "cluster"
            or self.conf.get("spark.kubernetes.submitInDriver", "false").lower() == "true"
        )

    @property
    def output_place(self) -> OutputPlace:
        """What decides where a path of this driver leads."""
        return OutputPlace(self.default_fs, os.getcwd(), self.driver_in_container)

    @property
    def rpc_is_encrypted(self) -> bool:
        """Whether Spark's own RPC, which carries the nodes' keys, is encrypted."""
        return any(
            self.conf.get(key, "false").lower() == "true"
            for key in (
                "spark.network.crypto.enabled",
                "spark.authenticate.enableSaslEncryption",
                "spark.ssl.rpc.enabled",
            )
        )

    @property
    def files_are_encrypted(self) -> bool:
        """Whether Spark encrypts what it writes to disk: nodes' keys pass through a file of it."""
        return self.conf.get("spark.io.encryption.enabled", "false").lower() == "true"


def classic_context(spark: Any) -> Any:
    """Return the SparkContext behind what the user passed: a context or a classic session.

    Raises:
        UnsupportedError: a Spark Connect session or no Spark object at all.
    """
    kind = type(spark)
    if kind.__module__.startswith("pyspark.sql.connect"):
        raise UnsupportedError(
            "RDD feeding needs a classic SparkContext; a Spark Connect session was passed "
            "(spark.api.mode=connect or SPARK_REMOTE). Run the driver with spark-submit, or set "
            "spark.api.mode=classic."
        )
    if hasattr(spark, "sparkContext") and not hasattr(spark, "parallelize"):
        spark = spark.sparkContext
    if not hasattr(spark, "parallelize") or not hasattr(spark, "_jsc"):
        raise UnsupportedError(
            f"sc must be a SparkContext or a classic SparkSession, got {kind.__qualname__}."
        )
    check_running(spark)
    return spark


def active_context() -> Any:
    """Return the SparkContext of this process.

    Raises:
        SettingsError: there is none.
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise SettingsError(
            "there is no SparkContext in this process: make one first, such as "
            "SparkSession.builder.getOrCreate(), or pass it as sc= where the call has that argument"
        )
    return context


def active_session() -> Any:
    """Return the SparkSession of this thread, or one of this process's SparkContext.

    Raises:
        SettingsError: there is neither.
    """
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession(active_context())


def check_running(spark: Any) -> None:
    """Refuse a stopped SparkContext."""
    if spark._jsc is None:
        raise UnsupportedError("the SparkContext is stopped; create a new one.")


def read_facts(sc: Any) -> SparkFacts:
    """Return the settings of a SparkContext."""
    hadoop = sc._jsc.hadoopConfiguration()
    return SparkFacts(
        master=sc.master,
        app_name=sc.appName,
        conf=dict(sc.getConf().getAll()),
        default_fs=hadoop.get("fs.defaultFS") or "file:///",
        application_id=sc.applicationId,
        ui_url=sc.uiWebUrl or "",
    )


def max_result_bytes(sc: Any) -> int:
    """Return spark.driver.maxResultSize, of one job's results at the driver; 0: no limit."""
    return int(sc._jsc.sc().conf().getSizeAsBytes("spark.driver.maxResultSize", "1g"))


def read_offer(sc: Any, facts: SparkFacts) -> Offer:
    """Return the executors with their slots and running tasks.

    The status store knows cores, but its counts of active tasks lag behind (measured: 0 while two
    tasks ran); the scheduler's are exact.

    Args:
        sc: the SparkContext.
        facts: what was read before the cluster began.
    """
    check_running(sc)
    spark = sc._jsc.sc()
    busy: dict[str, int] = {}
    running = spark.taskScheduler().runningTasksByExecutors().iterator()
    while running.hasNext():
        entry = running.next()
        busy[entry._1()] = int(entry._2())
    executors = []
    summaries = spark.statusStore().executorList(True).iterator()
    while summaries.hasNext():
        summary = summaries.next()
        slots = int(summary.maxTasks())
        if slots:
            name = str(summary.id())
            host = str(summary.hostPort()).rpartition(":")[0]
            executors.append(ExecutorSlots(name, host, slots, busy.get(name, 0)))
    return Offer(tuple(executors), facts.expected_executors)
