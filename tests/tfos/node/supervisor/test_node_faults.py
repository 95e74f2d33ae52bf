"""How a node ends when something around it or inside it breaks, and that nothing is left."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from ps.client.client import PSClient
from ps.errors import PSError
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Identity, Role
from tests.support.feed import eventually
from tests.support.marked_processes import wait_gone
from tests.support.node_places import DriverLine
from tests.support.nodes import WAIT_S, wait_forever
from tests.support.ps_cluster import ADD, filled, make_manifest
from tfos.config import Checkpoints
from tfos.control import messages
from tfos.errors import NodeStartError
from tfos.failure import EXECUTOR_LOST, NodeFailure, NodeId
from tfos.node import task as node_task
from tfos.node.child_link import Raised
from tfos.node.spec import NodeBundle
from tfos.node.supervisor.event_loop import EventLoop
from tfos.node.supervisor.supervisor import LAST_REPORT_S, Supervisor

pytestmark = pytest.mark.process

FOUND_S = 15.0
"""Two seconds on an idle machine; a node that is only silent is found after 20 s."""


def by_line(bundle: NodeBundle, line: DriverLine) -> NodeBundle:
    """Let the node reach its driver by this line alone."""
    settings = dataclasses.replace(bundle.settings, driver_address=line.address)
    return dataclasses.replace(bundle, settings=settings)


@pytest.mark.fault("F03")
def test_an_exception_arrives_with_the_users_traceback_first(bed):
    def main_fun(args, ctx):
        def inner(value):
            raise ValueError(f"bad value {value}")

        inner(args["value"])

    began_s = time.monotonic()
    run = bed.start(bed.bundle("worker:0", main_fun, {"value": 17}))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert time.monotonic() - began_s < 30
    assert (failure.error_type, failure.message) == ("ValueError", "bad value 17")
    assert failure.exit_code == 1
    assert failure.phase == "main_fun"
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "in main_fun" in lines[1]
    assert "tfos/worker/process.py" not in failure.traceback
    assert lines[-1] == "ValueError: bad value 17"
    assert run.wait().outcome == "ended", "Spark must not run the user's code again"
    bed.assert_nothing_left()


def test_a_package_that_main_fun_lacks_arrives_with_the_extra_that_has_it(bed):
    def main_fun(args, ctx):
        raise ModuleNotFoundError("No module named 'keras'", name="keras")

    bed.start(bed.bundle("worker:0", main_fun))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert failure.error_type == "ModuleNotFoundError"
    assert "named 'keras'. The extra [cpu] has it: pip install 'tfos[cpu]'" in failure.message


@pytest.mark.fault("F03")
def test_an_exception_arrives_also_if_the_stop_comes_before_its_process_has_ended(bed):
    def main_fun(args, ctx):
        import sys
        import threading
        import time

        def go_on():  # no daemon: the process waits for it
            threading.main_thread().join()
            sys.stdout.write("the main thread has ended\n")
            sys.stdout.flush()
            time.sleep(1000)

        threading.Thread(target=go_on).start()
        raise ValueError("the cause")

    run = bed.start(bed.bundle("worker:0", main_fun))
    bed.release("worker:0")
    bed.log_line("the main thread has ended")
    bed.order("worker:0", messages.Stop("worker:1 failed", 1.0))
    failure = bed.failure("worker:0")
    assert (failure.error_type, failure.message) == ("ValueError", "the cause")
    assert failure.phase == "main_fun"
    run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F03")
def test_a_stop_ends_a_node_whose_process_has_raised_and_outlives_sigkill(monkeypatch):
    """As one that waits in a driver's call that nothing interrupts."""
    monkeypatch.setattr("tfos.node.supervisor.supervisor.KILL_TIMEOUT_S", 0.0)
    node: Any = Supervisor.__new__(Supervisor)
    node._loop = EventLoop()
    node._loop.set_timer("test is stuck", WAIT_S, node._loop.stop)
    node._end_reason, node._rows_fd = None, -1
    node._raised = Raised("ValueError", "the cause", "Traceback")
    node._child = SimpleNamespace(exit=None, kill=lambda: None)
    base = NodeFailure(NodeId("worker", 0), "h", 7)
    node._failure = lambda *_: base
    told: list[Any] = []
    node._reporter = SimpleNamespace(report=told.append)
    node._stop("worker:1 failed", 0.0)
    node._loop.run()
    assert [event.failure.message for event in told] == ["the cause"]


