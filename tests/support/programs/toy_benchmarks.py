"""Runs benchmarks at toy size, one after the other in this process: imports and JVMs count once.

Usage: python -m tests.support.programs.toy_benchmarks NAME...
Prints a JSON line {"benchmark": NAME} before the lines of each.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from scripts.benchmarks import local_spark
from tests.support.benchmarks import ON_SPARK, OWN_SPARK, SPARK_EXECUTORS
from tfos.bench import catalogue
from tfos.bench.harness import Bench


def show(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def run(name: str) -> None:
    """Run one benchmark as `python -m` or `tfos bench` would."""
    show({"benchmark": name})
    if name in catalogue.NAMES:
        catalogue.run(name, Bench(f"tfos bench {name} --toy", toy=True, on_line=show))
        return
    module = f"scripts.benchmarks.{name}"
    with mock.patch.object(sys, "argv", [module, "--toy"]):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(names: Sequence[str]) -> None:
    shared = [name for name in names if name in ON_SPARK and name not in OWN_SPARK]
    if shared:
        with local_spark.executors(SPARK_EXECUTORS, "toys") as sc:
            same = lambda count, name: contextlib.nullcontext(sc)  # noqa: E731
            with mock.patch.object(local_spark, "executors", same):
                for name in shared:
                    run(name)
    for name in names:
        if name not in shared:
            run(name)


if __name__ == "__main__":
    main(sys.argv[1:])
