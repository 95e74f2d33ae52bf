"""Whole nodes without Spark: real supervisors and children against a control server of the test."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import pytest

from rpc.auth.handshake import Credentials
from tests.support.cluster_states import node_id
from tests.support.control import ControlBed, RecordingHandler
from tests.support.marked_processes import MARKER, kill, marked, wait_gone
from tests.support.named_memory import left_since, named
from tfos.config import ClusterConfig, TensorBoardConfig
from tfos.control import messages
from tfos.failure import NodeFailure, NodeId
from tfos.node.spec import NodeBundle, NodeSettings
from tfos.node.task import NodeResult, NodeTask
from tfos.spark import pickling
from tfos.topology import PlannedNode

WAIT_S = 60.0
EventType = TypeVar("EventType")


def node_settings(tensorboard: TensorBoardConfig | None = None, **options: Any) -> NodeSettings:
    """Settings of a cluster of two; what ClusterConfig has a field for goes there."""
    names = {each.name for each in dataclasses.fields(ClusterConfig)}
    config = ClusterConfig(**{name: options.pop(name) for name in names & set(options)})
    known = {"cluster_id": "c", "driver_address": "h:1", "num_workers": 1, "num_ps": 1}
    return NodeSettings(
        config=config, tensorboard=tensorboard or TensorBoardConfig(), **{**known, **options}
    )


class NodeRun:
    """One node task on a thread."""

    def __init__(self, task: NodeTask, bundle: NodeBundle) -> None:
        self.name = bundle.name
        self.result: NodeResult | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(task, bundle), daemon=True)
        self._thread.start()

    def _run(self, task: NodeTask, bundle: NodeBundle) -> None:
        try:
            (self.result,) = task(0, iter([bundle]))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def wait(self, timeout_s: float = WAIT_S) -> NodeResult:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the task of {self.name} still runs"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


class SteeredHandler(RecordingHandler):
    """Answers as a test wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.reply = messages.RegisterReply(accepted=True)
        self.fenced: set[NodeId] = set()

    def on_register(self, register: messages.Register) -> messages.RegisterReply:
        super().on_register(register)
        return self.reply

    def on_heartbeat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatReply:
        super().on_heartbeat(heartbeat)
        return messages.HeartbeatReply(fenced=heartbeat.node in self.fenced)


