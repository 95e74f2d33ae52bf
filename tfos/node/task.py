"""Node task: the Spark task that turns one task slot of an executor into a node.

Covers: who and where this node is, starting its supervisor, holding or freeing the slot; the same
for a node beside the driver, which takes no slot.
Does not: run anything of the node itself; that lives in the supervisor and outlives this task.
Runs in: a PySpark worker on the executor, as `rdd.mapPartitionsWithIndex(NodeTask(...))` over an
RDD with one NodeBundle per partition; `at_driver` in the driver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpc.endpoint import is_wildcard
from rpc.linux_calls import memfd_create, pidfd_open
from rpc.transport.listen import short_temporary_directory
from tfos.control.messages import DRIVER_EXECUTOR
from tfos.errors import NodeStartError, VersionSkew
from tfos.node import launch, procfs, versions, whole_files, workspace
from tfos.node.spec import Executor, NodeBundle, State, SupervisorSpec

_LOCAL_IP = "SPARK_LOCAL_IP"
_VANISHED_S = 2.0
"""A killed process closes its pipe a moment before it counts as dead."""
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """What a node task returns to the driver's job; failures travel by the control plane."""

    name: str
    outcome: str
    """`released`: roster complete, the node goes on. `ended`: it is over. `lost`: the supervisor
    vanished without a report."""
    reason: str = ""
    value: bytes = b""
    """What main_fun has handed over; see NodeContext.hand_over."""


@dataclass(frozen=True, kw_only=True)  # no slots: pickled by name, so that releases can differ
class NodeTask:
    """Starts the node that its partition holds.

    A user's exception never fails this task (Spark would run the user's code again); only a
    supervisor that cannot be started, does not reach the driver, or is ended by a signal while the
    cluster starts, does.
    """

    hold_slot: bool
    """Stay until the node ends; else return, and free the slot, once the roster is complete."""
    versions: dict[str, str] = field(default_factory=dict)
    """The driver's versions; see tfos.node.versions."""
    first_attempt: int = 0
    """Added to Spark's attempt number: a later job may restart a node of an earlier one."""

    def __call__(self, index: int, bundles: Iterator[NodeBundle]) -> Iterator[NodeResult]:
        """Run one node; `bundles` must hold exactly one element.

        Raises:
            VersionSkew: this executor cannot work with this driver.
            NodeStartError: the supervisor did not come up or did not reach the driver, or a signal
                ended it while the cluster started.
        """
        try:
            differences = versions.compare(self.versions, versions.installed())
            # Before the bundle is read, whose fields another release does not know.
            refuse_skew(differences)
            nodes = list(bundles)  # to its end, or PySpark does not reuse this process
            if len(nodes) != 1:
                raise NodeStartError(f"partition {index} holds {len(nodes)} nodes, expected 1")
            result = self._run(nodes[0], versions.sentence(differences))
        except Exception as error:
            error.add_note(f"in task {index}")  # Spark 4.2 does not say: jobs.failed_task_of
            raise
        yield result

    def at_driver(self, bundle: NodeBundle) -> NodeResult:
        """Run one node in a process beside this one, which is the driver; it ends with it.

        Args:
            bundle: the node's bundle.

        Raises:
            NodeStartError: the supervisor did not come up.
        """
        host = bundle.settings.driver_address.rpartition(":")[0]
        executor = Executor(
            executor_id=DRIVER_EXECUTOR,
            host=_advertised_host(host, loopback=bundle.settings.loopback),
            jvm_pid=os.getpid(),
            cores=os.cpu_count() or 1,
            cwd=os.getcwd(),
            spark_files="",
            scratch_dir=_scratch_dir(),
            log_dir="",
        )
        return self._start(bundle, executor, self.first_attempt, skew="")

    def _run(self, bundle: NodeBundle, skew: str) -> NodeResult:
        context = task_context()
        attempt = self.first_attempt + (context.attemptNumber() if context else 0)
        executor = find_executor(
            loopback=bundle.settings.loopback,
            cores=context.cpus() if context else 1,
            gpus=gpus_of(context, bundle.settings.config.gpu_resource),
        )
        return self._start(bundle, executor, attempt, skew)

    def _start(self, bundle: NodeBundle, executor: Executor, attempt: int, skew: str) -> NodeResult:
        is_awaited = self.hold_slot and not bundle.node.is_ps
        with contextlib.ExitStack() as open_fds:
            jvm_pidfd = value_fd = -1
            if executor.jvm_pid:
                jvm_pidfd = pidfd_open(executor.jvm_pid)
                open_fds.callback(os.close, jvm_pidfd)
            if is_awaited:
                value_fd = memfd_create("tfos-value")
                open_fds.callback(os.close, value_fd)
            spec = SupervisorSpec(
                attempt=attempt,
                bundle=bundle,
                executor=executor,
                jvm_pidfd=jvm_pidfd,
                status_fd=-1,
                value_fd=value_fd,
                hold_slot=self.hold_slot,
                sys_path=tuple(sys.path),
                skew=skew,
            )
            handle = open_fds.enter_context(contextlib.closing(launch.launch(spec)))
            outcome, reason = self._wait(handle, bundle, executor)
            value = whole_files.contents(value_fd) if is_awaited else b""
        return NodeResult(name=bundle.name, outcome=outcome, reason=reason, value=value)

    def _wait(
        self, handle: launch.SupervisorHandle, bundle: NodeBundle, executor: Executor
    ) -> tuple[str, str]:
        where = f"{bundle.name} on executor {executor.executor_id} ({executor.host})"
        try:
            first = handle.wait(frozenset(State), launch.START_TIMEOUT_S)
        except TimeoutError:
            raise NodeStartError(
                f"{where}: no sign of its supervisor after {launch.START_TIMEOUT_S:.0f} s: "
                f"{handle.last_output() or 'it wrote nothing'}"
            ) from None
        if first is None:
            _clean_up(executor)
            raise NodeStartError(
                f"{where}: its supervisor ended at once: {handle.last_output() or 'without a word'}"
            )
        if first.is_cut_off:  # Spark starts a failed task again, elsewhere if it can
            raise NodeStartError(f"{where}: {first.reason}")
        if first.state is State.ENDED:
            return State.ENDED.value, first.reason
        last = handle.wait(frozenset({State.RELEASED, State.ENDED}))
        if last is None:
            _clean_up(executor)
            # A failed task is started again, while the driver still waits for this node.
            raise NodeStartError(f"{where}: its supervisor vanished while the cluster started")
        if last.state is State.ENDED and last.is_cut_off:
            raise NodeStartError(f"{where}: {last.reason}")
        if last.state is State.RELEASED and self.hold_slot:
            last = handle.wait(frozenset({State.ENDED}))
        if last is None:
            _clean_up(executor)
            return "lost", ""
        return last.state.value, last.reason


