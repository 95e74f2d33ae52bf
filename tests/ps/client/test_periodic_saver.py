"""A save to which nobody gives a number: nothing is missing in the newest step, none is made twice.

The clock does not show what has changed: rows, metadata and assigned values change without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ps.checkpoint.choice import RestoreOptions, latest, read_manifest, steps_on_disk
from ps.checkpoint.format import step_of
from ps.checkpoint.storage import storage_at
from ps.checkpoint.writer import write_shard
from ps.client.client import PSClient
from ps.client.saving.periodic_saver import Period, PeriodicSaver
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError, PSSettingsError, ServerGone
from ps.manifest.manifest import SGD, Adagrad, Hyper, Manifest
from ps.metadata import pushed
from ps.server.server import PSServer
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest, random_arrays
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]  # seconds, cold

HYPER = Hyper(1.0)
MANIFEST = make_manifest(rule=ADD)
DELTAS = SaveOptions(full_every=4)


def steps(root: Path) -> list[int]:
    return steps_on_disk(storage_at(root))


def saved(client: PSClient, root: Path, options: SaveOptions = DELTAS) -> int:
    """Save without a number; returns the step."""
    step = step_of(Path(client.save(root, None, options=options)).name)
    assert step is not None
    return step


def push(client: PSClient, value: float = 1.0) -> None:
    client.push(filled(client.manifest, value), hyper=HYPER, rows=1)


class Everything:
    """What a client can do to one worker's cluster, and what the servers hold then."""

    def __init__(self, client: PSClient, seed: int) -> None:
        self.client = client
        self.random = Random(seed)
        self.changes: dict[str, Callable[[], object]] = {
            "push": lambda: push(client, self.fresh()),
            "push with metadata": self.push_with_metadata,
            "rows": self.push_rows,
            "assign": lambda: client.assign(filled(client.manifest, self.fresh())),
            "metadata": lambda: client.set_metadata("at", self.fresh()),
        }
        self.looks: dict[str, Callable[[], object]] = {
            "pull": lambda: client.pull(filled(client.manifest)),
            "lookup": lambda: client.tables.lookup({"user": np.arange(9)}),
            "scan": lambda: list(client.tables.scan("user")),
            "the same metadata": lambda: client.set_metadata("at", client.metadata().get("at")),
            "no metadata": lambda: client.set_metadata("never", None),
            "stats": client.stats,
            "away": lambda: (client.leave(), client.join()),
        }
        # Only at a barrier does it end a step.
        calls = self.changes if client.manifest.has_barrier else self.looks
        calls["null push"] = client.push_null

    def fresh(self) -> float:
        return self.random.uniform(1, 2)

    def push_with_metadata(self) -> None:
        arrays = filled(self.client.manifest, self.fresh())
        self.client.push(arrays, hyper=HYPER, rows=1, metadata=pushed("at", self.fresh()))

    def push_rows(self) -> None:
        ids = np.array(self.random.sample(range(100), 5))
        self.client.tables.push({"user": (ids, ones(ids, value=self.fresh()))}, hyper=HYPER)

    def held(self) -> tuple[Any, ...]:
        client = self.client
        into = filled(client.manifest)
        clock = client.pull(into).clock
        scanned = client.tables.scan("user", with_slots=True)
        rows = {
            int(i): r.tobytes() for ids, rows in scanned for i, r in zip(ids, rows, strict=True)
        }
        return clock, into["trainable"].tobytes(), rows, client.metadata()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_step_is_made_if_and_only_if_something_has_changed(
    tmp_path: Path, consistency: str, seed: int
):
    manifest = with_tables(table(rule=Adagrad()), rule=SGD(), consistency=consistency)
    random = Random(seed)
    roots = {"a": tmp_path / "a", "b": tmp_path / "b"}
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, random_arrays(manifest, seed))
        all_of_it = Everything(client, seed)
        newest = {name: saved(client, root) for name, root in roots.items()}
        has_changed = dict.fromkeys(roots, False)
        for _ in range(50):
            is_change = random.random() < 0.4
            chosen = all_of_it.changes if is_change else all_of_it.looks
            what = random.choice(sorted(chosen))
            chosen[what]()
            if is_change:
                has_changed = dict.fromkeys(roots, True)
            name = random.choice(sorted(roots))
            step = saved(client, roots[name])
            assert (step > newest[name]) == has_changed[name], what
            newest[name], has_changed[name] = step, False
        last = {name: saved(client, root) for name, root in roots.items()}
        before = all_of_it.held()
    for name, root in roots.items():
        with cluster(num_servers=random.choice((1, 2, 3))) as bed:
            client = bed.client()
            assert client.restore(root) == last[name]
            assert Everything(client, seed).held() == before
            own = saved(client, root)
            assert own > last[name], "a restart of this run's servers needs a save of this run"
            assert saved(client, root) == own


