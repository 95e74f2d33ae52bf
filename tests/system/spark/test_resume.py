"""A cluster that trains from files, fails in the middle, and is followed by one of another size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster
from tfos.errors import NodeFailedError

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
NUM_ROWS, EPOCHS = 200, 3


def count_rows(args, ctx):
    """Add 1 to `w[n]` for each row n that is trained; worker 1 fails in epoch 1 after a save.

    Each worker tells how many steps its first epoch had.
    """
    import time

    import keras
    import numpy as np

    from feeding.formats.tfrecord.example import Feature
    from ps.checkpoint.choice import latest
    from tests.support.counting_loss import Count

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 0:
                Path(f"{args['out']}.{ctx.rank}").write_text(str(batch + 1))
            if (self.epoch, batch) == (1, 4) and args["fails"] and not ctx.is_chief:
                clock = ctx.ps_client().describe()[0].clock
                deadline = time.monotonic() + 60
                while (latest(args["saves"]) or 0) < clock and time.monotonic() < deadline:
                    time.sleep(0.05)
                raise RuntimeError("lost in the middle of epoch 1")

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="w")
    model = keras.Sequential([keras.Input((args["rows"],)), layer], name="count")
    model.compile(keras.optimizers.SGD(1.0), Count())
    ctx.distribute(model, consistency="sync", reduction="sum")
    columns = {"x": Feature("float32", (args["rows"],)), "y": Feature("float32")}
    rows = ctx.read.tfrecord(args["files"], columns)
    if args["equal"]:
        rows = rows.equal_steps()
    rows = rows.shuffled(seed=5, window_rows=30).resumable()
    data = rows.dataset(8, feature_cols="x", label_cols="y")
    model.fit(
        data, epochs=args["epochs"], initial_epoch=rows.first_epoch, callbacks=[Fail()], verbose=0
    )
    counts = np.zeros(args["rows"], np.float32)
    ctx.ps_client().pull({"trainable": counts})
    if ctx.is_chief:
        told = {"first_epoch": rows.first_epoch, "counts": counts.tolist()}
        Path(args["out"]).write_text(json.dumps(told))


@pytest.mark.long
@pytest.mark.parametrize("equal", [False, True])
def test_no_row_is_lost_or_trained_twice_when_another_cluster_goes_on(spark, tmp_path, equal):
    files = tmp_path / "files"
    files.mkdir()
    for part in range(4):
        with (files / f"part-{part}").open("wb") as file:
            writer = RecordWriter(file)
            for n in range(part, NUM_ROWS, 4):
                x = [float(n == other) for other in range(NUM_ROWS)]
                pad = "x" * 4000 * (part == 0)  # then equal bytes are unequal rows
                writer.write(encode_example({"x": x, "y": 0.0, "pad": pad}))
    saves = str(tmp_path / "saves")
    config = ClusterConfig(checkpoints=Checkpoints(directory=saves, every_s=0.2, resume=True))
    out = tmp_path / "told.json"
    args = {"files": str(files), "saves": saves, "rows": NUM_ROWS, "epochs": EPOCHS, "fails": True}
    args |= {"out": str(out), "equal": equal}
    with (
        pytest.raises(NodeFailedError, match="lost in the middle of epoch 1"),
        TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW, config=config) as cluster,
    ):
        cluster.start(count_rows, args)
    steps = [int((tmp_path / f"told.json.{worker}").read_text()) for worker in range(2)]
    assert (steps == [NUM_ROWS // 2 // 8 + 1] * 2) is equal
    with TFCluster.reserve(spark, 2, 1, input_mode=InputMode.TENSORFLOW, config=config) as cluster:
        cluster.start(count_rows, {**args, "fails": False})
    told = json.loads(out.read_text())
    assert told["first_epoch"] == 1
    assert told["counts"] == [EPOCHS] * NUM_ROWS
