"""ps:0 is started again while workers are between rendezvous: nobody waits for what others passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import SGD, Hyper
from tests.support.ps_cluster import (
    Cluster,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    run_all,
    succeeded,
)

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(600, rule=SGD(), consistency="sync")
GRADS = random_arrays(MANIFEST, 1)
HYPER = Hyper(0.1)
MEET_S = 10.0


def passed(clients: list[PSClient], key: str) -> None:
    """Let all workers pass a rendezvous, each with its rank as the value."""
    meets = [
        partial(each.rendezvous, key, b"%d" % each.identity.rank, timeout_s=MEET_S)
        for each in clients
    ]
    succeeded(run_all(*meets))


@contextmanager
def trained(root: Path, num_workers: int = 2) -> Iterator[tuple[Cluster, list[PSClient]]]:
    """One server whose workers have trained a step, which is saved, and passed two rendezvous."""
    with cluster("tcp", num_workers=num_workers) as bed:
        clients = bed.workers(MANIFEST, filled(MANIFEST))
        succeeded(run_all(*(partial(c.push, GRADS, hyper=HYPER, rows=4) for c in clients)))
        clients[0].save(root, 1)
        passed(clients, "build")
        passed(clients, "epoch")
        yield bed, clients


@pytest.mark.fault("F01", "F08")
@pytest.mark.parametrize("generation", [0, 1], ids=["its answer was lost", "it is a newer attempt"])
def test_a_worker_gets_the_values_of_a_rendezvous_that_the_others_passed_at_a_lost_server(
    tmp_path: Path, generation: int
):
    with trained(tmp_path) as (bed, (one, other)):
        other.close()
        bed.restart(0, tmp_path)
        late = bed.client(1, generation)

        def come() -> list[dict[int, bytes]]:
            keys = ("build", "epoch", "epoch", "end")
            return [late.rendezvous(key, b"late", timeout_s=MEET_S) for key in keys]

        def go_on() -> list[dict[int, bytes]]:
            return [one.rendezvous(key, b"0", timeout_s=MEET_S) for key in ("epoch", "end")]

        found, seen = succeeded(run_all(come, go_on))
        then, now = {0: b"0", 1: b"1"}, {0: b"0", 1: b"late"}
        assert found == [then, then, now, now]
        assert seen == [now, now]


@pytest.mark.fault("F01", "F08")
def test_a_worker_that_trains_brings_the_values_before_its_push_waits_for_the_late_one(
    tmp_path: Path,
):
    with trained(tmp_path) as (bed, (one, other)):
        other.close()
        bed.restart(0, tmp_path)
        late = bed.client(1, generation=1)
        late.attach()

        def come() -> int:
            late.rendezvous("build", b"late", timeout_s=MEET_S)
            return late.push(GRADS, hyper=HYPER, rows=4).clock

        push = partial(one.push, GRADS, hyper=HYPER, rows=4)
        clock, ack = succeeded(run_all(come, push))
        assert clock == ack.clock == 2
