"""Stand-ins for what surrounds a node: an executor's JVM that can be killed, a driver that can."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.marked_processes import MARKER
from tests.support.nodes import NodeBed
from tfos.node import procfs
from tfos.node.spec import NodeBundle

_TASK = """
import pickle, sys
task, bundle = pickle.load(open(sys.argv[1], "rb"))
list(task(0, iter([bundle])))
"""


class FakeExecutor:
    """A process named java, as Spark starts it, with a node task's process below it."""

    def __init__(self, bed: NodeBed, bundle: NodeBundle, *, hold_slot: bool = True) -> None:
        self.work_dir = bed.temp / "work"
        self.work_dir.mkdir(exist_ok=True)
        pickled = bed.temp / "task.pickle"
        pickled.write_bytes(pickle.dumps((bed.task(hold_slot=hold_slot), bundle)))
        # The stand-in itself carries no mark: it outlives its nodes, as an executor does.
        shell = f'{MARKER}={bed.mark} {sys.executable} -P -c "$TASK" {pickled} & echo $!; read END'
        options = ["--executor-id", "7", "--hostname", "127.0.0.1"]
        unmarked = {name: value for name, value in os.environ.items() if name != MARKER}
        self.jvm = subprocess.Popen(
            ["java", "-c", shell, *options],
            executable="/bin/bash",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.work_dir,
            env={**unmarked, "TASK": _TASK, "PYTHONPATH": str(Path.cwd())},
        )
        assert self.jvm.stdout is not None
        self.task_pid = int(self.jvm.stdout.readline())
        self._task_pidfd = os.pidfd_open(self.task_pid)

    def kill(self) -> None:
        self.jvm.send_signal(signal.SIGKILL)
        self.jvm.wait(10)

    def wait_task_gone(self, timeout_s: float = 20.0) -> None:
        assert procfs.wait_exited([self._task_pidfd], timeout_s), "the node task still runs"

    def close(self) -> None:
        if self.jvm.poll() is None:
            self.kill()
        os.close(self._task_pidfd)
        for pipe in (self.jvm.stdin, self.jvm.stdout):
            if pipe is not None:
                pipe.close()


class DriverLine:
    """Forwards the driver's port; is cut (the driver was killed) or frozen (nothing arrives)."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self.cut()
        self._flows.set()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with contextlib.suppress(OSError, ValueError):
            while True:
                for sock in select.select([client, server], [], [])[0]:
                    data = sock.recv(65536)
                    self._flows.wait()
                    if not data:
                        return other[sock].shutdown(socket.SHUT_RDWR)
                    other[sock].sendall(data)
