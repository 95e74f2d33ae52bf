"""Lost nodes are started again: the driver's decisions, as events and the actions they give."""

from __future__ import annotations

from typing import Any

import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.control import messages
from tfos.control.members import WINDOW_BEATS, NodeStatus
from tfos.control.state.actions import Action, Replace, Send, Tell, Warn
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.job_end import JobEnd
from tfos.failure import EXECUTOR_LOST, NodeFailure
from tfos.fit_place import FitPlace
from tfos.monitor.status import cluster_report
from tfos.phases import ClusterPhase
from tfos.topology import plan

NOW = 100.0
SAVES = Checkpoints(directory="/saves")


def registers(state: ClusterState, name: str, attempt: int, now_s: float = NOW) -> Any:
    register = messages.Register(node_id(name, attempt), "5", "host-b", 1000 + attempt)
    return state.on_register(register, now_s)


def serves(state: ClusterState, name: str, attempt: int, port: int = 1) -> list[Action]:
    return state.on_event(node_id(name, attempt), messages.Listening(Endpoint("h", port)), NOW)


def running(workers: int = 1, ps: int = 1, task_attempts: int = 4, **config: Any) -> ClusterState:
    settings = ClusterConfig(restarts=Restarts(workers=workers, ps=ps), **config)
    state = ClusterState(plan(3, 1), settings, task_attempts=task_attempts)
    state.move(ClusterPhase.RESERVED)
    for name in state.members:
        registers(state, name, 0, 0.0)
        serves(state, name, 0)
    assert state.phase is ClusterPhase.RUNNING
    return state


def dies(
    state: ClusterState, name: str, attempt: int = 0, now_s: float = NOW, **fields: Any
) -> list[Action]:
    fields = fields or {"signal": 9}
    failure = NodeFailure(
        node_id(name, attempt), "host-b", 7, message="killed by SIGKILL", **fields
    )
    return state.on_event(node_id(name, attempt), messages.Failed(failure), now_s)


def only(actions: list[Action], kind: type) -> Any:
    (found,) = (action for action in actions if isinstance(action, kind))
    return found


def orders(actions: list[Action]) -> list[tuple[str, messages.Order]]:
    return [(each.node.name, each.order) for each in actions if isinstance(each, Send)]


@pytest.mark.fault("F01")
@pytest.mark.parametrize("name", ["worker:1", "worker:0"])
def test_a_killed_worker_is_fenced_and_started_again_and_joins_the_others(name):
    state = running()
    actions = dies(state, name)
    rank = int(name[-1])
    assert orders(actions) == [("ps:0", messages.FenceWorker(rank, 0, "killed by SIGKILL"))]
    assert only(actions, Replace) == Replace(state.members[name].planned, 100, 0.0)
    assert "it is started again (1 of 1 times within 10 minutes)" in only(actions, Warn).text
    assert [each.name for each in state.restarting()] == [name]
    assert [each.name for each in state.awaited()][-1] == name
    reply, _ = registers(state, name, 100)
    assert reply.accepted
    joined = serves(state, name, 100)
    (told,) = orders(joined)
    assert told[0] == name
    assert isinstance(told[1], messages.Start)
    assert told[1].joining == messages.Joining((), None)
    assert "joins as attempt 100" in only(joined, Tell).text
    assert [worker.status for worker in state.workers] == [NodeStatus.RUNNING] * 2
    assert state.restarting() == []
    assert [(each.name, each.attempt) for each in state.gone] == [(name, 0)]


@pytest.mark.fault("F01")
def test_a_worker_that_is_lost_too_often_is_lost():
    state = running(workers=1)
    dies(state, "worker:1")
    registers(state, "worker:1", 100)
    actions = dies(state, "worker:1", 100)
    assert not [each for each in actions if isinstance(each, Replace)]
    assert state.members["worker:1"].status is NodeStatus.LOST
    assert state.phase is ClusterPhase.RUNNING


@pytest.mark.fault("F01")
def test_restarts_of_long_ago_do_not_count():
    state = running(workers=1)
    dies(state, "worker:1")
    registers(state, "worker:1", 100)
    assert only(dies(state, "worker:1", 100, NOW + 601.0), Replace).first_attempt == 200


