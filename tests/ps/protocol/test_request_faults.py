"""Every request of the protocol: lost, cut in flight, and its reply lost.

The cases are looked up by the types in ps.protocol.messages.Request, so a new type without one
fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper, Manifest
from ps.manifest.rule_spec import SGD
from ps.metadata import pushed
from ps.protocol import messages
from rpc.auth.handshake import Role
from tests.support.channel_proxy import Direction, Fault
from tests.support.proxied_cluster import ProxiedCluster, proxied
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    cluster,
    filled,
    frozen_arrays,
    make_manifest,
    run_all,
    with_frozen,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["proxied", "table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
IDS = np.arange(60)
DENSE = make_manifest(30, rule=ADD)
SPARSE = with_tables(table("user", segments=3), rule=ADD)
HYBRID = with_tables(table(), rule=ADD, consistency="hybrid", staleness_bound=2)
CLIPPED = make_manifest(30, rule=SGD(global_clipnorm=1e6), consistency="sync", bucket_bytes=64)
MANIFESTS: dict[type, Manifest] = {
    **dict.fromkeys((messages.Lookup, messages.PushRows, messages.Scan, messages.LoadRows), SPARSE),
    messages.LookupBatch: HYBRID,
    messages.Settle: CLIPPED,
    messages.PullFrozen: with_frozen(DENSE),
}
SIZES: dict[type, dict[str, int]] = {messages.Settle: {"num_servers": 2, "num_workers": 2}}
KINDS: dict[str, tuple[Direction, int]] = {
    "request lost": ("up", 0),
    "in flight": ("up", 50),
    "reply lost": ("down", 0),
}


@dataclass
class Scene:
    """One client behind a proxy, at a server that already serves unless the case restores it."""

    parts: ProxiedCluster
    client: PSClient
    manifest: Manifest
    directory: Path

    def one(self) -> dict[str, Any]:
        return filled(self.manifest, 1.0)

    def seeded(self) -> dict[str, Any]:
        return filled(self.manifest) | frozen_arrays(self.manifest, 0)

    def frozen(self) -> Any:
        """The frozen weights as the client pulls them."""
        into = {name: np.zeros_like(a) for name, a in frozen_arrays(self.manifest, 0).items()}
        self.client.pull_frozen(self.manifest, into)
        return into["frozen"]

    def value(self) -> float:
        """What a dense parameter is, as somebody on a good network sees it."""
        into = self.one()
        self._looker_on(lambda client: client.pull(into))
        return float(into["trainable"][0])

    def row(self) -> float:
        """What a table's row is."""
        return float(self._looker_on(lambda c: c.tables.lookup({"user": IDS}))["user"][0, 0])

    def metadata(self) -> dict[str, Any]:
        """What is kept."""
        return self._looker_on(lambda client: client.metadata())

    def _looker_on(self, look: Callable[[PSClient], Any]) -> Any:
        client = self.parts.bed.client()
        client.attach()
        return look(client)


@dataclass(frozen=True)
class Case:
    """A call that makes the request, and what must hold after it."""

    act: Callable[[Scene], Any]
    holds: Callable[[Scene, Any], bool]
    role: Role = Role.WORKER
    goes_on: bool = True
    """Whether a push after it must count."""
    is_later: bool = False
    """Whether the call makes other requests first: then the cut waits for this one."""


def push_rows(scene: Scene) -> None:
    scene.client.tables.push({"user": (IDS, ones(IDS))}, hyper=HYPER)


def train_rows(scene: Scene) -> list[float]:
    """Two batches beside one that stays under way: with a second permit lost, none would go on."""
    tables = scene.client.tables
    first = tables.batch({"user": IDS})
    seen: list[float] = []
    for _ in range(2):
        with tables.batch({"user": IDS}, timeout_s=WAIT_S) as batch:
            seen.append(float(batch.rows["user"][0, 0]))
            batch.push({"user": ones(IDS)}, hyper=HYPER)
    first.close()
    return seen


def push_clipped(scene: Scene) -> list[Any]:
    """Both workers' push, whose second round is the request."""
    other = scene.parts.bed.client(1)
    other.attach()
    grads = scene.one()
    clients = (scene.client, other)
    return run_all(*(partial(c.push, grads, hyper=HYPER, rows=1) for c in clients))


def meet_and_connect_again(scene: Scene) -> dict[int, bytes]:
    """Come to a second rendezvous over another connection, on which the first is brought before."""
    scene.client.rendezvous("k", b"v", timeout_s=WAIT_S)
    scene.client._servers.links[0].close()
    return scene.client.rendezvous("k", b"w", timeout_s=WAIT_S)


def order(act: Callable[[PSClient], Any], phase: str = "SERVING") -> Case:
    return Case(
        lambda s: act(s.client),
        lambda s, _: s.client.describe()[0].phase == phase,
        Role.DRIVER,
        goes_on=False,
    )


