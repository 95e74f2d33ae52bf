"""One worker's shard of the parameters, in a cluster without servers of its own.

Covers: the parameter server inside this worker's process, the endpoints of the others', its end.
Does not: decide when to start it (tfos.worker.server_access), update parameters (ps.server).
Runs in: every worker's process, from the first `ctx.distribute(model, consistency="sync")` on.
Threads: the server's own; the rest is main_fun's.

Nothing exists before that call, so programs that never make it pay nothing. A shard ends with its
worker: the training cannot go on without it, and the driver says so.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ps.checkpoint.storage import OpenStorage
from ps.config import ServerSettings
from ps.server.server import PSServer
from rpc.auth.handshake import Credentials
from rpc.endpoint import Endpoint
from tfos.collectives.group import RankGroup

LAST_WORKER_S = 86_400.0
"""Seconds for the slowest worker's main_fun, which may need this shard until it ends. A lost worker
ends the wait."""
CLOSE_TIMEOUT_S = 1.0


class OwnShard:
    """The shard that this worker serves; every worker serves one.

    Args:
        group: all workers; each makes this call at the same point.
        credentials: credentials of the data plane.
        generation: number of this worker's attempt.
        open_storage: function that opens a checkpoint directory as clients name it.
    """

    def __init__(
        self,
        group: RankGroup,
        credentials: Credentials,
        *,
        generation: int,
        open_storage: OpenStorage,
    ) -> None:
        self._group = group
        settings = ServerSettings(rank=group.rank, num_servers=group.size, num_workers=group.size)
        self._server = PSServer(
            settings, credentials, generation=generation, open_storage=open_storage
        )

    def serve(self, host: str, socket_dir: str, *, timeout_s: float) -> list[Endpoint]:
        """Begin to serve, and return the endpoints of all workers' shards, in rank order.

        Args:
            host: address to bind.
            socket_dir: private directory for the Unix socket.
            timeout_s: seconds that the slowest worker may take.

        Raises:
            CollectiveTimeout: a worker does not make this call; `late` has its rank.
            CollectiveError: another worker was lost, or ended.
        """
        try:
            self._server.bind_tcp(host)
            self._server.bind_unix(socket_dir)
            self._server.start()
            own = np.frombuffer(msgspec.msgpack.encode(self._server.endpoint), np.uint8)
            found = self._group.allgather(own, timeout_s=timeout_s)
        except BaseException:
            self._close()
            raise
        return [msgspec.msgpack.decode(each.tobytes(), type=Endpoint) for each in found]

    def end(self) -> None:
        """Serve until every worker is here, then end.

        Raises:
            CollectiveError: another worker was lost or has failed.
        """
        try:
            self._group.barrier(timeout_s=LAST_WORKER_S)
        finally:
            self._close()

    def _close(self) -> None:
        self._server.close(CLOSE_TIMEOUT_S)
