"""Ranks as processes of this host, without Spark: to try out a program where it is written.

Covers: starting and ending them, their environment, their addresses, their values.
Does not: run a rank (local_process).
Runs in: the driver. Its children die with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rpc.linux_calls import memfd_create, pidfd_open
from rpc.transport.listen import short_temporary_directory
from tfos.errors import NodeFailedError, NodeStartError
from tfos.failure import NodeFailure, NodeId, is_symptom
from tfos.native.environment import announce_to_tensorflow, tf_config
from tfos.native.reserved_port import ReservedPort
from tfos.node import bootstrap, whole_files, workspace
from tfos.node.child_link import ChildLink
from tfos.node.failure import Exit, describe_exit
from tfos.runner.local_process import LocalRank, RankAddresses, RankListening, RankOutcome
from tfos.runner.spark_run import checked_work, in_rank_order, late_ranks
from tfos.spark import pickling

START_S = 120.0
"""Seconds until a process listens, including the imports of the program's modules."""
_END_S = 5.0
_STDERR = 2
_LOOK_S = 3600.0
"""Seconds of one poll, which must take less than 25 days; the end of a process ends it at once."""


@dataclass(slots=True)
class _Running:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    link: ChildLink[RankListening]
    outcome_fd: int

    def outcome(self) -> RankOutcome | None:
        """Return the outcome that the process left when it ended; None: none, or incomplete."""
        data = whole_files.contents(self.outcome_fd)
        try:
            return msgspec.msgpack.decode(data, type=RankOutcome)
        except msgspec.DecodeError:  # killed before it had written everything
            return None