CASES: dict[type, list[Case]] = {
    messages.Describe: [
        Case(lambda s: s.client.describe(), lambda s, r: r[0].phase == "SERVING"),
        Case(lambda s: s.client.attach(), lambda s, r: r == s.manifest),
    ],
    messages.FetchManifest: [
        Case(lambda s: s.client.attach(), lambda s, r: r == s.manifest, is_later=True),
    ],
    messages.Compile: [
        Case(lambda s: s.client.seed(s.manifest, s.one()), lambda s, _: s.value() == 0.0),
    ],
    messages.Seed: [
        Case(lambda s: s.client.seed(s.manifest, s.one()), lambda s, _: s.value() == 0.0),
    ],
    messages.Pull: [Case(lambda s: s.client.pull(s.one()), lambda s, r: r.clock == 0)],
    messages.PullFrozen: [
        Case(lambda s: s.frozen(), lambda s, r: np.array_equal(r, s.seeded()["frozen"])),
    ],
    messages.Push: [
        Case(lambda s: s.client.push(s.one(), hyper=HYPER, rows=1), lambda s, _: s.value() == 1.0),
        Case(
            lambda s: s.client.push_pull(s.one(), s.one(), hyper=HYPER, rows=1),
            lambda s, r: s.value() == 1.0 and r.clock == 1,
        ),
        Case(lambda s: s.client.push_null(), lambda s, r: r.clock == 0),
        Case(
            lambda s: s.client.push(s.one(), hyper=HYPER, rows=1, metadata=pushed("n", 7)),
            lambda s, _: s.value() == 1.0 and s.metadata() == {"n": 7},
        ),
    ],
    messages.Lookup: [
        Case(lambda s: s.client.tables.lookup({"user": IDS}), lambda s, _: s.row() == 0.0),
    ],
    messages.LookupBatch: [Case(train_rows, lambda s, r: r == [0.0, 1.0] and s.row() == 2.0)],
    messages.PushRows: [Case(push_rows, lambda s, _: s.row() == 1.0)],
    messages.Scan: [Case(lambda s: list(s.client.tables.scan("user")), lambda s, _: True)],
    messages.LoadRows: [
        Case(
            lambda s: s.client.tables.load_rows("user", IDS, ones(IDS)), lambda s, _: s.row() == 1.0
        )
    ],
    messages.Settle: [
        Case(
            push_clipped,
            lambda s, r: [ack.clock for ack in r] == [1, 1] and abs(s.value() + 0.1) < 1e-6,
            goes_on=False,
            is_later=True,
        ),
    ],
    messages.Assign: [Case(lambda s: s.client.assign(s.one()), lambda s, _: s.value() == 1.0)],
    messages.Join: [Case(lambda s: s.client.join(), lambda s, r: r.clock == 0)],
    messages.Leave: [Case(lambda s: s.client.leave(), lambda s, r: r.clock == 0, goes_on=False)],
    messages.Finish: [Case(lambda s: s.client.finish(), lambda s, _: True, goes_on=False)],
    messages.JoinRendezvous: [
        Case(lambda s: s.client.rendezvous("k", b"v", timeout_s=10), lambda s, r: r == {0: b"v"}),
    ],
    messages.BringAnswers: [
        Case(meet_and_connect_again, lambda s, r: r == {0: b"w"}, is_later=True),
    ],
    messages.SetMetadata: [
        Case(lambda s: s.client.set_metadata("n", [1]), lambda s, _: s.metadata() == {"n": [1]}),
    ],
    messages.FetchMetadata: [Case(lambda s: s.client.metadata(), lambda s, r: r == {})],
    messages.TakeSnapshot: [
        Case(lambda s: s.client.save(s.directory, 5), lambda s, r: Path(r).name == "step-5"),
    ],
    messages.Save: [
        Case(
            lambda s: s.client.save(s.directory, None),
            lambda s, r: Path(r).name == "step-0",
            is_later=True,
        ),
    ],
    messages.Restore: [
        Case(
            lambda s: s.client.restore(s.directory / "saved"),
            lambda s, r: r == 7 and s.value() == 1.0,
            goes_on=False,
        ),
    ],
    messages.FetchStats: [Case(lambda s: s.client.stats(), lambda s, r: r[0].clock == 0)],
    messages.Fence: [order(lambda client: client.fence(0, 3))],
    messages.Lose: [order(lambda client: client.worker_lost(0))],
    messages.StopServer: [order(lambda client: client.stop_servers("enough"), "DRAINING")],
}
ALL = [
    pytest.param(request, number, id=f"{request.__name__}-{number}")
    for request in get_args(messages.Request)
    for number in range(len(CASES.get(request, [None])))
]


@pytest.mark.fault("F26")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("request_type", "number"), ALL)
def test_every_request_may_be_lost_and_sent_again(
    proxied, monkeypatch, request_type: type, number: int, kind: str, tmp_path: Path
):
    case = CASES[request_type][number]
    manifest = MANIFESTS.get(request_type, DENSE)
    parts: ProxiedCluster = proxied(**SIZES.get(request_type, {}))
    if request_type is messages.Restore:
        with cluster("inproc") as before:
            (writer,) = before.workers(manifest, filled(manifest, 1.0))
            writer.save(tmp_path / "saved", 7)
    else:
        values = filled(manifest) | frozen_arrays(manifest, 0)
        parts.bed.client().seed(manifest, values)
    client = parts.client(role=case.role)
    if request_type is messages.Restore:
        client.describe()
    else:
        client.attach()
    came: list[type] = []
    decode = messages.decode_request

    def watched(meta: bytes) -> messages.Request:
        request = decode(meta)
        came.append(type(request))
        return request

    monkeypatch.setattr(messages, "decode_request", watched)
    scene = Scene(parts, client, manifest, tmp_path)
    cuts: list[Fault] = []
    encode = messages.encode

    def arm(message: Any = None) -> bytes:
        if not cuts and (message is None or type(message) is request_type):
            cuts.extend(parts.proxy.plan(KINDS[kind]))
        return b"" if message is None else encode(message)

    monkeypatch.setattr(messages, "encode", arm)
    if not case.is_later:
        arm()
    result = case.act(scene)
    assert cuts[0].fired.is_set()
    assert request_type in came, "the case does not make this request"
    assert case.holds(scene, result)
    if case.goes_on:
        value = scene.value()
        assert client.push(scene.one(), hyper=HYPER, rows=1).applied
        assert scene.value() == value + 1.0


def test_every_request_has_a_case():
    assert set(CASES) == set(get_args(messages.Request))
