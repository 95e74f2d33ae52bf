"""Facts about the driver's SparkContext: where it runs, and its settings.

Covers: the few reads of Spark's JVM side, each in one place.
Does not: read executors (tfos.slots.reading), judge (tfos.driver.preflight) or run jobs
(tfos.spark.jobs).
Threads: any; py4j gives each Python thread its own JVM thread.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfos.errors import SettingsError, UnsupportedError
from tfos.files.paths import OutputPlace
from tfos.spark.shares import NodeShare

LOOPBACK = "127.0.0.1"
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,")
_TASK_RESOURCE = re.compile(r"spark\.task\.resource\.([^.]+)\.amount")


@dataclass(frozen=True, slots=True)
class SparkFacts:
    """Settings of the SparkContext that the cluster is built on."""

    master: str
    app_name: str
    conf: Mapping[str, str]
    default_fs: str
    application_id: str = ""
    ui_url: str = ""
    """URL of Spark's own page; empty: it has none."""

    @property
    def is_local(self) -> bool:
        """Whether every executor is on the driver's host by definition."""
        return self.master.startswith("local")

    @property
    def is_in_driver(self) -> bool:
        """Whether tasks are threads of the driver's Java."""
        return self.is_local and not self.master.startswith("local-cluster")

    @property
    def is_dynamic(self) -> bool:
        """Whether Spark adds and removes executors; it never does so within the driver's Java."""
        return not self.is_in_driver and is_true(self.conf, "spark.dynamicAllocation.enabled")

    @property
    def is_speculative(self) -> bool:
        """Whether Spark starts a slow task twice; it never does so within the driver's Java."""
        return not self.is_in_driver and is_true(self.conf, "spark.speculation")

    @property
    def task_resources(self) -> dict[str, float]:
        """What each task takes beside cores, by Spark's name."""
        found = ((_TASK_RESOURCE.fullmatch(key), value) for key, value in self.conf.items())
        return {match[1]: float(value) for match, value in found if match}

    def counted_resource(self, gpu_resource: str | None) -> str:
        """Return Spark's name of the GPUs; "": there are none. Hidden ones take part of slots, too.

        Args:
            gpu_resource: the cluster's setting; None: no node sees GPUs.
        """
        return gpu_resource or next(iter(self.task_resources), "")

    def task_share(self, gpu_resource: str | None) -> NodeShare:
        """Return what a task takes of its executor without a profile.

        Args:
            gpu_resource: the cluster's setting.
        """
        gpus = self.task_resources.get(self.counted_resource(gpu_resource), 0.0)
        return NodeShare(math.ceil(float(self.conf.get("spark.task.cpus", "1"))), gpus)

    @property
    def task_attempts(self) -> int:
        """Attempts of a task that Spark makes before it fails the job."""
        return int(self.conf.get("spark.task.maxFailures", "4"))

    @property
    def driver_host(self) -> str:
        """The address at which nodes reach the driver; Spark has an IPv6 one in brackets."""
        host = self.conf.get("spark.driver.host", LOOPBACK)
        return LOOPBACK if self.is_local else host.strip("[]")

    @property
    def bind_host(self) -> str:
        """The address that a server in the driver binds unless the environment names another."""
        return self.bind_address or self.driver_host

    @property
    def bind_address(self) -> str:
        """The address that the user has Spark bind, where nodes come from other hosts."""
        return "" if self.is_local else self.conf.get("spark.driver.bindAddress", "").strip("[]")

    @property
    def expected_executors(self) -> int | None:
        """Number of executors that Spark keeps on its own; None: the configuration has none."""
        match = _LOCAL_CLUSTER.match(self.master)
        if match and not self.is_dynamic:
            return int(match.group(1))
        if self.is_in_driver:
            return 1
        if (fixed := fixed_executors(self.conf)) is not None:
            return fixed
        is_managed = self.master.startswith(("yarn", "k8s"))
        if self.is_dynamic:  # as Spark adds them up; it ignores its default of instances here
            names = ["dynamicAllocation.minExecutors"]
            if is_managed:  # others have their executors at once
                names += ["dynamicAllocation.initialExecutors", "executor.instances"]
            return max(int(self.conf.get(f"spark.{name}", "0")) for name in names) or None
        if is_managed:
            return int(self.conf.get("spark.executor.instances", "2"))
        return None

    @property
    def may_have_more(self) -> bool:
        """Whether Spark may have more executors than `expected_executors`."""
        return self.is_dynamic and fixed_executors(self.conf) is None

    @property
    def allowed_slots(self) -> int | None:
        """Slots that a standalone master may give at most; None: the configuration has no limit."""
        most = self.conf.get("spark.cores.max")
        if most is None or not self.master.startswith("spark://"):
            return None
        task = self.task_share(None).cores
        executor = int(self.conf.get("spark.executor.cores", 0)) or task
        return int(most) // executor * (executor // task)

    @property
    def takes_all_cores(self) -> bool:
        """Whether a standalone master gives this application whatever others leave.

        Spark knows of none of these executors before it registers.
        """
        is_limited = self.is_dynamic or "spark.cores.max" in self.conf
        return self.master.startswith("spark://") and not is_limited

    @property
    def driver_in_container(self) -> bool:
        """Whether the cluster manager runs the driver, on a host of its choice."""
        return self.conf.get("spark.submit.deployMode") == "cluster" or is_true(
            self.conf, "spark.kubernetes.submitInDriver"
        )

    @property
    def output_place(self) -> OutputPlace:
        """What decides where a path of this driver leads."""
        return OutputPlace(self.default_fs, os.getcwd(), self.driver_in_container)

    @property
    def rpc_is_encrypted(self) -> bool:
        """Whether Spark's own RPC, which carries the nodes' keys, is encrypted."""
        return any(
            is_true(self.conf, key)
            for key in (
                "spark.network.crypto.enabled",
                "spark.authenticate.enableSaslEncryption",
                "spark.ssl.rpc.enabled",
            )
        )

    @property
    def files_are_encrypted(self) -> bool:
        """Whether Spark encrypts what it writes to disk: nodes' keys pass through such a file."""
        return is_true(self.conf, "spark.io.encryption.enabled")


