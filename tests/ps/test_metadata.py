"""Metadata: kept on ps:0, saved and restored with the parameters that they belong to."""

from __future__ import annotations

import contextlib
import itertools
import threading
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ps import metadata as kept
from ps.checkpoint.choice import steps_on_disk
from ps.checkpoint.storage import storage_at
from ps.cli.main import main
from ps.client.client import PSClient
from ps.client.metadata import MetadataClient
from ps.errors import (
    CheckpointError,
    NonFiniteGradient,
    PSSettingsError,
    RoleError,
    ServerPhaseError,
)
from ps.manifest.manifest import SGD, Hyper
from ps.metadata import (
    MAX_ALL_BYTES,
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    MAX_PUSHED_LENGTH,
    AttachedMetadata,
    Metadata,
    pushed,
)
from ps.protocol import messages
from ps.protocol.messages import Number
from ps.server import shard
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import connect
from rpc.errors import RemoteError
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    make_manifest,
    raw_call,
    run_all,
    succeeded,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(60, rule=ADD)
HYPER = Hyper(0.1)


def test_metadata_is_set_replaced_and_removed_by_workers_and_the_driver():
    with cluster(num_servers=2, num_workers=2) as bed:
        assert bed.client(0).metadata() == {}
        with pytest.raises(ServerPhaseError, match="setmetadata needs a shard that is SERVING"):
            bed.client(0).set_metadata("a", 1)
        workers = bed.workers(MANIFEST, filled(MANIFEST))
        driver = bed.driver()
        workers[0].set_metadata("a", {"batch": 3, "of": ["x", None, 0.5]})
        workers[1].set_metadata("b", "ü" * 9)
        driver.set_metadata("b", 2)
        workers[1].set_metadata("c", [])
        workers[1].set_metadata("c", None)
        workers[1].set_metadata("never/there", None)
        for client in (*workers, driver, bed.client(role=Role.SUPERVISOR)):
            assert client.metadata() == {"a": {"batch": 3, "of": ["x", None, 0.5]}, "b": 2}
        with pytest.raises(RoleError, match="may not call setmetadata"):
            bed.client(role=Role.SUPERVISOR).set_metadata("a", 1)


def test_a_checkpoint_holds_the_notes_of_its_moment(tmp_path: Path, capsys):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.save(tmp_path, 0)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1, metadata=pushed("at", 1))
        client.set_metadata("who", ["me"])
        client.save(tmp_path, 1)
        client.set_metadata("who", "later")
        client.set_metadata("long", "x" * 5000)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1, metadata=pushed("at", 2))
    for num_servers, (step, expected) in itertools.product(
        (1, 3), ((0, {}), (1, {"at": 1, "who": ["me"]}))
    ):
        with cluster(num_servers=num_servers) as bed:
            client = bed.client()
            client.restore(tmp_path, step=step)
            assert client.metadata() == expected
            client.save(tmp_path / f"again-{num_servers}-{step}", 5)
        with cluster() as bed:
            client = bed.client()
            client.restore(tmp_path / f"again-{num_servers}-{step}")
            assert client.metadata() == expected
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert '  metadata at: 1\n  metadata who: ["me"]\n' in text
    assert text.count("metadata ") == 2


