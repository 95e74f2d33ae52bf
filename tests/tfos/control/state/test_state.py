"""The driver's decisions, as lists of events and the actions they must give."""

from __future__ import annotations

import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id
from tfos.config import ClusterConfig, Restarts
from tfos.control import messages
from tfos.control.members import NodeStatus
from tfos.control.restarts.driver_pause import DriverPause
from tfos.control.state.actions import Action, Send, Tell, Warn
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import EXECUTOR_LOST, NODE_SILENT, NodeFailure
from tfos.phases import ClusterPhase
from tfos.topology import plan

NOW = 100.0
OF_TENSORFLOW = "tensorflow.python.framework.errors_impl"


def _state(cluster_size: int = 3, num_ps: int = 1, **config: object) -> ClusterState:
    state = ClusterState(plan(cluster_size, num_ps), ClusterConfig(**config))  # type: ignore[arg-type]
    state.move(ClusterPhase.RESERVED)
    return state


def _register(
    state: ClusterState, name: str, attempt: int = 0, now_s: float = NOW, pid: int = 0
) -> tuple[messages.RegisterReply, list[Action]]:
    register = messages.Register(node_id(name, attempt), "5", "host-b", pid or 1000 + attempt)
    return state.on_register(register, now_s)


def _listen(state: ClusterState, name: str, attempt: int = 0, now_s: float = NOW) -> list[Action]:
    return state.on_event(node_id(name, attempt), messages.Listening(Endpoint("h", 1)), now_s)


def _running(cluster_size: int = 3, num_ps: int = 1, **config: object) -> ClusterState:
    state = _state(cluster_size, num_ps, **config)
    for name in state.members:
        _register(state, name)
        _listen(state, name)
    assert state.phase is ClusterPhase.RUNNING
    return state


def _fail(state: ClusterState, name: str, **fields: object) -> list[Action]:
    failure = NodeFailure(node_id(name), "host-b", 7, **fields)  # type: ignore[arg-type]
    return state.on_event(node_id(name), messages.Failed(failure), NOW)


def _cut(state: ClusterState, name: str, now_s: float) -> None:
    """Let a node's stream of orders end, which was open since it was heard last."""
    member = state.members[name]
    state.on_stream_opened(node_id(name), member.stream + 1, member.heard_s)
    state.on_stream_closed(node_id(name), member.stream, now_s)


def _orders(actions: list[Action], kind: type) -> set[str]:
    return {
        action.node.name
        for action in actions
        if isinstance(action, Send) and isinstance(action.order, kind)
    }


@pytest.mark.fault("F55")
def test_harmless_differences_of_versions_are_told_once_for_equal_executors():
    state = _state()
    told = []
    for name, skew in (("ps:0", "numpy 2.3"), ("worker:0", "numpy 2.3"), ("worker:1", "")):
        register = messages.Register(node_id(name), "5", "host-b", 1, skew=skew)
        told += state.on_register(register, NOW)[1]
    (warning,) = told
    assert isinstance(warning, Warn)
    assert "executor 5 on host-b has numpy 2.3" in warning.text


@pytest.mark.attack("A26")
def test_the_roster_has_only_addresses_that_registered_nodes_gave_of_themselves():
    state, forged = _state(), messages.Listening(Endpoint("evil.example", 1))
    assert state.on_event(node_id("ps:0"), forged, NOW) == []  # it has not registered
    assert state.on_event(node_id("ps:7"), forged, NOW) == []  # there is none
    for name in state.members:
        assert not _register(state, name, attempt=1)[0].has_begun
    assert state.on_event(node_id("ps:0", 0), forged, NOW) == []  # an attempt that was replaced
    assert state.roster() == ()
    for name in state.members:
        event = messages.Listening(Endpoint(f"host-of-{name}", 1))
        state.on_event(node_id(name, 1), event, NOW)
    state.on_event(node_id("worker:0", 1), forged, NOW)  # another address afterwards
    hosts = {entry.node.name: entry.endpoint.host for entry in state.roster()}
    assert hosts == {name: f"host-of-{name}" for name in state.members}


def test_a_node_that_is_not_planned_is_refused():
    reply, _ = _register(_state(), "worker:7")
    assert not reply.accepted
    assert "worker:7" in reply.reason


@pytest.mark.fault("F01")
def test_a_worker_killed_from_outside_is_a_warning_and_the_servers_fence_it():
    state = _running()
    actions = _fail(state, "worker:1", signal=9, message="killed by SIGKILL")
    assert _orders(actions, messages.FenceWorker) == {"ps:0"}
    lost = next(action.order for action in actions if isinstance(action, Send))
    assert lost == messages.FenceWorker(1, 0, "killed by SIGKILL")
    warning = next(action for action in actions if isinstance(action, Warn))
    assert "worker:1@host-b was lost: killed by SIGKILL; worker:0 goes on" in warning.text
    assert state.phase is ClusterPhase.RUNNING
    assert [failure.node.name for failure in state.failures] == ["worker:1"]
    assert state.fatal == []


def test_a_warning_names_a_few_workers_and_counts_many():
    def told(num_workers: int) -> str:
        actions = _fail(_running(num_workers + 1), "worker:1", signal=9, message="killed")
        return next(action for action in actions if isinstance(action, Warn)).text

    assert told(4).endswith("killed; worker:0, worker:2, worker:3 go on")
    assert told(100).endswith("killed; 99 workers go on")


@pytest.mark.fault("F02")
@pytest.mark.parametrize(
    ("fed", "rows", "warned"),
    [
        (None, 0, True),  # InputMode.TENSORFLOW, before its first heartbeat too
        (None, 640, True),
        (0, 640, True),  # ctx.read where rows could be fed
        (320, 640, True),  # both
        (640, 640, False),
        (640, 0, False),  # a loop that reports no rows
    ],
)
def test_rows_that_a_lost_worker_read_itself_are_said_to_be_trained_by_nobody(fed, rows, warned):
    state = _running()
    if fed is not None or rows:
        feeds = () if fed is None else (messages.FeedSnapshot("input", fed_rows=fed),)
        beat = messages.Heartbeat(
            node_id("worker:1"), 1, "x", progress={"rows": float(rows)}, feeds=feeds
        )
        state.on_heartbeat(beat, NOW + 1)
    actions = _fail(state, "worker:1", signal=9, message="killed by SIGKILL")
    warnings = [each.text for each in actions if isinstance(each, Warn)]
    assert "worker:1@host-b was lost" in warnings[0]
    assert len(warnings) == 1 + warned
    for part in ("nobody trains the rows", "Restarts(workers=k)", "tolerate_lost_workers=False"):
        assert not warned or part in warnings[1]