def is_true(conf: Mapping[str, str], key: str) -> bool:
    """Whether a setting of Spark is on.

    Args:
        conf: Spark's settings.
        key: its name.
    """
    return conf.get(key, "false").strip().lower() == "true"


def fixed_executors(conf: Mapping[str, str]) -> int | None:
    """Return how many executors dynamic allocation keeps where that number is fixed, else None.

    Args:
        conf: Spark's settings.
    """
    if not is_true(conf, "spark.dynamicAllocation.enabled"):
        return None
    least = conf.get("spark.dynamicAllocation.minExecutors", "0")
    most = conf.get("spark.dynamicAllocation.maxExecutors", "")
    return int(least) if least == most and int(least) > 0 else None


def classic_context(spark: Any) -> Any:
    """Return the SparkContext behind what the user passed: a context or a classic session.

    Raises:
        UnsupportedError: a Spark Connect session or no Spark object at all.
    """
    kind = type(spark)
    _refuse_connect(spark)
    if hasattr(spark, "sparkContext") and not hasattr(spark, "parallelize"):
        spark = spark.sparkContext
    if not hasattr(spark, "parallelize") or not hasattr(spark, "_jsc"):
        raise UnsupportedError(
            f"sc must be a SparkContext or a classic SparkSession, got {kind.__qualname__}."
        )
    check_running(spark)
    return spark


def _refuse_connect(session: Any) -> None:
    if type(session).__module__.startswith("pyspark.sql.connect"):
        raise _no_classic()


def _no_classic() -> UnsupportedError:
    return UnsupportedError(
        "a classic SparkContext is needed, and this session is of Spark Connect (remote(), "
        "SPARK_REMOTE or spark.api.mode=connect). Leave these out: run the driver with "
        "spark-submit, or make the session with master(...) and spark.api.mode=classic"
    )


def active_context() -> Any:
    """Return the SparkContext of this process.

    Raises:
        SettingsError: there is none.
        UnsupportedError: there is none, but the program uses Spark Connect.
    """
    from pyspark import SparkContext
    from pyspark.sql import is_remote

    context = SparkContext._active_spark_context
    if context is None and is_remote():
        raise _no_classic()
    if context is None:
        raise SettingsError(
            "there is no SparkContext in this process: create one first, for example by "
            "SparkSession.builder.getOrCreate(), or pass it as sc= where the call has that argument"
        )
    return context


def active_session() -> Any:
    """Return the SparkSession of this thread, or one of this process's SparkContext.

    Raises:
        SettingsError: there is neither.
        UnsupportedError: it is of Spark Connect.
    """
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    _refuse_connect(found)
    return found or SparkSession(active_context())


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


def running_tasks(spark: Any) -> dict[str, int]:
    """Return how many tasks each executor runs, by its id; `spark` is Java's SparkContext."""
    busy = {}
    running = spark.taskScheduler().runningTasksByExecutors().iterator()
    while running.hasNext():
        entry = running.next()
        busy[str(entry._1())] = int(entry._2())
    return busy


def num_ending_tasks(sc: Any) -> int:
    """Return how many tasks run for no stage: Spark ends a job before its cancelled tasks end.

    The status store, which is seconds late on a busy host, does not tell them apart.
    """
    return _ending_in(sc._jsc.sc().taskScheduler().rootPool())


def _ending_in(pool: Any) -> int:
    ending, members = 0, pool.schedulableQueue().iterator()
    while members.hasNext():
        member = members.next()
        if member.schedulableQueue() is not None:  # a pool of spark.scheduler.mode=FAIR
            ending += _ending_in(member)
        elif member.isZombie():
            ending += int(member.runningTasks())
    return ending


def num_free_slots(sc: Any) -> int:
    """Return how many more tasks the executors would start; nodes hold the slots of their tasks."""
    spark = sc._jsc.sc()
    busy = running_tasks(spark)
    summaries = spark.statusStore().executorList(True).iterator()
    free = 0
    while summaries.hasNext():
        summary = summaries.next()
        free += max(0, int(summary.maxTasks()) - busy.get(str(summary.id()), 0))
    return free
