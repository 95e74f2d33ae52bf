"""Shutdown of a cluster: in order, at once, or after a failure; always completely.

Covers: shutdown and abort, exactly-once raising of a failure or its warning, the end at interpreter
exit, a last save on the way.
Does not: decide who failed (tfos.control.state).
Runs in: the driver.
Threads: any number may end the cluster; one does it and the others wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

from rpc.auth.handshake import Credentials
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.main_fun_wait import MainFunWait
from tfos.driver.node_jobs import NodeJobs
from tfos.driver.shown_wait import shown_wait
from tfos.errors import NodeFailedError, PhaseError, PoisonRows, ShutdownTimeout
from tfos.failure import NODE_JOB_FAILED
from tfos.phases import ClusterPhase
from tfos.spark.interruptible import InterruptibleCall

_FORCE_S = 2.0
"""Grace of a node's child after an abort: enough to flush files, short of the user's patience."""
_ORDERLY_S = 5.0
"""Grace of a node's child after main_fun has returned, for exit handlers; grace_secs extends it."""
_LAST_LINES_S = 2.0
"""How long the screen may take the last lines; what comes after them, as a traceback, waits."""
_WORKERS_SHARE = 0.6
"""Part of abort_s in which workers end before the servers are stopped anyway; longer by what their
grace needs."""
_KILL_S = 1.0
"""Seconds for the end of a worker whose grace is over."""
_STOP_SHARE = 0.2
"""Part of abort_s that a last save leaves for the stop of the servers."""
_SERVERS_SHARE = 0.7
"""Part of what is left then in which the nodes confirm; the rest is for Spark to end the jobs."""
_VALUES_S = 600.0
"""How long Spark may take to bring what ended workers have handed over: up to 2 GiB each."""


