"""What the end of a node means: a table of nodes, ends and clusters."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tfos.config import Checkpoints, ClusterConfig
from tfos.control.members import Member, NodeStatus
from tfos.control.messages import BatchReport
from tfos.control.restarts.node_end import (
    Meaning,
    Surroundings,
    explained,
    is_from_outside,
    meaning_of,
)
from tfos.failure import EXECUTOR_LOST, NodeFailure
from tfos.phases import ClusterPhase
from tfos.topology import plan

SAVES = ClusterConfig(checkpoints=Checkpoints(directory="/saves"))
PLAN = plan(5, 1, eval_node=True)
TENSORFLOW = plan(4, 1, ps="tensorflow")
MIRRORED = plan(3, 0, ps="tensorflow")
RAISED = {"traceback": "Traceback ..."}
KILLED = {"signal": 9}
CRASHED = {"signal": 11}
EXECUTOR = {"error_type": EXECUTOR_LOST}


def around(**changed: Any) -> Surroundings:
    usual = Surroundings(
        ClusterPhase.RUNNING,
        is_ending=False,
        plan=PLAN,
        config=SAVES,
        num_training=2,
        tensorflow_workers=("worker:1",),
        has_restart=True,
        needs_all_workers=False,
        lacks_strategy=False,
    )
    return dataclasses.replace(usual, **changed)


def member(name: str, of: Any = PLAN, **fields: Any) -> Member:
    (planned,) = (node for node in of.nodes if node.name == name)
    return Member(planned, **{"status": NodeStatus.RUNNING} | fields)


def ends(node: Member, how: dict[str, Any], cluster: Surroundings) -> Meaning:
    failure = NodeFailure(node.node, "host-b", 7, message="it ended", **how)
    return meaning_of(node, failure, cluster, outside=is_from_outside(failure))


@pytest.mark.parametrize(
    ("name", "how", "changed", "meaning"),
    [
        # a worker
        ("worker:1", KILLED, {}, Meaning.STARTED_AGAIN),
        ("worker:1", EXECUTOR, {}, Meaning.STARTED_AGAIN),
        ("worker:1", CRASHED, {}, Meaning.STARTED_AGAIN),
        ("worker:1", RAISED, {}, Meaning.FATAL),
        ("worker:1", KILLED, {"has_restart": False}, Meaning.OTHERS_GO_ON),
        ("worker:1", CRASHED, {"has_restart": False}, Meaning.FATAL),
        ("worker:1", KILLED, {"has_restart": False, "num_training": 0}, Meaning.FATAL),
        ("worker:1", KILLED, {"is_ending": True}, Meaning.OTHERS_GO_ON),
        # the chief, whom the others cannot do without
        ("worker:0", KILLED, {}, Meaning.STARTED_AGAIN),
        ("worker:0", KILLED, {"has_restart": False}, Meaning.FATAL),
        # a server: its supervisor restarts a killed child, the driver one whose executor is lost
        ("ps:0", EXECUTOR, {}, Meaning.STARTED_AGAIN),
        ("ps:0", KILLED, {}, Meaning.FATAL),
        ("ps:0", EXECUTOR, {"config": ClusterConfig()}, Meaning.FATAL),
        ("ps:0", EXECUTOR, {"plan": plan(3, 1, driver_ps_nodes=True)}, Meaning.FATAL),
        # the evaluator
        *(("evaluator:0", how, {}, Meaning.EVALUATOR_LOST) for how in (KILLED, CRASHED, RAISED)),
        # before the cluster runs
        ("worker:1", EXECUTOR, {"phase": ClusterPhase.RESERVED}, Meaning.SPARK_RESTARTS),
        ("worker:1", KILLED, {"phase": ClusterPhase.RESERVED}, Meaning.FATAL),
        ("evaluator:0", RAISED, {"phase": ClusterPhase.RESERVED}, Meaning.FATAL),
    ],
)
def test_the_end_of_a_node_means(
    name: str, how: dict[str, Any], changed: dict[str, Any], meaning: Meaning
):
    assert ends(member(name), how, around(**changed)) is meaning


@pytest.mark.parametrize(
    ("name", "how", "changed", "meaning"),
    [
        ("worker:0", KILLED, {}, Meaning.COORDINATOR_DECIDES),
        ("worker:0", KILLED, {"tensorflow_workers": ()}, Meaning.FATAL),
        ("worker:0", RAISED, {}, Meaning.FATAL),
        ("ps:0", KILLED, {"tensorflow_workers": ()}, Meaning.COORDINATOR_DECIDES),
        ("ps:0", KILLED, {"phase": ClusterPhase.FAILED}, Meaning.FATAL),
        ("worker:0", KILLED, {"lacks_strategy": True}, Meaning.FATAL),
        ("worker:0", EXECUTOR, {"lacks_strategy": True}, Meaning.FATAL),
        ("ps:0", KILLED, {"lacks_strategy": True}, Meaning.FATAL),
    ],
)
def test_the_end_of_a_server_of_tensorflow_means(
    name: str, how: dict[str, Any], changed: dict[str, Any], meaning: Meaning
):
    assert ends(member(name, TENSORFLOW), how, around(plan=TENSORFLOW, **changed)) is meaning


@pytest.mark.parametrize("how", [KILLED, EXECUTOR, CRASHED])
def test_no_attempt_takes_the_place_of_what_only_the_lost_process_had(how: dict[str, Any]):
    chief_of_stream = member(
        "worker:0", batches={"input": {1: BatchReport("input", 1, is_done=True, trained={})}}
    )
    assert ends(chief_of_stream, how, around()) is Meaning.FATAL
    assert ends(member("worker:1", serves_shard=True), how, around()) is Meaning.FATAL
    mirrored = around(plan=MIRRORED, needs_all_workers=True)
    assert ends(member("worker:1", MIRRORED), how, mirrored) is Meaning.FATAL


def test_nothing_is_started_again_while_the_cluster_does_not_run():
    nodes = [member(node.name) for node in PLAN.nodes]
    not_running = [phase for phase in ClusterPhase if phase is not ClusterPhase.RUNNING]
    hows: list[dict[str, Any]] = [KILLED, EXECUTOR, CRASHED]
    for node, phase, how in itertools.product(nodes, not_running, hows):
        found = ends(node, how, around(phase=phase))
        assert found in (Meaning.FATAL, Meaning.SPARK_RESTARTS), (node.name, phase, how)


def test_a_fatal_end_says_what_was_lost_with_the_node_and_what_to_do():
    def text(node: Member, of: Any, lost_ps: tuple[str, ...] = (), traceback: str = "") -> str:
        failure = NodeFailure(node.node, "host-b", 7, message="it ended", traceback=traceback)
        surroundings = around(plan=of, needs_all_workers=of is MIRRORED)
        return explained(node, failure, surroundings, lost_ps).message

    assert text(member("worker:1"), PLAN) == "it ended"
    assert "restore when it begins" in text(member("worker:1", MIRRORED), MIRRORED)
    shard = text(member("worker:1", serves_shard=True), PLAN)
    assert "worker:1 served shard 2 of 3 of the parameters" in shard
    assert "resume=True" in shard
    raised = text(member("worker:1", serves_shard=True), PLAN, traceback="Traceback")
    assert raised == "it ended", "the user's error says what to mend"
    (chief,) = (each.name for each in TENSORFLOW.workers)
    assert "server ps:0 was lost before" in text(member(chief, TENSORFLOW), TENSORFLOW, ("ps:0",))
    assert text(member("worker:1", MIRRORED), MIRRORED, traceback="Traceback") == "it ended"
