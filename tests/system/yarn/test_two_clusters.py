"""Clusters of one application on YARN, side by side and one after the other, count their own."""

from __future__ import annotations

import pytest

from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import TIMEOUT_S, nodes_left, submitted, told
from tests.support.programs.two_clusters_on_yarn import EPOCHS, ROWS, TOLD
from tests.support.spark_submit import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 120, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "two_clusters_on_yarn.py"
TIMES = {"left": EPOCHS, "right": 2 * EPOCHS, "after": EPOCHS}


def test_clusters_of_one_application_do_not_disturb_each_other(yarn: LocalYarn):
    directory = f"{yarn.url}/job"
    submitted(yarn, PROGRAM, directory, mode="cluster", executors=4)
    found = told(f"{directory}/{TOLD}")
    assert list(found) == list(ROWS)
    for name, num_rows in ROWS.items():
        times, each = TIMES[name], found[name]
        counted = (each["fed"], each["trained"], each["dropped"], each["failures"])
        assert counted == (times * num_rows, times * num_rows, 0, 0)
        worker = each["worker"]
        assert (worker["rows"], worker["sum"]) == (
            times * num_rows,
            times * sum(range(num_rows)),
        )
        assert worker["value"] == worker["steps"]
    assert not nodes_left(yarn)
