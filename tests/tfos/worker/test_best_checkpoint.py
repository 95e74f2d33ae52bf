"""Which epochs the chief saves as the best, beside a real server."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.choice import latest, read_manifest, steps_on_disk
from ps.checkpoint.score import Score
from ps.checkpoint.storage import storage_at
from ps.client.saving import saver as saving
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.waiting import wait_until
from tfos.config import Checkpoints
from tfos.control.messages import BestSaved, EpochTrained
from tfos.worker.best_checkpoint import BestKeeper
from tfos.worker.reports.epoch_reports import EpochReports
from tfos.worker.saver import ChiefSaver

pytestmark = pytest.mark.socket
MANIFEST = make_manifest(rule=ADD)


class Saver:
    """A saver whose file system may fail."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.fails = ""

    def best(self, metric: str, *, higher_is_better: bool) -> None:
        """A new run."""

    def save_now(self, score, generations=None):
        self.scores += [] if self.fails else [score.value]
        return self.fails

    def place(self, step=None):
        return f"/s/step-{len(self.scores)}", len(self.scores)


def epoch(number: int, **metrics: float) -> EpochTrained:
    return EpochTrained(1, number, metrics, is_distributed=True)


def keeper(saver, metric: str = "val_loss", **options) -> BestKeeper:
    return BestKeeper(Checkpoints(directory="/s", keep_best=metric, **options), saver)


def test_an_epoch_is_saved_if_it_is_better_than_all_before():
    saver = Saver()
    best = keeper(saver)
    saved = [best.look(epoch(n, val_loss=v)) for n, v in enumerate([0.5, 0.6, 0.5, 0.4, math.nan])]
    assert saver.scores == [0.5, 0.4]
    assert [each is not None for each in saved] == [True, False, False, True, False]
    assert saved[3] == best.saved == BestSaved("/s/step-2", 2, "val_loss", 0.4)


@pytest.mark.parametrize("options", [{"metric": "val_auc"}, {"metric": "x", "best_mode": "max"}])
def test_larger_is_better_where_the_name_or_the_user_says_so(options):
    saver = Saver()
    best = keeper(saver, **options)
    for number, value in enumerate([-math.inf, math.nan, 0.5, 0.4, 0.6]):
        best.look(epoch(number, **{options["metric"]: value}))
    assert saver.scores == [0.5, 0.6]


def test_a_metric_that_is_not_there_is_said_once_with_those_there_are(caplog):
    saver = Saver()
    best = keeper(saver, "val_auc")
    for number in range(3):
        best.look(epoch(number, loss=0.5, accuracy=0.25))
    (text,) = (record.getMessage() for record in caplog.records)
    assert "epoch 1 has no 'val_auc', the metric of keep_best; it has accuracy, loss." in text
    assert saver.scores == []
    best.look(epoch(3, val_auc=0.5))
    best.look(epoch(4, loss=0.5))
    assert saver.scores == [0.5]
    assert len(caplog.records) == 1


def test_a_save_that_failed_leaves_the_best_before_it_and_the_next_epoch_is_compared(caplog):
    saver = Saver()
    best = keeper(saver)
    best.look(epoch(0, val_loss=0.5))
    saver.fails = "OSError: disk full"
    assert best.look(epoch(1, val_loss=0.1)) is None
    assert "epoch 2 is the best so far (val_loss 0.1) but was not saved: OSError: disk full" in (
        caplog.text
    )
    saver.fails = ""
    assert best.look(epoch(2, val_loss=0.3)) == BestSaved("/s/step-2", 2, "val_loss", 0.3)


