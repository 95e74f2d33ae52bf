"""How small is a delta checkpoint of a sparse table, and how long does a save take?

Figure: P19.
Method: a table of 1,000,000 rows (dim 16, float32, Adagrad) on one server process; a full save,
    then pushes to 1 % of the rows, drawn evenly, then a delta. Bytes of all files of both steps.
Caveats: bytes do not depend on the machine; the seconds of both saves stand beside them.
Bar: a delta at 1 % of the rows has at most 0.02 of the full save's bytes.
Last result: docs/performance.md.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ps.params import Adagrad, Hyper, Manifest, TableSpec
from ps.saver import SaveOptions
from tfos.bench.harness import Bench, Figure, timed
from tfos.bench.servers import served

DIM = 16
REPEATS = 5
AT_ONCE = 1 << 16
MANIFEST = Manifest(groups=(), tables=(TableSpec(name="rows", dim=DIM, rule=Adagrad()),))
OPTIONS = SaveOptions(full_every=1000)


def nbytes(step: Path) -> int:
    """Return the bytes of a step's files."""
    return sum(path.stat().st_size for path in step.iterdir())


def run(bench: Bench) -> None:
    """Measure P19."""
    num_rows = 20_000 if bench.toy else 1_000_000
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory, served() as client:
        root = Path(directory)
        client.seed(MANIFEST, {})

        def push(ids: np.ndarray[Any, Any]) -> None:
            for start in range(0, ids.size, AT_ONCE):
                part = ids[start : start + AT_ONCE]
                grads = random.standard_normal((part.size, DIM), np.float32)
                client.tables.push({"rows": (part, grads)}, hyper=Hyper(0.1))

        push(np.arange(num_rows))
        full_s = timed(partial(client.save, root, 0, options=OPTIONS))
        delta_bytes: list[float] = []
        delta_s: list[float] = []
        for step in range(1, bench.repeats(REPEATS) + 1):
            push(random.choice(num_rows, num_rows // 100, replace=False))
            delta_s.append(timed(partial(client.save, root, step, options=OPTIONS)))
            delta_bytes.append(nbytes(root / f"step-{step}"))
        full_bytes = [float(nbytes(root / "step-0"))]
    figure = Figure("P19", "delta of a table at 1 % of its rows", "bytes", "lower")
    seconds = {"full_s": round(full_s, 3), "delta_s": round(float(np.median(delta_s)), 3)}
    bench.report(figure, delta_bytes, full_bytes, "full checkpoint", **seconds)
