"""Node end: what the end of a node means for its cluster.

Covers: which nodes are started again, which the others go on without, what fails the cluster, what
its error adds.
Does not: change members or give orders (tfos.control.state).      Pure.

A node that was killed *from outside* (signal KILL or TERM, executor lost, silence) is no reason to
doubt main_fun. One that crashed (signal SEGV, ABRT) may be started again; otherwise it is fatal.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tfos.config import ClusterConfig
from tfos.control.members import Member
from tfos.failure import EXECUTOR_LOST, NodeFailure, is_crash
from tfos.phases import ClusterPhase
from tfos.topology import PS_ROLE, Plan

_FROM_OUTSIDE = frozenset({int(signal.SIGKILL), int(signal.SIGTERM)})
_WITHOUT_WORKER = (
    "MultiWorkerMirroredStrategy cannot go on without one of its workers, nor with a new attempt "
    "of it, and the others would wait without end: save in main_fun, restore when it begins, and "
    "start the cluster again"
)
_AFTER_OWN_SHARD = (
    "Save with ClusterConfig(checkpoints=...) and start the cluster again with resume=True, or use "
    "num_ps >= 1: separate servers go on when a worker is lost"
)
_BEFORE_STRATEGY = (
    "It was lost before main_fun had built ParameterServerStrategy, whose constructor would wait "
    "for it without end: start the cluster again"
)
WITHOUT_PS = (
    "ParameterServerStrategy cannot go on without it, and its variables are gone: save in main_fun "
    "with tf.train.CheckpointManager to a directory that every node sees, restore there when it "
    "begins, and start the cluster again"
)


class Meaning(enum.Enum):
    """What the end of a node means."""

    SPARK_RESTARTS = "Spark starts its task again, and a newer attempt will register"
    EVALUATOR_LOST = "the training goes on without its evaluator"
    COORDINATOR_DECIDES = "the TensorFlow program in main_fun goes on without it, or raises"
    STARTED_AGAIN = "another attempt takes its place"
    OTHERS_GO_ON = "the other workers go on without it"
    FATAL = "the cluster fails"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The cluster of a node that ends."""

    phase: ClusterPhase
    is_ending: bool
    plan: Plan
    config: ClusterConfig
    num_training: int
    """Workers beside it whose main_fun runs."""
    tensorflow_workers: Sequence[str]
    """Names of TensorFlow's workers that live beside it."""
    has_restart: bool
    """Whether the node's limit of restarts leaves one."""
    needs_all_workers: bool
    """Whether TensorFlow's collective calls, which wait for each worker, train the model."""
    lacks_strategy: bool
    """Whether a main_fun runs that has not built ParameterServerStrategy."""


def is_from_outside(failure: NodeFailure) -> bool:
    """Whether the failure itself says that the node was killed from outside."""
    return failure.signal in _FROM_OUTSIDE or failure.error_type == EXECUTOR_LOST


def meaning_of(
    member: Member, failure: NodeFailure, around: Surroundings, *, outside: bool
) -> Meaning:
    """Return what it means that a node ended without an order, before main_fun had returned.

    Args:
        member: the node, with the status that it had.
        failure: how it ended.
        around: its cluster.
        outside: whether it was killed from outside.
    """
    is_running = around.phase is ClusterPhase.RUNNING
    # Its executor or supervisor was lost, not only its child.
    if outside and not failure.signal and around.phase is ClusterPhase.RESERVED:
        return Meaning.SPARK_RESTARTS
    if member.planned.is_evaluator and is_running:
        return Meaning.EVALUATOR_LOST
    if outside and member.planned.serves_tensorflow and _is_left_to_coordinator(member, around):
        return Meaning.COORDINATOR_DECIDES
    restarts = around.has_restart and _may_restart(member, failure, around)
    if restarts and (outside or is_crash(failure)):
        return Meaning.STARTED_AGAIN
    if outside and _is_tolerable(member, around):
        return Meaning.OTHERS_GO_ON
    return Meaning.FATAL


def explained(
    member: Member, failure: NodeFailure, around: Surroundings, lost_ps: Sequence[str]
) -> NodeFailure:
    """Return a fatal failure with what it means beyond its node, and what to do.

    Args:
        member: the node.
        failure: how it ended.
        around: its cluster.
        lost_ps: names of TensorFlow's parameter servers that were lost before.
    """
    added, plan = "", around.plan
    if around.needs_all_workers and member.planned.runs_main_fun and not failure.traceback:
        added = f". {_WITHOUT_WORKER}"
    elif around.lacks_strategy and member.planned.serves_tensorflow and not failure.traceback:
        added = f". {_BEFORE_STRATEGY}"
    elif member.serves_shard and not failure.traceback:
        shard = f"shard {member.planned.rank + 1} of {plan.num_workers} of the parameters"
        added = f". {member.name} served {shard}, which is lost with it. {_AFTER_OWN_SHARD}"
    elif lost_ps and member.planned.is_chief:
        names = ", ".join(lost_ps)
        added = f"\nTensorFlow's parameter server {names} was lost before. {WITHOUT_PS}"
    return msgspec.structs.replace(failure, message=failure.message + added)


def _may_restart(member: Member, failure: NodeFailure, around: Surroundings) -> bool:
    """Whether another attempt of the node can take its place."""
    if around.phase is not ClusterPhase.RUNNING or around.is_ending:
        return False
    plan = around.plan
    if member.planned.is_ps:  # a killed child is its supervisor's to start again
        has_state = around.config.checkpoints is not None and not plan.servers_at_driver
        return has_state and not failure.signal
    # Only the chief's process knows which micro-batches of a stream are trained and saved.
    is_of_stream = member.planned.is_chief and any(member.batches)
    return (
        member.planned.runs_main_fun
        and not member.serves_shard
        and not is_of_stream
        and not around.needs_all_workers
        and not plan.tensorflow_servers
    )


def _is_tolerable(member: Member, around: Surroundings) -> bool:
    return (
        around.config.tolerate_lost_workers
        and not around.needs_all_workers
        and not member.serves_shard
        and around.phase is ClusterPhase.RUNNING
        and member.planned.runs_main_fun
        and not member.planned.is_chief
        and around.num_training > 0
    )


def _is_left_to_coordinator(member: Member, around: Surroundings) -> bool:
    """Whether the coordinator goes on without one of TensorFlow's servers, or raises itself."""
    if around.phase is not ClusterPhase.RUNNING or around.lacks_strategy:
        return False
    if member.planned.role == PS_ROLE:
        return True
    return around.config.tolerate_lost_workers and bool(around.tensorflow_workers)
