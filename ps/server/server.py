"""A parameter server: one listener, one shard. `python -m ps.server --help` starts one by hand.

Covers: the object a process (or a test) starts and closes.
Does not: answer requests (ps.server.handlers), the command line (ps.cli.serve).
Runs in: PS processes; never imports tensorflow or pyspark.
Threads: any; requests run on the listener's threads. `ps-restore` fills the shard from a checkpoint
where its caller has to notice a stop meanwhile (`restore_beside`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from ps.checkpoint.choice import AS_SAVED, RestoreOptions, check_restorable, find, restore_newest
from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.format import Checkpoint
from ps.checkpoint.reader import ChainFiles, load_chain
from ps.checkpoint.storage import OpenStorage, Storage, storage_at
from ps.config import ServerSettings
from ps.errors import ServerPhaseError
from ps.manifest.manifest import WorkerRank
from ps.protocol.messages import MAX_META_BYTES
from ps.protocol.permissions import ServerPhase
from ps.server.handlers import Service
from ps.server.save_restore import Restored
from ps.stats.server_stats import ServerStats
from ps.successor_watch import SuccessorWatch
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.descriptors import make_room
from rpc.endpoint import Endpoint
from rpc.limits import DEFAULT_LIMITS, Limits
from rpc.server.listener import Listener

__all__ = ["PSServer", "ServerPhase", "ServerSettings", "ServerStats"]

Result = TypeVar("Result")

_REPLACED_CLOSE_S = 1.0
_STOP_LOOK_S = 0.1
"""How often a server that restores looks for the order to stop."""
_OTHER_CONNECTIONS = 8
"""The chief's saves and TensorBoard's scalars, the driver, supervisors, `ps stats`."""


class PSServer:
    """Serves one shard until it is closed.

    Args:
        settings: its place in the cluster.
        credentials: the cluster's secret.
        generation: grows when this server is replaced.
        guard: detects a newer process of this rank; has this one's generation.
        open_storage: opens a checkpoint directory as clients name it.

    Attributes:
        skipped_step: the newest step, if `start_restoring` took an older one because this server's
            part of it was damaged; -1: it took the newest.

    Raises:
        SettingsError: this process may not open as many files as workers need connections.
    """

    def __init__(
        self,
        settings: ServerSettings,
        credentials: Credentials,
        *,
        generation: int = 0,
        guard: GenerationFence | None = None,
        open_storage: OpenStorage = storage_at,
    ) -> None:
        self.settings = settings
        self.skipped_step = -1
        self._watch = None if guard is None else SuccessorWatch(guard)
        self._open_storage = open_storage
        if guard is not None:
            generation = guard.number
        identity = Identity(Role.SERVER, settings.rank, generation)
        self._service = Service(
            settings,
            open_connections=lambda: self._listener.stats().open_connections,
            refuse_if_replaced=None if guard is None else self._refuse_if_replaced,
            make_room=self._make_room,
            open_storage=open_storage,
            job=credentials.cluster_id,
        )
        self._make_room(per_worker=1)
        with_lookups = 2 * settings.num_workers + _OTHER_CONNECTIONS
        self._listener = Listener(
            self._service.handle,
            credentials,
            identity,
            limits=Limits(
                max_meta_bytes=MAX_META_BYTES,
                max_connections=max(DEFAULT_LIMITS.max_connections, with_lookups),
            ),
        )

    def __enter__(self) -> PSServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"ps:{self.settings.rank}"

    def bind_tcp(self, host: str, port: int = 0) -> None:
        """Listen on TCP.

        Args:
            host: address to bind.
            port: 0 takes any free one.
        """
        self._listener.bind_tcp(host, port)

    def bind_unix(self, directory: str | None = None) -> None:
        """Listen on a Unix socket as well, for clients on the same host."""
        self._listener.bind_unix(directory)

    def adopt(self, tcp: socket.socket, unix: socket.socket) -> None:
        """Listen on sockets that a supervisor holds, so that clients find a restarted server.

        Args:
            tcp: a bound TCP socket.
            unix: a bound Unix socket.
        """
        self._listener.adopt(tcp, unix)

    def bind_inproc(self, name: str) -> None:
        """Listen in this process only, for tests."""
        self._listener.bind_inproc(name)

    def start(self) -> None:
        """Let clients in. The shard is EMPTY until the chief seeds it.

        Raises:
            CheckpointError: another process took this server's place meanwhile.
        """
        if self._watch is not None:
            self._watch.fence.claim(self.endpoint)
            self._watch.fence.wait_for_older()
            self._watch.start()
        self._listener.start()

    def start_restoring(
        self,
        directory: str | Path,
        *,
        step: int | None = None,
        like: RestoreOptions = AS_SAVED,
        listening: Callable[[], None] = lambda: None,
    ) -> int:
        """Let clients in, and fill the shard from a checkpoint while they wait.

        To read and check its files, and to compile where no kernels are kept, takes longer than
        clients try to reach a server. A server that may take an older one's place reads the
        manifests before that. Any other listens first: a file system may be away for minutes.

        Args:
            directory: a path or URL that `open_storage` opens.
            step: None: the newest that is whole.
            like: for which parameters and rules; by default those that were saved.
            listening: called once clients are let in, before the shard is filled.

        Returns:
            The step: the one asked for, or the newest that is whole.

        Raises:
            CheckpointError: there is none, or it is damaged or of another model; what is found
                before clients are let in leaves the server in whose place this one was started. Or
                another process took this server's place meanwhile.
        """
        storage = self._open_storage(directory)
        newest = check_restorable(storage, step, like) if self._watch is not None else None
        self._service.life.begin_restore()
        self.start()
        listening()
        try:
            if newest is None:
                newest = check_restorable(storage, step, like)
            taken = self._fill(storage, step, like)
        except BaseException:
            # Silently, like a killed process: clients that wait may find another server.
            self._listener.close(_REPLACED_CLOSE_S)
            raise
        self.skipped_step = newest if taken < newest else -1
        return taken

    def restore_beside(
        self, restore: Callable[[], Result], is_over: Callable[[], bool] = lambda: False
    ) -> Result | None:
        """Restore on another thread, and return the result, or None once this process is to end.

        Args:
            restore: function that calls `start_restoring`. After a stop it goes on, unwaited for.
            is_over: whether this process is told to end, by other means than a stop request.

        Returns:
            What `restore` returned; None: the server is to stop, or the process to end.

        Raises:
            BaseException: what `restore` raises.
        """
        end: Future[Result] = Future()

        def run() -> None:
            try:
                end.set_result(restore())
            except BaseException as error:  # noqa: BLE001 - raised on the thread that waits
                end.set_exception(error)

        threading.Thread(target=run, name="ps-restore", daemon=True).start()
        while True:
            is_ended = wait([end], _STOP_LOOK_S).done
            if is_over() or self.wait_stopped(0.0):
                return None  # also if the stop has made the restore fail
            if is_ended:
                return end.result()

    def _fill(self, storage: Storage, step: int | None, like: RestoreOptions) -> int:
        def read(steps: Sequence[Checkpoint]) -> Restored:
            chain = ChainFiles(storage, steps, self.settings)
            # A supervisor names the job of its run, whoever starts a server by hand none.
            return self._service.read(chain, like, resumes=like.job != chain.newest.job)

        if step is None:
            restored = restore_newest(storage, like, read)
        else:
            checkpoint, _ = find(storage, step, like)
            restored = read(load_chain(storage, checkpoint.step))
        self._service.serve(restored)
        return restored.checkpoint.step

    @property
    def endpoint(self) -> Endpoint:
        """Where clients find this server; after the binds."""
        return self._listener.endpoint

    @property
    def phase(self) -> ServerPhase:
        """Where the shard is in its life."""
        return self._service.life.phase

    def stats(self) -> ServerStats:
        """The counters as they are now."""
        return self._service.stats()

    def worker_lost(self, worker: int, generation: int | None = None) -> None:
        """Stop waiting for a worker that has died, and fence it.

        Args:
            worker: its rank, from 0.
            generation: which start of it; None: the newest known.
        """
        self._service.worker_lost(WorkerRank(worker), generation)

    def worker_done(self, worker: int) -> None:
        """Wait for the worker no more, as if it had called finish()."""
        self._service.worker_done(WorkerRank(worker))

    def wait_stopped(self, timeout_s: float) -> bool:
        """Wait until somebody entitled has asked this server to stop."""
        return self._service.life.stopping.wait(timeout_s)

    def look_for_successor(self) -> str:
        """Return who has taken this server's place; empty: nobody, as far as can be seen."""
        if self._watch is None:
            return ""
        newer = self._watch.successor()
        return self._watch.fence.replaced_text(newer) if newer else ""

    def _make_room(self, *, per_worker: int) -> None:
        """Raise the limit of open files as far as allowed; refuse what cannot fit.

        Args:
            per_worker: connections: one for pushes and pulls, another for the lookups ahead of a
                model with tables.

        Raises:
            SettingsError: the hard limit has no room for them.
        """
        num_workers = self.settings.num_workers
        lookups = ", one for pushes and one for rows of tables" if per_worker > 1 else ""
        make_room(
            0,
            at_least=per_worker * num_workers + _OTHER_CONNECTIONS,
            server=f"ps:{self.settings.rank} of {num_workers} workers{lookups}",
        )

    def _refuse_if_replaced(self) -> None:
        """Close all connections once replaced: clients reconnect to the new server."""
        replaced = self.look_for_successor()
        if replaced:
            self._service.stop(replaced)
            self._listener.close(_REPLACED_CLOSE_S)
            raise ServerPhaseError(replaced)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all waits, close the connections and the ports. Idempotent."""
        self._service.stop("closed")
        self._listener.close(timeout_s)
        self._service.life.close()
        if self._watch is not None:  # after the last request, which may wait for a look
            self._watch.close()
