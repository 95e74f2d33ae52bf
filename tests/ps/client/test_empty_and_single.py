"""Nothing, one and very much, in every mode: works as any other size, or is refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import PSSettingsError
from ps.manifest.manifest import GroupSpec, Hyper, Manifest, ParamSpec
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    make_manifest,
    run_all,
    succeeded,
)
from tests.support.tables import ones, table, table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
MODES: dict[str, dict[str, Any]] = {
    "async": {"consistency": "async"},
    "ssp": {"consistency": "ssp", "staleness_bound": 0},
    "sync": {"consistency": "sync"},
    "hybrid": {"consistency": "hybrid", "staleness_bound": 1},
}
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (3,), (0, 4), (), (2, 0, 5))
SMALL = GroupSpec(
    "small", "float32", ADD, tuple(ParamSpec(f"p{n}", shape) for n, shape in enumerate(SHAPES))
)
EMPTY = GroupSpec("empty", "float32", ADD, (ParamSpec("nothing", (0, 7)),))
BARE = GroupSpec("bare", "float64", ADD, ())


def manifest_of(mode: str, *groups: GroupSpec) -> Manifest:
    return Manifest(groups=groups, tables=(table(),), bucket_bytes=64, **MODES[mode])


def arrays(manifest: Manifest, value: float) -> dict[str, Any]:
    return {
        group.name: np.full(group.num_elements, value, group.dtype) for group in manifest.groups
    }


def clients_of(bed: Cluster, manifest: Manifest) -> list[PSClient]:
    return bed.workers(manifest, arrays(manifest, 0.0))


@pytest.mark.fault("F50")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [(SMALL, EMPTY, BARE), (EMPTY,), ()], ids=["few", "empty", "no"])
def test_empty_and_single_values_train_like_others(mode: str, groups: tuple):
    """Three servers, so that some of them own nothing."""
    manifest = manifest_of(mode, *groups)
    with cluster(num_servers=3, num_workers=2) as bed:
        clients = clients_of(bed, manifest)

        def work(client: PSClient) -> None:
            into = arrays(manifest, np.nan)
            for rows in (1, 1 << 40):
                client.push_pull(arrays(manifest, 1.0), into, hyper=HYPER, rows=rows)
            client.push_null(rows=0)
            client.push_null(into=into)
            with client.tables.batch({"user": []}) as batch:
                assert batch.rows["user"].shape == (0, 4)
                batch.push({"user": np.empty((0, 4), np.float32)}, hyper=HYPER)
            with client.tables.batch({}) as batch:
                batch.push({}, hyper=HYPER)
            with client.tables.batch({"user": 7}) as batch:
                batch.push({"user": ones(7)}, hyper=HYPER)
            client.leave()

        succeeded(run_all(*(partial(work, client) for client in clients)))
        final = arrays(manifest, np.nan)
        clients[0].pull(final)
        expected = 2.0 if manifest.has_barrier else 4.0  # at the barrier the mean of two ones
        assert all(set(values) <= {expected} for values in final.values())
        assert final.get("small", np.empty(4)).size == 4
        assert clients[0].tables.lookup({"user": [7, 7]})["user"].tolist() == [[2.0] * 4] * 2


@pytest.mark.fault("F50")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "sentence"), [(0, "at least 1 row, got 0"), (-1, "rows")])
def test_a_gradient_of_no_rows_is_refused_and_the_next_one_counts(
    mode: str, rows: int, sentence: str
):
    manifest = manifest_of(mode, SMALL)
    with cluster() as bed:
        (client,) = clients_of(bed, manifest)
        with pytest.raises(PSSettingsError, match=sentence):
            client.push(arrays(manifest, 1.0), hyper=HYPER, rows=rows)
        assert client.push(arrays(manifest, 1.0), hyper=HYPER, rows=1).clock == 1


@pytest.mark.parametrize("pulls", [False, True])
def test_a_push_of_no_rows_names_push_null_and_takes_no_number(pulls: bool):
    """In sync the others would wait for this worker until their time is up."""
    manifest = make_manifest(rule=ADD, consistency="sync")
    values, into = filled(manifest, 1.0), filled(manifest)
    with cluster(num_servers=2, num_workers=2) as bed:
        one, other = bed.workers(manifest, filled(manifest))
        before = [link.sequence for link in one._servers.links]
        push = partial(one.push_pull, values, into) if pulls else partial(one.push, values)
        with pytest.raises(PSSettingsError, match=r"at least 1 row, got 0.*call push_null\(\)"):
            push(hyper=Hyper(0.1), rows=0)
        assert [link.sequence for link in one._servers.links] == before
        succeeded(run_all(one.push_null, partial(other.push, values, hyper=Hyper(0.1), rows=4)))
        assert set(bed.pulled(one)["trainable"]) == {1.0}
