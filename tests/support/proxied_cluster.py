"""A small cluster behind proxies that cut connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Manifest
from tests.support.channel_proxy import FaultProxy
from tests.support.ps_cluster import WAIT_S, Cluster, cluster, filled


class ProxiedCluster:
    """One TCP server behind a cutting proxy; `direct` clients go around it."""

    def __init__(self, bed: Cluster) -> None:
        self.bed = bed
        self.proxies = [FaultProxy(endpoint) for endpoint in bed.endpoints]
        self.proxy = self.proxies[0]

    def client(self, rank: int = 0, **settings: Any) -> PSClient:
        endpoints = [proxy.endpoint for proxy in self.proxies]
        return self.bed.client(rank, endpoints=endpoints, **settings)

    def workers(self, manifest: Manifest, **settings: Any) -> list[PSClient]:
        """Attached clients with open connections through the proxy."""
        self.bed.client().seed(manifest, filled(manifest))
        clients = [self.client(rank, **settings) for rank in range(self.bed.num_workers)]
        for client in clients:
            client.attach(timeout_s=WAIT_S)
        return clients


@pytest.fixture
def proxied() -> Iterator[Callable[..., ProxiedCluster]]:
    made: list[tuple[Any, ProxiedCluster]] = []

    def make(**settings: Any) -> ProxiedCluster:
        manager = cluster("tcp", **settings)
        made.append((manager, ProxiedCluster(manager.__enter__())))
        return made[-1][1]

    yield make
    for manager, parts in made:
        for client in parts.bed.clients:
            client.close()
        for proxy in parts.proxies:
            proxy.close()
        manager.__exit__(None, None, None)
