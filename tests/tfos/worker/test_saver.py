"""When the chief saves, what it goes on from, and which settings cannot work."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.checkpoint.choice import latest, read_manifest, steps_on_disk
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.client.client import PSClient
from ps.client.saving.periodic_saver import ASKED_TRIES, Period, PeriodicSaver
from ps.errors import CheckpointError, ServerPhaseError, ServerRestoring
from ps.manifest.manifest import Hyper
from ps.server.handlers import Service
from tests.support.hostile_names import PATHS_THAT_LEAD_ASTRAY
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.waiting import wait_until
from tfos.config import Checkpoints
from tfos.control.messages import BatchReport, TrainBatch
from tfos.errors import SettingsError
from tfos.files.paths import OutputPlace, output_directory
from tfos.fit_place import FitPlace
from tfos.worker.saver import ChiefSaver
from tfos.worker.trained.feeds import TrainedFeeds

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)


def plan(root: Path, **changes) -> Checkpoints:
    return Checkpoints(directory=str(root), **{"every_s": 3600.0, **changes})


def test_it_saves_once_seeded_then_by_steps_and_at_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        saver = ChiefSaver(plan(tmp_path, every_steps=3, keep=2), bed.client)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "the first save")
        for _ in range(3):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        wait_until(lambda: latest(tmp_path) == 3, "the save after three steps")
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        saver.close()
        saver.close()
    assert latest(tmp_path) == 4
    assert read_manifest(tmp_path).job == bed.credentials.cluster_id
    assert not (tmp_path / "lease.json").exists()


def test_a_save_and_the_restore_of_a_run_have_the_plans_time(tmp_path: Path, monkeypatch):
    told = []

    def timed(name):
        call = getattr(PSClient, name)

        def timed_call(*args, timeout_s, **more):
            told.append((name, timeout_s))
            return call(*args, timeout_s=timeout_s, **more)

        monkeypatch.setattr(PSClient, name, timed_call)

    timed("save")
    timed("restore")
    manifest = make_manifest(rule=ADD)
    for resume in (False, True):
        with cluster("inproc") as bed:
            saver = ChiefSaver(plan(tmp_path, timeout_s=7200, resume=resume), bed.client)
            saver.start()
            client = bed.client()
            client.seed(manifest, filled(manifest))
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            saver.close()
    assert set(told) == {("save", 7200.0), ("restore", 7200.0)}


@pytest.mark.fault("F40")
def test_a_directory_in_which_nothing_can_be_written_is_refused_before_anything_is_trained(
    tmp_path: Path,
):
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(Path("/proc/none")), bed.client)
        with pytest.raises(CheckpointError, match=r"no checkpoint can be saved in /proc/none: "):
            saver.start()
        saver.close()
        saver = ChiefSaver(plan(tmp_path / "new"), bed.client)
        saver.start()
        assert not list((tmp_path / "new").iterdir())
        saver.close()


def test_it_saves_by_time_and_goes_on_after_a_save_that_failed(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    publish = LocalStorage.publish

    def refuses_step_1(self, directory, target):
        if target == "step-1":
            raise OSError(errno.EACCES, "Permission denied")
        publish(self, directory, target)

    manifest = make_manifest(rule=ADD)
    monkeypatch.setattr(LocalStorage, "publish", refuses_step_1)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path, every_s=0.05), bed.client)
        saver._saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(lambda: 0 in steps_on_disk(storage_at(tmp_path)), "the first save")
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        wait_until(lambda: "at clock 1 were not saved: " in caplog.text, "the save that fails")
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        wait_until(lambda: latest(tmp_path) == 2, "a later save")
        saver.close()


def test_what_changes_after_the_last_update_is_in_the_last_save(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        saver = ChiefSaver(plan(tmp_path, every_steps=1), bed.client)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        wait_until(lambda: latest(tmp_path) == 1, "a save of the last update")
        client.assign(filled(manifest, 7.0))
        client.set_metadata("where", "at the end")
        saver.close()
    with cluster("inproc") as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        assert set(bed.pulled(client)["trainable"].tolist()) == {7.0}
        assert client.metadata() == {"where": "at the end"}


def test_steps_are_counted_by_the_clock_whatever_the_last_save_was_called(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        bed.workers(manifest, filled(manifest))[0].save(tmp_path, 1000)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path, every_steps=2, resume=True), bed.client)
        saver.start()
        wait_until(lambda: latest(tmp_path) == 1001, "the run's own first save")
        client = bed.client()
        client.attach()
        for _ in range(2):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        wait_until(lambda: latest(tmp_path) == 1002, "the save after two updates")
        saver.close()
    assert latest(tmp_path) == 1002


@pytest.mark.fault("F40")
def test_a_save_that_failed_is_tried_again_long_before_the_next_is_due(
    tmp_path: Path, monkeypatch, caplog
):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    monkeypatch.setattr("ps.client.saving.periodic_saver._RETRY_S", 0.02)
    names, away = LocalStorage.names, [True, False, True]

    def names_of_a_disk_that_is_away(self, directory=""):
        if threading.current_thread().name == "tfos-saver" and away and away.pop():
            raise OSError(errno.EIO, "Input/output error")
        return names(self, directory)

    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path), bed.client)
        saver.start()
        monkeypatch.setattr(LocalStorage, "names", names_of_a_disk_that_is_away)
        bed.client().seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "the third attempt")
        saver.close()
    causes = re.findall("at clock 0 were not saved: .*Input/output error", caplog.text)
    assert len(causes) == 2


@pytest.mark.fault("F40")
def test_what_fails_before_the_first_save_and_passes_is_told_and_tried_again(
    tmp_path: Path, monkeypatch, caplog
):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    manifest = make_manifest(rule=ADD)
    failures: list[Exception] = [ServerPhaseError("ps:1 is STOPPING")] * 2
    failures += [CheckpointError("cannot read epoch-1.json")]
    with cluster("inproc") as bed:
        client = bed.client()
        client.seed(manifest, filled(manifest))

        def found() -> PSClient:
            if failures:
                raise failures.pop()
            return client

        saver = PeriodicSaver(Period(directory=str(tmp_path), every_s=3600.0), found)
        saver.start()
        wait_until(lambda: latest(tmp_path) == 0, "a save")
        saver.close()
    told = [line for line in caplog.messages if line.startswith("nothing is saved yet: ")]
    assert [line.rpartition(": ")[2] for line in told] == [
        "cannot read epoch-1.json",
        "ps:1 is STOPPING",
    ]


def has_step(root: Path, step: int) -> bool:
    return latest(root) == step


class Refusals:
    """Refuse the next saves at their commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        publish = LocalStorage.publish

        def refused(storage, directory, target):
            if self.left > 0:
                self.left -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            publish(storage, directory, target)

        monkeypatch.setattr(LocalStorage, "publish", refused)
        monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
        monkeypatch.setattr("ps.client.saving.periodic_saver._RETRY_S", 0.001)


