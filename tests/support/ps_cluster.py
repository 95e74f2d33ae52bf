"""A small parameter-server cluster in this process, over memory or TCP, and workers as threads."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ps.checkpoint.choice import RestoreOptions
from ps.checkpoint.storage import OpenStorage, storage_at
from ps.client.client import PSClient
from ps.client.metadata import RunNotes
from ps.client.server_group import ChangingRequest
from ps.consistency.policy import OnLost
from ps.manifest.manifest import (
    SGD,
    Add,
    Average,
    DType,
    Frozen,
    GroupSpec,
    Manifest,
    ParamSpec,
    RuleConfig,
)
from ps.protocol import messages
from ps.protocol.messages import Ack, Number
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connection import Buffer, connect
from rpc.endpoint import Endpoint
from rpc.process_stat import resident_bytes
from tests.support.rpc import over_tls

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

WAIT_S = 60.0
"""Of every wait that is to end well, and of clients; the first of a run compile kernels, too."""
_names = itertools.count()


def make_manifest(
    size: int = 1000,
    *,
    rule: RuleConfig | None = None,
    consistency: Any = "async",
    reduction: Any = "mean",
    staleness_bound: int = 0,
    staleness_aware: bool = False,
    statistics: int = 0,
    bucket_bytes: int = 512,
) -> Manifest:
    """Two parameters of one trainable group, and a statistics group if wanted."""
    cut = size // 3
    params = (ParamSpec("dense/kernel", (cut,)), ParamSpec("dense/bias", (size - cut,)))
    groups = [GroupSpec("trainable", "float32", rule or SGD(), params)]
    if statistics:
        moving = (ParamSpec("norm/mean", (statistics,)),)
        groups.append(GroupSpec("statistics", "float32", Average(), moving))
    return Manifest(
        groups=tuple(groups),
        consistency=consistency,
        reduction=reduction,
        staleness_bound=staleness_bound,
        staleness_aware=staleness_aware,
        bucket_bytes=bucket_bytes,
    )


def filled(manifest: Manifest, value: float = 0.0) -> Arrays:
    """Flat arrays of what a push and a pull move."""
    return {
        group.name: np.full(group.num_elements, value, group.dtype)
        for group in manifest.pushed_groups
    }


def random_arrays(manifest: Manifest, seed: int) -> Arrays:
    """Flat arrays of normal numbers, the same for the same seed."""
    random = np.random.default_rng(seed)
    return {
        group.name: random.standard_normal(group.num_elements).astype(group.dtype)
        for group in manifest.pushed_groups
    }


def with_frozen(manifest: Manifest, size: int = 100, dtype: DType = "float32") -> Manifest:
    """The manifest with a group of two frozen weights in addition."""
    params = (ParamSpec("backbone/kernel", (size // 2, 2)), ParamSpec("backbone/bias", (3,)))
    group = GroupSpec("frozen", dtype, Frozen(), params)
    return msgspec.structs.replace(manifest, groups=(*manifest.groups, group))


def frozen_arrays(manifest: Manifest, seed: int) -> Arrays:
    """Flat arrays of the frozen groups, of normal numbers."""
    random = np.random.default_rng(seed)
    return {
        group.name: random.standard_normal(group.num_elements).astype(group.dtype)
        for group in manifest.frozen_groups
    }


class Cluster:
    """Servers that are started, and clients that are closed with them."""

    def __init__(
        self,
        transport: str,
        *,
        num_servers: int = 1,
        num_workers: int = 1,
        on_lost: OnLost = "fail",
        integrity: Literal["header", "payload"] = "header",
        open_storage: OpenStorage = storage_at,
        job: str = "",
    ) -> None:
        self.credentials = Credentials(job or f"test-{next(_names)}", b"s" * 32, integrity)
        if transport == "tls":
            self.credentials = over_tls(self.credentials)
        self.num_workers = num_workers
        self.open_storage = open_storage
        self.servers: list[PSServer] = []
        self.clients: list[PSClient] = []
        for rank in range(num_servers):
            settings = ServerSettings(
                rank=rank, num_servers=num_servers, num_workers=num_workers, on_lost=on_lost
            )
            server = PSServer(settings, self.credentials, open_storage=open_storage)
            if transport in ("tcp", "tls"):
                server.bind_tcp("127.0.0.1")
            elif transport == "shm":
                server.bind_unix()
            else:
                server.bind_inproc(f"{self.credentials.cluster_id}-{rank}")
            server.start()
            self.servers.append(server)

    def restart(
        self, rank: int, directory: Path, *, by_hand: bool = False, generation: int = 0
    ) -> PSServer:
        """End a server without a word and start one in its place, as a supervisor does."""
        old = self.servers[rank]
        host, port = old.endpoint.host, old.endpoint.port
        old._listener.close(0.0)  # first: a killed server refuses nobody in words
        old.close(0.5)
        server = PSServer(
            old.settings, self.credentials, generation=generation, open_storage=self.open_storage
        )
        self.servers[rank] = server
        if port:
            server.bind_tcp(host, port)
        else:
            server.bind_inproc(f"{self.credentials.cluster_id}-{rank}")
        job = None if by_hand else self.credentials.cluster_id
        server.start_restoring(directory, like=RestoreOptions(job=job))
        return server

    @property
    def endpoints(self) -> list[Endpoint]:
        return [server.endpoint for server in self.servers]

    def client(
        self,
        rank: int = 0,
        generation: int = 0,
        *,
        role: Role = Role.WORKER,
        endpoints: Sequence[Endpoint] | None = None,
        timeout_s: float = WAIT_S,
        reconnect_s: float = 2.0,
        run_notes: RunNotes | None = None,
    ) -> PSClient:
        client = PSClient(
            self.endpoints if endpoints is None else endpoints,
            self.credentials,
            Identity(role, rank, generation),
            num_workers=self.num_workers,
            timeout_s=timeout_s,
            reconnect_s=reconnect_s,
            open_storage=self.open_storage,
            run_notes=run_notes,
        )
        self.clients.append(client)
        return client

    def driver(self) -> PSClient:
        return self.client(role=Role.DRIVER)

    def workers(self, manifest: Manifest, values: Mapping[str, Array]) -> list[PSClient]:
        """One client per worker, all attached to freshly seeded servers."""
        clients = [self.client(rank) for rank in range(self.num_workers)]
        clients[0].seed(manifest, values)
        for client in clients[1:]:
            client.attach()
        return clients

    def pulled(self, client: PSClient) -> Arrays:
        into = filled(client.manifest, np.nan)
        client.pull(into)
        return into

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def cluster(transport: str = "inproc", **settings: Any) -> Iterator[Cluster]:
    made = Cluster(transport, **settings)
    try:
        yield made
    finally:
        made.close()


def run_all(*works: Callable[[], Any], timeout_s: float = WAIT_S) -> list[Any]:
    """Run each in its own thread; returns results, or the exceptions in their places."""
    results: list[Any] = [None] * len(works)

    def run(index: int, work: Callable[[], Any]) -> None:
        try:
            results[index] = work()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index, work), daemon=True)
        for index, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"still running after {timeout_s} s"
    return results


def succeeded(results: Sequence[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


def is_second_round(request: ChangingRequest | Sequence[ChangingRequest]) -> bool:
    """Whether ServerGroup.change is to settle what a clipped push has brought."""
    return not callable(request) and isinstance(request[0](Number(1, 1)), messages.Settle)


def raw_call(
    bed: Cluster,
    server: int,
    request: messages.Request,
    payload: Sequence[Buffer] = (),
    *,
    rank: int = 0,
    generation: int = 0,
    role: Role = Role.WORKER,
) -> Ack:
    """One request to one server without PSClient's care; raises what rpc raises."""
    identity = Identity(role, rank, generation)
    with connect(bed.servers[server].endpoint, identity, bed.credentials) as connection:
        reply = connection.call(messages.encode(request), payload, timeout_s=WAIT_S)
        return messages.decode_reply(reply.meta, Ack)


def raw_seed(
    bed: Cluster,
    server: int,
    manifest: Manifest,
    value: float,
    *,
    seed_id: int,
    replaces: int = 0,
    generation: int = 0,
) -> None:
    """One server's part of a seed, all of one float32 value, as one attempt of the chief sends it.

    Args:
        bed: the servers.
        server: rank of the one that is asked.
        manifest: of float32 groups, none of them frozen.
        value: of each parameter.
        seed_id: see messages.Seed.
        replaces: see messages.Seed.
        generation: of the chief.
    """
    encoded = manifest.encode()
    request = messages.Seed(manifest.hash(), len(encoded), seed_id, replaces)
    num_bytes = bed.servers[server]._service._value_nbytes(manifest)
    payload: list[Buffer] = [encoded, np.full(num_bytes // 4, value, np.float32)]
    raw_call(bed, server, request, payload, generation=generation)


ADD = Add()


def resident_growth(action: Callable[[], None]) -> int:
    """Bytes by which the resident memory of this process grows while `action` runs."""
    before = resident_bytes(os.getpid())
    action()
    return resident_bytes(os.getpid()) - before
