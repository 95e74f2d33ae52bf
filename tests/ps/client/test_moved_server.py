"""A server stands still and is replaced at another place while calls to it are under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint
from rpc.server.listener import Listener
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    make_manifest,
    run_all,
    succeeded,
)

pytestmark = [pytest.mark.socket, pytest.mark.fault("F11")]

MANIFEST = make_manifest(rule=ADD)
HYPER = Hyper(1.0)
SOON_S = 20.0
"""Far below the timeout of the calls."""


class Frozen:
    """A server in the place of ps:0 that takes requests and answers none."""

    def __init__(self, bed: Cluster) -> None:
        self.asked, self._ends = threading.Event(), threading.Event()
        self._listener = Listener(self._handle, bed.credentials, Identity(Role.SERVER, 0, 0))
        self._listener.bind_tcp("127.0.0.1")
        self._listener.start()

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    def _handle(self, call: Any) -> None:
        self.asked.set()
        self._ends.wait(2 * SOON_S)

    def close(self) -> None:
        self._ends.set()
        self._listener.close(5.0)


@contextmanager
def frozen_server(num_servers: int) -> Iterator[tuple[Cluster, Frozen]]:
    with ExitStack() as stack:
        bed = stack.enter_context(cluster("tcp", num_servers=num_servers))
        bed.workers(MANIFEST, filled(MANIFEST))
        frozen = Frozen(bed)
        stack.callback(frozen.close)
        yield bed, frozen


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_push_that_waits_at_a_frozen_server_goes_to_its_replacement(num_servers: int):
    with frozen_server(num_servers) as (bed, frozen):
        client = bed.client(endpoints=[frozen.endpoint, *bed.endpoints[1:]])
        client._adopt(MANIFEST)

        def move() -> None:
            assert frozen.asked.wait(SOON_S)
            client.server_moved(0, bed.endpoints[0])

        def push() -> None:
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)

        succeeded(run_all(push, move, timeout_s=SOON_S))
        push()
        assert set(bed.pulled(client)["trainable"]) == {2.0}


def test_an_idle_connection_to_a_server_that_was_replaced_is_not_used_again():
    with frozen_server(1) as (bed, frozen):
        client = bed.client(endpoints=[frozen.endpoint])
        client._adopt(MANIFEST)
        (link,) = client._servers.links
        link.open_connection(SOON_S)
        client.server_moved(0, bed.endpoints[0])
        push = partial(client.push, filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        succeeded(run_all(push, timeout_s=SOON_S))
        assert not frozen.asked.is_set()
