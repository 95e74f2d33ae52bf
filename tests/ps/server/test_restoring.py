"""A server that restores says so from its start; its clients wait longer than for a dead one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.checkpoint import choice, restore
from ps.checkpoint.choice import RestoreOptions
from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.format import Checkpoint, step_name
from ps.checkpoint.reader import load_chain
from ps.checkpoint.score import Score
from ps.checkpoint.storage import Storage, storage_at
from ps.client.channel import OutgoingCall
from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError, PSError, RequestTimeout, ServerGone, TableFull
from ps.manifest.manifest import Adam, Hyper
from ps.server import handlers, lifecycle
from ps.server import server as server_module
from ps.server.handlers import Service
from ps.server.save_restore import restore_into
from ps.server.server import PSServer
from rpc.auth.handshake import Identity, Role
from rpc.jit.cache_directory import CACHE_VARIABLE
from tests.support.ps_cluster import ADD, WAIT_S, Cluster, cluster, filled, run_all
from tests.support.ps_processes import CREDENTIALS, ServerProcess
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

HYPER = Hyper(0.1)
MANIFEST = with_tables(table(), size=600, rule=ADD)
START_S = 8.0
"""In which a process starts, and cannot compile what a table with Adam takes."""


@pytest.mark.process
@pytest.mark.long
@pytest.mark.fault("F08")
@pytest.mark.timeout(400)
def test_a_server_restarted_without_any_kernel_is_waited_for_while_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = with_tables(table(rule=Adam()), rule=Adam())
    root, ids = tmp_path / "saves", np.arange(8)
    place = ("--num-workers", "1")
    old = ServerProcess(tmp_path, *place)
    worker = Identity(Role.WORKER, 0)
    client = PSClient(
        [old.endpoint], CREDENTIALS, worker, num_workers=1, timeout_s=WAIT_S, reconnect_s=START_S
    )
    with client:
        client.seed(manifest, filled(manifest))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        client.save(root, 1)
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        old.send(signal.SIGKILL)
        old.close()
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other-host"))
        port = ("--port", str(old.endpoint.port), "--restore", str(root))
        new = ServerProcess(tmp_path, *place, *port, wait=False, by_command=True)
        try:
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
            (stats,) = client.stats()
            assert (stats.restored_step, stats.lost_updates) == (1, 1)
            assert stats.clock == 2
        finally:
            new.close()


BEFORE_MANIFESTS = (server_module, "check_restorable")
BEFORE_KERNELS = (Service, "_new_dense")
BEFORE_FILES = (handlers, "restore_into")


class HeldRestore:
    """A server's restore, which stands at a function until `goes_on`."""

    def __init__(
        self,
        bed: Cluster,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        at: tuple[Any, str] = BEFORE_KERNELS,
    ) -> None:
        self.goes_on = threading.Event()
        self.stands = threading.Event()
        passes = getattr(*at)

        def held(*arguments: Any, **options: Any) -> Any:
            self.stands.set()
            assert self.goes_on.wait(WAIT_S)
            return passes(*arguments, **options)

        monkeypatch.setattr(*at, held)
        self._thread = threading.Thread(target=self._restart, args=(bed, root), daemon=True)
        self.failed: list[Exception] = []
        self._thread.start()
        assert self.stands.wait(WAIT_S)

    def _restart(self, bed: Cluster, root: Path) -> None:
        try:
            bed.restart(0, root)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.failed.append(error)

    def end(self) -> None:
        self.goes_on.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def held(
    bed: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., HeldRestore]]:
    """Make a save, one more push, and a restart that stands."""
    made: list[HeldRestore] = []
    bed.workers(MANIFEST, filled(MANIFEST))
    bed.clients[0].set_metadata("note", "kept")
    bed.clients[0].save(tmp_path, 1)
    bed.clients[0].push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
    monkeypatch.setattr(lifecycle, "RESTORE_LOOK_S", 0.1)

    def restart(at: tuple[Any, str] = BEFORE_KERNELS) -> HeldRestore:
        made.append(HeldRestore(bed, tmp_path, monkeypatch, at))
        return made[0]

    yield restart
    for each in made:
        each.end()


@pytest.fixture
def bed() -> Iterator[Cluster]:
    with cluster("tcp", num_servers=2, num_workers=2) as made:
        yield made


