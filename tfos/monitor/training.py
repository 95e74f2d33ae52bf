"""State of a training for its progress line: the workers' numbers, what they do before a step.

Covers: samples for tfos.console.progress, the text about workers that start.
Does not: keep or show anything.      Pure.
"""

from __future__ import annotations

from dataclasses import replace

from tfos.console.progress import Sample, WorkerSample
from tfos.control.members import GONE, Member, NodeStatus
from tfos.control.state.cluster_view import ClusterView


def sample(state: ClusterView, feed: str | None, at_s: float) -> Sample:
    """Return how far the training is.

    Args:
        state: the cluster's state.
        feed: the feed whose rows count; None: main_fun reads its own data, and reports rows itself.
        at_s: monotonic seconds.
    """
    known = [*state.gone, *(each for each in state.workers if each.attempt >= 0)]
    counted = {_attempt(each) for each in (in_epoch(state) if feed is None else _there(state))}
    workers = {
        _attempt(each): _worker(each, feed, is_in_epoch=_attempt(each) in counted) for each in known
    }
    what = starting(state, at_s)
    is_own = any(_is_in_main_fun(worker) for worker in state.workers)
    # Code of main_fun may be a loop that trains and reports nothing: no start, as far as is known.
    return Sample(at_s, workers, what and f"workers{'' if is_own else ' are starting'}: {what}")


def in_epoch(state: ClusterView) -> list[Member]:
    """Return the workers of the epoch: not those that have returned before the others began it.

    Once all have returned, those of the most epochs are left.

    Args:
        state: the cluster's state.
    """
    there = _there(state)
    trains = [begun for each in state.training() if (begun := _epochs_begun(each))]
    least = min(trains) if trains else max(map(_epochs_begun, there), default=0.0)
    return [
        each for each in there if each.status is not NodeStatus.DONE or _epochs_begun(each) >= least
    ]


def starting(state: ClusterView, now_s: float) -> str:
    """Return what workers without a step do, and for how long; empty once one has trained.

    Args:
        state: the cluster's state.
        now_s: monotonic seconds.
    """
    if any(_has_trained(worker) for worker in state.workers):
        return ""
    since: dict[str, list[float]] = {}
    for worker in state.workers:
        if worker.status in (NodeStatus.READY, NodeStatus.RUNNING, NodeStatus.REGISTERED):
            since.setdefault(_activity(worker), []).append(worker.phase_since_s)
    one = len(since) == 1
    parts = (
        f"{what} {max(0.0, now_s - min(times)):.0f} s{'' if one else f' ({len(times)})'}"
        for what, times in since.items()
    )
    return ", ".join(parts)


def _there(state: ClusterView) -> list[Member]:
    return [worker for worker in state.workers if worker.status not in GONE]


def _epochs_begun(worker: Member) -> float:
    return worker.progress.get("epochs_begun", 0.0)


def _attempt(worker: Member) -> str:
    return f"{worker.name}.{worker.attempt}"


def _rows(worker: Member, feed: str | None) -> float:
    if feed is None:
        return worker.progress.get("rows", 0.0)
    return float(worker.feed(feed).trained_rows)


def _worker(worker: Member, feed: str | None, *, is_in_epoch: bool) -> WorkerSample:
    known = worker.progress
    trained = WorkerSample(
        at_s=known.get("at_s", 0.0), rows=_rows(worker, feed), steps=known.get("steps", 0.0)
    )
    if not is_in_epoch:
        return trained
    has_epochs = feed is None and "epoch" in known  # a loop of main_fun may report none
    return replace(
        trained,
        loss=known.get("loss"),
        epochs_begun=_epochs_begun(worker),
        epoch_steps=known.get("epoch_steps", 0.0),
        epoch_s=known.get("epoch_s", 0.0),
        epoch_rows=known.get("epoch_rows", 0.0),
        rows_per_epoch=known.get("rows_per_epoch", 0.0) if has_epochs else 0.0,
        epoch=known.get("epoch", 0.0) if has_epochs else 0.0,
    )


def _has_trained(worker: Member) -> bool:
    return worker.progress.get("steps", 0.0) > 0 or worker.trained_rows > 0


def _is_in_main_fun(worker: Member) -> bool:
    """Return whether it runs code of the user that is neither an import nor a fit's first step."""
    return worker.status is NodeStatus.RUNNING and worker.phase == "main_fun"


def _activity(worker: Member) -> str:
    """Return what its phase says: `main_fun: import tensorflow` is an import."""
    if _is_in_main_fun(worker):
        return "main_fun runs"
    phase, _, what = worker.phase.partition(": ")
    return what or phase
