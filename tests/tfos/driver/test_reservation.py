"""What a reservation tells before it starts anything. No Spark."""

from __future__ import annotations

import pytest

from tfos.config import ClusterConfig
from tfos.driver import reservation
from tfos.spark.facts import SparkFacts
from tfos.topology import Plan, plan


@pytest.mark.parametrize(
    ("made", "on_one_executor"),
    [
        (plan(4, 1), 4),
        (plan(4, 1, driver_ps_nodes=True), 3),
        (plan(4, 1, driver_ps_nodes=True, eval_node=True), 3),  # the evaluator is a task, too
    ],
)
def test_the_memory_note_counts_every_node_that_is_a_task(
    made: Plan, on_one_executor: int, capsys: pytest.CaptureFixture[str]
):
    conf = {
        "spark.network.crypto.enabled": "true",
        "spark.io.encryption.enabled": "true",
        "spark.executor.cores": "4",
    }
    facts = SparkFacts("yarn", "app", conf, "hdfs://nn:8020")
    reservation._console(made, ClusterConfig(), facts, {})
    told = " ".join(capsys.readouterr().err.split())
    assert f"spark.executor.memoryOverhead={2048 * on_one_executor}m or more" in told