@pytest.mark.fault("F40")
def test_the_last_save_is_tried_as_often_as_one_that_is_asked_for(tmp_path: Path, monkeypatch):
    refusals = Refusals(monkeypatch)
    manifest = make_manifest(rule=ADD)
    for left, told in ((ASKED_TRIES - 1, ""), (ASKED_TRIES, "No space left")):
        directory = tmp_path / str(left)
        with cluster("inproc") as bed:
            saver = ChiefSaver(plan(directory), bed.client)
            saver.start()
            client = bed.client()
            client.seed(manifest, filled(manifest))
            wait_until(partial(has_step, directory, 0), "the first save")
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            refusals.left = left
            error = saver.close()
            assert told in error
            assert bool(error) is bool(told)
            assert latest(directory) == (0 if told else 1)


@pytest.mark.fault("F40")
def test_periodic_saves_that_fail_again_and_again_are_told_once_until_one_succeeds(
    tmp_path: Path, monkeypatch
):
    refusals = Refusals(monkeypatch)
    told: list[str] = []
    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path, every_steps=1), bed.client)
        saver.on_unsaved(told.append)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "the first save")
        for step, (left, num_told) in enumerate(
            [(ASKED_TRIES - 1, 0), (ASKED_TRIES + 3, 1), (ASKED_TRIES, 2)], start=1
        ):
            refusals.left = left
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            wait_until(partial(has_step, tmp_path, step), "a save after failures")
            assert len(told) == num_told
        saver.close()
    assert all("No space left" in each for each in told)


