"""Every benchmark still works, at toy size; no time is asserted.

Those of the checkout that start Spark or workers with Keras take most of the time, and run what
other tests prove of the product: they are long. `tfos bench` is the users', so not long.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.benchmarks import (
    KERAS_WORKERS,
    ON_HDFS,
    ON_SPARK,
    OTHERS,
    ROOT,
    printed_by,
)
from tfos.bench import catalogue


def figures(names: list[str]) -> dict[str, list[str]]:
    """Run these in one process; returns the ids of the figures of each."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in printed_by("tests.support.programs.toy_benchmarks", *names):
        if "benchmark" in line:
            name = line["benchmark"]
            found[name] = []
        else:
            found[name].append(line["id"])
    return found


@pytest.mark.tf
@pytest.mark.timeout(900)
def test_benchmarks_without_spark_and_keras_workers_work():
    assert figures(list(OTHERS)) == OTHERS


@pytest.mark.long
@pytest.mark.tf
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_benchmarks_on_spark_and_with_keras_workers_work():
    parts = (ON_SPARK, KERAS_WORKERS)
    with ThreadPoolExecutor(len(parts)) as pool:  # JVMs wait much: the other part goes on
        found = list(pool.map(figures, map(list, parts)))
    assert found == list(parts)


def test_no_benchmark_is_left_out():
    programs = (ROOT / "scripts" / "benchmarks").glob("*.py")
    of_the_checkout = {path.stem for path in programs if "\ndef main" in path.read_text()}
    modules = (ROOT / "tfos" / "bench").glob("*.py")
    shipped = {path.stem for path in modules if "\ndef run(bench" in path.read_text()}
    assert shipped == set(catalogue.NAMES)
    assert of_the_checkout | shipped == {*OTHERS, *KERAS_WORKERS, *ON_SPARK, *ON_HDFS}
    assert shipped <= set(OTHERS)
    assert not of_the_checkout & shipped
