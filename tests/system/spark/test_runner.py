"""tfos.run on executors: values, collective calls, failures that name the rank."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import tfos
from tfos import runner
from tfos.errors import NoResultError, ShutdownTimeout

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
FAILED_WITHIN_S = 30.0
NO_RANK_COMES_BACK = tfos.ClusterConfig(restarts=tfos.Restarts(workers=3))
"""`run` says so whatever the configuration asks for."""


LIMIT = "spark.driver.maxResultSize"


def large_value():
    return bytes(4 << 20) if runner.rank() else b""


@pytest.mark.long
def test_values_above_sparks_limit_end_with_its_name(spark):
    conf = spark._jsc.sc().conf()
    conf.set(LIMIT, "1m")
    try:
        with pytest.raises(NoResultError, match=f"values of 2 of 2 workers did (.|\n)*{LIMIT}"):
            tfos.run(large_value, num_proc=2, sc=spark)
    finally:
        conf.remove(LIMIT)


def takes_a_second():
    began_s = time.monotonic()
    while time.monotonic() - began_s < 1.0:
        pass
    return runner.rank()


def waits_without_end():
    threading.Event().wait()


@pytest.mark.long
def test_a_function_takes_as_long_as_it_takes_or_as_its_caller_says(spark, monkeypatch):
    monkeypatch.setattr(tfos.TFCluster.shutdown, "__defaults__", (None, 0, 0.5))
    assert tfos.run(takes_a_second, num_proc=2, sc=spark) == [0, 1]
    late = r"the function did not return within timeout_s=0.5 on worker:0@.*leave timeout_s out"
    with pytest.raises(ShutdownTimeout, match=late):
        tfos.Runner(np=1, sc=spark, timeout_s=0.5).run(waits_without_end)


def work(count, fail=""):
    ones = np.full(count, runner.rank() + 1.0, np.float32)
    total = runner.allreduce(ones, "sum")
    if runner.rank() == 2:
        if fail == "raise":
            raise ValueError("no luck here")
        if fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    runner.log_to_driver(f"the sum is {total[0]}")
    names = runner.allgather(np.arange(runner.rank()))
    return {"rank": runner.rank(), "total": total, "names": [each.tolist() for each in names]}


def test_values_come_back_in_rank_order_and_a_failed_rank_is_named(spark, capfd):
    found = tfos.run(work, (300_000,), num_proc=3, sc=spark)
    assert [each["rank"] for each in found] == [0, 1, 2]
    for each in found:
        np.testing.assert_array_equal(each["total"], np.full(300_000, 6, np.float32))
        assert each["names"] == [[], [0], [0, 1]]
    assert "| the sum is 6.0" in capfd.readouterr().err
    assert tfos.Runner(np=2, sc=spark).run(work, count=1)["rank"] == 0
    for fail, text in (
        ("raise", r"ValueError: no luck here\nraised in worker:2"),
        ("kill", r"killed by SIGKILL(.|\n)*failed: worker:2"),
    ):
        began_s = time.monotonic()
        with pytest.raises(tfos.NodeFailedError, match=text):
            tfos.run(work, (10, fail), num_proc=3, sc=spark, config=NO_RANK_COMES_BACK)
        assert time.monotonic() - began_s < FAILED_WITHIN_S
    with pytest.raises(tfos.TFOSError, match=r"need 4 task slots at once .*Spark offers 3"):
        tfos.run(work, (10,), num_proc=4, sc=spark)