def test_a_return_value_that_did_not_arrive_is_warned_of_once():
    state, done = _running(), messages.Done(no_result="main_fun returned a set")
    actions = [*state.on_event(node_id("worker:0"), done, NOW)]
    actions += state.on_event(node_id("worker:1"), done, NOW)
    (warning,) = [each for each in actions if isinstance(each, Warn)]
    assert warning.text.startswith("worker:0: main_fun returned a set. The run goes on")


@pytest.mark.fault("F08")
def test_servers_hear_of_a_worker_that_is_done_so_that_a_restarted_one_does_not_wait_for_it():
    state = _running()
    actions = state.on_event(node_id("worker:1"), messages.Done(), NOW)
    assert actions == [Send(node_id("ps:0", 0), messages.WorkerDone(1))]
    assert state.members["worker:1"].status is NodeStatus.DONE


@pytest.mark.parametrize("name", ["ps:0", "worker:0"])
def test_losing_a_server_or_the_chief_fails_the_cluster(name):
    state = _running()
    actions = _fail(state, name, signal=9)
    assert state.phase is ClusterPhase.FAILED
    assert _orders(actions, messages.Stop) == {"ps:0", "worker:0", "worker:1"} - {name}


@pytest.mark.fault("F08")
def test_a_worker_that_was_killed_in_its_exit_handlers_is_a_warning_with_the_next_step():
    state = _running()
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    state.end(state.live(), "shutdown", grace_s=5.0)
    (warning,) = state.on_event(node_id("worker:1"), messages.CutShort(5.0), NOW)
    assert isinstance(warning, Warn)
    assert "worker:1@host-b still ran exit handlers or threads 5 s after" in warning.text
    assert "shutdown(grace_secs=...)" in warning.text
    (warning,) = state.on_event(
        node_id("worker:1"), messages.CutShort(0.0, "killed by SIGKILL"), NOW
    )
    assert isinstance(warning, Warn)
    assert "worker:1@host-b, after main_fun had returned: killed by SIGKILL. " in warning.text
    assert state.failures == []


def test_a_server_that_was_started_again_is_a_warning_and_a_record():
    state = _running()
    failure = NodeFailure(node_id("ps:0"), "host-b", 7, message="ps:0 killed by SIGKILL")
    again = messages.Restarted(failure, 1, 2)
    (warning,) = state.on_event(node_id("ps:0"), again, NOW)
    assert isinstance(warning, Warn)
    assert warning.text.endswith("ps:0 killed by SIGKILL; started again (1 of 2)")
    lost = "ps:0: 12 s, at least 3,410 updates lost since step 900"
    assert state.on_event(node_id("ps:0"), messages.UpdatesLost(lost), NOW) == [Warn(lost)]
    assert state.failures == [failure]
    assert (state.fatal, state.phase) == ([], ClusterPhase.RUNNING)


@pytest.mark.fault("F40")
def test_saves_that_fail_are_warned_of_with_the_place_and_the_newest_step():
    state = _running()
    again = messages.NotSaved("/s", "OSError: no room", 3)
    (warning,) = state.on_event(node_id("worker:0"), again, NOW)
    assert isinstance(warning, Warn)
    told = "saving in /s failed: OSError: no room; the newest step is 3. The training goes on"
    assert warning.text.endswith(told)
    last = messages.NotSaved("/s", "OSError: no room", is_last=True)
    (warning,) = state.on_event(node_id("worker:0"), last, NOW)
    assert isinstance(warning, Warn)
    assert "the last save in /s failed: OSError: no room; it has no step yet" in warning.text
    assert state.failures == []


def test_losing_workers_one_by_one_ends_in_failure():
    state = _running(4, 1)
    _fail(state, "worker:1", signal=9)
    _fail(state, "worker:2", signal=15)
    assert state.fatal == []
    _fail(state, "worker:0", signal=9)
    assert state.phase is ClusterPhase.FAILED


def test_a_lost_worker_that_served_a_shard_fails_the_cluster_and_says_what_is_gone():
    state = _running(3, 0)
    for rank in range(3):
        state.on_event(node_id(f"worker:{rank}"), messages.ServesShard(), NOW)
    assert _orders(_killed(state, "worker:1"), messages.Stop) == {"worker:0", "worker:2"}
    (headline,) = state.fatal
    assert headline.message.startswith("worker:1 killed by SIGKILL. worker:1 served shard 2 of 3")
    assert "resume=True, or use num_ps >= 1" in headline.message


