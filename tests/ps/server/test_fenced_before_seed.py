"""A dead attempt stays dead also while the servers know no parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ps.client.client import PSClient
from ps.config import ServerSettings
from ps.errors import StaleGeneration
from ps.manifest.manifest import Hyper, WorkerRank
from ps.protocol import messages
from ps.protocol.messages import RendezvousValues
from ps.server.lifecycle import Lifecycle
from ps.server.rendezvous import RendezvousBoard
from ps.server.request import Attempt
from ps.server.server import PSServer
from rpc.auth.handshake import Identity, Role
from rpc.errors import RemoteError
from tests.ps.server.test_request_matrix import codes_of
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    frozen_arrays,
    make_manifest,
    raw_call,
    run_all,
    succeeded,
    with_frozen,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.socket, pytest.mark.fault("F06"), pytest.mark.fault("F20")]

MANIFEST = make_manifest(1000, rule=ADD)
HYPER = Hyper(1.0)
ZERO, ONE = WorkerRank(0), WorkerRank(1)
BEFORE_VALUES: tuple[type, ...] = (
    messages.Compile, messages.Seed, messages.Restore, messages.Finish, messages.JoinRendezvous,
    messages.BringAnswers,
)  # fmt: skip
"""All that an EMPTY server does for a worker."""
REPLACED = r"generation 0 was replaced"


@pytest.fixture
def bed() -> Iterator[Cluster]:
    with cluster("tcp", num_servers=2, num_workers=2) as made:
        yield made


def meet(
    bed: Cluster, chief: PSClient, new: PSClient, meanwhile: Callable[[], Any] = lambda: None
) -> dict[int, bytes]:
    """Let the chief come to a rendezvous after worker 1, whom it does not wait for before."""
    board = bed.servers[0]._service._rendezvous._rendezvous

    def follow() -> dict[int, bytes]:
        wait_until(lambda: ONE in board._open.get("build/1", {}), "the value of worker 1")
        meanwhile()
        return chief.rendezvous("build/1", b"c", timeout_s=10)

    works = (lambda: new.rendezvous("build/1", b"n", timeout_s=10), follow)
    one, other = succeeded(run_all(*works))
    assert one == other
    return one


@pytest.mark.parametrize("kind", BEFORE_VALUES)
@pytest.mark.parametrize("how", ["fenced", "lost", "lost, newest known", "replaced"])
def test_an_empty_server_does_nothing_for_a_dead_attempt(bed: Cluster, kind: type, how: str):
    if how == "fenced":
        bed.driver().fence(0, 1)
    elif how == "replaced":
        with pytest.raises(RemoteError, match="still waits for worker 1"):
            raw_call(bed, 0, messages.JoinRendezvous("new", 0.01), generation=1)
    else:
        bed.driver().worker_lost(0, 0 if how == "lost" else None)
    caller = Identity(Role.WORKER, 0, 0)
    assert codes_of(bed, caller, [kind]) == {kind: StaleGeneration.code}
    assert {each.phase for each in bed.driver().describe()} == {"EMPTY"}


def test_the_servers_hold_the_values_of_the_new_chief_and_not_of_the_lost_one(bed: Cluster):
    old = bed.client(0)
    bed.driver().worker_lost(0, 0)
    with pytest.raises(StaleGeneration, match=REPLACED):
        old.seed(MANIFEST, filled(MANIFEST, 13.0))
    new = bed.client(0, generation=1)
    new.seed(MANIFEST, filled(MANIFEST, 1.0))
    new.attach()
    assert set(bed.pulled(new)["trainable"]) == {1.0}


def test_a_lost_chief_restores_nothing(bed: Cluster, tmp_path: Path):
    chief = bed.workers(MANIFEST, filled(MANIFEST, 13.0))[0]
    chief.save(tmp_path, 3)
    with cluster("tcp", num_servers=2, num_workers=2) as restarted:
        restarted.driver().worker_lost(0, 0)
        old = restarted.client(0)
        with pytest.raises(StaleGeneration, match=REPLACED):
            old.restore(tmp_path)
        new = restarted.client(0, generation=1)
        assert new.restore(tmp_path) == 3


def test_a_lost_worker_does_not_finish_for_its_next_attempt(bed: Cluster):
    old = bed.client(1)
    bed.driver().worker_lost(1, 0)
    with pytest.raises(StaleGeneration, match=REPLACED):
        old.finish()
    chief = bed.client(0)
    chief.seed(MANIFEST, filled(MANIFEST))
    new = bed.client(1, generation=1)
    new.attach()
    assert new.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1).clock == 1
    assert meet(bed, chief, new) == {0: b"c", 1: b"n"}


def test_a_lost_worker_is_at_no_rendezvous_and_nobody_waits_for_it(bed: Cluster):
    old, chief = bed.client(1), bed.client(0)
    bed.driver().worker_lost(1, 0)
    with pytest.raises(StaleGeneration, match=REPLACED):
        old.rendezvous("build/1", b"old", timeout_s=10)
    for key in ("build/1", "build/2"):
        assert chief.rendezvous(key, b"c", timeout_s=10) == {0: b"c"}


@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_late_report_of_an_old_attempt_leaves_what_the_new_one_has_brought(
    bed: Cluster, is_seeded: bool
):
    chief, new = bed.client(0), bed.client(1, generation=1)
    if is_seeded:
        chief.seed(MANIFEST, filled(MANIFEST))

    met = meet(bed, chief, new, lambda: bed.driver().worker_lost(1, 0))
    assert met == {0: b"c", 1: b"n"}


class Interrupted:
    """Lets a server lose a worker at the moment that a request of it passes a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._went_on = threading.Event()
        self.arrived = threading.Event()
        passes = getattr(owner, name)

        def held(*arguments: Any, **named: Any) -> Any:
            if not self.arrived.is_set():
                self.arrived.set()
                assert self._went_on.wait(60.0)
            return passes(*arguments, **named)

        monkeypatch.setattr(owner, name, held)

    def lose(self, server: PSServer, worker: WorkerRank, request: Callable[[], Any]) -> Any:
        """Make the request, and lose its worker while it is held."""

        def lose() -> None:
            assert self.arrived.wait(60.0)
            server.worker_lost(worker, 0)
            self._went_on.set()

        return run_all(request, lose)[0]


