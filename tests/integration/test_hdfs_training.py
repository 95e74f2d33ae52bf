"""A whole training on a real HDFS: records, checkpoints, log files, export; then it goes on."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from feeding.filesystem.choose import filesystem_for
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.readahead import ReadAhead
from feeding.tfrecord import RecordReader
from ps.checkpoint_reader import read_manifest
from ps.checkpoint_restore import verify
from scripts.local_hdfs.cluster import LocalHdfs
from tests.spark.test_examples import EXAMPLES, number, submit
from tfos.remote_storage import Storages

STEPS = 63
"""Of an epoch: 4,000 digits in batches of 64, by one worker."""

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(500)]


def test_a_training_on_hdfs_goes_on_in_a_second_run(hdfs: LocalHdfs, tmp_path: Path):
    root = f"{hdfs.url}/{secrets.token_hex(4)}"
    fs = filesystem_for(root)
    storage = Storages()(f"{root}/model/checkpoints")

    def run(epochs: int) -> str:
        flags = ["--model_dir", f"{root}/model", "--export_dir", f"{root}/export", "--tensorboard"]
        flags += ["--cluster_size", "2", "--epochs", str(epochs)]
        return submit(EXAMPLES / "mnist_tf_ds.py", *flags, executors=2, cwd=tmp_path)

    output = run(4)
    accuracy = number(output, r"test accuracy: (0\.\d+)")
    assert accuracy > 0.85
    assert f"model saved: {root}/export/model.keras" in output
    first = read_manifest(storage)
    assert first.step == 4 * STEPS
    assert [name for name in storage.names() if not name.startswith("step-")] == []

    output = run(1)
    assert number(output, r"test accuracy: (0\.\d+)") > accuracy - 0.05  # one epoch alone: 0.8
    second = read_manifest(storage)
    assert second.step == 5 * STEPS
    assert second.job != first.job
    verify(storage, second)
    assert [entry.name for entry in fs.entries(f"{root}/export")] == ["model.keras"]
    events = fs.glob(f"{root}/model/logs/**/*tfevents*")
    runs = [event.path.removeprefix(f"{root}/model/logs/").rpartition("/")[0] for event in events]
    assert sorted(runs) == sorted(2 * ["cluster", "ps-0", "worker-0/train"])
    for event in events:
        with ReadAhead(fs.open(event.path), FileSystemConfig()) as file:
            assert sum(len(block) for block in RecordReader(file, event.path).blocks()) > 1
    assert list(tmp_path.iterdir()) == []
