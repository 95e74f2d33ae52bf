"""Node jobs: the Spark jobs that start nodes, one per role, parameter servers first.

With driver_ps_nodes each parameter server has a thread in the driver instead of a job.

Covers: bundles with each node's own keys, the jobs.
Does not: run on executors (tfos.node.task), decide about nodes (tfos.control.state).
Runs in: the driver.
Threads: `start` and `end` from any; a start that `end` overtakes submits nothing more. Each job
reports its end on its own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from rpc.auth.handshake import Identity, Role
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.control.state.actions import Replace
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.job_end import JobEnd
from tfos.node import versions
from tfos.node.spec import NodeBundle, NodeSettings
from tfos.node.task import NodeTask
from tfos.phases import ClusterPhase
from tfos.slots.profiles import NodePlaces, spark_profile
from tfos.spark.jobs import (
    JVM_ENDED,
    SparkJob,
    advised_reason_of,
    failed_task_of,
    inheriting,
    jvm_has_ended,
    was_cancelled,
)
from tfos.spark.node_rdd import node_rdd
from tfos.topology import Plan, PlannedNode

_NOT_BROUGHT = (
    "Spark had not brought them when their job was cancelled. Raise spark.driver.memory if its log "
    "has an OutOfMemoryError, or save large values and return their paths"
)


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """What node tasks need to prove that they belong to this cluster."""

    authority: ClusterAuthority = field(repr=False)
    rpc_secret: bytes = field(repr=False)

    def bundle(self, node: PlannedNode, settings: NodeSettings, main_fun: bytes) -> NodeBundle:
        """Return what the task of one node receives.

        Args:
            node: the node from the plan.
            settings: the same for all nodes.
            main_fun: the pickled function and its arguments.
        """
        roles = [Role.SERVER if node.is_ps else Role.WORKER]
        if not settings.num_ps and node.runs_main_fun and not node.is_evaluator:
            roles.append(Role.SERVER)  # of its own shard: see tfos.worker.own_shard
        peers = [str(Identity(role, node.rank)) for role in roles]
        over_tls = settings.config.security == "tls"
        return NodeBundle(
            node=node,
            settings=settings,
            control_keys=self.authority.node(node.name),
            # None for TensorFlow's servers: they have no login, and no use for it.
            rpc_secret=b"" if node.serves_tensorflow else self.rpc_secret,
            data_tls=(
                self.authority.data_node(*peers)
                if over_tls and not node.serves_tensorflow
                else None
            ),
            main_fun=main_fun if node.runs_main_fun else b"",
        )


class NodeJobs:
    """The jobs of one cluster's nodes.

    Args:
        sc: the SparkContext.
        coordinator: gets the failure when a job ends too early.
        keys: keys of the nodes.
        settings: settings of the nodes.
        places: executors and resource profiles of the nodes' tasks.
        on_cancel: called on a job's thread when somebody else has cancelled it under nodes that
            run, as pyspark does at Ctrl-C; stops the nodes, which live on without their tasks.
    """

    def __init__(
        self,
        sc: Any,
        coordinator: Coordinator,
        keys: NodeKeys,
        settings: NodeSettings,
        *,
        places: NodePlaces,
        on_cancel: Callable[[], object],
    ) -> None:
        self._sc = sc
        self._coordinator = coordinator
        self._keys = keys
        self._settings = settings
        self._places = places
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._is_ended = False
        self._jobs: dict[SparkJob[list[Any]], tuple[PlannedNode, ...]] = {}
        """The jobs with their nodes, in the order of their start."""
        self._main_fun = b""
        self._workers_hold_slots = True
        self._submit_as_user = SparkJob.start
        """Submits in the scheduler pool of the user's thread, from any thread."""

    def start(self, plan: Plan, main_fun: bytes, *, workers_hold_slots: bool) -> None:
        """Submit the jobs; nodes register when their tasks run.

        Args:
            plan: the nodes.
            main_fun: pickled, with its arguments.
            workers_hold_slots: whether a worker's task stays as long as its node.
        """
        self._main_fun, self._workers_hold_slots = main_fun, workers_hold_slots
        self._submit_as_user = inheriting(self._sc, SparkJob.start)
        self._coordinator.replace_by(self._restart_soon)
        self._coordinator.act(ClusterState.begin_start)
        servers = [("ps", plan.servers)]
        if plan.servers_at_driver:
            servers = [(f"ps-{node.index}", (node,)) for node in plan.servers]
        for role, nodes in (
            *servers,
            *_by_role(plan.tensorflow_servers),
            ("workers", plan.workers),
            ("evaluator", plan.evaluators),
        ):
            if not nodes:
                continue
            job = self._job(role, nodes, is_here=plan.servers_at_driver and nodes[0].is_ps)
            with self._lock:
                if self._is_ended:
                    return
                job.start()
                self._jobs[job] = nodes

    def _restart_soon(self, wanted: Replace) -> None:
        timer = threading.Timer(wanted.delay_s, self._restart, (wanted,))
        timer.name, timer.daemon = f"tfos-restart-{wanted.node.name}", True
        timer.start()

    def _restart(self, wanted: Replace) -> None:
        """Submit a job for one node; Spark gives it a slot when there is one."""
        node = wanted.node
        job = self._job(
            f"{node.role}-{node.index}-{wanted.first_attempt}",
            (node,),
            first_attempt=wanted.first_attempt,
        )
        with self._lock:
            if self._is_ended:
                return
            try:
                self._submit_as_user(job)
            except Exception as error:  # noqa: BLE001 - py4j's many; Spark takes no job any more
                reason, now_s = f"Spark took no job: {error}", self._coordinator.now_s()
                self._coordinator.act(
                    lambda state: state.on_not_restarted(node.name, reason, now_s)
                )
            else:
                self._jobs[job] = (node,)

    def end(self, timeout_s: float) -> bool:
        """Wait for the jobs of nodes that were told to stop, then cancel the rest by tag.

        Returns:
            Whether every job ended on its own or was cancelled.
        """
        with self._lock:
            self._is_ended = True
        deadline_s = time.monotonic() + timeout_s
        patience_s = time.monotonic() + timeout_s / 2
        for job in self._jobs:
            job.join(max(0.0, patience_s - time.monotonic()))
        for job in self._jobs:
            if not job.is_ended:
                job.cancel(max(0.1, deadline_s - time.monotonic()))
        return all(job.is_ended for job in self._jobs)

    def is_bringing(self, ended: Collection[str]) -> bool:
        """Whether Spark still brings the results of nodes that have all ended.

        Args:
            ended: names of the nodes that have ended in order.
        """
        return any(
            not job.is_ended and all(node.name in ended for node in nodes)
            for job, nodes in self._jobs.copy().items()  # a restart may add one
        )

    def values(self) -> dict[str, bytes]:
        """Return, by node, what main_fun has handed over to its task; once the jobs have ended.

        A node whose task failed or was cancelled has none.
        """
        ended = [job for job in self._jobs if job.is_ended and job.error is None]
        return {result.name: result.value for job in ended for result in job.result()}

    def lost_values(self) -> dict[str, str]:
        """Return, by node, why Spark brought nothing of it; once the jobs have ended.

        A failed or cancelled job loses the values of all its nodes, also of those that ended well.
        """
        return {
            node.name: reason
            for job, nodes in self._jobs.items()
            if (reason := _loss_of(self._sc, job))
            for node in nodes
        }

    def _bundles(self, nodes: tuple[PlannedNode, ...]) -> list[NodeBundle]:
        profiles = self._places.profiles
        return [
            replace(
                self._keys.bundle(node, self._settings, self._main_fun),
                threads=profile.threads if (profile := profiles.of(node)) else 0,
                shares_gpus=profiles.share_of(node).gpus % 1 != 0,
            )
            for node in nodes
        ]

    def _rdd(
        self, nodes: tuple[PlannedNode, ...], bundles: list[NodeBundle], task: NodeTask
    ) -> Any:
        """Return the RDD whose tasks run the nodes: one element and partition, so one key, each."""
        locations = self._places.locations
        # A node that is started again goes where Spark has a slot: its first executor may be gone.
        places = ["" if task.first_attempt else locations.get(node.name, "") for node in nodes]
        rdd = node_rdd(self._sc, bundles, places).mapPartitionsWithIndex(task)
        profile = self._places.profiles.of(nodes[0])
        return rdd if profile is None else rdd.withResources(spark_profile(self._sc, profile))

    def _job(
        self,
        role: str,
        nodes: tuple[PlannedNode, ...],
        *,
        is_here: bool = False,
        first_attempt: int = 0,
    ) -> SparkJob[list[Any]]:
        bundles = self._bundles(nodes)
        hold = self._workers_hold_slots or not nodes[0].runs_main_fun
        task = NodeTask(hold_slot=hold, versions=versions.installed(), first_attempt=first_attempt)

        def run() -> list[Any]:
            return list(self._rdd(nodes, bundles, task).collect())

        def run_here() -> list[Any]:
            return [task.at_driver(bundle) for bundle in bundles]

        def ended(job: SparkJob[list[Any]]) -> None:
            if job.is_cancelled:
                return
            end = _end_of(self._sc, job, nodes, first_attempt)
            now_s = self._coordinator.now_s()
            self._coordinator.act(lambda state: state.on_job_ended(end, now_s))
            if end.is_cancelled and self._coordinator.phase is ClusterPhase.FAILED:
                self._on_cancel()

        names = ", ".join(node.name for node in nodes)
        cluster_id = self._settings.cluster_id
        tag = f"tfos-{cluster_id}-{role}"
        action = run_here if is_here else run
        return SparkJob(self._sc, tag, f"tfos {cluster_id}: {names}", action, ended)


