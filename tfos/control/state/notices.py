"""Notices: what the user is told of nodes that come and go.      Pure.

Covers: the sentences.
Does not: decide what happens to a node (control.restarts), show them (control.coordinator).
"""

from __future__ import annotations

from collections.abc import Sequence

from tfos.control import messages
from tfos.control.members import Member
from tfos.control.messages import Joining, TensorBoardUp
from tfos.control.restarts.budget import WINDOW_S
from tfos.control.state.actions import Action, Tell, Warn
from tfos.failure import NodeFailure
from tfos.topology import PS_ROLE

_MOST_NAMED = 8
"""Workers that a warning names; it only counts further ones."""


def skewed(member: Member, skew: str) -> Warn:
    """Warn of versions that differ from the driver's.

    Args:
        member: a node that has registered.
        skew: the versions, in one line.
    """
    where = f"executor {member.executor_id} on {member.host}"
    return Warn(f"{where} has {skew}: results may differ from node to node")


def joins(member: Member, joining: Joining) -> Tell:
    """Tell that a new attempt of a worker works among the others.

    Args:
        member: the worker.
        joining: where it begins.
    """
    where = f"{member.where} joins as attempt {member.attempt}"
    if joining.fit is not None and joining.fit.epoch >= 0:
        where += f", in epoch {joining.fit.epoch + 1} of fit"
    return Tell(where)


def serves(member: Member) -> Tell:
    """Tell that a new attempt of a server can be reached."""
    what = f"{member.where} restores its parameters as attempt {member.attempt}"
    return Tell(f"{what}; updates since its last checkpoint are lost")


def tensorboard(event: TensorBoardUp) -> list[Action]:
    """Tell where TensorBoard is, and warn if there is none or others can read it."""
    if not event.url:
        return [Warn(f"no TensorBoard: {event.reason}")]
    actions: list[Action] = [Tell(f"TensorBoard: {event.url}")]
    if not event.is_local:
        actions.append(
            Warn(
                f"TensorBoard has no login: anyone who reaches {event.url} can read it. Pass "
                "tensorboard_host='127.0.0.1' to reserve() to bind loopback on the chief's host"
            )
        )
    return actions


def no_result(member: Member, reason: str) -> Warn:
    """Warn that results() will refuse: main_fun may return what only it understands.

    Args:
        member: a worker whose main_fun has returned.
        reason: why its return value did not arrive.
    """
    return Warn(f"{member.name}: {reason}. The run goes on; cluster.results() will fail")


def lost_while_starting(member: Member, failure: NodeFailure) -> Warn:
    """Warn that a node has to be heard again, or started by Spark, before the cluster runs.

    Args:
        member: the node.
        failure: how it ended.
    """
    again = "; it goes on if it is heard again" if member.is_unheard else ""
    return Warn(f"{member.where} was lost while starting: {failure.message}{again}")


def work_lost(
    member: Member, event: messages.UpdatesLost | messages.CutShort | messages.NotSaved
) -> Warn:
    """Warn of updates that a server has lost or nobody saves, or of what a worker had to write.

    Args:
        member: the server or worker.
        event: what it reports.
    """
    if isinstance(event, messages.UpdatesLost):
        return Warn(event.text)
    if isinstance(event, messages.NotSaved):
        return _not_saved(member, event)
    if event.how:
        return Warn(
            f"{member.where}, after main_fun had returned: {event.how}. What its exit handlers or "
            "threads had to write may be missing. Let main_fun wait for them"
        )
    return Warn(
        f"{member.where} still ran exit handlers or threads {event.grace_s:g} s after it was told "
        "to stop, and was killed: what they had to write is missing. Let main_fun wait for them, "
        "or end the cluster by shutdown(grace_secs=...) with more seconds"
    )


def started_again(member: Member, failure: NodeFailure) -> Warn:
    """Warn that a new attempt takes the place of a lost node.

    Args:
        member: the node.
        failure: how it ended.
    """
    restarts = member.restarts
    return Warn(
        f"{_lost(member, failure)}; it is started again "
        f"({restarts.num_recent} of {restarts.limit} times within {WINDOW_S / 60:.0f} minutes)"
    )


def others_go_on(member: Member, failure: NodeFailure, left: Sequence[Member]) -> Warn:
    """Warn that a worker is gone for good.

    Args:
        member: the worker.
        failure: how it ended.
        left: the workers that train on.
    """
    remaining = ", ".join(worker.name for worker in left)
    if len(left) > _MOST_NAMED:
        remaining = f"{len(left)} workers"
    verb = "goes" if len(left) == 1 else "go"
    return Warn(f"{_lost(member, failure)}; {remaining} {verb} on")


def own_rows_lost(member: Member) -> list[Action]:
    """Warn that nobody takes over the rows that main_fun of a worker that is gone read itself.

    Args:
        member: the worker.
    """
    if not member.reads_own_rows:
        return []
    return [
        Warn(
            f"{member.name}: nobody trains the rows that its main_fun reads itself, in this epoch "
            "and all that follow; rows of cluster.train() go to the others. "
            "ClusterConfig(restarts=Restarts(workers=k)) starts a lost worker again up to k times; "
            "tolerate_lost_workers=False ends the training with the first one"
        )
    ]


def lost_after_return(member: Member, failure: NodeFailure) -> Warn:
    """Warn that a node is gone that nobody waits for.

    Args:
        member: the worker or evaluator.
        failure: how it ended.
    """
    return Warn(f"{_lost(member, failure)}; its main_fun had returned before")


def evaluator_lost(member: Member, failure: NodeFailure) -> Warn:
    """Warn that checkpoints are no longer evaluated.

    Args:
        member: the evaluator.
        failure: how it ended.
    """
    reason = failure.message
    if failure.error_type and failure.traceback:
        reason = f"{failure.error_type}: {reason}"
    return Warn(f"{member.where} was lost: {reason}; the training goes on without it")


def coordinator_decides(member: Member, failure: NodeFailure, workers: Sequence[str]) -> Warn:
    """Warn that one of TensorFlow's servers is gone, which its coordinator in main_fun will find.

    Args:
        member: the server.
        failure: how it ended.
        workers: names of TensorFlow's workers that live.
    """
    then = "the chief's strategy cannot go on without it"
    if member.planned.role != PS_ROLE:
        then = f"the chief's coordinator gives its work to {', '.join(workers)}"
    return Warn(f"{_lost(member, failure)}; {then}")


def _lost(member: Member, failure: NodeFailure) -> str:
    return f"{member.where} was lost: {failure.message}"


def _not_saved(member: Member, event: messages.NotSaved) -> Warn:
    newest = f"the newest step is {event.step}" if event.step >= 0 else "it has no step yet"
    if event.is_last:
        which, then = "the last save", "; no checkpoint holds what was trained since"
    else:
        which, then = "saving", ". The training goes on"
    return Warn(
        f"{member.where}: {which} in {event.directory} failed: {event.error}; {newest}{then}"
    )
