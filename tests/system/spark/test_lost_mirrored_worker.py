"""A program of MultiWorkerMirroredStrategy that says nothing of it, and loses a worker."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.node_children import child_of
from tests.support.waiting import JVM_PAUSE_S, wait_until
from tfos import ClusterConfig, Restarts, TFCluster
from tfos.errors import NodeFailedError

TOLD_S = 15.0
"""From the kill to the exception; docs/faults.md promises it."""
STARTED_S = 120.0
_wait = partial(wait_until, timeout_s=STARTED_S, pause_s=JVM_PAUSE_S)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.tf,
    pytest.mark.long,
    pytest.mark.fault("F02"),
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


def sum_for_ever(out: str, ctx: Any) -> None:
    """Sum over all workers until one is missing; count the sums in a file."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function(autograph=False)
    def total():
        own = strategy.run(lambda: tf.constant(1.0))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, own, axis=None)

    done = 0
    while True:  # its neighbour in TensorFlow's ring raises, others wait
        assert float(total()) == ctx.num_workers
        done += 1
        Path(out, f"new-{ctx.rank}").write_text(str(done))
        os.replace(Path(out, f"new-{ctx.rank}"), Path(out, f"sums-{ctx.rank}"))


def build_late(out: str, ctx: Any) -> None:
    """Build the strategy on the chief alone, where it waits for a worker that is gone."""
    Path(out, f"here-{ctx.rank}").touch()
    while not Path(out, "build").exists():
        time.sleep(0.05)
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("restarts", [0, 2])
def test_the_others_do_not_wait_for_a_lost_worker(
    spark: Any, tmp_path: Path, restarts: int
) -> None:
    config = ClusterConfig(restarts=Restarts(workers=restarts))
    with TFCluster.reserve(spark, 3, num_ps=0, config=config) as cluster:
        cluster.start(sum_for_ever, str(tmp_path))
        _wait(lambda: len(list(tmp_path.glob("sums-*"))) == 3, "a sum on every worker")
        os.kill(child_of(cluster, "worker:1").pid, signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(NodeFailedError) as caught:
            cluster.shutdown(timeout=60)
        told_s = time.monotonic() - killed_s
    text = str(caught.value)
    print(f"told after {told_s:.1f} s: {text}")  # noqa: T201
    assert "worker:1" in text.splitlines()[0]
    assert "killed by SIGKILL" in text
    assert "MultiWorkerMirroredStrategy cannot go on without one of its workers" in text
    assert told_s < TOLD_S


def test_a_worker_that_was_lost_before_the_strategy_is_missed_when_it_is_built(
    spark: Any, tmp_path: Path
) -> None:
    with TFCluster.reserve(spark, 3, num_ps=0) as cluster:
        cluster.start(build_late, str(tmp_path))
        _wait(lambda: len(list(tmp_path.glob("here-*"))) == 3, "main_fun on every worker")
        os.kill(child_of(cluster, "worker:1").pid, signal.SIGKILL)
        _wait(lambda: _status(cluster, "worker:1") == "lost", "worker:1 is lost")
        (tmp_path / "build").touch()
        with pytest.raises(NodeFailedError) as caught:
            cluster.shutdown(timeout=60)
    text = str(caught.value)
    print(text)  # noqa: T201
    assert "worker:1" in text.splitlines()[0]
    assert "MultiWorkerMirroredStrategy cannot go on without one of its workers" in text


def _status(cluster: TFCluster, name: str) -> str:
    (node,) = (node for node in cluster.status().nodes if node.name == name)
    return node.status
