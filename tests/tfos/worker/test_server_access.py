"""How a worker reaches the servers, also while one of them moves; what it says of none."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rpc.endpoint import Endpoint
from tests.support.waiting import wait_until
from tests.tfos.worker.test_context import WORKER_1, entry, make_context
from tfos.config import Checkpoints
from tfos.topology import PlannedNode

NEW_PLACE = Endpoint("h", 99)
CHIEF = PlannedNode("worker", 0, 0, is_chief=True)
SAVES = {"checkpoints": Checkpoints(directory="/runs/7")}


class ClientStandIn:
    """Notes where the servers are; while it is made, one of them moves."""

    def __init__(self, endpoints, *_args, **_settings) -> None:
        self.endpoints = list(endpoints)
        self.num_brought = 0
        self.during()

    def server_moved(self, rank: int, endpoint: Endpoint) -> None:
        self.endpoints[rank] = endpoint

    def bring_answers(self) -> None:
        self.num_brought += 1

    def during(self) -> None:
        """What happens meanwhile."""


@pytest.mark.parametrize("made", ["client", "new_client"])
def test_a_client_that_is_made_while_a_server_moves_reaches_its_new_place(monkeypatch, made):
    servers = make_context([entry("ps", 0, 10), entry("ps", 1, 11)], num_ps=2).servers
    monkeypatch.setattr("ps.client.client.PSClient", ClientStandIn)
    monkeypatch.setattr(ClientStandIn, "during", lambda _: servers.moved(1, NEW_PLACE))
    client = getattr(servers, made)()
    assert client.endpoints == [Endpoint("h", 10), NEW_PLACE]
    servers.moved(0, NEW_PLACE)
    assert client.endpoints == [NEW_PLACE, NEW_PLACE]


@pytest.mark.fault("F08")
def test_a_new_ps_0_gets_the_answers_of_a_worker_that_asks_it_for_nothing(monkeypatch):
    servers = make_context([entry("ps", 0, 10), entry("ps", 1, 11)], num_ps=2).servers
    monkeypatch.setattr("ps.client.client.PSClient", ClientStandIn)
    client = servers.client()
    servers.moved(1, NEW_PLACE)
    servers.moved(0, Endpoint("h", 10))  # also one that is started again where it was
    wait_until(lambda: client.num_brought == 1, "ps:0 has the answers")


@pytest.mark.parametrize(
    ("node", "settings", "is_told"),
    [(CHIEF, SAVES, True), (WORKER_1, SAVES, False), (CHIEF, {}, False)],
)
def test_checkpoints_of_a_program_without_anything_to_save_are_a_warning(
    node: PlannedNode, settings: dict[str, Any], is_told: bool, caplog
):
    with caplog.at_level(logging.WARNING):
        make_context(node=node, **settings).servers.finish()
    text = "has saved nothing in /runs/7 and restored nothing from there: with num_ps=0"
    assert (text in caplog.text) is is_told