@pytest.mark.fault("F03")
def test_an_exception_arrives_although_the_driver_is_away_for_a_moment(bed, line, tmp_path):
    """As one whose JVM collects garbage, or whose network fails over."""

    def main_fun(args, ctx):
        import pathlib
        import time

        while not pathlib.Path(args).exists():
            time.sleep(0.02)
        raise ValueError("the cause")

    raises = tmp_path / "raises"
    run = bed.start(by_line(bed.bundle("worker:0", main_fun, str(raises)), line))
    bed.release("worker:0")
    child = bed.heartbeat("worker:0", lambda beat: beat.phase == "main_fun").child_pid
    line.freeze()
    raises.touch()
    eventually(lambda: not psutil.pid_exists(child), "the end of its process")
    until_s = time.monotonic() + 1.5 * LAST_REPORT_S
    eventually(lambda: time.monotonic() > until_s, "the time of an abort to be over")
    line.thaw()
    assert bed.failure("worker:0").message == "the cause"
    run.wait()
    bed.assert_nothing_left()


LEASE_S, SILENT_S = 20.0, 5.0


def ending(*, lease_s: float = LEASE_S) -> Any:
    """A node whose driver answered some time ago, and whose child is not started again."""
    node: Any = Supervisor.__new__(Supervisor)
    node._loop, node._raised, node._end_reason = EventLoop(), None, None
    node._has_failed_itself = node._is_stopped = False
    node._child, node._is_done, node._lease_s = None, False, lease_s
    node._restarts = SimpleNamespace(take=lambda: None, explain=lambda failed: failed)
    node._last_feeds = dict
    node._update_heartbeat_state = lambda **_: None
    node._reporter = SimpleNamespace(
        report=lambda _: None, last_contact_s=time.monotonic() - SILENT_S
    )
    return node


FAILED = NodeFailure(NodeId("worker", 0), "h", 7)


@pytest.mark.fault("F03")
def test_what_a_child_did_by_itself_is_offered_until_the_lease_ends():
    node = ending()
    node._replace(SimpleNamespace(), FAILED)
    assert node._last_report_s() == pytest.approx(LEASE_S - SILENT_S, abs=1.0)
    node = ending(lease_s=SILENT_S + 1.0)
    node._replace(SimpleNamespace(), FAILED)
    assert node._last_report_s() == LAST_REPORT_S
    node = ending(lease_s=SILENT_S - 1.0)
    node._replace(SimpleNamespace(), FAILED)
    assert node._last_report_s() == pytest.approx(0.1)


@pytest.mark.fault("F03")
def test_a_node_that_is_told_to_end_keeps_the_times_of_an_abort():
    for lease_s in (LEASE_S, math.inf):
        node = ending(lease_s=lease_s)
        node._fail(FAILED)
        assert node._last_report_s() == LAST_REPORT_S, "as one whose executor is lost"
        node = ending(lease_s=lease_s)
        node._stop("worker:1 failed", 0.0)
        assert node._last_report_s() == LAST_REPORT_S
    node = ending()
    node._raised = Raised("ValueError", "the cause", "Traceback")
    node._child = SimpleNamespace(exit=None)
    node._failure = lambda *_: FAILED
    node._stop("worker:1 failed", 0.0)
    node._replace(SimpleNamespace(), FAILED)
    assert node._last_report_s() == LAST_REPORT_S
    node = ending(lease_s=math.inf)
    node._replace(SimpleNamespace(), FAILED)
    assert node._last_report_s() == LAST_REPORT_S, "no driver has ever answered"


def segfault(args, ctx):
    import ctypes

    ctypes.string_at(0)


def exit_at_once(args, ctx):
    import os

    os._exit(args)


def abort(args, ctx):
    import os

    os.abort()


