"""What does a small request cost beside a bare ping-pong?

Figure: P05.
Method: 10,000 pulls of 4 KiB of parameters from one server process, loopback TCP; their median.
    The reference sends the same 4 KiB both ways over a raw socket. Rounds of both take turns.
Caveats: the reference sends 4 KiB in each direction, a pull sends a short request.
Bar: at most 3 times the ping-pong.
Last result: docs/performance.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from ps.params import Add
from scripts.benchmarks.dense import GROUP, manifest
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.reference.raw_socket import RawPeer
from scripts.benchmarks.server_process import served

NUM_BYTES = 4096


def median_us(work: Callable[[], object], count: int) -> float:
    """Return the median of `count` single timings in microseconds."""
    return statistics.median(timed(work) for _ in range(count)) * 1e6


def main() -> None:
    args = parse_arguments(__doc__, repeats=10)
    calls = 100 if args.toy else 10_000 // args.repeats
    values = np.zeros(NUM_BYTES // 4, np.float32)
    data = memoryview(bytearray(NUM_BYTES))
    into = memoryview(bytearray(NUM_BYTES))
    with RawPeer(NUM_BYTES) as raw, served() as client:
        client.seed(manifest(Add(), values.size), {GROUP: values})
        client.attach(timeout_s=60)

        def ours() -> float:
            return median_us(lambda: client.pull({GROUP: values}), calls)

        def reference() -> float:
            return median_us(lambda: raw.echo(data, into), calls)

        ours(), reference()
        seconds = interleave(args.repeats, ours, reference)
    figure = Figure("P05", "pull of 4 KiB, median, TCP", "us", "lower")
    report(figure, seconds[0], seconds[1], "raw ping-pong of 4 KiB", calls_per_repeat=calls)


if __name__ == "__main__":
    main()
