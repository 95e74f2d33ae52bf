"""How a worker reaches the servers, also while one of them moves."""

from __future__ import annotations

import pytest

from rpc.endpoint import Endpoint
from tests.tfos.worker.test_context import entry, make_context

NEW_PLACE = Endpoint("h", 99)


class ClientStandIn:
    """Notes where the servers are; while it is made, one of them moves."""

    def __init__(self, endpoints, *_args, **_settings) -> None:
        self.endpoints = list(endpoints)
        self.during()

    def server_moved(self, rank: int, endpoint: Endpoint) -> None:
        self.endpoints[rank] = endpoint

    def during(self) -> None:
        """What happens meanwhile."""


@pytest.mark.parametrize("made", ["client", "new_client"])
def test_a_client_that_is_made_while_a_server_moves_reaches_its_new_place(monkeypatch, made):
    servers = make_context([entry("ps", 0, 10), entry("ps", 1, 11)], num_ps=2)._servers
    monkeypatch.setattr("ps.client.client.PSClient", ClientStandIn)
    monkeypatch.setattr(ClientStandIn, "during", lambda _: servers.moved(1, NEW_PLACE))
    client = getattr(servers, made)()
    assert client.endpoints == [Endpoint("h", 10), NEW_PLACE]
    servers.moved(0, NEW_PLACE)
    assert client.endpoints == [NEW_PLACE, NEW_PLACE]