def kill_itself(args, ctx):
    import os

    os.kill(os.getpid(), 9)


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("main_fun", "args", "number", "words"),
    [
        (segfault, None, signal.SIGSEGV, "worker:0 killed by SIGSEGV"),
        (abort, None, signal.SIGABRT, "worker:0 killed by SIGABRT"),
        (kill_itself, None, signal.SIGKILL, "worker:0 killed by SIGKILL"),
        (exit_at_once, 3, None, "worker:0 ended with exit code 3"),
        (exit_at_once, 0, None, "worker:0 ended with exit code 0 before its work was done"),
    ],
    ids=["segfault", "abort", "kill", "exit 3", "exit 0"],
)
def test_a_dead_worker_is_named_with_its_signal_and_last_words(bed, main_fun, args, number, words):
    def talk_then_die(args, ctx):
        import sys

        for line in range(150):
            sys.stdout.write(f"line {line}\n")
        main_fun(args, ctx)

    run = bed.start(bed.bundle("worker:0", talk_then_die, args))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert failure.message.startswith(words)
    assert failure.signal == number
    assert len(failure.log_tail) == 100
    assert any("line 149" in line for line in failure.log_tail)
    if number in (signal.SIGSEGV, signal.SIGABRT):
        assert failure.traceback.startswith("Fatal Python error:")
        assert "talk_then_die" in failure.traceback
    run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F04")
def test_a_dead_worker_is_found_at_once(bed):
    bed.start(bed.bundle("worker:0", wait_forever))
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    pid = bed.child_pid("worker:0")
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    failure = bed.failure("worker:0")
    assert time.monotonic() - killed_s < FOUND_S
    assert failure.pid == pid
    assert failure.message == "worker:0 killed by SIGKILL"
    bed.assert_nothing_left()


@pytest.mark.fault("F04")
def test_a_killed_supervisor_leaves_nothing_its_task_or_the_next_node_does_not_remove(bed):
    run = bed.start(bed.bundle("worker:0", wait_forever))
    released = bed.start(bed.bundle("worker:1", wait_forever, rank=1), hold_slot=False)
    bed.release("worker:0", "worker:1")
    released.wait()
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    for name in ("worker:0", "worker:1"):
        os.kill(bed.registered(name).pid, signal.SIGKILL)
    assert run.wait().outcome == "lost"
    assert wait_gone(bed.mark, WAIT_S) == {}
    left = list(bed.temp.glob("tfos-*"))
    bed.start(bed.bundle("ps:0"))
    bed.registered("ps:0")
    assert not any(path.exists() for path in left)
    bed.release("ps:0")
    bed.order("ps:0", messages.Stop("over", 5.0))
    bed.assert_nothing_left()


@pytest.mark.fault("F57")
def test_the_whole_tree_of_a_worker_is_killed(bed):
    def leave_a_daemon(args, ctx):
        import os
        import subprocess
        import sys

        if os.fork() == 0:  # a grandchild in its own session whose parent ends at once
            os.setsid()
            subprocess.Popen(["sleep", "1000"])
            os._exit(0)
        os.wait()
        subprocess.Popen(["sleep", "2000"], start_new_session=True)
        sys.stdout.write("tree is up\n")

    run = bed.start(bed.bundle("worker:0", leave_a_daemon))
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)

    def sleeping() -> list[int]:
        return [pid for pid, command in bed.processes().items() if command.startswith("sleep")]

    # A process whose `execve` is under way has no command line yet.
    eventually(lambda: len(sleeping()) == 2, "both daemons run")
    daemons = sleeping()
    bed.order("worker:0", messages.Stop("over", 5.0))
    run.wait()
    bed.assert_nothing_left()
    assert not any(psutil.pid_exists(pid) for pid in daemons)


@pytest.mark.long
@pytest.mark.fault("F14")
def test_a_node_that_no_answer_of_the_driver_reaches_fails_its_task_with_the_address(bed):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel takes the connection, and nobody answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        bundle = bed.bundle("worker:0", wait_forever)
        settings = dataclasses.replace(bundle.settings, driver_address=address)
        run = bed.start(dataclasses.replace(bundle, settings=settings))
        with pytest.raises(NodeStartError, match="did not reach the driver in 45 s") as told:
            run.wait(2 * WAIT_S)
    assert address in str(told.value)
    assert "TFOS_SERVER_HOST" in str(told.value)
    bed.assert_nothing_left()