def test_a_note_and_the_gradient_it_came_with_are_saved_together(tmp_path: Path):
    """Async, one bucket: what the parameters count is what the metadata says, in every save."""
    manifest = make_manifest(3, rule=ADD)
    ended = threading.Event()
    with cluster("tcp", num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()

        def is_at(clock: int) -> bool:
            return saver.describe()[0].clock >= clock

        def save() -> None:
            try:
                for step in range(8):
                    saver.save(tmp_path, step)
                    later = saver.describe()[0].clock + 3
                    wait_until(partial(is_at, later), "pushes")
            finally:
                ended.set()

        def work(rank: int) -> None:
            for step in itertools.count(1):
                if ended.is_set():
                    return
                metadata = pushed(f"steps/{rank}", step)
                clients[rank].push(filled(manifest, 1.0), hyper=HYPER, rows=1, metadata=metadata)

        succeeded(run_all(save, partial(work, 0), partial(work, 1), timeout_s=60))
    steps = steps_on_disk(storage_at(tmp_path))
    assert len(steps) == 8
    for step in steps:
        with cluster() as bed:
            client = bed.client()
            client.restore(tmp_path, step=step)
            assert bed.pulled(client)["trainable"][0] == sum(client.metadata().values())


def test_a_refused_gradient_brings_no_note():
    with cluster(num_workers=1) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        bad = filled(MANIFEST, np.nan)
        with pytest.raises(Exception, match=r"NaN|finite"):
            client.push(bad, hyper=HYPER, rows=1, metadata=pushed("at", 1))
        assert client.metadata() == {}


def test_a_push_that_is_over_leaves_no_metadata_with_its_session():
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        for number in range(8):
            with contextlib.closing(bed.client()) as each:
                each.attach()
                metadata = pushed(f"n{number}", "x" * 4000)
                with pytest.raises(NonFiniteGradient):
                    each.push(filled(MANIFEST, np.nan), hyper=HYPER, rows=1, metadata=metadata)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1, metadata=pushed("at", 1))
        log = bed.servers[0]._service.life.loaded()._log
        attached = [
            each.attached for sessions in log._sessions.values() for each in sessions.values()
        ]
        assert attached == [None] * 9
        assert client.metadata() == {"at": 1}


@pytest.mark.attack("A10")
def test_what_is_no_note_is_refused():
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        cyclic: list[object] = []
        cyclic.append(cyclic)
        for name, value in (
            ("", 1), ("a b", 1), ("a\n", 1), ("x" * 201, 1),
            ("a", object()), ("a", cyclic), ("a", "x" * MAX_ENTRY_BYTES),
        ):  # fmt: skip
            with pytest.raises(
                PSSettingsError, match=r"metadata .* (cannot be kept|has 1048578 bytes)"
            ):
                client.set_metadata(name, value)
        with pytest.raises(PSSettingsError, match="comes with a push may have 32768"):
            pushed("a", "x" * MAX_PUSHED_LENGTH)
        request = messages.SetMetadata(Number(1, 1), "a")
        for server, payload, match in (
            (0, b"{", "metadata 'a' is not JSON"),
            (0, b'"\xff"', "metadata 'a' is not JSON"),
            (0, b"1" * (MAX_ENTRY_BYTES + 1), "the limit is 1048576"),
            (1, b"1", "metadata is kept on ps:0, this is ps:1"),
        ):
            with pytest.raises(RemoteError, match=match):
                raw(bed, server, messages.encode(request), payload)
        meta = msgspec.msgpack.encode({"type": "set_note", "number": [1, 1], "name": "a b"})
        with pytest.raises(RemoteError, match="not a request"):
            raw(bed, 0, meta, b"1")
        assert client.metadata() == {}


def raw(bed: Cluster, server: int, meta: bytes, payload: bytes) -> None:
    connection = connect(bed.endpoints[server], Identity(Role.WORKER, 0), bed.credentials)
    with contextlib.closing(connection):
        connection.call(meta, [payload], timeout_s=10.0)


def test_their_number_and_size_are_bounded():
    kept = Metadata()
    for number in range(MAX_ENTRIES):
        kept.put_once(1, number + 1, f"n{number}", "1")
    with pytest.raises(PSSettingsError, match="exceed the limit of 4096"):
        kept.check_room("other", "1")
    kept.check_room("n5", "22")
    kept.put("n5", "null")
    kept.check_room("other", "1")
    large = Metadata()
    for number in range(15):
        large.put(f"n{number}", "x" * MAX_ENTRY_BYTES)
    with pytest.raises(PSSettingsError, match=f"the limit is {MAX_ALL_BYTES}"):
        large.check_room("more", "x" * MAX_ENTRY_BYTES)