def test_the_best_outlives_retention_and_the_next_run_goes_on_comparing(tmp_path: Path):
    plan = Checkpoints(directory=str(tmp_path), keep=1, keep_best="val_loss", full_every=1)
    told: list[object] = []
    with cluster("inproc", num_servers=2) as bed:
        saver = ChiefSaver(plan, bed.client)
        saver.start()
        reports = EpochReports(told.append)
        reports.keep_best(BestKeeper(plan, saver))
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST))
        wait_until(lambda: latest(tmp_path) == 0, "the first save")
        for number, loss in enumerate([0.5, 0.25, 0.75]):
            client.assign(filled(MANIFEST, loss))
            reports.ended(epoch(number, val_loss=loss))
        reports.ended(EpochTrained(1, 3, {"val_loss": 0.0}))
        client.assign(filled(MANIFEST, 9.0))
        saver.close()
    saved = [each for each in told if isinstance(each, BestSaved)]
    best = saved[-1]
    assert [each.value for each in saved] == [0.5, 0.25]
    assert best.path == str(tmp_path / f"step-{best.step}")
    assert len(steps_on_disk(storage_at(tmp_path))) == 2
    assert len(told) == 6
    again = dataclasses.replace(plan, resume=True)
    with cluster("inproc") as bed:  # another number of servers
        saver = ChiefSaver(again, bed.client)
        saver.start()
        told.clear()
        reports = EpochReports(told.append)
        reports.keep_best(BestKeeper(again, saver))
        assert told == [best], "the driver is a new one"
        reports.ended(epoch(0, val_loss=0.3))
        assert told[1:] == [epoch(0, val_loss=0.3)]
        reports.ended(epoch(1, val_loss=0.2))
        assert isinstance(told[2], BestSaved)
        saver.close()
    assert not (tmp_path / f"step-{best.step}").exists()
    with cluster("inproc") as bed:
        client = bed.client()
        client.restore(tmp_path, step=told[2].step)


@pytest.mark.fault("F08")
@pytest.mark.parametrize(
    ("moment", "tries"), [("before the save", 1), ("within it", 1), ("behind the snapshots", 2)]
)
def test_older_parameters_of_a_server_that_was_started_again_are_not_saved_as_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, moment: str, tries: int
):
    """They are not what was measured."""
    plan = Checkpoints(directory=str(tmp_path), keep_best="loss", every_s=3600.0)
    with cluster("tcp", num_servers=2, job="job") as bed:
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST, 3.0))
        saver = ChiefSaver(plan, lambda: bed.client(reconnect_s=20.0))
        saver.start()
        best = BestKeeper(plan, saver)
        wait_until(lambda: latest(tmp_path) == 0, "the first save")
        client.assign(filled(MANIFEST, 4.0))
        measured = client.heard_generations

        def then_restarting(step: Callable[..., Any], *, is_behind: bool) -> Callable[..., Any]:
            def restarted(*args: Any, **kwargs: Any) -> Any:
                monkeypatch.undo()
                made = step(*args, **kwargs) if is_behind else None
                bed.restart(1, tmp_path, generation=1)
                return made if is_behind else step(*args, **kwargs)

            return restarted

        match moment:
            case "before the save":
                bed.restart(1, tmp_path, generation=1)
            case "within it":
                begun = then_restarting(saving.Saver.save, is_behind=False)
                monkeypatch.setattr(saving.Saver, "save", begun)
            case "behind the snapshots":
                made = then_restarting(saving._snapshot, is_behind=True)
                monkeypatch.setattr(saving, "_snapshot", made)
        assert best.look(epoch(0, loss=0.5), measured) is None
        assert "ps:1 was started again since the parameters were measured" in caplog.text
        assert caplog.text.count("were not saved: ") == tries, "no further try can succeed"
        assert best.saved is None
        client.assign(filled(MANIFEST, 5.0))
        found = best.look(epoch(1, loss=0.6), client.heard_generations)
        assert found is not None
        assert read_manifest(tmp_path, found.step).score == Score("loss", 0.6, False)
        saver.close()


def test_the_parameters_of_the_best_are_those_of_its_epoch(tmp_path: Path):
    plan = Checkpoints(directory=str(tmp_path), keep_best="loss")
    with cluster("inproc") as bed:
        saver = ChiefSaver(plan, bed.client)
        saver.start()
        best = BestKeeper(plan, saver)
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST, 3.0))
        found = best.look(epoch(0, loss=0.5))
        client.assign(filled(MANIFEST, 4.0))
        saver.close()
    assert found is not None
    with cluster("inproc") as bed:
        client = bed.client()
        client.restore(tmp_path, step=found.step)
        assert set(bed.pulled(client)["trainable"].tolist()) == {3.0}