@pytest.mark.fault("F13")
@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_a_node_ends_by_itself_when_its_driver_is_gone(bed, line, how):
    lease_s = 10.0
    bed.handler.reply = messages.RegisterReply(True, heartbeat_s=0.5, lease_s=lease_s)
    run = bed.start(by_line(bed.bundle("worker:0", wait_forever), line))
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    getattr(line, how)()
    lost_s = time.monotonic()
    result = run.wait()
    assert lease_s / 2 < time.monotonic() - lost_s < lease_s + 30
    assert result.reason.startswith("no answer from the driver for")
    bed.assert_nothing_left()


@pytest.mark.fault("F25")
def test_a_server_serves_without_its_driver_until_its_lease_ends(bed, line):
    lease_s = 4.0
    bed.handler.reply = messages.RegisterReply(True, heartbeat_s=0.5, lease_s=lease_s)
    run = bed.start(by_line(bed.bundle("ps:0"), line))
    (entry,) = bed.release("ps:0")
    manifest = make_manifest(rule=ADD)
    ones, pulled = filled(manifest, 1.0), filled(manifest)
    worker = Identity(Role.WORKER, 0)
    servers = [entry.endpoint]
    with PSClient(servers, bed.credentials, worker, num_workers=1, reconnect_s=1.0) as client:
        client.seed(manifest, filled(manifest))

        def push_for(seconds: float) -> None:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                client.push_pull(ones, pulled, hyper=Hyper(0.1), rows=1)

        line.freeze()
        beats = len(bed.handler.wait_for("heartbeat"))
        push_for(lease_s / 4)
        line.thaw()
        bed.handler.wait_for("heartbeat", beats + 2)
        push_for(lease_s)
        assert run.is_running
        line.freeze()
        frozen_s = time.monotonic()
        with pytest.raises(PSError, match="ps:0"):
            push_for(lease_s + 20)
        assert lease_s / 2 < time.monotonic() - frozen_s < lease_s + 20
    assert run.wait().reason.startswith("no answer from the driver for")
    bed.assert_nothing_left()


@pytest.mark.fault("F14")
@pytest.mark.parametrize("name", ["ps:0", "worker:0"])
def test_a_node_dies_with_its_executor(bed, name, executors):
    executor = executors(bed.bundle(name, wait_forever))
    bed.release(name)
    assert bed.registered(name).executor_id == "7"
    executor.kill()
    killed_s = time.monotonic()
    failure = bed.failure(name)
    assert failure.error_type == EXECUTOR_LOST
    assert time.monotonic() - killed_s < FOUND_S
    bed.assert_nothing_left()


def test_a_cancelled_task_is_no_dead_node_until_no_order_comes(bed, executors):
    executor = executors(bed.bundle("worker:0", wait_forever, abort_s=3.0))
    bed.release("worker:0")
    child = bed.child_pid("worker:0")
    os.kill(executor.task_pid, signal.SIGKILL)
    cancelled_s = time.monotonic()
    failure = bed.failure("worker:0")
    assert 2.5 < time.monotonic() - cancelled_s < 30
    assert failure.error_type == "TaskCancelled"
    assert failure.pid == child
    bed.assert_nothing_left()


def test_a_released_node_outlives_its_task(bed, executors):
    executor = executors(bed.bundle("worker:0", wait_forever, abort_s=1.0), hold_slot=False)
    bed.release("worker:0")
    executor.wait_task_gone()
    seen = bed.heartbeat("worker:0", lambda beat: beat.phase == "main_fun").seq
    bed.heartbeat("worker:0", lambda beat: beat.seq > seen + 1)
    bed.order("worker:0", messages.FinishFeed("input"))
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    bed.assert_nothing_left()


def test_a_failed_node_leaves_its_log_beside_the_executors(bed, executors):
    def shout_and_raise(args, ctx):
        import sys

        sys.stdout.write("last words\n")
        raise RuntimeError("boom")

    executor = executors(bed.bundle("worker:0", shout_and_raise))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    bed.assert_nothing_left()
    (log,) = executor.work_dir.glob("*.log")
    assert failure.log_path == str(log)
    assert "last words" in log.read_text()


@pytest.mark.fault("F20")
def test_a_replaced_attempt_ends(bed):
    run = bed.start(bed.bundle("worker:0", wait_forever))
    bed.registered("worker:0")
    bed.handler.fenced.add(NodeId("worker", 0, 0))
    assert "replaced" in run.wait().reason
    bed.assert_nothing_left()