def run_local(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_proc: int,
    *,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call a function in processes of this host and return their values in rank order.

    Their output goes to this process's own.

    Args:
        fn: as in tfos.run.
        args: positional arguments of fn.
        kwargs: keyword arguments of fn.
        num_proc: number of processes, from 1.
        timeout_s: seconds that fn may take once all ranks run; None: no limit.

    Raises:
        SettingsError, NotPicklable, NoResultError: as in tfos.run.
        NodeFailedError: a rank failed; its own traceback is the cause.
        ShutdownTimeout: fn did not return within timeout_s.
    """
    work = pickling.dumps(checked_work(fn, args, kwargs))
    secret, run_id = secrets.token_bytes(32), f"local-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        _open_standard_streams(stack)
        parent = short_temporary_directory()
        workspace.sweep(parent)  # of runs that were killed
        directory = str(workspace.make_directory(parent))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ranks = []
        for rank, environment in enumerate(_environments(stack, num_proc)):
            spec = LocalRank(rank, run_id, secret, directory, work)
            ranks.append(_start(stack, spec, environment))
        _introduce(ranks)
        failures = _await(ranks, timeout_s)
        if failures:
            raise NodeFailedError(failures)
        outcomes = {each.rank: each.outcome() for each in ranks}
    values = {rank: each.value for rank, each in outcomes.items() if each and each.value}
    return in_rank_order(values, num_proc)


def _open_standard_streams(stack: contextlib.ExitStack) -> None:
    """Put /dev/null where the program has closed a standard stream.

    A descriptor of a rank would get its number, and the rank would write its output there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
        stack.callback(os.close, descriptor)
    os.close(descriptor)


def _environments(stack: contextlib.ExitStack, num_proc: int) -> list[dict[str, str]]:
    """Return each rank's environment: TF_CONFIG names all ranks, as on executors.

    This process holds their ports until the run ends; only TensorFlow's servers can also bind them.
    """
    ports = [ReservedPort() for _ in range(num_proc)]
    for each in ports:
        stack.callback(each.release)
    jobs = {"worker": [f"127.0.0.1:{each.port}" for each in ports]}
    own = bootstrap.without_spark_secrets(os.environ)
    announce_to_tensorflow(own, jobs, has_tensorflow_servers=False)
    named = (tf_config(jobs, "worker", n, has_tensorflow_servers=False) for n in range(num_proc))
    return [own | {"TF_CONFIG": each} for each in named]


def _start(
    stack: contextlib.ExitStack, spec: LocalRank, environment: Mapping[str, str]
) -> _Running:
    ours, theirs = socket.socketpair()
    stack.callback(ours.close)
    outcome_fd = memfd_create("tfos-outcome")
    stack.callback(os.close, outcome_fd)
    body = msgspec.structs.replace(spec, link_fd=theirs.fileno(), outcome_fd=outcome_fd)
    document = bootstrap.document_fd(
        "tfos.runner.local_process",
        msgspec.msgpack.encode(body),
        sys_path=tuple(sys.path),
        parent_pid=os.getpid(),
    )
    try:
        process = subprocess.Popen(
            bootstrap.command(document, f"tfos rank {spec.rank}"),
            pass_fds=[document, theirs.fileno(), outcome_fd],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    finally:
        os.close(document)
        theirs.close()
    pidfd = pidfd_open(process.pid)
    stack.callback(os.close, pidfd)
    stack.callback(_end, process)
    return _Running(spec.rank, process, pidfd, ChildLink(ours, RankListening), outcome_fd)


def _introduce(ranks: Sequence[_Running]) -> None:
    """Send every rank the addresses of all; `_await` finds a rank that has ended instead."""
    found = []
    for each in ranks:
        try:
            listening = each.link.receive(START_S)
        except TimeoutError:
            raise NodeStartError(
                f"rank {each.rank} did not begin within {START_S:.0f} s: its imports "
                "take longer, or this host has no processor time left; run fewer ranks"
            ) from None
        if listening is None:
            return
        found.append(listening.endpoint)
    for each in ranks:
        each.link.send(RankAddresses(tuple(found)))


def _await(ranks: Sequence[_Running], timeout_s: float | None) -> list[NodeFailure]:
    """Wait for all; if one fails, end the others, which do not count as failed. Causes come first.

    Raises:
        ShutdownTimeout: the time is over, and none has failed.
    """
    failures: list[NodeFailure] = []
    waiting = {each.pidfd: each for each in ranks}
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    killed: set[int] = set()
    is_ending = False
    while waiting:
        poll = select.poll()
        for pidfd in waiting:
            poll.register(pidfd, select.POLLIN)
        left_s = _LOOK_S if deadline_s is None else deadline_s - time.monotonic()
        ended = poll.poll(1000 * min(max(0.0, left_s), _LOOK_S))
        is_late = deadline_s is not None and time.monotonic() >= deadline_s
        if not ended and is_late and not failures:
            raise late_ranks(", ".join(f"rank:{each.rank}" for each in waiting.values()), timeout_s)
        if not ended and is_late:
            for each in waiting.values():
                killed.add(each.rank)
                each.process.send_signal(signal.SIGKILL)
            deadline_s = None
        for pidfd, _ in ended:
            each = waiting.pop(pidfd)
            failure = _failure(each, each.process.wait())
            if failure is not None and (failure.error_type or each.rank not in killed):
                failures.append(failure)
        if failures and waiting and not is_ending:
            is_ending, deadline_s = True, time.monotonic() + _END_S
    failures.sort(key=is_symptom)
    return failures


def _failure(each: _Running, code: int) -> NodeFailure | None:
    outcome = each.outcome()
    if outcome is not None and not outcome.error_type:
        return None
    node = NodeId("rank", each.rank)
    host, pid = socket.gethostname(), each.process.pid
    if outcome is None:
        how = Exit(code, None) if code >= 0 else Exit(None, -code)
        return NodeFailure(
            node,
            host,
            pid,
            exit_code=how.exit_code,
            signal=how.signal_number,
            message=f"rank {each.rank} {describe_exit(how)}",
        )
    return NodeFailure(
        node,
        host,
        pid,
        error_type=outcome.error_type,
        message=outcome.message,
        traceback=outcome.traceback,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