@pytest.mark.fault("F40")
def test_a_refused_rename_is_told_with_its_path_and_training_goes_on(
    tmp_path: Path, monkeypatch, caplog
):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    monkeypatch.setattr("ps.client.saving.periodic_saver._RETRY_S", 0.02)
    publish, refusals = LocalStorage.publish, [True, False, True, False]

    def refused_in_turn(self, directory, target):
        if refusals and refusals.pop():
            raise OSError(errno.EACCES, "Permission denied")
        publish(self, directory, target)

    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        monkeypatch.setattr(LocalStorage, "publish", refused_in_turn)
        saver = ChiefSaver(plan(tmp_path, every_steps=1), bed.client)
        refusals.pop()
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "the save after the refused one")
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        wait_until(lambda: latest(tmp_path) == 1, "the next step")
        saver.close()
    where = rf"cannot commit {tmp_path}/\.tmp-[0-9a-f-]+/manifest\.json: Permission denied"
    assert re.search(
        f"at clock 0 were not saved: {where}.*; training goes on, no save", caplog.text
    )
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.fault("F08")
def test_it_saves_below_a_step_that_a_restarted_server_could_not_go_on_from(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.02)
    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path, every_s=0.05), bed.client)
        # damaged since, and every server started again from an older one
        saver._saver.start(saved_step=900)
        bed.client().seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "a save")
        saver.close()


@pytest.mark.fault("F08")
def test_it_tells_the_starts_that_a_save_holds_from_those_that_answer_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stands, goes_on = threading.Event(), threading.Event()
    restored = Service._new_dense

    def held(*arguments: Any) -> Any:
        stands.set()
        assert goes_on.wait(20.0)
        return restored(*arguments)

    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        saver = ChiefSaver(plan(tmp_path), bed.client)
        bed.client().seed(manifest, filled(manifest))
        assert saver.server_generations() == (0, 0)
        assert saver.restored_steps() == (-1, -1)
        assert saver.save_now() == ""
        monkeypatch.setattr(Service, "_new_dense", held)
        restart = partial(bed.restart, 1, tmp_path, generation=1)
        restarting = threading.Thread(target=restart, daemon=True)
        restarting.start()
        assert stands.wait(20.0)
        assert saver.saved_generations == (0, 0)
        assert saver.server_generations() == (0, 1)
        with pytest.raises(ServerRestoring, match="ps:1 is RESTORING"):
            saver.restored_steps()
        goes_on.set()
        restarting.join(20.0)
        assert saver.restored_steps() == (-1, saver.saved_step)
        saver.close()


@pytest.mark.fault("F08")
@pytest.mark.parametrize("restarts", ["before its save", "within and after", "after its save"])
def test_a_batch_is_lost_by_a_restart_before_its_save_alone(tmp_path: Path, restarts: str):
    manifest = make_manifest(rule=ADD)
    said: list[BatchReport] = []
    with cluster("inproc", num_servers=2) as bed:
        saver, client = ChiefSaver(plan(tmp_path), bed.client), bed.client()
        client.seed(manifest, filled(manifest))
        assert saver.save_now() == ""
        feeds = TrainedFeeds(said.append)
        feeds.follow("input")
        feeds.begin(saver, lambda: client)
        feeds.expect(TrainBatch("input", 1, 0, "q", 5, True, True))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        save_now, starts = saver.save_now, iter((1, 2))
        save = saver._client.save

        def save_of_another_start(*given: Any, **more: Any) -> str:
            restart_once()  # it has been asked for its clock by now
            try:
                return save(*given, **more)
            finally:
                restart_once()  # so it goes on from the save that lacks the push

        def save_beside_a_restart() -> str:
            if restarts == "before its save":
                error = restart_once() or save_now()
            else:
                error = save_now() or restart_once()
            return error

        def restart_once() -> str:
            if generation := next(starts, 0):
                bed.restart(1, tmp_path, generation=generation)
            return ""

        if restarts == "within and after":
            saver._client.save = save_of_another_start  # type: ignore[method-assign]
        else:
            next(starts)
            saver.save_now = save_beside_a_restart  # type: ignore[method-assign,assignment]
        feeds.trained("input", 0, FitPlace(0, 1))
        last = said[-1]
        values = set(bed.pulled(client)["trainable"])
        saver.close()
    if restarts == "after its save":
        assert (last.error, last.is_lost, last.trained, values) == ("", False, {"q": 5}, {1.0})
    else:
        assert (last.is_lost, last.trained, values) == (True, {}, {0.0, 1.0})