@pytest.mark.parametrize("what", ["push", "rows", "assign", "metadata"])
def test_what_changes_while_a_save_is_written_is_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    manifest = with_tables(table(), rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()
        assert saved(saver, tmp_path) == 0
        push(client)

        def after_a_change(*arguments: Any, **settings: Any) -> Any:
            monkeypatch.undo()
            Everything(client, 0).changes[what]()
            return write_shard(*arguments, **settings)

        monkeypatch.setattr("ps.server.save_restore.write_shard", after_a_change)
        assert saved(saver, tmp_path) == 1
        assert saved(saver, tmp_path) == 2
        before = Everything(client, 0).held()
    with cluster() as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        assert Everything(client, 0).held() == before


def test_a_restore_that_has_left_rows_out_is_not_what_was_saved(tmp_path: Path):
    full = table(max_rows=64, when_full="lru")
    manifest = Manifest(groups=(), tables=(full,))
    with cluster() as bed:
        (client,) = bed.workers(manifest, {})
        client.tables.push({"user": (np.arange(64), ones(np.arange(64)))}, hyper=HYPER)
        assert saved(client, tmp_path) == 0
    with cluster(num_servers=3) as bed:
        client = bed.client()
        client.restore(tmp_path)
        held = sum(ids.size for ids, _ in client.tables.scan("user"))
        assert held < 64, "ids are not dealt evenly"
        assert saved(client, tmp_path) == 1


def test_rows_alone_are_saved_again_and_again(tmp_path: Path):
    manifest = Manifest(groups=(), tables=(table(),))
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, {})
        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), bed.driver)
        for start in range(0, 30, 10):
            ids = np.arange(start, start + 10)
            client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
            assert saver.save_now() == saver.save_now() == ""
    assert steps(tmp_path) == [2, 1, 0]
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        found = np.concatenate([ids for ids, _ in client.tables.scan("user")])
        assert sorted(found.tolist()) == list(range(30))


def test_a_save_that_is_asked_for_holds_no_part_of_a_batch(tmp_path: Path):
    manifest = Manifest(groups=(), tables=(table(),))
    with cluster(num_servers=1) as bed:
        (client,) = bed.workers(manifest, {})
        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), bed.driver)
        client.tables.push({"user": (np.arange(3), ones(np.arange(3)))}, hyper=HYPER)
        saver.hold("a batch")
        saver.hold("one of another feed")
        assert "a micro-batch is in progress" in saver.save_between()
        saver.release("a batch")
        assert "a micro-batch is in progress" in saver.save_between()
        assert steps(tmp_path) == []
        saver.release("one of another feed")
        assert saver.save_between() == ""
        assert len(steps(tmp_path)) == 1


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
@pytest.mark.parametrize("is_seeded", [True, False])
def test_a_process_without_threads_or_memory_for_a_moment_saves_later(
    tmp_path: Path, error: Exception, is_seeded: bool, caplog: pytest.LogCaptureFixture
):
    failed = threading.Event()

    def find() -> PSClient:
        if is_failing and not failed.is_set():
            failed.set()
            raise error
        return bed.driver()

    is_failing = not is_seeded
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=0.1), find)
        saver.start()
        if is_seeded:
            wait_until(lambda: saver.saved_step >= 0, "the first save")
            is_failing = True
        push(client)
        assert failed.wait(20.0)
        expected = 1 + is_seeded
        wait_until(lambda: len(steps(tmp_path)) == expected, "a save after the failure")
        saver.close()
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("last", [True, False])
def test_a_training_that_ends_before_the_saver_looks_again_is_saved(tmp_path: Path, last: bool):
    tried = threading.Event()

    def find() -> PSClient:
        if not tried.is_set():
            tried.set()
            raise ServerGone("it starts")
        return bed.driver()

    with cluster() as bed:
        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), find)
        saver.start()
        assert tried.wait(20.0)
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        push(client)
        saver.close(last=last)
        assert steps(tmp_path) == ([1] if last else [])


def test_a_saver_whose_servers_hold_nothing_ends_without_a_save(tmp_path: Path):
    with cluster() as bed:
        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), bed.driver)
        saver.start()
        assert saver.close() == "", "there was nothing to save"
        assert steps(tmp_path) == []


