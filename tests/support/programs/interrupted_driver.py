"""A driver program for test_driver_interrupt.py: reaches a phase, says so, and stays there.

Usage: interrupted_driver.py END SAVE_DIR. END is `forget`, which runs one cluster; a phase
(`reserve`, `start`, `idle`, `train`, `steps`, `save`, `shutdown`) that the program goes to and in
which it is interrupted; or `rounds`: each line of standard input names a phase.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pyspark

from ps.checkpoint.lease import Lease
from tests.support.plain_steps import PlainSteps
from tfos import ClusterConfig, InputMode, TFCluster

STAY_S = 60


def consume(args, ctx):
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(1)
        time.sleep(args)


def linger(args, ctx):
    time.sleep(STAY_S)


def step(args, ctx):
    steps = PlainSteps(ctx, args)
    while True:
        steps.step()
        ctx.report_progress(step=steps.count, rows=steps.count, loss=0.0)


MAIN_FUNS = {
    "shutdown": (linger, None),
    "steps": (step, 1000),
    "save": (step, 1000),
}


def say(text: str) -> None:
    print(text, flush=True)  # the test reads it


def say_when_busy(cluster: TFCluster) -> None:
    deadline = time.monotonic() + STAY_S
    while not any(node.rows or node.steps for node in cluster.status().nodes):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    say("ready")


def occupy(sc) -> None:
    """Hold two of the four slots, as another job of the same program would."""

    def hold() -> None:
        with contextlib.suppress(Exception):  # cancelled with all other jobs
            sc.parallelize(range(2), 2).foreach(lambda _: time.sleep(STAY_S))

    threading.Thread(target=hold, daemon=True).start()
    while not sc.statusTracker().getActiveStageIds():
        time.sleep(0.02)


def hold_commits(let_go: Path) -> None:
    """Say when a checkpoint is about to be committed, and commit it once a file exists."""
    held = Lease.held

    @contextlib.contextmanager
    def held_back(lease: Lease) -> Iterator[None]:
        say("committing")
        deadline = time.monotonic() + STAY_S
        while not let_go.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with held(lease):
            yield

    mock.patch.object(Lease, "held", held_back).start()


def reach(sc, phase: str, save_dir: str, clusters: list[TFCluster]) -> None:
    if phase == "reserve":
        occupy(sc)
    if phase in ("reserve", "start"):
        say("ready")
    if phase == "save":
        save_dir = f"{save_dir}-held"
        hold_commits(Path(f"{save_dir}-let-go"))
    config = ClusterConfig(
        max_inflight_bytes=4096,
        slot_settle_s=STAY_S,
        slot_wait_s=STAY_S,
        save_on_interrupt=save_dir,
        abort_s=STAY_S if phase == "save" else 10.0,
    )
    size = 3 if phase == "reserve" else 2  # three do not fit beside what is held
    with TFCluster.reserve(sc, size, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        clusters.append(cluster)
        main_fun, args = MAIN_FUNS.get(phase, (consume, 0.2))
        cluster.start(main_fun, args)
        if phase in ("train", "steps", "save"):
            threading.Thread(target=say_when_busy, args=(cluster,), daemon=True).start()
        if phase == "train":
            cluster.train(sc.parallelize(range(100_000), 4), num_epochs=1)
        elif phase == "shutdown":
            say("ready")
            cluster.shutdown()
        elif phase == "idle":
            say("ready")
        time.sleep(STAY_S)


def play_rounds(sc, phases: Iterable[str], save_dir: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    for line in phases:
        clusters: list[TFCluster] = []
        try:
            reach(sc, line.strip(), save_dir, clusters)
        except KeyboardInterrupt:
            say(f"interrupted {clusters[0].phase.name if clusters else 'NONE'}")
        if signal.getsignal(signal.SIGINT) is not handler:
            say("another handler")
        # The context is still the user's, and works.
        say(f"sum {sc.parallelize(range(10), 2).sum()}")
    sc.stop()


def forget(sc) -> None:
    cluster = TFCluster.reserve(sc, 2, 1, input_mode=InputMode.SPARK)
    cluster.start(consume, 0.2)
    say("pids " + " ".join(str(node.pid) for node in cluster.status().nodes))
    say("ready")


def main(end: str, save_dir: str) -> None:
    conf = pyspark.SparkConf().setMaster("local[4]")
    conf.set("spark.ui.enabled", "false").set("spark.log.level", "ERROR")
    conf.set("spark.ui.showConsoleProgress", "false").set("spark.driver.host", "127.0.0.1")
    sc = pyspark.SparkContext(conf=conf)
    if end == "forget":
        forget(sc)
    else:
        play_rounds(sc, sys.stdin if end == "rounds" else [end], save_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
