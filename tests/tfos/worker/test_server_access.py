"""What a worker says at its end of servers and saves that its program has left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tests.support.nodes import node_settings
from tfos.config import Checkpoints
from tfos.control.messages import RosterEntry
from tfos.failure import NodeId
from tfos.files.checkpoint_storage import Storages
from tfos.node.spec import NO_KEYS, ChildSpec, Executor, NodeBundle
from tfos.topology import PlannedNode
from tfos.worker.server_access import ServerAccess

CREDENTIALS = Credentials("c", b"S" * 32)


def without_servers(rank: int, **options: Any) -> ServerAccess:
    settings = node_settings(num_workers=2, num_ps=0, **options)
    node = PlannedNode("worker", rank, rank, is_chief=rank == 0)
    spec = ChildSpec(
        attempt=0,
        bundle=NodeBundle(node=node, control_keys=NO_KEYS, rpc_secret=b"S" * 32, settings=settings),
        executor=Executor("7", "127.0.0.1", 0, 1, "/work", "", "/tmp", ""),
        link_fd=-1,
        socket_dir="/sockets",
        log_dir="",
    )
    endpoint = Endpoint("h", 1)
    roster = [RosterEntry(NodeId("worker", each), each, "h", "1", endpoint) for each in range(2)]
    unused: Any = None
    return ServerAccess(
        spec,
        roster,
        identity=Identity(Role.WORKER, rank),
        credentials=CREDENTIALS,
        storages=Storages(),
        rank_group=unused,
        on_own_shard=unused,
    )


@pytest.mark.parametrize(
    ("rank", "options", "is_told"),
    [
        (0, {"checkpoints": Checkpoints(directory="/runs/7")}, True),
        (1, {"checkpoints": Checkpoints(directory="/runs/7")}, False),
        (0, {}, False),
    ],
)
def test_checkpoints_of_a_program_without_anything_to_save_are_a_warning(
    rank: int, options: dict[str, Any], is_told: bool, caplog
):
    with caplog.at_level(logging.WARNING):
        without_servers(rank, **options).finish()
    text = "nothing was saved in /runs/7 or restored from there: with num_ps=0"
    assert (text in caplog.text) is is_told
