"""A whole training on a real HDFS: records, checkpoints, log files, export; then it goes on."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest

from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import filesystem_for
from feeding.formats.tfrecord.framing import RecordReader
from ps.checkpoint.choice import read_manifest
from ps.checkpoint.restore import verify
from scripts.local_hdfs.cluster import LocalHdfs
from tests.support.spark_submit import EXAMPLES, submit
from tfos.files.checkpoint_storage import Storages

STEPS = 63
"""Of an epoch: 4,000 digits in batches of 64, by one worker."""

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(500)]


def test_a_training_on_hdfs_goes_on_in_a_second_run(hdfs: LocalHdfs, tmp_path: Path):
    root = f"{hdfs.url}/{secrets.token_hex(4)}"
    model = f"{root}/model"
    flags = [str(EXAMPLES / "mnist_tf_ds.py"), model, "--export_dir", f"{root}/export"]
    twice = Path(__file__).parents[2] / "support" / "programs" / "runs_twice.py"
    flags += ["--cluster_size", "2"]
    # Threads: executors of their own, which other tests have, would be four more JVMs.
    output = submit(twice, *flags, master="local[2]", cwd=tmp_path, timeout_s=450)

    accuracies = [float(found) for found in re.findall(r"test accuracy: (\d\.\d+)", output)]
    assert len(accuracies) == 2, output[-8000:]
    assert accuracies[0] > 0.8
    assert accuracies[1] > accuracies[0] - 0.03  # one epoch alone: less than 0.8
    assert output.count(f"model saved: {root}/export/model.keras") == 2

    storage = Storages()(f"{model}/checkpoints")
    newest = read_manifest(storage)
    assert newest.step == 3 * STEPS  # the second run has made one epoch
    verify(storage, newest)
    assert [name for name in storage.names() if not name.startswith("step-")] == []

    fs = filesystem_for(root)
    assert [entry.name for entry in fs.entries(f"{root}/export")] == ["model.keras"]
    events = fs.glob(f"{model}/logs/**/*tfevents*")
    runs = [event.path.removeprefix(f"{model}/logs/").rpartition("/")[0] for event in events]
    assert sorted(runs) == sorted(2 * ["cluster", "ps-0", "worker-0/train"])
    for event in events:
        with ReadAhead(fs.open(event.path), FileSystemConfig()) as file:
            assert sum(len(block) for block in RecordReader(file, event.path).blocks()) > 1
    assert list(tmp_path.iterdir()) == []