class Shutdown:
    """Ends one cluster.

    Args:
        coordinator: the cluster's coordinator.
        config: timeouts, and what is saved.
        console: where progress goes.
        credentials: the data plane's secret, for the final checkpoint.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: ClusterConfig,
        console: Console,
        credentials: Credentials,
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._console = console
        self._credentials = credentials
        self._lock = threading.RLock()
        self._is_over = False
        self._is_seen = False
        self._is_left = False
        self._is_hurried = False
        """Whether nobody waits for the workers' values any more."""
        self._jobs: NodeJobs | None = None
        self._on_drop: weakref.finalize[..., object] | None = None
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one whose cluster it is; it must not end it."""
        return os.getpid() != self._pid

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody here waits for an abort: the wait was interrupted, or is another's."""
        return self._is_left or self.is_forked

    def watch(self, cluster: object) -> None:
        """Close the control plane if nobody refers to this cluster before any node was started.

        So it is when an interrupt comes between the end of reserve() and the line that would have
        stored its result.
        """
        self._on_drop = weakref.finalize(cluster, self._close_unused)
        self._on_drop.atexit = False

    def values(self) -> dict[str, bytes]:
        """Return what the nodes' tasks brought back; see NodeJobs.values."""
        return self._jobs.values() if self._jobs is not None else {}

    def lost_values(self) -> dict[str, str]:
        """Return why tasks brought nothing back; see NodeJobs.lost_values."""
        return self._jobs.lost_values() if self._jobs is not None else {}

    def begin(self, jobs: NodeJobs) -> None:
        """Take charge of the jobs that are about to start the nodes.

        Raises:
            PhaseError: nodes were started before, or the cluster has ended meanwhile.
        """
        with self._lock:
            if self._jobs is not None:
                raise PhaseError("start() was called before; make a new cluster for another run")
            if self._is_over:
                raise PhaseError("the cluster was stopped before start() had begun")
            self._jobs = jobs
            self._unwatch()

    def shutdown(
        self,
        feeds: tuple[str, ...],
        *,
        grace_s: float,
        timeout_s: float,
        from_last_step: bool = False,
    ) -> None:
        """End in order: feeds, main_fun, evaluator, workers, servers, jobs, control plane.

        Args:
            feeds: names of the feeds to finish.
            grace_s: seconds between the return of main_fun and the stop.
            timeout_s: seconds until the nodes are killed; infinite: until main_fun has returned.
            from_last_step: count these seconds anew while workers make steps.
        """
        late: ShutdownTimeout | None = None
        if self._coordinator.phase is ClusterPhase.RUNNING:
            late = self._finish(feeds, grace_s, timeout_s, from_last_step)
        try:
            # Workers are still awaited if time was up, or if Ctrl-C has cancelled the node jobs.
            if self._coordinator.read(lambda state: state.awaited()):
                self._stop_all("shutdown", _FORCE_S, save=True)
            else:
                self._stop_all("shutdown", max(_ORDERLY_S, grace_s), save=False)
        finally:
            self._close(ClusterPhase.CLOSED)
        self.raise_failure()
        if late is not None:
            raise late

    def abort(self, reason: str) -> None:
        """End at once; a failure that nobody raised stays available to raise_failure()."""
        self._is_hurried = True
        try:
            self._stop_all(reason, _FORCE_S, save=True)
        finally:
            failed = self._coordinator.error() is not None
            if failed and not self._is_seen:  # the program may end without another call
                atexit.register(self._tell_at_exit)
            self._close(ClusterPhase.FAILED if failed else ClusterPhase.CLOSED)

    def leave(self) -> None:
        """Wait for the nodes neither again nor at exit: an abort goes on, its user has left it."""
        self._is_left = True
        atexit.unregister(self._at_exit)

    def raise_failure(self) -> None:
        """Raise the cluster's failure unless the user has seen it."""
        error = None if self._is_seen else self._coordinator.error()
        if error is None:
            return
        if not self._is_over:  # nodes that still stop may add their records
            self._await_end(self._config.abort_s)
        raise self._coordinator.raised_error() or error

    def tell_failure(self, *, is_interrupted: bool) -> None:
        """Warn of the cluster's failure if no call has raised it, where none will any more.

        Args:
            is_interrupted: by Ctrl-C, for which pyspark cancels the node jobs: of that failure the
                user knows.
        """
        error = None if self._is_seen or self.is_forked else self._coordinator.raised_error()
        if error is None:
            return
        self._seen()
        if is_interrupted and error.failures[0].error_type == NODE_JOB_FAILED:
            return
        text = "; ".join(str(error).splitlines())
        self._console.warn(f"the cluster had failed, which no call has raised: {text}")
        self._console.flush(_LAST_LINES_S)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Note that the block raised the failure to the user: no later call raises it again."""
        try:
            yield
        except (NodeFailedError, PoisonRows):
            if self._coordinator.error() is not None:
                self._seen()
            self._console.flush(_LAST_LINES_S)
            raise

    def _seen(self) -> None:
        self._is_seen = True
        atexit.unregister(self._tell_at_exit)

    def _finish(
        self, feeds: tuple[str, ...], grace_s: float, timeout_s: float, from_last_step: bool
    ) -> ShutdownTimeout | None:
        """Let main_fun come to its end; returns the error if it does not in time."""
        self._coordinator.act(lambda state: state.finish(feeds))
        wait = MainFunWait(self._coordinator, self._console, is_fed=bool(feeds))
        ended = wait.wait(timeout_s, from_last_step=from_last_step)
        if ended:
            self._await_evaluation()
            self._coordinator.wait(lambda state: state.phase is not ClusterPhase.RUNNING, grace_s)
            return None
        names = self._coordinator.read(
            lambda state: [f"{each.where} ({each.phase})" for each in state.awaited()]
        )
        nodes = ", ".join(names)
        what = "return or make a step" if from_last_step else "return"
        ends = ", or let main_fun end when its feed does" if feeds else ""
        return ShutdownTimeout(
            f"main_fun did not {what} within {timeout_s:.10g} s on {nodes}; the nodes were stopped "
            "by force. End the cluster by cluster.shutdown(timeout=...) with more seconds, or with "
            f"None for no limit{ends}",
            nodes,
        )

    def _await_evaluation(self) -> None:
        """Let the evaluator evaluate the last checkpoint."""
        if self._coordinator.read(_nobody_evaluates):
            return
        self._coordinator.act(lambda state: state.stop_evaluating())
        limit_s = self._config.evaluation_s
        line = "the training is over; waiting for the last evaluation"
        if not shown_wait(
            self._coordinator, self._console, _nobody_evaluates, limit_s, lambda: (line, True)
        ):
            self._console.warn(
                f"the evaluator did not end within {limit_s:.0f} s of the training and is stopped: "
                "raise ClusterConfig(evaluation_s=...), or let its main_fun return when "
                "ctx.stop_asked is True, as ctx.evaluate_checkpoints() does"
            )

    def _stop_all(self, reason: str, grace_s: float, *, save: bool) -> None:
        """Stop workers before servers, so that no worker loses its servers while it ends."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._unwatch()
            atexit.unregister(self._at_exit)
            if self._jobs is None:
                return
            coordinator = self._coordinator
            needed_s = 0.0 if save else grace_s + _KILL_S
            longer_s = max(0.0, needed_s - self._config.abort_s * _WORKERS_SHARE)
            deadline_s = time.monotonic() + self._config.abort_s + longer_s
            coordinator.act(
                lambda state: state.end(state.workers, reason, grace_s=grace_s, is_orderly=not save)
            )
            coordinator.wait(
                lambda state: not any(worker.is_live for worker in state.workers),
                self._config.abort_s * _WORKERS_SHARE + longer_s,
            )
            try:
                if save:
                    self._save(deadline_s - time.monotonic() - self._config.abort_s * _STOP_SHARE)
            finally:
                coordinator.act(lambda state: state.end(state.live(), reason, grace_s=grace_s))
                self._await_end((deadline_s - time.monotonic()) * _SERVERS_SHARE)
                left_s = deadline_s - time.monotonic()
                if not save:
                    self._await_values(self._jobs)
                if not self._jobs.end(left_s):
                    self._console.warn(
                        "a Spark job of this cluster did not end when it was cancelled"
                    )

    def _save(self, timeout_s: float) -> None:
        directory = self._config.save_on_interrupt
        if directory is None or not self._coordinator.read(_has_served):
            return
        from tfos.driver.final_checkpoint import (
            FinalCheckpoint,  # numpy: only where something is saved
        )

        FinalCheckpoint(directory, self._coordinator, self._credentials, self._console).save(
            timeout_s
        )

    def _await_end(self, timeout_s: float) -> None:
        coordinator = self._coordinator
        if not coordinator.wait(lambda state: not state.live(), timeout_s):
            names = coordinator.read(lambda state: [member.name for member in state.live()])
            self._console.warn(
                f"{', '.join(names)} did not confirm the stop within {self._config.abort_s:.0f} s; "
                "their lease ends them"
            )

    def _await_values(self, jobs: NodeJobs) -> None:
        """Let Spark bring what workers that have ended in order have handed over."""
        line = (
            f"the workers have ended; waiting {_VALUES_S:.0f} s at most for the values that Spark "
            "brings"
        )
        shown_wait(
            self._coordinator,
            self._console,
            lambda state: self._is_hurried or not jobs.is_bringing(_bringing(state)),
            _VALUES_S,
            lambda: (line, True),
        )

    def _close(self, phase: ClusterPhase) -> None:
        self._coordinator.close(phase)
        self._console.flush(_LAST_LINES_S)

    def _unwatch(self) -> None:
        if self._on_drop is not None:
            self._on_drop.detach()

    def _close_unused(self) -> None:
        if self.is_forked:
            return
        # Any thread may be the one that drops the last reference, whatever locks it holds.
        InterruptibleCall("tfos-drop", lambda: self.abort("nobody can start it")).start()

    def _at_exit(self) -> None:
        if self.is_forked:
            return
        names = self._coordinator.read(_still_training)
        if names and not _is_interrupted():
            self._console.warn(
                f"the program ends while main_fun still runs on {', '.join(names)}, and stops it: "
                "call cluster.shutdown(), or use `with`, which wait until it has returned"
            )
        self.abort("the driver's interpreter exits")
        self._tell_at_exit()

    def _tell_at_exit(self) -> None:
        self.tell_failure(is_interrupted=_is_interrupted())


def _is_interrupted() -> bool:
    """Whether Ctrl-C has ended the program: Python keeps what did."""
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


def _bringing(state: ClusterView) -> set[str]:
    """Return the workers that have ended in order, if one of them has handed over a value."""
    ended = [each for each in state.workers if each.status is NodeStatus.ENDED and each.done]
    has_value = any(each.done and each.done.hands_over for each in ended)
    return {each.name for each in ended} if has_value else set()


def _still_training(state: ClusterView) -> list[str]:
    return [each.where for each in state.training()] if state.is_running else []


def _nobody_evaluates(state: ClusterView) -> bool:
    return not state.evaluating() or state.phase is not ClusterPhase.RUNNING


def _has_served(state: ClusterView) -> bool:
    """Whether training began, and no server has been told to stop, as when a node failed."""
    return bool(state.servers) and all(
        each.status is NodeStatus.RUNNING and not each.stop_ordered for each in state.servers
    )
