"""A checkpoint that version 0.1.0 wrote before its modules became packages is restored whole.

`data/before_packages` was made at commit fda991f: one server, Adam and averages and a table by
Adagrad, in buckets of 64 bytes. Step 1 is full; step 2, a delta, holds what changed after it: rows,
a push, a note, and the first push of session 77. `expected.json` is what its client then pulled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.checkpoint.choice import read_manifest
from ps.checkpoint.inspect import inspect
from ps.checkpoint.restore import verify
from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import Number
from tests.support.ps_cluster import cluster, random_arrays, raw_call
from tests.support.tables import table_kernels_loaded

__all__ = ["table_kernels_loaded"]
DATA = Path(__file__).parent / "data" / "before_packages"
HYPER = Hyper(0.125)
pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.fault("F42"),
    pytest.mark.usefixtures("table_kernels_loaded"),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "saved"))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
    return found


def test_every_digest_is_right_and_it_is_shown(saved):
    for step in (1, 2):
        verify(saved, read_manifest(saved, step))
    report = inspect(saved)
    assert report.newest == 2
    assert report.lease.startswith("job 'test-0' (host vm, pid ")
    assert [each.error for each in report.steps] == ["", ""]


@pytest.mark.parametrize("num_servers", [1, 3])
def test_groups_rows_and_notes_are_as_they_were(saved, expected, num_servers):
    with cluster(num_servers=num_servers) as bed:
        client = bed.client()
        assert client.restore(saved) == 2
        pulled = bed.pulled(client)
        assert {name: values.tolist() for name, values in pulled.items()} == expected["values"]
        batches = [
            (int(number), row.tolist())
            for ids, rows in client.tables.scan("user")
            for number, row in zip(ids, rows, strict=True)
        ]
        assert sorted(batches) == [(number, row) for number, row in expected["rows"]]
        assert client.metadata() == expected["notes"]
        assert {stats.clock for stats in client.stats()} == {expected["clock"]}


def test_a_push_that_it_has_applied_is_not_applied_again(saved):
    with cluster(job=read_manifest(saved).job) as bed:
        client = bed.client()
        client.restore(saved)
        before = bed.pulled(client)
        manifest = client.manifest
        gradient = list(random_arrays(manifest, 3).values())
        push = messages.Push(manifest.hash(), Number(77, 1), 1, HYPER)
        raw_call(bed, 0, push, gradient)
        again = bed.pulled(client)
        assert all(np.array_equal(before[name], again[name]) for name in before)
        raw_call(bed, 0, messages.Push(manifest.hash(), Number(77, 2), 1, HYPER), gradient)
        assert not np.array_equal(before["trainable"], bed.pulled(client)["trainable"])


def test_training_goes_on_from_it_and_is_saved_beside_it(saved):
    (saved / "lease.json").unlink()  # a host "vm" of another boot would be waited for
    with cluster() as bed:
        client = bed.client()
        client.restore(saved)
        client.push(random_arrays(client.manifest, 4), hyper=HYPER, rows=1)
        client.save(saved, None)
        expected = bed.pulled(client)
    with cluster() as bed:
        client = bed.client()
        assert client.restore(saved) > 2
        found = bed.pulled(client)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
