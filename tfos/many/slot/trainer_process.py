"""A slot's view of its trainer: start, one training at a time with its deadline, end.

Covers: the process, its output, why it ended.
Does not: decide what is trained (tfos.many.slot.process) or run user code (tfos.many.slot.trainer).
Runs in: the slot's process.
Threads: start it from the main thread, since it dies with that thread; one thread reads its output.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rpc.process_stat import private_bytes
from tfos.console import missing_packages
from tfos.errors import LinkError
from tfos.many.messages import (
    Ended,
    Ending,
    FromTrainer,
    Returned,
    TrainerReady,
    TrainingRaised,
    TrainItem,
)
from tfos.many.slot.specs import SlotSpec, TrainerSpec
from tfos.node import procfs
from tfos.node.child_link import ChildLink
from tfos.node.failure import describe_exit
from tfos.node.supervisor.children import Child, child_env, spawn

START_S = 300.0
"""Seconds from the start of the process until it has imported what the function needs."""
GROWN_BYTES = 1 << 30
"""Growth since its first item for which a trainer is replaced: TensorFlow keeps the variables and
graphs of each model that a process has fitted, for good. Mapped files do not count: they are the
way to keep large data from item to item."""
LEAST_AGE_S = 120.0
"""A younger trainer stays: what has grown may be data of the function, and imports take seconds."""
SUSPENDED_S = 16.0
"""Seconds after which a suspended trainer is ended: with the looks before and after within the 20 s
of every silent process. Its item has another attempt."""
_LOOK_S = 2.0
_END_S = 5.0
_TAIL_LINES = 20
_TAIL_LINE_CHARS = 1000
_LINE_BYTES = 64 * 1024


class TrainerProcess:
    """One trainer.

    Args:
        spec: document of the slot.
        values_fds: files that take values; the trainer shares them.
    """

    def __init__(self, spec: SlotSpec, values_fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        document = TrainerSpec(
            function=spec.function,
            is_grouped=spec.settings.is_grouped,
            items_fd=spec.items_fd,
            link_fd=theirs.fileno(),
            spark_files=spec.executor.spark_files,
            title=f"map_train slot {spec.slot}",
        )
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._oom_kills = procfs.oom_kills()
        self._kill_reason = ""
        """Why we killed it ourselves, for its item's error."""
        self._started_s, self._first_bytes = time.monotonic(), 0
        try:
            self._child: Child = spawn(
                "tfos.many.slot.trainer",
                msgspec.msgpack.encode(document),
                sys_path=spec.sys_path,
                cwd=spec.executor.cwd,
                env=child_env(
                    os.environ,
                    threads=0,
                    cores=spec.executor.cores,
                    gpus=spec.executor.gpus or None,
                    shares_gpus=spec.settings.shares_gpus,
                ),
                title=f"tfos trainer of slot {spec.slot}",
                inherit=[theirs.fileno(), spec.items_fd, *values_fds],
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._link: ChildLink[Any] = ChildLink(ours, FromTrainer)
        os.set_blocking(self._child.output, True)
        self._reader = threading.Thread(
            target=copy_lines, args=(self._child.output, self._tail), daemon=True
        )
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether its process is over."""
        return self._child.reap() is not None

    @property
    def has_grown(self) -> bool:
        """Whether another process should train the next item, as this one has kept memory."""
        return (
            self._first_bytes > 0
            and time.monotonic() - self._started_s > LEAST_AGE_S
            and private_bytes(self._child.pid) - self._first_bytes > GROWN_BYTES
        )

    def await_ready(self, item: int) -> Ended | None:
        """Wait until it can train; return why it cannot, which does not count as an attempt.

        Args:
            item: the item that waits for it.
        """
        got = self._next(START_S)
        if isinstance(got, TrainerReady):
            return None
        if isinstance(got, TrainingRaised):
            error = f"{got.error}{missing_packages.advice(got.error)}"
        elif got is None:
            error = f"its process {self._died()} as it started"
        else:
            error = f"no start within {START_S:.0f} s"
        return Ended(item, Ending.NOT_BEGUN, 0.0, error=f"before it began: {error}")

    def order(self, order: TrainItem) -> None:
        """Start a training, after the current one.

        Args:
            order: place of the item.
        """
        self._link.send(order)

    def outcome(self, item: int, started_s: float, timeout_s: float | None) -> Ended | Returned:
        """Wait for the end of the training that was ordered earliest.

        Args:
            item: the item in training.
            started_s: its start, monotonic seconds.
            timeout_s: seconds for it; None: no limit.
        """
        left_s = None if timeout_s is None else started_s + timeout_s - time.monotonic()
        got = self._next(left_s)
        seconds = time.monotonic() - started_s
        self._first_bytes = self._first_bytes or private_bytes(self._child.pid)
        if isinstance(got, Returned | TrainingRaised):
            self._tail.clear()  # this item's output is not shown for the next one
        if isinstance(got, Returned):
            return got
        if isinstance(got, TrainingRaised):
            how = Ending.NOT_PICKLABLE if got.is_unpicklable else Ending.RAISED
            error = f"{got.error}{missing_packages.advice(got.error)}"
            return Ended(item, how, got.seconds, error=error)
        if got is None:
            return Ended(item, Ending.DIED, seconds, error=f"its process {self._died()}")
        return Ended(
            item,
            Ending.TIMED_OUT,
            seconds,
            error=f"it was ended after timeout_s={timeout_s:g}; raise that or train less",
        )

    def close(self, *, kill: bool) -> None:
        """End it and all its children.

        Args:
            kill: whether to kill it at once; otherwise it may take a moment for its exit handlers.
        """
        self._link.close()
        if not kill:
            procfs.wait_exited([self._child.pidfd], _END_S)
        procfs.kill_descendants()
        procfs.wait_exited([self._child.pidfd], _END_S)
        self._child.reap()
        self._reader.join(_END_S)
        self._child.close()
        procfs.reap_orphans(own=())

    def _next(self, timeout_s: float | None) -> Any:
        """Return the next message, None if the process has ended, False at the deadline."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return self._link.receive(min(left_s, _LOOK_S), peer_pidfd=self._child.pidfd)
            except LinkError:
                return None
            except TimeoutError:
                if left_s <= _LOOK_S:
                    return False
            if self._child.suspended_s() >= SUSPENDED_S:
                self._kill_reason = f" after it was suspended (SIGSTOP) for {SUSPENDED_S:.0f} s"
                self._child.kill()

    def _died(self) -> str:
        if not procfs.wait_exited([self._child.pidfd], _END_S):
            return "closed its link (did the function close a file descriptor?)"
        how = self._child.reap()
        self._reader.join(1.0)
        text = (
            describe_exit(how, oom_kills=procfs.oom_kills() - self._oom_kills)
            if how is not None
            else "ended"
        )
        text += self._kill_reason
        tail = "\n".join(self._tail)
        return f"{text}; its last lines:\n{tail}" if tail else text


def copy_lines(source: int, tail: collections.deque[str]) -> None:
    """Copy a trainer's output to the executor's log, and keep the last lines.

    A line without an end, such as Keras' progress bar, comes in pieces: an attempt's error travels
    in a message of limited size.

    Args:
        source: descriptor of the output; stays open.
        tail: takes the last characters of each line.
    """
    with (
        contextlib.suppress(OSError, ValueError),
        open(source, "rb", closefd=False) as output,  # Child closes it
    ):
        while line := output.readline(_LINE_BYTES):
            text = line.decode(errors="backslashreplace")
            tail.append(text.rstrip("\n")[-_TAIL_LINE_CHARS:])
            sys.stderr.write(text)
