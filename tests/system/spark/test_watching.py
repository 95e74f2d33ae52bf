"""A real training that another terminal looks at, saves and stops."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.choice import latest
from tests.support.feed import eventually
from tests.support.page_reader import LOOK_S, PageReader
from tests.support.socket_bytes import process_tcp_bytes
from tfos import Checkpoints, ClusterConfig, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
EPOCHS = 5000
WINDOW_BEATS = 6


def train(args, ctx):
    """Fit for longer than anybody waits; return how many epochs that was."""
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    fit = ctx.distribute(model, consistency="sync").fit(
        x, x[:, 0], batch_size=8, epochs=EPOCHS, verbose=0
    )
    print("trained", len(fit.history["loss"]), "epochs", flush=True)  # noqa: T201
    return len(fit.history["loss"])


def talk(args, ctx):
    """Print until a file exists."""
    ctx.ps_client()
    while not Path(args["end"]).exists():
        print("0.123456789 " * 10, flush=True)  # noqa: T201
        time.sleep(0.01)


def job_of(cluster: TFCluster) -> tuple[str, str]:
    """Return the flag that names a job: this user's other jobs may run on this host as well."""
    return "--job", cluster.cluster_id


def tfos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as another terminal does."""
    command = [sys.executable, "-m", "tfos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def rates(found: dict[str, Any]) -> list[float | None]:
    return [each["steps_per_s"] for each in found["nodes"] if each["server"] is None]


def test_a_training_is_looked_at_saved_and_stopped_by_commands(spark: Any, tmp_path: Path):
    plan = Checkpoints(directory=str(tmp_path), every_s=3600.0)
    cluster = TFCluster.reserve(
        spark, 3, 1, page_port=0, config=ClusterConfig(verbose=False, checkpoints=plan)
    )
    with cluster:
        cluster.start(train)

        def seen() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(tfos("status", "--json", *job_of(cluster)).stdout)
            return found

        eventually(lambda: seen()["num_epochs"] > 1, "two epochs", 120.0)
        eventually(lambda: all(rates(seen())), "rates", 60.0)
        before = latest(tmp_path) or 0
        saved = tfos("save", *job_of(cluster))
        assert (saved.returncode, saved.stdout.startswith("the parameters are saved in")) == (
            0,
            True,
        )
        assert (latest(tmp_path) or 0) > before
        page = tfos("page", *job_of(cluster)).stdout.strip()
        assert page == cluster.page_url()
        assert tfos("stop", *job_of(cluster)).returncode == 0
        end = threading.Thread(target=cluster.shutdown)
        end.start()
        end.join(60.0)
        assert not end.is_alive()
    trained = cluster.results()
    assert trained[0] == trained[1] < EPOCHS
    assert tfos("status", *job_of(cluster)).returncode == 2
    history = json.loads(tfos("history", "--json").stdout)
    mine = next(each for each in history if each["cluster_id"] == cluster.cluster_id)
    assert (mine["state"], mine["epochs"]) == ("CLOSED", trained[0])
    assert time.time() - mine["ended_at"] < 120


def test_who_looks_costs_little_and_who_does_not_costs_nothing(spark: Any, tmp_path: Path):
    cluster = TFCluster.reserve(spark, 2, 1, page_port=0, config=ClusterConfig(verbose=False))
    with cluster:
        cluster.start(talk, {"end": str(tmp_path / "end")})
        page = cluster.page_url()
        assert page is not None
        alone = bytes_of_window(cluster)
        reader, looks = PageReader(page, "worker:0"), []
        reader.look()
        watched = bytes_of_window(cluster, lambda: looks.append(reader.look()), LOOK_S)
        command = [sys.executable, "-m", "tfos", "logs", "-f", "worker:0", *job_of(cluster)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as follower:
            eventually(lambda: process_tcp_bytes(follower.pid) > 10_000, "two looks", 60.0)
            begun = time.monotonic(), process_tcp_bytes(follower.pid)
            followed = bytes_of_window(cluster)
            spent_s = time.monotonic() - begun[0]
            followed_per_s = (process_tcp_bytes(follower.pid) - begun[1]) / spent_s
            follower.send_signal(signal.SIGINT)
        Path(tmp_path, "end").touch()
    per_s = sum(looks) / len(looks) / LOOK_S / 2
    print(f"bytes per s and node: {alone=:.0f} {watched=:.0f} {followed=:.0f}")  # noqa: T201
    print(f"of the page {per_s:.0f}, of logs -f {followed_per_s:.0f}")  # noqa: T201
    assert alone < 1000
    assert max(watched, followed) - alone < 3000
    assert 500 < per_s < 3000
    assert 0 < followed_per_s < 3000


def bytes_of_window(
    cluster: TFCluster, look: Callable[[], object] = lambda: None, every_s: float = math.inf
) -> float:
    """Return the bytes per second and node between the nodes and the driver, over some heartbeats.

    Args:
        cluster: of this host.
        look: what is done during that time.
        every_s: how often.
    """

    def beats() -> int:
        member = cluster._reserved.coordinator.read(lambda state: state.members["worker:0"])
        return 0 if member.heartbeat is None else member.heartbeat.seq

    def num_bytes() -> int:
        return sum(process_tcp_bytes(node.pid) for node in cluster.status().nodes)

    begin_s, before, last = time.monotonic(), num_bytes(), beats() + WINDOW_BEATS
    next_s = begin_s
    while beats() < last:
        assert time.monotonic() < begin_s + 60.0
        if time.monotonic() >= next_s:
            next_s += every_s
            look()
        threading.Event().wait(0.05)
    return (num_bytes() - before) / (time.monotonic() - begin_s) / 2
