"""What the error of a Spark job says of the driver's JVM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from tests.support.fake_spark import WAIT_S, FakeSpark
from tfos.spark.jobs import SparkJob, jvm_has_ended


class Jvm:
    """Answers py4j's calls, or fails as it does without a JVM."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.java = SimpleNamespace(lang=SimpleNamespace(System=self))

    def nanoTime(self) -> int:
        if self._error is not None:
            raise self._error
        return 1


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    ("answer", "has_ended"),
    [
        (None, False),
        (Py4JNetworkError("Answer from Java side is empty"), True),
        (ConnectionRefusedError(111, "Connection refused"), True),
    ],
)
def test_a_job_that_failed_with_the_drivers_jvm_is_told_from_one_that_failed_in_it(
    answer: Exception | None, has_ended: bool
):
    sc: Any = SimpleNamespace(_jvm=Jvm(answer))
    in_between = Py4JError("An error occurred while calling z:PythonRDD.collectAndServe")
    assert jvm_has_ended(sc, in_between) is has_ended
    of_java: Any = Py4JError("as Py4JJavaError is")
    of_java.java_exception = object()
    assert not jvm_has_ended(sc, of_java)


@pytest.mark.fault("F15")
@pytest.mark.parametrize(
    ("properties", "group"),
    [
        ({}, "tag"),
        ({"spark.jobGroup.id": "cell-1"}, "cell-1"),
        ({"spark.jobGroup.id": "run", "sql.streaming.queryId": "q"}, "tag"),
    ],
)
def test_a_job_is_in_its_users_group_but_not_in_that_of_a_stream(
    properties: dict[str, str], group: str
):
    spark = FakeSpark()
    spark.properties = properties
    job = SparkJob[str | None](
        spark, "tag", "text", lambda: spark.getLocalProperty("spark.jobGroup.id"), lambda _: None
    )
    job.start()
    assert job.join(WAIT_S)
    assert job.result() == group