@pytest.mark.fault("F02")
@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("is_told_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("num_ps", [0, 1])
def test_a_worker_that_tensorflow_waits_for_fails_the_cluster_with_it(
    is_told_first, restarts, num_ps
):
    state = _running(3 + num_ps, num_ps, restarts=Restarts(workers=restarts))
    if is_told_first:
        state.on_event(node_id("worker:0"), messages.InCollective(2), NOW)
        stopped = _orders(_killed(state, "worker:1"), messages.Stop)
    else:  # it was lost before the others built their strategy
        _killed(state, "worker:1")
        assert state.fatal == []
        actions = state.on_event(node_id("worker:2"), messages.InCollective(2), NOW)
        stopped = _orders(actions, messages.Stop)
    assert {"worker:0", "worker:2"} <= stopped
    (headline,) = state.fatal
    assert state.failures == [headline]
    assert headline.node.name == "worker:1"
    assert headline.message.startswith("worker:1 killed by SIGKILL. MultiWorkerMirroredStrategy")
    assert "save in main_fun" in headline.message


def test_a_new_attempt_does_not_help_workers_that_know_the_old_ones_address():
    state = _running(3, 0, restarts=Restarts(workers=2))
    _killed(state, "worker:1")
    _register(state, "worker:1", attempt=100)
    _listen(state, "worker:1", attempt=100)
    assert state.fatal == []
    state.on_event(node_id("worker:0"), messages.InCollective(2), NOW)
    assert len(state.fatal) == 1
    (headline,) = state.fatal
    assert headline.message.startswith("worker:1 killed by SIGKILL. MultiWorkerMirroredStrategy")


def test_a_lost_worker_is_fatal_when_the_user_wants_that():
    state = _running(tolerate_lost_workers=False)
    _fail(state, "worker:1", signal=9)
    assert state.phase is ClusterPhase.FAILED


@pytest.mark.fault("F03")
@pytest.mark.parametrize(
    "fields",
    [
        {"exit_code": 1, "error_type": "ValueError", "traceback": "Traceback ..."},
        {"exit_code": 1, "message": "exited with code 1"},
        {"signal": 11, "message": "killed by SIGSEGV"},
    ],
)
def test_an_exception_or_crash_of_any_worker_stops_all(fields):
    state = _running()
    actions = _fail(state, "worker:1", **fields)
    assert state.phase is ClusterPhase.FAILED
    assert _orders(actions, messages.Stop) == {"ps:0", "worker:0"}


def test_failures_keep_their_order_of_arrival():
    state = _running(4, 1)
    _fail(state, "worker:2", error_type="ValueError", traceback="T2")
    _fail(state, "worker:1", error_type="KeyError", traceback="T1")
    assert [failure.node.name for failure in state.failures] == ["worker:2", "worker:1"]
    assert [failure.node.name for failure in state.fatal] == ["worker:2"]


@pytest.mark.fault("F06")
def test_a_silent_node_is_given_up_after_the_limit_and_fenced_when_it_thaws():
    state = _running()
    for name in ("ps:0", "worker:0"):
        state.on_heartbeat(messages.Heartbeat(node_id(name), 1, "x"), NOW + 19)
    assert state.on_tick(NOW + 19.9) == []
    actions = state.on_tick(NOW + 20.1)
    assert _orders(actions, messages.FenceWorker) == {"ps:0"}
    assert state.failures[0].error_type == NODE_SILENT
    assert "20.1 s (limit 20 s)" in state.failures[0].message
    beat, _ = state.on_heartbeat(messages.Heartbeat(node_id("worker:1"), 2, "x"), NOW + 25)
    assert beat.fenced


def _beat_all(state: ClusterState, now_s: float) -> None:
    for name in state.members:
        state.on_heartbeat(messages.Heartbeat(node_id(name), int(now_s), "x"), now_s)


@pytest.mark.fault("F06")
def test_nodes_that_a_suspended_driver_did_not_hear_are_not_lost():
    state = _running(lease_s=120.0)
    assert state.on_tick(NOW) == []
    assert state.on_tick(NOW + 60) == []  # not one heartbeat between: SIGSTOP, and SIGCONT
    _beat_all(state, NOW + 61)
    assert state.on_tick(NOW + 61) == []
    assert len(state.live()) == 3
    assert _orders(state.on_tick(NOW + 63), messages.FenceWorker) == set()
    for late_s in range(64, 83):
        state.on_tick(NOW + late_s)
    assert state.phase is ClusterPhase.FAILED  # they are silent now: ps:0 for hang_s
    assert [failure.error_type for failure in state.failures][:1] == [NODE_SILENT]
    assert "suspended" not in state.failures[0].message  # their lease is longer than that


@pytest.mark.fault("F06")
def test_the_headline_after_a_suspension_of_the_driver_is_the_suspension():
    state = _running(tolerate_lost_workers=False)
    state.on_tick(NOW)
    for name in state.members:  # the closed connections are read before the first tick
        _cut(state, name, NOW + 60)
    assert state.on_tick(NOW + 60) == []
    assert state.on_tick(NOW + 62) == []
    state.on_tick(NOW + 64)
    text = state.fatal[0].message
    assert "connection closed 4.0 s ago" in text
    assert "the driver itself was suspended for 59 s" in text
    assert "lease_s=20 s" in text


def test_a_failure_that_is_heard_before_the_first_tick_after_a_suspension_is_explained():
    pause = DriverPause(ClusterConfig())
    pause.on_tick([], NOW)
    failure = NodeFailure(node_id("worker:1"), "h", 7, message="its executor was lost")
    assert "was suspended for 59 s" in pause.explained(failure, NOW + 60).message


def test_an_error_of_main_fun_after_a_suspension_stays_the_headline():
    state = _running()
    state.on_tick(NOW)
    state.on_tick(NOW + 60)
    _fail(state, "worker:1", error_type="ValueError", traceback="T1", message="bad rows")
    assert state.fatal[0].message == "bad rows"


def test_a_broken_connection_that_does_not_come_back_is_a_loss_within_seconds():
    state = _running()
    _cut(state, "worker:1", NOW)
    assert state.on_tick(NOW + 2.9) == []
    assert _orders(state.on_tick(NOW + 3.1), messages.FenceWorker) == {"ps:0"}


def test_a_connection_that_comes_back_is_no_loss():
    state = _running()
    _cut(state, "worker:1", NOW)
    assert state.on_stream_opened(node_id("worker:1"), 9, NOW + 2) == ""
    assert state.on_tick(NOW + 4) == []


@pytest.mark.fault("F28")
@pytest.mark.parametrize("opened", [(1, 2), (2, 1)])
def test_the_late_end_of_an_older_stream_does_not_close_the_newer_one(opened):
    """Threads of the driver open two streams, and note the end of the first, in any order."""
    state, node = _running(), node_id("worker:1")
    for number in opened:
        assert state.on_stream_opened(node, number, NOW) == ""
    state.on_stream_closed(node, 1, NOW + 1)
    assert state.members["worker:1"].stream_lost_s is None
    state.stop(state.live(), "bye", grace_s=1)
    state.on_stream_closed(node, 1, NOW + 1)
    assert state.members["worker:1"].is_live
    state.on_stream_closed(node, 2, NOW + 1)
    assert state.members["worker:1"].status is NodeStatus.ENDED


def test_a_new_attempt_counts_its_streams_from_the_beginning():
    state = _state()
    _register(state, "worker:1")
    state.on_stream_opened(node_id("worker:1"), 7, NOW)
    _register(state, "worker:1", attempt=1)
    state.on_stream_opened(node_id("worker:1", 1), 1, NOW)
    state.on_stream_closed(node_id("worker:1", 1), 1, NOW)
    assert state.members["worker:1"].stream_lost_s == NOW


def test_a_node_lost_while_starting_may_come_again():
    state = _state()
    _register(state, "worker:0")
    _listen(state, "worker:0")
    _cut(state, "worker:0", NOW)
    actions = state.on_tick(NOW + 4)
    assert [type(action) for action in actions] == [Warn]
    assert state.phase is ClusterPhase.RESERVED
    assert _register(state, "worker:0", attempt=1)[0].accepted


def _silent_while_starting(*, listens: bool) -> ClusterState:
    """Return a cluster of which worker:0 has fallen silent and all others serve."""
    state = _state()
    for name in state.members:
        _register(state, name)
        if listens or name != "worker:0":
            _listen(state, name)
        if name == "worker:0":
            _cut(state, name, NOW)
            (warning,) = state.on_tick(NOW + 4)
            assert isinstance(warning, Warn)
            assert "connection closed 4.0 s ago (limit 3 s): its supervisor ended" in warning.text
            assert "it goes on if it is heard again" in warning.text
        state.members[name].heard_s = NOW + 4
    assert [each.name for each in state.missing()] == ["worker:0"]
    return state


@pytest.mark.fault("F03")
def test_a_node_that_was_silent_while_starting_goes_on_once_it_is_heard_again():
    state = _silent_while_starting(listens=True)
    assert state.on_stream_opened(node_id("worker:0"), 9, NOW + 5) == ""
    reply, actions = state.on_heartbeat(messages.Heartbeat(node_id("worker:0"), 1, "x"), NOW + 5)
    assert not reply.fenced
    assert state.phase is ClusterPhase.RUNNING
    assert _orders(actions, messages.Start) == set(state.members)


@pytest.mark.fault("F03")
def test_what_a_silent_node_reports_when_it_is_heard_again_counts():
    state = _silent_while_starting(listens=False)
    actions = _listen(state, "worker:0", now_s=NOW + 5)
    assert state.phase is ClusterPhase.RUNNING
    assert _orders(actions, messages.Start) == set(state.members)


def test_a_silent_node_is_not_taken_back_by_a_cluster_that_ends():
    state = _silent_while_starting(listens=True)
    state.end(state.live(), "the end", grace_s=1.0)
    reply, actions = state.on_heartbeat(messages.Heartbeat(node_id("worker:0"), 1, "x"), NOW + 5)
    assert (reply.fenced, actions) == (True, [])
    assert state.on_stream_opened(node_id("worker:0"), 9, NOW + 5)


def test_a_newer_attempt_takes_the_place_of_a_silent_node():
    state = _silent_while_starting(listens=True)
    assert _register(state, "worker:0", attempt=1)[0].accepted
    reply, _ = state.on_heartbeat(messages.Heartbeat(node_id("worker:0"), 1, "x"), NOW + 5)
    assert reply.fenced


@pytest.mark.fault("F04")
def test_a_child_killed_while_starting_fails_the_start_as_nobody_starts_it_again():
    state = _state()
    _register(state, "ps:0")
    _register(state, "worker:1")
    actions = _fail(state, "worker:1", signal=9, message="killed by SIGKILL")
    assert state.phase is ClusterPhase.FAILED
    assert state.fatal[0].node.name == "worker:1"
    assert _orders(actions, messages.Stop) == {"ps:0"}


def test_an_executor_lost_while_starting_is_awaited_again():
    state = _state()
    _register(state, "worker:1")
    actions = _fail(state, "worker:1", error_type=EXECUTOR_LOST, message="JVM ended")
    assert [type(action) for action in actions] == [Warn]
    assert _register(state, "worker:1", attempt=1)[0].accepted


def test_a_retried_task_of_a_running_cluster_is_refused_and_its_old_attempt_lost():
    state = _running()
    reply, actions = _register(state, "worker:1", attempt=1)
    assert not reply.accepted
    assert _orders(actions, messages.FenceWorker) == {"ps:0"}
    assert state.failures[0].error_type == EXECUTOR_LOST


def test_a_flush_goes_to_those_who_train_and_waits_for_them_only():
    state = _running(4, 1)
    state.on_event(node_id("worker:0"), messages.Done(), NOW)
    actions = state.flush("input", 0)
    assert _orders(actions, messages.Flush) == {"worker:1", "worker:2"}
    state.on_event(node_id("worker:1"), messages.FlushReached("input", 0), NOW)
    assert [member.name for member in state.unflushed("input", 0)] == ["worker:2"]
    _fail(state, "worker:2", signal=9)
    assert state.unflushed("input", 0) == []


def test_a_flush_carries_the_counts_of_its_moment():
    state = _running()
    old = messages.FeedSnapshot("input", fed_rows=10, taken_rows=4)
    beat = messages.Heartbeat(node_id("worker:1"), 1, "x", feeds=(old,))
    state.on_heartbeat(beat, NOW)
    final = messages.FeedSnapshot("input", fed_rows=10, taken_rows=10)
    state.on_event(node_id("worker:1"), messages.FlushReached("input", 0, final), NOW)
    assert state.members["worker:1"].feed("input") == final


def test_ends_of_epochs_that_are_told_in_another_order_are_kept():
    state = _running()
    for epoch in (1, 0):
        state.on_event(node_id("worker:1"), messages.FlushReached("input", epoch), NOW)
    assert [member.name for member in state.unflushed("input", 1)] == ["worker:0"]


def test_an_orderly_end_is_no_failure():
    state = _running()
    assert _orders(state.finish(("input",)), messages.FinishFeed) == {"worker:0", "worker:1"}
    for name in ("worker:0", "worker:1"):
        state.on_event(node_id(name), messages.Done(), NOW)
    assert state.training() == []
    assert _orders(state.stop(state.live(), "bye", grace_s=1), messages.Stop) == set(state.members)
    assert state.stop(state.live(), "again", grace_s=1) == []
    for name in state.members:
        _cut(state, name, NOW)
    assert state.live() == []
    assert state.failures == []


def test_a_server_that_ends_by_itself_fails_the_cluster():
    state = _running()
    state.on_event(node_id("ps:0"), messages.Done(), NOW)
    assert state.phase is ClusterPhase.FAILED
    assert "ended without an order" in state.fatal[0].message


@pytest.mark.parametrize("serves", [False, True])
def test_a_worker_that_ends_before_main_fun_began_fails_the_cluster(serves: bool):
    state = _state()
    for name in state.members:
        _register(state, name)
    if serves:
        _listen(state, "worker:1")
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    assert state.phase is ClusterPhase.FAILED
    assert "before main_fun began" in state.fatal[0].message


def test_a_worker_killed_by_our_own_stop_is_no_failure():
    state = _running()
    state.stop(state.live(), "bye", grace_s=1)
    _fail(state, "worker:1", signal=9)
    assert state.failures == []
    assert state.members["worker:1"].status is NodeStatus.ENDED


@pytest.mark.parametrize(
    ("has_failed", "how", "num_records"),
    [
        (True, {"error_type": "ValueError", "traceback": "T"}, 2),  # before it heard the order
        (True, {"signal": 9}, 1),
        (False, {"error_type": "KeyboardInterrupt", "traceback": "T"}, 0),
    ],
)
def test_what_a_stopped_worker_raises_is_a_record_of_a_cluster_that_failed(
    has_failed: bool, how: dict[str, object], num_records: int
):
    state = _running()
    if has_failed:
        _fail(state, "worker:0", error_type="ValueError", message="bad row", traceback="T")
    else:
        state.stop(state.live(), "bye", grace_s=1)
    _fail(state, "worker:1", **how)
    assert len(state.failures) == num_records
    assert [each.node.name for each in state.fatal] == ["worker:0"] * has_failed


@pytest.mark.parametrize("is_terminated", [True, False])
def test_a_feed_is_terminated_where_every_worker_that_is_left_has_ended_it(is_terminated: bool):
    state = _running(cluster_size=4)
    _fail(state, "worker:1", signal=9)  # it had not
    ended = messages.FeedSnapshot("input", is_drained=True, is_terminated=True)
    returned = messages.FeedSnapshot("input", is_drained=True, is_terminated=is_terminated)
    beat = messages.Heartbeat(node_id("worker:0"), 1, "main_fun", feeds=(ended,))
    state.on_heartbeat(beat, NOW)
    state.on_event(node_id("worker:2"), messages.Done((returned,)), NOW)
    assert state.is_terminated("input") is is_terminated


def test_nodes_of_a_cluster_that_starts_are_not_started_again():
    state = _state()
    _register(state, "worker:0")
    _register(state, "worker:1")
    _listen(state, "worker:1")
    assert (state.restarting(), state.awaited()) == ([], [])


@pytest.mark.parametrize("name", ["ps:0", "worker:1"])
def test_a_node_that_ends_as_ordered_is_there_until_its_supervisor_has_cleaned_up(name: str):
    state = _running()
    state.stop(state.live(), "bye", grace_s=1)
    state.on_event(node_id(name), messages.Done(), NOW)
    assert state.members[name].is_live
    _cut(state, name, NOW)
    assert not state.members[name].is_live
    assert state.failures == []


def test_tensorboard_is_told_and_its_absence_is_a_warning():
    state = _running()
    up = messages.TensorBoardUp("http://127.0.0.1:6006")
    assert state.on_event(node_id("worker:0"), up, NOW) == [
        Tell("TensorBoard: http://127.0.0.1:6006")
    ]
    down = messages.TensorBoardUp("", "not installed")
    assert state.on_event(node_id("worker:0"), down, NOW) == [Warn("no TensorBoard: not installed")]


@pytest.mark.attack("A23")
@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("http://localhost:6006/", False),
        ("http://127.0.0.1:6006/", False),
        ("http://[::1]:6006/", False),
        ("http://10.0.0.7:6006/", True),
        ("http://host-b:6006/", True),
        ("http://127.example.org:6006/", True),  # a name, whatever it begins with
        ("http://[", True),
    ],
)
def test_a_tensorboard_that_others_can_reach_is_warned_of(url, is_open):
    state = _running()
    up = messages.TensorBoardUp(url)
    actions = state.on_event(node_id("worker:0"), up, NOW)
    assert actions[0] == Tell(f"TensorBoard: {url}")
    warnings = [action.text for action in actions if isinstance(action, Warn)]
    assert len(warnings) == is_open
    assert all("has no login" in text and "tensorboard_host=" in text for text in warnings)