def test_a_chief_that_is_lost_while_its_seed_is_read_has_not_seeded(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    old = bed.client(0)
    service = bed.servers[0]._service
    held = Interrupted(monkeypatch, service, "_new_shard")
    end = held.lose(bed.servers[0], ZERO, lambda: old.seed(MANIFEST, filled(MANIFEST, 13.0)))
    assert isinstance(end, StaleGeneration)
    assert bed.client(1).describe()[0].phase == "EMPTY"


def test_a_chief_that_is_lost_while_a_checkpoint_is_read_has_not_restored(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bed.workers(MANIFEST, filled(MANIFEST, 13.0))[0].save(tmp_path, 3)
    with cluster("tcp", num_servers=2, num_workers=2) as restarted:
        old, server = restarted.client(0), restarted.servers[0]
        held = Interrupted(monkeypatch, server._service, "_new_shard")
        end = held.lose(server, ZERO, lambda: old.restore(tmp_path))
        assert isinstance(end, StaleGeneration)
        assert restarted.client(1).describe()[0].phase == "EMPTY"


def test_a_worker_that_is_lost_on_its_way_to_finish_has_not_finished(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    old = bed.client(1)
    held = Interrupted(monkeypatch, bed.servers[0]._service.life, "finish_unfilled")
    assert isinstance(held.lose(bed.servers[0], ONE, old.finish), StaleGeneration)
    new = bed.client(1, generation=1)
    assert meet(bed, bed.client(0), new) == {0: b"c", 1: b"n"}


def test_a_worker_that_is_lost_on_its_way_to_a_rendezvous_is_not_there(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    old = bed.client(1)
    held = Interrupted(monkeypatch, bed.servers[0]._service._rendezvous, "rendezvous")
    end = held.lose(bed.servers[0], ONE, lambda: old.rendezvous("k", b"old", timeout_s=10))
    assert isinstance(end, StaleGeneration)
    assert bed.client(0).rendezvous("k", b"c", timeout_s=10) == {0: b"c"}


def test_what_a_worker_that_is_lost_meanwhile_brings_is_not_taken(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    old, board = bed.client(1), bed.servers[0]._service._rendezvous
    old._rendezvous_client._passed.add("k", RendezvousValues((0, 1), (1, 1)), b"ab")
    held = Interrupted(monkeypatch, board, "bring")
    held.lose(bed.servers[0], ONE, old.describe)
    assert board._rendezvous.result("k") is None


def test_a_chief_that_is_lost_while_its_frozen_weights_are_read_has_brought_none(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """The servers had values from a checkpoint, which holds no frozen weights."""
    old = bed.client(0)
    old.seed(MANIFEST, filled(MANIFEST, 1.0))
    manifest, server = with_frozen(MANIFEST), bed.servers[0]
    values = {**filled(manifest), **frozen_arrays(manifest, 3)}
    held = Interrupted(monkeypatch, server._service, "_take_changes")
    end = held.lose(server, ZERO, lambda: old.seed(manifest, values))
    assert isinstance(end, StaleGeneration)
    assert not server._service.life.loaded().manifest.frozen_groups


def test_no_process_of_a_worker_arrives_while_a_loss_is_told():
    """The value of a newer one would go with the old one's."""
    board = RendezvousBoard(2)
    could_arrive: list[bool] = []

    def look() -> None:
        could_arrive.append(board._changed.acquire(blocking=False))
        if could_arrive[0]:
            board._changed.release()

    def tell() -> bool:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return True

    board.lose(ONE, tell)
    assert could_arrive == [False]


def test_an_attempt_is_known_from_its_first_request_with_and_without_a_shard():
    life = Lifecycle(ServerSettings(rank=0, num_servers=1, num_workers=2))
    life.hear(Attempt(ONE, 2))
    assert not life.lose(ONE, 1), "a newer one is at work"
    life.hear(Attempt(ONE, 2))
    assert life.lose(ONE, 2)
    assert not life.lose(ONE, 2), "that is known"
    for generation in (1, 2):
        with pytest.raises(StaleGeneration, match="accepts 3 and newer"):
            life.hear(Attempt(ONE, generation))
    life.hear(Attempt(ZERO, 0))
