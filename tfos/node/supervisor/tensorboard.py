"""TensorBoard as a child of the chief's supervisor; its failure never fails a training.

Covers: its command line, the address it binds, reading its URL, why it did not start.
Does not: fail a node. Whatever happens to TensorBoard ends in a TensorBoardUp with a reason.
Runs in: the supervisor; `main` in TensorBoard's own process.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from rpc import endpoint
from tfos.console import missing_packages
from tfos.control.messages import TensorBoardUp
from tfos.node import failure
from tfos.node.spec import SupervisorSpec
from tfos.node.supervisor import children
from tfos.node.supervisor.event_loop import EventLoop
from tfos.node.supervisor.log_buffer import LineSplitter, clean_line
from tfos.node.workspace import Workspace

START_TIMEOUT_S = 15.0
"""Seconds until the URL, or a reason, is at the driver."""

_URL = re.compile(r"TensorBoard \S+ at (http://\S+)")
_LAST_LINES = 5
_TIMER = "tensorboard"


class TensorBoardSpec(msgspec.Struct, frozen=True):
    """The arguments of TensorBoard's process."""

    arguments: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Names of this host that users were told, and of proxies."""


class TensorBoardChild:
    """Runs TensorBoard on the chief's node and reports its state.

    Args:
        loop: the supervisor's event loop; all methods run in its thread.
        report: sends an event to the driver.
    """

    def __init__(self, loop: EventLoop, report: Callable[[TensorBoardUp], None]) -> None:
        self._loop = loop
        self._report = report
        self._child: children.Child | None = None
        self._splitter = LineSplitter()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_up = False
        self._advertised_host = ""

    @property
    def pids(self) -> set[int]:
        """The process, if it runs: it must not be killed with the child's tree."""
        return {self._child.pid} if self._child else set()

    def start(self, spec: SupervisorSpec, workspace: Workspace, env: Mapping[str, str]) -> None:
        """Start TensorBoard for the cluster's log directory, or report why it cannot start.

        Args:
            spec: the supervisor's document.
            workspace: the node's directories.
            env: environment of the child.
        """
        self._advertised_host = spec.executor.host
        try:
            directory = event_dir(spec.bundle.settings.tensorboard.log_dir, workspace)
            host, port = _host(spec), env.get("TENSORBOARD_PORT") or "0"
            arguments = ("--logdir", directory, "--host", host, "--port", port)
            asked_for = spec.bundle.settings.tensorboard.names
            names = (host, self._advertised_host, *asked_for)
            private = {
                "TMPDIR": str(
                    workspace.subdirectory("tensorboard-tmp")
                ),  # TensorBoard leaves files there
                "CUDA_VISIBLE_DEVICES": "",  # TensorBoard must not take a GPU from training
            }
            self._child = children.spawn(
                "tfos.node.supervisor.tensorboard",
                msgspec.msgpack.encode(TensorBoardSpec(arguments, names)),
                sys_path=spec.sys_path,
                cwd=spec.executor.cwd,
                env={**env, **private},
                title="tfos tensorboard",
            )
        except OSError as error:
            self._report_reason(f"cannot be started: {error}")
            return
        self._loop.watch(self._child.pidfd, self._on_exit)
        self._loop.watch(self._child.output, self._on_output)
        self._loop.set_timer(_TIMER, START_TIMEOUT_S, self._on_late)

    def _on_output(self) -> None:
        while self._child is not None and (data := self._child.read_output()) is not None:
            if not data:
                self._loop.unwatch(self._child.output)
                return
            for raw in self._splitter.feed(data):
                self._on_line(clean_line(raw))

    def _on_line(self, line: str) -> None:
        self._lines.append(line)
        match = _URL.search(line)
        if match and not self._is_up:
            self._is_up = True
            self._loop.cancel_timer(_TIMER)
            self._report(TensorBoardUp(reachable_url(match[1], self._advertised_host)))

    def _on_late(self) -> None:
        self._report_reason(f"shows no URL after {START_TIMEOUT_S:.0f} s; it may still come up")

    def _on_exit(self) -> None:
        child = self._child
        if child is None:
            return
        self._on_output()
        self._loop.cancel_timer(_TIMER)
        self._loop.unwatch(child.pidfd)
        self._loop.unwatch(child.output)
        how = child.reap()
        self._report_reason(failure.describe_exit(how) if how else "ended")
        self._child = None
        child.close()

    def _report_reason(self, reason: str) -> None:
        words = f": {' | '.join(self._lines)}" if self._lines else ""
        advice = missing_packages.extra_advice(words)
        self._report(TensorBoardUp("", f"TensorBoard {reason}{words}{advice}"))


def _host(spec: SupervisorSpec) -> str:
    """Return the address to bind: TensorBoard has no login, so loopback wherever that suffices."""
    settings = spec.bundle.settings
    is_near = settings.loopback or settings.driver_loopback == endpoint.namespace_id("net")
    return settings.tensorboard.host or ("127.0.0.1" if is_near else spec.executor.host)


def reachable_url(url: str, advertised_host: str) -> str:
    """Return the URL with this host's address where TensorBoard names the address of all.

    A loopback address would hide from the driver that others can open it.

    Args:
        url: URL that TensorBoard prints.
        advertised_host: this host's address.
    """
    if endpoint.is_loopback(advertised_host):
        return url
    return re.sub(r"(?<=//)(0\.0\.0\.0|\[::\])(?=[:/])", endpoint.bracketed(advertised_host), url)


def event_dir(log_dir: str, workspace: Workspace) -> str:
    """Return the local directory where a node's event files are written and read.

    Without a user's directory, or with a URL, it is a temporary directory of the node; with a URL
    the worker copies its files there (tfos.worker.reports.log_mirror).

    Args:
        log_dir: the user's; "": none.
        workspace: the node's directories.
    """
    path = log_dir.removeprefix("file://")
    if not path or "://" in path:
        return str(workspace.subdirectory("tensorboard"))
    return path


def main(body: bytes) -> None:
    """Run the stock TensorBoard in this process, until it ends."""
    from tfos.node.supervisor.tensorboard_server import run  # not in the supervisor

    spec = msgspec.msgpack.decode(body, type=TensorBoardSpec)
    run(spec.arguments, spec.names)