@pytest.mark.fault("F01")
def test_a_chief_that_is_lost_too_often_fails_the_cluster():
    state = running(workers=1)
    dies(state, "worker:0")
    registers(state, "worker:0", 100)
    dies(state, "worker:0", 100)
    assert state.phase is ClusterPhase.FAILED


@pytest.mark.fault("F04")
def test_a_worker_that_crashes_is_started_again_while_restarts_are_left():
    state = running(workers=1)
    assert only(dies(state, "worker:1", signal=11), Replace).first_attempt == 100
    assert state.gone[0].crash is state.failures[0]
    registers(state, "worker:1", 100)
    dies(state, "worker:1", 100, signal=11)
    assert state.phase is ClusterPhase.FAILED


def test_a_node_that_was_ended_in_order_or_lost_with_its_executor_did_not_crash():
    state = running(workers=9)
    ends: list[dict[str, Any]] = [{"signal": 15}, {"error_type": EXECUTOR_LOST}]
    for attempt, fields in enumerate(ends):
        dies(state, "worker:1", attempt * 100, **fields)
        registers(state, "worker:1", (attempt + 1) * 100)
    assert len(state.gone) == 2
    assert [each.crash for each in state.gone] == [None, None]


def test_the_records_of_a_thousand_losses_take_little_memory_and_the_first_is_whole():
    """A stream runs for years; only the first loss can become the headline, of a collective."""
    state = running(workers=1)
    log_tail = ("a line of output " * 10,) * 50
    for number in range(1000):
        now_s = NOW + 700.0 * number
        for seq in range(WINDOW_BEATS):
            beat = messages.Heartbeat(node_id("worker:1", number * 100), seq + 1, "main_fun")
            state.on_heartbeat(beat, now_s)
        text = f"{number:05}" * 20_000
        dies(state, "worker:1", number * 100, now_s, signal=11, traceback=text, log_tail=log_tail)
        registers(state, "worker:1", (number + 1) * 100, now_s)
    assert len(state.gone) == 1000
    first, *others = state.gone
    assert first.end is state.failures[0]
    ends = [each.end for each in others if each.end is not None]
    assert sum(len(each.traceback) + len(each.log_tail) for each in ends) == 0
    assert all(len(each.beats) == 1 for each in state.gone)
    assert all(each.crash is not None for each in state.gone)
    assert state.failures[-1].traceback == "00999" * 20_000


