"""Segments by a server's cores: the same requests, rows and checkpoints whatever their number."""

from __future__ import annotations

import numpy as np
import pytest

import ps.tables.table
from ps.errors import PSSettingsError
from ps.manifest.manifest import Hyper
from ps.manifest.table_spec import MOST_CHOSEN_SEGMENTS
from ps.tables.table import available_cores, segments_for
from tests.support.ps_cluster import ADD, cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]

IDS = np.arange(500)


def test_a_power_of_two_that_the_cores_fit_into():
    numbers = [segments_for(cores) for cores in (1, 2, 3, 4, 8, 9, 64)]
    assert numbers == [1, 2, 4, 4, 8, MOST_CHOSEN_SEGMENTS, MOST_CHOSEN_SEGMENTS]
    assert available_cores() >= 1
    with pytest.raises(PSSettingsError, match="segments must be in 1"):
        table(segments=0)


@pytest.mark.socket
@pytest.mark.usefixtures("table_kernels_loaded")
@pytest.mark.parametrize("num_servers", [2, 3])
@pytest.mark.parametrize(("cores", "later"), [(4, 1), (1, 16), (2, 2)])
def test_servers_of_any_number_of_cores_restore_each_others_tables(
    cores: int, later: int, num_servers: int, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    manifest = with_tables(table("user", segments=None), rule=ADD)
    monkeypatch.setattr(ps.tables.table, "available_cores", lambda: cores)
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.tables.push({"user": (IDS, ones(IDS))}, hyper=Hyper(1.0))
        client.save(tmp_path, 1)
        client.tables.push({"user": (IDS[:9], ones(IDS[:9]))}, hyper=Hyper(1.0))
        client.save(tmp_path, 2)
    monkeypatch.setattr(ps.tables.table, "available_cores", lambda: later)
    with cluster(num_servers=num_servers) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        client.seed(manifest, filled(manifest))  # adopts
        kept = cores if num_servers == 2 else later  # else sessions and deltas would not fit
        shards = [server._service.life.loaded() for server in bed.servers]
        assert {len(each.tables.tables[0].segments) for each in shards} == {kept}
        assert all(server.saved_as for server in client.describe())
        rows = client.tables.lookup({"user": IDS})["user"]
        assert rows[:, 0].tolist() == [2.0] * 9 + [1.0] * 491
        scanned = np.sort(np.concatenate([ids for ids, _ in client.tables.scan("user")]))
        assert scanned.tolist() == IDS.tolist()
        client.tables.push({"user": (IDS, ones(IDS))}, hyper=Hyper(1.0))
        client.save(tmp_path, 3)
