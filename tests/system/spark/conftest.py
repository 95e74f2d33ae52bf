"""One `spark` fixture over three kinds of Spark: threads, separate executors, a real cluster.

The fixture is session-scoped and parametrised, so pytest groups tests by master and each kind of
Spark starts once. Functions of test modules travel to executors by value.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
from pyspark.sql import SparkSession

from tests.support.spark_masters import (
    MASTERS,
    STANDALONE,
    Standalone,
    await_executors,
    make_context,
    standalones,
)


@pytest.fixture(scope="session")
def spark_environment() -> Iterator[None]:
    """Make executors run this interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        yield


@pytest.fixture(scope="session", params=MASTERS)
def spark(
    request: pytest.FixtureRequest,
    spark_environment: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A SparkContext on each kind of Spark; at least three task slots."""
    with contextlib.ExitStack() as stack:
        master: str = request.param
        executors = 0
        if master == STANDALONE:
            standalone = Standalone(tmp_path_factory.mktemp("standalone"))
            stack.callback(standalone.stop)
            standalone.add_workers(3)
            master, executors = standalone.url, 3
            standalones[master] = standalone
        elif master.startswith("local-cluster"):
            executors = int(re.findall(r"\d+", master)[0])
        sc = make_context(master)
        stack.callback(sc.stop)
        await_executors(sc, executors)
        yield sc


@pytest.fixture(scope="module")
def sql(spark: Any) -> Any:
    """A session with several batches to a partition."""
    session = SparkSession(spark).newSession()
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "23")
    return session


@pytest.fixture(autouse=True, scope="module")
def _travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Executors cannot import test modules, so their functions are sent whole."""
    from pyspark import cloudpickle as sparks

    for library in (cloudpickle, sparks):
        library.register_pickle_by_value(request.module)
    yield
    for library in (cloudpickle, sparks):
        library.unregister_pickle_by_value(request.module)