def test_a_refused_registration_ends_the_node_and_frees_its_task(bed):
    bed.handler.reply = messages.RegisterReply(False, "the cluster is closing")
    result = bed.start(bed.bundle("ps:0")).wait()
    assert (result.outcome, result.reason) == ("ended", "the cluster is closing")
    bed.assert_nothing_left()


def test_a_deaf_main_fun_is_interrupted_then_killed(bed):
    def never_ends(args, ctx):
        import time

        while True:
            try:
                time.sleep(1000)
            except KeyboardInterrupt:
                ctx.report_progress(1, 1, None)

    run = bed.start(bed.bundle("worker:0", never_ends))
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    bed.order("worker:0", messages.Stop("over", 1.0))
    ordered_s = time.monotonic()
    assert run.wait().reason == "over"
    assert 0.9 < time.monotonic() - ordered_s < 30
    bed.assert_nothing_left()


def test_a_supervisor_that_cannot_start_says_why(bed, monkeypatch):
    import pyspark  # noqa: F401 - the task asks it for its context, whatever sys.path says

    monkeypatch.setattr("sys.path", ["/nonexistent"])
    with pytest.raises(Exception, match=r"(?s)its supervisor ended at once.*No module named"):
        bed.start(bed.bundle("ps:0")).wait()
    bed.assert_nothing_left()


def test_a_supervisor_without_a_log_leaves_no_directory(bed):
    here = node_task.find_executor(loopback=True, cores=1)
    executor = msgspec.structs.replace(here, log_dir=str(bed.temp / "removed"))
    with pytest.raises(NodeStartError, match=r"(?s)its supervisor ended at once.*removed"):
        node_task.NodeTask(hold_slot=True)._start(bed.bundle("ps:0"), executor, 0, "")
    bed.assert_nothing_left()


@pytest.mark.attack("A17")
def test_the_secret_and_the_key_are_in_no_argv_environment_or_log(bed):
    bundle = bed.bundle("worker:0", wait_forever)
    run = bed.start(bundle)
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    key = bundle.control_keys.key_pem.splitlines()[1]
    secret = bundle.rpc_secret
    forms = [secret, secret.hex().encode(), _base64(secret), key]
    seen = b"".join(bed.everything_readable())
    assert b"faulthandler" in seen
    assert [form for form in forms if form in seen] == []
    assert secret.hex() not in repr(bundle)
    assert key.decode() not in repr(bundle)
    bed.order("worker:0", messages.Stop("over", 1.0))
    run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F60")
def test_a_flood_of_output_is_thinned_out_and_whole_on_disk(bed, executors):
    def flood(args, ctx):
        import sys

        for line in range(args):
            sys.stdout.write(f"flood {line}\n")

    num_lines = 100_000
    executor = executors(bed.bundle("worker:0", flood, num_lines))
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    bed.assert_nothing_left()
    batches = [value for kind, value in bed.handler.notes if kind == "log"]
    shown = sum(len(batch.lines) for batch in batches)
    dropped = sum(batch.dropped for batch in batches)
    assert shown < 5000
    assert shown + dropped == num_lines
    (log,) = executor.work_dir.glob("*.log")
    assert log.read_text().count("flood ") == num_lines


def _base64(data: bytes) -> bytes:
    import base64

    return base64.b64encode(data)


