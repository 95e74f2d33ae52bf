"""Scans and a server that is started again: its rows have other numbers than before."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ps.checkpoint import snapshot
from ps.client.tables import TableClient
from ps.errors import ServerPhaseError
from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import Scanned
from ps.server import table_handlers
from ps.tables.ids import as_bits
from rpc.client.call_io import Reply
from tests.support.ps_cluster import Cluster, cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
IDS = np.arange(40)


def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves write, and scans read, windows of few of the rows."""
    monkeypatch.setattr(snapshot, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(table_handlers, "SCAN_BYTES", 4 * 24)


def saved(bed: Cluster, root: Path, segments: int) -> Any:
    """A client of servers with IDS, which are saved."""
    manifest = with_tables(table("user", segments=segments))
    (client,) = bed.workers(manifest, filled(manifest))
    client.tables.push({"user": (IDS, ones(IDS))}, hyper=HYPER)
    client.save(root, 1)
    return client


@pytest.mark.fault("F30")
@pytest.mark.parametrize("segments", [1, 4])
def test_a_scan_over_a_restart_of_its_server_ends_with_both_starts(
    monkeypatch, tmp_path: Path, segments: int
):
    """Windows that a save writes from the last down come back from the first up."""
    few_at_once(monkeypatch)
    with cluster(num_servers=2) as bed:
        client = saved(bed, tmp_path, segments)
        before = client.stats()[1].start
        scan = client.tables.scan("user", servers=[1])
        next(scan)
        bed.restart(1, tmp_path)
        with pytest.raises(
            ServerPhaseError, match=r"ps:1 was started again .*scan again"
        ) as caught:
            list(scan)
        after = client.stats()[1].start
        assert f"start {before}, now {after}" in str(caught.value)
        assert caught.value.details == {"server": "1", "table": "user"}
        again = np.concatenate([ids for ids, _ in client.tables.scan("user")])
        assert sorted(again) == IDS.tolist()


def test_a_restart_of_a_server_whose_rows_came_all_before_ends_no_scan(monkeypatch, tmp_path: Path):
    few_at_once(monkeypatch)
    with cluster(num_servers=2) as bed:
        client = saved(bed, tmp_path, 1)
        own = sum(ids.size for ids, _ in client.tables.scan("user", servers=[0]))
        scan = client.tables.scan("user")
        found = [next(scan)[0]]
        while sum(ids.size for ids in found) <= own:  # the first of ps:1
            found.append(next(scan)[0])
        bed.restart(0, tmp_path)
        found += [ids for ids, _ in scan]
        assert sorted(np.concatenate(found)) == IDS.tolist()


class StartedAgain:
    """One server's link whose answers come from given starts, one row each."""

    def __init__(self, starts: list[int]) -> None:
        self.links = (SimpleNamespace(server=0),)
        self._starts = starts
        self.num_asked = 0

    def send(self, calls: list[Any]) -> list[Reply]:
        (call,) = calls
        assert isinstance(call.request, messages.Scan)
        start = self._starts[self.num_asked]
        self.num_asked += 1
        stop = len(self._starts) - self.num_asked
        payload = as_bits(table(), np.array([stop])).tobytes() + ones([stop]).tobytes()
        scanned = messages.encode(Scanned(1, stop, 1, start))
        return [Reply(scanned, memoryview(payload))]


def scanned_from(starts: list[int]) -> tuple[StartedAgain, Any]:
    servers = StartedAgain(starts)
    client = TableClient(servers, threading.RLock(), None)  # type: ignore[arg-type]  # fakes
    manifest = with_tables(table())
    client.adopt(manifest, manifest.hash())
    return servers, client.scan("user")


def test_the_answer_of_another_start_is_not_given_to_the_caller():
    servers, scan = scanned_from([7, 7, 9, 9])
    assert [next(scan)[0].tolist() for _ in range(2)] == [[3], [2]]
    with pytest.raises(ServerPhaseError, match="start 7, now 9"):
        next(scan)
    assert servers.num_asked == 3
    assert [ids.tolist() for ids, _ in scanned_from([0, 0])[1]] == [[1], [0]]
