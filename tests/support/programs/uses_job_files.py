"""A program of a job file: each worker copies what its inputs hold into its output.

uses_job_files.py NODES PS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyspark

import tfos


def main_fun(_args: Any, ctx: Any) -> dict[str, Any]:
    """Return what this worker has; write it to the output, too."""
    found = {name: list(files) for name, files in ctx.inputs.items()}
    said = {
        "texts": {
            name: [Path(file).read_text() for file in files] for name, files in found.items()
        },
        "paths": found,
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    Path(ctx.output_dir, "part").mkdir()
    Path(ctx.output_dir, "part", "said.json").write_text(json.dumps(said))
    return said


def main() -> None:
    """Run one cluster as the job file says."""
    nodes, ps = map(int, sys.argv[1:])
    sc = pyspark.SparkContext()
    with tfos.TFCluster.reserve(sc, nodes, ps, input_mode=tfos.InputMode.TENSORFLOW) as cluster:
        cluster.start(main_fun, None)
    print("SEEN", json.dumps(cluster.results()))
    sc.stop()


if __name__ == "__main__":
    main()
