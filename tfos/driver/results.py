"""Results at the driver: what main_fun has returned on every worker.

Covers: `cluster.results()` and why a worker has no value.
Does not: carry values (control plane) or encode them (tfos.control.return_values, loaded late: it
imports numpy).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

from typing import Any

from tfos.control.members import Member, NodeStatus
from tfos.control.state import ClusterState
from tfos.driver.reservation import Reservation
from tfos.errors import NoResultError
from tfos.phases import ClusterPhase, require


class ResultCalls:
    """Methods of TFCluster for what its workers have to say at the end."""

    _reserved: Reservation

    def results(self, *, default: Any = ...) -> list[Any]:
        """Return what main_fun has returned on every worker, in rank order, the chief first.

        Complete once every main_fun has returned, so usually after `shutdown()` or the `with`
        block. A value is None, a number, text, bytes, a numpy array, a list, tuple or dict of
        these, or a Keras History (its `.history`), of at most 1 MiB per worker. Servers run no
        main_fun and are not in the list. Of a worker that was started again it is the last
        attempt's value.

        Args:
            default: stands in the place of a value that is not there, for whatever reason; without
                it such a value is an error.

        Raises:
            NoResultError: a worker still runs main_fun, failed, was lost or stopped, or returned
                what cannot travel; the text says which. A failed cluster's error is the cause.
            PhaseError: main_fun was never started.
        """
        from tfos.control import return_values

        coordinator = self._reserved.coordinator
        require(
            "results()",
            coordinator.phase,
            ClusterPhase.RUNNING,
            ClusterPhase.CLOSED,
            ClusterPhase.FAILED,
        )
        found = coordinator.read(_outcomes)
        reasons = [text for _, text in found if text]
        if reasons and default is ...:
            raise NoResultError(
                f"results() lacks {len(reasons)} of {len(found)} values: {'; '.join(reasons)}. "
                "results(default=None) returns the others, with None in the place of these"
            ) from coordinator.error()
        return [default if text else return_values.decode(data) for data, text in found]


def _outcomes(state: ClusterState) -> list[tuple[bytes, str]]:
    """Return, in rank order, each worker's encoded value and why there is none."""
    return [
        (worker.done.result if worker.done else b"", _missing(worker, state))
        for worker in state.workers
    ]


def _missing(worker: Member, state: ClusterState) -> str:
    if worker.done is not None and worker.status in (NodeStatus.DONE, NodeStatus.ENDED):
        reason = worker.done.no_result
        return f"{worker.name}: {reason}" if reason else ""
    if worker.status is NodeStatus.RUNNING and not worker.stop_ordered:
        return f"{worker.name} still runs main_fun; call shutdown() first, which waits for it"
    own = [each for each in state.failures if each.node == worker.node]
    if worker.status in (NodeStatus.LOST, NodeStatus.FAILED) and own:
        how = "was lost" if worker.status is NodeStatus.LOST else "failed"
        return f"{worker.name} {how}: {own[0].message.partition(chr(10))[0]}"
    return f"{worker.name} was stopped before main_fun returned"
