"""When does `toPandas()` and `fit` in the driver end, beside an estimator that trains on executors?

Figures: COLLECT, the seconds of a fit, and COLLECTm, the driver's memory, by the number of rows.
Method: a DataFrame of 40 floats and a label, computed when it is read, on three executors of one
    core; MLP 40-64-1, Adam, batches of 512, one epoch. Ours: `KerasEstimator.fit` with 1 PS + 2
    asynchronous workers. The reference: `toPandas()` by Arrow, then plain `model.fit` in the
    driver. Each in a fresh driver with Spark's default memory; memory is the largest resident set
    of the driver's Python and JVM together, sampled. A reference that ends in an error has the
    figures of the largest size that did not, and its line the error.
Caveats: driver and executors share one machine, so the executors' cores are the driver's too.
Bar: none; the page on estimators says which is better when.
Last result: docs/guides/estimators.md.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from scripts.benchmarks.harness import ROOT, Figure, parse_arguments, report
from scripts.benchmarks.local_spark import executors

WIDTH = 40
BATCH_ROWS = 512
SIZES = (20_000, 200_000, 1_000_000, 4_000_000, 8_000_000)
TOY_ROWS = 2_000
CASE_S = 1200
SAMPLE_S = 0.05
_MIB = 1 << 20
_CASE = "--case"


def build() -> Any:
    """Return the compiled model."""
    import keras

    layers = [keras.Input((WIDTH,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model


def frame(session: Any, num_rows: int) -> Any:
    """Return the rows: columns f0 to f39, and their sum as `label`."""
    from pyspark.sql import functions as f

    columns = [
        f.expr(f"cast((id * {31 + i}) % 1000 / 1000 as float)").alias(f"f{i}") for i in range(WIDTH)
    ]
    rows = session.range(0, num_rows, 1, 12).select(*columns)
    names = [f.col(f"f{i}") for i in range(WIDTH)]
    return rows.withColumn("label", sum(names[1:], names[0]))


def ours(session: Any, num_rows: int, num_workers: int = 2) -> None:
    """Train on the executors."""
    from pyspark.sql import functions as f

    from tfos.ml import KerasEstimator

    names = [f"f{i}" for i in range(WIDTH)]
    rows = frame(session, num_rows).select(f.array(*names).alias("features"), "label")
    estimator = KerasEstimator(
        model_fn=build,
        featuresCol="features",
        labelCol="label",
        batchSize=BATCH_ROWS,
        epochs=1,
        clusterSize=num_workers + 1,
        numPS=1,
        verbose=False,
    )
    estimator.fit(rows)


def collected(session: Any, num_rows: int) -> None:
    """Bring the rows to the driver, and train there."""
    data = frame(session, num_rows).toPandas()
    labels = data.pop("label").to_numpy()
    build().fit(data.to_numpy(), labels, batch_size=BATCH_ROWS, epochs=1, verbose=0)


CASES: dict[str, Callable[..., None]] = {
    "ours": ours,
    "toy": functools.partial(ours, num_workers=1),
    "collected": collected,
}


class PeakMemory:
    """Samples the resident set of this process and its JVM while a block runs."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        own = psutil.Process()
        mine = [own, *(each for each in own.children() if "java" in each.name())]
        while not self._ended.wait(SAMPLE_S):
            self.mib = max(self.mib, sum(each.memory_info().rss for each in mine) / _MIB)


def measured(sc: Any, case: str, num_rows: int) -> dict[str, Any]:
    """Run one case; returns seconds and MiB, or the error that ended it."""
    from pyspark.sql import SparkSession

    session = SparkSession(sc)
    session.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
    begun_s = time.perf_counter()
    try:
        with PeakMemory() as peak:
            CASES[case](session, num_rows)
    except Exception as error:  # noqa: BLE001 - a driver without memory ends in many ways
        return {"error": str(error).strip().splitlines()[0][:300]}
    return {"seconds": time.perf_counter() - begun_s, "mib": peak.mib}


def run_case(case: str, num_rows: int) -> None:
    """Act as the fresh driver of one case; prints what it measured."""
    with executors(3, f"collect_{case}") as sc:
        print(json.dumps(measured(sc, case, num_rows)), flush=True)


def in_fresh_driver(case: str, num_rows: int) -> dict[str, Any]:
    """Return what a driver of its own measures."""
    command = [sys.executable, "-m", "scripts.benchmarks.collect_fit", _CASE, case, str(num_rows)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=CASE_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def show(num_rows: int, ours_found: dict[str, Any], theirs: dict[str, Any], error: str) -> None:
    """Print both figures of one size."""
    if "error" in ours_found:
        raise RuntimeError(f"{num_rows} rows: {ours_found['error']}")
    more = {"rows": num_rows, **({"reference_error": error} if error else {})}
    for name, what, unit, key in (
        ("COLLECT", "a fit", "s", "seconds"),
        ("COLLECTm", "the driver's memory in a fit", "MiB", "mib"),
    ):
        figure = Figure(name, f"{what} of {num_rows:,} rows", unit, "lower")
        report(figure, [ours_found[key]], [theirs[key]], "toPandas() and fit", **more)


def main() -> None:
    if sys.argv[1:2] == [_CASE]:
        run_case(sys.argv[2], int(sys.argv[3]))
        return
    args = parse_arguments(__doc__, repeats=1)
    if args.toy:
        with executors(3, Path(__file__).stem) as sc:
            found, theirs = (measured(sc, case, TOY_ROWS) for case in ("toy", "collected"))
        show(TOY_ROWS, found, theirs, theirs.get("error", ""))
        return
    known: dict[str, Any] = {}
    for num_rows in SIZES:
        found, theirs = (in_fresh_driver(case, num_rows) for case in ("ours", "collected"))
        known = known if "error" in theirs else theirs
        show(num_rows, found, known, theirs.get("error", ""))


if __name__ == "__main__":
    main()
