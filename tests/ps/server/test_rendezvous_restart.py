"""ps:0 is started again between rendezvous: nobody waits for what the others have passed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ps.client import rendezvous as rendezvous_module
from ps.client.client import PSClient
from ps.errors import PSSettingsError, ServerGone, ServerPhaseError
from ps.manifest.manifest import SGD, Hyper
from ps.protocol import passed as passed_module
from tests.support.ps_cluster import (
    Cluster,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    run_all,
    succeeded,
)
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(600, rule=SGD(), consistency="sync")
GRADS = random_arrays(MANIFEST, 1)
HYPER = Hyper(0.1)
MEET_S = WAIT_S - 10.0
"""So that its error is shown, and not that of `run_all`."""


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


@pytest.mark.fault("F08")
def test_a_worker_waits_no_longer_for_a_server_that_is_gone_than_for_any_other_call(monkeypatch):
    monkeypatch.setattr(rendezvous_module, "PROBE_PERIOD_S", 0.2)
    with cluster("tcp", num_workers=2) as bed:
        client = bed.client(reconnect_s=1.0)
        client.seed(MANIFEST, filled(MANIFEST))
        bed.servers[0].close(0.5)
        begun_s = time.monotonic()
        with pytest.raises(ServerGone, match=r"ps:0 at .* could not be reached for 1 s"):
            client.rendezvous("epoch", b"", timeout_s=60.0)
        assert time.monotonic() - begun_s < 20.0


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

        found, seen = run_all(come, go_on)
        then, now = {0: b"0", 1: b"1"}, {0: b"0", 1: b"late"}
        assert found == [then, then, now, now]
        assert seen == [now, now]


@pytest.mark.fault("F01", "F08")
def test_a_worker_that_asks_for_nothing_brings_the_values_that_a_late_one_waits_for(tmp_path: Path):
    with trained(tmp_path) as (bed, (one, other)):
        other.close()
        bed.restart(0, tmp_path)
        late = bed.client(1, generation=1)
        found: list[dict[int, bytes]] = []

        def come() -> None:
            found.append(late.rendezvous("build", b"late", timeout_s=MEET_S))

        def bring() -> None:
            wait_until(lambda: bool(bed.servers[0].stats().open_rendezvous), "it waits")
            one.bring_answers()

        succeeded(run_all(come, bring))
        assert found == [{0: b"0", 1: b"1"}]


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


@pytest.mark.fault("F01", "F08")
def test_a_worker_that_waits_where_the_others_have_been_is_refused_if_the_values_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(passed_module, "MAX_KEPT_ANSWERS", 1)
    monkeypatch.setattr(rendezvous_module, "PROBE_PERIOD_S", MEET_S)  # it asks but once
    with trained(tmp_path) as (bed, (one, other)):
        other.close()
        bed.restart(0, tmp_path)
        late = bed.client(1, generation=1)
        board = bed.servers[0]._service._rendezvous

        def follow() -> None:
            wait_until(lambda: bool(board.open_now()), "the late worker waits")
            one.describe()

        found, _ = run_all(partial(late.rendezvous, "build", b"late", timeout_s=20.0), follow)
        assert isinstance(found, ServerPhaseError)
        assert "'build' is over, and its values are no longer kept" in str(found)


@pytest.mark.fault("F01", "F08")
def test_what_a_replaced_attempt_has_passed_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with trained(tmp_path) as (bed, (_, old)):
        server = bed.restart(0, tmp_path)
        bed.driver().fence(1, 1)
        old.describe()
        assert server._service._rendezvous._rendezvous.result("build") is None
        assert "ps:0 refused the answers of past rendezvous" in caplog.text


@pytest.mark.fault("F08")
def test_workers_that_disagree_on_what_they_passed_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with trained(tmp_path) as (bed, (one, other)):
        kept = other._rendezvous_client._passed._passed
        passed, _ = kept.get("build") or pytest.fail("it has passed that")
        kept._known["build"] = (passed, b"xy")
        server = bed.restart(0, tmp_path)
        one.describe()
        other.describe()
        assert server._service._rendezvous._rendezvous.result("build") == {0: b"0", 1: b"1"}
        (told,) = [each for each in caplog.messages if "other values" in each]
        assert told.startswith("worker 1 has passed rendezvous 'build' with other values")
        assert "resume it from its last checkpoint" in told


@pytest.mark.fault("F01")
def test_who_waits_for_long_says_for_whom_and_so_does_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(rendezvous_module, "PROBE_PERIOD_S", 0.6)  # half of its least wait
    monkeypatch.setattr(rendezvous_module, "TELL_PERIOD_S", 0.3)
    caplog.set_level(logging.WARNING)
    with cluster("tcp", num_workers=3) as bed:
        clients = bed.workers(MANIFEST, filled(MANIFEST))

        def told() -> list[str]:
            return [each for each in caplog.messages if "rendezvous 'epoch'" in each]

        def come_late() -> None:
            wait_until(lambda: len(told()) > 1, "worker 0 has said it twice", timeout_s=20.0)
            (each,) = bed.driver().stats()[0].open_rendezvous
            assert (each.key, each.missing) == ("epoch", (1, 2))
            assert each.waited_s > 0.3
            assert str(each).startswith("rendezvous 'epoch' waits for worker 1, 2 since ")
            for late in clients[1:]:
                threading.Thread(
                    target=late.rendezvous, args=("epoch", b""), kwargs={"timeout_s": MEET_S}
                ).start()

        meet = partial(clients[0].rendezvous, "epoch", b"", timeout_s=30.0)
        found, end = run_all(meet, come_late)
        assert end is None, end
        assert sorted(found) == [0, 1, 2]
        assert "for worker 1, 2, and waits" in told()[0]
        assert not bed.driver().stats()[0].open_rendezvous


def test_a_key_that_ends_like_a_count_is_another_rendezvous():
    with cluster(num_workers=2) as bed:
        clients = [bed.client(0), bed.client(1)]
        for at, key in enumerate(("a", "a", "a#1", "a", "a#1", "a##1", "a#", "a#")):

            def meet(client: PSClient, key: str = key, at: int = at) -> dict[int, bytes]:
                return client.rendezvous(key, b"%d" % at, timeout_s=MEET_S)

            found = succeeded(run_all(*(partial(meet, each) for each in clients)))
            assert found == [{0: b"%d" % at, 1: b"%d" % at}] * 2, key


@pytest.mark.parametrize(
    ("longest", "too_long"), [("k" * 240, "k" * 241), ("#" * 120, "#" * 121), ("k", "")]
)
def test_a_key_that_is_taken_once_is_taken_again(longest: str, too_long: str):
    with cluster() as bed:
        client = bed.client()
        for use in range(2):
            value = b"%d" % use
            assert client.rendezvous(longest, value, timeout_s=MEET_S) == {0: value}
        with pytest.raises(PSSettingsError, match=r"has 1 to 240 characters, a # counting twice"):
            client.rendezvous(too_long, b"", timeout_s=MEET_S)