@pytest.mark.fault("F14")
def test_a_supervisor_told_to_terminate_reports_a_lost_node_and_takes_everything_with_it(bed):
    def main_fun(args, ctx):
        import time

        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            return "as if all was well"

    server = bed.start(bed.bundle("ps:0"))
    worker = bed.start(bed.bundle("worker:0", main_fun))
    bed.release("ps:0", "worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    for name in ("ps:0", "worker:0"):
        os.kill(bed.registered(name).pid, signal.SIGTERM)
        assert bed.failure(name).error_type == EXECUTOR_LOST
        assert "its supervisor got SIGTERM" in bed.failure(name).message
    assert (server.wait().outcome, worker.wait().outcome) == ("ended", "ended")
    events = [value for kind, value in bed.handler.notes if kind == "event"]
    for name in ("ps:0", "worker:0"):
        ends = [
            type(event)
            for node, event in events
            if node.name == name and isinstance(event, messages.Failed | messages.Done)
        ]
        assert ends[0] is messages.Failed, "what comes behind it is of a node that is lost"
    bed.assert_nothing_left()


@pytest.mark.fault("F14")
def test_a_node_that_a_signal_ends_while_the_cluster_starts_fails_its_task(bed):
    run = bed.start(bed.bundle("ps:0"))
    bed.event("ps:0", messages.Listening)
    os.kill(bed.registered("ps:0").pid, signal.SIGTERM)
    with pytest.raises(NodeStartError, match=r"ps:0 on executor .* its supervisor got SIGTERM"):
        run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F15")
def test_a_signal_behind_the_order_to_stop_is_no_failure(bed):
    def main_fun(args, ctx):
        import time

        time.sleep(1000)

    run = bed.start(bed.bundle("worker:0", main_fun))
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    bed.order("worker:0", messages.Stop("over", WAIT_S))
    bed.heartbeat("worker:0", lambda beat: beat.phase == "stopping")
    os.kill(bed.registered("worker:0").pid, signal.SIGTERM)
    assert run.wait().reason == "over"
    events = [value[1] for kind, value in bed.handler.notes if kind == "event"]
    assert not any(isinstance(event, messages.Failed) for event in events)
    bed.assert_nothing_left()


@pytest.mark.fault("F03")
def test_a_main_fun_that_returns_a_coroutine_fails_as_nothing_has_run(bed):
    def main_fun(args, ctx):
        async def trains():
            pass

        return trains()

    bed.start(bed.bundle("worker:0", main_fun))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert failure.error_type == "rpc.errors.SettingsError"
    assert "none of whose lines has run" in failure.message
    bed.assert_nothing_left()


@pytest.mark.fault("F03")
@pytest.mark.parametrize("state", ["closed", "without flush", "none", "descriptor closed"])
def test_an_exception_arrives_whatever_main_fun_has_made_of_standard_error(bed, state):
    def main_fun(args, ctx):
        class Tee:
            def write(self, text):
                pass

        match args:
            case "closed":
                sys.stderr.close()
            case "without flush":
                sys.stderr = Tee()
            case "none":
                sys.stderr = None
            case "descriptor closed":
                os.close(2)
        raise LookupError("the reason")

    bed.start(bed.bundle("worker:0", main_fun, state))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert (failure.error_type, failure.message) == ("LookupError", "the reason")
    bed.assert_nothing_left()


@pytest.mark.fault("F03")
@pytest.mark.parametrize(
    ("text", "expected"),
    [("part-\udcff.gz", r"part-\udcff.gz"), (None, "its text cannot be formatted")],
)
def test_an_exception_whose_text_does_not_fit_a_message_arrives_all_the_same(bed, text, expected):
    def main_fun(args, ctx):
        class Odd(Exception):
            def __str__(self):
                if args is None:
                    raise TypeError("no text")
                return args

        raise Odd

    bed.start(bed.bundle("worker:0", main_fun, text))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert failure.error_type.endswith("Odd")
    assert expected in failure.message
    assert "raise Odd" in failure.traceback
    bed.assert_nothing_left()


@pytest.mark.fault("F20")
def test_a_supervisor_killed_before_the_start_fails_its_task_so_that_spark_starts_it_again(bed):
    run = bed.start(bed.bundle("ps:0"))
    bed.event("ps:0", messages.Listening)
    os.kill(bed.registered("ps:0").pid, signal.SIGKILL)
    with pytest.raises(NodeStartError, match=r"ps:0 .* vanished while the cluster started"):
        run.wait()
    assert wait_gone(bed.mark, WAIT_S) == {}


def test_no_process_outlives_its_supervisor(bed):
    run = bed.start(bed.bundle("worker:0", wait_forever))
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    child = bed.child_pid("worker:0")
    os.kill(bed.registered("worker:0").pid, signal.SIGKILL)
    assert run.wait().outcome == "lost"
    assert wait_gone(bed.mark, WAIT_S) == {}
    assert child > 0


def test_a_worker_without_feeds_frees_its_memory_and_its_node_stays(bed):
    run = bed.start(bed.bundle("worker:0", lambda args, ctx: None, feeds=()))
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    beat = bed.heartbeat("worker:0", lambda beat: beat.phase == "done" and beat.child_pid == 0)
    bed.heartbeat("worker:0", lambda later: later.seq > beat.seq)
    assert run.is_running
    bed.order("worker:0", messages.Stop("over"))
    assert run.wait().reason == "over"
    bed.assert_nothing_left()


def test_a_module_of_the_working_directory_does_not_shadow_pythons_own(bed, executors):
    (bed.temp / "work").mkdir()
    (bed.temp / "work" / "json.py").write_text("raise SystemExit('wrong json')")
    executors(bed.bundle("ps:0"))
    bed.event("ps:0", messages.Listening)
    bed.order("ps:0", messages.Stop("over"))
    bed.assert_nothing_left()


@pytest.mark.fault("F07")
def test_a_worker_that_never_gives_up_the_gil_is_slow_and_not_dead(bed, tmp_path):
    def hold_the_gil(args, ctx):
        import ctypes
        import os
        import sys

        pipe = os.open(args, os.O_RDWR)
        sys.stdout.write("holding\n")
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)

    pipe = tmp_path / "let-go"
    os.mkfifo(pipe)

    bed.handler.reply = messages.RegisterReply(True, heartbeat_s=0.2, lease_s=20.0)
    bed.start(bed.bundle("worker:0", hold_the_gil, str(pipe)))
    bed.release("worker:0")
    bed.log_line("holding")
    began = max(beat.seq for kind, beat in bed.handler.notes if kind == "heartbeat")
    bed.heartbeat("worker:0", lambda beat: beat.seq >= began + 5 and beat.phase == "main_fun")
    pipe.write_bytes(b"x")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    bed.assert_nothing_left()


