"""TensorBoard as a child of the chief's supervisor: started, found, never missed.

Covers: its command line, the address it binds, reading its URL, why it did not start.
Does not: fail a node. Whatever happens to TensorBoard ends in a TensorBoardUp with a reason.
Runs in: the supervisor; `main` in TensorBoard's own process.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from types import ModuleType

import msgspec

from rpc import address
from tfos.control.messages import TensorBoardUp
from tfos.node import children, failure
from tfos.node.logs import LineSplitter, clean_line
from tfos.node.spec import SupervisorSpec
from tfos.node.workspace import Workspace

START_TIMEOUT_S = 15.0
"""The URL is at the driver within this time, or a reason is."""

_URL = re.compile(r"TensorBoard \S+ at (http://\S+)")
_LAST_LINES = 5


class TensorBoardSpec(msgspec.Struct, frozen=True):
    """The arguments of TensorBoard's process."""

    arguments: tuple[str, ...]


class TensorBoard:
    """The TensorBoard process of one cluster, as its supervisor sees it."""

    def __init__(self, child: children.Child, host: str) -> None:
        self.child = child
        self.is_up = False
        self._host = host
        self._splitter = LineSplitter()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)

    def read(self) -> TensorBoardUp | None:
        """Read its output; the event that follows from it, once."""
        while data := self.child.read_output():
            for raw in self._splitter.feed(data):
                line = clean_line(raw)
                self._lines.append(line)
                match = _URL.search(line)
                if match and not self.is_up:
                    self.is_up = True
                    return TensorBoardUp(match[1])
        return None

    def ended(self) -> TensorBoardUp:
        """Say how it ended; call after its exit."""
        self.read()
        how = self.child.reap()
        words = failure.describe_exit(how) if how else "still runs"
        return TensorBoardUp("", f"TensorBoard {words}: {' | '.join(self._lines)}")

    def silent(self) -> TensorBoardUp:
        """Say that it did not answer in time; it may still come up later."""
        return TensorBoardUp(
            "", f"TensorBoard shows no URL after {START_TIMEOUT_S:.0f} s: {' | '.join(self._lines)}"
        )


def start(
    spec: SupervisorSpec, workspace: Workspace, env: Mapping[str, str]
) -> TensorBoard | TensorBoardUp:
    """Start TensorBoard for the cluster's log directory, or say why there will be none."""
    settings = spec.bundle.settings
    log_dir = local_log_dir(settings.log_dir) if settings.log_dir else default_log_dir(workspace)
    if not log_dir:
        return TensorBoardUp(
            "", f"TensorBoard cannot read log_dir={settings.log_dir!r}; use a local or shared path"
        )
    is_near = settings.loopback or settings.driver_boot_id == address.boot_id()
    host = settings.tensorboard_host or ("127.0.0.1" if is_near else spec.executor.host)
    port = env.get("TENSORBOARD_PORT") or "0"
    arguments = ("--logdir", log_dir, "--host", host, "--port", port)
    private = {
        "TMPDIR": str(workspace.subdirectory("tensorboard-tmp")),  # it leaves files there
        "CUDA_VISIBLE_DEVICES": "",  # it must not take a GPU from training
    }
    try:
        child = children.spawn(
            "tfos.node.tensorboard",
            msgspec.msgpack.encode(TensorBoardSpec(arguments)),
            spec,
            env={**env, **private},
            title="tfos tensorboard",
        )
    except OSError as error:
        return TensorBoardUp("", f"cannot start TensorBoard: {error}")
    return TensorBoard(child, host)


def default_log_dir(workspace: Workspace) -> str:
    """Return the directory of a node whose user named none; it ends with the node."""
    return str(workspace.subdirectory("tensorboard"))


def local_log_dir(log_dir: str) -> str:
    """Return the path of a local directory, or an empty string for another file system's."""
    path = log_dir.removeprefix("file://")
    return "" if "://" in path else path


def main(body: bytes) -> None:
    """Run the stock TensorBoard; its own process ends with it."""
    spec = msgspec.msgpack.decode(body, type=TensorBoardSpec)
    run(spec.arguments)


def run(arguments: Sequence[str]) -> None:
    """Call TensorBoard's entry point without TensorFlow.

    TensorBoard imports TensorFlow if it can: seconds of start and half a GB for nothing, because
    its own reader serves local event files. This module's presence is its documented switch.
    """
    sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")
    sys.argv = ["tensorboard", *arguments]
    from tensorboard.main import run_main

    run_main()