@pytest.mark.parametrize(
    "error", [ServerGone("ps:1 is away"), PSSettingsError("ps:1 is of another cluster")]
)
@pytest.mark.parametrize("last", [True, False])
def test_a_saver_that_never_came_to_its_servers_says_so_at_the_end(
    tmp_path: Path, error: Exception, last: bool, caplog: pytest.LogCaptureFixture
):
    tried = threading.Event()

    def find() -> PSClient:
        tried.set()
        raise error

    saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), find)
    saver.start()
    assert tried.wait(20.0)
    told = saver.close(last=last)
    is_wanted = last or isinstance(error, PSSettingsError)  # which ends all saves when it comes
    assert told == (f"{type(error).__name__}: {error}" if is_wanted else "")
    assert (str(error) in caplog.text) == is_wanted


@pytest.mark.fault("F08")
def test_a_saver_without_one_of_its_servers_says_at_the_end_that_nothing_is_saved(tmp_path: Path):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        push(client)
        bed.servers[1].close()
        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), bed.driver)
        saver.start()
        assert "ps:1" in saver.close()
    assert steps(tmp_path) == []


def test_a_number_of_its_own_comes_after_those_that_users_gave(tmp_path: Path):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        push(client)
        client.save(tmp_path, 1000)
        assert saved(client, tmp_path) == 1000
        push(client)
        kept = SaveOptions(keep=1)
        assert saved(client, tmp_path, kept) == 1001
        with pytest.raises(CheckpointError, match="step 1001 exists"):
            client.save(tmp_path, 1001)
        assert client.save(tmp_path, 1002).endswith("step-1002"), "asked for"
        push(client)
        assert saved(client, tmp_path, kept) == 1003
    assert steps(tmp_path) == [1003]


def test_what_is_not_whole_is_not_in_the_way(tmp_path: Path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("{}")
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        push(client)
        assert saved(client, tmp_path) == 2
        (tmp_path / "step-2" / "ps-1.data").unlink()
        assert saved(client, tmp_path, SaveOptions()) == 3, (
            "what can no longer be restored is no save"
        )
    assert latest(tmp_path) == 3


def test_a_number_that_no_manifest_can_hold_is_refused(tmp_path: Path):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        largest = 2**62 - 1
        client.save(tmp_path, largest)
        push(client)
        for step in (largest + 1, None):
            with pytest.raises(CheckpointError, match=rf"in 0\.\.{largest}, got {largest + 1}"):
                client.save(tmp_path, step)
    assert steps(tmp_path) == [largest] == [latest(tmp_path)]


@pytest.mark.fault("F41")
def test_a_run_that_went_on_from_an_older_step_saves_at_once_and_is_preferred(tmp_path: Path):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        for _ in range(2):
            push(client)
            saved(client, tmp_path)
    with cluster() as bed:
        client = bed.client()
        assert client.restore(tmp_path, step=1) == 1
        assert saved(client, tmp_path) == 3, "else a restore would take step 2"
        assert read_manifest(tmp_path).passed_over == (2,)
        assert saved(client, tmp_path) == 3
        push(client, 5.0)
        assert saved(client, tmp_path) == 4
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path, like=RestoreOptions(reset_optimizer=True))
        assert set(bed.pulled(client)["trainable"].tolist()) == {6.0}
        assert saved(client, tmp_path) == 5, "without the optimizer's state it is another one"


@pytest.mark.fault("F08")
def test_a_server_that_has_gone_back_counts_as_changed(tmp_path: Path):
    """The numbers by which servers tell changes begin anew with each; they are never mixed up."""
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        chief = bed.driver()
        chief.attach()
        for _ in range(3):
            push(client)
            saved(chief, tmp_path)
        assert saved(chief, tmp_path) == 3
        old = bed.servers[1]
        name = old.endpoint.inproc
        for step, expected in ((3, 3), (2, 4)):
            bed.servers[1].close()
            bed.servers[1] = PSServer(old.settings, bed.credentials)
            bed.servers[1].bind_inproc(name)
            assert bed.servers[1].start_restoring(tmp_path, step=step) == step
            if step == 3:
                assert saved(chief, tmp_path) == expected, "gone back to just that save"
                continue
            with pytest.raises(CheckpointError, match="cannot add to step 3: a server has resumed"):
                saved(chief, tmp_path)
            assert saved(chief, tmp_path) == expected
    assert latest(tmp_path) == 4
    assert read_manifest(tmp_path).base is None
