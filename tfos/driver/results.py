"""Results at the driver: what main_fun has returned, the fits' metrics, the best checkpoint.

Covers: `cluster.results()`, `history()`, `evaluations()` and `best_checkpoint()`, and why there is
none.
Does not: carry values (control plane) or encode them (tfos.control.return_values, loaded late: it
imports numpy).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

from typing import Any

from tfos.control.members import Member, NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.reservation import Reservation
from tfos.driver.shutdown import Shutdown
from tfos.errors import CheckpointError, NoResultError, SettingsError
from tfos.monitor.history import BestCheckpoint, Evaluation, History, history_of
from tfos.phases import ClusterPhase, require


class ResultCalls:
    """Methods of TFCluster for what its workers have to say at the end."""

    _reserved: Reservation
    _ending: Shutdown

    def results(self, *, default: Any = ...) -> list[Any]:
        """Return what main_fun has returned on every worker, in rank order, the chief first.

        Complete once every main_fun has returned, so usually after `shutdown()` or the `with`
        block. A value is None, a number, text, bytes, a numpy array, a list, tuple or dict of
        these, or a Keras History (its `.history`), of at most 1 MiB per worker. Servers run no
        main_fun and are not in the list, nor is the evaluator. For a worker that was started again
        it is the last attempt's value.

        Args:
            default: replaces a value that is missing, for whatever reason; without it a missing
                    value is an error.

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
                "results(default=None) returns the others, with None for the missing ones"
            ) from coordinator.error()
        return [default if text else return_values.decode(data) for data, text in found]

    def handed_over(self) -> dict[int, bytes]:
        """Return, by rank, the bytes that main_fun gave to `ctx.hand_over`; after `shutdown()`.

        For tfos itself; programs use `results()`. Spark brings them as results of the nodes' tasks,
        so they may be large. A worker that handed nothing over, or that was stopped, is left out.

        Raises:
            NoResultError: Spark could not bring the values of workers that have ended well; the
                text has its reason, such as the limit `spark.driver.maxResultSize`.
        """
        values = self._ending.values()
        workers = self._reserved.plan.workers
        reasons, ended_well = self._ending.lost_values(), self._reserved.coordinator.read(_returned)
        lost = [name for name in ended_well if name in reasons and not values.get(name)]
        if lost:
            raise NoResultError(
                f"values of {len(lost)} of {len(workers)} workers did not arrive at the driver: "
                f"{'; '.join(sorted({reasons[name] for name in lost}))}"
            )
        return {each.rank: values[each.name] for each in workers if values.get(each.name)}

    def history(self) -> History:
        """Return metrics, seconds and steps of every epoch of `fit` so far, the newest 10,000.

        In any input mode and for streams, where each micro-batch is an epoch; the handle that
        `stream` returns has that stream's part. For a distributed
        model they are those of all workers. One that is not distributed has a history if its `fit`
        has `ctx.callbacks()`: the chief's own. `train` returns its part of it.
        """
        coordinator = self._reserved.coordinator
        return history_of(coordinator.read(lambda state: state.epochs.since(0)))

    def evaluations(self) -> tuple[Evaluation, ...]:
        """Return what the evaluator (`eval_node=True`) has evaluated so far, the newest 10,000."""
        found = self._reserved.coordinator.read(lambda state: tuple(state.epochs.evaluations))
        return tuple(Evaluation(each.step, dict(each.metrics), each.seconds) for each in found)

    def best_checkpoint(self) -> BestCheckpoint:
        """Return the best checkpoint so far by the metric of `Checkpoints(keep_best=…)`.

        For a resumed run also the best of the runs before it. It stays available after the
        cluster has ended.

        Raises:
            SettingsError: the cluster was made without `keep_best`.
            CheckpointError: no epoch has ended, or none had the metric; the text lists the metrics
                    that there were.
        """
        plan = self._reserved.config.checkpoints
        if plan is None or plan.keep_best is None:
            raise SettingsError(
                "best_checkpoint() needs ClusterConfig(checkpoints=Checkpoints(directory, "
                "keep_best='val_loss')); this cluster keeps no best checkpoint"
            )
        coordinator = self._reserved.coordinator
        best = coordinator.read(lambda state: state.epochs.best)
        if best is None:
            raise CheckpointError(_no_best(plan.keep_best, self.history()))
        return BestCheckpoint(best.path, best.step, best.metric, best.value)


def _no_best(metric: str, history: History) -> str:
    """Return why there is no best checkpoint."""
    if not history.epochs:
        return (
            f"there is no best checkpoint by {metric!r}: no epoch of fit on a distributed model "
            "has ended"
        )
    if metric not in history.metrics:
        known = ", ".join(map(repr, history.metrics)) or "no metrics"
        return (
            f"there is no best checkpoint: none of {len(history.epochs)} epochs had the metric "
            f"{metric!r}; they have {known}. Set keep_best to one of these, or validate in fit"
        )
    return (
        f"there is no best checkpoint by {metric!r}: {len(history.epochs)} epochs have ended, but "
        "none could be saved, or the metric was never finite; the warnings of the chief say why"
    )


def _outcomes(state: ClusterView) -> list[tuple[bytes, str]]:
    """Return, in rank order, each worker's encoded value and why there is none."""
    return [
        (worker.done.result if worker.done else b"", _missing(worker)) for worker in state.workers
    ]


def _missing(worker: Member) -> str:
    returned = (NodeStatus.DONE, NodeStatus.ENDED, NodeStatus.LOST)  # what comes after changes none
    if worker.done is not None and worker.status in returned:
        reason = worker.done.no_result
        return f"{worker.name}: {reason}" if reason else ""
    if worker.status is NodeStatus.RUNNING and not worker.stop_ordered:
        return f"{worker.name} still runs main_fun; call shutdown() first, which waits for it"
    if worker.status in (NodeStatus.LOST, NodeStatus.FAILED):
        how = "was lost" if worker.status is NodeStatus.LOST else "failed"
        return f"{worker.name} {how}: {worker.loss.message.partition(chr(10))[0]}"
    return f"{worker.name} was stopped before main_fun returned"


def _returned(state: ClusterView) -> list[str]:
    """Return the names of workers whose main_fun has returned."""
    return [worker.name for worker in state.workers if worker.done is not None]