def test_a_child_that_cannot_be_started_is_a_failure_with_its_reason(bed, monkeypatch):
    find_executor = node_task.find_executor
    gone = str(bed.temp / "gone")

    def without_directory(**where):
        return msgspec.structs.replace(find_executor(**where), cwd=gone)

    monkeypatch.setattr(node_task, "find_executor", without_directory)
    run = bed.start(bed.bundle("ps:0"))
    failure = bed.failure("ps:0")
    assert failure.error_type == "FileNotFoundError"
    assert gone in failure.message
    assert run.wait().reason == failure.message
    bed.assert_nothing_left()


def test_a_server_whose_sockets_cannot_be_opened_is_a_failure_with_its_reason(bed, monkeypatch):
    find_executor = node_task.find_executor

    def at_anothers_address(**where):
        return msgspec.structs.replace(find_executor(**where), host="192.0.2.1")

    monkeypatch.setattr(node_task, "find_executor", at_anothers_address)
    run = bed.start(bed.bundle("ps:0", checkpoints=Checkpoints(directory=str(bed.temp / "saves"))))
    failure = bed.failure("ps:0")
    assert failure.error_type == "OSError"
    assert "cannot listen at 192.0.2.1:0: " in failure.message
    assert run.wait().reason == failure.message
    bed.assert_nothing_left()


def test_a_server_below_a_deep_temporary_directory_has_its_socket_in_tmp(bed, monkeypatch):
    deep = bed.temp / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    run = bed.start(bed.bundle("ps:0", checkpoints=Checkpoints(directory=str(bed.temp / "saves"))))
    socket_path = Path(bed.entry("ps:0").endpoint.unix_path)
    assert socket_path.is_socket()
    assert str(socket_path.parents[2]) == "/tmp"
    bed.order("ps:0", messages.Stop("enough", 1.0))
    run.wait()
    bed.assert_nothing_left()
    assert not socket_path.parents[1].exists()
    assert list(deep.iterdir()) == []


def fill_memory(args, ctx):
    """Hold memory, a part of it in a process that main_fun has started."""
    child = os.fork()
    held = bytearray(os.urandom(1) * (100 << 20))  # noqa: F841 - written, so it is resident
    if child:
        wait_forever(args, ctx)
    signal.pause()


@pytest.mark.fault("F05")
def test_a_node_above_its_memory_limit_is_ended_with_both_numbers(bed):
    run = bed.start(bed.bundle("worker:0", fill_memory, node_limit_bytes=200 << 20))
    bed.release("worker:0")
    failure = bed.failure("worker:0")
    assert failure.signal == signal.SIGKILL
    assert re.search(
        r"after it used \d\d\d MiB of 200 MiB \(ClusterConfig\(node_limit_bytes\)\)",
        failure.message,
    )
    run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F06")
