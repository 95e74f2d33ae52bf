"""`tfos doctor` reaches every executor, each by a task of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tfos.doctor.collection import CHECKS_OF_ANY_PLACE, CollectRequest
from tfos.doctor.executors import visit_all
from tfos.slots.reading import read_offer
from tfos.spark.facts import read_facts

pytestmark = [pytest.mark.spark, pytest.mark.timeout(320, func_only=True)]
three_executors = pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True)


@three_executors
def test_each_executor_answers_for_itself(spark):
    offer = read_offer(spark, read_facts(spark))
    request = CollectRequest(
        checks=tuple(check for check in CHECKS_OF_ANY_PLACE if check != "hdfs"),
        is_executor=True,
        is_loopback=True,
    )
    visits = visit_all(spark, offer.executors, lambda _: request, 60.0)
    assert [visit.reason for visit in visits] == ["", "", ""]
    asked = {visit.executor.executor_id for visit in visits}
    answered = {(visit.facts or {})["place"]["executor_id"] for visit in visits}
    assert answered == asked
    for visit in visits:
        assert visit.facts is not None
        assert not [name for name, fact in visit.facts.items() if "error" in fact]
        clock = visit.facts["clock"]
        assert clock["ahead_at_least_s"] <= 0.0 <= clock["ahead_at_most_s"]


@pytest.mark.long
def test_the_command_starts_a_spark_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "tfos", "doctor", "--json", "--hdfs", f"file://{tmp_path}"]
    done = subprocess.run(
        [*command, "--master", "local-cluster[2,1,1024]"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {each["place"]: each for each in json.loads(done.stdout)}
    assert list(reports) == ["Spark", "driver", "executor 0", "executor 1"]
    assert "imported in" in str(reports["executor 1"]["findings"])
    assert list(tmp_path.iterdir()) == []
