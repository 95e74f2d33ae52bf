"""How long until user code runs on a new cluster, and until an idle one is gone?

Figures: P15, P16.
Method: three executors of one core that are up already, 1 PS + 2 workers. P15 from the call of
    `reserve()` to the first line of `main_fun` in the later worker, which writes the system's
    monotonic clock to a file; `main_fun` imports nothing. The reference is an empty Spark job on
    the same executors. P16 is the call of `shutdown()` after `main_fun` has returned everywhere.
Caveats: three interpreters start at once on the cores of one machine.
Bars: P15 at most 2 s more than the empty job; P16 at most 1.5 s.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks.harness import Figure, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors

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
    args = parse_arguments(__doc__, repeats=5)
    starts, stops, jobs = [], [], []
    with executors(NUM_WORKERS + 1, "startup") as sc:

        def empty_job() -> None:
            sc.parallelize(range(NUM_WORKERS + 1), NUM_WORKERS + 1).foreach(lambda _: None)

        if not args.toy:
            one_cluster(sc)  # fills the page cache and the kernel cache
        for _ in range(args.repeats):
            jobs.append(timed(empty_job))
            start_s, stop_s = one_cluster(sc)
            starts.append(start_s)
            stops.append(stop_s)
    figure = Figure(
        "P15", "reserve() to the first line of main_fun, 1 PS + 2 workers", "s", "lower"
    )
    more = statistics.median(starts) - statistics.median(jobs)
    report(figure, starts, jobs, "empty Spark job", more_than_reference_s=round(more, 3))
    report(Figure("P16", "shutdown() of an idle cluster", "s", "lower"), stops, [], "")


if __name__ == "__main__":
    main()
