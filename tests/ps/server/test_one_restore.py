"""A checkpoint that the chief has servers restore is read once, though the request comes again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.errors import CheckpointError, ServerPhaseError, StaleGeneration
from ps.manifest.manifest import Hyper, WorkerRank
from ps.protocol.permissions import ServerPhase
from ps.server import handlers
from ps.server.request import Attempt
from ps.server.save_restore import restore_into
from tests.support.ps_cluster import ADD, WAIT_S, Cluster, cluster, filled, make_manifest, run_all
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)
MANIFEST = make_manifest(rule=ADD)


class HeldReading:
    """The reading of a checkpoint, which stands until `goes_on`; it may fail the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.goes_on, self.stands = threading.Event(), threading.Event()
        self.first_fails = False
        self._passes = restore_into
        monkeypatch.setattr(handlers, "restore_into", self._held)

    def _held(self, *arguments: Any, **options: Any) -> Any:
        self.num_begun += 1
        is_first = self.num_begun == 1
        self.stands.set()
        assert self.goes_on.wait(WAIT_S)
        if is_first and self.first_fails:
            raise CheckpointError("the disk is away")
        return self._passes(*arguments, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.push(filled(MANIFEST, 3.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 2)
    return tmp_path


@pytest.fixture
def bed() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def reading(bed: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReading]:
    held = HeldReading(monkeypatch)
    yield held
    held.goes_on.set()


def one_waits(bed: Cluster) -> None:
    turns = bed.servers[0]._service._restores
    wait_until(lambda: turns.num_waiting == 1, "the later request to wait")


@pytest.mark.parametrize("generation", [0, 1])
def test_a_request_that_comes_again_gets_what_the_first_one_has_read(
    bed: Cluster, saved: Path, reading: HeldReading, generation: int
):
    first, again = bed.client(), bed.client(0, generation)

    def repeat() -> int:
        assert reading.stands.wait(WAIT_S)
        return again.restore(saved)

    def go_on() -> None:
        one_waits(bed)
        assert bed.servers[0]._service._restores.by == Attempt(WorkerRank(0), generation)
        reading.goes_on.set()

    assert run_all(lambda: first.restore(saved), repeat, go_on) == [2, 2, None]
    assert reading.num_begun == 1
    again.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
    np.testing.assert_array_equal(bed.pulled(again)["trainable"], np.float32(5.0))


@pytest.fixture
def read_in_vain(bed: Cluster, saved: Path, reading: HeldReading) -> None:
    """A checkpoint that was read for a chief that is known to be gone by then."""

    def replace() -> None:
        assert reading.stands.wait(WAIT_S)
        bed.driver().worker_lost(0, 0)
        reading.goes_on.set()

    refused, _ = run_all(lambda: bed.client().restore(saved), replace)
    assert isinstance(refused, StaleGeneration)
    assert bed.servers[0].phase is ServerPhase.EMPTY


def test_what_was_read_for_a_replaced_chief_is_kept_for_the_next_one(
    bed: Cluster, saved: Path, reading: HeldReading, read_in_vain: None
):
    """Others know that a chief is gone long before its next process asks."""
    again = bed.client(0, 1)
    assert again.restore(saved) == 2
    assert reading.num_begun == 1
    again.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
    np.testing.assert_array_equal(bed.pulled(again)["trainable"], np.float32(5.0))


def test_another_step_is_read_in_its_place(
    bed: Cluster, saved: Path, reading: HeldReading, read_in_vain: None
):
    again = bed.client(0, 1)
    assert again.restore(saved, step=1) == 1
    np.testing.assert_array_equal(bed.pulled(again)["trainable"], np.float32(3.0))
    assert bed.servers[0]._service._restores.kept is None


def test_a_seed_takes_its_place(bed: Cluster, read_in_vain: None):
    again = bed.client(0, 1)
    again.seed(MANIFEST, filled(MANIFEST, 7.0))
    np.testing.assert_array_equal(bed.pulled(again)["trainable"], np.float32(7.0))
    assert bed.servers[0]._service._restores.kept is None


def test_a_restore_under_way_is_waited_for(bed: Cluster, saved: Path, reading: HeldReading):
    first, again = bed.client(), bed.client()

    def repeat() -> int:
        assert reading.stands.wait(WAIT_S)
        return again.restore(saved)

    def go_on() -> None:
        turns = bed.servers[0]._service._restores
        wait_until(lambda: turns.num_waiting == 1 or reading.num_begun == 2, "the later request")
        reading.goes_on.set()

    assert run_all(lambda: first.restore(saved), repeat, go_on) == [2, 2, None]
    assert reading.num_begun == 1


@pytest.mark.parametrize("is_same", [False, True])
def test_a_request_that_waited_for_one_that_failed_reads_itself(
    bed: Cluster, saved: Path, reading: HeldReading, is_same: bool
):
    reading.first_fails = True
    first, other = bed.client(), bed.driver()

    def repeat() -> int:
        assert reading.stands.wait(WAIT_S)
        return other.restore(saved, step=2 if is_same else 1)

    def go_on() -> None:
        one_waits(bed)
        reading.goes_on.set()

    failed, step, _ = run_all(lambda: first.restore(saved), repeat, go_on)
    assert isinstance(failed, CheckpointError)
    assert step == (2 if is_same else 1)
    assert reading.num_begun == 2


def test_another_checkpoint_than_the_one_that_is_read_is_refused_after_it(
    bed: Cluster, saved: Path, reading: HeldReading
):
    first, other = bed.client(), bed.driver()

    def repeat() -> int:
        assert reading.stands.wait(WAIT_S)
        return other.restore(saved, step=1)

    def go_on() -> None:
        one_waits(bed)
        reading.goes_on.set()

    step, refused, _ = run_all(lambda: first.restore(saved), repeat, go_on)
    assert step == 2
    assert isinstance(refused, ServerPhaseError)
    assert reading.num_begun == 1