def test_letters_of_several_bytes_count_as_those():
    kept, text = Metadata(), "é" * (MAX_ENTRY_BYTES // 2)
    for number in range(15):
        kept.put(f"n{number}", text)
    with pytest.raises(PSSettingsError, match=f"the limit is {MAX_ALL_BYTES}"):
        kept.check_room("more", text)


def test_a_request_that_comes_again_changes_nothing_that_came_after_it():
    kept = Metadata()
    kept.put_once(1, 1, "n", '"first"')
    kept.put_once(2, 1, "n", '"other"')
    kept.put_once(1, 1, "n", '"first"')
    assert kept.texts() == {"n": '"other"'}
    kept.put_once(1, 2, "n", "null")
    assert kept.texts() == {}


def no_room(monkeypatch: pytest.MonkeyPatch, client: PSClient) -> None:
    monkeypatch.setattr(kept, "MAX_ENTRIES", 1)
    client.set_metadata("only", 1)


@pytest.mark.parametrize("mode", ["async", "ssp", "sync", "sync in two rounds"])
def test_a_push_whose_metadata_has_no_room_counts_at_every_server(
    mode: str, monkeypatch: pytest.MonkeyPatch
):
    """Refused by ps:0 alone it would count at the other servers, and in their clocks."""
    monkeypatch.setattr(shard, "SEND_BYTES", 1 << 18)  # values go back before the push is over
    rule = SGD(global_clipnorm=0.9) if "rounds" in mode else ADD
    consistency, bound = mode.split()[0], int(mode == "ssp")
    manifest = make_manifest(200_000, rule=rule, consistency=consistency, staleness_bound=bound)
    with cluster("tcp", num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        no_room(monkeypatch, clients[0])

        def step(rank: int, metadata: AttachedMetadata | None = None) -> None:
            into = filled(manifest)
            clients[rank].push_pull(
                filled(manifest, 1.0), into, hyper=HYPER, rows=1, metadata=metadata
            )

        other, refused = run_all(partial(step, 0), partial(step, 1, pushed("more", 2)))
        assert other is None
        assert isinstance(refused, PSSettingsError), refused
        assert "exceed the limit of 1 names" in str(refused)
        assert "the push counts at every server" in str(refused)
        first = bed.pulled(clients[0])["trainable"]
        assert len(set(first)) == 1, "as often at one server as at the other"
        succeeded(run_all(partial(step, 0), partial(step, 1)))
        after = bed.pulled(clients[0])["trainable"]
        np.testing.assert_allclose(after, 2 * first, rtol=1e-6)
        assert len(set(after)) == 1
        assert len({each.clock for each in clients[0].describe()}) == 1
        assert clients[0].metadata() == {"only": 1}


def test_a_repeated_push_hears_again_that_its_metadata_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        no_room(monkeypatch, client)
        ones = filled(MANIFEST, 1.0)["trainable"]
        request = messages.Push(MANIFEST.hash(), Number(7, 1), 1, HYPER, metadata=pushed("more", 2))
        for _ in range(2):
            with pytest.raises(RemoteError, match="exceed the limit of 1"):
                raw_call(bed, 0, request, [ones])
            assert set(bed.pulled(client)["trainable"]) == {np.float32(1.0)}


def test_a_repeated_push_whose_metadata_is_kept_is_no_second_one(monkeypatch: pytest.MonkeyPatch):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        ones = filled(MANIFEST, 1.0)["trainable"]
        request = messages.Push(MANIFEST.hash(), Number(7, 1), 1, HYPER, metadata=pushed("at", 2))
        raw_call(bed, 0, request, [ones])
        monkeypatch.setattr(kept, "MAX_ALL_BYTES", 4)
        raw_call(bed, 0, request, [ones])
        assert set(bed.pulled(client)["trainable"]) == {np.float32(1.0)}


def test_a_value_in_the_place_of_another_needs_only_the_difference():
    metadata, text = Metadata(), "x" * MAX_ENTRY_BYTES
    for number in range(15):
        metadata.put(f"n{number}", text)
    metadata.put("last", "x" * (MAX_ENTRY_BYTES // 2))
    metadata.check_room("n0", text)
    metadata.check_room("n0", "null")
    metadata.check_room("never/there", "null")
    with pytest.raises(PSSettingsError, match="the limit is"):
        metadata.check_room("new", text)


@pytest.mark.fault("F08")
def test_a_note_of_the_run_is_set_again_where_ps_0_has_gone_back(tmp_path: Path):
    with cluster(num_servers=2) as bed:
        client, reader = bed.workers(MANIFEST, filled(MANIFEST))[0], bed.client()
        client.set_metadata("run", "old", of_run=True)
        client.set_metadata("gone", 1, of_run=True)
        client.set_metadata("gone", None)
        client.save(tmp_path, 0)
        client.set_metadata("run", "new", of_run=True)
        client.set_metadata("step", 7)
        client.set_metadata("gone", 2)
        for _ in range(2):
            bed.restart(0, tmp_path)
            assert reader.metadata() == {"run": "old"}
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)  # finds ps:0 started again
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
            assert reader.metadata() == {"run": "new"}
            bed.restart(0, tmp_path)
            assert client.metadata() == {"run": "new"}


@pytest.mark.fault("F08")
@pytest.mark.parametrize("pushes", [False, True])
def test_a_save_by_another_client_of_the_process_has_its_notes_of_the_run(
    tmp_path: Path, pushes: bool
):
    with cluster(num_workers=2) as bed:
        clients = bed.workers(MANIFEST, filled(MANIFEST))
        saver = bed.client(run_notes=clients[0].run_notes)
        saver.attach()
        saver.save(tmp_path, 0)
        clients[0].set_metadata("run", "new", of_run=True)
        bed.restart(0, tmp_path)
        if pushes:
            clients[1].push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        saver.save(tmp_path, 1)
        bed.restart(0, tmp_path)
        assert clients[1].metadata() == {"run": "new"}


@pytest.mark.fault("F08")
def test_a_snapshot_of_a_ps_0_that_lacks_notes_of_the_run_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.save(tmp_path, 0)
        client.set_metadata("run", "new", of_run=True)
        bring = MetadataClient.bring

        def restart_after(self: MetadataClient, timeout_s: float) -> None:
            bring(self, timeout_s)
            bed.restart(0, tmp_path)

        monkeypatch.setattr(MetadataClient, "bring", restart_after)
        with pytest.raises(CheckpointError, match="started again during"):
            client.save(tmp_path, 1)
        monkeypatch.undo()
        client.save(tmp_path, 1)
        bed.restart(0, tmp_path)
        assert bed.client().metadata() == {"run": "new"}


@pytest.mark.fault("F08")
def test_a_refused_note_of_the_run_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.save(tmp_path, 0)
        client.set_metadata("run", "taken", of_run=True)
        with monkeypatch.context() as patched:
            patched.setattr(kept, "MAX_ALL_BYTES", 20)
            with pytest.raises(PSSettingsError, match="the limit is"):
                client.set_metadata("run", "refused, as it is too long", of_run=True)
        bed.restart(0, tmp_path)
        assert client.metadata() == {"run": "taken"}


@pytest.mark.fault("F08")
def test_a_note_of_the_run_is_given_up_for_want_of_room_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.save(tmp_path, 0)
        client.set_metadata("run", "new", of_run=True)
        bed.restart(0, tmp_path)
        with monkeypatch.context() as patched:

            def refuses(*_: object) -> None:
                raise PSSettingsError("for another reason")

            patched.setattr(Metadata, "put_once", refuses)
            with pytest.raises(PSSettingsError, match="for another reason"):
                client.metadata()
        assert client.metadata() == {"run": "new"}
        bed.restart(0, tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(kept, "MAX_ALL_BYTES", 4)
            assert client.metadata() == {}
        assert client.metadata() == {}


@pytest.mark.fault("F08")
def test_who_waits_at_a_rendezvous_sets_its_notes_of_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ps.client.rendezvous.PROBE_PERIOD_S", 0.05)
    with cluster(num_workers=2) as bed:
        clients = bed.workers(MANIFEST, filled(MANIFEST))
        clients[0].save(tmp_path, 0)
        clients[0].set_metadata("run", "new", of_run=True)

        def work(rank: int) -> None:
            if rank == 1:
                bed.restart(0, tmp_path)
                wait_until(lambda: clients[1].metadata() == {"run": "new"}, "the note")
            clients[rank].rendezvous("begin", b"", timeout_s=30.0)

        succeeded(run_all(*(partial(work, rank) for rank in range(2))))
