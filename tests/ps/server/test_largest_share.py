"""Values that one server could never send are refused before they are brought or read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ps.errors import PSSettingsError
from ps.manifest import shares
from tests.support.ps_cluster import (
    ADD,
    cluster,
    filled,
    frozen_arrays,
    make_manifest,
    with_frozen,
)

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(4096, rule=ADD, bucket_bytes=2048)
"""16 KiB of values."""
RESTORED = r"ps:0 of 1 would hold 16384 bytes .* at most 10000: start at least 2 servers"
SEEDED = r"bring one of 1 servers 16384 bytes .* at most 10000: start at least 2 servers"


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_share_that_no_frame_holds_is_refused_with_the_number_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restored: bool
):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST, 2.0))
        client.save(tmp_path, 1)
    monkeypatch.setattr(shares, "MAX_SHARE_BYTES", 10_000)
    with cluster() as bed:
        client = bed.client()
        seed = partial(client.seed, MANIFEST, filled(MANIFEST))
        fill = partial(client.restore, tmp_path) if is_restored else seed
        with pytest.raises(PSSettingsError, match=RESTORED if is_restored else SEEDED):
            fill()
        assert client.describe()[0].phase == "EMPTY"
    with cluster(num_servers=2) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 1
        assert set(bed.pulled(client)["trainable"]) == {2.0}


@pytest.mark.parametrize("limit", range(2300, 9200, 700))
def test_the_number_of_servers_that_is_told_is_the_least(
    monkeypatch: pytest.MonkeyPatch, limit: int
):
    monkeypatch.setattr(shares, "MAX_SHARE_BYTES", limit)
    with cluster() as bed, pytest.raises(PSSettingsError) as refused:
        bed.client().seed(MANIFEST, filled(MANIFEST))
    least = int(refused.value.details["least_servers"])
    with cluster(num_servers=least) as bed:
        bed.client().seed(MANIFEST, filled(MANIFEST))
    with cluster(num_servers=least - 1) as bed, pytest.raises(PSSettingsError):
        bed.client().seed(MANIFEST, filled(MANIFEST))


BOTH = with_frozen(MANIFEST, size=4093)
"""16 KiB of values, and 16 KiB of frozen ones."""


@pytest.mark.parametrize(
    ("room", "least"),
    [(20_000, 2), (2 * 16384, 2), (16384, 3), (9000, 4)],
    ids=["either is pulled", "without the manifest", "one is pulled exactly", "by halves"],
)
def test_a_seed_of_both_layouts_that_no_frame_holds_is_refused_with_the_number_of_servers(
    monkeypatch: pytest.MonkeyPatch, room: int, least: int
):
    """A pull brings one of them, a seed both and the manifest."""
    monkeypatch.setattr(shares, "MAX_SHARE_BYTES", room)
    values = filled(BOTH) | frozen_arrays(BOTH, 1)
    for num_servers in range(1, least + 1):
        with cluster(num_servers=num_servers) as bed:
            client = bed.client()
            if num_servers == least:
                client.seed(BOTH, values)
                continue
            with pytest.raises(PSSettingsError, match=f"start at least {least} servers") as told:
                client.seed(BOTH, values)
            assert told.value.details == {"least_servers": str(least)}
            assert {server.phase for server in client.describe()} == {"EMPTY"}