def _clean_up(executor: Executor) -> None:
    """Remove the directories of a supervisor that vanished; its last moments may still pass."""
    deadline_s = time.monotonic() + _VANISHED_S
    while not workspace.sweep(executor.scratch_dir, short_temporary_directory()):
        if time.monotonic() > deadline_s:
            return
        time.sleep(_LOOK_AGAIN_S)


def refuse_skew(differences: list[versions.Difference]) -> None:
    """Raise VersionSkew if one of these differences is fatal."""
    if not any(difference.is_fatal for difference in differences):
        return
    jvm_pid = procfs.java_ancestor() or 0
    executor_id = procfs.command_line_option(jvm_pid, "--executor-id") if jvm_pid else ""
    raise VersionSkew(
        f"executor {executor_id or DRIVER_EXECUTOR} on {socket.gethostname()} has other "
        f"versions than the driver:\n{versions.table(differences)}\n{versions.note(differences)}"
        f"Let both run one environment: set PYSPARK_PYTHON to the same on every host (here it is "
        f"{sys.executable}), or ship one with --archives."
    )


def find_executor(*, loopback: bool, cores: int, gpus: tuple[str, ...] = ()) -> Executor:
    """Find out where this process runs: from the operating system, not from Spark's settings.

    Two tasks of one executor, several executors of one host and local mode all differ in the
    command line of the JVM above this process, and in nothing that an environment would tell.

    Args:
        loopback: everything runs on the driver's host.
        cores: the executor's cores.
        gpus: the task's GPUs.

    Raises:
        NodeStartError: no executor is above this process, as in a container of its own.
    """
    jvm_pid = procfs.java_ancestor() or 0
    executor_id = procfs.command_line_option(jvm_pid, "--executor-id") if jvm_pid else ""
    is_local = not executor_id
    if is_local and not loopback:  # its peers are on other hosts, where 127.0.0.1 is another node
        raise NodeStartError(
            f"no Java with --executor-id is above process {os.getpid()} on {socket.gethostname()} "
            f"({sys.executable}), so this node cannot find its host or notice its executor's end. "
            "PYSPARK_PYTHON must run in the executor's own PID namespace, with /proc readable"
        )
    hostname = procfs.command_line_option(jvm_pid, "--hostname") if jvm_pid else ""
    cwd = os.getcwd()
    return Executor(
        executor_id=executor_id or DRIVER_EXECUTOR,
        host=_advertised_host(hostname, loopback=loopback or is_local),
        jvm_pid=jvm_pid,
        cores=cores,
        cwd=cwd,
        spark_files=_spark_files(),
        scratch_dir=_scratch_dir(),
        log_dir="" if is_local else _log_dir(cwd),
        gpus=gpus,
    )


def _advertised_host(hostname: str, *, loopback: bool) -> str:
    if loopback:
        return "127.0.0.1"
    # Spark writes a literal IPv6 address in brackets, as nothing but a URL takes it.
    local_ip, hostname = (each.strip("[]") for each in (os.environ.get(_LOCAL_IP, ""), hostname))
    if is_wildcard(local_ip):  # an address to bind; on another host it means that host
        local_ip = ""
    return local_ip or hostname or socket.getfqdn()


def _scratch_dir() -> str:
    """Return where Spark keeps this executor's temporary data (standalone, YARN), or tempdir."""
    executor_dirs = os.environ.get("SPARK_EXECUTOR_DIRS", "").split(os.pathsep)
    for variable in ("LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        executor_dirs += os.environ.get(variable, "").split(",")
    return _first_writable(executor_dirs) or tempfile.gettempdir()


def _log_dir(cwd: str) -> str:
    """Return where the executor's own logs lie: YARN says it, else its work directory."""
    return _first_writable([*os.environ.get("LOG_DIRS", "").split(","), cwd])


def _first_writable(paths: list[str]) -> str:
    for path in paths:
        if path and Path(path).is_dir() and os.access(path, os.W_OK):
            return path
    return ""


def gpus_of(context: Any, resource: str | None) -> tuple[str, ...]:
    """Return the addresses of the GPUs that Spark has given to a task.

    Args:
        context: Spark's TaskContext; None: this is no task.
        resource: Spark's name of the GPUs; None: they are not asked for.
    """
    found = context.resources().get(resource) if context and resource else None
    return tuple(found.addresses) if found else ()


def task_context() -> Any:
    """Return Spark's TaskContext, or None outside of a task."""
    from pyspark import TaskContext

    return TaskContext.get()


def _spark_files() -> str:
    from pyspark import SparkFiles

    return SparkFiles._root_directory or ""
