"""A job whose file says what it reads, where its output goes and what its roles are given.

submitted_on_yarn.py DIRECTORY     on HDFS; TOLD there has what the nodes have seen, as JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from feeding.filesystem.registry import filesystem_for
from tests.support.plain_steps import PlainSteps
from tfos import InputMode, TFCluster

TOLD = "told.json"
RESULT = "numbers.json"


def main_fun(_args: Any, ctx: Any) -> dict[str, Any]:
    """Push once for each number of this worker's files; keep the numbers in its output."""
    (words,) = ctx.inputs["words"]
    numbers: list[int] = []
    steps = PlainSteps(ctx, 100)
    for path in ctx.inputs["numbers"]:
        with filesystem_for(path).open(path) as file:
            numbers += json.loads(file.read_range(0, file.size_bytes))
    for _ in numbers:
        steps.step()
    Path(ctx.output_dir, RESULT).write_text(json.dumps(numbers))
    return {
        "words": Path(words).read_text(),
        "numbers": numbers,
        "pushes": steps.count,
        "threads": os.environ["OMP_NUM_THREADS"],
        "container": os.environ["CONTAINER_ID"],
    }


def main() -> None:
    """Run one server and two workers as the job says, and tell what they have seen."""
    from pyspark import SparkContext

    directory = sys.argv[1]
    with SparkContext() as sc:
        with TFCluster.reserve(sc, 3, 1, input_mode=InputMode.TENSORFLOW) as cluster:
            cluster.start(main_fun, None)
            at = {node.name: node.executor_id for node in cluster.status().nodes}
        path = f"{directory}/{TOLD}"
        told = {"executors": at, "workers": cluster.results()}
        filesystem_for(path).write(path, json.dumps(told).encode())


if __name__ == "__main__":
    main()
