"""Start of all nodes of a reserved cluster, and the wait until every one of them serves.

Covers: start_nodes.      Does not: run Spark's jobs (tfos.driver.node_jobs), check main_fun
(tfos.driver.preflight).
Runs in: the driver.
"""

from __future__ import annotations

from tfos.control.state.cluster_view import ClusterView
from tfos.driver import preflight
from tfos.driver.node_jobs import NodeJobs
from tfos.driver.reservation import Reservation
from tfos.driver.shutdown import Shutdown
from tfos.phases import ClusterPhase, require


def start_nodes(reserved: Reservation, ending: Shutdown, main_fun: bytes) -> None:
    """Return once main_fun runs on every worker; a failure before that ends the cluster.

    Args:
        reserved: the cluster's slots, keys and control plane.
        ending: ends the cluster after a failure.
        main_fun: the pickled function and its arguments.

    Raises:
        ReservationTimeout: names the nodes that never served.
        NodeFailedError: a node failed while it started.
    """
    jobs = NodeJobs(
        reserved.sc,
        reserved.coordinator,
        reserved.keys,
        reserved.settings,
        places=reserved.places,
        on_cancel=lambda: ending.abort("its Spark job was cancelled"),
    )
    ending.begin(jobs)
    num_copies = sum(node.runs_main_fun for node in reserved.plan.nodes)
    if note := preflight.size_note(len(main_fun), num_copies):
        reserved.console.warn(note)
    try:
        jobs.start(reserved.plan, main_fun, workers_hold_slots=reserved.workers_hold_slots)
        reserved.await_roster(reserved.config.reservation_timeout_s)
        ending.raise_failure()
        require("start()", reserved.coordinator.phase, ClusterPhase.RUNNING)
        if note := reserved.places.note(reserved.coordinator.read(_executors)):
            reserved.console.warn(note)
    except BaseException:
        ending.abort("the start failed")
        raise


def _executors(state: ClusterView) -> dict[str, tuple[str, str]]:
    return {each.name: (each.executor_id, each.host) for each in state.members.values()}