REQUESTS: dict[str, Callable[[PSClient], Any]] = {
    "push": lambda client: client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1),
    "pull": lambda client: client.pull(filled(MANIFEST)),
    "rows": lambda client: client.tables.push(
        {"user": (np.arange(8), ones(np.arange(8)))}, hyper=HYPER
    ),
    "lookup": lambda client: client.tables.lookup({"user": np.arange(8)}),
    "finish": lambda client: client.finish(),
    "metadata": lambda client: client.metadata(),
    "seed": lambda client: client.seed(MANIFEST, filled(MANIFEST, 5.0)),
    "rendezvous": lambda client: client.rendezvous("all", b"here", timeout_s=WAIT_S),
}
"""What needs the parameters, or would be answered wrongly by a server that has none yet."""


DEADLINE_S = 3.0
"""Of a request; a busy machine answers within it."""


@pytest.mark.socket
@pytest.mark.fault("F08")
def test_requests_wait_for_a_server_that_restores_longer_than_their_deadline(
    bed: Cluster,
    held: Callable[[], HeldRestore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    restore = held()

    def work(name: str) -> Any:
        rank = int(name == "finish")  # nobody waits for the one that has finished
        client = bed.client(rank, timeout_s=DEADLINE_S, reconnect_s=0.5)
        client._adopt(MANIFEST)
        began_s = time.monotonic()
        answer = REQUESTS[name](client)
        return answer, time.monotonic() - began_s

    first_s: dict[int, float] = {}

    def all_are_overdue() -> bool:
        since_s = time.monotonic() - DEADLINE_S
        return len(first_s) == len(REQUESTS) and max(first_s.values()) < since_s

    def go_on() -> None:
        wait_until(all_are_overdue, "deadlines to pass")
        restore.goes_on.set()

    postpone = OutgoingCall.postpone

    def noted(call: OutgoingCall, error: PSError) -> None:
        first_s.setdefault(threading.get_ident(), time.monotonic())
        postpone(call, error)

    monkeypatch.setattr(OutgoingCall, "postpone", noted)
    *answers, _ = run_all(*(partial(work, name) for name in REQUESTS), go_on)
    assert not [each for each in answers if isinstance(each, Exception)]
    restore.end()
    assert not restore.failed
    found = dict(zip(REQUESTS, answers, strict=True))
    assert all(took_s > DEADLINE_S for _, took_s in found.values())
    assert found["metadata"][0] == {"note": "kept"}
    assert found["rendezvous"][0] == {0: b"here"}
    pulled = bed.pulled(bed.clients[0])["trainable"]
    (cut,) = bed.clients[0]._dense.pieces[0]
    assert set(pulled[cut.start : cut.stop]) == {np.float32(1.0)}
    lines = [each.getMessage() for each in caplog.records if "restoring" in each.getMessage()]
    assert len(lines) == len(REQUESTS), "each says it once"
    assert lines[0].startswith("ps:0 was started again and has been restoring its parameters")


@pytest.mark.socket
@pytest.mark.fault("F08")
@pytest.mark.parametrize("at", [BEFORE_MANIFESTS, BEFORE_FILES], ids=["manifests", "files"])
def test_a_server_listens_before_it_has_read_its_checkpoint(
    bed: Cluster,
    held: Callable[..., HeldRestore],
    monkeypatch: pytest.MonkeyPatch,
    at: tuple[Any, str],
):
    restored = held(at)
    assert bed.servers[0].phase == "RESTORING"
    client = bed.client(reconnect_s=0.5)
    assert client.describe()[0].phase == "RESTORING"
    client._adopt(MANIFEST)
    postpone = OutgoingCall.postpone

    def told(call: OutgoingCall, error: PSError) -> None:
        restored.goes_on.set()
        postpone(call, error)

    monkeypatch.setattr(OutgoingCall, "postpone", told)
    assert set(bed.pulled(client)["trainable"]) == {np.float32(0.0), np.float32(1.0)}


def damage(root: Path, step: int) -> None:
    """Flip a bit of the first bucket; the file's size stays."""
    path = next(each for each in sorted((root / step_name(step)).iterdir()) if "ps-0" in each.name)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def start(bed: Cluster, root: Path, *, by_hand: bool = False, **options: Any) -> tuple[Any, bool]:
    """Start a server that restores; returns the step or the error, and whether it had listened."""
    listened: list[bool] = []
    cluster_id, storage = bed.credentials.cluster_id, storage_at(root)
    guard = GenerationFence(storage, cluster_id, 0) if by_hand else None
    with PSServer(bed.servers[0].settings, bed.credentials, guard=guard) as server:
        server.bind_tcp("127.0.0.1")

        def listening() -> None:
            listened.append(True)

        like = RestoreOptions(**options)
        (end,) = run_all(lambda: server.start_restoring(root, like=like, listening=listening))
    return end, bool(listened)


@pytest.mark.socket
@pytest.mark.fault("F41")
def test_a_damaged_checkpoint_is_left_out_as_before_a_server_listened(
    bed: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    bed.workers(MANIFEST, filled(MANIFEST))
    for step in (1, 2):
        bed.clients[0].push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        bed.clients[0].save(tmp_path, step)
    damage(tmp_path, 2)
    assert start(bed, tmp_path) == (1, True)
    texts = [each.getMessage() for each in caplog.records]
    skipped = [each for each in texts if each.startswith("checkpoint step 2 in ")]
    assert len(skipped) == 1, "and it is said once"
    assert "is skipped" in skipped[0]
    assert "is damaged: the digest of bucket 0" in skipped[0]
    error, has_listened = start(bed, tmp_path, strict=True)
    assert has_listened
    assert isinstance(error, CheckpointError)
    assert "is damaged: the digest of bucket 0" in str(error)
    damage(tmp_path, 1)
    error, has_listened = start(bed, tmp_path)
    assert has_listened
    assert "no complete checkpoint in" in str(error)


@pytest.mark.socket
@pytest.mark.fault("F42")
def test_what_the_manifests_tell_is_found_before_a_server_takes_an_older_ones_place(
    bed: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    other = with_tables(table(), size=900, rule=ADD)
    bed.workers(other, filled(other))
    bed.clients[0].save(tmp_path, 1)
    error, has_listened = start(bed, tmp_path, by_hand=True, manifest=MANIFEST)
    assert not has_listened
    assert "the checkpoint is of another model" in str(error)
    error, has_listened = start(bed, tmp_path, by_hand=True, job="another")
    assert not has_listened
    assert "no complete checkpoint in" in str(error)
    (tmp_path / step_name(7)).mkdir()
    caplog.clear()
    assert start(bed, tmp_path, by_hand=True) == (1, True)
    texts = [each.getMessage() for each in caplog.records]
    assert sum(each.startswith("checkpoint step 7 in") for each in texts) == 1
    error, has_listened = start(bed, tmp_path, by_hand=True, strict=True)
    assert not has_listened
    assert "step 7 has no readable manifest" in str(error)


@pytest.mark.socket
@pytest.mark.fault("F41")
def test_a_damaged_checkpoint_of_another_model_hides_no_sound_one(bed: Cluster, tmp_path: Path):
    other = with_tables(table(), size=900, rule=ADD)
    bed.workers(MANIFEST, filled(MANIFEST))
    bed.clients[0].save(tmp_path, 1)
    bed.clients[0].close()
    with cluster("inproc", num_servers=2) as second:
        second.client().seed(other, filled(other))
        second.clients[0].save(tmp_path, 2)
    damage(tmp_path, 2)
    assert start(bed, tmp_path, manifest=MANIFEST) == (1, True)


@pytest.mark.socket
@pytest.mark.fault("F08")
def test_a_worker_that_finishes_while_a_server_restores_tells_it_what_it_lost(
    bed: Cluster, held: Callable[[], HeldRestore], monkeypatch: pytest.MonkeyPatch
):
    restore = held()
    postpone = OutgoingCall.postpone

    def noted(call: OutgoingCall, error: PSError) -> None:
        restore.goes_on.set()
        postpone(call, error)

    monkeypatch.setattr(OutgoingCall, "postpone", noted)
    bed.clients[0].finish()
    assert bed.clients[0].stats()[0].lost_updates == 1


@pytest.mark.socket
@pytest.mark.fault("F08")
def test_a_restore_without_end_is_waited_for_with_a_bound(
    bed: Cluster, held: Callable[[], HeldRestore]
):
    held()
    client = bed.client(timeout_s=0.8, reconnect_s=0.8)
    client._servers.times.restore_s = 1.0
    client._adopt(MANIFEST)
    began_s = time.monotonic()
    text = r"ps:0 was started again .* for \d+ s\. .* this call waited \d+ s for it"
    with pytest.raises(RequestTimeout, match=text):
        client.pull(filled(MANIFEST))
    assert time.monotonic() - began_s >= 1.0
    began_s = time.monotonic()
    with pytest.raises(RequestTimeout, match=text):
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
    took_s = time.monotonic() - began_s
    assert client.timeout_s < took_s, "so its sender waits for longest_push_s, not timeout_s"
    assert client.longest_push_s == client._servers.times.of_call().longest_s == 1.0
    patient = bed.client()
    patient.describe()  # connects, which a busy machine takes longer for
    with pytest.raises(RequestTimeout, match="ps:0 still restores its parameters"):
        patient.attach(timeout_s=2.0)


@pytest.mark.socket
@pytest.mark.fault("F12")
def test_a_server_that_cannot_restore_says_nothing_to_those_that_wait(
    bed: Cluster, held: Callable[[], HeldRestore], monkeypatch: pytest.MonkeyPatch
):
    """As one that was killed: another may take its place."""
    restore = held()
    client = bed.client(reconnect_s=0.3)
    client._adopt(MANIFEST)

    def fails(*_: Any, **__: Any) -> None:
        raise TableFull("no room")

    monkeypatch.setattr(handlers, "restore_into", fails)
    restore.goes_on.set()
    (failed,) = run_all(lambda: client.pull(filled(MANIFEST)))
    assert isinstance(failed, ServerGone)
    assert "could not be reached for" in str(failed)
    restore.end()
    assert [str(error) for error in restore.failed] == ["no room"]


@pytest.mark.socket
@pytest.mark.fault("F15")
def test_a_server_that_is_stopped_while_it_restores_ends_in_order(
    bed: Cluster, held: Callable[[], HeldRestore]
):
    restore = held()
    bed.servers[0].close()
    restore.end()
    assert not restore.failed
    assert bed.servers[0].phase == "CLOSED"


@pytest.mark.socket
@pytest.mark.fault("F10")
def test_a_save_that_removes_the_checkpoint_that_is_looked_for_is_the_one_restored(
    bed: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bed.workers(MANIFEST, filled(MANIFEST))
    bed.clients[0].save(tmp_path, 1)
    asked: list[int] = []

    def removed(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            bed.clients[0].save(tmp_path, 2, options=SaveOptions(keep=1))
        return load_chain(*arguments)

    with PSServer(bed.servers[0].settings, bed.credentials) as server:
        server.bind_tcp("127.0.0.1")

        def listening() -> None:
            monkeypatch.setattr(choice, "load_chain", removed)

        assert run_all(lambda: server.start_restoring(tmp_path, listening=listening)) == [2]
    assert len(asked) > 1


@pytest.mark.socket
@pytest.mark.fault("F10")
def test_a_save_that_removes_the_newest_checkpoint_while_it_is_verified_is_the_one_restored(
    bed: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not the best one, which stays; what was trained since would be disowned by its run."""
    bed.workers(MANIFEST, filled(MANIFEST))
    (saver, *_) = bed.clients
    saver.save(
        tmp_path, 1, options=SaveOptions(score=Score("val_loss", 0.5, higher_is_better=False))
    )
    saver.save(tmp_path, 2)
    verify_files = restore.verify_files
    looked_at: list[int] = []

    def replaced(storage: Storage, checkpoint: Checkpoint) -> None:
        looked_at.append(checkpoint.step)
        if len(looked_at) == 1:
            saver.save(tmp_path, 3, options=SaveOptions(keep=1))
        verify_files(storage, checkpoint)

    monkeypatch.setattr(restore, "verify_files", replaced)
    with PSServer(bed.servers[0].settings, bed.credentials) as server:
        server.bind_tcp("127.0.0.1")
        assert run_all(lambda: server.start_restoring(tmp_path)) == [3]
    assert looked_at == [2, 3], "and no older one is read in between"


@pytest.mark.socket
@pytest.mark.fault("F10")
def test_a_checkpoint_is_looked_for_once_unless_a_save_has_removed_it(
    bed: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To find one reads all of its files, which may take minutes."""
    bed.workers(MANIFEST, filled(MANIFEST))
    bed.clients[0].save(tmp_path, 1)
    looks: list[int] = []
    verified = restore.verified

    def found(*arguments: Any) -> Any:
        looks.append(1)
        return verified(*arguments)

    def removed(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(handlers, "restore_into", restore_into)
        bed.clients[0].save(tmp_path, 2, options=SaveOptions(keep=1))
        raise CheckpointError("step 1 has no readable manifest")

    monkeypatch.setattr(choice, "verified", found)
    for step in (1, 2):
        if step == 2:
            monkeypatch.setattr(handlers, "restore_into", removed)
        looks.clear()
        with PSServer(bed.servers[0].settings, bed.credentials) as server:
            server.bind_tcp("127.0.0.1")
            assert run_all(lambda: server.start_restoring(tmp_path)) == [step]
        assert len(looks) == step