@pytest.mark.fault("F26")
def test_a_report_that_comes_again_because_its_ack_was_lost_has_no_effect():
    state = _running()
    chief, server = node_id("worker:0"), node_id("ps:0")
    killed = messages.Restarted(NodeFailure(server, "h", 7, signal=9), 1, 3)
    reports = [
        messages.EventReport(chief, 1, messages.EpochTrained(1, 0, {"loss": 0.5})),
        messages.EventReport(chief, 2, messages.TensorBoardUp("http://h:6006/")),
        messages.EventReport(chief, 3, messages.EpochTrained(1, 1, {"loss": 0.5})),
        messages.EventReport(server, 1, killed),
        messages.EventReport(server, 2, messages.UpdatesLost("3 updates")),
    ]
    for each in reports:
        assert state.on_report(each, NOW) or isinstance(each.event, messages.EpochTrained)
        assert state.on_report(each, NOW + 1) == []
        assert state.members[each.node.name].heard_s == NOW + 1
    assert state.on_report(reports[0], NOW + 2) == []  # its first try was late
    assert (state.epochs.count, len(state.failures)) == (2, 1)


@pytest.mark.fault("F26")
def test_a_new_attempt_counts_its_reports_from_the_beginning():
    state = _running(restarts=Restarts(workers=1))
    worker = node_id("worker:1")
    state.on_report(messages.EventReport(worker, 1, messages.PhaseChanged("a")), NOW)
    _fail(state, "worker:1", signal=9)
    again = node_id("worker:1", state.members["worker:1"].first_attempt)
    state.on_register(messages.Register(again, "1", "h", 8), NOW)
    state.on_report(messages.EventReport(again, 1, messages.PhaseChanged("b")), NOW)
    assert state.members["worker:1"].phase == "b"


