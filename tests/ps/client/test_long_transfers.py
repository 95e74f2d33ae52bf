"""Values that take longer to come than other answers: the call's own seconds hold, both ways."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ps.errors import RequestTimeout
from ps.protocol import messages
from ps.server import handlers
from ps.server.handlers import Service
from ps.server.shard import ServingShard
from tests.support.ps_cluster import WAIT_S, cluster, filled, make_manifest

pytestmark = pytest.mark.socket

MANIFEST = make_manifest()
OWN_S = 0.4
"""Of all calls of the client; a transfer takes twice as long."""


def transfer() -> None:
    threading.Event().wait(2 * OWN_S)


def test_a_seed_takes_the_time_that_its_call_says(monkeypatch: pytest.MonkeyPatch):
    seed = Service._seed

    def slow(self: Service, call: Any, request: messages.Seed) -> None:
        transfer()
        seed(self, call, request)

    monkeypatch.setattr(Service, "_seed", slow)
    values = filled(MANIFEST, 3.0)
    with cluster() as bed:
        client = bed.client()
        client.timeout_s = OWN_S
        assert client.seed(MANIFEST, values, timeout_s=WAIT_S) == 0
        client.timeout_s = WAIT_S
        assert set(bed.pulled(client)["trainable"]) == {3.0}
    with cluster() as bed:
        client = bed.client()
        client.timeout_s = OWN_S
        with pytest.raises(RequestTimeout):
            client.seed(MANIFEST, values)


def test_a_pull_takes_the_time_that_its_call_says(monkeypatch: pytest.MonkeyPatch):
    def slow(shard: ServingShard, call: Any, request: messages.Pull) -> None:
        transfer()
        ServingShard.pull(shard, call, request)

    monkeypatch.setitem(handlers._OF_SHARD, messages.Pull, slow)
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST, 3.0))
        client.timeout_s = OWN_S
        into = filled(MANIFEST, np.nan)
        client.pull(into, timeout_s=WAIT_S)
        assert set(into["trainable"]) == {3.0}
        with pytest.raises(RequestTimeout):
            client.pull(into)
