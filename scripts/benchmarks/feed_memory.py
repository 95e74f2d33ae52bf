"""Does the memory of feeder and worker stay flat while ten million rows stream through?

Figure: P22.
Method: one feed task and one worker, each a process of its own on this host. The task feeds narrow
    rows (a number and ten numbers) from pickled batches of 1,000, as Spark stores them; the worker
    reads batches of 256, makes them float32 and drops them, as fast as they come or, with the slow
    trainer, after a wait per batch, so that the feeder is always ahead and held back at 64 MiB of
    unread rows. The resident memory of both is read from the kernel every 20 ms, from the millionth
    row on: the queue has filled by then. The figure is the largest ratio, in either direction, to
    the median of the first tenth of that time.
Caveats: pages shared by processes count in each.
Bar: at most 1.1.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import statistics
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from feeding.sender.task import FeedTarget
from rpc.auth.handshake import Credentials
from scripts.benchmarks.harness import Figure, parse_arguments, report
from tfos.bench.memory import resident_bytes

BATCH = 1000
NUM_ROWS = {"fast": 10_000_000, "slow": 3_000_000}
WARM_ROWS = 1_000_000
WAIT_S = {"fast": 0.0, "slow": 0.002}
SAMPLE_S = 0.02
MB = 1e6


def worker(wait_s: float, credentials: Credentials, pipe: Connection) -> None:
    """Read batches, make them float32 and drop them."""
    import numpy as np

    from feeding.columnar.batch import Batch, FeedEnd
    from feeding.receiver.batch_reader import BatchReader
    from feeding.receiver.channel import FeedChannel
    from rpc.auth.handshake import Identity, Role
    from rpc.server.listener import Listener

    channel = FeedChannel(worker="worker:0")
    listener = Listener(channel.handler, credentials, Identity(Role.WORKER, 0))
    listener.bind_unix()
    listener.start()
    pipe.send(listener.endpoint)
    reader, rows, pause = BatchReader(channel), 0, threading.Event()

    def finish_when_told() -> None:
        pipe.recv()
        channel.finish("input")

    threading.Thread(target=finish_when_told, daemon=True).start()
    while not isinstance(item := reader.next_batch(256), FeedEnd):
        if isinstance(item, Batch):
            rows += item.num_rows
            for column in item.arrays:
                np.asarray(column, np.float32)
        if wait_s:
            pause.wait(wait_s)  # a step
    pipe.send(rows)
    listener.close()


def feeder(target: FeedTarget, credentials: Credentials, num_rows: int, warm: Event) -> None:
    """Feed one partition of this many rows."""
    from feeding.config import FeedConfig
    from feeding.encode.pickled import PickledPacker
    from feeding.sender.task import FeedTask

    packer = functools.partial(PickledPacker, loads=pickle.loads)
    task = FeedTask(
        targets=(target,),
        credentials=lambda: credentials,
        epoch=0,
        config=FeedConfig(),
        packer=packer,
    )
    list(task(0, batches(num_rows, warm)))


def batches(num_rows: int, warm: Event) -> Iterator[bytes]:
    """Yield batches of rows as Spark's JVM hands them out: bytes of their own each time."""
    rows = [(float(at), [at / 7 + column for column in range(10)]) for at in range(BATCH)]
    kept = bytearray(pickle.dumps(rows, 5))
    for number in range(num_rows // BATCH):
        if number == min(WARM_ROWS, num_rows // 2) // BATCH:
            warm.set()
        yield bytes(kept)


def measure(kind: str, num_rows: int) -> dict[str, list[int]]:
    """Return the resident bytes of both processes over the time that they feed."""
    context = multiprocessing.get_context("spawn")
    credentials = Credentials.generate()
    ours, theirs = context.Pipe()
    reading = context.Process(target=worker, args=(WAIT_S[kind], credentials, theirs))
    reading.start()
    target = FeedTarget(0, "worker:0", ours.recv())
    warm = context.Event()
    feeding = context.Process(target=feeder, args=(target, credentials, num_rows, warm))
    feeding.start()
    while not warm.wait(1.0) and feeding.is_alive():
        pass
    samples: dict[str, list[int]] = {"feeder": [], "worker": []}
    while feeding.is_alive():
        for name, process in (("feeder", feeding), ("worker", reading)):
            try:
                samples[name].append(resident_bytes(process.pid or 0)[0])
            except (OSError, KeyError):
                break  # it has just ended
        feeding.join(SAMPLE_S)
    ours.send("the end")
    if feeding.exitcode or ours.recv() != num_rows:
        raise RuntimeError(f"the rows did not all arrive (exit code {feeding.exitcode})")
    reading.join()
    return samples


def change(seen: list[int]) -> tuple[float, float]:
    """Return the resident bytes at first, and their largest ratio to that, up or down."""
    base = statistics.median(seen[: max(1, len(seen) // 10)])
    return base, max(max(seen) / base, base / min(seen))


def main() -> None:
    args = parse_arguments(__doc__, repeats=1)
    for kind in NUM_ROWS:
        num_rows = 100_000 if args.toy else NUM_ROWS[kind]
        for name, seen in measure(kind, num_rows).items():
            base, moved = change(seen)
            what = "trainer that keeps up" if kind == "fast" else "slow trainer"
            figure = Figure("P22", f"memory of a {name}, {what}", "times", "lower")
            report(figure, [moved], rows=num_rows, mb=base / MB, largest_mb=max(seen) / MB)


if __name__ == "__main__":
    main()