@pytest.mark.fault("F26")
def test_a_report_that_the_driver_could_not_handle_is_handled_when_it_comes_again(monkeypatch):
    state = _running()
    report = messages.EventReport(node_id("worker:0"), 1, messages.EpochTrained(1, 0, {}))
    with monkeypatch.context() as broken:
        broken.setattr(state.epochs, "note", lambda event: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.on_report(report, NOW)
    state.on_report(report, NOW)
    assert state.epochs.count == 1


@pytest.mark.fault("F19")
def test_a_missing_node_is_described_with_place_age_and_phase():
    state = _state()
    _register(state, "worker:1")
    event = messages.PhaseChanged("import tensorflow")
    state.on_event(node_id("worker:1"), event, NOW + 1)
    text = state.members["worker:1"].describe(NOW + 58)
    assert text == (
        "worker:1 (executor 5 on host-b, pid 1000, 58 s since it registered, "
        "last phase: import tensorflow)"
    )
    assert "never registered" in state.members["worker:0"].describe(NOW)


def _on_tensorflow(*, has_strategy: bool = True, **config: object) -> ClusterState:
    made = plan(4, 1, ps="tensorflow")
    state = ClusterState(made, ClusterConfig(**config))  # type: ignore[arg-type]
    state.move(ClusterPhase.RESERVED)
    for name in state.members:
        _register(state, name)
        _listen(state, name)
    assert state.phase is ClusterPhase.RUNNING
    if has_strategy:
        assert state.on_event(node_id("chief:0"), messages.StrategyBuilt(), NOW) == []
    return state


def _killed(state: ClusterState, name: str) -> list[Action]:
    return _fail(state, name, signal=9, message=f"{name} killed by SIGKILL")


def test_a_lost_worker_of_tensorflow_is_the_coordinators_matter_while_others_live():
    state = _on_tensorflow()
    (warning,) = _killed(state, "worker:1")
    assert isinstance(warning, Warn)
    assert "coordinator gives its work to worker:0" in warning.text
    assert state.fatal == []
    _killed(state, "worker:0")  # nobody is left to compute
    assert state.phase is ClusterPhase.FAILED


@pytest.mark.parametrize("name", ["worker:1", "ps:0"])
def test_a_server_of_tensorflow_that_is_lost_before_the_strategy_fails_the_cluster(name: str):
    state = _on_tensorflow(has_strategy=False)
    others = {"worker:0", "worker:1", "ps:0", "chief:0"} - {name}
    assert _orders(_killed(state, name), messages.Stop) == others
    assert state.fatal[0].message.startswith(
        f"{name} killed by SIGKILL. It was lost before main_fun"
    )
    assert "start the cluster again" in state.fatal[0].message


def test_a_lost_worker_of_tensorflow_costs_nothing_once_main_fun_has_returned():
    state = _on_tensorflow(has_strategy=False)
    state.on_event(node_id("chief:0"), messages.Done(), NOW)
    _killed(state, "worker:1")
    assert state.phase is ClusterPhase.RUNNING


def test_a_lost_worker_of_tensorflow_fails_where_none_is_to_be_tolerated():
    state = _on_tensorflow(tolerate_lost_workers=False)
    _killed(state, "worker:1")
    assert state.phase is ClusterPhase.FAILED


def test_the_chiefs_error_is_the_headline_after_a_lost_server_of_tensorflow():
    state = _on_tensorflow()
    (warning,) = _killed(state, "ps:0")
    assert isinstance(warning, Warn)
    assert state.fatal == []
    _fail(state, "chief:0", error_type="UnavailableError", message="gone", traceback="t")
    (headline,) = state.fatal
    assert headline.node.name == "chief:0"
    assert headline.message.startswith("gone\nTensorFlow's parameter server ps:0 was lost before.")
    assert "tf.train.CheckpointManager" in headline.message


def test_a_lost_server_of_tensorflow_that_main_fun_never_notices_fails_the_cluster():
    state = _on_tensorflow()
    _killed(state, "ps:0")
    for now_s in (NOW + second for second in range(60)):
        for member in state.members.values():
            member.heard_s = now_s
        assert state.on_tick(now_s) == []
    for member in state.members.values():
        member.heard_s = NOW + 61
    assert _orders(state.on_tick(NOW + 61), messages.Stop) == {"worker:0", "worker:1", "chief:0"}
    assert state.fatal[0].node.name == "ps:0"
    assert "main_fun did not notice it for 60 s" in state.fatal[0].message


def test_a_lost_server_of_tensorflow_after_main_fun_costs_nothing():
    state = _on_tensorflow()
    state.on_event(node_id("chief:0"), messages.Done(), NOW)
    _killed(state, "ps:0")
    for now_s in (NOW + second for second in range(62)):
        for member in state.members.values():
            member.heard_s = now_s
        assert state.on_tick(now_s) == []
    assert state.phase is ClusterPhase.RUNNING


def test_a_server_of_tensorflow_that_raises_or_ends_fails_the_cluster():
    state = _on_tensorflow()
    _fail(state, "worker:1", error_type="ImportError", message="no tensorflow", exit_code=1)
    assert state.phase is ClusterPhase.FAILED
    state = _on_tensorflow()
    state.on_event(node_id("ps:0"), messages.Done(), NOW)
    assert "ended without an order" in state.fatal[0].message


def test_a_lost_worker_of_a_mirrored_strategy_fails_the_cluster_since_the_others_would_wait():
    state = _mirrored()
    assert _orders(_killed(state, "worker:1"), messages.Stop) == {"worker:0"}
    assert state.fatal[0].message.startswith("worker:1 killed by SIGKILL. MultiWorkerMirroredStrat")


def _mirrored(cluster_size: int = 2) -> ClusterState:
    state = ClusterState(plan(cluster_size, 0, ps="tensorflow"), ClusterConfig())
    state.move(ClusterPhase.RESERVED)
    for name in state.members:
        _register(state, name)
        _listen(state, name)
    return state


@pytest.mark.fault("F14")
@pytest.mark.parametrize("is_told", [True, False], ids=["by its supervisor", "by silence"])
def test_a_mirrored_worker_that_is_lost_after_main_fun_returned_costs_nothing(is_told):
    state = _mirrored()
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    if is_told:  # while the chief exports
        actions = _fail(state, "worker:1", error_type=EXECUTOR_LOST, message="executor 5 is lost")
    else:
        state.members["worker:0"].heard_s = NOW + 50
        actions = state.on_tick(NOW + 50)
    assert (state.phase, state.fatal) == (ClusterPhase.RUNNING, [])
    assert [each.node.name for each in state.failures] == ["worker:1"]
    assert state.members["worker:1"].status is NodeStatus.LOST
    (warning,) = actions
    assert isinstance(warning, Warn)
    assert warning.text.endswith("; its main_fun had returned before")


@pytest.mark.fault("F02")
@pytest.mark.parametrize("is_lost_then", [False, True])
@pytest.mark.parametrize("returns_first", [True, False])
def test_a_strategy_that_waits_for_a_worker_that_has_returned_fails_the_cluster(
    returns_first, is_lost_then
):
    state = _mirrored()
    told: dict[str, messages.Event] = {
        "worker:1": messages.Done(),
        "worker:0": messages.InCollective(2),
    }
    actions: list[Action] = []
    for name in sorted(told, reverse=returns_first):
        assert state.fatal == []
        actions = state.on_event(node_id(name), told[name], NOW)
        if is_lost_then and name == "worker:1" and returns_first:
            _fail(state, name, error_type=EXECUTOR_LOST, message="executor 5 is lost")
    assert _orders(actions, messages.Stop) >= {"worker:0"}
    (headline,) = state.fatal
    assert headline.node.name == "worker:1"
    assert headline.message.startswith("main_fun of worker:1 has returned without a MultiWorker")
    assert "worker:0 waits" in headline.message
    assert "take the same number of steps" in headline.message


@pytest.mark.parametrize(
    "event",
    [messages.FlushReached("input", 0), messages.PhaseChanged("fit"), messages.ServesShard()],
)
def test_how_far_a_worker_is_asks_nothing_of_all_the_others(
    event: messages.Event, monkeypatch: pytest.MonkeyPatch
):
    """With a thousand workers that took most of the time under the driver's lock."""
    state = _running()
    monkeypatch.setattr(ClusterState, "workers", property(lambda state: pytest.fail("all of them")))
    assert state.on_event(node_id("worker:1"), event, NOW) == []


def test_a_worker_outside_the_strategy_of_the_others_may_return():
    state = _mirrored(3)
    for name, event in (
        ("worker:0", messages.InCollective(2)),
        ("worker:2", messages.Done()),
        ("worker:1", messages.InCollective(2)),
    ):
        state.on_event(node_id(name), event, NOW)
        assert state.fatal == []


def test_a_notice_of_a_strategy_that_comes_late_fails_nobody():
    """Reports of two nodes overtake each other."""
    state = _mirrored()
    for event in (messages.InCollective(2), messages.Done()):
        state.on_event(node_id("worker:1"), event, NOW)
    assert state.on_event(node_id("worker:0"), messages.InCollective(2), NOW) == []
    _fail(state, "worker:1", error_type=EXECUTOR_LOST, message="executor 5 is lost")
    assert state.fatal == []


@pytest.mark.parametrize(
    ("error", "is_explained"), [(f"{OF_TENSORFLOW}.UnavailableError", True), ("KeyError", False)]
)
def test_the_error_of_a_step_or_save_without_a_worker_that_returned_says_so(error, is_explained):
    """TensorFlow's own text calls it unhealthy and crashed."""
    state = _mirrored()
    for name in state.members:
        state.on_event(node_id(name), messages.InCollective(2), NOW)
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    _fail(state, "worker:0", error_type=error, message="Collective ops is aborted", traceback="t")
    (headline,) = state.fatal
    assert headline.node.name == "worker:0"
    assert headline.message.startswith("Collective ops is aborted")
    for added in (
        "main_fun of worker:1 had returned before: all workers must",
        "All workers must take part in a save, too: compat.export_saved_model(",
    ):
        assert (added in headline.message) is is_explained


def _beats(state: ClusterState, now_s: float, **steps: int) -> list[Action]:
    """Let a second pass, with a heartbeat of each worker."""
    for name in ("worker:0", "worker:1", "worker:2"):
        progress = {"steps": float(steps.get(name.replace(":", ""), 0)), "at_s": now_s}
        beat = messages.Heartbeat(node_id(name), int(now_s), "main_fun", progress=progress)
        state.on_heartbeat(beat, now_s)
    return state.on_tick(now_s)


def test_workers_that_stand_still_after_another_one_returned_are_warned_of_once():
    state = _mirrored(3)
    for name in state.members:
        state.on_event(node_id(name), messages.InCollective(2), NOW)
    told = [each for second in range(100) for each in _beats(state, NOW + second)]
    assert told == []  # nobody has returned
    state.on_event(node_id("worker:1"), messages.Done(), NOW + 100)
    told = [each for s in range(100, 159) for each in _beats(state, NOW + s, worker0=s)]
    assert told == []
    told = [each for s in range(159, 400) for each in _beats(state, NOW + s, worker0=s)]
    assert len(told) == 1
    (warning,) = told
    assert isinstance(warning, Warn)
    assert "main_fun of worker:1 has returned, and worker:2 reports no progress" in warning.text
    assert "take the same number of steps" in warning.text
    assert state.fatal == []


def test_a_worker_that_goes_on_or_is_alone_is_not_said_to_stand_still():
    state = _mirrored(3)
    for name in state.members:
        state.on_event(node_id(name), messages.InCollective(2), NOW)
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    told = [e for s in range(300) for e in _beats(state, NOW + s, worker0=s // 50, worker2=s)]
    assert told == []
    independent = _running(4, 1)
    independent.on_event(node_id("worker:1"), messages.Done(), NOW)
    for second in range(300):
        independent.members["ps:0"].heard_s = NOW + second
        assert _beats(independent, NOW + second) == []


def test_a_worker_outside_the_strategy_is_blamed_for_nothing_when_it_returns():
    """Workers 0 and 1 have a TF_CONFIG of two tasks; worker 2 evaluates."""
    state = _mirrored(3)
    for name in ("worker:0", "worker:1"):
        state.on_event(node_id(name), messages.InCollective(2), NOW)
    state.on_event(node_id("worker:2"), messages.Done(), NOW)
    assert [each for second in range(100) for each in _beats(state, NOW + second)] == []
    error = f"{OF_TENSORFLOW}.UnavailableError"
    _fail(state, "worker:0", error_type=error, message="Collective ops is aborted", traceback="t")
    assert [each.message for each in state.fatal] == ["Collective ops is aborted"]


def test_a_worker_outside_the_strategy_is_not_said_to_wait_for_one_of_it():
    state = _mirrored(3)
    for name in ("worker:0", "worker:1"):
        state.on_event(node_id(name), messages.InCollective(2), NOW)
    state.on_event(node_id("worker:0"), messages.Done(), NOW)
    told = [each for s in range(300) for each in _beats(state, NOW + s, worker1=s)]
    assert told == []


def test_workers_that_cannot_tell_of_their_strategy_are_warned_of_all_the_same():
    """Another version of TensorFlow has no notice of it."""
    state = _mirrored(3)
    state.on_event(node_id("worker:1"), messages.Done(), NOW)
    told = [each for second in range(100) for each in _beats(state, NOW + second)]
    assert ["worker:1 has returned" in each.text for each in told if isinstance(each, Warn)] == [
        True
    ]


def _evaluated(**config: object) -> ClusterState:
    state = ClusterState(plan(4, 1, eval_node=True), ClusterConfig(**config))  # type: ignore[arg-type]
    state.move(ClusterPhase.RESERVED)
    for name in state.members:
        _register(state, name)
        _listen(state, name)
    assert state.phase is ClusterPhase.RUNNING
    return state


@pytest.mark.parametrize(
    "fields",
    [
        {"signal": 9, "message": "killed"},
        {"error_type": "ValueError", "message": "bad data", "traceback": "Traceback"},
        {"exit_code": 3, "message": "exit code 3"},
        {"error_type": EXECUTOR_LOST, "message": "its executor was lost"},
    ],
)
def test_whatever_ends_an_evaluator_costs_the_training_nothing(fields):
    state = _evaluated(tolerate_lost_workers=False)
    actions = _fail(state, "evaluator:0", **fields)
    assert [type(each) for each in actions] == [Warn]
    warning = actions[0]
    assert isinstance(warning, Warn)
    assert "evaluator:0@host-b was lost: " in warning.text
    assert fields["message"] in warning.text
    assert "the training goes on without it" in warning.text
    assert (state.phase, state.fatal) == (ClusterPhase.RUNNING, [])
    assert [each.message for each in state.failures] == [fields["message"]]
    assert [each.name for each in state.training()] == ["worker:0", "worker:1"]
    assert not state.evaluating()


def test_a_silent_evaluator_is_lost_and_does_not_come_back():
    state = _evaluated()
    for name in ("ps:0", "worker:0", "worker:1"):
        state.members[name].heard_s = NOW + 100
    (warning,) = state.on_tick(NOW + 100)
    assert isinstance(warning, Warn)
    reply, actions = _register(state, "evaluator:0", attempt=1)
    assert (reply.accepted, actions) == (False, [])
    assert state.phase is ClusterPhase.RUNNING


def test_nobody_waits_for_an_evaluator_and_servers_do_not_hear_of_it():
    state = _evaluated()
    done = state.on_event(node_id("evaluator:0"), messages.Done(), NOW)
    assert done == []
    assert {each.name for each in state.unflushed("input", 0)} == {"worker:0", "worker:1"}
    assert _orders(state.flush("input", 0), messages.Flush) == {"worker:0", "worker:1"}
    state = _evaluated()
    for name in ("worker:0", "worker:1"):
        done = state.on_event(node_id(name), messages.Done(), NOW)
        assert _orders(done, messages.WorkerDone) == {"ps:0"}
    assert not state.training()
    assert _orders(state.stop_evaluating(), messages.StopTraining) == {"evaluator:0"}


def test_an_evaluator_that_fails_before_the_cluster_runs_is_shown_as_any_other():
    state = ClusterState(plan(3, 1, eval_node=True), ClusterConfig())
    state.move(ClusterPhase.RESERVED)
    _register(state, "evaluator:0")
    _fail(state, "evaluator:0", error_type="ModuleNotFoundError", traceback="Traceback")
    assert state.phase is ClusterPhase.FAILED


def test_evaluations_are_kept_in_order_and_told():
    state = _evaluated()
    event = messages.Evaluated(120, {"val_loss": 0.25, "val_\x1b[2J": 1.0}, 0.5)
    (told,) = state.on_event(node_id("evaluator:0"), event, NOW)
    assert isinstance(told, Tell)
    assert told.text.startswith("evaluator:0: checkpoint of step 120: val_loss 0.25, val_")
    assert "\x1b" not in told.text
    assert [each.step for each in state.epochs.evaluations] == [120]
