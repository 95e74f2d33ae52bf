"""Servers and workers that are killed under `fit` of a model with tables: exact, or one sentence.

All of them take minutes: what servers lack and tell is exact in tests/system/keras/
test_embedding_faults.py, and a whole cluster goes on without a server in test_learning.py.
The gradient of a row is -1 for each of its ids, and that of the one dense parameter -1 for each
row of the batch, at rate 1: so both are how often they were trained.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.choice import latest
from tests.support.node_children import child_of
from tests.support.snapshot_skew import torn_by
from tests.support.waiting import wait_until
from tfos import Checkpoints, ClusterConfig, InputMode, NodeFailedError, Restarts, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]

BATCH, STEPS, IDS = 8, 150, 40
START_S = 150.0
"""In which both workers import Keras and trace their first step on a busy machine."""
MODES: dict[str, dict[str, Any]] = {
    "async": {"consistency": "async", "staleness_aware": False},
    "pipeline": {"consistency": "async", "staleness_aware": False, "pipeline": 1},
    "ssp": {"consistency": "ssp", "staleness_bound": 2, "staleness_aware": False},
    "hybrid": {"consistency": "hybrid"},
    "sync": {"consistency": "sync", "reduction": "sum"},
}


def count_rows(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train each batch once; return what the servers have and tell as lost."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfos.keras import Embedding

    class Count(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__(name="count")
            self.rows = Embedding(1, table="user", combiner="sum", initializer="zeros", name="who")
            self.total = self.add_weight(shape=(1,), initializer="zeros", name="total")

        def build(self, shape: Any) -> None:
            self.rows.build(shape)

        def call(self, x: Any) -> Any:
            return self.rows(x) + self.total

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
        ) -> Any:
            return -tf.reduce_sum(y_pred)

    model = Count()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    model(np.zeros((2, 2), "int64"))
    ctx.distribute(model, **args["mode"])
    steps = 0

    def note(batch: int, logs: Any = None) -> None:
        nonlocal steps
        steps += 1
        Path(args["out"], f"stepped-{ctx.rank}-{ctx.attempt}").touch()
        time.sleep(args["step_s"])

    x = np.random.default_rng(ctx.rank).integers(0, IDS, (STEPS * BATCH, 2))
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(x, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])
    client = ctx.ps_client()
    client.rendezvous("trained", b"", timeout_s=120.0)
    groups = client.manifest.pushed_groups
    into = {each.name: np.empty(each.num_elements, each.dtype) for each in groups}
    client.pull(into)
    rows = client.tables.lookup({"user": np.arange(IDS)})["user"]
    (stats,) = client.stats()
    return {
        "steps": steps,
        "attempt": ctx.attempt,
        "total": float(into["trainable"][0]),
        "rows": float(rows.sum()),
        "lost": stats.lost_updates,
        "step": stats.restored_step,
    }


def stepped_again(out: Path) -> None:
    """Wait until both workers have stepped once more."""
    for path in out.glob("stepped-*"):
        path.unlink()
    wait_until(lambda: len(list(out.glob("stepped-*"))) == 2, "steps of both workers", START_S)


@pytest.mark.long
@pytest.mark.fault("F08")
@pytest.mark.fault("F12")
@pytest.mark.fault("F30")
@pytest.mark.parametrize("mode", MODES)
def test_a_server_killed_with_a_checkpoint_lacks_exactly_the_updates_that_it_tells(
    spark: Any, tmp_path: Path, capsys: Any, mode: str
) -> None:
    saves = Checkpoints(directory=str(tmp_path / "saves"), every_s=0.5, keep=100)
    config = ClusterConfig(checkpoints=saves)
    args = {"out": str(tmp_path), "mode": MODES[mode], "step_s": 0.03}
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW, config=config) as cluster:
        cluster.start(count_rows, args)
        wait_until(lambda: (latest(saves.directory) or 0) > 0, "a checkpoint", START_S)
        stepped_again(tmp_path)
        child_of(cluster, "ps:0").send_signal(signal.SIGKILL)
    told = cluster.results()[0]
    said = capsys.readouterr().err
    assert [failure.node.name for failure in cluster.failures] == ["ps:0"]
    assert "started again" in said
    found = re.search(r"ps:0: \d+ s, at least ([\d,]+) updates? lost since step (\d+)", said)
    assert (found is not None) == bool(told["lost"]), said
    assert found is None or int(found[1].replace(",", "")) == told["lost"]
    torn = torn_by(saves.directory, told["step"], 0)
    assert not torn or mode != "sync", told
    kept = 2 * STEPS - told["lost"]
    assert 2 * BATCH * kept <= told["rows"] <= 2 * BATCH * (kept + torn), told
    if mode != "hybrid":  # which takes the workers' mean
        assert BATCH * kept <= told["total"] <= BATCH * (kept + torn), told


@pytest.mark.long
@pytest.mark.fault("F08")
@pytest.mark.parametrize("mode", MODES)
def test_a_server_killed_without_a_checkpoint_is_the_one_failure_in_the_promised_time(
    spark: Any, tmp_path: Path, mode: str
) -> None:
    args = {"out": str(tmp_path), "mode": MODES[mode], "step_s": 0.03}
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW) as cluster:
        cluster.start(count_rows, args)
        stepped_again(tmp_path)
        killed_s = time.monotonic()
        child_of(cluster, "ps:0").send_signal(signal.SIGKILL)
        with pytest.raises(NodeFailedError, match=r"ps:0 .*killed by SIGKILL") as raised:
            cluster.shutdown()
    assert time.monotonic() - killed_s < 40
    assert raised.value.failures[0].node.name == "ps:0"


@pytest.mark.fault("F01")
@pytest.mark.fault("F02")
@pytest.mark.long
@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_killed_with_rows_ahead_holds_up_nobody(
    spark: Any, tmp_path: Path, mode: str, restarts: int
) -> None:
    config = ClusterConfig(restarts=Restarts(workers=restarts))
    args = {"out": str(tmp_path), "mode": MODES[mode], "step_s": 0.03}
    cluster = TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW, config=config)
    with cluster:
        cluster.start(count_rows, args)
        stepped_again(tmp_path)
        child_of(cluster, "worker:1").send_signal(signal.SIGKILL)
    assert [failure.node.name for failure in cluster.failures] == ["worker:1"]
    told = cluster.results(default=None)
    assert told[0]["steps"] == STEPS
    last = told[restarts]  # the new attempt ends after the worker that was there
    if restarts:
        assert (last["attempt"], last["steps"]) == (100, STEPS)
    assert last["rows"] >= 2 * BATCH * (1 + restarts) * STEPS, told
    if mode != "hybrid":  # the push that the kill has cut may be there in part
        assert abs(last["total"] - last["rows"] / 2) <= 2 * BATCH, told