def _loss_of(sc: Any, job: SparkJob[list[Any]]) -> str:
    """Return why a job that has ended brought nothing; "" if it brought its results."""
    if job.is_cancelled:
        return _NOT_BROUGHT
    return "" if job.error is None else _reason_of(sc, job.error)


def _reason_of(sc: Any, error: BaseException) -> str:
    return JVM_ENDED if jvm_has_ended(sc, error) else advised_reason_of(error)


def _by_role(nodes: tuple[PlannedNode, ...]) -> list[tuple[str, tuple[PlannedNode, ...]]]:
    """Return TensorFlow's servers by role: the profiles of roles differ, and a job has one."""
    roles = dict.fromkeys(node.role for node in nodes)
    return [
        (f"tensorflow-{role}", tuple(node for node in nodes if node.role == role)) for role in roles
    ]


def _end_of(
    sc: Any, job: SparkJob[list[Any]], nodes: tuple[PlannedNode, ...], first_attempt: int
) -> JobEnd:
    if job.error is None:
        outcomes = {result.name: result.reason or result.outcome for result in job.result()}
        return JobEnd(nodes=nodes, first_attempt=first_attempt, outcomes=outcomes)
    return JobEnd(
        nodes=nodes,
        first_attempt=first_attempt,
        error=_reason_of(sc, job.error),
        failed_partition=failed_task_of(job.error),
        is_cancelled=was_cancelled(job.error),
    )
