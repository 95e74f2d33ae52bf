"""A Parquet table of HDFS trains on YARN in both ways: as a fed DataFrame, and read by workers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ps.checkpoint.inspect import inspect
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import TIMEOUT_S, logs, nodes_left, submitted, told
from tests.support.programs.parquet_on_yarn import BATCH_ROWS, EPOCHS, NUM_ROWS, TOLD
from tests.support.spark_submit import ROOT
from tfos.files.checkpoint_storage import Storages

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 120, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "parquet_on_yarn.py"
WORKERS = 2
ONCE = {"spark.yarn.maxAppAttempts": "1"}


def test_a_table_is_trained_once_per_epoch_fed_and_read(yarn: LocalYarn):
    directory = f"{yarn.url}/job"
    submitted(yarn, PROGRAM, directory, mode="cluster", conf=ONCE)
    found = told(f"{directory}/{TOLD}")
    all_rows = EPOCHS * NUM_ROWS
    assert (found["fed"], found["trained"], found["dropped"]) == (all_rows, all_rows, 0)
    workers = found["workers"]
    for way in ("fed", "read"):
        times = np.sum([each["seen"][way] for each in workers], axis=0)
        assert times.tolist() == [EPOCHS] * NUM_ROWS
    of_share = EPOCHS * math.ceil(NUM_ROWS / WORKERS / BATCH_ROWS)
    assert [each["steps"]["read"] for each in workers] == [of_share] * WORKERS
    steps = [each["steps"]["fed"] + each["steps"]["read"] for each in workers]
    assert [each["pushes"] for each in workers] == steps
    assert sum(each["rows"] for each in workers) == 2 * all_rows
    assert found["exported"] == -sum(steps)
    # A save of the same parameters with other positions of readers has the next step, and its
    # number of updates is still that of the pushes.
    newest = inspect(Storages()(f"{directory}/saves")).steps[0]
    assert (newest.error, newest.clock) == ("", sum(steps))
    assert newest.step >= sum(steps)
    assert f"checkpoints go to {directory}/saves" in logs(yarn)
    assert not nodes_left(yarn)