def test_a_suspended_worker_is_ended_within_the_limit_for_a_hang(bed):
    bed.handler.reply = messages.RegisterReply(True, hang_s=8.0)
    run = bed.start(bed.bundle("worker:0", wait_forever))
    bed.release("worker:0")
    bed.event("worker:0", messages.PhaseChanged, lambda event: event.phase == "main_fun")
    suspended_s = time.monotonic()
    os.kill(bed.child_pid("worker:0"), signal.SIGSTOP)
    failure = bed.failure("worker:0")
    assert 4 <= time.monotonic() - suspended_s < 20  # the limit that is promised
    run.wait()
    assert failure.signal == signal.SIGKILL
    assert "suspended (SIGSTOP) for 4 s" in failure.message
    bed.assert_nothing_left()


def leave_an_exit_handler(args, ctx):
    """Return, and leave work that ends once there is a file."""
    import atexit
    import os
    import time

    def finish():
        while not os.path.exists(args["may_end"]):
            time.sleep(0.01)
        with open(args["done"], "w"):
            pass

    atexit.register(finish)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("has_time", [True, False])
def test_exit_handlers_of_main_fun_have_the_grace_of_the_stop_and_who_needs_longer_is_told(
    bed, tmp_path, has_time
):
    args = {"may_end": str(tmp_path / "may-end"), "done": str(tmp_path / "done")}
    run = bed.start(bed.bundle("worker:0", leave_an_exit_handler, args))
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    grace_s = WAIT_S if has_time else 0.5
    bed.order("worker:0", messages.Stop("shutdown", grace_s, is_orderly=True))
    if has_time:
        (tmp_path / "may-end").touch()
    else:
        assert bed.event("worker:0", messages.CutShort).grace_s == grace_s
    run.wait()
    assert (tmp_path / "done").exists() is has_time
    events = [value[1] for kind, value in bed.handler.notes if kind == "event"]
    told = [event for event in events if isinstance(event, messages.CutShort)]
    assert bool(told) is not has_time
    bed.assert_nothing_left()


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("how", "is_stopped", "told"),
    [
        (kill_itself, False, ["killed by SIGKILL"]),
        (exit_at_once, True, ["ended with exit code 7"]),
        (None, True, []),
    ],
    ids=["killed", "exit 7 behind the stop", "well"],
)
def test_a_process_that_dies_after_main_fun_has_returned_is_told(
    bed, tmp_path, how, is_stopped, told
):
    def main_fun(args, ctx):
        import threading

        def end():
            import os
            import time

            while not os.path.exists(args):
                time.sleep(0.01)
            if how is not None:
                how(7, None)

        threading.Thread(target=end).start()

    path = tmp_path / "may-end"
    run = bed.start(bed.bundle("worker:0", main_fun, str(path)))
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    if is_stopped:
        bed.order("worker:0", messages.Stop("shutdown", WAIT_S, is_orderly=True))
        bed.heartbeat("worker:0", lambda beat: beat.phase == "stopping")
    path.touch()
    if not is_stopped:
        bed.heartbeat("worker:0", lambda beat: beat.phase == "done" and not beat.child_pid)
        bed.order("worker:0", messages.Stop("shutdown", WAIT_S, is_orderly=True))
    assert run.wait().reason == "shutdown"
    events = [value[1] for kind, value in bed.handler.notes if kind == "event"]
    assert [each.how for each in events if isinstance(each, messages.CutShort)] == told
    bed.assert_nothing_left()


@pytest.mark.fault("F15")
def test_exit_handlers_that_an_abort_cuts_short_bring_no_advice_about_the_shutdown(bed, tmp_path):
    args = {"may_end": str(tmp_path / "may-end"), "done": str(tmp_path / "done")}
    run = bed.start(bed.bundle("worker:0", leave_an_exit_handler, args))
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("worker:1 failed", 0.5))
    run.wait()
    assert not (tmp_path / "done").exists()
    events = [value[1] for kind, value in bed.handler.notes if kind == "event"]
    assert not any(isinstance(event, messages.CutShort) for event in events)
    bed.assert_nothing_left()
