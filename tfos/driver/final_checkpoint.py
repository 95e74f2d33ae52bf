"""Final checkpoint of an interrupted cluster: the servers save what they hold, then stop.

Covers: asking the servers, the bound on time, saying what became of it.
Does not: carry a tensor through the driver (each server writes its own file), decide when
(tfos.driver.shutdown), know the files (ps.checkpoint.writer).
Runs in: the driver, which must see the directory as the servers do.
Threads: `save` is called on the thread that ends the cluster; `tfos-last-save` does the work, so
that a file system that hangs cannot hold up the end.
"""

from __future__ import annotations

import threading
import time

from ps.checkpoint.choice import steps_on_disk
from ps.checkpoint.format import step_of
from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.errors import PSError, RequestTimeout
from ps.protocol.permissions import ServerPhase
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.errors import RpcError
from tfos.console.console import Console
from tfos.control.coordinator import Coordinator
from tfos.files.checkpoint_storage import Storages

_DESCRIBE_SHARE = 0.3
"""Part of the time in which the servers say what they hold; the rest is for writing it."""
_MORE_TIME = "A larger abort_s in ClusterConfig gives the save more time"
_OPTIONS = SaveOptions(nobody_trains=True)


class FinalCheckpoint:
    """Saves the parameters of one cluster, at most once.

    Args:
        directory: directory or URL that the servers and the driver see under this path.
        coordinator: knows where the servers are.
        credentials: the data plane's credentials.
        console: shows where the checkpoint is, or why there is none.
    """

    def __init__(
        self, directory: str, coordinator: Coordinator, credentials: Credentials, console: Console
    ) -> None:
        self._directory = directory
        self._storages = Storages()
        self._coordinator = coordinator
        self._credentials = credentials
        self._console = console

    def save(self, timeout_s: float) -> None:
        """Save if every server still serves; a failed save is a warning. Raises nothing."""
        worker = threading.Thread(
            target=self._run, args=(timeout_s,), name="tfos-last-save", daemon=True
        )
        try:
            worker.start()
        except RuntimeError:  # Python 3.12 starts none while the interpreter exits
            self._run(timeout_s)
            return
        worker.join(timeout_s)
        if worker.is_alive():
            reason = "it is still in progress, and goes on while the servers stop"
            self._warn(f" within {timeout_s:.1f} s: {reason}. {_MORE_TIME}")

    def _run(self, timeout_s: float) -> None:
        started_s = time.monotonic()
        try:
            found = self._try(started_s + timeout_s)
        except RequestTimeout as error:
            self._warn(f" within {timeout_s:.1f} s: {error}. {_MORE_TIME}")
        except (PSError, RpcError, OSError, RuntimeError) as error:  # or a thread that is refused
            self._warn(f": {error}")
        else:
            self._console.line(f"{found} ({time.monotonic() - started_s:.1f} s)")

    def _warn(self, why: str) -> None:
        self._console.warn(f"the parameters were not saved to {self._directory}{why}")

    def _try(self, deadline_s: float) -> str:
        servers = self._coordinator.read(lambda state: list(state.servers))
        workers = self._coordinator.read(lambda state: len(state.workers))
        endpoints = [each.endpoint for each in servers if each.endpoint is not None]
        gone = [each.name for each in servers if not each.is_live or each.endpoint is None]
        if gone:
            raise PSError(f"{', '.join(gone)} is gone")
        describe_s = _DESCRIBE_SHARE * (deadline_s - time.monotonic())
        with PSClient(
            endpoints,
            self._credentials,
            Identity(Role.DRIVER, 0, 0),
            num_workers=workers,
            timeout_s=describe_s,
            reconnect_s=describe_s / 2,  # so a server that is gone is named as such
            restore_s=0.0,  # nobody is left who needs it
            open_storage=self._storages,
        ) as client:
            described = client.describe()
            if any(server.phase == ServerPhase.EMPTY.value for server in described):
                return f"nothing to save to {self._directory}: no parameters were made yet"
            client.attach()
            clock = max(server.clock for server in described)
            before = steps_on_disk(self._storages(self._directory))
            left_s = max(0.1, deadline_s - time.monotonic())
            path = client.save(self._directory, None, timeout_s=left_s, options=_OPTIONS)
        if step_of(path.rpartition("/")[2]) in before:
            return f"the parameters after {clock} updates are in {path} already"
        return f"saved the parameters after {clock} updates to {path}"