@pytest.mark.fault("F54")
def test_a_crash_is_known_after_any_number_of_losses_and_the_first_and_newest_records_are_kept():
    state, num_losses = running(workers=1), 150
    for number in range(num_losses):
        now_s = NOW + 700.0 * number
        dies(state, "worker:1", number * 100, now_s)
        registers(state, "worker:1", (number + 1) * 100, now_s)
    dies(state, "worker:1", num_losses * 100, NOW + 700.0 * num_losses, signal=11)
    crash = state.gone[-1].crash
    assert crash is not None
    assert crash.node.attempt == num_losses * 100
    assert state.num_failures == num_losses + 1
    attempts = [each.node.attempt // 100 for each in state.failures]
    assert attempts == [*range(50), *range(num_losses - 49, num_losses + 1)]
    notes = cluster_report("test", state, NOW + 700.0 * num_losses).notes
    assert "51 failures between the first and the newest are not kept" in notes


def test_a_worker_that_is_lost_after_many_others_is_told_with_its_own_end():
    state = running(workers=1)
    for number in range(120):
        dies(state, "worker:1", number * 100, NOW + 700.0 * number)
        registers(state, "worker:1", (number + 1) * 100, NOW + 700.0 * number)
    dies(state, "worker:1", 12_000, NOW + 700.0 * 119 + 1)
    lost = state.members["worker:1"]
    assert lost.status is NodeStatus.LOST
    assert lost.end is not None
    assert lost.end.node == node_id("worker:1", 12_000)


def test_a_worker_that_raises_is_not_started_again():
    state = running(workers=3)
    dies(state, "worker:1", error_type="ValueError", traceback="T")
    assert state.phase is ClusterPhase.FAILED


@pytest.mark.fault("F01")
def test_sparks_own_retry_of_a_lost_executors_task_takes_the_place():
    state = running()
    reply, actions = registers(state, "worker:1", 1)
    assert reply.accepted
    assert not [each for each in actions if isinstance(each, Replace)]
    assert orders(actions)[0][0] == "ps:0"
    assert isinstance(orders(serves(state, "worker:1", 1))[0][1], messages.Start)
    late, _ = registers(state, "worker:1", 100)
    assert not late.accepted
    assert "attempt 1 of worker:1 is at work" in late.reason


def test_a_new_attempt_learns_the_open_epochs_the_fit_and_what_it_has_missed():
    state = running()
    chief = node_id("worker:0")
    fit = messages.FitReading("input", number=0, epoch=0, fed_epoch=0)
    state.on_event(chief, fit, NOW)
    for epoch in range(3):
        state.come_to("input", epoch)
        state.flush("input", epoch)
        state.come_to("input", epoch + 1)
        if epoch < 2:
            trained = messages.EpochTrained(
                1, epoch, feed="input", fed_epoch=epoch, is_distributed=True
            )
            state.on_event(chief, trained, NOW)
    dies(state, "worker:1")
    registers(state, "worker:1", 100)
    (_, start), (_, flush) = orders(serves(state, "worker:1", 100))
    assert isinstance(start, messages.Start)
    # Epoch 2 was fed, and the chief has yet to report it: all meet at its end.
    assert start.joining == messages.Joining((("input", 2),), FitPlace(0, 2, 0, 2))
    assert flush == messages.Flush("input", 2)
    assert [each.name for each in state.unflushed("input", 2)] == ["worker:0", "worker:1"]
    assert [each.name for each in state.unflushed("input", 1)] == ["worker:0"]


def test_the_chief_alone_hears_which_epochs_are_over_and_its_new_attempt_hears_it_again():
    state = running()
    assert orders(state.come_to("input", 0)) == []
    over = messages.ComeTo("input", 1)
    assert orders(state.come_to("input", 1)) == [("worker:0", over)]
    assert orders(state.come_to("input", 1)) == []
    dies(state, "worker:0")
    assert orders(state.come_to("input", 2)) == []
    registers(state, "worker:0", 100)
    told = [order for _, order in orders(serves(state, "worker:0", 100))]
    assert told[1:] == [messages.ComeTo("input", 2)]


def test_validation_rows_of_a_missed_epoch_begin_with_that_epoch():
    state = running()
    state.come_to("input", 4)
    state.come_to("validation", 7)
    state.flush("input", 4, ("validation", 7))
    state.come_to("input", 5)
    joining, missed = state.open_epochs.joining(state.epochs)
    assert dict(joining.feeds) == {"input": 5, "validation": 7}
    assert missed == ()


def test_a_new_attempt_hears_that_feeds_have_ended_and_that_training_is_to_stop():
    state = running()
    state.finish(("input",))
    state.stop_training("enough")
    dies(state, "worker:0")
    registers(state, "worker:0", 100)
    told = [order for _, order in orders(serves(state, "worker:0", 100))]
    assert told[1:] == [messages.FinishFeed("input"), messages.StopTraining("enough")]


def test_nobody_waits_for_a_replacement_once_the_others_are_done_but_for_the_chiefs():
    state = running()
    dies(state, "worker:1")
    assert len(state.awaited()) == 2
    state.on_event(node_id("worker:0"), messages.Done(), NOW)
    assert state.awaited() == []
    state = running()
    dies(state, "worker:0")
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    assert [each.name for each in state.awaited()] == ["worker:0"]


def test_a_node_for_which_spark_has_no_slot_is_given_up_in_time():
    state = running(workers=5, reservation_timeout_s=30.0)
    dies(state, "worker:1")
    for name in ("ps:0", "worker:0"):
        state.members[name].heard_s = NOW + 31.0
    for second in range(31):
        assert not [each for each in state.on_tick(NOW + second) if isinstance(each, Warn)]
    warning = next(each for each in state.on_tick(NOW + 31.0) if isinstance(each, Warn))
    assert "Spark had no slot for a new attempt of worker:1 in 30 s" in warning.text
    assert "jobs that were submitted before" in warning.text
    assert "raise ClusterConfig(reservation_timeout_s=...)" in warning.text
    assert state.members["worker:1"].status is NodeStatus.LOST


def test_the_wait_for_a_slot_leaves_out_the_time_in_which_the_driver_was_suspended():
    state = running(workers=5, reservation_timeout_s=30.0)
    state.on_tick(NOW)
    dies(state, "worker:1")
    state.on_tick(NOW + 600.0)
    assert state.members["worker:1"].status is NodeStatus.RESTARTING


def test_a_job_that_could_not_start_a_node_again_counts_as_its_loss():
    state = running(workers=2)
    dies(state, "worker:1")
    again = state.on_not_restarted("worker:1", "no such file before the node served", NOW + 1.0)
    assert only(again, Replace).first_attempt == 200
    assert "no such file" in only(again, Warn).text


def test_attempts_that_end_before_they_register_wait_longer_and_longer():
    """However long the attempt had lived that they replace."""
    state = running(workers=5)
    delays_s = [only(dies(state, "worker:1"), Replace).delay_s]
    for second in range(1, 5):
        again = state.on_not_restarted("worker:1", "no such file", NOW + second)
        delays_s.append(only(again, Replace).delay_s)
    assert delays_s == [0.0, 0.0, 0.5, 1.0, 2.0]


@pytest.mark.fault("F14")
@pytest.mark.parametrize("name", ["ps:0", "worker:1"])
def test_a_job_that_finds_its_node_started_by_sparks_own_retry_is_no_loss(name):
    state = running(checkpoints=SAVES)
    replacing = only(dies(state, name, error_type=EXECUTOR_LOST), Replace)
    reply, _ = registers(state, name, 1)  # Spark's retry of the lost task, in the first job
    assert (reply.accepted, reply.has_begun) == (True, True)
    reply, _ = registers(state, name, replacing.first_attempt)
    assert (reply.accepted, reply.reason) == (False, f"attempt 1 of {name} is at work")
    end = JobEnd(nodes=(replacing.node,), first_attempt=replacing.first_attempt)
    assert state.on_job_ended(end, NOW) == []
    assert state.phase is ClusterPhase.RUNNING
    assert [each.node.name for each in state.failures] == [name]
    serves(state, name, 1)
    assert state.members[name].status is NodeStatus.RUNNING
    assert state.on_job_ended(end, NOW) == []


@pytest.mark.fault("F08")
def test_a_server_whose_executor_is_lost_starts_elsewhere_and_the_workers_learn_the_place():
    state = running(checkpoints=SAVES)
    dies(state, "worker:1")
    actions = dies(state, "ps:0", error_type=EXECUTOR_LOST)
    assert only(actions, Replace).node.name == "ps:0"
    assert state.phase is ClusterPhase.RUNNING
    registers(state, "ps:0", 100)
    told = orders(serves(state, "ps:0", 100, port=2))
    assert [name for name, _ in told] == ["ps:0", "ps:0", "worker:0"]
    assert told[1][1] == messages.FenceWorker(1, 0, "killed by SIGKILL")
    assert told[2][1] == messages.ServerMoved(0, Endpoint("h", 2))


@pytest.mark.fault("F08")
def test_workers_learn_of_a_server_that_its_supervisor_has_started_again_where_it_was():
    """They bring ps:0 what they have passed, though they may have nothing to ask of it."""
    state = running(checkpoints=SAVES)
    told = orders(serves(state, "ps:0", 0))
    moved = messages.ServerMoved(0, Endpoint("h", 1))
    assert told == [(f"worker:{rank}", moved) for rank in range(2)]


@pytest.mark.fault("F08")
def test_a_server_that_starts_elsewhere_waits_for_a_worker_that_is_back_once_it_trains():
    """It may have no rows yet: those who have would wait for it, and its rows for their epoch."""
    state = running(checkpoints=SAVES)
    dies(state, "worker:1")
    registers(state, "worker:1", 100)
    serves(state, "worker:1", 100)
    dies(state, "ps:0", error_type=EXECUTOR_LOST)
    registers(state, "ps:0", 100)
    told = [order for _, order in orders(serves(state, "ps:0", 100))]
    lost = [order for order in told if isinstance(order, messages.FenceWorker)]
    assert lost == [messages.FenceWorker(1, 0, "killed by SIGKILL")]


@pytest.mark.fault("F14")
@pytest.mark.parametrize("name", ["worker:0", "worker:1"])
def test_a_worker_that_was_lost_with_its_server_joins_when_the_server_is_back(name):
    """As with a host that is taken away: a roster without the server would be one of no servers."""
    state = running(checkpoints=SAVES)
    for each in (name, "ps:0"):
        dies(state, each, error_type=EXECUTOR_LOST)
    registers(state, name, 100)
    assert orders(serves(state, name, 100)) == []
    assert state.members[name].status is NodeStatus.READY
    assert [each.name for each in state.restarting()] == [name]
    registers(state, "ps:0", 100)
    back = serves(state, "ps:0", 100, port=2)
    texts = [each.text for each in back if isinstance(each, Tell)]
    assert "updates since its last checkpoint are lost" in texts[0], "who counts them is gone, too"
    told = orders(back)
    (start,) = (order for to, order in told if to == name and isinstance(order, messages.Start))
    assert start.joining is not None
    assert [each.endpoint.port for each in start.roster if each.node.role == "ps"] == [2]
    assert (name, messages.ServerMoved(0, Endpoint("h", 2))) not in told
    assert state.members[name].status is NodeStatus.RUNNING
    assert state.restarting() == []


@pytest.mark.fault("F14")
def test_a_worker_that_waits_for_a_lost_server_may_be_lost_again_and_ends_with_the_cluster():
    state = running(workers=2, checkpoints=SAVES)
    for each in ("worker:1", "ps:0"):
        dies(state, each, error_type=EXECUTOR_LOST)
    registers(state, "worker:1", 100)
    serves(state, "worker:1", 100)
    assert only(dies(state, "worker:1", 100), Replace).first_attempt == 200
    registers(state, "worker:1", 200)
    serves(state, "worker:1", 200)
    failed = state.on_not_restarted("ps:0", "no slot", NOW)
    assert {to for to, order in orders(failed) if isinstance(order, messages.Stop)} == {
        "worker:0",
        "worker:1",
    }


def test_a_worker_whose_main_fun_has_returned_is_not_started_again():
    state = running()
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    actions = dies(state, "worker:1", error_type=EXECUTOR_LOST)
    assert not [each for each in actions if isinstance(each, Replace)]


@pytest.mark.fault("F08")
@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"checkpoints": None}, {"error_type": EXECUTOR_LOST}),
        ({"checkpoints": SAVES, "ps": 0}, {"error_type": EXECUTOR_LOST}),
        ({"checkpoints": SAVES}, {"signal": 9}),
    ],
    ids=["no checkpoints", "no restarts", "its supervisor has used them up"],
)
def test_a_server_that_cannot_go_on_fails_the_cluster(config, fields):
    state = running(**config)
    dies(state, "ps:0", **fields)
    assert state.phase is ClusterPhase.FAILED


