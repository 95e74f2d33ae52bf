"""A SparkContext without Spark: slots, jobs and tags in this process, nodes that follow the driver.

What runs against it is the real TFCluster, its jobs, its coordinator and its control server over
mutual TLS; only Spark, the supervisors and the rows are played.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from feeding.sender.task import FeedReport
from rpc.endpoint import Endpoint
from tfos.control import messages
from tfos.control.client import ControlClient
from tfos.errors import ControlError
from tfos.failure import NodeFailure, NodeId
from tfos.node.spec import NodeBundle
from tfos.node.task import NodeResult, NodeTask

WAIT_S = 60.0
_NOWHERE = Endpoint("127.0.0.1", 1)


class FakeSpark:
    """Counts as a classic SparkContext in local mode.

    Args:
        slots: of its one executor.
        register: called by a node's task before it registers; may raise or wait.
    """

    master = "local[8]"
    appName = "fake"
    applicationId = "fake-1"
    uiWebUrl: str | None = None

    def __init__(
        self, slots: int = 8, *, register: Callable[[NodeBundle], None] = lambda bundle: None
    ) -> None:
        self.slots = slots
        self.register = register
        self.busy = 0
        self.on_look: Callable[[], object] = lambda: None
        """Called when somebody counts slots."""
        self.nodes: list[FakeNode] = []
        self.pools: list[str] = []
        """Scheduler pool of every job, in order of their start."""
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._running: dict[int, tuple[str, threading.Event]] = {}
        self._ids = itertools.count()
        self._jsc: FakeJava | None = FakeJava(self)
        runtime = types.SimpleNamespace(maxMemory=lambda: 1 << 34)
        lang = types.SimpleNamespace(Runtime=types.SimpleNamespace(getRuntime=lambda: runtime))
        self._jvm = types.SimpleNamespace(java=types.SimpleNamespace(lang=lang))

    def close(self) -> None:
        """End what a test left."""
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.join()

    # ---- SparkContext ----

    def getConf(self) -> Any:
        return types.SimpleNamespace(getAll=list)

    def stop(self) -> None:
        self._jsc = None

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool) -> None:
        self.setLocalProperty("spark.jobGroup.id", group)

    def addJobTag(self, tag: str) -> None:
        self._thread.tag = tag

    def cancelJobsWithTag(self, tag: str) -> None:
        self._cancel(lambda mine: mine == tag)

    def cancelAllJobs(self) -> None:
        self._cancel(lambda mine: True)

    def setLocalProperty(self, key: str, value: str | None) -> None:
        self._thread.properties = {**self.properties, key: value}

    def getLocalProperty(self, key: str) -> str | None:
        return self.properties.get(key)

    def parallelize(self, elements: list[Any], num_slices: int) -> FakeRdd:
        assert len(elements) == num_slices
        return FakeRdd(self, elements)

    # ---- inside ----

    @property
    def properties(self) -> dict[str, str]:
        return getattr(self._thread, "properties", {})

    @properties.setter
    def properties(self, properties: dict[str, str]) -> None:
        self._thread.properties = properties

    def run_nodes(self, task: NodeTask, bundles: list[NodeBundle]) -> list[NodeResult]:
        with self._job(len(bundles)) as cancelled:
            nodes = [FakeNode(task, bundle, self.register) for bundle in bundles]
            self.nodes += nodes
            while not cancelled.wait(0.005):
                if all(node.may_leave for node in nodes):
                    return [NodeResult(name=node.name, outcome="ended") for node in nodes]
            raise RuntimeError("Job 1 cancelled as part of cancellation of all jobs")

    def run_feed(self, rdd: FakeRdd) -> list[Any]:
        with self._job(1) as cancelled:
            rdd.started.set()
            while not rdd.gate.wait(0.005):
                if cancelled.is_set():
                    raise RuntimeError("Job 1 cancelled as part of cancellation of all jobs")
            return [FeedReport(0, rows=len(rdd.elements))]

    def _job(self, num_tasks: int) -> _Job:
        return _Job(self, num_tasks, self._thread.tag)

    def _cancel(self, which: Callable[[str], bool]) -> None:
        with self._lock:
            for tag, cancelled in self._running.values():
                if which(tag):
                    cancelled.set()


class _Job:
    """A running job: holds slots, can be cancelled by its tag."""

    def __init__(self, spark: FakeSpark, num_tasks: int, tag: str) -> None:
        self._spark, self._num_tasks, self._tag = spark, num_tasks, tag

    def __enter__(self) -> threading.Event:
        spark = self._spark
        spark.pools.append(spark.properties.get("spark.scheduler.pool", ""))
        cancelled = threading.Event()
        with spark._lock:
            self._id = next(spark._ids)
            spark.busy += self._num_tasks
            spark._running[self._id] = (self._tag, cancelled)
        return cancelled

    def __exit__(self, *exc_info: object) -> None:
        with self._spark._lock:
            self._spark.busy -= self._num_tasks
            del self._spark._running[self._id]


class FakeRdd:
    """Rows that are fed once `gate` is set, which it is unless a test clears it."""

    def __init__(self, spark: FakeSpark, elements: list[Any]) -> None:
        self.elements = elements
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._spark = spark

    def _is_pipelinable(self) -> bool:
        return True  # so its rows are no pickled batches of Spark's

    def mapPartitionsWithIndex(self, task: Any) -> Any:
        if isinstance(task, NodeTask):
            return types.SimpleNamespace(collect=lambda: self._spark.run_nodes(task, self.elements))
        return types.SimpleNamespace(collect=lambda: self._spark.run_feed(self), task=task)


class FakeNode:
    """A supervisor and its child: it follows orders, and a worker ends with its feeds."""

    def __init__(
        self, task: NodeTask, bundle: NodeBundle, register: Callable[[NodeBundle], None]
    ) -> None:
        self.name = bundle.name
        self.returns = True
        """Whether main_fun returns when its feeds end."""
        self.stops = True
        """Whether it follows the order to stop."""
        self.heard: list[messages.Order] = []
        self.started = threading.Event()
        self.ended = threading.Event()
        self._task, self._bundle, self._register = task, bundle, register
        self._node = NodeId(bundle.node.role, bundle.node.index, task.first_attempt)
        self._client: ControlClient | None = None
        self._num_events = 0
        self._reporting = threading.Lock()
        """The thread of orders, this fake's own and the test's report; events have an order."""
        self._thread = threading.Thread(target=self._run, name=f"fake-{self.name}", daemon=True)
        self._thread.start()

    @property
    def may_leave(self) -> bool:
        return self.ended.is_set() or (self.started.is_set() and not self._task.hold_slot)

    def stop(self) -> None:
        self.ended.set()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def fail(self, text: str) -> None:
        """Raise in main_fun."""
        failure = NodeFailure(
            self._node, "h", 7, error_type="ValueError", message=text, traceback="T"
        )
        self._report(messages.Failed(failure))

    def _report(self, event: messages.Event) -> None:
        assert self._client is not None
        with self._reporting:
            self._num_events += 1
            self._client.report(event, self._num_events, timeout_s=WAIT_S)

    def _run(self) -> None:
        bundle = self._bundle
        try:
            self._register(bundle)
            self._client = client = ControlClient(
                bundle.settings.driver_address,
                bundle.settings.cluster_id,
                self._node,
                bundle.control_keys,
            )
            with client:
                register = messages.Register(self._node, "0", "h", 7)
                if client.register(register, timeout_s=WAIT_S).accepted:
                    client.orders(self._carry_out, lambda reason: self.ended.set())
                    self._report(messages.Listening(_NOWHERE))
                    self.ended.wait(WAIT_S)
        except ControlError:
            pass  # the driver has closed its control plane
        finally:
            self.ended.set()

    def _carry_out(self, order: messages.Order) -> None:
        self.heard.append(order)
        for answer in self._answers(order):
            try:
                self._report(answer)
            except ControlError:
                self.ended.set()

    def _answers(self, order: messages.Order) -> Iterator[messages.Event]:
        match order:
            case messages.Start():
                self.started.set()
                yield messages.PhaseChanged("main_fun")
            case messages.Flush(feed=feed, epoch=epoch):
                yield messages.FlushReached(feed, epoch)
            case messages.FinishFeed() if self._node.role != "ps" and self.returns:
                yield messages.Done()
            case messages.Stop() if self.stops:
                self.ended.set()


class FakeJava:
    """The few Java methods that tfos calls on a SparkContext."""

    def __init__(self, spark: FakeSpark) -> None:
        self._spark = spark

    def sc(self) -> FakeJava:
        return self

    taskScheduler = statusStore = rootPool = sc

    def hadoopConfiguration(self) -> dict[str, str]:
        return {}

    def conf(self) -> Any:
        return types.SimpleNamespace(
            contains=lambda key: False,
            set=lambda key, value: None,
            remove=lambda key: None,
            getSizeAsBytes=lambda key, default: 1 << 30,
        )

    def getLocalProperties(self) -> Any:
        properties = dict(self._spark.properties)
        return types.SimpleNamespace(clone=lambda: properties)

    def setLocalProperties(self, properties: dict[str, str]) -> None:
        self._spark.properties = properties

    def runningTasksByExecutors(self) -> Any:
        self._spark.on_look()
        busy = self._spark.busy
        return _JavaList([types.SimpleNamespace(_1=lambda: "driver", _2=lambda: busy)])

    def schedulableQueue(self) -> _JavaList:
        return _JavaList([])

    def executorList(self, only_active: bool) -> Any:
        slots = self._spark.slots
        return _JavaList(
            [
                types.SimpleNamespace(
                    id=lambda: "driver",
                    hostPort=lambda: "h:1",
                    maxTasks=lambda: slots,
                    resourceProfileId=lambda: 0,
                )
            ]
        )


class _JavaList:
    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def iterator(self) -> _JavaList:
        return self

    def hasNext(self) -> bool:
        return bool(self._items)

    def next(self) -> Any:
        return self._items.pop(0)
