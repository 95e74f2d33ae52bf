"""A training in YARN's cluster mode, with rows, checkpoints and results on HDFS: exact counts."""

from __future__ import annotations

import pytest

from ps.checkpoint.choice import steps_on_disk
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import logs, nodes_left, submitted, told
from tests.support.programs.trains_on_yarn import BATCH_ROWS, EPOCHS, NUM_ROWS, TOLD
from tests.support.spark_submit import ROOT
from tfos.files.checkpoint_storage import Storages

pytestmark = [pytest.mark.hdfs, pytest.mark.timeout(300, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "trains_on_yarn.py"


def test_a_training_in_cluster_mode_counts_every_row_and_leaves_nothing(yarn: LocalYarn):
    directory = f"{yarn.url}/job"
    submitted(yarn, PROGRAM, directory, mode="cluster", executors=2)
    found = told(f"{directory}/{TOLD}")
    assert (found["fed"], found["trained"], found["dropped"]) == (EPOCHS * NUM_ROWS,) * 2 + (0,)
    worker = found["worker"]
    assert worker["rows"] == EPOCHS * NUM_ROWS
    assert worker["sum"] == EPOCHS * sum(range(NUM_ROWS))
    assert worker["value"] == worker["steps"] >= EPOCHS * NUM_ROWS / BATCH_ROWS
    assert steps_on_disk(Storages()(f"{directory}/saves"))
    assert f"checkpoints go to {directory}/saves" in logs(yarn)
    assert not nodes_left(yarn)
