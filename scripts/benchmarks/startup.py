"""How long until user code runs on a new cluster, and until an idle one is gone?

Figures: P15, P16; with --yarn P15y, P16y.
Method: three executors of one core that are up already, 1 PS + 2 workers. P15 from the call of
    `reserve()` to the first line of `main_fun` in the later worker, which writes the system's
    monotonic clock to a file; `main_fun` imports nothing. The reference is an empty Spark job on
    the same executors. P16 is the call of `shutdown()` after `main_fun` has returned everywhere.
    With --yarn the executors are containers of a YARN of its own with two NodeManagers, as
    scripts/yarn starts it, and the driver is here. P15's line has the first cluster of the
    application, whose files the host has not loaded yet, apart from the others.
Caveats: three interpreters start at once on the cores of one machine.
Bars: P15 at most 2 s more than the empty job; P16 at most 1.5 s. On YARN 5 s more, and 3 s.
Last result: docs/guides/performance.md; docs/yarn.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks import local_spark
from scripts.benchmarks.harness import Figure, parse_arguments, report, timed
from scripts.benchmarks.yarn_spark import executors_on_yarn

NUM_WORKERS = 2
WAIT_S = 60.0


def main_fun(directory: str, ctx: Any) -> None:
    """Say when user code started."""
    Path(directory, f"worker-{ctx.worker_num}").write_text(str(time.monotonic()))


def started(directory: str) -> float:
    """Return when the last worker started, once all have."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in Path(directory).glob("worker-*")]
        if len(texts) == NUM_WORKERS and all(texts):
            return max(map(float, texts))
        time.sleep(0.01)
    raise TimeoutError(f"no sign of {NUM_WORKERS} workers in {WAIT_S:.0f} s")


def one_cluster(sc: Any) -> tuple[float, float]:
    """Start and stop a cluster; return seconds to user code and seconds of shutdown."""
    from tfos import InputMode, TFCluster

    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        begun = time.monotonic()
        cluster = TFCluster.reserve(sc, NUM_WORKERS + 1, num_ps=1, input_mode=InputMode.TENSORFLOW)
        cluster.start(main_fun, directory)
        start_s = started(directory) - begun
        time.sleep(1.0)  # idle: main_fun has returned and said so
        return start_s, timed(cluster.shutdown)


def main() -> None:
    args = parse_arguments(
        __doc__, 5, {"--yarn": {"action": "store_true", "help": "on a YARN of its own"}}
    )
    executors = executors_on_yarn if args.yarn else local_spark.executors
    starts, stops, jobs = [], [], []
    first: dict[str, float] = {}
    with executors(NUM_WORKERS + 1, "startup") as sc:

        def empty_job() -> None:
            sc.parallelize(range(NUM_WORKERS + 1), NUM_WORKERS + 1).foreach(lambda _: None)

        if not args.toy:
            # fills the page cache and the kernel cache
            first = dict(zip(("start_s", "stop_s"), one_cluster(sc), strict=True))
        for _ in range(args.repeats):
            jobs.append(timed(empty_job))
            start_s, stop_s = one_cluster(sc)
            starts.append(start_s)
            stops.append(stop_s)
    place = "y" if args.yarn else ""
    start = "reserve() to the first line of main_fun, 1 PS + 2 workers"
    more = {
        "more_than_reference_s": round(statistics.median(starts) - statistics.median(jobs), 3),
        "first_cluster": {name: round(value, 3) for name, value in first.items()},
    }
    report(Figure(f"P15{place}", start, "s", "lower"), starts, jobs, "empty Spark job", **more)
    stop = "shutdown() of an idle cluster"
    report(Figure(f"P16{place}", stop, "s", "lower"), stops)


if __name__ == "__main__":
    main()