def test_a_run_goes_on_from_an_earlier_one(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        client.seed(manifest, filled(manifest, 7.0))
        client.save(tmp_path, 900)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path), bed.client)
        with pytest.raises(CheckpointError, match=r"another run, newest step 900; pass .*resume"):
            saver.start()
        saver.close()
        saver = ChiefSaver(plan(tmp_path, resume=True), bed.client)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        assert np.all(bed.pulled(client)["trainable"] == 7.0)
        saver.close()
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path / "empty", resume=True), bed.client)
        saver.start()
        assert bed.client().describe()[0].phase == "EMPTY"
        saver.close()


@pytest.mark.attack("A18")
@pytest.mark.parametrize("path", PATHS_THAT_LEAD_ASTRAY, ids=lambda path: ascii(path)[:30])
def test_directories_that_lead_astray_are_refused_escaped_before_anything_starts(path: str):
    doors: list[Callable[[], object]] = [lambda: Checkpoints(directory=path)]
    place = OutputPlace("file:///", "/work")
    doors += [lambda: output_directory(path, "TensorBoard's files", place)]
    for door in doors:
        with pytest.raises(SettingsError) as refused:
            door()
        assert str(refused.value).isascii()
        assert str(refused.value).isprintable()
        assert "secret" not in str(refused.value)


def test_no_save_begins_while_they_are_held_but_one_that_is_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.01)
    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path, every_steps=1), bed.client)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "the first save")
        saver.hold("a batch")
        for _ in range(2):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        asked = threading.Event()
        assert not asked.wait(0.05)
        assert latest(tmp_path) == 0
        client.set_metadata("batch", 5)
        assert saver.save_now() == ""
        assert latest(tmp_path) == 2
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        saver.release("a batch")
        wait_until(lambda: latest(tmp_path) == 3, "a save by steps")
        saver.close()
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path, resume=True), bed.client)
        assert saver.restored_metadata() == {}
        saver.start()
        assert saver.restored_metadata() == {"batch": 5}
        saver.close()


def test_a_save_that_is_asked_for_is_tried_again_and_then_tells_why(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ps.client.saving.periodic_saver._LOOK_S", 0.01)
    monkeypatch.setattr("ps.client.saving.periodic_saver._RETRY_S", 0.001)
    manifest = make_manifest(rule=ADD)
    fails = [True] * 5
    names = LocalStorage.names

    def names_of_a_disk_that_is_away(self, directory=""):
        if armed.is_set() and fails:
            fails.pop()
            raise OSError(errno.EIO, "Input/output error")
        return names(self, directory)

    armed = threading.Event()
    monkeypatch.setattr(LocalStorage, "names", names_of_a_disk_that_is_away)
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan(tmp_path), bed.client)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(lambda: latest(tmp_path) == 0, "the first save")
        saver.hold("a batch")
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        armed.set()
        assert "Input/output error" in saver.save_now()
        assert saver.save_now() == ""
        armed.clear()
        assert latest(tmp_path) == 1
        saver.close()


def test_a_chief_that_was_started_again_knows_the_newest_step_of_its_run(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        client = bed.client()
        client.seed(manifest, filled(manifest))
        first = ChiefSaver(plan(tmp_path), bed.client)
        first.start()
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert first.save_now() == ""
        first.close()
        again = ChiefSaver(plan(tmp_path), bed.client, joins=True)
        again.start()
        assert again.saved_step == first.saved_step == 1
        again.close()
