"""Counters pushed through a network that fails by seed: exact in every mode, whatever it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper, Manifest
from ps.server import receive, shard
from tests.support.channel_proxy import ALL, KEEPS_BYTES, Direction, Fault
from tests.support.proxied_cluster import ProxiedCluster, proxied
from tests.support.ps_cluster import ADD, filled, make_manifest, run_all, succeeded
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["proxied", "table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

Mode = Literal["async", "sync", "ssp", "tables"]
Integrity = Literal["header", "payload"]
MODES: tuple[Mode, ...] = ("async", "sync", "ssp", "tables")
NUM_SERVERS, NUM_FAULTS = 2, 12
HYPER = Hyper(0.1)
SIZE = 600
IDS = np.arange(60)


@dataclass(frozen=True)
class Schedule:
    """What one seed means."""

    seed: int
    mode: Mode
    bound: int
    num_workers: int
    num_pushes: int
    integrity: Integrity
    faults: tuple[tuple[Fault, ...], ...]
    """By server, in the order in which they strike."""

    @classmethod
    def of(cls, seed: int) -> Schedule:
        dice = random.Random(f"network {seed}")
        mode = MODES[seed % len(MODES)]
        integrity: Integrity = dice.choice(("header", "payload"))
        kinds = KEEPS_BYTES if integrity == "header" else ALL
        return cls(
            seed,
            mode,
            bound=dice.randint(0, 2) if mode == "ssp" else 0,
            num_workers=dice.randint(1, 3),
            num_pushes=8,
            integrity=integrity,
            faults=tuple(
                tuple(Fault.of(dice, kinds, most_bytes=4000) for _ in range(NUM_FAULTS))
                for _ in range(NUM_SERVERS)
            ),
        )

    @property
    def manifest(self) -> Manifest:
        if self.mode == "tables":
            return with_tables(table(segments=3), rule=ADD, size=SIZE, bucket_bytes=512)
        return make_manifest(
            SIZE,
            rule=ADD,
            consistency=self.mode,
            reduction="sum",
            staleness_bound=self.bound,
        )


def push(client: PSClient, mode: Mode) -> None:
    if mode == "tables":
        client.tables.push({"user": (IDS, ones(IDS))}, hyper=HYPER)
    else:
        gradient = filled(client.manifest, 1.0)
        client.push_pull(gradient, filled(client.manifest), hyper=HYPER, rows=1)


def check(parts: ProxiedCluster, schedule: Schedule) -> None:
    """What somebody on a good network reads and the servers' counts are what was pushed."""
    client = parts.bed.client()
    client.attach()
    is_table = schedule.mode == "tables"
    if is_table:
        values = client.tables.lookup({"user": IDS})["user"]
    else:
        values = parts.bed.pulled(client)["trainable"]
    assert set(values.ravel()) == {schedule.num_workers * schedule.num_pushes}
    for stats in client.stats():
        counts = [each.table_pushes if is_table else each.pushes for each in stats.workers]
        assert counts == [schedule.num_pushes] * schedule.num_workers


def run(proxied: Callable[..., ProxiedCluster], schedule: Schedule) -> int:
    """Returns how many faults have struck."""
    parts = proxied(
        num_servers=NUM_SERVERS, num_workers=schedule.num_workers, integrity=schedule.integrity
    )
    clients = parts.workers(schedule.manifest)
    for proxy, faults in zip(parts.proxies, schedule.faults, strict=True):
        proxy.arm(*faults)

    def work(client: PSClient) -> None:
        for _ in range(schedule.num_pushes):
            push(client, schedule.mode)
        client.leave()  # in ssp and sync the others do not wait for it

    succeeded(run_all(*(partial(work, client) for client in clients), timeout_s=60))
    check(parts, schedule)
    return sum(fault.fired.is_set() for faults in schedule.faults for fault in faults)


@pytest.mark.fault("F23")
@pytest.mark.fault("F27")
@pytest.mark.fault("F29")
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 6), pytest.param(6, 400, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
    ids=["6", "400"],
)
def test_counters_are_exact_over_every_bad_network(proxied, monkeypatch, first: int, count: int):
    monkeypatch.setattr(receive, "READ_BYTES", 512)
    monkeypatch.setattr(shard, "SEND_BYTES", 1024)
    fired = 0
    for seed in range(first, first + count):
        schedule = Schedule.of(seed)
        try:
            fired += run(proxied, schedule)
        except Exception as error:
            raise AssertionError(f"{schedule}: {error!r}") from error
    assert fired > 5 * count, "the schedules hardly harm anything"


def test_a_seed_means_the_same_schedule_again():
    assert str(Schedule.of(3)) == str(Schedule.of(3)) != str(Schedule.of(4))


@pytest.mark.fault("F27")
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_repeated_frame_is_refused_and_its_connection_closed(proxied, direction: Direction):
    parts: ProxiedCluster = proxied()
    (client,) = parts.workers(make_manifest(SIZE, rule=ADD))
    into: dict[str, Any] = filled(client.manifest)
    for number in range(1, 6):
        before = parts.proxy.connections
        (fault,) = parts.proxy.arm(Fault(direction, 0, "repeat"))
        for pushes in (2 * number - 1, 2 * number):
            client.push_pull(filled(client.manifest, 1.0), into, hyper=HYPER, rows=1)
            assert set(into["trainable"]) == {pushes}
        assert fault.fired.is_set()
        assert parts.proxy.connections == before + 1, "the copy was taken for another request"
    assert client.stats()[0].workers[0].pushes == 10
