"""A real training that another terminal looks at, saves and stops."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.reader import latest
from tests.support.feed import eventually
from tfos import Checkpoints, ClusterConfig, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
EPOCHS = 5000


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
            found: dict[str, Any] = json.loads(tfos("status", "--json").stdout)
            return found

        eventually(lambda: seen()["num_epochs"] > 1, "two epochs", 120.0)
        eventually(lambda: all(rates(seen())), "rates", 60.0)
        before = latest(tmp_path) or 0
        saved = tfos("save")
        assert (saved.returncode, saved.stdout.startswith("the parameters are saved in")) == (
            0,
            True,
        )
        assert (latest(tmp_path) or 0) > before
        page = tfos("page").stdout.strip()
        assert page == cluster.page_url()
        assert tfos("stop").returncode == 0
        end = threading.Thread(target=cluster.shutdown)
        end.start()
        end.join(60.0)
        assert not end.is_alive()
    trained = cluster.results()
    assert trained[0] == trained[1] < EPOCHS
    assert tfos("status").returncode == 2
    history = json.loads(tfos("history", "--json").stdout)
    mine = next(each for each in history if each["cluster_id"] == cluster.cluster_id)
    assert (mine["state"], mine["epochs"]) == ("CLOSED", trained[0])
    assert time.time() - mine["ended_at"] < 120