def test_the_chief_of_a_stream_is_not_started_again():
    state = running(workers=3)
    report = messages.BatchReport("input", 1, True, {"query": 4})
    state.on_event(node_id("worker:0"), report, NOW)
    dies(state, "worker:0")
    assert state.phase is ClusterPhase.FAILED


def test_a_cluster_that_ends_starts_nothing_again():
    state = running()
    state.end(state.live(), "shutdown", grace_s=1.0)
    reply, _ = registers(state, "worker:1", 1)
    assert not reply.accepted


@pytest.mark.fault("F01")
@pytest.mark.parametrize(("task_attempts", "num_taken"), [(2, 0), (4, 2)])
def test_the_last_attempt_that_spark_makes_is_refused_and_a_job_of_its_own_starts_the_node(
    task_attempts: int, num_taken: int
):
    state = running(workers=10, task_attempts=task_attempts)
    for attempt in range(1, num_taken + 1):  # each loses its executor, which silence would tell
        reply, actions = registers(state, "worker:1", attempt)
        assert reply.accepted
        assert not [each for each in actions if isinstance(each, Replace)]
    reply, actions = registers(state, "worker:1", num_taken + 1)
    assert not reply.accepted
    assert f"spark.task.maxFailures={task_attempts}" in reply.reason
    again = only(actions, Replace)
    assert registers(state, "worker:1", again.first_attempt)[0].accepted


def test_an_only_attempt_of_a_job_is_taken():
    state = running(task_attempts=1)
    again = only(dies(state, "worker:1"), Replace)
    assert registers(state, "worker:1", again.first_attempt)[0].accepted
