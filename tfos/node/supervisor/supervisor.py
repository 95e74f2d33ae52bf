"""Supervisor of one node: starts its child, reports, carries out orders, cleans up.

Covers: the main loop and its reactions to orders, to the end of the child, of the executor's JVM,
of the driver's lease, of a cancelled node task.
Does not: run user code or hold parameters (tfos.worker.process, tfos.node.ps_process), speak gRPC
(tfos.node.supervisor.reporter).
Runs in: its own process, detached from the node task; imports no numpy.
Threads: all state belongs to the main thread. Other threads only post notices to the loop;
heartbeats read the immutable `_heartbeat_state`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from rpc.auth.process_memory import forbid_reading
from tfos.control import messages
from tfos.errors import LinkError
from tfos.failure import EXECUTOR_LOST, GPU_UNUSABLE, NodeFailure, NodeId
from tfos.node import failure, procfs
from tfos.node.child_link import FromChild, Progress, Raised, ToServer
from tfos.node.failure import Exit
from tfos.node.process_exit import leave
from tfos.node.spec import NO_KEYS, ChildSpec, LaunchStatus, State, SupervisorSpec
from tfos.node.supervisor import children, row_marks, tensorboard
from tfos.node.supervisor.event_loop import EventLoop
from tfos.node.supervisor.gpu_check import GpuCheck, GpuTrouble
from tfos.node.supervisor.log_buffer import NodeLog
from tfos.node.supervisor.reporter import (
    REGISTER_WINDOW_S,
    HeartbeatState,
    Notice,
    Registered,
    Reporter,
    Unwanted,
)
from tfos.node.supervisor.restart_policy import ChildRestarts
from tfos.node.workspace import Workspace

if TYPE_CHECKING:
    from tfos.control.client import ControlClient

LAST_REPORT_S = 3.0
"""Seconds for the last events to reach the driver; part of the 10 s of an abort. A failure
without an order to end is offered until the lease ends: nobody else knows it."""
KILL_TIMEOUT_S = 4.0
LAST_OUTPUT_S = 1.0
UNWANTED_GRACE_S = 2.0
"""Grace of a child whose node the driver has refused or a signal has ended, in seconds."""
RAISED_EXIT_S = 3.0
"""Seconds for a child to exit after it raised (its threads, its exit handlers)."""
ROSTER_MARGIN_S = 30.0
_TICK_S = 2.0
_MIB = 1 << 20
_MAX_READS = 16
"""Reads of one ready pipe before the loop serves other events: a flood must not starve them."""


class Supervisor:
    """One node, from registration to the removal of its last file."""

    def __init__(self, spec: SupervisorSpec) -> None:
        self._spec = spec
        self._planned, self._settings = spec.bundle.node, spec.bundle.settings
        self._node = NodeId(self._planned.role, self._planned.index, spec.attempt)
        self._workspace = Workspace(
            spec.executor, self._node.name, spec.attempt, self._settings.cluster_id
        )
        show_details = self._settings.config.show_details
        self._log = NodeLog(self._workspace.log_path, show_details=show_details)
        self._loop = EventLoop()
        self._heartbeat_state = HeartbeatState()
        self._visible_gpus = children.visible_gpus(
            self._planned, spec.executor.gpus, self._settings.config.gpu_resource
        )
        self._env = children.child_env(
            os.environ,
            threads=self._settings.config.threads_per_node or spec.bundle.threads,
            cores=spec.executor.cores,
            gpus=self._visible_gpus,
            shares_gpus=spec.bundle.shares_gpus or self._settings.config.busy_gpus == "warn",
        )
        self._reporter = self._make_reporter()
        self._restarts = ChildRestarts(spec.bundle)
        takes_rows = self._planned.runs_main_fun and bool(self._settings.feeds)
        self._rows_fd = row_marks.new_file() if takes_rows else -1
        self._child: children.Child | None = None
        self._board = tensorboard.TensorBoardChild(self._loop, self._reporter.report)
        self._raised: Raised | None = None
        self._awaits_gpus = False
        self._listening: messages.Listening | None = None
        """The report of the child that came while the GPUs were checked."""
        self._lease_s = math.inf
        """Registration sets it; until then the reporter has its own limit."""
        self._is_cut_off = False
        """The driver was never reached, or a signal ended the node."""
        self._oom_kills = procfs.oom_kills()
        self._is_done = False
        """The child reported Done: main_fun returned, or the server ended as ordered."""
        self._suspended_limit_s = REGISTER_WINDOW_S
        self._kill_reason = ""
        """Why we killed the child ourselves, for its failure."""
        self._end_reason: str | None = None
        """Set once the node ends, for whatever reason."""
        self._is_stopped = self._has_failed_itself = False
        """Whether the end of the node was ordered; whether its child failed without an order."""

    def run(self) -> None:
        """Run until the end, and always clean up."""
        try:
            self._open()
            self._loop.run()
        except OSError as error:  # no process, no descriptor, no directory left on this host
            self._fail(self._failure(type(error).__name__, f"cannot run this node: {error}"))
        finally:
            self._close()

    def terminate(self) -> None:
        """End the node, which is lost unless it was ending anyway; for a signal handler."""
        self._loop.post(self._on_terminated)

    def _post(self, notice: Notice) -> None:
        """Hand a notice to the main thread."""
        self._loop.post(lambda: self._on_notice(notice))

    def _make_reporter(self) -> Reporter:
        spec = self._spec
        address, cluster_id = self._settings.driver_address, self._settings.cluster_id
        node, keys = self._node, spec.bundle.control_keys

        def connect() -> ControlClient:
            from tfos.control.client import ControlClient  # gRPC: see Reporter

            return ControlClient(address, cluster_id, node, keys)

        register = messages.Register(
            node=self._node,
            executor_id=spec.executor.executor_id,
            host=spec.executor.host,
            pid=os.getpid(),
            skew=spec.skew,
        )
        return Reporter(connect, register, vitals=lambda: self._heartbeat_state, post=self._post)

    def _open(self) -> None:
        procfs.become_subreaper()
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        if self._spec.jvm_pidfd >= 0:
            os.set_inheritable(self._spec.jvm_pidfd, False)
            self._loop.watch(self._spec.jvm_pidfd, self._on_jvm_gone)
        os.set_inheritable(self._spec.status_fd, False)
        if self._spec.value_fd >= 0:
            os.set_inheritable(self._spec.value_fd, False)
        self._loop.watch(self._spec.status_fd, self._on_task_gone)
        self._loop.set_timer("tick", _TICK_S, self._on_tick)
        try:
            self._restarts.open_sockets(self._spec.executor.host, self._workspace.socket_dir)
            self._run_child()  # before the reporter: its imports take longest
            self._check_gpus()
        finally:
            self._reporter.start()  # also to report why there is no child

    def _check_gpus(self) -> None:
        """Look whether the node's GPUs are free; those that nodes share are not."""
        addresses = self._spec.executor.gpus
        if not addresses or self._spec.bundle.shares_gpus or self._visible_gpus != addresses:
            return
        self._awaits_gpus = True
        GpuCheck(addresses, lambda told: self._loop.post(lambda: self._on_gpus(told))).start()

    def _on_gpus(self, told: GpuTrouble | None) -> None:
        """End the node because of its GPUs, or go on; a lost one that is back always does."""
        is_error = self._settings.config.busy_gpus == "error" and not self._spec.attempt
        if told is not None and told.is_certain and is_error:
            text = f"{self._node.name} on {self._spec.executor.host}: {told.text}"
            self._fail(self._failure(GPU_UNUSABLE, text))
            return
        if told is not None:
            self._reporter.log((f"tfos: {told.text}",), 0)
        self._awaits_gpus = False
        if self._listening is not None:
            self._reporter.report(self._listening)

    def _run_child(self) -> None:
        self._child = self._start_child()
        self._restarts.note_start()
        self._update_heartbeat_state(child_pid=self._child.pid)
        self._loop.watch(self._child.pidfd, self._on_child_exit)
        self._loop.watch(self._child.output, self._on_output)
        if self._child.link is not None:
            self._loop.watch(self._child.link.fileno(), self._on_link)

    def _start_child(self) -> children.Child:
        spec = self._spec
        keyless = dataclasses.replace(spec.bundle, control_keys=NO_KEYS)
        ours, theirs = socket.socketpair()
        body = ChildSpec(
            attempt=spec.attempt,
            bundle=keyless,
            executor=spec.executor,
            link_fd=theirs.fileno(),
            socket_dir=str(self._workspace.socket_dir),
            log_dir=tensorboard.event_dir(self._settings.tensorboard.log_dir, self._workspace),
            files_dir=str(self._workspace.subdirectory("files")),
            restart=self._restarts.count,
            value_fd=spec.value_fd,
            rows_fd=self._rows_fd,
            listen_fds=self._restarts.descriptors,
        )
        shared = [each for each in (spec.value_fd, self._rows_fd) if each >= 0]
        inherited = [*self._restarts.descriptors, *shared]
        return children.spawn(
            children.module_of(self._planned),
            msgspec.msgpack.encode(body),
            sys_path=spec.sys_path,
            cwd=spec.executor.cwd,
            env=self._env,
            title=f"tfos {self._node.name}",
            link=(ours, theirs),
            inherit=inherited,
        )

    def _on_notice(self, notice: Notice) -> None:
        match notice:
            case Registered(reply=reply):
                self._restarts.has_begun = reply.has_begun
                self._restarts.tell_begun(self._tell_child)
                self._lease_s = reply.lease_s
                # With the ticks before and after, it has ended by hang_s.
                self._suspended_limit_s = max(_TICK_S, reply.hang_s - 2 * _TICK_S)
                self._write_status(State.REGISTERED)
                self._await_roster()
                if self._planned.is_chief and self._settings.tensorboard.is_wanted:
                    self._board.start(self._spec, self._workspace, self._env)
            case Unwanted(reason=reason, is_cut_off=is_cut_off):
                self._is_cut_off = self._is_cut_off or is_cut_off
                self._stop(reason, UNWANTED_GRACE_S)
            case messages.Stop(reason=reason, grace_s=grace_s, is_orderly=is_orderly):
                self._stop(reason, grace_s, is_orderly=is_orderly)
            case _:
                if isinstance(notice, messages.Start):
                    self._release_task()
                self._restarts.note(notice)
                self._tell_child(notice)

    def _await_roster(self) -> None:
        """The driver fails first and reports it; this bounds a node that it no longer tracks."""
        timeout_s = self._settings.config.reservation_timeout_s + ROSTER_MARGIN_S
        text = f"the roster was not complete after {timeout_s:.0f} s"
        failed = self._failure("RosterTimeout", text)
        self._loop.set_timer("roster", timeout_s, lambda: self._fail(failed))

    def _release_task(self) -> None:
        self._loop.cancel_timer("roster")
        self._write_status(State.RELEASED)
        if not self._spec.hold_slot:
            self._loop.unwatch(self._spec.status_fd)  # the task returns now, as planned

    def _stop(self, reason: str, grace_s: float, *, is_orderly: bool = False) -> None:
        """End the child in order, then the node; a second call may only shorten the grace."""
        self._is_stopped = True
        if self._end_reason is None and self._raised is not None:
            # What it raised is reported once it has ended: the stop may follow from that.
            self._loop.advance_timer("exit", grace_s, self._kill_child)
            failed = failure.raised(self._failure("", ""), self._raised)
            self._loop.advance_timer("grace", grace_s + KILL_TIMEOUT_S, lambda: self._fail(failed))
            return
        if self._end_reason is None:
            self._end_reason = reason
            self._update_heartbeat_state(phase="stopping")
        if self._child is None or self._child.exit is not None:
            self._loop.stop()
            return
        self._tell_child(messages.Stop(reason, grace_s))
        self._loop.advance_timer(
            "grace", grace_s, lambda: self._cut_short(grace_s, is_orderly=is_orderly)
        )

    def _cut_short(self, grace_s: float, *, is_orderly: bool) -> None:
        """End the node with a child that has not followed the order to stop; `_close` kills it."""
        if is_orderly and self._is_done and self._planned.runs_main_fun:
            self._reporter.report(messages.CutShort(grace_s))
        self._loop.stop()

    def _fail(self, failed: NodeFailure) -> None:
        """Report why this node ends, unless it was ending anyway, and end."""
        if self._end_reason is None:
            self._end_reason = failed.message
            self._reporter.report(messages.Failed(failed, self._last_feeds()))
        self._loop.stop()

    def _last_feeds(self) -> tuple[messages.FeedSnapshot, ...]:
        """Return the counts of a worker that has ended; empty if it lives or takes no rows."""
        if self._rows_fd < 0 or self._child is None or self._child.exit is None:
            return ()
        known = self._heartbeat_state.feeds
        return row_marks.marked(self._rows_fd, self._settings.feeds, known)

    def _on_terminated(self) -> None:
        """Report the node as lost: whoever ends it in order sends an order, and no signal."""
        text = "its supervisor got SIGTERM, as when its host shuts down"
        if self._end_reason is None and self._raised is None:
            self._is_cut_off = True
            self._reporter.report(messages.Failed(self._failure(EXECUTOR_LOST, text)))
        self._stop(text, UNWANTED_GRACE_S)

    def _on_jvm_gone(self) -> None:
        executor = self._spec.executor
        text = f"executor {executor.executor_id} (JVM pid {executor.jvm_pid}) ended"
        self._fail(self._failure(EXECUTOR_LOST, text))

    def _on_task_gone(self) -> None:
        """The node task was killed while it should wait with us: orders decide, else we end."""
        self._loop.unwatch(self._spec.status_fd)
        abort_s = self._settings.config.abort_s
        text = f"its Spark task was cancelled and no order came within {abort_s:.0f} s"
        self._loop.set_timer(
            "task", abort_s, lambda: self._fail(self._failure("TaskCancelled", text))
        )

    def _on_tick(self) -> None:
        self._loop.set_timer("tick", _TICK_S, self._on_tick)
        silent_s = time.monotonic() - self._reporter.last_contact_s
        if silent_s > self._lease_s:
            self._end_reason = f"no answer from the driver for {silent_s:.0f} s"
            self._loop.stop()
        self._look_at_child()
        procfs.reap_orphans(own=self._own_pids())
        error, self._log.write_error = self._log.write_error, ""
        if error:
            self._reporter.log((f"tfos: output is missing from the log file: {error}",), 0)

    def _look_at_child(self) -> None:
        """End a suspended child, for which its peers would wait for ever, and one too large."""
        limit_s = self._suspended_limit_s
        if self._child is not None and self._child.suspended_s() >= limit_s:
            self._kill_child(f" after it was suspended (SIGSTOP) for {limit_s:.0f} s")
        limit_bytes = self._settings.config.node_limit_bytes
        if limit_bytes and self._child is not None:
            used_bytes = procfs.descendants_rss_bytes(spare=self._board.pids)
            if used_bytes > limit_bytes:
                self._kill_child(
                    f" after it used {used_bytes / _MIB:.0f} MiB of {limit_bytes / _MIB:.0f} MiB "
                    "(ClusterConfig(node_limit_bytes)); raise the limit and the executor's "
                    "spark.executor.memoryOverhead, or let the node hold less"
                )

    def _on_link(self) -> None:
        link = self._child.link if self._child else None
        if link is None:
            return
        try:
            received, is_open = link.receive_ready()
        except LinkError as error:
            self._fail(self._failure("LinkError", str(error)))
            return
        for message in received:
            self._on_child_message(message)
        if not is_open:
            self._loop.unwatch(link.fileno())

    def _on_child_message(self, message: FromChild) -> None:
        match message:
            case Progress(values=values, feeds=feeds, stats=stats):
                self._update_heartbeat_state(
                    progress=tuple(values.items()), feeds=feeds, stats=stats
                )
            case Raised():
                self._raised = message
                self._loop.set_timer("exit", RAISED_EXIT_S, self._kill_child)
            case messages.Listening() if self._awaits_gpus:
                self._listening = message  # main_fun begins once every node listens
            case _:
                if isinstance(message, messages.PhaseChanged):
                    self._update_heartbeat_state(phase=message.phase)
                elif isinstance(message, messages.Done):
                    self._is_done = True
                    self._update_heartbeat_state(phase="done")
                self._reporter.report(message)

    def _kill_child(self, reason: str = "") -> None:
        if self._child is not None:
            self._kill_reason = reason
            self._child.kill()

    def _on_child_exit(self) -> None:
        child = self._child
        if child is None or (how := child.reap()) is None:
            return
        self._loop.unwatch(child.pidfd)
        # Whatever it started ends with it; that also closes the last writers of its output.
        procfs.kill_descendants(spare=self._board.pids)
        self._read_last_output(child)
        self._on_link()
        self._update_heartbeat_state(child_pid=0)
        if self._is_done and self._planned.runs_main_fun and how != Exit(0, None):
            self._reporter.report(messages.CutShort(0.0, self._text_of(how)))
        if self._end_reason is not None:
            self._loop.stop()
        elif not self._is_done:
            self._replace(child, self._failure_of(how))

    def _replace(self, dead: children.Child, failed: NodeFailure) -> None:
        """Restart a killed server with growing delays; a server that raised would raise again."""
        delay_s = None if self._raised is not None else self._restarts.take()
        if delay_s is None:
            self._has_failed_itself = True
            self._fail(self._restarts.explain(failed))
            return
        self._reporter.report(self._restarts.report(failed))
        dead.close()
        self._child = None
        self._loop.set_timer("restart", delay_s, self._run_again)

    def _run_again(self) -> None:
        self._kill_reason, self._oom_kills = "", procfs.oom_kills()
        self._run_child()
        self._restarts.repeat_orders(self._tell_child)

    def _failure_of(self, how: Exit) -> NodeFailure:
        if self._raised is not None:
            return failure.raised(self._failure("", ""), self._raised)
        text = f"{self._node.name} {self._text_of(how)}"
        return failure.died(self._failure("ProcessDied", text), how)

    def _text_of(self, how: Exit) -> str:
        """Return how a child has ended, as text after its name."""
        text = failure.describe_exit(how, oom_kills=procfs.oom_kills() - self._oom_kills)
        return f"{text}{self._kill_reason}"

    def _failure(self, error_type: str, message: str) -> NodeFailure:
        return NodeFailure(
            node=self._node,
            host=self._spec.executor.host,
            pid=self._child.pid if self._child else os.getpid(),
            executor_id=self._spec.executor.executor_id,
            phase=self._heartbeat_state.phase,
            error_type=error_type,
            message=message,
            log_tail=self._log.tail(),
            log_path=str(self._log.path) if self._workspace.log_is_kept else "",
        )

    def _on_output(self) -> None:
        child = self._child
        if child is None:
            return
        for _ in range(_MAX_READS):
            data = child.read_output()
            if data is None:
                break
            if not data:
                self._loop.unwatch(child.output)
                break
            self._log.write(data)
        self._reporter.log(*self._log.take())

    def _read_last_output(self, child: children.Child) -> None:
        deadline_s = time.monotonic() + LAST_OUTPUT_S
        while (data := child.read_output()) and time.monotonic() < deadline_s:
            self._log.write(data)
        self._loop.unwatch(child.output)
        self._log.finish()
        self._reporter.log(*self._log.take())

    def _close(self) -> None:
        """Leave no process, socket, file or directory, whatever state this is called in."""
        self._update_heartbeat_state(phase="stopping")
        survivors = procfs.kill_descendants(timeout_s=KILL_TIMEOUT_S)
        if self._child is not None and self._child.exit is None and self._child.reap():
            self._read_last_output(self._child)
            self._on_link()
        procfs.reap_orphans(own=self._own_pids())
        if survivors:
            self._reporter.log((f"tfos: processes {survivors} survive SIGKILL",), 0)
        self._reporter.finish(self._last_report_s())
        self._log.close()
        self._restarts.close()
        if self._rows_fd >= 0:
            os.close(self._rows_fd)
        self._workspace.remove()
        self._write_status(State.ENDED, self._end_reason or "")

    def _last_report_s(self) -> float:
        """Return for how many seconds the last events are offered to the driver."""
        left_s = self._lease_s - (time.monotonic() - self._reporter.last_contact_s)
        if left_s <= 0:
            return 0.1
        is_own = self._has_failed_itself and not self._is_stopped and left_s < math.inf
        return max(LAST_REPORT_S, left_s) if is_own else LAST_REPORT_S

    def _own_pids(self) -> set[int]:
        return self._board.pids | ({self._child.pid} if self._child else set())

    def _tell_child(self, order: ToServer) -> None:
        if self._child is not None and self._child.link is not None:
            self._child.link.send(order)

    def _update_heartbeat_state(self, **changes: Any) -> None:
        self._heartbeat_state = dataclasses.replace(self._heartbeat_state, **changes)

    def _write_status(self, state: State, reason: str = "") -> None:
        with contextlib.suppress(OSError):  # the node task may be gone
            status = LaunchStatus(state, reason, self._is_cut_off)
            line = msgspec.json.encode(status) + b"\n"
            os.write(self._spec.status_fd, line)


def main(body: bytes) -> None:
    """Run the supervisor that this document describes."""
    forbid_reading()  # of the node's keys and the cluster's secret
    spec = msgspec.msgpack.decode(body, type=SupervisorSpec)
    supervisor = Supervisor(spec)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which children would inherit
    signal.signal(signal.SIGTERM, lambda *_: supervisor.terminate())
    supervisor.run()
    leave()