class NodeBed:
    """Starts nodes, hands out rosters, and finds whatever they leave behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handler = SteeredHandler()
        self.control = ControlBed(f"bed{os.getpid()}", self.handler)
        self.credentials = Credentials(self.control.cluster_id, os.urandom(32))
        self.temp = Path(tempfile.mkdtemp(prefix="tb", dir="/tmp"))  # short: Unix sockets
        self.mark = f"{os.getpid()}-{self.temp.name}"
        monkeypatch.setenv(MARKER, self.mark)
        monkeypatch.setenv("TMPDIR", str(self.temp))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temp))
        self.memory_before = named()

    def bundle(
        self,
        name: str,
        main_fun: Callable[[Any, Any], Any] | None = None,
        args: Any = None,
        *,
        rank: int = 0,
        **settings: Any,
    ) -> NodeBundle:
        role, index = name.split(":")
        options = {"loopback": True, "cluster_id": self.control.cluster_id, **settings}
        return NodeBundle(
            node=PlannedNode(role, int(index), rank, is_chief=role != "ps" and rank == 0),
            control_keys=self.control.authority.node(name),
            rpc_secret=self.credentials.secret,
            main_fun=b"" if main_fun is None else pickle_by_value(main_fun, args),
            settings=node_settings(driver_address=self.control.address, **options),
        )

    def task(self, *, hold_slot: bool = True, attempt: int = 0) -> NodeTask:
        return NodeTask(hold_slot=hold_slot, first_attempt=attempt)

    def start(self, bundle: NodeBundle, *, hold_slot: bool = True, attempt: int = 0) -> NodeRun:
        return NodeRun(self.task(hold_slot=hold_slot, attempt=attempt), bundle)

    def registered(self, name: str, attempt: int = 0) -> messages.Register:
        def matches(kind: str, value: Any) -> bool:
            if kind != "register":
                return False
            return bool(value.node.name == name and value.node.attempt == attempt)

        found: messages.Register = self._await(matches)
        return found

    def event(
        self, name: str, kind: type[EventType], accept: Callable[[EventType], bool] = lambda _: True
    ) -> EventType:
        """Wait for an event of this node and type."""

        def matches(note: str, value: Any) -> bool:
            if note != "event":
                return False
            node, event = value
            return node.name == name and isinstance(event, kind) and accept(event)

        found: EventType = self._await(matches)[1]
        return found

    def heartbeat(
        self, name: str, accept: Callable[[messages.Heartbeat], bool]
    ) -> messages.Heartbeat:
        found: messages.Heartbeat = self._await(
            lambda kind, value: kind == "heartbeat" and value.node.name == name and accept(value)
        )
        return found

    def log_line(self, text: str) -> str:
        """Wait for a line of output that contains this text."""

        def matches(kind: str, value: Any) -> bool:
            return kind == "log" and any(text in line for line in value.lines)

        batch: messages.LogBatch = self._await(matches)
        return next(line for line in batch.lines if text in line)

    def failure(self, name: str) -> NodeFailure:
        return self.event(name, messages.Failed).failure

    def entry(self, name: str, rank: int = 0) -> messages.RosterEntry:
        register = self.registered(name)
        listening = self.event(name, messages.Listening)
        return messages.RosterEntry(
            register.node,
            rank,
            register.host,
            listening.endpoint,
            listening.free_port,
        )

    def order(self, name: str, order: messages.Order, attempt: int = 0) -> None:
        self.control.server.send(node_id(name, attempt), order)

    def release(self, *names: str) -> tuple[messages.RosterEntry, ...]:
        """Wait until these nodes listen, then start them all."""
        ranks = {"ps": 0, "worker": 0}
        entries = []
        for name in names:
            kind = "ps" if name.startswith("ps") else "worker"
            entries.append(self.entry(name, ranks[kind]))
            ranks[kind] += 1
        for name in names:
            self.order(name, messages.Start(tuple(entries)))
        return tuple(entries)

    def child_pid(self, name: str) -> int:
        return self.heartbeat(name, lambda beat: beat.child_pid > 0).child_pid

    def processes(self) -> dict[int, str]:
        return marked(self.mark)

    def everything_readable(self) -> list[bytes]:
        """Command lines and environments of all processes, all files, all lines at the driver."""
        texts = [
            Path(f"/proc/{pid}/{name}").read_bytes()
            for pid in self.processes()
            for name in ("cmdline", "environ")
        ]
        texts += [path.read_bytes() for path in self.temp.rglob("*") if path.is_file()]
        with self.handler.changed:
            texts += [repr(note).encode() for note in self.handler.notes]
        return texts

    def assert_nothing_left(self, timeout_s: float = WAIT_S) -> None:
        """No process, no temporary directory, no shared memory; ports end with their processes."""
        assert wait_gone(self.mark, timeout_s) == {}
        assert [path.name for path in self.temp.iterdir() if path.name.startswith("tfos")] == []
        assert left_since(self.memory_before, timeout_s) == set()

    def close(self) -> None:
        kill(marked(self.mark))
        wait_gone(self.mark, WAIT_S)
        self.control.close()
        shutil.rmtree(self.temp, ignore_errors=True)

    def _await(self, matches: Callable[[str, Any], bool]) -> Any:
        handler = self.handler

        def found() -> list[Any]:
            return [value for kind, value in handler.notes if matches(kind, value)]

        deadline_s = time.monotonic() + WAIT_S
        with handler.changed:
            while not (values := found()):
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"not among {handler.notes}"
                handler.changed.wait(left_s)
            return values[0]


def wait_forever(args: Any, ctx: Any) -> None:
    """Be a main_fun that reads its feed to the end."""
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(1)


def pickle_by_value(main_fun: Callable[[Any, Any], Any], args: Any) -> bytes:
    """Pickle as for a user's script: the test's module is unknown to the worker."""
    module = inspect.getmodule(main_fun)
    assert module is not None
    cloudpickle.register_pickle_by_value(module)
    try:
        return pickling.dumps((main_fun, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def bed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeBed]:
    tmp_path_factory.getbasetemp()  # made on first use, which must not be in the bed's directory
    node_bed = NodeBed(monkeypatch)
    yield node_bed
    node_bed.close()
