"""Tied workers: TensorFlow waits for all of them, and main_fun of one has returned.      Pure.

Covers: which workers wait for one that has returned, for certain or by what they report, and the
messages about both.
Does not: say what the loss of a worker means (control.restarts.node_end), act (cluster_state).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tfos.control.members import Member, NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.failure import TENSORFLOW_ERRORS, NodeFailure

STANDS_STILL_S = 60.0
"""Seconds without progress after which a worker may wait for one that has returned. It may as well
export or evaluate, which takes as long: this is worth a warning, and no more."""
_EQUAL_STEPS = (
    "all workers must build the strategy and take the same number of steps: give each as many "
    "batches, as by dataset.repeat() and steps_per_epoch"
)
_ALL_SAVE = (
    "All workers must take part in a save, too: compat.export_saved_model(model, path, is_chief), "
    "or model.save() to a path of each worker's own"
)


def never_joins(cluster: ClusterView) -> NodeFailure | None:
    """Return the failure of a worker that has returned without the strategy that others build.

    The strategy's constructor waits for all of its workers, so nobody has got beyond it. None:
    there is no such worker, or enough others may still join.

    Args:
        cluster: the members.
    """
    joining = [each for each in cluster.workers if each.done is None or each.in_collective]
    waiting = [
        each for each in cluster.training() if each.in_collective and each.num_tied > len(joining)
    ]
    absent = [each for each in cluster.workers if each.done is not None and not each.in_collective]
    if not waiting or not absent:
        return None
    text = (
        f"main_fun of {absent[0].name} has returned without a MultiWorkerMirroredStrategy, "
        f"which {waiting[0].name} waits for: {_EQUAL_STEPS}"
    )
    return absent[0].failure("", text)


def explained(failure: NodeFailure, member: Member, cluster: ClusterView) -> NodeFailure:
    """Return a failure with the worker that returned before, if TensorFlow missed it.

    Its own text calls that one unhealthy, and looks for a crash.

    Args:
        failure: the member's failure.
        member: the member whose main_fun raised.
        cluster: the members.
    """
    returned = [each.name for each in _tied(cluster) if each.done is not None]
    is_tensorflows = failure.error_type.startswith(f"{TENSORFLOW_ERRORS}.")
    if not (returned and member.in_collective and is_tensorflows):
        return failure
    text = f"main_fun of {returned[0]} had returned before: {_EQUAL_STEPS}. {_ALL_SAVE}"
    return msgspec.structs.replace(failure, message=f"{failure.message}\n{text}")


def stand_still(cluster: ClusterView, now_s: float) -> str:
    """Return the warning of workers that may wait for one that has returned; empty: none does.

    Args:
        cluster: the members.
        now_s: monotonic seconds.
    """
    tied = _tied(cluster)
    returned = [each for each in tied if each.done is not None]
    if not returned:
        return ""
    first = min(returned, key=lambda each: each.moved_s)
    still = [
        each.name
        for each in tied
        if each.status is NodeStatus.RUNNING
        and now_s - max(each.moved_s, first.moved_s) >= STANDS_STILL_S
    ]
    return _still_text(first, still) if still else ""


def _tied(cluster: ClusterView) -> list[Member]:
    """Return the workers of the strategy: those that have reported it.

    None has with a TensorFlow that gives no notice: all of a mirrored cluster then.
    """
    told = [each for each in cluster.workers if each.in_collective]
    return told or (cluster.workers if cluster.plan.is_mirrored else [])


def _still_text(first: Member, still: Sequence[str]) -> str:
    names = f"{still[0]} reports" if len(still) == 1 else f"{still[0]} and others report"
    return (
        f"main_fun of {first.name} has returned, and {names} no progress for {STANDS_STILL_S:.0f} "
        "s since. While it exports or evaluates, all is well. In a step of "
        f"MultiWorkerMirroredStrategy it waits without end for {first.name}: {_EQUAL_STEPS}"
    )
