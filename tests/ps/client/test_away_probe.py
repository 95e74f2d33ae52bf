"""The look after servers while a worker is away: over TCP, without holding up its other calls."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest

from ps.client import client as client_module
from ps.client.server_group import AwayProbe
from ps.manifest.manifest import Hyper
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.socket, pytest.mark.fault("F08")]

MANIFEST = make_manifest(60, rule=ADD, consistency="sync", reduction="sum")


def test_a_server_that_is_started_again_hears_that_a_worker_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client_module, "PROBE_PERIOD_S", 0.05)
    with cluster("tcp", num_servers=2, num_workers=2) as bed:
        clients = bed.workers(MANIFEST, filled(MANIFEST))
        clients[0].save(tmp_path, 0)
        clients[0].leave()
        for rank in (0, 1):
            bed.restart(rank, tmp_path)
            clients[1].push(filled(MANIFEST, 1.0), hyper=Hyper(1.0), rows=1)
        assert [server.stats().clock for server in bed.servers] == [2, 2]


def test_a_call_waits_for_the_look_at_one_server_at_most():
    noted: list[object] = []
    has_looked = threading.Event()

    class Lock:
        def __enter__(self) -> None:
            noted.append("taken")

        def __exit__(self, *_: object) -> None:
            noted.append("free")
            if len(noted) >= 12:
                has_looked.set()

    class Servers:
        links = (0, 1)

        def probe_restarts(self, *, timeout_s: float) -> None:
            for rank in self.links:
                self.probe_restart(rank, timeout_s=timeout_s)

        def probe_restart(self, rank: int, *, timeout_s: float) -> None:
            noted.append(rank)

    probe = AwayProbe(Servers(), Lock(), 0.02)  # type: ignore[arg-type]
    probe.start()
    assert has_looked.wait(WAIT_S)
    probe.close()
    assert noted[:12] == ["taken", 0, "free", "taken", 1, "free"] * 2


def test_a_client_that_nobody_has_any_more_is_looked_after_no_longer(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(client_module, "PROBE_PERIOD_S", 0.05)
    with cluster(num_workers=2) as bed:
        client = bed.workers(MANIFEST, filled(MANIFEST))[0]
        client.leave()
        thread = client._away_probe._thread
        assert thread is not None
        servers = weakref.ref(client._servers)
        bed.clients.remove(client)
        del client

        def is_gone() -> bool:
            gc.collect()
            return servers() is None and not thread.is_alive()

        wait_until(is_gone, "the end of the abandoned client")
