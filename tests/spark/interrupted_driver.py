"""A driver program for test_driver_interrupt.py: reaches a phase, says so, and stays there.

Usage: interrupted_driver.py PHASE END, where PHASE is `idle`, `train` or `shutdown`, and
END is `wait`, `forget` or `stop-context`.
"""

from __future__ import annotations

import sys
import threading
import time

import pyspark

from tfos import ClusterConfig, InputMode, TFCluster
from tfos.errors import NodeFailedError


def consume(args, ctx):
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(1)
        time.sleep(args)


def linger(args, ctx):
    time.sleep(60)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # the test reads it


def say_when_fed(cluster: TFCluster) -> None:
    deadline = time.monotonic() + 60
    while not any(node.rows for node in cluster.status().nodes):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    say("ready")


def stop_context(sc, cluster: TFCluster) -> None:
    sc.stop()
    try:
        cluster.shutdown(timeout=30)
    except NodeFailedError as error:
        say(f"stopped {error}".replace("\n", " "))


def main(phase: str, end: str) -> None:
    conf = pyspark.SparkConf().setMaster("local[4]")
    conf.set("spark.ui.enabled", "false").set("spark.log.level", "ERROR")
    conf.set("spark.ui.showConsoleProgress", "false").set("spark.driver.host", "127.0.0.1")
    sc = pyspark.SparkContext(conf=conf)
    config = ClusterConfig(max_inflight_bytes=4096)
    cluster = TFCluster.reserve(sc, 3, 1, input_mode=InputMode.SPARK, config=config)
    try:
        cluster.start(linger if phase == "shutdown" else consume, 0.2)
        say("pids " + " ".join(str(node.pid) for node in cluster.status().nodes))
        if end == "forget":
            say("ready")
            return
        if end == "stop-context":
            stop_context(sc, cluster)
            return
        with cluster:
            if phase == "train":
                threading.Thread(target=say_when_fed, args=(cluster,), daemon=True).start()
                cluster.train(sc.parallelize(range(100_000), 4), num_epochs=1)
            elif phase == "shutdown":
                say("ready")
                cluster.shutdown()
            else:
                say("ready")
                time.sleep(60)
    except KeyboardInterrupt:
        say(f"interrupted {cluster.phase.name}")
        # The context is still the user's, and works.
        say(f"sum {sc.parallelize(range(10), 2).sum()}")
        sc.stop()
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
